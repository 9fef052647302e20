"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 53
FINGERPRINT: Final = "22e01aa86747a83b2b3cda115eabb4b16b8acedfbb6d0c2bbdc8e7856daf6b9c"
