"""Wakes OpenClaw agents when there is work for them in Supabase, and only then."""

__version__ = "0.1.0"
