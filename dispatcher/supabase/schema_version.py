"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 40
FINGERPRINT: Final = "ca182eac3ddf531cc48224e8c039d1d189a345d7d0a2a05bc4d0190bc6f6f040"
