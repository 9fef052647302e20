"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 48
FINGERPRINT: Final = "524df00640136876902221fae7afe06dc74b9ee470b0a54b744ca32091eb968d"
