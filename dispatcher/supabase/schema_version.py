"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 62
FINGERPRINT: Final = "0a90bb0935af8f23c5114e5e135567d5bb1e223991a761acf821f1964d799d95"
