"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 9
FINGERPRINT: Final = "6c1eb4a5b780f03ce9ff1224d5579a9b6ec749b962990b3263e81af7983ffb21"
