"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = 53
FINGERPRINT: Final = "d41acbdd47b2e921854f32d86ac0a5d3e01115c0b2c5aace4acc22840e85fe72"
