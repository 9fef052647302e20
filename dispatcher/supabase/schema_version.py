"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 7
FINGERPRINT: Final = "f5dc2925877d79a09577ef13b6dd96d0087a51094111444290c946c3b4aca3cb"
