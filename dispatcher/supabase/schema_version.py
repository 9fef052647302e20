"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 11
FINGERPRINT: Final = "d55116c809312ac3cfc8b418dc902a9f2460465017442aba3e85419e1e9f7f3a"
