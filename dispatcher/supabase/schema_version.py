"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 15
FINGERPRINT: Final = "8cd0095d26c325b712c302be76b0e27bea5caa732352013718f4efa423c98691"
