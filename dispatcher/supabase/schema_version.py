"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 10
FINGERPRINT: Final = "cfa206aee82c058acdc535f98018434dd3d69f0c9d69cc876abce119a98e4e64"
