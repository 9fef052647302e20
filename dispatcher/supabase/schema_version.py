"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 45
FINGERPRINT: Final = "6da32d8ea2a2314f71a2cb1ed8b6c3f7ee528796166f9d63de8a9e6271939130"
