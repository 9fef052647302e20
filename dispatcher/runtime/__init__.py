"""The mechanics of a daemon: services and their group, signals, wakeups, due times, backoff, health.

Knows nothing of Supabase or of agents.
"""
