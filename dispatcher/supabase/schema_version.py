"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 54
FINGERPRINT: Final = "7620ec34164b9590846111c25d19074e8dd104cd9e32a4cc00973d767bdc4212"
