"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 61
FINGERPRINT: Final = "93b863d119e85bb87382816d67029db8fd4256db95339039092d9a4a256159fd"
