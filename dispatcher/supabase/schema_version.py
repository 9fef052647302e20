"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 47
FINGERPRINT: Final = "ed654a09c9cf0853a5cba105f9baacd26e5fe6f0361a0ec3a2addd6d0ceb1e09"
