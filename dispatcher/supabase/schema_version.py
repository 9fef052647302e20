"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 36
FINGERPRINT: Final = "6c1f84f78eec369f6f1885694b115208b41b58421791e0b6774e8fffc56a7d8f"
