"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 46
FINGERPRINT: Final = "6d4becaffa90ce8bcf6386cc3645db47ce39c81bee3e82db1dca373222eb1af1"
