"""The settings that the workflow functions read, as the instance's row keeps them."""

from __future__ import annotations

from typing import Final

from dispatcher.config import Settings

WORKFLOW_SETTINGS: Final = (
    "workflow_batch_size",
    "stale_dispatch_seconds",
    "max_dispatch_retries",
    "stale_claim_seconds",
    "workflow_cost_estimate_usd",
    "workflow_token_estimate",
)


def workflow_settings(settings: Settings) -> dict[str, object]:
    """Name to value, as JSON takes it."""
    return {name: getattr(settings, name) for name in WORKFLOW_SETTINGS}
