-- Written by tools/dump_schema.py from supabase/migrations; edit those, then run it.

CREATE SCHEMA public;

COMMENT ON SCHEMA public IS 'standard public schema';

CREATE TYPE public.actor_type AS ENUM (
    'human',
    'agent',
    'system'
);

CREATE TYPE public.agent_status AS ENUM (
    'ready',
    'paused',
    'error',
    'provisioning',
    'hibernating'
);

CREATE TYPE public.budget_status AS ENUM (
    'ok',
    'warned',
    'exceeded',
    'unmetered'
);

CREATE TYPE public.gateway_status AS ENUM (
    'provisioning',
    'ready',
    'error',
    'hibernating'
);

CREATE TYPE public.inbox_event_type AS ENUM (
    'task_assignment',
    'task_reassignment',
    'task_comment_mention',
    'routine_schedule',
    'routine_event',
    'heartbeat',
    'deliverable_review',
    'blocker_resolved'
);

CREATE TYPE public.inbox_item_status AS ENUM (
    'pending',
    'leased',
    'done',
    'dead_letter',
    'failed'
);

CREATE TYPE public.task_priority AS ENUM (
    'low',
    'medium',
    'high',
    'urgent'
);

CREATE TYPE public.task_relation_type AS ENUM (
    'blocks',
    'blocked_by',
    'relates_to',
    'parent_of',
    'child_of'
);

CREATE TYPE public.task_status AS ENUM (
    'todo',
    'in_progress',
    'blocked',
    'done',
    'cancelled',
    'missed'
);

CREATE FUNCTION public.adopt_wake(p_instance_id uuid, p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_wake public.agent_wakes;
begin
  update public.agent_wakes
     set instance_id = p_instance_id, claim_token = gen_random_uuid(), state = 'running', host_id = p_host_id, pid = p_pid,
         pid_started_at = p_pid_started_at, started_at = coalesce(started_at, now())
   where id = p_wake_id and claim_token = p_claim_token and state in ('starting', 'running')
  returning * into v_wake;
  if v_wake.id is null then
    return jsonb_build_object('applied', false, 'code', 'fence_lost');
  end if;
  return jsonb_build_object('applied', true, 'claim_token', v_wake.claim_token, 'agent_id', v_wake.agent_id,
                            'deadline_in', extract(epoch from v_wake.deadline_at - now()));
end
$$;

COMMENT ON FUNCTION public.adopt_wake(p_instance_id uuid, p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) IS 'Takes over a live wake of a dead instance: new owner, new claim token (the old one can change nothing any more). One adopter wins.';

CREATE FUNCTION public.broadcast_hints_available() RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select to_regprocedure('realtime.send(jsonb,text,text,boolean)') is not null
     and exists (select from pg_catalog.pg_trigger where tgrelid = 'public.agent_inbox_items'::regclass
                  and tgname = 'dispatcher_inbox_insert_hint' and tgenabled <> 'D')
$$;

COMMENT ON FUNCTION public.broadcast_hints_available() IS 'Whether an insert is broadcast here: realtime.send exists and the insert trigger is in place and enabled.';

CREATE FUNCTION public.budget_blocks(p_agent_id uuid, p_now timestamp with time zone) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_budget record;
  v_period_start date;
begin
  select status, hard_cutoff, monthly_limit_usd, period_anchor_tz, current_period_start, current_period_spend_usd
    into v_budget from public.agent_budgets where agent_id = p_agent_id;
  if v_budget is null or v_budget.status <> 'exceeded' or not v_budget.hard_cutoff then
    return false;
  end if;
  begin
    v_period_start := date_trunc('month', p_now at time zone v_budget.period_anchor_tz)::date;
  exception when invalid_parameter_value then
    v_period_start := date_trunc('month', p_now at time zone 'UTC')::date;
  end;
  return v_budget.current_period_start >= v_period_start
     and (v_budget.monthly_limit_usd is null or v_budget.current_period_spend_usd >= v_budget.monthly_limit_usd);
end
$$;

COMMENT ON FUNCTION public.budget_blocks(p_agent_id uuid, p_now timestamp with time zone) IS 'Whether the agent''s budget forbids a wake: exceeded with hard cutoff, in the running month, and still at or above its limit.';

CREATE TABLE public.dispatcher_instances (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid NOT NULL,
    gateway_id uuid NOT NULL,
    state text DEFAULT 'running'::text NOT NULL,
    hostname text NOT NULL,
    host_id text NOT NULL,
    pid integer NOT NULL,
    pid_started_at double precision,
    version text NOT NULL,
    settings jsonb DEFAULT '{}'::jsonb NOT NULL,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    last_heartbeat_at timestamp with time zone DEFAULT now() NOT NULL,
    stopped_at timestamp with time zone,
    last_sweep_at timestamp with time zone,
    last_sweep jsonb,
    last_tick jsonb,
    canary uuid,
    realtime jsonb DEFAULT '{}'::jsonb NOT NULL,
    health jsonb DEFAULT '{}'::jsonb NOT NULL,
    CONSTRAINT dispatcher_instances_state_check CHECK ((state = ANY (ARRAY['running'::text, 'stopping'::text, 'stopped'::text, 'lost'::text]))),
    CONSTRAINT dispatcher_instances_stopped_has_time CHECK (((state = 'stopped'::text) = (stopped_at IS NOT NULL)))
);

COMMENT ON TABLE public.dispatcher_instances IS 'One row per running daemon: identity, settings, heartbeat, last sweep and tick, health.';

CREATE FUNCTION public.bury_spent_items(p_instance public.dispatcher_instances) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_count integer;
begin
  with spent as (
    update public.agent_inbox_items as item
       set status = 'dead_letter', failed_at = now(), leased_at = null, leased_until = null, updated_at = now(),
           context = item.context || jsonb_build_object('last_failure_reason',
             case item.status when 'leased' then 'lease expired with no attempts left' else 'no attempts left' end)
      from public.agents as agent
     where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id
       and item.agent_id = agent.id and item.attempt_count >= item.max_attempts
       and ((item.status = 'leased' and item.leased_until < now()) or item.status = 'pending')
    returning item.id
  ), leases as (
    update public.inbox_item_leases as lease set closed_at = now(), outcome = 'dead_letter'
      from spent where lease.item_id = spent.id and lease.closed_at is null
  )
  select count(*) into v_count from spent;
  return v_count;
end
$$;

COMMENT ON FUNCTION public.bury_spent_items(p_instance public.dispatcher_instances) IS 'Expired leases and pending items without attempts left become dead_letter, with the reason.';

CREATE FUNCTION public.claim_one_wake(p_instance public.dispatcher_instances, p_agent_id uuid, p_path text, p_item_ids uuid[], p_request uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_agent record;
  v_gates record;
  v_live integer;
  v_items uuid[];
  v_wake public.agent_wakes;
  v_path text;
begin
  select id, slug, tenant_id into v_agent from public.agents
   where id = p_agent_id and gateway_id = p_instance.gateway_id and tenant_id = p_instance.tenant_id;
  if v_agent is null then
    return jsonb_build_object('granted', false, 'agent_id', p_agent_id, 'skip_reason', 'not_local');
  end if;
  perform from public.dispatcher_gateways where gateway_id = p_instance.gateway_id for update;
  insert into public.agent_wake_state (agent_id, tenant_id) values (p_agent_id, v_agent.tenant_id) on conflict do nothing;
  select coalesce(max(waitlist_path) filter (where waitlist_path = 'command'), p_path) into v_path
    from (select waitlist_path from public.agent_wake_state where agent_id = p_agent_id for update) as locked;

  -- The insert trigger resets an agent at once; where a database has no trigger, the items that came by name do.
  if exists (select from public.agent_wake_state as state
              join public.agent_inbox_items as item on item.agent_id = state.agent_id
             where state.agent_id = p_agent_id and state.consecutive_failures > 0 and item.id = any (p_item_ids)
               and item.created_at > state.last_ended_at
               and not exists (select from public.inbox_item_origins as origin where origin.item_id = item.id and origin.from_agent_id = p_agent_id)) then
    perform public.reset_wake_failures(p_agent_id);
  end if;

  select * into v_gates from public.wake_gates(p_agent_id, p_instance.settings);
  if cardinality(v_gates.blocked) = 0 then
    select count(*) into v_live from public.agent_wakes where gateway_id = p_instance.gateway_id and state in ('starting', 'running');
    if v_live >= (p_instance.settings ->> 'max_concurrent_wakes')::integer then
      v_gates.blocked := array['concurrency_limit'];
      update public.agent_wake_state
         set waitlist_path = coalesce(waitlist_path, 'waitlist'), waitlisted_at = coalesce(waitlisted_at, now()),
             waiting_since = coalesce(waiting_since, (select created_at from public.agent_inbox_items where id = v_gates.due_item_id)), updated_at = now()
       where agent_id = p_agent_id;
    end if;
  end if;
  if cardinality(v_gates.blocked) > 0 then
    if v_gates.blocked[1] <> 'concurrency_limit' then
      update public.agent_wake_state set waitlisted_at = null, waitlist_path = null, waiting_since = null
       where agent_id = p_agent_id and waitlisted_at is not null;
    end if;
    return jsonb_build_object('granted', false, 'agent_id', p_agent_id, 'agent_slug', v_agent.slug, 'skip_reason', v_gates.blocked[1],
                              'retry_in', extract(epoch from v_gates.retry_at - now()));
  end if;

  select array_agg(due.id order by due.created_at) into v_items from public.agent_inbox_due as due
   where due.agent_id = p_agent_id and due.due_at <= now() and due.id = any (p_item_ids);
  v_items := coalesce(v_items, array[v_gates.due_item_id]);
  insert into public.agent_wakes (tenant_id, agent_id, gateway_id, instance_id, claim_request, path, item_ids, chain_depth, model_override,
                                  thinking_override, deadline_at)
  select v_agent.tenant_id, p_agent_id, p_instance.gateway_id, p_instance.id, p_request, v_path, v_items,
         (select coalesce(max(due.chain_depth), 0) from public.agent_inbox_due as due
           where due.agent_id = p_agent_id and due.due_at <= now()
             and due.chain_depth < public.wake_chain_limit(p_instance.settings)),
         case when jsonb_typeof(item.context -> 'model_override') = 'string' then nullif(item.context ->> 'model_override', '') end,
         case when jsonb_typeof(item.context -> 'thinking_override') = 'string' then nullif(item.context ->> 'thinking_override', '') end,
         now() + make_interval(secs => (p_instance.settings ->> 'agent_process_timeout')::double precision + 15)
    from public.agent_inbox_items as item where item.id = v_items[1]
  returning * into v_wake;
  update public.agent_wake_state
     set last_wake_id = v_wake.id, last_claimed_at = v_wake.claimed_at, waitlisted_at = null, waitlist_path = null, waiting_since = null, updated_at = now()
   where agent_id = p_agent_id;
  perform public.mark_wake_items(v_items, p_agent_id, false);
  return public.wake_grant(v_wake);
end
$$;

COMMENT ON FUNCTION public.claim_one_wake(p_instance public.dispatcher_instances, p_agent_id uuid, p_path text, p_item_ids uuid[], p_request uuid) IS 'Evaluates every gate of one agent under the gateway''s lock and, when all are open, writes the wake (state starting). Answers {granted, …}.';

CREATE FUNCTION public.claim_waiting_wakes(p_instance_id uuid, p_limit integer, p_request uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '8s'
    AS $$
declare
  v_instance constant public.dispatcher_instances := public.running_instance(p_instance_id);
  v_waiting record;
  v_answer jsonb;
  v_answers jsonb := '[]';
  v_granted integer := 0;
begin
  select jsonb_agg(public.wake_grant(wake)) into v_answer from public.agent_wakes as wake
   where wake.claim_request = p_request and wake.state in ('starting', 'running');
  if v_answer is not null then
    return v_answer;
  end if;
  if p_limit <= 0 then
    return v_answers;
  end if;
  for v_waiting in
    select state.agent_id, state.waitlist_path from public.agent_wake_state as state
      join public.agents as agent on agent.id = state.agent_id
     where state.waitlisted_at is not null and agent.gateway_id = v_instance.gateway_id and agent.tenant_id = v_instance.tenant_id
     order by state.waitlisted_at, state.waiting_since, state.agent_id
  loop
    begin
      v_answer := public.claim_one_wake(v_instance, v_waiting.agent_id, v_waiting.waitlist_path, '{}', p_request);
    exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
      raise;
    when others then
      v_answer := jsonb_build_object('granted', false, 'agent_id', v_waiting.agent_id, 'skip_reason', 'error', 'error', sqlerrm, 'error_code', sqlstate);
    end;
    exit when v_answer ->> 'skip_reason' = 'concurrency_limit';
    v_answers := v_answers || v_answer;
    v_granted := v_granted + (v_answer ->> 'granted')::boolean::integer;
    exit when v_granted >= p_limit;
  end loop;
  return v_answers;
end
$$;

COMMENT ON FUNCTION public.claim_waiting_wakes(p_instance_id uuid, p_limit integer, p_request uuid) IS 'Claims up to p_limit wakes from the waitlist of the instance''s gateway, longest waiting first; an agent that may no longer be woken leaves the list and hides nobody.';

CREATE FUNCTION public.claim_wakes(p_instance_id uuid, p_claims jsonb, p_request uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '8s'
    AS $$
declare
  v_instance constant public.dispatcher_instances := public.running_instance(p_instance_id);
  v_claim jsonb;
  v_answer jsonb;
  v_answers jsonb := '[]';
begin
  select jsonb_agg(public.wake_grant(wake)) into v_answer from public.agent_wakes as wake
   where wake.claim_request = p_request and wake.state in ('starting', 'running');
  if v_answer is not null then
    return v_answer;
  end if;
  for v_claim in select value from jsonb_array_elements(p_claims) loop
    begin
      v_answer := public.claim_one_wake(
        v_instance, (v_claim ->> 'agent_id')::uuid, v_claim ->> 'path',
        array(select jsonb_array_elements_text(coalesce(v_claim -> 'item_ids', '[]'))::uuid), p_request);
    exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
      raise;
    when others then
      v_answer := jsonb_build_object('granted', false, 'agent_id', v_claim ->> 'agent_id', 'skip_reason', 'error', 'error', sqlerrm, 'error_code', sqlstate);
    end;
    v_answers := v_answers || v_answer;
  end loop;
  return v_answers;
end
$$;

COMMENT ON FUNCTION public.claim_wakes(p_instance_id uuid, p_claims jsonb, p_request uuid) IS 'Claims wakes for p_claims = [{agent_id, path, item_ids}]; answers one verdict per claim, in order. p_request makes a repeated call hand back the same grants. One agent whose data raises does not stop the others.';

CREATE FUNCTION public.clean_inbox_reason(p_reason text) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$
  select coalesce(nullif(btrim(left(p_reason, 4000)), ''), 'no reason given')
$$;

COMMENT ON FUNCTION public.clean_inbox_reason(p_reason text) IS 'A reason as it is stored: trimmed, at most 4,000 characters, never empty.';

CREATE FUNCTION public.close_inbox_item(p_item_id uuid, p_lease_token uuid, p_outcome text, p_reason text DEFAULT NULL::text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_code text;
  v_now timestamptz;
  v_status public.inbox_item_status;
begin
  if p_outcome is null or p_outcome not in ('done', 'failed', 'released') then
    return public.inbox_close_verdict(p_item_id, 'invalid');
  end if;
  v_code := public.lock_inbox_lease(p_item_id, p_lease_token,
              case when p_outcome = 'failed' then array['failed', 'dead_letter'] else array[p_outcome] end);
  if v_code <> 'ok' then
    return public.inbox_close_verdict(p_item_id, v_code);
  end if;
  v_now := clock_timestamp();
  update public.agent_inbox_items as item
     set status = case
           when p_outcome = 'done' then 'done'
           when p_outcome = 'released' then 'pending'
           when item.attempt_count >= item.max_attempts then 'dead_letter'
           else 'failed'
         end::public.inbox_item_status,
         attempt_count = case when p_outcome = 'released' then greatest(item.attempt_count - 1, 0) else item.attempt_count end,
         leased_until = null,
         completed_at = case when p_outcome = 'done' then v_now else item.completed_at end,
         failed_at = case when p_outcome = 'failed' then v_now else item.failed_at end,
         context = case when p_outcome = 'failed'
                        then public.merge_inbox_context(item.context,
                               jsonb_build_object('last_failure_reason', public.clean_inbox_reason(p_reason)))
                        else item.context end,
         updated_at = v_now
   where item.id = p_item_id
  returning item.status into v_status;
  update public.inbox_item_leases as lease
     set closed_at = v_now, outcome = case when p_outcome = 'failed' then v_status::text else p_outcome end
   where lease.item_id = p_item_id;
  return public.inbox_close_verdict(p_item_id, 'ok');
end
$$;

COMMENT ON FUNCTION public.close_inbox_item(p_item_id uuid, p_lease_token uuid, p_outcome text, p_reason text) IS 'Closes a leased item as done, failed (dead_letter without attempts left) or released (pending again, attempt given back). Needs the live lease''s token: {applied, code: ok|already|lease_lost|not_found|invalid, status, attempt, max_attempts}.';

CREATE FUNCTION public.complete_inbox_item(p_item_id uuid) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
        update public.agent_inbox_items
           set status = 'done', completed_at = now(), leased_until = null, updated_at = now()
         where id = p_item_id
      $$;

COMMENT ON FUNCTION public.complete_inbox_item(p_item_id uuid) IS 'Closes an item as done.';

CREATE FUNCTION public.current_tenant_id() RETURNS uuid
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
        select coalesce(nullif(nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'tenant_id', '')::uuid,
                        '00000000-0000-0000-0000-000000000000'::uuid)
      $$;

COMMENT ON FUNCTION public.current_tenant_id() IS 'The tenant of the caller''s token, else the all-zero tenant.';

CREATE FUNCTION public.dispatcher_gateway_topic(p_gateway_id uuid) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$ select 'gateway:' || p_gateway_id::text $$;

COMMENT ON FUNCTION public.dispatcher_gateway_topic(p_gateway_id uuid) IS 'The private Realtime topic of a gateway.';

CREATE FUNCTION public.dispatcher_status(p_tenant_id uuid, p_gateway text, p_settings jsonb) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_gateway record;
  v_settings jsonb;
begin
  select id, slug into v_gateway from public.gateways where tenant_id = p_tenant_id and (slug = p_gateway or id::text = p_gateway);
  if v_gateway is null then
    return jsonb_build_object('code', 'unknown_gateway', 'known',
      coalesce((select jsonb_agg(slug order by slug) from public.gateways where tenant_id = p_tenant_id), '[]'));
  end if;
  v_settings := coalesce(public.gateway_settings(v_gateway.id), p_settings);
  return jsonb_build_object(
    'code', 'ok', 'gateway', v_gateway.slug, 'now', now(),
    'instances', (select coalesce(jsonb_agg(jsonb_build_object('id', id, 'state', case when state = 'running' and last_heartbeat_at < now() - interval '45 seconds' then 'silent' else state end,
                    'hostname', hostname, 'pid', pid, 'version', version, 'started_at', started_at, 'last_heartbeat_at', last_heartbeat_at,
                    'last_sweep_at', last_sweep_at, 'last_sweep', last_sweep, 'realtime', realtime, 'health', health) order by started_at desc), '[]')
                    from public.dispatcher_instances where gateway_id = v_gateway.id and (state = 'running' or last_heartbeat_at > now() - interval '1 hour')),
    'wakes', (select coalesce(jsonb_agg(jsonb_build_object('wake_id', wake.id, 'agent', agent.slug, 'state', wake.state, 'path', wake.path, 'pid', wake.pid,
                    'claimed_at', wake.claimed_at, 'seconds', round(extract(epoch from now() - wake.claimed_at))) order by wake.claimed_at), '[]')
                from public.agent_wakes as wake join public.agents as agent on agent.id = wake.agent_id
               where wake.gateway_id = v_gateway.id and wake.state in ('starting', 'running')),
    'waitlist', (select coalesce(jsonb_agg(jsonb_build_object('agent', agent.slug, 'since', state.waitlisted_at) order by state.waitlisted_at, state.waiting_since), '[]')
                   from public.agent_wake_state as state join public.agents as agent on agent.id = state.agent_id
                  where agent.gateway_id = v_gateway.id and state.waitlisted_at is not null),
    'backlog', (select jsonb_build_object('items', count(*), 'under_1m', count(*) filter (where age < interval '1 minute'),
                    'under_1h', count(*) filter (where age >= interval '1 minute' and age < interval '1 hour'),
                    'over_1h', count(*) filter (where age >= interval '1 hour'), 'oldest_seconds', round(extract(epoch from max(age))))
                  from (select now() - due.created_at as age from public.agent_inbox_due as due join public.agents as agent on agent.id = due.agent_id
                         where agent.gateway_id = v_gateway.id) as ages),
    'agents', (select coalesce(jsonb_agg(jsonb_build_object('agent', agent.slug, 'status', agent.status, 'items', work.items,
                    'blocked', to_jsonb(gates.blocked), 'retry_in', round(extract(epoch from gates.retry_at - now())),
                    'failures', coalesce(state.consecutive_failures, 0), 'stalled_at', state.stalled_at, 'last_wake_at', state.last_claimed_at,
                    'last_end', state.last_end_state,
                    'budget', (select jsonb_build_object('status', budget.status, 'limit_usd', budget.monthly_limit_usd, 'spend_usd', budget.current_period_spend_usd)
                                 from public.agent_budgets as budget where budget.agent_id = agent.id)) order by agent.slug), '[]')
                 from public.agents as agent
                 left join public.agent_wake_state as state on state.agent_id = agent.id
                 cross join lateral (select count(*) as items from public.agent_inbox_due as due where due.agent_id = agent.id) as work
                 cross join lateral public.wake_gates(agent.id, v_settings, true) as gates
                where agent.gateway_id = v_gateway.id));
end
$$;

COMMENT ON FUNCTION public.dispatcher_status(p_tenant_id uuid, p_gateway text, p_settings jsonb) IS 'What an operator sees of one gateway: instances, live wakes, waitlist, backlog by age, and for each agent every gate that keeps it asleep.';

CREATE FUNCTION public.end_wake(p_wake_id uuid, p_claim_token uuid, p_ending text, p_exit_code integer, p_error text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_wake public.agent_wakes;
  v_state text;
  v_settings jsonb;
  v_failures integer;
  v_max integer;
  v_gates record;
begin
  if p_ending not in ('exited', 'timed_out', 'interrupted', 'lost', 'spawn_failed') then
    raise exception 'unknown ending %', p_ending using errcode = 'OD002';
  end if;
  perform from public.agent_wake_state where agent_id = (select agent_id from public.agent_wakes where id = p_wake_id) for update;
  select * into v_wake from public.agent_wakes where id = p_wake_id for update;
  if v_wake.id is null or v_wake.claim_token <> p_claim_token or v_wake.ended_at is not null then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'state', v_wake.state,
      'code', case when v_wake.id is null then 'not_found' when v_wake.claim_token <> p_claim_token then 'fence_lost' else 'already' end);
  end if;
  perform set_config('dispatcher.quiet', 'on', true);
  v_state := public.wake_end_state(v_wake, p_ending, p_exit_code);
  update public.agent_wakes set state = v_state, ended_at = now(), exit_code = p_exit_code, error = left(p_error, 2000) where id = p_wake_id;
  perform public.release_wake_leases(v_wake, v_state in ('interrupted', 'spawn_failed'), format('wake ended (%s) with the item unfinished', v_state));
  if v_state = 'lost' then
    perform public.spend_attempt_of_lost_wake(v_wake);
  end if;

  select settings into v_settings from public.dispatcher_instances where id = v_wake.instance_id;
  v_settings := coalesce(v_settings, (select settings from public.dispatcher_instances where gateway_id = v_wake.gateway_id order by last_heartbeat_at desc limit 1));
  v_max := (v_settings ->> 'max_consecutive_failures')::integer;
  update public.agent_wake_state as wake_state
     set last_ended_at = now(), last_end_state = v_state, updated_at = now(),
         consecutive_failures = case
           when v_state = 'succeeded' then 0
           when v_state in ('interrupted', 'lost') then wake_state.consecutive_failures
           -- slow but working: a longer cooldown, never a stall of its own making
           when v_state = 'timed_out' and public.wake_has_progress(v_wake)
             then greatest(least(wake_state.consecutive_failures + 1, v_max - 1), wake_state.consecutive_failures)
           else wake_state.consecutive_failures + 1 end
   where wake_state.agent_id = v_wake.agent_id
  returning wake_state.consecutive_failures into v_failures;
  if v_failures >= v_max then
    perform public.mark_agent_stalled(v_wake.agent_id);
  end if;
  return jsonb_build_object('wake_id', p_wake_id, 'applied', true, 'code', 'ok', 'state', v_state, 'agent_id', v_wake.agent_id,
                            'agent_slug', (select slug from public.agents where id = v_wake.agent_id),
                            'consecutive_failures', v_failures) || public.wait_for_next_wake(v_wake.agent_id, v_settings);
end
$$;

COMMENT ON FUNCTION public.end_wake(p_wake_id uuid, p_claim_token uuid, p_ending text, p_exit_code integer, p_error text) IS 'Ends a wake: final state, leases released, failures counted, and what is next for its agent (waitlisted, or retry_in seconds). p_ending: exited, timed_out, interrupted, lost, spawn_failed. Needs the claim token.';

CREATE FUNCTION public.escalate_inbox_item(p_item_id uuid, p_lease_token uuid, p_reason text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_code text := public.lock_inbox_lease(p_item_id, p_lease_token, array['escalated']);
  v_reason text := public.clean_inbox_reason(p_reason);
  v_now timestamptz := clock_timestamp();
begin
  if v_code <> 'ok' then
    return public.inbox_close_verdict(p_item_id, v_code);
  end if;
  update public.agent_inbox_items as item
     set status = 'done', completed_at = v_now, leased_until = null, updated_at = v_now,
         context = public.merge_inbox_context(item.context, jsonb_build_object('outcome', 'escalated', 'escalation_reason', v_reason))
   where item.id = p_item_id;
  update public.inbox_item_leases as lease set closed_at = v_now, outcome = 'escalated' where lease.item_id = p_item_id;
  -- A task that has ended stays ended: an escalation that comes late must not open it again.
  update public.tasks as task
     set status = 'blocked', updated_at = v_now
    from public.agent_inbox_items as item
   where item.id = p_item_id and task.id = item.task_id and task.tenant_id = item.tenant_id
     and task.status not in ('blocked', 'done', 'cancelled');
  insert into public.notifications (tenant_id, type, title, body, entity_type, entity_id, actor_type, actor_agent_id, meta)
  select item.tenant_id, 'agent_escalation',
         left(format('%s needs help: %s', agent.name, coalesce(nullif(item.summary, ''), task.title, item.event_type::text)), 300),
         v_reason,
         case when task.id is null then 'inbox_item' else 'task' end, coalesce(task.id, item.id), 'agent', item.agent_id,
         jsonb_build_object('inbox_item_id', item.id, 'task_id', item.task_id, 'event_type', item.event_type, 'agent_slug', agent.slug)
    from public.agent_inbox_items as item
    join public.agents as agent on agent.id = item.agent_id
    left join public.tasks as task on task.id = item.task_id and task.tenant_id = item.tenant_id
   where item.id = p_item_id;
  return public.inbox_close_verdict(p_item_id, 'ok');
end
$$;

COMMENT ON FUNCTION public.escalate_inbox_item(p_item_id uuid, p_lease_token uuid, p_reason text) IS 'Hands a leased item to a human, in one transaction: its task becomes blocked, a notification is written, the item is closed as escalated. Answers like close_inbox_item; a repeat with the same token changes nothing.';

CREATE FUNCTION public.expire_inbox_items(p_tenant_id uuid, p_gateway text, p_item_ids uuid[], p_reason text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_ids uuid[];
begin
  with expired as (
    update public.agent_inbox_items as item
       set status = 'failed', attempt_count = greatest(item.attempt_count, item.max_attempts), failed_at = now(), leased_until = null, updated_at = now(),
           context = item.context || jsonb_build_object('last_failure_reason', coalesce(p_reason, 'expired by the operator'))
      from public.agents as agent join public.gateways as gateway on gateway.id = agent.gateway_id
     where item.id = any (p_item_ids) and agent.id = item.agent_id and item.tenant_id = p_tenant_id
       and (gateway.slug = p_gateway or gateway.id::text = p_gateway) and item.status in ('pending', 'failed')
    returning item.id)
  select array_agg(id) into v_ids from expired;
  return jsonb_build_object('expired', coalesce(cardinality(v_ids), 0), 'item_ids', coalesce(to_jsonb(v_ids), '[]'));
end
$$;

COMMENT ON FUNCTION public.expire_inbox_items(p_tenant_id uuid, p_gateway text, p_item_ids uuid[], p_reason text) IS 'Ends open items by the operator''s hand: failed, attempts at the ceiling, reason recorded.';

CREATE FUNCTION public.expire_stale_items(p_instance public.dispatcher_instances) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_hours constant double precision := (p_instance.settings ->> 'stale_item_age_hours')::double precision;
  v_count integer;
begin
  if v_hours <= 0 then
    return 0;
  end if;
  update public.agent_inbox_items as item
     set status = 'failed', attempt_count = greatest(item.attempt_count, item.max_attempts), failed_at = now(), updated_at = now(),
         context = item.context || jsonb_build_object('last_failure_reason', format('stale: pending for more than %s h', v_hours))
    from public.agents as agent
   where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id and agent.status not in ('paused', 'hibernating')
     and item.agent_id = agent.id and item.status = 'pending' and item.created_at < now() - make_interval(secs => v_hours * 3600);
  get diagnostics v_count = row_count;
  return v_count;
end
$$;

COMMENT ON FUNCTION public.expire_stale_items(p_instance public.dispatcher_instances) IS 'Pending items older than stale_item_age_hours fail for good, reason recorded; those of paused or hibernating agents wait.';

CREATE FUNCTION public.fail_inbox_item(p_item_id uuid, p_reason text DEFAULT NULL::text) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
        update public.agent_inbox_items
           set status = case when attempt_count >= max_attempts then 'dead_letter' else 'failed' end::public.inbox_item_status,
               failed_at = now(), leased_until = null, updated_at = now(),
               context = context || jsonb_build_object('last_failure_reason', p_reason)
         where id = p_item_id
      $$;

COMMENT ON FUNCTION public.fail_inbox_item(p_item_id uuid, p_reason text) IS 'Fails an item; dead_letter once its attempts are spent. The reason goes to context.last_failure_reason.';

CREATE FUNCTION public.fill_waitlist(p_instance public.dispatcher_instances) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_agent record;
  v_gates record;
  v_ready uuid[] := '{}';
  v_oldest timestamptz[] := '{}';
  v_skipped jsonb := '[]';
begin
  for v_agent in
    select agent.id, agent.slug, oldest.created_at from public.agents as agent
     cross join lateral (select due.created_at from public.agent_inbox_due as due where due.agent_id = agent.id order by due.created_at limit 1) as oldest
     where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id
       and not exists (select from public.agent_wake_state as state where state.agent_id = agent.id and state.waitlisted_at is not null)
     order by oldest.created_at
  loop
    begin
      select * into v_gates from public.wake_gates(v_agent.id, p_instance.settings);
      if cardinality(v_gates.blocked) = 0 then
        v_ready := v_ready || v_agent.id;
        v_oldest := v_oldest || v_agent.created_at;
      else
        v_skipped := v_skipped || jsonb_build_object('granted', false, 'agent_id', v_agent.id, 'agent_slug', v_agent.slug,
          'skip_reason', v_gates.blocked[1], 'retry_in', extract(epoch from v_gates.retry_at - now()));
      end if;
    exception when query_canceled then
      raise;
    when others then
      v_skipped := v_skipped || jsonb_build_object('granted', false, 'agent_id', v_agent.id, 'agent_slug', v_agent.slug,
        'skip_reason', 'error', 'error', sqlerrm, 'error_code', sqlstate);
    end;
  end loop;
  insert into public.agent_wake_state as state (agent_id, tenant_id, waitlisted_at, waitlist_path, waiting_since)
  select ready.id, p_instance.tenant_id, now(), 'sweep', ready.oldest from unnest(v_ready, v_oldest) as ready (id, oldest)
  on conflict (agent_id) do update
     set waitlisted_at = excluded.waitlisted_at, waitlist_path = excluded.waitlist_path, waiting_since = excluded.waiting_since, updated_at = now()
   where state.waitlisted_at is null;
  return v_skipped;
end
$$;

COMMENT ON FUNCTION public.fill_waitlist(p_instance public.dispatcher_instances) IS 'Puts every agent of the gateway that has work and open gates on the waitlist, oldest item first; answers the refused ones with their reason.';

CREATE FUNCTION public.find_inbox_agent(p_tenant_id uuid, p_agent_slug text) RETURNS uuid
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select agent.id from public.agents as agent where agent.tenant_id = p_tenant_id and agent.slug = p_agent_slug
$$;

COMMENT ON FUNCTION public.find_inbox_agent(p_tenant_id uuid, p_agent_slug text) IS 'The id of a tenant''s agent by its present slug; null when there is none.';

CREATE TABLE public.agent_wakes (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid NOT NULL,
    agent_id uuid NOT NULL,
    gateway_id uuid NOT NULL,
    instance_id uuid,
    claim_token uuid DEFAULT gen_random_uuid() NOT NULL,
    claim_request uuid,
    state text DEFAULT 'starting'::text NOT NULL,
    path text NOT NULL,
    item_ids uuid[] DEFAULT '{}'::uuid[] NOT NULL,
    chain_depth integer DEFAULT 0 NOT NULL,
    model_override text,
    thinking_override text,
    host_id text,
    pid integer,
    pid_started_at double precision,
    claimed_at timestamp with time zone DEFAULT now() NOT NULL,
    started_at timestamp with time zone,
    deadline_at timestamp with time zone NOT NULL,
    progressed_at timestamp with time zone,
    ended_at timestamp with time zone,
    exit_code integer,
    error text,
    CONSTRAINT agent_wakes_ended_has_time CHECK (((state = ANY (ARRAY['starting'::text, 'running'::text])) = (ended_at IS NULL))),
    CONSTRAINT agent_wakes_path_check CHECK ((path = ANY (ARRAY['event'::text, 'sweep'::text, 'waitlist'::text, 'due'::text, 'command'::text]))),
    CONSTRAINT agent_wakes_running_has_pid CHECK (((state <> 'running'::text) OR ((pid IS NOT NULL) AND (started_at IS NOT NULL)))),
    CONSTRAINT agent_wakes_state_check CHECK ((state = ANY (ARRAY['starting'::text, 'running'::text, 'succeeded'::text, 'failed'::text, 'timed_out'::text, 'no_progress'::text, 'lost'::text, 'interrupted'::text, 'spawn_failed'::text])))
);

COMMENT ON TABLE public.agent_wakes IS 'One row per wake: one run of `openclaw agent` for one agent, from its claim to its end.';

CREATE FUNCTION public.find_sender_wake(p_agent_id uuid) RETURNS public.agent_wakes
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select wake.* from public.agent_wakes as wake
   where wake.agent_id = p_agent_id
     and (wake.state in ('starting', 'running') or wake.ended_at > clock_timestamp() - interval '60 seconds')
   order by wake.claimed_at desc
   limit 1
$$;

COMMENT ON FUNCTION public.find_sender_wake(p_agent_id uuid) IS 'The wake an agent acts in: its live one, else the latest if it ended within 60 s (a turn can outlive its process); null when it acts outside a wake.';

CREATE FUNCTION public.gateway_settings(p_gateway_id uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select settings from public.dispatcher_instances where gateway_id = p_gateway_id
   order by (state = 'running') desc, last_heartbeat_at desc limit 1
$$;

COMMENT ON FUNCTION public.gateway_settings(p_gateway_id uuid) IS 'The settings of the gateway''s most recent daemon; NULL when none ever ran.';

CREATE FUNCTION public.give_up_item(p_item_id uuid, p_reason text) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  update public.agent_inbox_items
     set status = 'dead_letter', failed_at = now(), leased_at = null, leased_until = null, updated_at = now(),
         context = context || jsonb_build_object('last_failure_reason', p_reason)
   where id = p_item_id
$$;

COMMENT ON FUNCTION public.give_up_item(p_item_id uuid, p_reason text) IS 'dead_letter with its reason.';

CREATE FUNCTION public.heartbeat_dispatcher_instance(p_instance_id uuid, p_live_wake_ids uuid[], p_nonce uuid, p_facts jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_instance public.dispatcher_instances;
  v_wake public.agent_wakes;
  v_renewed integer;
  v_fenced jsonb;
begin
  v_instance := public.running_instance(p_instance_id);
  update public.dispatcher_instances
     set last_heartbeat_at = now(), canary = p_nonce, realtime = coalesce(p_facts -> 'realtime', realtime), health = coalesce(p_facts -> 'health', health),
         state = case state when 'lost' then 'running' else state end
   where id = p_instance_id;
  perform public.send_gateway_hint(v_instance.gateway_id, 'canary', jsonb_build_object('instance_id', p_instance_id, 'nonce', p_nonce));
  v_renewed := public.renew_wake_leases(p_instance_id, p_live_wake_ids, (v_instance.settings ->> 'lease_seconds')::integer);
  -- A claim whose answer never arrived has no process: it is closed, so that its agent is not in flight for ever.
  for v_wake in
    select * from public.agent_wakes where instance_id = p_instance_id and state in ('starting', 'running')
       and claimed_at < now() - interval '20 seconds' and id <> all (p_live_wake_ids)
  loop
    perform public.end_wake(v_wake.id, v_wake.claim_token, 'interrupted', null, 'claimed, but its instance runs no process for it');
  end loop;
  select jsonb_agg(live.id) into v_fenced from unnest(p_live_wake_ids) as live (id)
   where not exists (select from public.agent_wakes as wake where wake.id = live.id and wake.instance_id = p_instance_id and wake.ended_at is null);
  return jsonb_build_object('renewed', v_renewed, 'broadcast_available', public.broadcast_hints_available(),
                            'fenced', coalesce(v_fenced, '[]'), 'now', now());
end
$$;

COMMENT ON FUNCTION public.heartbeat_dispatcher_instance(p_instance_id uuid, p_live_wake_ids uuid[], p_nonce uuid, p_facts jsonb) IS 'One heartbeat: the instance lives, its leases are renewed, its canary (p_nonce) is sent, claims it never heard of are closed, and wakes it no longer owns are named (fenced).';

CREATE FUNCTION public.hint_agent_change() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
begin
  perform public.send_gateway_hint(new.gateway_id, 'agent', jsonb_build_object('agent_id', new.id));
  if old.gateway_id is distinct from new.gateway_id then
    perform public.send_gateway_hint(old.gateway_id, 'agent', jsonb_build_object('agent_id', new.id));
  end if;
  return null;
exception when others then
  return null;
end
$$;

COMMENT ON FUNCTION public.hint_agent_change() IS 'After an agent''s status or gateway changed: a hint to its gateway, and to the one it left. Never fails the update.';

CREATE FUNCTION public.hint_budget_change() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
begin
  perform public.send_gateway_hint((select gateway_id from public.agents where id = new.agent_id), 'agent', jsonb_build_object('agent_id', new.agent_id));
  return null;
exception when others then
  return null;
end
$$;

COMMENT ON FUNCTION public.hint_budget_change() IS 'After an agent''s budget changed its status, limit or cutoff: a hint to its gateway. Never fails the update.';

CREATE FUNCTION public.hint_inbox_insert() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
declare
  v_hint record;
begin
  for v_hint in
    select agent.gateway_id, agent.id as agent_id, (array_agg(item.id order by item.created_at, item.id))[1:50] as item_ids,
           bool_or(origin.from_agent_id is distinct from item.agent_id) as from_outside
      from new_items as item
      join public.agents as agent on agent.id = item.agent_id
      left join public.inbox_item_origins as origin on origin.item_id = item.id
     where item.status = 'pending'
     group by agent.gateway_id, agent.id
  loop
    perform public.send_gateway_hint(v_hint.gateway_id, 'inbox',
      jsonb_build_object('agent_id', v_hint.agent_id, 'item_id', v_hint.item_ids[1])
      || case when cardinality(v_hint.item_ids) > 1 then jsonb_build_object('item_ids', v_hint.item_ids) else '{}'::jsonb end);
    if v_hint.from_outside then
      perform public.reset_wake_failures(v_hint.agent_id);
    end if;
  end loop;
  return null;
exception when others then
  return null;
end
$$;

COMMENT ON FUNCTION public.hint_inbox_insert() IS 'After an insert of items: one hint per agent to its gateway ({agent_id, item_id, item_ids}), and new context resets the agent''s failures. Never fails the insert.';

CREATE FUNCTION public.inbox_close_verdict(p_item_id uuid, p_code text) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select jsonb_build_object('applied', p_code in ('ok', 'already'), 'code', p_code,
                            'status', item.status, 'attempt', item.attempt_count, 'max_attempts', item.max_attempts)
  from (select 1) as one_row left join public.agent_inbox_items as item on item.id = p_item_id
$$;

COMMENT ON FUNCTION public.inbox_close_verdict(p_item_id uuid, p_code text) IS 'The answer of the closing functions: {applied, code, status, attempt, max_attempts}; the last three are null when the item is unknown.';

CREATE FUNCTION public.inbox_items_of_lease(p_agent_id uuid, p_lease_token uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(jsonb_agg(jsonb_build_object(
           'inbox_item_id', item.id,
           'event_type', item.event_type,
           'summary', item.summary,
           'task_id', item.task_id,
           'comment_id', item.comment_id,
           'contact_id', item.contact_id,
           'attempt', item.attempt_count,
           'leased_until', item.leased_until,
           'lease_token', lease.lease_token,
           'context', case when task.id is null then item.context
                           else jsonb_build_object('task', jsonb_build_object(
                                  'id', task.id, 'title', task.title, 'description', task.description, 'status', task.status,
                                  'priority', task.priority, 'tags', task.tags, 'due_date', task.due_date))
                                || public.merge_inbox_context(item.context, '{}') end
         ) order by item.created_at, item.id), '[]'::jsonb)
    from public.agent_inbox_items as item
    join public.inbox_item_leases as lease on lease.item_id = item.id
    left join public.tasks as task on task.id = item.task_id and task.tenant_id = item.tenant_id
   where item.agent_id = p_agent_id
     and item.status = 'leased'
     and item.leased_until > clock_timestamp()
     and lease.lease_token = p_lease_token
     and lease.leased_at = item.leased_at
     and lease.closed_at is null
$$;

COMMENT ON FUNCTION public.inbox_items_of_lease(p_agent_id uuid, p_lease_token uuid) IS 'The items an agent holds under one lease token, oldest first, as the agent''s script prints them; an item''s task is laid into its context.';

CREATE FUNCTION public.inbox_overview(p_tenant_id uuid, p_agent_slug text) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_agent_id uuid := public.find_inbox_agent(p_tenant_id, p_agent_slug);
begin
  if v_agent_id is null then
    return jsonb_build_object('code', 'unknown_agent');
  end if;
  return jsonb_build_object(
    'agent', jsonb_build_object('id', v_agent_id, 'slug', p_agent_slug),
    'actionable_count', (select count(*) from public.agent_inbox_due as due
                          where due.agent_id = v_agent_id and due.due_at <= clock_timestamp()),
    'by_status', (select coalesce(jsonb_object_agg(counted.status, counted.amount), '{}'::jsonb)
                    from (select item.status, count(*) as amount from public.agent_inbox_items as item
                           where item.agent_id = v_agent_id and item.status in ('pending', 'failed', 'leased')
                           group by item.status) as counted),
    'items', (select coalesce(jsonb_agg(listed.entry order by listed.created_at, listed.id), '[]'::jsonb)
                from (select item.created_at, item.id, jsonb_build_object(
                               'inbox_item_id', item.id, 'event_type', item.event_type, 'summary', item.summary,
                               'task_id', item.task_id, 'status', item.status, 'attempt', item.attempt_count,
                               'max_attempts', item.max_attempts, 'due_at', due.due_at, 'leased_until', item.leased_until,
                               'created_at', item.created_at) as entry
                        from public.agent_inbox_items as item
                        left join public.agent_inbox_due as due on due.id = item.id
                       where item.agent_id = v_agent_id and item.status in ('pending', 'failed', 'leased')
                       order by item.created_at, item.id
                       limit 50) as listed));
end
$$;

COMMENT ON FUNCTION public.inbox_overview(p_tenant_id uuid, p_agent_slug text) IS 'What waits for an agent, without leasing: {agent, actionable_count (due now), by_status (pending, failed, leased), items (the 50 oldest open; due_at null without attempts left)}, or {code: unknown_agent}.';

CREATE FUNCTION public.inbox_post_key(p_request_key text, p_wake_id uuid, p_content text, p_at timestamp with time zone) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$
  select case
    when p_request_key <> '' then 'key:' || p_request_key
    else 'content:' || encode(sha256(convert_to(
           coalesce(p_wake_id::text, floor(extract(epoch from p_at) / 600)::text) || chr(31) || p_content, 'UTF8')), 'hex')
  end
$$;

COMMENT ON FUNCTION public.inbox_post_key(p_request_key text, p_wake_id uuid, p_content text, p_at timestamp with time zone) IS 'What makes two posts of a sender the same one: the caller''s key, else the same content within the same wake, else within the same ten minutes.';

CREATE FUNCTION public.inbox_retry_delay(p_attempt integer) RETURNS interval
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$
  select make_interval(secs => least(900, 30 * power(2, least(greatest(p_attempt, 1), 12) - 1)))
$$;

COMMENT ON FUNCTION public.inbox_retry_delay(p_attempt integer) IS 'How long a failed item rests after its n-th attempt: 30 s, doubled per attempt, at most 900 s.';

CREATE TABLE public.agent_inbox_items (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    agent_id uuid NOT NULL,
    agent_slug text NOT NULL,
    event_type public.inbox_event_type NOT NULL,
    task_id uuid,
    comment_id uuid,
    contact_id uuid,
    status public.inbox_item_status DEFAULT 'pending'::public.inbox_item_status NOT NULL,
    leased_at timestamp with time zone,
    leased_until timestamp with time zone,
    completed_at timestamp with time zone,
    failed_at timestamp with time zone,
    attempt_count integer DEFAULT 0 NOT NULL,
    max_attempts integer DEFAULT 3 NOT NULL,
    summary text,
    context jsonb DEFAULT '{}'::jsonb NOT NULL,
    last_wake_attempt_at timestamp with time zone,
    last_wake_success_at timestamp with time zone,
    dedup_key text NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

ALTER TABLE ONLY public.agent_inbox_items REPLICA IDENTITY FULL;

COMMENT ON TABLE public.agent_inbox_items IS 'Work for agents: one row per item. The woken agent leases and closes it.';

CREATE FUNCTION public.lease_inbox_item(p_agent_id uuid, p_lease_seconds integer DEFAULT 120) RETURNS SETOF public.agent_inbox_items
    LANGUAGE sql
    SET search_path TO ''
    AS $$
        update public.agent_inbox_items as item
           set status = 'leased', attempt_count = item.attempt_count + 1, leased_at = now(),
               leased_until = now() + make_interval(secs => p_lease_seconds), updated_at = now()
         where item.id = (select candidate.id from public.agent_inbox_items as candidate
                           where candidate.agent_id = p_agent_id
                             and candidate.attempt_count < candidate.max_attempts
                             and (candidate.status in ('pending', 'failed')
                                  or (candidate.status = 'leased' and candidate.leased_until < now()))
                           order by candidate.created_at
                           limit 1
                           for update skip locked)
        returning item.*
      $$;

COMMENT ON FUNCTION public.lease_inbox_item(p_agent_id uuid, p_lease_seconds integer) IS 'Leases the oldest item of an agent that has attempts left; spends one attempt.';

CREATE FUNCTION public.lease_inbox_items(p_tenant_id uuid, p_agent_slug text, p_limit integer DEFAULT 1, p_lease_seconds integer DEFAULT 120, p_lease_token uuid DEFAULT NULL::uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_agent_id uuid := public.find_inbox_agent(p_tenant_id, p_agent_slug);
  v_token uuid := coalesce(p_lease_token, gen_random_uuid());
  v_seconds integer := least(greatest(coalesce(p_lease_seconds, 120), 1), 86400);
  v_wanted integer := least(greatest(coalesce(p_limit, 1), 1), 100);
  v_items jsonb;
  v_item_id uuid;
  v_wake_id uuid;
begin
  if v_agent_id is null then
    return jsonb_build_object('code', 'unknown_agent');
  end if;
  -- A repeat waits for the first call of the same token, then gets that call's items: no second attempt is spent.
  perform pg_advisory_xact_lock(hashtextextended('lease_inbox_items ' || v_token::text, 0));
  v_items := public.inbox_items_of_lease(v_agent_id, v_token);
  if jsonb_array_length(v_items) = 0 then
    -- Held until the lease is written: a wake that ends now ends before or after it, and then gives the items back.
    select wake.id into v_wake_id from public.agent_wakes as wake
     where wake.agent_id = v_agent_id and wake.state in ('starting', 'running')
       for key share;
    for v_item_id in
      select due.id from public.agent_inbox_due as due
       where due.tenant_id = p_tenant_id and due.agent_id = v_agent_id and due.due_at <= clock_timestamp()
       order by due.created_at, due.id
       limit 200 -- lets the planner walk the index instead of sorting the backlog; far more than others can hold locked
    loop
      if public.lease_one_inbox_item(v_item_id, v_seconds, v_token, v_wake_id) then
        v_wanted := v_wanted - 1;
      end if;
      exit when v_wanted = 0;
    end loop;
    v_items := public.inbox_items_of_lease(v_agent_id, v_token);
  end if;
  return jsonb_build_object('agent', jsonb_build_object('id', v_agent_id, 'slug', p_agent_slug), 'items', v_items);
end
$$;

COMMENT ON FUNCTION public.lease_inbox_items(p_tenant_id uuid, p_agent_slug text, p_limit integer, p_lease_seconds integer, p_lease_token uuid) IS 'Leases up to p_limit (1-100) due items of an agent, oldest first, for p_lease_seconds (1-86400): {agent: {id, slug}, items: [...]}, or {code: unknown_agent}. The items of one call share p_lease_token; a repeat with the same token returns the same items.';

CREATE FUNCTION public.lease_one_inbox_item(p_item_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_now timestamptz;
begin
  perform 1 from public.agent_inbox_items as item where item.id = p_item_id for update skip locked;
  if not found then
    return false;
  end if;
  v_now := clock_timestamp();
  -- Read anew under the lock: another session may have leased or closed the item since it was picked.
  if not exists (select 1 from public.agent_inbox_due as due where due.id = p_item_id and due.due_at <= v_now) then
    return false;
  end if;
  update public.agent_inbox_items as item
     set status = 'leased', leased_at = v_now, leased_until = v_now + make_interval(secs => p_lease_seconds),
         attempt_count = item.attempt_count + 1, updated_at = v_now
   where item.id = p_item_id;
  insert into public.inbox_item_leases as lease
         (item_id, tenant_id, agent_id, wake_id, lease_token, attempt, leased_at, leased_until)
  select item.id, item.tenant_id, item.agent_id, p_wake_id, p_lease_token, item.attempt_count, item.leased_at, item.leased_until
    from public.agent_inbox_items as item
   where item.id = p_item_id
  on conflict (item_id) do update
     set tenant_id = excluded.tenant_id, agent_id = excluded.agent_id, wake_id = excluded.wake_id,
         lease_token = excluded.lease_token, attempt = excluded.attempt, leased_at = excluded.leased_at,
         leased_until = excluded.leased_until, closed_at = null, outcome = null;
  return true;
end
$$;

COMMENT ON FUNCTION public.lease_one_inbox_item(p_item_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) IS 'Leases one item if it is free and due; false when another session has it. The lease names the wake it is taken in, which keeps it alive.';

CREATE FUNCTION public.list_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_status text, p_limit integer) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_gateway_id uuid;
begin
  select id into v_gateway_id from public.gateways where tenant_id = p_tenant_id and (slug = p_gateway or id::text = p_gateway);
  if v_gateway_id is null then
    return jsonb_build_object('code', 'unknown_gateway', 'known',
      coalesce((select jsonb_agg(slug order by slug) from public.gateways where tenant_id = p_tenant_id), '[]'));
  end if;
  if p_agent is not null and not exists (select from public.agents where gateway_id = v_gateway_id and (slug = p_agent or id::text = p_agent)) then
    return jsonb_build_object('code', 'unknown_agent', 'known',
      coalesce((select jsonb_agg(slug order by slug) from public.agents where gateway_id = v_gateway_id), '[]'));
  end if;
  return jsonb_build_object('code', 'ok', 'items', coalesce((
    select jsonb_agg(to_jsonb(listed) order by listed.created_at desc)
      from (select item.id, agent.slug as agent, item.event_type, item.status, item.attempt_count, item.max_attempts, item.created_at,
                   item.leased_until, left(item.summary, 200) as summary, item.context ->> 'last_failure_reason' as last_failure_reason
              from public.agents as agent join public.agent_inbox_items as item on item.agent_id = agent.id
             where agent.gateway_id = v_gateway_id and (p_agent is null or agent.slug = p_agent or agent.id::text = p_agent)
               and (p_status is null or item.status::text = p_status)
             order by item.created_at desc limit p_limit) as listed), '[]'));
end
$$;

COMMENT ON FUNCTION public.list_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_status text, p_limit integer) IS 'The newest items of a gateway''s agents, or of one of them, for an operator.';

CREATE FUNCTION public.lock_inbox_lease(p_item_id uuid, p_lease_token uuid, p_outcomes text[]) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_item public.agent_inbox_items;
  v_lease public.inbox_item_leases;
begin
  -- The wake first, as end_wake does it: closing an item notes the wake's progress.
  perform from public.agent_wakes as wake
    where wake.agent_id = (select item.agent_id from public.agent_inbox_items as item where item.id = p_item_id)
      and wake.state in ('starting', 'running')
      for no key update;
  select * into v_item from public.agent_inbox_items as item where item.id = p_item_id for update;
  if not found then
    return 'not_found';
  end if;
  select * into v_lease from public.inbox_item_leases as lease where lease.item_id = p_item_id for update;
  if not found or v_lease.lease_token is distinct from p_lease_token then
    return 'lease_lost';
  end if;
  if v_lease.closed_at is not null then
    return case when v_lease.outcome = any (p_outcomes) then 'already' else 'lease_lost' end;
  end if;
  -- Callers of lease_inbox_item(uuid, integer) know no tokens: an item they took over differs in leased_at.
  if v_item.status = 'leased' and v_item.leased_at = v_lease.leased_at and v_item.leased_until > clock_timestamp() then
    return 'ok';
  end if;
  return 'lease_lost';
end
$$;

COMMENT ON FUNCTION public.lock_inbox_lease(p_item_id uuid, p_lease_token uuid, p_outcomes text[]) IS 'Locks an item and its lease and says whether the token still owns it: ok, already (closed by this token with one of the outcomes), lease_lost, not_found.';

CREATE FUNCTION public.mark_agent_stalled(p_agent_id uuid) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_agent record;
  v_first boolean;
  v_count integer;
begin
  update public.agent_wake_state set stalled_at = now(), waitlisted_at = null, waitlist_path = null, waiting_since = null, updated_at = now()
   where agent_id = p_agent_id and stalled_at is null;
  v_first := found;
  update public.agent_inbox_items
     set status = 'failed', failed_at = now(), updated_at = now(),
         context = context || jsonb_build_object('last_failure_reason', 'agent_stalled')
   where agent_id = p_agent_id and status = 'pending';
  get diagnostics v_count = row_count;
  if v_first then
    select * into v_agent from public.agents where id = p_agent_id;
    insert into public.notifications (tenant_id, type, title, body, entity_type, entity_id, actor_type, actor_agent_id, meta)
    select v_agent.tenant_id, 'agent_stalled', format('Agent %s is stalled', v_agent.slug),
           format('%s wakes in a row failed. Its %s pending item(s) wait as failed; a new item, or `dispatcher inbox requeue --agent %s`, wakes it again.',
                  state.consecutive_failures, v_count, v_agent.slug),
           'agent', p_agent_id, 'system', p_agent_id, jsonb_build_object('consecutive_failures', state.consecutive_failures, 'items', v_count)
      from public.agent_wake_state as state where state.agent_id = p_agent_id;
  end if;
  return v_count;
end
$$;

COMMENT ON FUNCTION public.mark_agent_stalled(p_agent_id uuid) IS 'Sets an agent''s pending items aside (failed, reason agent_stalled, attempts untouched) and tells the operator once per stall.';

CREATE FUNCTION public.mark_wake_items(p_item_ids uuid[], p_agent_id uuid, p_success boolean) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  update public.agent_inbox_items
     set last_wake_attempt_at = case when p_success then last_wake_attempt_at else now() end,
         last_wake_success_at = case when p_success then now() else last_wake_success_at end
   where agent_id = p_agent_id
     and (id = any (p_item_ids[1:100])
          or id in (select due.id from public.agent_inbox_due as due where due.agent_id = p_agent_id order by due.created_at limit 3))
$$;

COMMENT ON FUNCTION public.mark_wake_items(p_item_ids uuid[], p_agent_id uuid, p_success boolean) IS 'Stamps last_wake_attempt_at, or last_wake_success_at, on the items of a wake: those that caused it (at most 100) and the three the agent will lease first.';

CREATE FUNCTION public.merge_inbox_context(p_context jsonb, p_changes jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$
  select case
    when p_context is null then p_changes
    when jsonb_typeof(p_context) = 'object' then p_context || p_changes
    else jsonb_build_object('original_context', p_context) || p_changes
  end
$$;

COMMENT ON FUNCTION public.merge_inbox_context(p_context jsonb, p_changes jsonb) IS 'An item''s context with changes laid over it. A context that is no object is kept under original_context.';

CREATE FUNCTION public.note_inbox_update() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
begin
  if new.status in ('done', 'failed', 'dead_letter') and coalesce(current_setting('dispatcher.quiet', true), '') <> 'on' then
    update public.agent_wakes set progressed_at = now()
     where agent_id = new.agent_id and state in ('starting', 'running') and progressed_at is null;
  end if;
  if new.status in ('pending', 'failed') and coalesce(current_setting('dispatcher.quiet', true), '') <> 'on' then
    perform public.send_gateway_hint((select gateway_id from public.agents where id = new.agent_id), 'inbox',
                                     jsonb_build_object('agent_id', new.agent_id, 'item_id', new.id));
  end if;
  return null;
exception when others then
  return null;
end
$$;

COMMENT ON FUNCTION public.note_inbox_update() IS 'After an item changed its status: progress of the agent''s live wake, and a hint when it is back to pending or failed. Never fails the update.';

CREATE FUNCTION public.open_wakes_of_others(p_instance_id uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(jsonb_agg(jsonb_build_object(
           'wake_id', wake.id, 'claim_token', wake.claim_token, 'agent_id', wake.agent_id, 'agent_slug', agent.slug, 'state', wake.state,
           'host_id', coalesce(wake.host_id, owner.host_id), 'hostname', owner.hostname, 'pid', wake.pid, 'pid_started_at', wake.pid_started_at,
           'age', extract(epoch from now() - wake.claimed_at), 'deadline_in', extract(epoch from wake.deadline_at - now()),
           'owner_state', coalesce(owner.state, 'lost'), 'owner_pid', owner.pid, 'owner_pid_started_at', owner.pid_started_at,
           'owner_host_id', owner.host_id, 'owner_silent_for', extract(epoch from now() - owner.last_heartbeat_at)) order by wake.claimed_at), '[]')
    from public.agent_wakes as wake
    join public.dispatcher_instances as me on me.id = p_instance_id and me.gateway_id = wake.gateway_id
    join public.agents as agent on agent.id = wake.agent_id
    left join public.dispatcher_instances as owner on owner.id = wake.instance_id
   where wake.state in ('starting', 'running') and wake.instance_id is distinct from p_instance_id
$$;

COMMENT ON FUNCTION public.open_wakes_of_others(p_instance_id uuid) IS 'Live wakes of the instance''s gateway that another instance owns, with what is needed to tell whether their process and owner live.';

CREATE FUNCTION public.post_inbox_item(p_tenant_id uuid, p_from_agent_slug text, p_to_agent_slug text, p_event_type text, p_summary text, p_context jsonb DEFAULT '{}'::jsonb, p_request_key text DEFAULT NULL::text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $_$
declare
  v_sender_id uuid := public.find_inbox_agent(p_tenant_id, p_from_agent_slug);
  v_recipient_id uuid := public.find_inbox_agent(p_tenant_id, p_to_agent_slug);
  v_context jsonb := coalesce(p_context, '{}');
  v_summary text := left(p_summary, 2000);
  v_content text := concat_ws(chr(31), p_to_agent_slug, p_event_type, v_summary, v_context::text);
  v_now timestamptz := clock_timestamp();
  v_wake public.agent_wakes;
  v_key text;
  v_item_id uuid;
  v_depth integer;
begin
  if v_sender_id is null or v_recipient_id is null then
    return jsonb_build_object('applied', false, 'code', case when v_sender_id is null then 'unknown_agent' else 'unknown_recipient' end);
  end if;
  if not exists (select 1 from pg_catalog.pg_enum as label
                  where label.enumtypid = 'public.inbox_event_type'::regtype and label.enumlabel = p_event_type) then
    return jsonb_build_object('applied', false, 'code', 'invalid', 'detail', 'unknown event type');
  end if;
  if jsonb_typeof(v_context) <> 'object' or octet_length(v_context::text) > 262144 or length(p_request_key) > 500 then
    return jsonb_build_object('applied', false, 'code', 'invalid',
                              'detail', 'context must be an object of at most 256 KiB, the request key at most 500 characters');
  end if;
  -- An agent that wakes itself by accident never stops: a note to itself needs the word that it is meant.
  if v_sender_id = v_recipient_id and coalesce(v_context -> 'self_handoff', 'false') <> 'true' then
    return jsonb_build_object('applied', false, 'code', 'self_handoff_unmarked');
  end if;

  perform pg_advisory_xact_lock(hashtextextended('post_inbox_item ' || v_sender_id::text, 0));
  v_wake := public.find_sender_wake(v_sender_id);
  v_key := public.inbox_post_key(p_request_key, v_wake.id, v_content, v_now);
  select origin.item_id, origin.chain_depth into v_item_id, v_depth
    from public.inbox_item_origins as origin
   where origin.tenant_id = p_tenant_id and origin.from_agent_id = v_sender_id
     and origin.request_key in (v_key, public.inbox_post_key(p_request_key, v_wake.id, v_content, v_now - interval '10 minutes'))
   order by origin.created_at
   limit 1;
  if found then
    return jsonb_build_object('applied', true, 'code', 'already', 'inbox_item_id', v_item_id, 'chain_depth', v_depth);
  end if;

  v_depth := coalesce(v_wake.chain_depth + 1, 0);
  -- One statement: what looks at new items after the insert must already see where they come from.
  with posted as (
    insert into public.agent_inbox_items (tenant_id, agent_id, agent_slug, event_type, task_id, summary, context, dedup_key)
    values (p_tenant_id, v_recipient_id, p_to_agent_slug, p_event_type::public.inbox_event_type,
            (select task.id from public.tasks as task
              where task.tenant_id = p_tenant_id
                and task.id = substring(v_context ->> 'task_id' from '^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$')::uuid),
            v_summary,
            v_context || jsonb_build_object('from_agent', p_from_agent_slug),
            'handoff:' || gen_random_uuid()::text)
    returning id
  )
  insert into public.inbox_item_origins (item_id, tenant_id, wake_id, from_agent_id, chain_depth, request_key)
  select posted.id, p_tenant_id, v_wake.id, v_sender_id, v_depth, v_key from posted
  returning item_id into v_item_id;
  return jsonb_build_object('applied', true, 'code', 'ok', 'inbox_item_id', v_item_id, 'chain_depth', v_depth);
end
$_$;

COMMENT ON FUNCTION public.post_inbox_item(p_tenant_id uuid, p_from_agent_slug text, p_to_agent_slug text, p_event_type text, p_summary text, p_context jsonb, p_request_key text) IS 'An agent hands work to an agent: {applied, code: ok|already|unknown_agent|unknown_recipient|self_handoff_unmarked|invalid, inbox_item_id, chain_depth}. Records the sender and its wake. A repeat with the same p_request_key, or the same content within one wake, is the same item. To itself only with context.self_handoff = true.';

CREATE FUNCTION public.register_dispatcher_instance(p_tenant_id uuid, p_gateway text, p_identity jsonb, p_settings jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_gateway record;
  v_id uuid;
begin
  select id, slug into v_gateway from public.gateways where tenant_id = p_tenant_id and (slug = p_gateway or id::text = p_gateway);
  if v_gateway is null then
    return jsonb_build_object('code', 'unknown_gateway', 'known',
      coalesce((select jsonb_agg(slug order by slug) from public.gateways where tenant_id = p_tenant_id), '[]'));
  end if;
  insert into public.dispatcher_gateways (gateway_id, tenant_id) values (v_gateway.id, p_tenant_id) on conflict do nothing;
  delete from public.dispatcher_instances as old
   where old.gateway_id = v_gateway.id and old.last_heartbeat_at < now() - interval '7 days'
     and not exists (select from public.agent_wakes as wake where wake.instance_id = old.id and wake.ended_at is null);
  insert into public.dispatcher_instances as instance (id, tenant_id, gateway_id, hostname, host_id, pid, pid_started_at, version, settings)
  values (coalesce((p_identity ->> 'instance_id')::uuid, gen_random_uuid()), p_tenant_id, v_gateway.id, p_identity ->> 'hostname',
          p_identity ->> 'host_id', (p_identity ->> 'pid')::integer, (p_identity ->> 'pid_started_at')::double precision,
          p_identity ->> 'version', p_settings)
  on conflict (id) do update
     set state = 'running', stopped_at = null, last_heartbeat_at = now(), settings = excluded.settings
   where instance.gateway_id = excluded.gateway_id and instance.pid = excluded.pid
  returning id into v_id;
  return jsonb_build_object('code', 'ok', 'instance_id', v_id, 'gateway_id', v_gateway.id, 'gateway_slug', v_gateway.slug,
                            'topic', public.dispatcher_gateway_topic(v_gateway.id), 'broadcast_available', public.broadcast_hints_available(),
                            'open_wakes', public.open_wakes_of_others(v_id), 'now', now());
end
$$;

COMMENT ON FUNCTION public.register_dispatcher_instance(p_tenant_id uuid, p_gateway text, p_identity jsonb, p_settings jsonb) IS 'Registers a daemon for a gateway (slug or id) under the id it chose (p_identity.instance_id); a repeat is the same row. Answers {code: ok, instance_id, gateway_id, topic, broadcast_available, open_wakes} or {code: unknown_gateway, known}.';

CREATE FUNCTION public.release_wake_leases(p_wake public.agent_wakes, p_give_back boolean, p_reason text) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_item record;
  v_count integer := 0;
begin
  for v_item in
    select item.id, item.attempt_count, item.max_attempts from public.agent_inbox_items as item
     where item.agent_id = p_wake.agent_id and item.status = 'leased'
       and (item.leased_at >= p_wake.claimed_at
            or exists (select from public.inbox_item_leases as lease where lease.item_id = item.id and lease.wake_id = p_wake.id and lease.closed_at is null))
     order by item.created_at for update
  loop
    v_count := v_count + 1;
    update public.inbox_item_leases set closed_at = now(), outcome = case when p_give_back then 'released' else 'lost' end
     where item_id = v_item.id and closed_at is null;
    if not p_give_back and v_item.attempt_count >= v_item.max_attempts then
      perform public.give_up_item(v_item.id, p_reason);
    else
      update public.agent_inbox_items
         set status = 'pending', leased_at = null, leased_until = null, updated_at = now(),
             attempt_count = greatest(attempt_count - p_give_back::integer, 0)
       where id = v_item.id;
    end if;
  end loop;
  return v_count;
end
$$;

COMMENT ON FUNCTION public.release_wake_leases(p_wake public.agent_wakes, p_give_back boolean, p_reason text) IS 'Releases the leases taken during a wake; gives their attempts back when p_give_back, else an item without attempts left becomes dead_letter with p_reason.';

CREATE FUNCTION public.renew_wake_leases(p_instance_id uuid, p_wake_ids uuid[], p_lease_seconds integer) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_count integer;
begin
  with renewed as (
    update public.agent_inbox_items as item
       set leased_until = now() + make_interval(secs => p_lease_seconds)
      from public.agent_wakes as wake
     where wake.id = any (p_wake_ids) and wake.instance_id = p_instance_id and wake.state in ('starting', 'running')
       and item.agent_id = wake.agent_id and item.status = 'leased' and item.leased_at >= wake.claimed_at
       and item.leased_until < now() + make_interval(secs => p_lease_seconds * 0.75)
    returning item.id, item.leased_until
  ), leases as (
    update public.inbox_item_leases as lease set leased_until = renewed.leased_until
      from renewed where lease.item_id = renewed.id and lease.closed_at is null
  )
  select count(*) into v_count from renewed;
  return v_count;
end
$$;

COMMENT ON FUNCTION public.renew_wake_leases(p_instance_id uuid, p_wake_ids uuid[], p_lease_seconds integer) IS 'Prolongs the leases taken during the given live wakes of this instance, so that a lease never ends before the work. Answers how many.';

CREATE FUNCTION public.report_wakes(p_instance_id uuid, p_reports jsonb, p_claim_limit integer, p_request uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '8s'
    AS $$
declare
  v_report jsonb;
  v_answer jsonb;
  v_answers jsonb := '[]';
begin
  -- The gateway's lock first: everything below may need it, and one order of locks is what keeps two daemons from waiting for each other.
  perform from public.dispatcher_gateways
   where gateway_id = (select gateway_id from public.dispatcher_instances where id = p_instance_id) for update;
  for v_report in select value from jsonb_array_elements(p_reports) loop
    begin
      if v_report ->> 'report' = 'started' then
        v_answer := public.start_wake((v_report ->> 'wake_id')::uuid, (v_report ->> 'claim_token')::uuid, v_report ->> 'host_id',
                                      (v_report ->> 'pid')::integer, (v_report ->> 'pid_started_at')::double precision);
      else
        v_answer := public.end_wake((v_report ->> 'wake_id')::uuid, (v_report ->> 'claim_token')::uuid, v_report ->> 'ending',
                                    (v_report ->> 'exit_code')::integer, v_report ->> 'error');
      end if;
    exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
      raise;
    when others then
      v_answer := jsonb_build_object('wake_id', v_report ->> 'wake_id', 'applied', false, 'code', 'error', 'error', sqlerrm, 'error_code', sqlstate);
    end;
    v_answers := v_answers || (v_answer || jsonb_build_object('report', v_report ->> 'report'));
  end loop;
  return jsonb_build_object('results', v_answers, 'claims', public.claim_waiting_wakes(p_instance_id, p_claim_limit, p_request));
end
$$;

COMMENT ON FUNCTION public.report_wakes(p_instance_id uuid, p_reports jsonb, p_claim_limit integer, p_request uuid) IS 'What happened to wakes since the last call, and the next claims off the waitlist, in one round trip. p_reports: [{report: started|ended, wake_id, claim_token, …}].';

CREATE FUNCTION public.request_wake(p_tenant_id uuid, p_gateway text, p_agent text, p_dry_run boolean, p_settings jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_gateway_id uuid;
  v_agent record;
  v_gates record;
  v_settings jsonb;
  v_live integer;
begin
  select id into v_gateway_id from public.gateways where tenant_id = p_tenant_id and (slug = p_gateway or id::text = p_gateway);
  if v_gateway_id is null then
    return jsonb_build_object('code', 'unknown_gateway', 'known',
      coalesce((select jsonb_agg(slug order by slug) from public.gateways where tenant_id = p_tenant_id), '[]'));
  end if;
  select id, slug into v_agent from public.agents where tenant_id = p_tenant_id and gateway_id = v_gateway_id and (slug = p_agent or id::text = p_agent);
  if v_agent is null then
    return jsonb_build_object('code', 'unknown_agent', 'known',
      coalesce((select jsonb_agg(slug order by slug) from public.agents where tenant_id = p_tenant_id and gateway_id = v_gateway_id), '[]'));
  end if;
  v_settings := coalesce(public.gateway_settings(v_gateway_id), p_settings);
  select * into v_gates from public.wake_gates(v_agent.id, v_settings, p_dry_run);
  select count(*) into v_live from public.agent_wakes where gateway_id = v_gateway_id and state in ('starting', 'running');
  if v_live >= (v_settings ->> 'max_concurrent_wakes')::integer then
    v_gates.blocked := v_gates.blocked || 'concurrency_limit'::text;
  end if;
  if not p_dry_run and v_gates.blocked <@ array['concurrency_limit'] then
    insert into public.agent_wake_state as state (agent_id, tenant_id, waitlisted_at, waitlist_path, waiting_since)
    values (v_agent.id, p_tenant_id, now(), 'command', now())
    on conflict (agent_id) do update set waitlisted_at = coalesce(state.waitlisted_at, now()), waitlist_path = coalesce(state.waitlist_path, 'command'),
      waiting_since = coalesce(state.waiting_since, now()), updated_at = now();
    perform public.send_gateway_hint(v_gateway_id, 'agent', jsonb_build_object('agent_id', v_agent.id));
  end if;
  return jsonb_build_object('code', 'ok', 'agent', v_agent.slug, 'agent_id', v_agent.id, 'blocked', to_jsonb(v_gates.blocked),
                            'retry_in', extract(epoch from v_gates.retry_at - now()), 'requested', not p_dry_run and v_gates.blocked <@ array['concurrency_limit'],
                            'daemons', (select count(*) from public.dispatcher_instances where gateway_id = v_gateway_id and state = 'running'
                                          and last_heartbeat_at > now() - interval '45 seconds'), 'now', clock_timestamp());
end
$$;

COMMENT ON FUNCTION public.request_wake(p_tenant_id uuid, p_gateway text, p_agent text, p_dry_run boolean, p_settings jsonb) IS 'Asks for one wake through the gates: puts the agent on the waitlist and hints its daemon, or names the gates that refuse (all of them when p_dry_run).';

CREATE FUNCTION public.requeue_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_item_ids uuid[]) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_ids uuid[];
  v_agents uuid[];
begin
  with wanted as (
    select item.id, item.agent_id from public.agent_inbox_items as item
      join public.agents as agent on agent.id = item.agent_id
      join public.gateways as gateway on gateway.id = agent.gateway_id
     where item.tenant_id = p_tenant_id and (gateway.slug = p_gateway or gateway.id::text = p_gateway)
       and (p_agent is null or agent.slug = p_agent or agent.id::text = p_agent)
       and case when p_item_ids is null then item.status = 'failed' and (item.context ->> 'last_failure_reason' = 'agent_stalled')
                else item.id = any (p_item_ids) and item.status in ('failed', 'dead_letter') end
     for update of item
  ), requeued as (
    update public.agent_inbox_items as item
       set status = 'pending', failed_at = null, leased_at = null, leased_until = null, updated_at = now(),
           attempt_count = case when item.attempt_count >= item.max_attempts then 0 else item.attempt_count end
      from wanted where item.id = wanted.id returning item.id, item.agent_id
  ), origins as (
    update public.inbox_item_origins as origin set chain_depth = 0 from requeued where origin.item_id = requeued.id
  )
  select array_agg(id), array_agg(distinct agent_id) into v_ids, v_agents from requeued;
  update public.agent_wake_state as state set consecutive_failures = 0, stalled_at = null, updated_at = now()
    from public.agents as agent join public.gateways as gateway on gateway.id = agent.gateway_id
   where agent.id = state.agent_id and agent.tenant_id = p_tenant_id and (gateway.slug = p_gateway or gateway.id::text = p_gateway)
     and (agent.id = any (v_agents) or agent.slug = p_agent or agent.id::text = p_agent);
  return jsonb_build_object('requeued', coalesce(cardinality(v_ids), 0), 'item_ids', coalesce(to_jsonb(v_ids), '[]'));
end
$$;

COMMENT ON FUNCTION public.requeue_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_item_ids uuid[]) IS 'Brings items back to pending and clears their agents'' stall: the given failed or dead_letter ids, or all that a stall set aside. Spent attempts start anew.';

CREATE FUNCTION public.reset_wake_failures(p_agent_id uuid) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  update public.agent_wake_state
     set consecutive_failures = 0, stalled_at = null, updated_at = now()
   where agent_id = p_agent_id and (consecutive_failures > 0 or stalled_at is not null)
$$;

COMMENT ON FUNCTION public.reset_wake_failures(p_agent_id uuid) IS 'New context for an agent: its failures in a row and its stall are forgotten; the base cooldown stays.';

CREATE FUNCTION public.running_instance(p_instance_id uuid) RETURNS public.dispatcher_instances
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_instance public.dispatcher_instances;
begin
  select * into v_instance from public.dispatcher_instances where id = p_instance_id;
  if v_instance.id is null then
    raise exception 'no dispatcher instance %', p_instance_id using errcode = 'OD001', hint = 'Register the instance again.';
  end if;
  return v_instance;
end
$$;

COMMENT ON FUNCTION public.running_instance(p_instance_id uuid) IS 'The row of an instance; raises OD001 when it is not registered.';

CREATE FUNCTION public.send_gateway_hint(p_gateway_id uuid, p_event text, p_payload jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $_$
begin
  if p_gateway_id is not null and to_regprocedure('realtime.send(jsonb,text,text,boolean)') is not null then
    execute 'select realtime.send($1, $2, $3, true)' using p_payload, p_event, public.dispatcher_gateway_topic(p_gateway_id);
  end if;
exception when others then
  -- A hint is worth less than the row it speaks of; the sweep finds the row.
  null;
end
$_$;

COMMENT ON FUNCTION public.send_gateway_hint(p_gateway_id uuid, p_event text, p_payload jsonb) IS 'Broadcasts a hint to the private topic of a gateway once the transaction commits. Never fails; without realtime.send it does nothing.';

CREATE FUNCTION public.settle_stalled_agents(p_instance public.dispatcher_instances) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_agent_id uuid;
  v_count integer := 0;
begin
  for v_agent_id in
    select state.agent_id from public.agent_wake_state as state join public.agents as agent on agent.id = state.agent_id
     where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id
       and state.consecutive_failures >= (p_instance.settings ->> 'max_consecutive_failures')::integer
       and (state.stalled_at is null
            or exists (select from public.agent_inbox_items as item where item.agent_id = state.agent_id and item.status = 'pending'))
     order by state.agent_id for update of state
  loop
    v_count := v_count + public.mark_agent_stalled(v_agent_id);
  end loop;
  return v_count;
end
$$;

COMMENT ON FUNCTION public.settle_stalled_agents(p_instance public.dispatcher_instances) IS 'Sets the pending items of stalled agents aside and notifies once per stall.';

CREATE FUNCTION public.spend_attempt_of_lost_wake(p_wake public.agent_wakes) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_item record;
begin
  -- A daemon that dies again and again over one item must end too: a lost wake during which nothing was leased costs its first item an attempt.
  if exists (select from public.inbox_item_leases where wake_id = p_wake.id) then
    return;
  end if;
  update public.agent_inbox_items set attempt_count = attempt_count + 1, updated_at = now()
   where id = p_wake.item_ids[1] and status in ('pending', 'failed') and attempt_count < max_attempts
  returning id, attempt_count, max_attempts into v_item;
  if v_item.attempt_count >= v_item.max_attempts then
    perform public.give_up_item(v_item.id, 'worker lost');
  end if;
end
$$;

COMMENT ON FUNCTION public.spend_attempt_of_lost_wake(p_wake public.agent_wakes) IS 'A poison item ends at max_attempts also when it is the daemon that dies of it.';

CREATE FUNCTION public.start_wake(p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_wake public.agent_wakes;
begin
  update public.agent_wakes
     set state = 'running', host_id = p_host_id, pid = p_pid, pid_started_at = p_pid_started_at, started_at = now()
   where id = p_wake_id and claim_token = p_claim_token and state = 'starting'
  returning * into v_wake;
  if v_wake.id is null then
    select * into v_wake from public.agent_wakes where id = p_wake_id;
    return jsonb_build_object('wake_id', p_wake_id, 'applied', v_wake.state = 'running' and v_wake.claim_token = p_claim_token and v_wake.pid = p_pid,
                              'code', case when v_wake.claim_token = p_claim_token and v_wake.pid = p_pid then 'already' else 'fence_lost' end);
  end if;
  perform public.mark_wake_items(v_wake.item_ids, v_wake.agent_id, true);
  return jsonb_build_object('wake_id', p_wake_id, 'applied', true, 'code', 'ok');
end
$$;

COMMENT ON FUNCTION public.start_wake(p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) IS 'The process of a claimed wake started: keeps its pid, start time and host, and stamps last_wake_success_at. Needs the claim token.';

CREATE FUNCTION public.stop_dispatcher_instance(p_instance_id uuid) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  update public.dispatcher_instances set state = 'stopped', stopped_at = now(), last_heartbeat_at = now()
   where id = p_instance_id and state <> 'stopped'
$$;

COMMENT ON FUNCTION public.stop_dispatcher_instance(p_instance_id uuid) IS 'A daemon ended in good order.';

CREATE FUNCTION public.stop_wake_chains(p_instance public.dispatcher_instances) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_limit constant integer := public.wake_chain_limit(p_instance.settings);
  v_chain record;
  v_count integer := 0;
begin
  for v_chain in
    select agent.id, agent.slug, agent.tenant_id, array_agg(item.id) as item_ids, max(origin.chain_depth) as depth
      from public.agents as agent
      join public.agent_inbox_items as item on item.agent_id = agent.id and item.status in ('pending', 'failed') and item.attempt_count < item.max_attempts
      join public.inbox_item_origins as origin on origin.item_id = item.id and origin.chain_depth >= v_limit
     where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id
     group by agent.id, agent.slug, agent.tenant_id
  loop
    update public.agent_inbox_items
       set status = 'dead_letter', failed_at = now(), updated_at = now(),
           context = context || jsonb_build_object('last_failure_reason', format('wake chain limit (%s) reached', v_limit))
     where id = any (v_chain.item_ids);
    v_count := v_count + cardinality(v_chain.item_ids);
    -- One alert per agent and hour: a ring that goes on posting must not flood the operator either.
    insert into public.agent_wake_state (agent_id, tenant_id) values (v_chain.id, v_chain.tenant_id) on conflict do nothing;
    update public.agent_wake_state set chain_notified_at = now()
     where agent_id = v_chain.id and (chain_notified_at is null or chain_notified_at < now() - interval '1 hour');
    if found then
      insert into public.notifications (tenant_id, type, title, body, entity_type, entity_id, actor_type, actor_agent_id, meta)
      values (v_chain.tenant_id, 'wake_chain_limit', format('Agent %s was stopped in a chain of wakes', v_chain.slug),
              format('Agents woke each other %s times in a row; %s item(s) were set aside. `dispatcher inbox requeue` brings them back.',
                     v_chain.depth, cardinality(v_chain.item_ids)),
              'agent', v_chain.id, 'system', v_chain.id, jsonb_build_object('chain_depth', v_chain.depth, 'item_ids', v_chain.item_ids));
    end if;
  end loop;
  return v_count;
end
$$;

COMMENT ON FUNCTION public.stop_wake_chains(p_instance public.dispatcher_instances) IS 'Items whose chain of wakes reached max_wake_chain become dead_letter; one notification per agent and hour.';

CREATE FUNCTION public.sweep_inbox(p_instance_id uuid, p_claim_limit integer, p_request uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '8s'
    AS $$
declare
  v_instance constant public.dispatcher_instances := public.running_instance(p_instance_id);
  v_started constant timestamptz := clock_timestamp();
  v_phase text;
  v_count integer;
  v_answer jsonb := jsonb_build_object('errors', '[]'::jsonb, 'skipped', '[]'::jsonb, 'claims', '[]'::jsonb);
begin
  perform set_config('dispatcher.quiet', 'on', true);
  perform from public.dispatcher_gateways where gateway_id = v_instance.gateway_id for update;
  v_answer := v_answer || jsonb_build_object(
    'agent_ids', (select coalesce(jsonb_agg(id), '[]') from public.agents where gateway_id = v_instance.gateway_id and tenant_id = v_instance.tenant_id),
    'open_wakes', public.open_wakes_of_others(p_instance_id), 'broadcast_available', public.broadcast_hints_available());
  foreach v_phase in array array['expired', 'buried', 'chained', 'stalled', 'skipped', 'claims', 'pruned'] loop
    begin
      case v_phase
        when 'expired' then v_count := public.expire_stale_items(v_instance);
        when 'buried' then v_count := public.bury_spent_items(v_instance);
        when 'chained' then v_count := public.stop_wake_chains(v_instance);
        when 'stalled' then v_count := public.settle_stalled_agents(v_instance);
        when 'skipped' then v_answer := v_answer || jsonb_build_object('skipped', public.fill_waitlist(v_instance));
        when 'claims' then
          v_answer := v_answer || jsonb_build_object('claims', public.claim_waiting_wakes(p_instance_id, p_claim_limit, p_request));
          -- Whoever did not get a slot now waits for one.
          update public.agent_wake_state as state set waitlist_path = 'waitlist'
            from public.agents as agent
           where agent.id = state.agent_id and agent.gateway_id = v_instance.gateway_id and state.waitlist_path = 'sweep';
          get diagnostics v_count = row_count;
          v_answer := v_answer || jsonb_build_object('queued', v_count);
        when 'pruned' then
          delete from public.agent_wakes where id in (
            select id from public.agent_wakes where gateway_id = v_instance.gateway_id and ended_at < now() - interval '30 days' order by ended_at limit 1000);
          get diagnostics v_count = row_count;
      end case;
      if v_phase not in ('skipped', 'claims') then
        v_answer := v_answer || jsonb_build_object(v_phase, v_count);
      end if;
    exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
      raise;
    when others then
      v_answer := jsonb_set(v_answer, '{errors}', (v_answer -> 'errors') || jsonb_build_object('phase', v_phase, 'error', sqlerrm, 'error_code', sqlstate));
    end;
  end loop;
  v_answer := v_answer || jsonb_build_object('waiting', (select count(*) from public.agent_wake_state as state join public.agents as agent on agent.id = state.agent_id
                                                           where agent.gateway_id = v_instance.gateway_id and state.waitlisted_at is not null),
                                             'ms', round(extract(epoch from clock_timestamp() - v_started) * 1000));
  update public.dispatcher_instances
     set last_sweep_at = now(), last_heartbeat_at = now(),
         last_sweep = (v_answer - 'agent_ids' - 'open_wakes' - 'skipped' - 'claims')
                      || jsonb_build_object('skipped', jsonb_array_length(v_answer -> 'skipped'), 'claims', jsonb_array_length(v_answer -> 'claims'))
   where id = p_instance_id;
  return v_answer;
end
$$;

COMMENT ON FUNCTION public.sweep_inbox(p_instance_id uuid, p_claim_limit integer, p_request uuid) IS 'One sweep of the instance''s gateway, phase by phase, each isolated: expire stale, bury spent, stop chains, settle stalled, fill the waitlist, claim up to p_claim_limit wakes, prune. One bounded call whatever the backlog.';

CREATE FUNCTION public.wait_for_next_wake(p_agent_id uuid, p_settings jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_gates record;
begin
  select * into v_gates from public.wake_gates(p_agent_id, p_settings);
  if cardinality(v_gates.blocked) > 0 then
    return jsonb_build_object('next', v_gates.blocked[1], 'retry_in', extract(epoch from v_gates.retry_at - now()));
  end if;
  update public.agent_wake_state
     set waitlisted_at = coalesce(waitlisted_at, now()), waitlist_path = coalesce(waitlist_path, 'waitlist'),
         waiting_since = coalesce(waiting_since, (select created_at from public.agent_inbox_items where id = v_gates.due_item_id)), updated_at = now()
   where agent_id = p_agent_id;
  return jsonb_build_object('next', 'waitlisted');
end
$$;

COMMENT ON FUNCTION public.wait_for_next_wake(p_agent_id uuid, p_settings jsonb) IS 'After a wake: puts an agent with work left on the waitlist, or says when it may be looked at again.';

CREATE FUNCTION public.wake_blockers(p_item_id uuid) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  return (
    select jsonb_agg(target.title order by relation.created_at, target.title)
      from public.agent_inbox_items as item
      join public.task_relations as relation on relation.source_task_id = item.task_id and relation.relation_type = 'blocked_by'
      join public.tasks as target on target.id = relation.target_task_id
     where item.id = p_item_id and item.event_type = 'task_assignment'
       and target.status not in ('done', 'cancelled') and target.archived_at is null);
end
$$;

COMMENT ON FUNCTION public.wake_blockers(p_item_id uuid) IS 'Titles of the unresolved tasks that block the task of a task_assignment item; NULL when there are none.';

CREATE FUNCTION public.wake_chain_limit(p_settings jsonb) RETURNS integer
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$ select coalesce(nullif((p_settings ->> 'max_wake_chain')::integer, 0), 2147483647) $$;

COMMENT ON FUNCTION public.wake_chain_limit(p_settings jsonb) IS 'From which chain depth on an item wakes nobody; max_wake_chain = 0 means never.';

CREATE TABLE public.agent_wake_state (
    agent_id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    consecutive_failures integer DEFAULT 0 NOT NULL,
    stalled_at timestamp with time zone,
    last_wake_id uuid,
    last_claimed_at timestamp with time zone,
    last_ended_at timestamp with time zone,
    last_end_state text,
    waitlisted_at timestamp with time zone,
    waitlist_path text,
    waiting_since timestamp with time zone,
    chain_notified_at timestamp with time zone,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT agent_wake_state_consecutive_failures_check CHECK ((consecutive_failures >= 0)),
    CONSTRAINT agent_wake_state_waiting CHECK (((waitlisted_at IS NULL) = (waitlist_path IS NULL)))
);

COMMENT ON TABLE public.agent_wake_state IS 'What the gates remember of an agent: failures in a row, stall, last wake, its place on the waitlist.';

COMMENT ON COLUMN public.agent_wake_state.waiting_since IS 'created_at of the oldest item that waits; orders agents that joined the waitlist together.';

CREATE FUNCTION public.wake_cooldown_ends(p_state public.agent_wake_state, p_settings jsonb) RETURNS timestamp with time zone
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select case when p_state.last_end_state in ('failed', 'timed_out', 'no_progress', 'spawn_failed')
              then coalesce(p_state.last_ended_at, p_state.last_claimed_at)
              else p_state.last_claimed_at end
         + make_interval(secs => least((p_settings ->> 'max_wake_cooldown')::double precision,
                                       (p_settings ->> 'wake_cooldown')::double precision * power(2, least(p_state.consecutive_failures, 30))))
$$;

COMMENT ON FUNCTION public.wake_cooldown_ends(p_state public.agent_wake_state, p_settings jsonb) IS 'When the agent''s cooldown is over: wake_cooldown doubled per failure in a row, at most max_wake_cooldown, from the start of a good wake or the end of a failed one. NULL before the first wake.';

CREATE FUNCTION public.wake_end_state(p_wake public.agent_wakes, p_ending text, p_exit_code integer) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select case
    when p_ending in ('timed_out', 'interrupted', 'lost', 'spawn_failed') then p_ending
    when p_ending = 'exited' and p_exit_code <> 0 then 'failed'
    when public.wake_has_progress(p_wake) then 'succeeded'
    else 'no_progress' end
$$;

COMMENT ON FUNCTION public.wake_end_state(p_wake public.agent_wakes, p_ending text, p_exit_code integer) IS 'The state a wake ends in. Exit 0 without progress is no_progress; an unknown exit code (adopted child) is judged by progress alone.';

CREATE FUNCTION public.wake_gates(p_agent_id uuid, p_settings jsonb, p_all boolean DEFAULT false, OUT blocked text[], OUT retry_at timestamp with time zone, OUT due_item_id uuid, OUT chain_depth integer) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_now constant timestamptz := now();
  v_max_chain constant integer := public.wake_chain_limit(p_settings);
  v_max_per_day constant integer := coalesce((p_settings ->> 'max_wakes_per_day')::integer, 0);
  v_state public.agent_wake_state;
  v_until timestamptz;
begin
  blocked := '{}';
  select * into v_state from public.agent_wake_state where agent_id = p_agent_id;

  if v_state.consecutive_failures >= (p_settings ->> 'max_consecutive_failures')::integer then
    blocked := blocked || 'stalled'::text;
    if not p_all then return; end if;
  end if;

  if exists (select from public.agent_wakes where agent_id = p_agent_id and state in ('starting', 'running')) then
    blocked := blocked || 'wake_in_flight'::text;
    if not p_all then return; end if;
  end if;

  if exists (select from public.agents where id = p_agent_id and status in ('paused', 'hibernating')) then
    blocked := blocked || 'agent_paused'::text;
    if not p_all then return; end if;
  end if;

  select max(leased_until) into v_until from public.agent_inbox_items
   where agent_id = p_agent_id and status = 'leased' and leased_until > v_now;
  if v_until is not null then
    blocked := blocked || 'active_lease'::text;
    retry_at := v_until;
    if not p_all then return; end if;
  end if;

  if public.budget_blocks(p_agent_id, v_now) then
    blocked := blocked || 'budget_exceeded'::text;
    if not p_all then return; end if;
  end if;

  select due.id, due.chain_depth into due_item_id, chain_depth from public.agent_inbox_due as due
   where due.agent_id = p_agent_id and due.due_at <= v_now and due.chain_depth < v_max_chain
   order by due.created_at limit 1;
  if due_item_id is null then
    select min(due.due_at) into v_until from public.agent_inbox_due as due
     where due.agent_id = p_agent_id and due.due_at > v_now and due.chain_depth < v_max_chain;
    retry_at := coalesce(v_until, retry_at);
    blocked := blocked || case when v_until is null and exists (
                                 select from public.agent_inbox_due as due
                                  where due.agent_id = p_agent_id and due.due_at <= v_now and due.chain_depth >= v_max_chain)
                               then 'chain_limit' else 'no_actionable_work' end;
    if not p_all then return; end if;
  end if;

  if v_max_per_day > 0 and (select count(*) from public.agent_wakes as wake
                             where wake.agent_id = p_agent_id and wake.state <> 'spawn_failed'
                               and wake.claimed_at >= date_trunc('day', v_now at time zone 'UTC') at time zone 'UTC') >= v_max_per_day then
    blocked := blocked || 'daily_limit'::text;
    retry_at := (date_trunc('day', v_now at time zone 'UTC') + interval '1 day') at time zone 'UTC';
    if not p_all then return; end if;
  end if;

  v_until := public.wake_cooldown_ends(v_state, p_settings);
  if v_until > v_now then
    blocked := blocked || format('cooldown(%ss)', ceil(extract(epoch from v_until - v_now)));
    retry_at := v_until;
  end if;
end
$$;

COMMENT ON FUNCTION public.wake_gates(p_agent_id uuid, p_settings jsonb, p_all boolean, OUT blocked text[], OUT retry_at timestamp with time zone, OUT due_item_id uuid, OUT chain_depth integer) IS 'The gates of one agent in their order (all but the cap): blocked = the reasons that refuse a wake, the first one unless p_all; retry_at = when waiting alone would open it; due_item_id = the oldest item to work on.';

CREATE FUNCTION public.wake_grant(p_wake public.agent_wakes) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_item record;
  v_blockers jsonb;
  v_blockers_error text;
begin
  select item.id, item.event_type, item.summary, item.context into v_item
    from public.agent_inbox_items as item where item.id = p_wake.item_ids[1];
  begin
    v_blockers := public.wake_blockers(v_item.id);
  exception when others then
    v_blockers_error := sqlerrm;
  end;
  return (
    select jsonb_build_object(
      'granted', true, 'wake_id', p_wake.id, 'claim_token', p_wake.claim_token, 'agent_id', agent.id, 'agent_slug', agent.slug,
      'workspace_slug', (select workspace.slug from public.workspace where workspace.tenant_id = agent.tenant_id limit 1),
      'path', p_wake.path, 'item_ids', to_jsonb(p_wake.item_ids), 'chain_depth', p_wake.chain_depth,
      'event_type', v_item.event_type, 'summary', left(v_item.summary, 2000), 'item_created_at',
      (select item.created_at from public.agent_inbox_items as item where item.id = p_wake.item_ids[1]),
      'model_override', v_item.context -> 'model_override', 'thinking_override', v_item.context -> 'thinking_override',
      'blockers', coalesce(v_blockers, '[]'), 'blockers_error', v_blockers_error)
      from public.agents as agent where agent.id = p_wake.agent_id);
end
$$;

COMMENT ON FUNCTION public.wake_grant(p_wake public.agent_wakes) IS 'Everything a spawn needs, as the answer to a granted claim.';

CREATE FUNCTION public.wake_has_progress(p_wake public.agent_wakes) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select p_wake.progressed_at is not null
      or exists (select from public.inbox_item_leases as lease
                  where lease.wake_id = p_wake.id and lease.outcome in ('done', 'failed', 'dead_letter', 'escalated'))
      or exists (select from public.agent_inbox_items as item
                  where item.agent_id = p_wake.agent_id
                    and (item.completed_at >= p_wake.claimed_at or (item.failed_at >= p_wake.claimed_at and item.attempt_count > 0)))
      or not exists (select from public.agent_inbox_items as item
                      where item.agent_id = p_wake.agent_id and item.status in ('pending', 'failed', 'leased') and item.attempt_count < item.max_attempts)
$$;

COMMENT ON FUNCTION public.wake_has_progress(p_wake public.agent_wakes) IS 'Whether an item of the agent was finished during the wake, or nothing is left to do.';

CREATE TABLE public.agent_budgets (
    agent_id uuid NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    monthly_limit_usd numeric(12,2),
    soft_threshold_pct integer DEFAULT 80 NOT NULL,
    hard_cutoff boolean DEFAULT true NOT NULL,
    period_anchor_tz text DEFAULT 'UTC'::text NOT NULL,
    current_period_start date DEFAULT (date_trunc('month'::text, now()))::date NOT NULL,
    current_period_spend_usd numeric(12,6) DEFAULT 0 NOT NULL,
    current_period_tokens bigint DEFAULT 0 NOT NULL,
    current_period_metered_calls integer DEFAULT 0 NOT NULL,
    current_period_unmetered_calls integer DEFAULT 0 NOT NULL,
    status public.budget_status DEFAULT 'ok'::public.budget_status NOT NULL,
    warned_at timestamp with time zone,
    exceeded_at timestamp with time zone,
    last_usage_at timestamp with time zone,
    meta jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE public.inbox_item_origins (
    item_id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    wake_id uuid,
    from_agent_id uuid,
    chain_depth integer DEFAULT 0 NOT NULL,
    request_key text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT inbox_item_origins_chain_depth_check CHECK ((chain_depth >= 0))
);

COMMENT ON TABLE public.inbox_item_origins IS 'Where an item came from when an agent posted it: the wake, the sender, and how long the chain of wakes has grown.';

CREATE VIEW public.agent_inbox_due WITH (security_invoker='true') AS
 SELECT item.id,
    item.tenant_id,
    item.agent_id,
    item.created_at,
    item.status,
    item.event_type,
    item.summary,
    item.context,
    item.task_id,
    item.attempt_count,
    item.max_attempts,
    COALESCE(origin.chain_depth, 0) AS chain_depth,
        CASE item.status
            WHEN 'pending'::public.inbox_item_status THEN '-infinity'::timestamp with time zone
            WHEN 'leased'::public.inbox_item_status THEN COALESCE(item.leased_until, '-infinity'::timestamp with time zone)
            ELSE
            CASE
                WHEN ((item.context ->> 'last_failure_reason'::text) = 'agent_stalled'::text) THEN '-infinity'::timestamp with time zone
                ELSE (COALESCE(item.failed_at, item.updated_at) + public.inbox_retry_delay(item.attempt_count))
            END
        END AS due_at
   FROM (public.agent_inbox_items item
     LEFT JOIN public.inbox_item_origins origin ON ((origin.item_id = item.id)))
  WHERE ((item.status = ANY (ARRAY['pending'::public.inbox_item_status, 'failed'::public.inbox_item_status, 'leased'::public.inbox_item_status])) AND (item.attempt_count < item.max_attempts));

COMMENT ON VIEW public.agent_inbox_due IS 'Open items with attempts left and when each may be worked on (due_at): pending at once, failed after its retry delay, leased when its lease ends.';

CREATE TABLE public.agent_usage (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    agent_id uuid,
    gateway_id uuid,
    session_id text,
    run_id text NOT NULL,
    provider text NOT NULL,
    model text NOT NULL,
    input_tokens bigint DEFAULT 0 NOT NULL,
    output_tokens bigint DEFAULT 0 NOT NULL,
    cache_read_tokens bigint DEFAULT 0 NOT NULL,
    cache_write_tokens bigint DEFAULT 0 NOT NULL,
    cost_input_usd numeric(12,6),
    cost_output_usd numeric(12,6),
    cost_total_usd numeric(12,6),
    occurred_at timestamp with time zone NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE public.agents (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    gateway_id uuid,
    name text NOT NULL,
    slug text NOT NULL,
    description text,
    status public.agent_status DEFAULT 'ready'::public.agent_status NOT NULL,
    last_seen_at timestamp with time zone,
    last_heartbeat_at timestamp with time zone,
    model text,
    thinking text,
    reports_to_id uuid,
    domains text[] DEFAULT '{}'::text[] NOT NULL,
    capabilities text[],
    config jsonb DEFAULT '{}'::jsonb NOT NULL,
    meta jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE public.dispatcher_gateways (
    gateway_id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.dispatcher_gateways IS 'One row per gateway that a dispatcher serves. Claims lock it, which is what makes the cap of live wakes exact.';

CREATE TABLE public.gateways (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    slug text NOT NULL,
    label text NOT NULL,
    status public.gateway_status DEFAULT 'ready'::public.gateway_status NOT NULL,
    last_seen_at timestamp with time zone,
    last_heartbeat_at timestamp with time zone,
    meta jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE public.inbox_item_leases (
    item_id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    agent_id uuid NOT NULL,
    wake_id uuid,
    lease_token uuid DEFAULT gen_random_uuid() NOT NULL,
    attempt integer NOT NULL,
    leased_at timestamp with time zone DEFAULT now() NOT NULL,
    leased_until timestamp with time zone NOT NULL,
    closed_at timestamp with time zone,
    outcome text,
    CONSTRAINT inbox_item_leases_closed_has_outcome CHECK (((closed_at IS NULL) = (outcome IS NULL))),
    CONSTRAINT inbox_item_leases_outcome_check CHECK ((outcome = ANY (ARRAY['done'::text, 'failed'::text, 'dead_letter'::text, 'escalated'::text, 'released'::text, 'lost'::text])))
);

COMMENT ON TABLE public.inbox_item_leases IS 'The latest lease of an item: its fencing token, the wake it was taken in, and how it ended.';

CREATE TABLE public.notifications (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    type text NOT NULL,
    title text NOT NULL,
    body text,
    entity_type text,
    entity_id uuid,
    actor_type public.actor_type DEFAULT 'system'::public.actor_type,
    actor_agent_id uuid,
    read_at timestamp with time zone,
    dismissed_at timestamp with time zone,
    meta jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE public.task_relations (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    source_task_id uuid NOT NULL,
    target_task_id uuid NOT NULL,
    relation_type public.task_relation_type NOT NULL,
    created_by_type public.actor_type DEFAULT 'human'::public.actor_type NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE public.tasks (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    title text NOT NULL,
    description text,
    status public.task_status DEFAULT 'todo'::public.task_status NOT NULL,
    priority public.task_priority,
    parent_id uuid,
    assignee_type public.actor_type,
    assignee_agent_id uuid,
    model_override text,
    thinking_override text,
    due_date timestamp with time zone,
    completed_at timestamp with time zone,
    archived_at timestamp with time zone,
    tags text[] DEFAULT '{}'::text[] NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE public.tenants (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    name text NOT NULL,
    slug text NOT NULL,
    status text DEFAULT 'active'::text NOT NULL,
    meta jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE public.workspace (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    name text DEFAULT 'HQ'::text NOT NULL,
    slug text,
    description text,
    initialized boolean DEFAULT false NOT NULL,
    owner_name text,
    owner_email text,
    settings jsonb DEFAULT '{}'::jsonb NOT NULL,
    default_agent_budget_usd numeric(12,2),
    default_soft_threshold_pct integer DEFAULT 80 NOT NULL,
    default_hard_cutoff boolean DEFAULT true NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

ALTER TABLE ONLY public.agent_budgets
    ADD CONSTRAINT agent_budgets_pkey PRIMARY KEY (agent_id);

ALTER TABLE ONLY public.agent_inbox_items
    ADD CONSTRAINT agent_inbox_items_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.agent_usage
    ADD CONSTRAINT agent_usage_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.agent_usage
    ADD CONSTRAINT agent_usage_run_id_provider_model_occurred_at_key UNIQUE (run_id, provider, model, occurred_at);

ALTER TABLE ONLY public.agent_wake_state
    ADD CONSTRAINT agent_wake_state_pkey PRIMARY KEY (agent_id);

ALTER TABLE ONLY public.agent_wakes
    ADD CONSTRAINT agent_wakes_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT agents_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT agents_tenant_id_slug_key UNIQUE (tenant_id, slug);

ALTER TABLE ONLY public.dispatcher_gateways
    ADD CONSTRAINT dispatcher_gateways_pkey PRIMARY KEY (gateway_id);

ALTER TABLE ONLY public.dispatcher_instances
    ADD CONSTRAINT dispatcher_instances_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.gateways
    ADD CONSTRAINT gateways_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.gateways
    ADD CONSTRAINT gateways_tenant_id_slug_key UNIQUE (tenant_id, slug);

ALTER TABLE ONLY public.inbox_item_leases
    ADD CONSTRAINT inbox_item_leases_pkey PRIMARY KEY (item_id);

ALTER TABLE ONLY public.inbox_item_origins
    ADD CONSTRAINT inbox_item_origins_pkey PRIMARY KEY (item_id);

ALTER TABLE ONLY public.notifications
    ADD CONSTRAINT notifications_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.task_relations
    ADD CONSTRAINT task_relations_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.tasks
    ADD CONSTRAINT tasks_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT tenants_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT tenants_slug_key UNIQUE (slug);

ALTER TABLE ONLY public.agent_inbox_items
    ADD CONSTRAINT uq_inbox_dedup UNIQUE (tenant_id, dedup_key);

ALTER TABLE ONLY public.workspace
    ADD CONSTRAINT workspace_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workspace
    ADD CONSTRAINT workspace_tenant_id_key UNIQUE (tenant_id);

CREATE INDEX agent_inbox_items_open ON public.agent_inbox_items USING btree (agent_id, created_at) WHERE (status = ANY (ARRAY['pending'::public.inbox_item_status, 'failed'::public.inbox_item_status, 'leased'::public.inbox_item_status]));

CREATE INDEX agent_wake_state_waitlist ON public.agent_wake_state USING btree (waitlisted_at, waiting_since) WHERE (waitlisted_at IS NOT NULL);

CREATE INDEX agent_wakes_by_agent ON public.agent_wakes USING btree (agent_id, claimed_at DESC);

CREATE INDEX agent_wakes_by_request ON public.agent_wakes USING btree (claim_request) WHERE (claim_request IS NOT NULL);

CREATE INDEX agent_wakes_ended ON public.agent_wakes USING btree (ended_at) WHERE (ended_at IS NOT NULL);

CREATE INDEX agent_wakes_live_by_gateway ON public.agent_wakes USING btree (gateway_id) WHERE (state = ANY (ARRAY['starting'::text, 'running'::text]));

CREATE UNIQUE INDEX agent_wakes_one_live_per_agent ON public.agent_wakes USING btree (agent_id) WHERE (state = ANY (ARRAY['starting'::text, 'running'::text]));

CREATE INDEX dispatcher_instances_by_gateway ON public.dispatcher_instances USING btree (gateway_id, last_heartbeat_at);

CREATE INDEX inbox_item_leases_by_open_token ON public.inbox_item_leases USING btree (lease_token) WHERE (closed_at IS NULL);

CREATE INDEX inbox_item_leases_by_wake ON public.inbox_item_leases USING btree (wake_id) WHERE (wake_id IS NOT NULL);

CREATE UNIQUE INDEX inbox_item_origins_once ON public.inbox_item_origins USING btree (tenant_id, from_agent_id, request_key) WHERE (request_key IS NOT NULL);

CREATE INDEX task_relations_by_source ON public.task_relations USING btree (source_task_id, relation_type);

CREATE TRIGGER dispatcher_agent_hint AFTER UPDATE OF status, gateway_id ON public.agents FOR EACH ROW WHEN (((old.status IS DISTINCT FROM new.status) OR (old.gateway_id IS DISTINCT FROM new.gateway_id))) EXECUTE FUNCTION public.hint_agent_change();

CREATE TRIGGER dispatcher_budget_hint AFTER UPDATE OF status, monthly_limit_usd, hard_cutoff ON public.agent_budgets FOR EACH ROW WHEN (((old.status IS DISTINCT FROM new.status) OR (old.monthly_limit_usd IS DISTINCT FROM new.monthly_limit_usd) OR (old.hard_cutoff IS DISTINCT FROM new.hard_cutoff))) EXECUTE FUNCTION public.hint_budget_change();

CREATE TRIGGER dispatcher_inbox_insert_hint AFTER INSERT ON public.agent_inbox_items REFERENCING NEW TABLE AS new_items FOR EACH STATEMENT EXECUTE FUNCTION public.hint_inbox_insert();

CREATE TRIGGER dispatcher_inbox_update_note AFTER UPDATE OF status ON public.agent_inbox_items FOR EACH ROW WHEN ((old.status IS DISTINCT FROM new.status)) EXECUTE FUNCTION public.note_inbox_update();

ALTER TABLE ONLY public.agent_budgets
    ADD CONSTRAINT agent_budgets_agent_id_fkey FOREIGN KEY (agent_id) REFERENCES public.agents(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_budgets
    ADD CONSTRAINT agent_budgets_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_inbox_items
    ADD CONSTRAINT agent_inbox_items_agent_id_fkey FOREIGN KEY (agent_id) REFERENCES public.agents(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_inbox_items
    ADD CONSTRAINT agent_inbox_items_task_id_fkey FOREIGN KEY (task_id) REFERENCES public.tasks(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_inbox_items
    ADD CONSTRAINT agent_inbox_items_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_usage
    ADD CONSTRAINT agent_usage_agent_id_fkey FOREIGN KEY (agent_id) REFERENCES public.agents(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_usage
    ADD CONSTRAINT agent_usage_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES public.gateways(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.agent_usage
    ADD CONSTRAINT agent_usage_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_wake_state
    ADD CONSTRAINT agent_wake_state_agent_id_fkey FOREIGN KEY (agent_id) REFERENCES public.agents(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_wake_state
    ADD CONSTRAINT agent_wake_state_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_wakes
    ADD CONSTRAINT agent_wakes_agent_id_fkey FOREIGN KEY (agent_id) REFERENCES public.agents(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_wakes
    ADD CONSTRAINT agent_wakes_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES public.gateways(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_wakes
    ADD CONSTRAINT agent_wakes_instance_id_fkey FOREIGN KEY (instance_id) REFERENCES public.dispatcher_instances(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.agent_wakes
    ADD CONSTRAINT agent_wakes_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT agents_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES public.gateways(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT agents_reports_to_id_fkey FOREIGN KEY (reports_to_id) REFERENCES public.agents(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT agents_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.dispatcher_gateways
    ADD CONSTRAINT dispatcher_gateways_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES public.gateways(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.dispatcher_gateways
    ADD CONSTRAINT dispatcher_gateways_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.dispatcher_instances
    ADD CONSTRAINT dispatcher_instances_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES public.gateways(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.dispatcher_instances
    ADD CONSTRAINT dispatcher_instances_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.gateways
    ADD CONSTRAINT gateways_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_leases
    ADD CONSTRAINT inbox_item_leases_agent_id_fkey FOREIGN KEY (agent_id) REFERENCES public.agents(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_leases
    ADD CONSTRAINT inbox_item_leases_item_id_fkey FOREIGN KEY (item_id) REFERENCES public.agent_inbox_items(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_leases
    ADD CONSTRAINT inbox_item_leases_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_leases
    ADD CONSTRAINT inbox_item_leases_wake_id_fkey FOREIGN KEY (wake_id) REFERENCES public.agent_wakes(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.inbox_item_origins
    ADD CONSTRAINT inbox_item_origins_from_agent_id_fkey FOREIGN KEY (from_agent_id) REFERENCES public.agents(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.inbox_item_origins
    ADD CONSTRAINT inbox_item_origins_item_id_fkey FOREIGN KEY (item_id) REFERENCES public.agent_inbox_items(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_origins
    ADD CONSTRAINT inbox_item_origins_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_origins
    ADD CONSTRAINT inbox_item_origins_wake_id_fkey FOREIGN KEY (wake_id) REFERENCES public.agent_wakes(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.notifications
    ADD CONSTRAINT notifications_actor_agent_id_fkey FOREIGN KEY (actor_agent_id) REFERENCES public.agents(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.notifications
    ADD CONSTRAINT notifications_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.task_relations
    ADD CONSTRAINT task_relations_source_task_id_fkey FOREIGN KEY (source_task_id) REFERENCES public.tasks(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.task_relations
    ADD CONSTRAINT task_relations_target_task_id_fkey FOREIGN KEY (target_task_id) REFERENCES public.tasks(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.task_relations
    ADD CONSTRAINT task_relations_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.tasks
    ADD CONSTRAINT tasks_assignee_agent_id_fkey FOREIGN KEY (assignee_agent_id) REFERENCES public.agents(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.tasks
    ADD CONSTRAINT tasks_parent_id_fkey FOREIGN KEY (parent_id) REFERENCES public.tasks(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.tasks
    ADD CONSTRAINT tasks_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workspace
    ADD CONSTRAINT workspace_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE public.agent_budgets ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.agent_inbox_items ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.agent_usage ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.agent_wake_state ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.agent_wakes ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.agents ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.dispatcher_gateways ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.dispatcher_instances ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.gateways ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.inbox_item_leases ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.inbox_item_origins ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.notifications ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.task_relations ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.tasks ENABLE ROW LEVEL SECURITY;

CREATE POLICY tenant_isolation ON public.agent_budgets TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.agent_inbox_items TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.agent_usage TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.agents TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.gateways TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.notifications TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.task_relations TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.tasks TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.tenants TO authenticated USING ((id = public.current_tenant_id())) WITH CHECK ((id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.workspace TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.agent_wake_state FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.agent_wakes FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.dispatcher_instances FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.inbox_item_origins FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

ALTER TABLE public.tenants ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.workspace ENABLE ROW LEVEL SECURITY;

GRANT USAGE ON SCHEMA public TO anon;
GRANT USAGE ON SCHEMA public TO authenticated;
GRANT USAGE ON SCHEMA public TO service_role;

REVOKE ALL ON FUNCTION public.adopt_wake(p_instance_id uuid, p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) FROM PUBLIC;
GRANT ALL ON FUNCTION public.adopt_wake(p_instance_id uuid, p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) TO service_role;

REVOKE ALL ON FUNCTION public.broadcast_hints_available() FROM PUBLIC;
GRANT ALL ON FUNCTION public.broadcast_hints_available() TO service_role;

REVOKE ALL ON FUNCTION public.budget_blocks(p_agent_id uuid, p_now timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION public.budget_blocks(p_agent_id uuid, p_now timestamp with time zone) TO service_role;

GRANT ALL ON TABLE public.dispatcher_instances TO service_role;
GRANT SELECT ON TABLE public.dispatcher_instances TO authenticated;

REVOKE ALL ON FUNCTION public.bury_spent_items(p_instance public.dispatcher_instances) FROM PUBLIC;
GRANT ALL ON FUNCTION public.bury_spent_items(p_instance public.dispatcher_instances) TO service_role;

REVOKE ALL ON FUNCTION public.claim_one_wake(p_instance public.dispatcher_instances, p_agent_id uuid, p_path text, p_item_ids uuid[], p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.claim_one_wake(p_instance public.dispatcher_instances, p_agent_id uuid, p_path text, p_item_ids uuid[], p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION public.claim_waiting_wakes(p_instance_id uuid, p_limit integer, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.claim_waiting_wakes(p_instance_id uuid, p_limit integer, p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION public.claim_wakes(p_instance_id uuid, p_claims jsonb, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.claim_wakes(p_instance_id uuid, p_claims jsonb, p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION public.clean_inbox_reason(p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.clean_inbox_reason(p_reason text) TO service_role;

REVOKE ALL ON FUNCTION public.close_inbox_item(p_item_id uuid, p_lease_token uuid, p_outcome text, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.close_inbox_item(p_item_id uuid, p_lease_token uuid, p_outcome text, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION public.complete_inbox_item(p_item_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.complete_inbox_item(p_item_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.current_tenant_id() FROM PUBLIC;
GRANT ALL ON FUNCTION public.current_tenant_id() TO authenticated;
GRANT ALL ON FUNCTION public.current_tenant_id() TO service_role;

REVOKE ALL ON FUNCTION public.dispatcher_gateway_topic(p_gateway_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.dispatcher_gateway_topic(p_gateway_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.dispatcher_status(p_tenant_id uuid, p_gateway text, p_settings jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.dispatcher_status(p_tenant_id uuid, p_gateway text, p_settings jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.end_wake(p_wake_id uuid, p_claim_token uuid, p_ending text, p_exit_code integer, p_error text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.end_wake(p_wake_id uuid, p_claim_token uuid, p_ending text, p_exit_code integer, p_error text) TO service_role;

REVOKE ALL ON FUNCTION public.escalate_inbox_item(p_item_id uuid, p_lease_token uuid, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.escalate_inbox_item(p_item_id uuid, p_lease_token uuid, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION public.expire_inbox_items(p_tenant_id uuid, p_gateway text, p_item_ids uuid[], p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.expire_inbox_items(p_tenant_id uuid, p_gateway text, p_item_ids uuid[], p_reason text) TO service_role;

REVOKE ALL ON FUNCTION public.expire_stale_items(p_instance public.dispatcher_instances) FROM PUBLIC;
GRANT ALL ON FUNCTION public.expire_stale_items(p_instance public.dispatcher_instances) TO service_role;

REVOKE ALL ON FUNCTION public.fail_inbox_item(p_item_id uuid, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.fail_inbox_item(p_item_id uuid, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION public.fill_waitlist(p_instance public.dispatcher_instances) FROM PUBLIC;
GRANT ALL ON FUNCTION public.fill_waitlist(p_instance public.dispatcher_instances) TO service_role;

REVOKE ALL ON FUNCTION public.find_inbox_agent(p_tenant_id uuid, p_agent_slug text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.find_inbox_agent(p_tenant_id uuid, p_agent_slug text) TO service_role;

GRANT ALL ON TABLE public.agent_wakes TO service_role;
GRANT SELECT ON TABLE public.agent_wakes TO authenticated;

REVOKE ALL ON FUNCTION public.find_sender_wake(p_agent_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.find_sender_wake(p_agent_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.gateway_settings(p_gateway_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.gateway_settings(p_gateway_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.give_up_item(p_item_id uuid, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.give_up_item(p_item_id uuid, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION public.heartbeat_dispatcher_instance(p_instance_id uuid, p_live_wake_ids uuid[], p_nonce uuid, p_facts jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.heartbeat_dispatcher_instance(p_instance_id uuid, p_live_wake_ids uuid[], p_nonce uuid, p_facts jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.hint_agent_change() FROM PUBLIC;
GRANT ALL ON FUNCTION public.hint_agent_change() TO service_role;

REVOKE ALL ON FUNCTION public.hint_budget_change() FROM PUBLIC;
GRANT ALL ON FUNCTION public.hint_budget_change() TO service_role;

REVOKE ALL ON FUNCTION public.hint_inbox_insert() FROM PUBLIC;
GRANT ALL ON FUNCTION public.hint_inbox_insert() TO service_role;

REVOKE ALL ON FUNCTION public.inbox_close_verdict(p_item_id uuid, p_code text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.inbox_close_verdict(p_item_id uuid, p_code text) TO service_role;

REVOKE ALL ON FUNCTION public.inbox_items_of_lease(p_agent_id uuid, p_lease_token uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.inbox_items_of_lease(p_agent_id uuid, p_lease_token uuid) TO service_role;

REVOKE ALL ON FUNCTION public.inbox_overview(p_tenant_id uuid, p_agent_slug text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.inbox_overview(p_tenant_id uuid, p_agent_slug text) TO service_role;

REVOKE ALL ON FUNCTION public.inbox_post_key(p_request_key text, p_wake_id uuid, p_content text, p_at timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION public.inbox_post_key(p_request_key text, p_wake_id uuid, p_content text, p_at timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION public.inbox_retry_delay(p_attempt integer) FROM PUBLIC;
GRANT ALL ON FUNCTION public.inbox_retry_delay(p_attempt integer) TO service_role;

GRANT ALL ON TABLE public.agent_inbox_items TO service_role;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.agent_inbox_items TO authenticated;

REVOKE ALL ON FUNCTION public.lease_inbox_item(p_agent_id uuid, p_lease_seconds integer) FROM PUBLIC;
GRANT ALL ON FUNCTION public.lease_inbox_item(p_agent_id uuid, p_lease_seconds integer) TO service_role;

REVOKE ALL ON FUNCTION public.lease_inbox_items(p_tenant_id uuid, p_agent_slug text, p_limit integer, p_lease_seconds integer, p_lease_token uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.lease_inbox_items(p_tenant_id uuid, p_agent_slug text, p_limit integer, p_lease_seconds integer, p_lease_token uuid) TO service_role;

REVOKE ALL ON FUNCTION public.lease_one_inbox_item(p_item_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.lease_one_inbox_item(p_item_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.list_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_status text, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION public.list_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_status text, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION public.lock_inbox_lease(p_item_id uuid, p_lease_token uuid, p_outcomes text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION public.lock_inbox_lease(p_item_id uuid, p_lease_token uuid, p_outcomes text[]) TO service_role;

REVOKE ALL ON FUNCTION public.mark_agent_stalled(p_agent_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.mark_agent_stalled(p_agent_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.mark_wake_items(p_item_ids uuid[], p_agent_id uuid, p_success boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION public.mark_wake_items(p_item_ids uuid[], p_agent_id uuid, p_success boolean) TO service_role;

REVOKE ALL ON FUNCTION public.merge_inbox_context(p_context jsonb, p_changes jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.merge_inbox_context(p_context jsonb, p_changes jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.note_inbox_update() FROM PUBLIC;
GRANT ALL ON FUNCTION public.note_inbox_update() TO service_role;

REVOKE ALL ON FUNCTION public.open_wakes_of_others(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.open_wakes_of_others(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.post_inbox_item(p_tenant_id uuid, p_from_agent_slug text, p_to_agent_slug text, p_event_type text, p_summary text, p_context jsonb, p_request_key text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.post_inbox_item(p_tenant_id uuid, p_from_agent_slug text, p_to_agent_slug text, p_event_type text, p_summary text, p_context jsonb, p_request_key text) TO service_role;

REVOKE ALL ON FUNCTION public.register_dispatcher_instance(p_tenant_id uuid, p_gateway text, p_identity jsonb, p_settings jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.register_dispatcher_instance(p_tenant_id uuid, p_gateway text, p_identity jsonb, p_settings jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.release_wake_leases(p_wake public.agent_wakes, p_give_back boolean, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.release_wake_leases(p_wake public.agent_wakes, p_give_back boolean, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION public.renew_wake_leases(p_instance_id uuid, p_wake_ids uuid[], p_lease_seconds integer) FROM PUBLIC;
GRANT ALL ON FUNCTION public.renew_wake_leases(p_instance_id uuid, p_wake_ids uuid[], p_lease_seconds integer) TO service_role;

REVOKE ALL ON FUNCTION public.report_wakes(p_instance_id uuid, p_reports jsonb, p_claim_limit integer, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.report_wakes(p_instance_id uuid, p_reports jsonb, p_claim_limit integer, p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION public.request_wake(p_tenant_id uuid, p_gateway text, p_agent text, p_dry_run boolean, p_settings jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.request_wake(p_tenant_id uuid, p_gateway text, p_agent text, p_dry_run boolean, p_settings jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.requeue_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_item_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION public.requeue_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_item_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION public.reset_wake_failures(p_agent_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.reset_wake_failures(p_agent_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.running_instance(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.running_instance(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.send_gateway_hint(p_gateway_id uuid, p_event text, p_payload jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.send_gateway_hint(p_gateway_id uuid, p_event text, p_payload jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.settle_stalled_agents(p_instance public.dispatcher_instances) FROM PUBLIC;
GRANT ALL ON FUNCTION public.settle_stalled_agents(p_instance public.dispatcher_instances) TO service_role;

REVOKE ALL ON FUNCTION public.spend_attempt_of_lost_wake(p_wake public.agent_wakes) FROM PUBLIC;
GRANT ALL ON FUNCTION public.spend_attempt_of_lost_wake(p_wake public.agent_wakes) TO service_role;

REVOKE ALL ON FUNCTION public.start_wake(p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) FROM PUBLIC;
GRANT ALL ON FUNCTION public.start_wake(p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) TO service_role;

REVOKE ALL ON FUNCTION public.stop_dispatcher_instance(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.stop_dispatcher_instance(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.stop_wake_chains(p_instance public.dispatcher_instances) FROM PUBLIC;
GRANT ALL ON FUNCTION public.stop_wake_chains(p_instance public.dispatcher_instances) TO service_role;

REVOKE ALL ON FUNCTION public.sweep_inbox(p_instance_id uuid, p_claim_limit integer, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.sweep_inbox(p_instance_id uuid, p_claim_limit integer, p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION public.wait_for_next_wake(p_agent_id uuid, p_settings jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.wait_for_next_wake(p_agent_id uuid, p_settings jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.wake_blockers(p_item_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.wake_blockers(p_item_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.wake_chain_limit(p_settings jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.wake_chain_limit(p_settings jsonb) TO service_role;

GRANT ALL ON TABLE public.agent_wake_state TO service_role;
GRANT SELECT ON TABLE public.agent_wake_state TO authenticated;

REVOKE ALL ON FUNCTION public.wake_cooldown_ends(p_state public.agent_wake_state, p_settings jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.wake_cooldown_ends(p_state public.agent_wake_state, p_settings jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.wake_end_state(p_wake public.agent_wakes, p_ending text, p_exit_code integer) FROM PUBLIC;
GRANT ALL ON FUNCTION public.wake_end_state(p_wake public.agent_wakes, p_ending text, p_exit_code integer) TO service_role;

REVOKE ALL ON FUNCTION public.wake_gates(p_agent_id uuid, p_settings jsonb, p_all boolean, OUT blocked text[], OUT retry_at timestamp with time zone, OUT due_item_id uuid, OUT chain_depth integer) FROM PUBLIC;
GRANT ALL ON FUNCTION public.wake_gates(p_agent_id uuid, p_settings jsonb, p_all boolean, OUT blocked text[], OUT retry_at timestamp with time zone, OUT due_item_id uuid, OUT chain_depth integer) TO service_role;

REVOKE ALL ON FUNCTION public.wake_grant(p_wake public.agent_wakes) FROM PUBLIC;
GRANT ALL ON FUNCTION public.wake_grant(p_wake public.agent_wakes) TO service_role;

REVOKE ALL ON FUNCTION public.wake_has_progress(p_wake public.agent_wakes) FROM PUBLIC;
GRANT ALL ON FUNCTION public.wake_has_progress(p_wake public.agent_wakes) TO service_role;

GRANT ALL ON TABLE public.agent_budgets TO service_role;
GRANT SELECT ON TABLE public.agent_budgets TO authenticated;

GRANT ALL ON TABLE public.inbox_item_origins TO service_role;
GRANT SELECT ON TABLE public.inbox_item_origins TO authenticated;

GRANT ALL ON TABLE public.agent_inbox_due TO service_role;

GRANT ALL ON TABLE public.agent_usage TO service_role;
GRANT SELECT ON TABLE public.agent_usage TO authenticated;

GRANT ALL ON TABLE public.agents TO service_role;
GRANT SELECT ON TABLE public.agents TO authenticated;

GRANT ALL ON TABLE public.dispatcher_gateways TO service_role;

GRANT ALL ON TABLE public.gateways TO service_role;
GRANT SELECT ON TABLE public.gateways TO authenticated;

GRANT ALL ON TABLE public.inbox_item_leases TO service_role;

GRANT ALL ON TABLE public.notifications TO service_role;
GRANT SELECT ON TABLE public.notifications TO authenticated;

GRANT ALL ON TABLE public.task_relations TO service_role;
GRANT SELECT ON TABLE public.task_relations TO authenticated;

GRANT ALL ON TABLE public.tasks TO service_role;
GRANT SELECT ON TABLE public.tasks TO authenticated;

GRANT ALL ON TABLE public.tenants TO service_role;
GRANT SELECT ON TABLE public.tenants TO authenticated;

GRANT ALL ON TABLE public.workspace TO service_role;
GRANT SELECT ON TABLE public.workspace TO authenticated;

ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON SEQUENCES TO anon;
ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON SEQUENCES TO authenticated;
ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON SEQUENCES TO service_role;

ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON SEQUENCES TO anon;
ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON SEQUENCES TO authenticated;
ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON SEQUENCES TO service_role;

ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON FUNCTIONS TO anon;
ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON FUNCTIONS TO authenticated;
ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON FUNCTIONS TO service_role;

ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON FUNCTIONS TO anon;
ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON FUNCTIONS TO authenticated;
ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON FUNCTIONS TO service_role;

ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON TABLES TO anon;
ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON TABLES TO authenticated;
ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON TABLES TO service_role;

ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON TABLES TO anon;
ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON TABLES TO authenticated;
ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON TABLES TO service_role;
