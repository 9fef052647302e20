"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 53
FINGERPRINT: Final = "bc6a78306a0309bf233c14259375b2f85389eb567d7faf3cc55e18bed4ba43f7"
