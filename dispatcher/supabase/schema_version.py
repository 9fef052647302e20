"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 59
FINGERPRINT: Final = "194d217632667cab511d38e1206d75dcff662eeead3dabe5961c7203388a1d52"
