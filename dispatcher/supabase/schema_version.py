"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 22
FINGERPRINT: Final = "3a1642b8e5208aeebde3d60ac2d791a0e289d87f35d356ce5431ff0fcc0dbf9f"
