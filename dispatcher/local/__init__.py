"""The embedded Supabase: a real PostgreSQL and PostgREST, the project's own Realtime, one URL in front."""
