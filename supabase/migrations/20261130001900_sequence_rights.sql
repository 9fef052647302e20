-- Default privileges of a Supabase project open sequences to anon and authenticated by name, too: one set back makes
-- every later insert into its table fail.
do $$
declare
  v_table text;
begin
  foreach v_table in array array['workflow_run_events', 'workflow_audit_log', 'budget_events'] loop
    execute format('revoke all on sequence %s from public, anon, authenticated', pg_get_serial_sequence('public.' || v_table, 'id'));
    execute format('grant usage, select on sequence %s to service_role', pg_get_serial_sequence('public.' || v_table, 'id'));
  end loop;
end
$$;

notify pgrst, 'reload schema';
