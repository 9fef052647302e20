"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 56
FINGERPRINT: Final = "afd53215a5e4cd6cd2b6a16efb0123ffa7dcb9c8266023cabfe17f031624a03b"
