"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 24
FINGERPRINT: Final = "ba10c183573076743210ee7a4849aab89c6a7955e2de38f354130a9f244d4912"
