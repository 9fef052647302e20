"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 8
FINGERPRINT: Final = "7cf547e1ad3ad45b40d132109a590926e7463d555daa2087bf62ea90fd09958e"
