"""Values as Elixir's `inspect` writes them: the real server puts them into its error messages."""

import json
from typing import Any


def inspect(value: Any) -> str:
    """The Elixir literal of a JSON value: maps with sorted keys, `nil` for null."""
    if value is None:
        return "nil"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "%{" + ", ".join(f"{inspect(key)} => {inspect(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(inspect(item) for item in value)
        return "{" + inner + "}" if isinstance(value, tuple) else "[" + inner + "]"
    return str(value)
