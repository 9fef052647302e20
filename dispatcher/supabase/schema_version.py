"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 41
FINGERPRINT: Final = "8b6f792e5f96f62835210e801f45b65f06ccd2fbac2219ef6034761fac6e0e57"
