"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 14
FINGERPRINT: Final = "b22f739474fe2141b1a6e93ce1d0cb98c1694858ed778cf0e2c4cced129620a7"
