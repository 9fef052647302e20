"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 37
FINGERPRINT: Final = "758d878a0483906af5e7dcb8fdcb2c88bc01940832197d0e71b6951bb7deebd3"
