"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 51
FINGERPRINT: Final = "be2f2a9e69be1156e8b5f211fad4a9e4c24aba739d1a956ae4e6071a8e17064d"
