"""The settings that the wake functions read, as the instance's row keeps them."""

from __future__ import annotations

from typing import Final

from dispatcher.config import Settings

WAKE_SETTINGS: Final = (
    "wake_cooldown",
    "max_wake_cooldown",
    "max_consecutive_failures",
    "max_concurrent_wakes",
    "agent_process_timeout",
    "stale_item_age_hours",
    "lease_seconds",
    "max_wake_chain",
    "max_wakes_per_day",
    "alert_wakes_per_hour",
    "instance_timeout",
)


def wake_settings(settings: Settings) -> dict[str, object]:
    """Name to value, as JSON takes it."""
    return {name: getattr(settings, name) for name in WAKE_SETTINGS}
