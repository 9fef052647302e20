"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 39
FINGERPRINT: Final = "db37ca2ce0f21650a84baebaaf842c02422713410a21e45b917b33ca15e22288"
