"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 52
FINGERPRINT: Final = "7738f718c5537b03fe91e306415efbd37d73bde2974c68a492ca20a497424efb"
