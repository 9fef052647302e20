"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 60
FINGERPRINT: Final = "7461e30739febca303fd898a92b4d191030a35de28d28d9cdfc568e902bf89ae"
