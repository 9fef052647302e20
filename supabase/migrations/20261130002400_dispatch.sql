-- The tick: everything that moves runs without being asked by their agents, in one call, phase by phase, each isolated.
-- One pass at a time per tenant (an advisory lock that is tried, never waited for); routes are locked before anything is counted.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.workflow_settings(p_settings jsonb) returns jsonb
language sql immutable set search_path = ''
as $$
  select jsonb_build_object('workflow_batch_size', 10, 'stale_dispatch_seconds', 300, 'max_dispatch_retries', 3, 'stale_claim_seconds', 600)
         || jsonb_strip_nulls(coalesce(p_settings, '{}'))
$$;
comment on function dispatcher.workflow_settings(jsonb) is 'The settings of a tick, defaults filled in.';

create or replace function dispatcher.workflow_age_points(p_queued_at timestamptz, p_now timestamptz) returns integer
language sql immutable set search_path = ''
as $$ select least(1000000, floor(power(greatest(0, extract(epoch from p_now - p_queued_at)) / 600, 2)))::integer $$;
comment on function dispatcher.workflow_age_points(timestamptz, timestamptz) is
  'How much waiting adds to the priority of a run, and to its route''s: the square of every ten minutes, so 1 after 10 minutes, 36 after an hour, 20736 after a day. Nothing starves.';

create or replace function dispatcher.gateway_of_workflow_agent(p_tenant_id uuid, p_agent_id text) returns uuid
language sql stable set search_path = ''
as $$
  select coalesce((select agent.gateway_id from public.agents as agent where agent.tenant_id = p_tenant_id and agent.slug = p_agent_id),
                  (select (array_agg(gateway.id))[1] from public.gateways as gateway where gateway.tenant_id = p_tenant_id having count(*) = 1))
$$;
comment on function dispatcher.gateway_of_workflow_agent(uuid, text) is 'The gateway of an agent by slug; the tenant''s only gateway for an agent without a row; else NULL.';

create or replace function dispatcher.dispatch_workflow_run(p_run_id uuid, p_agent_id text, p_usd numeric, p_tokens numeric) returns void
language plpgsql volatile set search_path = ''
as $$
begin
  with dispatched as (
    update public.workflow_runs
       set status = 'dispatched', owner_agent_id = p_agent_id, dispatched_at = now(), dispatch_attempts = dispatch_attempts + 1, reserved_usd = p_usd,
           reserved_tokens = p_tokens, next_attempt_at = null, blocker_type = null, blocker_description = null
     where id = p_run_id returning id, tenant_id, dispatch_attempts)
  insert into public.workflow_notifications (tenant_id, run_id, attempt, agent_id, gateway_id)
  select tenant_id, id, dispatch_attempts, p_agent_id, dispatcher.gateway_of_workflow_agent(tenant_id, p_agent_id) from dispatched
  on conflict (run_id, attempt) do nothing;
end
$$;
comment on function dispatcher.dispatch_workflow_run(uuid, text, numeric, numeric) is
  'Hands a run to an agent: one update, with its reservation, and the notification that is owed for it.';

create or replace function dispatcher.waiting_workflow_groups(p_tenant_id uuid, p_estimates jsonb, p_budgets jsonb) returns jsonb
language sql stable set search_path = ''
as $$
  select coalesce(jsonb_agg(jsonb_build_object(
           'workflow_type', waiting.workflow_type, 'pinned', waiting.pinned_agent_id, 'agent_id', waiting.agent_id, 'department_id', waiting.department_id,
           'due', waiting.due, 'oldest', waiting.oldest, 'priorities', waiting.priorities, 'route_priority', waiting.priority, 'slots', waiting.slots, 'usd', waiting.usd, 'tokens', waiting.tokens,
           'verdict', gate.verdict, 'holders', gate.holders)), '[]')
    from (
      select queued.workflow_type, queued.pinned_agent_id, queued.due, queued.oldest, queued.priorities, coalesce(queued.pinned_agent_id, route.agent_id) as agent_id, profile.department_id,
             coalesce(route.priority, 0) as priority, coalesce(route.max_concurrent, 1) - coalesce(active.number, 0) as slots,
             dispatcher.workflow_estimate(p_estimates, queued.workflow_type, 'usd') as usd, dispatcher.workflow_estimate(p_estimates, queued.workflow_type, 'tokens') as tokens
        from (select level.workflow_type, level.pinned_agent_id, sum(level.due) as due, min(level.oldest) as oldest, jsonb_agg(level.priority) as priorities
                from (select run.workflow_type, run.pinned_agent_id, run.priority, count(*) as due, min(run.queued_at) as oldest from public.workflow_runs as run
                       where run.tenant_id = p_tenant_id and run.status = 'queued' and (run.next_attempt_at is null or run.next_attempt_at <= now())
                       group by run.workflow_type, run.pinned_agent_id, run.priority) as level
               group by level.workflow_type, level.pinned_agent_id) as queued
        left join public.workflow_agent_routing as route on route.tenant_id = p_tenant_id and route.workflow_type = queued.workflow_type
        left join public.agent_profiles as profile on profile.tenant_id = p_tenant_id and profile.agent_id = coalesce(queued.pinned_agent_id, route.agent_id)
        left join (select run.workflow_type, count(*) as number from public.workflow_runs as run
                    where run.tenant_id = p_tenant_id
                      -- A held run keeps its slot: it returns to it whenever it is let go.
                      and (run.status in ('dispatched', 'claimed', 'running') or run.paused_from in ('dispatched', 'claimed', 'running'))
                    group by run.workflow_type) as active on active.workflow_type = queued.workflow_type
       where coalesce(queued.pinned_agent_id, route.agent_id) is not null and coalesce(route.max_concurrent, 1) > 0) as waiting
    cross join lateral dispatcher.budget_verdict(p_budgets, waiting.agent_id, waiting.department_id, waiting.workflow_type, waiting.usd, waiting.tokens) as gate
$$;
comment on function dispatcher.waiting_workflow_groups(uuid, jsonb, jsonb) is
  'The due queue by type and agent, each group with its free slots, its estimate and its budgets'' verdict: all runs of a group are equal before both.';

create or replace function dispatcher.note_held_runs(p_tenant_id uuid, p_budgets jsonb, p_holders uuid[]) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_budget jsonb;
begin
  for v_budget in
    select b.value from jsonb_array_elements(p_budgets) as b
     where (b.value ->> 'id')::uuid = any (p_holders) and b.value ->> 'period_key' is not null and b.value ->> 'action' in ('pause_new_runs', 'hard_stop')
  loop
    perform dispatcher.record_budget_event(p_tenant_id, v_budget, 'paused', '{}');
  end loop;
exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
  raise;
when others then
  -- Telling must not stop dispatch; the enforcement phase reports what is wrong.
  raise warning 'budget event not written: %', sqlerrm;
end
$$;
comment on function dispatcher.note_held_runs(uuid, jsonb, uuid[]) is
  'A budget whose rest is too small for the next run is paused as well, also one that would stop runs once it is spent: its event, once per period.';

create or replace function dispatcher.budget_holds(p_budgets jsonb, p_groups jsonb) returns jsonb
language sql stable set search_path = ''
as $$
  select coalesce(jsonb_object_agg(held.workflow_type, held.names), '{}')
    from (select g.workflow_type, jsonb_agg(distinct b.value ->> 'name') as names
            from jsonb_to_recordset(p_groups) as g (workflow_type text, holders uuid[])
            join jsonb_array_elements(p_budgets) as b on (b.value ->> 'id')::uuid = any (g.holders)
           group by g.workflow_type) as held
$$;
comment on function dispatcher.budget_holds(jsonb, jsonb) is 'Of groups {workflow_type, holders}: the names of the budgets that hold each type.';

create or replace function dispatcher.dispatch_queued_runs(p_tenant_id uuid, p_settings jsonb, p_estimates jsonb, p_budgets jsonb) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_batch constant integer := (p_settings ->> 'workflow_batch_size')::integer;
  v_groups jsonb;
  v_candidate record;
  v_gate record;
  v_taken jsonb := '{}';
  v_closed text[] := '{}';
  v_number integer := 0;
  v_held integer;
  v_warned integer := 0;
  v_errors jsonb := '[]';
begin
  perform dispatcher.note_workflow_actor('dispatcher', 'dispatched');
  select 'ok' as verdict, '{}'::uuid[] as holders, 0 as warned into v_gate;
  -- Locked before they are counted: a pass that waited here counts what the other one did.
  perform from public.workflow_agent_routing where tenant_id = p_tenant_id order by workflow_type for update;
  v_groups := dispatcher.waiting_workflow_groups(p_tenant_id, p_estimates, p_budgets);
  select coalesce(sum(g.due), 0) into v_held from jsonb_to_recordset(v_groups) as g (due integer, verdict text) where g.verdict <> 'ok';
  for v_candidate in
    select g.workflow_type, g.agent_id, g.department_id, g.slots, g.usd, g.tokens, g.due, pick.id
      from jsonb_to_recordset(v_groups) as g (workflow_type text, pinned text, agent_id text, department_id text, due integer, oldest timestamptz, priorities jsonb,
                                              route_priority integer, slots integer, usd numeric, tokens numeric, verdict text)
      cross join lateral jsonb_array_elements_text(g.priorities) as level
      -- Of one priority the oldest goes first whatever waiting adds, so the oldest few of each are all that can go out.
      cross join lateral (
        select run.id, run.priority, run.queued_at from public.workflow_runs as run
         where run.tenant_id = p_tenant_id and run.workflow_type = g.workflow_type and run.priority = level.value::integer and run.status = 'queued'
           and run.pinned_agent_id is not distinct from g.pinned and (run.next_attempt_at is null or run.next_attempt_at <= now())
         order by run.queued_at
         limit least(g.slots, v_batch) + 20) as pick
     where g.verdict = 'ok' and g.slots > 0
     -- A group ages as its oldest run does, and its runs among themselves: minutes of waiting must not outweigh what a run is worth.
     order by g.route_priority::bigint + dispatcher.workflow_age_points(g.oldest, now()) desc,
              pick.priority::bigint + dispatcher.workflow_age_points(pick.queued_at, now()) desc, pick.queued_at, pick.id
  loop
    exit when v_number >= v_batch;
    continue when coalesce((v_taken ->> v_candidate.workflow_type)::integer, 0) >= v_candidate.slots
               or concat_ws('|', v_candidate.workflow_type, v_candidate.agent_id) = any (v_closed);
    begin
      if p_budgets <> '[]' then
        select * into v_gate from dispatcher.budget_verdict(p_budgets, v_candidate.agent_id, v_candidate.department_id, v_candidate.workflow_type,
                                                        v_candidate.usd, v_candidate.tokens);
      end if;
      if v_gate.verdict <> 'ok' then
        v_closed := v_closed || concat_ws('|', v_candidate.workflow_type, v_candidate.agent_id);
        v_held := v_held + 1;
        v_groups := v_groups || jsonb_build_object('workflow_type', v_candidate.workflow_type, 'verdict', v_gate.verdict, 'holders', v_gate.holders);
        continue;
      end if;
      perform from public.workflow_runs where id = v_candidate.id and status = 'queued' for update skip locked;
      continue when not found;
      perform dispatcher.dispatch_workflow_run(v_candidate.id, v_candidate.agent_id, v_candidate.usd, v_candidate.tokens);
      if p_budgets <> '[]' then
        p_budgets := dispatcher.reserve_in_budgets(p_budgets, v_candidate.agent_id, v_candidate.department_id, v_candidate.workflow_type, v_candidate.usd,
                                               v_candidate.tokens);
      end if;
      v_taken := v_taken || jsonb_build_object(v_candidate.workflow_type, coalesce((v_taken ->> v_candidate.workflow_type)::integer, 0) + 1);
      v_number := v_number + 1;
      v_warned := v_warned + least(v_gate.warned, 1);
    exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
      raise;
    when others then
      v_errors := v_errors || jsonb_build_object('phase', 'dispatched', 'run_id', v_candidate.id, 'error', sqlerrm, 'error_code', sqlstate);
    end;
  end loop;
  perform dispatcher.note_held_runs(p_tenant_id, p_budgets, array(
    select distinct unnest(h.holders) from jsonb_to_recordset(v_groups) as h (holders uuid[], verdict text) where h.verdict = 'held'));
  return jsonb_build_object('dispatched', v_number, 'held', v_held, 'held_by', dispatcher.budget_holds(p_budgets, v_groups), 'warned', v_warned, 'budgets', p_budgets, 'errors', v_errors, 'full', v_number >= v_batch);
end
$$;
comment on function dispatcher.dispatch_queued_runs(uuid, jsonb, jsonb, jsonb) is
  'Hands out queued runs: groups that are held or full are left out before anything is limited; then by route priority, run priority and age, each with what its waiting adds. A run whose row cannot be dispatched is named and hides nobody.';

create or replace function dispatcher.retry_stale_dispatches(p_tenant_id uuid, p_settings jsonb, p_estimates jsonb, p_budgets jsonb) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_max constant integer := (p_settings ->> 'max_dispatch_retries')::integer;
  v_run record;
  v_usd numeric;
  v_tokens numeric;
  v_without jsonb;
  v_verdict text;
  v_retried integer := 0;
  v_failed integer := 0;
  v_held integer := 0;
  v_errors jsonb := '[]';
begin
  for v_run in
    select run.id, run.workflow_type, run.dispatch_attempts, run.release_count, run.owner_agent_id, run.reserved_usd, run.reserved_tokens, run.accounted_at,
           coalesce(run.pinned_agent_id, route.agent_id) as agent_id, coalesce(route.max_concurrent, 1) as max_concurrent,
           owner.department_id as owner_department_id, profile.department_id
      from public.workflow_runs as run
      left join public.workflow_agent_routing as route on route.tenant_id = run.tenant_id and route.workflow_type = run.workflow_type
      left join public.agent_profiles as profile on profile.tenant_id = run.tenant_id and profile.agent_id = coalesce(run.pinned_agent_id, route.agent_id)
      left join public.agent_profiles as owner on owner.tenant_id = run.tenant_id and owner.agent_id = run.owner_agent_id
     where run.tenant_id = p_tenant_id and run.status = 'dispatched'
       and run.dispatched_at < now() - make_interval(secs => (p_settings ->> 'stale_dispatch_seconds')::double precision)
     order by run.dispatched_at limit 500
     for update of run skip locked
  loop
    begin
      if v_run.dispatch_attempts - v_run.release_count > v_max then
        perform dispatcher.note_workflow_actor('dispatcher', 'nobody claimed it');
        update public.workflow_runs
           set status = 'failed', finished_at = now(), last_error_at = now(), last_error = format('Dispatch retries exhausted after %s attempts', v_run.dispatch_attempts)
         where id = v_run.id;
        update public.workflow_notifications set state = 'obsolete' where run_id = v_run.id and state = 'pending';
        v_failed := v_failed + 1;
        continue;
      end if;
      v_usd := dispatcher.workflow_estimate(p_estimates, v_run.workflow_type, 'usd');
      v_tokens := dispatcher.workflow_estimate(p_estimates, v_run.workflow_type, 'tokens');
      v_without := dispatcher.reserve_in_budgets(p_budgets, v_run.owner_agent_id, v_run.owner_department_id, v_run.workflow_type,
                                             -coalesce(v_run.reserved_usd, v_usd), -coalesce(v_run.reserved_tokens, v_tokens));
      select gate.verdict into v_verdict from dispatcher.budget_verdict(v_without, v_run.agent_id, v_run.department_id, v_run.workflow_type, v_usd, v_tokens) as gate;
      if v_verdict = 'ok' and v_run.agent_id is not null and v_run.max_concurrent > 0 then
        perform dispatcher.note_workflow_actor('dispatcher', 'nobody claimed it in time');
        update public.workflow_notifications set state = 'obsolete' where run_id = v_run.id and state = 'pending';
        perform dispatcher.dispatch_workflow_run(v_run.id, v_run.agent_id, v_usd, v_tokens);
        p_budgets := dispatcher.reserve_in_budgets(v_without, v_run.agent_id, v_run.department_id, v_run.workflow_type, v_usd, v_tokens);
        v_retried := v_retried + 1;
      else
        perform dispatcher.note_workflow_actor('dispatcher', case when v_verdict <> 'ok' then 'held by a budget' else 'its route is gone' end);
        update public.workflow_runs set status = 'queued', dispatched_at = null, reserved_usd = null, reserved_tokens = null where id = v_run.id;
        p_budgets := v_without;
        v_held := v_held + (v_verdict <> 'ok')::integer;
      end if;
    exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
      raise;
    when others then
      v_errors := v_errors || jsonb_build_object('phase', 'retried', 'run_id', v_run.id, 'error', sqlerrm, 'error_code', sqlstate);
    end;
  end loop;
  return jsonb_build_object('retried', v_retried, 'failed', v_failed, 'held', v_held, 'budgets', p_budgets, 'errors', v_errors);
end
$$;
comment on function dispatcher.retry_stale_dispatches(uuid, jsonb, jsonb, jsonb) is
  'Runs nobody claimed in time: out of retries they fail, whatever a budget says; else a fresh attempt through the same gate, or back to the queue where the gate holds it, with no attempt spent.';

create or replace function dispatcher.time_out_runs(p_tenant_id uuid) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_run public.workflow_runs;
  v_count integer := 0;
  v_errors jsonb := '[]';
begin
  for v_run in
    select * from public.workflow_runs where tenant_id = p_tenant_id and status in ('claimed', 'running') and deadline_at <= now()
     order by deadline_at limit 500 for update skip locked
  loop
    begin
      perform dispatcher.note_workflow_actor('dispatcher', 'over its deadline');
      perform dispatcher.end_workflow_claim(v_run, 'timed_out');
      update public.workflow_runs
         set status = 'timed_out', finished_at = now(), last_error_at = now(),
             last_error = format('Run exceeded timeout of %s minutes', dispatcher.workflow_timeout_minutes(v_run.tenant_id, v_run.workflow_type))
       where id = v_run.id;
      v_count := v_count + 1;
    exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
      raise;
    when others then
      v_errors := v_errors || jsonb_build_object('phase', 'timed_out', 'run_id', v_run.id, 'error', sqlerrm, 'error_code', sqlstate);
    end;
  end loop;
  return jsonb_build_object('timed_out', v_count, 'errors', v_errors);
end
$$;
comment on function dispatcher.time_out_runs(uuid) is 'Claimed and running runs over their deadline become timed_out; the process one of our daemons has for them is asked to end.';

create or replace function dispatcher.release_stale_claims(p_tenant_id uuid, p_settings jsonb) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_run public.workflow_runs;
  v_released integer := 0;
  v_failed integer := 0;
  v_errors jsonb := '[]';
begin
  for v_run in
    select * from public.workflow_runs
     where tenant_id = p_tenant_id and status in ('claimed', 'running')
       and greatest(last_heartbeat_at, claimed_at) < now() - make_interval(secs => (p_settings ->> 'stale_claim_seconds')::double precision)
     order by last_heartbeat_at limit 500 for update skip locked
  loop
    begin
      perform dispatcher.note_workflow_actor('dispatcher', 'no heartbeat');
      v_run := dispatcher.return_workflow_run(v_run, 'no heartbeat');
      v_released := v_released + (v_run.status = 'queued')::integer;
      v_failed := v_failed + (v_run.status = 'failed')::integer;
    exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
      raise;
    when others then
      v_errors := v_errors || jsonb_build_object('phase', 'released', 'run_id', v_run.id, 'error', sqlerrm, 'error_code', sqlstate);
    end;
  end loop;
  return jsonb_build_object('released', v_released, 'failed', v_failed, 'errors', v_errors);
end
$$;
comment on function dispatcher.release_stale_claims(uuid, jsonb) is 'Claims without a heartbeat for too long are lost: the run returns to the queue, the fourth time it fails.';

create or replace function dispatcher.mark_unrouted_runs(p_tenant_id uuid) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_run record;
  v_count integer := 0;
  v_errors jsonb := '[]';
begin
  for v_run in
    select run.id, run.workflow_type, run.pinned_agent_id is not null or routed.is_routed as has_agent
      from public.workflow_runs as run
      cross join lateral (select exists (select from public.workflow_agent_routing as route
                                          where route.tenant_id = p_tenant_id and route.workflow_type = run.workflow_type) as is_routed) as routed
     where run.tenant_id = p_tenant_id and run.status = 'queued'
       and (run.pinned_agent_id is not null or routed.is_routed) = (run.blocker_type is not distinct from 'no_route')
     limit 500 for update of run skip locked
  loop
    begin
      update public.workflow_runs
         set blocker_type = case when not v_run.has_agent then 'no_route' end,
             blocker_description = case when not v_run.has_agent then format('no route for workflow type %s', v_run.workflow_type) end
       where id = v_run.id;
      v_count := v_count + (not v_run.has_agent)::integer;
    exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
      raise;
    when others then
      v_errors := v_errors || jsonb_build_object('phase', 'unrouted', 'run_id', v_run.id, 'error', sqlerrm, 'error_code', sqlstate);
    end;
  end loop;
  return jsonb_build_object('unrouted', v_count, 'errors', v_errors);
end
$$;
comment on function dispatcher.mark_unrouted_runs(uuid) is 'Queued runs whose type has no route carry blocker no_route until it has one; at most 500 change in a call.';

create or replace function dispatcher.prune_workflow_rows(p_tenant_id uuid) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_count integer;
begin
  delete from public.workflow_notifications where id in (
    select id from public.workflow_notifications where tenant_id = p_tenant_id and state in ('sent', 'failed', 'obsolete') and created_at < now() - interval '7 days'
     limit 500);
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
comment on function dispatcher.prune_workflow_rows(uuid) is 'Notifications that were dealt with a week ago go, at most 500 a call.';

create or replace function dispatcher.wakes_to_stop(p_instance_id uuid) returns jsonb
language sql stable set search_path = ''
as $$
  select coalesce(jsonb_agg(jsonb_build_object('wake_id', id, 'cause', stop_cause)), '[]')
    from public.agent_wakes where instance_id = p_instance_id and stop_cause is not null and ended_at is null
$$;
comment on function dispatcher.wakes_to_stop(uuid) is 'Live wakes of an instance whose run was ended from outside: their processes are to be stopped.';

create or replace function dispatcher.next_workflow_moment(p_tenant_id uuid, p_settings jsonb) returns double precision
language sql stable set search_path = ''
as $$
  select extract(epoch from min(due.at) - now())::double precision from (
    select min(next_attempt_at) as at from public.workflow_runs where tenant_id = p_tenant_id and status = 'queued' and next_attempt_at > now() and isfinite(next_attempt_at)
    union all
    select min(dispatched_at) + make_interval(secs => (p_settings ->> 'stale_dispatch_seconds')::double precision)
      from public.workflow_runs where tenant_id = p_tenant_id and status = 'dispatched'
    union all
    select least(min(deadline_at), min(greatest(last_heartbeat_at, claimed_at)) + make_interval(secs => (p_settings ->> 'stale_claim_seconds')::double precision))
      from public.workflow_runs where tenant_id = p_tenant_id and status in ('claimed', 'running')) as due
$$;
comment on function dispatcher.next_workflow_moment(uuid, jsonb) is 'In how many seconds something becomes due by itself; NULL when nothing does.';

create or replace function public.dispatch_workflows(p_instance_id uuid, p_settings jsonb default '{}') returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '2s'
as $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
  v_tenant constant uuid := v_instance.tenant_id;
  v_settings constant jsonb := dispatcher.workflow_settings(p_settings);
  v_started constant timestamptz := clock_timestamp();
  v_estimates jsonb := '{}';
  v_budgets jsonb := '[]';
  v_all_budgets jsonb := '[]';
  v_budget_error text;
  v_broken text;
  v_open boolean := false;
  v_phase text;
  v_part jsonb;
  v_errors jsonb := '[]';
  v_sum jsonb := '{"dispatched": 0, "retried": 0, "released": 0, "failed": 0, "timed_out": 0}';
  v_held integer := 0;
  v_held_by jsonb := '{}';
  v_warned integer := 0;
  v_stopped integer := 0;
  v_unrouted integer := 0;
  v_full boolean := false;
  v_field text;
begin
  if not pg_try_advisory_xact_lock(hashtextextended('dispatcher.workflows.' || v_tenant, 0)) then
    return jsonb_build_object('busy', true, 'stop_wakes', dispatcher.wakes_to_stop(p_instance_id));
  end if;
  perform set_config('dispatcher.quiet', 'on', true);
  foreach v_phase in array array['estimates', 'budgets', 'enforcement', 'dispatched', 'retried', 'timed_out', 'released', 'unrouted', 'pruned'] loop
    begin
      v_part := '{}';
      case v_phase
        when 'estimates' then v_estimates := dispatcher.workflow_estimates(v_tenant, (v_settings ->> 'workflow_cost_estimate_usd')::numeric);
        when 'budgets' then v_budgets := dispatcher.evaluate_budgets(v_tenant, v_estimates);
        when 'enforcement' then
          if v_budgets <> '[]' then
            v_all_budgets := v_budgets;
            v_budgets := dispatcher.tight_budgets(v_budgets, v_estimates, (v_settings ->> 'workflow_batch_size')::integer + 500);
            select enforced.stopped, enforced.budgets, enforced.event_error into v_stopped, v_all_budgets, v_budget_error
              from dispatcher.enforce_budgets(v_tenant, v_all_budgets, v_estimates) as enforced;
            if v_stopped > 0 then
              v_budgets := dispatcher.tight_budgets(v_all_budgets, v_estimates, (v_settings ->> 'workflow_batch_size')::integer + 500);
            end if;
          end if;
        when 'dispatched' then v_part := dispatcher.dispatch_queued_runs(v_tenant, v_settings, v_estimates, v_budgets);
        when 'retried' then v_part := dispatcher.retry_stale_dispatches(v_tenant, v_settings, v_estimates, v_budgets);
        when 'timed_out' then v_part := dispatcher.time_out_runs(v_tenant);
        when 'released' then v_part := dispatcher.release_stale_claims(v_tenant, v_settings);
        when 'unrouted' then
          v_part := dispatcher.mark_unrouted_runs(v_tenant);
          v_unrouted := (v_part ->> 'unrouted')::integer;
        when 'pruned' then perform dispatcher.prune_workflow_rows(v_tenant);
      end case;
    exception when query_canceled or deadlock_detected or serialization_failure then
      raise;
    when others then  -- also a row that somebody holds for long: its phase waits for the next tick, the others do not
      v_part := '{}';
      v_errors := v_errors || jsonb_build_object('phase', v_phase, 'error', sqlerrm, 'error_code', sqlstate);
      if v_phase in ('budgets', 'enforcement') then
        v_budget_error := coalesce(v_budget_error, format('%s (%s)', sqlerrm, sqlstate));
        -- What cannot be evaluated fails open, loudly: runs go out as if there were no budgets.
        v_open := v_open or v_phase = 'budgets';
      end if;
    end;
    v_budgets := coalesce(v_part -> 'budgets', v_budgets);
    v_held := v_held + coalesce((v_part ->> 'held')::integer, 0);
    v_held_by := v_held_by || coalesce(v_part -> 'held_by', '{}');
    v_warned := v_warned + coalesce((v_part ->> 'warned')::integer, 0);
    v_full := v_full or coalesce((v_part ->> 'full')::boolean, false);
    v_errors := v_errors || coalesce(v_part -> 'errors', '[]');
    for v_field in select jsonb_object_keys(v_sum) loop
      v_sum := v_sum || jsonb_build_object(v_field, (v_sum ->> v_field)::integer + coalesce((v_part ->> v_field)::integer, 0));
    end loop;
  end loop;
  select left(string_agg(format('%s: %s', state.name, state.error), '; '), 500) into v_broken from dispatcher.budget_states(v_all_budgets) as state
   where state.error is not null;
  v_budget_error := coalesce(v_broken, v_budget_error);
  v_open := v_open or v_broken is not null;
  perform dispatcher.send_gateway_hint(other.gateway_id, 'run', '{}')
     from (select note.gateway_id from public.workflow_notifications as note where note.tenant_id = v_tenant and note.state = 'pending' and note.created_at = now()
           union select wake.gateway_id from public.agent_wakes as wake
                  where wake.tenant_id = v_tenant and wake.stop_cause is not null and wake.ended_at is null and wake.instance_id <> p_instance_id) as other
    where other.gateway_id is distinct from v_instance.gateway_id;
  v_sum := v_sum || jsonb_build_object('budget_enforcement', jsonb_build_object('held', v_held, 'stopped', v_stopped, 'warned', v_warned));
  update public.dispatcher_instances
     set last_tick = v_sum || jsonb_build_object('at', now(), 'ms', round(extract(epoch from clock_timestamp() - v_started) * 1000), 'errors', jsonb_array_length(v_errors),
                                                 'budget_error', v_budget_error, 'held_by', v_held_by)
   where id = p_instance_id;
  return v_sum || jsonb_build_object(
    'busy', false, 'errors', v_errors, 'budget_error', v_budget_error, 'budgets_open', v_open, 'unrouted', v_unrouted, 'stop_wakes', dispatcher.wakes_to_stop(p_instance_id),
    'again', v_full or (v_sum ->> 'released')::integer > 0 or ((v_sum ->> 'failed')::integer + (v_sum ->> 'timed_out')::integer + v_stopped > 0),
    'next_in', dispatcher.next_workflow_moment(v_tenant, v_settings), 'ms', round(extract(epoch from clock_timestamp() - v_started) * 1000));
end
$$;
comment on function public.dispatch_workflows(uuid, jsonb) is
  'One tick for the tenant of an instance, phase by phase, each isolated: budgets, dispatch, retries, time-outs, stale claims, blockers. Answers {dispatched, retried, released, failed, timed_out, budget_enforcement, errors, budget_error, budgets_open (runs went out without them), again, next_in, stop_wakes}; {busy: true} when another pass is under way.';

create or replace function public.workflow_stats(p_tenant_id uuid) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object(
    'code', 'ok', 'now', now(),
    'by_status', (select coalesce(jsonb_object_agg(counted.status, counted.number), '{}')
                    from (select status, count(*) as number from public.workflow_runs where tenant_id = p_tenant_id group by status) as counted),
    'by_type', (select coalesce(jsonb_agg(jsonb_build_object(
                  'workflow_type', types.workflow_type, 'agent_id', route.agent_id, 'priority', route.priority, 'max_concurrent', route.max_concurrent,
                  'timeout_minutes', route.timeout_minutes, 'queued', coalesce(types.queued, 0), 'active', coalesce(types.active, 0),
                  'held_by', case when types.queued > 0 then coalesce(tick.held_by -> types.workflow_type, '[]') else '[]' end,
                  'oldest_queued_seconds', round(extract(epoch from now() - types.oldest))) order by types.workflow_type), '[]')
                  from (select coalesce(open.workflow_type, routed.workflow_type) as workflow_type, open.queued, open.active, open.oldest
                          from (select workflow_type, count(*) filter (where status = 'queued') as queued, count(*) filter (where status <> 'queued') as active,
                                       min(queued_at) filter (where status = 'queued') as oldest
                                  from public.workflow_runs where tenant_id = p_tenant_id
                                   and (status in ('queued', 'dispatched', 'claimed', 'running') or paused_from in ('dispatched', 'claimed', 'running'))
                                 group by workflow_type) as open
                          full join (select workflow_type from public.workflow_agent_routing where tenant_id = p_tenant_id) as routed using (workflow_type)) as types
                  left join public.workflow_agent_routing as route on route.tenant_id = p_tenant_id and route.workflow_type = types.workflow_type
                  left join (select last_tick -> 'held_by' as held_by from public.dispatcher_instances
                              where tenant_id = p_tenant_id and last_tick is not null order by last_tick ->> 'at' desc limit 1) as tick on true),
    'no_route', (select count(*) from public.workflow_runs as run where run.tenant_id = p_tenant_id and run.status = 'queued' and run.pinned_agent_id is null
                    and not exists (select from public.workflow_agent_routing as route where route.tenant_id = p_tenant_id and route.workflow_type = run.workflow_type)),
    'finished_last_24h', (select coalesce(jsonb_object_agg(recent.status, recent.number), '{}')
                            from (select status, count(*) as number from public.workflow_runs
                                   where tenant_id = p_tenant_id and finished_at > now() - interval '24 hours' group by status) as recent),
    'cost_last_24h_usd', (select coalesce(sum(cost_estimate) filter (where cost_estimate >= 0 and cost_estimate <> 'NaN'), 0) from public.workflow_runs
                           where tenant_id = p_tenant_id and accounted_at > now() - interval '24 hours'),
    'notifications', (select coalesce(jsonb_object_agg(noted.state, noted.number), '{}')
                        from (select state, count(*) as number from public.workflow_notifications where tenant_id = p_tenant_id group by state) as noted),
    'last_tick', (select last_tick from public.dispatcher_instances where tenant_id = p_tenant_id and last_tick is not null order by last_tick ->> 'at' desc limit 1))
$$;
comment on function public.workflow_stats(uuid) is 'Runs by status and by type with their routes and the budgets that held them at the last tick, runs without a route, the last day, notifications, and the last tick.';

select dispatcher.restrict_functions(array[
  'dispatch_workflows', 'workflow_stats'
]);

notify pgrst, 'reload schema';
commit;
