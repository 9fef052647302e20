"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 19
FINGERPRINT: Final = "bf7d3b4a9e0ac12ebc6c5e3b3d4a871a9062ecd073d079bc329a9ccd54626da9"
