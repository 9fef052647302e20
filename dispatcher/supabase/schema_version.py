"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 18
FINGERPRINT: Final = "65e94103d3b84f1f977b77f17b728a562c6f858007fc7ddd29da2596ecb6f010"
