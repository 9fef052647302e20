"""Setting the fault switches, without a server."""

import json

import pytest

from dispatcher.local.realtime import Faults


@pytest.mark.parametrize(
    "changes",
    [{"nonsense": True}, {"silence": 1}, {"drop_events": True}, {"close": "1000"}, {"delay_events": "1"}],
)
def test_update_refuses_what_it_does_not_know_and_changes_nothing(changes: dict[str, object]) -> None:
    faults = Faults()
    with pytest.raises(ValueError, match=next(iter(changes))):
        faults.update({"silence": True, **changes} if "silence" not in changes else changes)
    assert faults == Faults()


def test_state_is_plain_json_and_can_be_cleared() -> None:
    faults = Faults()
    state = faults.update({"silence": True, "refuse_join": "no", "delay_events": 1})
    assert json.loads(json.dumps(state))["refuse_join"] == "no"
    faults.clear()
    assert faults.as_dict() == Faults().as_dict()
