"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 35
FINGERPRINT: Final = "108ce6dd02f0239cf71b86f716c35190a6bef81fb26ed869730a5911618db278"
