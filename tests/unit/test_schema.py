"""What the daemon makes of the schema it finds."""

import pytest

from dispatcher.errors import MigrationsMissing
from dispatcher.instance.model import Schema
from dispatcher.instance.schema import difference, refuse_older
from dispatcher.supabase.schema_version import FINGERPRINT, REVISION


def test_c06_an_older_schema_is_refused_with_both_revisions() -> None:
    with pytest.raises(
        MigrationsMissing, match=f"revision {REVISION - 1} .* needs {REVISION}: run `dispatcher migrate"
    ):
        refuse_older(Schema(REVISION - 1, FINGERPRINT, ()))


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (Schema(REVISION, FINGERPRINT, ()), None),
        (Schema(REVISION + 1, "other", ()), "newer than"),
        (Schema(REVISION, FINGERPRINT, ("table public.a missing",)), "(table public.a missing): run"),
        (Schema(REVISION, FINGERPRINT, ("x",) * 20), "(x, x, x, x, x, …)"),
        (Schema(REVISION, "other", ()), "another build"),
    ],
)
def test_c06_any_other_difference_is_told(schema: Schema, told: str | None) -> None:
    refuse_older(schema)
    text = difference(schema)
    assert text is None if told is None else text is not None and told in text
