"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 30
FINGERPRINT: Final = "6728a8032cc23d3f5b2a095b0a3ad65560e1449605df599b5831a0061a35afd4"
