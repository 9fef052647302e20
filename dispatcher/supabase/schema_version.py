"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 32
FINGERPRINT: Final = "bb518527281b2df11498e5c79e51012675742f2dedd88f1f83ced715c12b6d33"
