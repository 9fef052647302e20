"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 39
FINGERPRINT: Final = "acf48c2a7aec869faed6351f809cc98e4a5f6c94f2f546c761b45538abdf1ada"
