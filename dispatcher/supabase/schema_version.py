"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 58
FINGERPRINT: Final = "12dca4ec99a411bfe1c36a8e6b5fd2ce01e3c17959e09acae532e5e2a9dae81f"
