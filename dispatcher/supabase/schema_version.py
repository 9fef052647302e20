"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 38
FINGERPRINT: Final = "91671987a7511f7831925fcd5019e137d66dbf544c072fa365ef834dc1e0fa61"
