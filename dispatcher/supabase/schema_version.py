"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 49
FINGERPRINT: Final = "827704260f4e577fb4a68c5d86b84bdceb97fa2e891c32415622914f1f2f9729"
