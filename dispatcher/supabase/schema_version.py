"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 50
FINGERPRINT: Final = "4fce63dc3f9de59a93640bb90e59433d2bc7a921ccce8842dd525458339b6a09"
