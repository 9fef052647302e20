"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 29
FINGERPRINT: Final = "c8460fb31a18676f506647be0fed3841a54743c09563dfd1dc7a8b3bee32e9aa"
