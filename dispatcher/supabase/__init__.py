"""Everything that speaks to Supabase: REST, Realtime, migrations."""
