"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 16
FINGERPRINT: Final = "de6826511818c11a44cfd057edd99defc724504431c353467b53c90a8a20629e"
