"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 17
FINGERPRINT: Final = "fbc033a923c778707d3f513f1a7b890b60a4d2295d10b39ff0ed6add9fdcef36"
