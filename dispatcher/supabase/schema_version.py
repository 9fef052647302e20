"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 34
FINGERPRINT: Final = "4bdd7a0ca538495237b91db75aafff6ffdfd3e8a31226d6a021aab4c766d2239"
