-- Default privileges of a Supabase project grant execute to anon and authenticated by name: revoking from public is not enough.
do $$
declare
  v_function record;
begin
  for v_function in
    select oid::regprocedure as signature from pg_proc
     where pronamespace = 'public'::regnamespace
       and proname in ('workflow_timeout_minutes', 'guard_workflow_transition', 'complete_workflow_row', 'prepare_workflow_run', 'record_workflow_transition',
                       'refuse_workflow_event_change', 'note_workflow_actor', 'hint_workflow_daemons', 'hint_workflow_insert', 'hint_workflow_update',
                       'hint_workflow_rules', 'workflow_run_json', 'workflow_answer', 'lock_workflow_run', 'workflow_claim_state', 'end_workflow_claim',
                       'settle_workflow_claim', 'poll_workflow_runs', 'claim_workflow_run', 'workflow_usage_values', 'book_workflow_usage', 'book_lost_claim_usage',
                       'refuse_workflow_caller', 'note_wake_progress', 'start_workflow_run', 'heartbeat_workflow_run', 'report_workflow_usage',
                       'finish_workflow_run', 'complete_workflow_run', 'fail_workflow_run', 'return_workflow_run', 'release_workflow_run',
                       'audit_workflow_action', 'enqueue_workflow_run', 'stop_workflow_run', 'cancel_workflow_run', 'retry_workflow_run',
                       'list_workflow_runs', 'show_workflow_run', 'set_workflow_route', 'remove_workflow_route', 'seed_workflow_routes',
                       'workflow_period', 'workflow_estimates', 'workflow_estimate', 'workflow_spend', 'budget_periods', 'evaluate_budgets', 'tight_budgets', 'budget_states',
                       'is_in_budget_scope', 'budget_verdict', 'reserve_in_budgets', 'budget_frame', 'broadcast_budget_event', 'record_budget_event',
                       'record_budget_recoveries', 'stop_runs_of_budget', 'tell_budget_event', 'enforce_budgets', 'set_budget', 'deactivate_budget', 'list_budgets',
                       'budget_ledger', 'workflow_settings', 'workflow_age_points', 'gateway_of_workflow_agent', 'dispatch_workflow_run',
                       'waiting_workflow_groups', 'note_held_runs', 'budget_holds', 'dispatch_queued_runs', 'retry_stale_dispatches', 'time_out_runs',
                       'release_stale_claims', 'mark_unrouted_runs', 'prune_workflow_rows', 'wakes_to_stop', 'next_workflow_moment',
                       'dispatch_workflows', 'workflow_stats', 'claim_workflow_notifications', 'finish_workflow_notifications',
                       'orphan_after_seconds', 'monitor_workflows', 'respawn_workflow_run')
  loop
    execute format('revoke execute on function %s from public, anon, authenticated', v_function.signature);
    execute format('grant execute on function %s to service_role', v_function.signature);
  end loop;
end
$$;

notify pgrst, 'reload schema';
