-- The functions of the wake. Each is one transaction on the database's clock. Locks are always taken in this order:
-- dispatcher_gateways, agent_wake_state, agent_wakes, agent_inbox_items.

-- ---------------------------------------------------------------------------------------------------------------
-- Gates
-- ---------------------------------------------------------------------------------------------------------------

create or replace function public.budget_blocks(p_agent_id uuid, p_now timestamptz) returns boolean
language plpgsql stable set search_path = ''
as $$
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
comment on function public.budget_blocks(uuid, timestamptz) is
  'Whether the agent''s budget forbids a wake: exceeded with hard cutoff, in the running month, and still at or above its limit.';

create or replace function public.wake_cooldown_ends(p_state public.agent_wake_state, p_settings jsonb) returns timestamptz
language plpgsql immutable set search_path = ''
as $$
begin
  return case when p_state.last_end_state in ('failed', 'timed_out', 'no_progress', 'spawn_failed')
              then coalesce(p_state.last_ended_at, p_state.last_claimed_at)
              else p_state.last_claimed_at end
         + make_interval(secs => least((p_settings ->> 'max_wake_cooldown')::double precision,
                                       (p_settings ->> 'wake_cooldown')::double precision * power(2, least(p_state.consecutive_failures, 30))));
end
$$;
comment on function public.wake_cooldown_ends(public.agent_wake_state, jsonb) is
  'When the agent''s cooldown is over: wake_cooldown doubled per failure in a row, at most max_wake_cooldown, from the start of a good wake or the end of a failed one. NULL before the first wake.';

create or replace function public.wake_chain_limit(p_settings jsonb) returns integer
language sql immutable set search_path = ''
as $$ select coalesce(nullif((p_settings ->> 'max_wake_chain')::integer, 0), 2147483647) $$;
comment on function public.wake_chain_limit(jsonb) is 'From which chain depth on an item wakes nobody; max_wake_chain = 0 means never.';

create or replace function public.wake_gates(
  p_agent_id uuid, p_settings jsonb, p_all boolean default false,
  out blocked text[], out retry_at timestamptz, out due_item_id uuid, out chain_depth integer, out failures integer
)
language plpgsql stable set search_path = ''
as $$
declare
  v_now constant timestamptz := now();
  v_max_chain constant integer := public.wake_chain_limit(p_settings);
  v_max_per_day constant integer := coalesce((p_settings ->> 'max_wakes_per_day')::integer, 0);
  v_facts record;
  v_state public.agent_wake_state;
  v_until timestamptz;
begin
  blocked := '{}';
  select state as wake_state, agent.status as agent_status, agent.tenant_id, budget.status as budget_status,
         exists (select from public.agent_wakes as wake where wake.agent_id = p_agent_id and wake.state in ('starting', 'running')) as in_flight,
         (select max(item.leased_until) from public.agent_inbox_items as item
           where item.agent_id = p_agent_id and item.tenant_id = agent.tenant_id and item.status = 'leased' and item.leased_until > v_now) as leased_until,
         due.id as due_id, due.chain_depth as due_depth
    into v_facts
    from public.agents as agent
    left join public.agent_wake_state as state on state.agent_id = agent.id
    left join public.agent_budgets as budget on budget.agent_id = agent.id
    -- With the rest in one statement: a sweep asks this of every agent.
    left join lateral (
      select found.id, found.chain_depth from public.agent_inbox_due as found
       where found.agent_id = p_agent_id and found.tenant_id = agent.tenant_id and found.due_at <= v_now and found.chain_depth < v_max_chain
       order by found.created_at limit 1) as due on true
   where agent.id = p_agent_id;
  v_state := v_facts.wake_state;
  failures := coalesce(v_state.consecutive_failures, 0);

  if v_state.consecutive_failures >= (p_settings ->> 'max_consecutive_failures')::integer then
    blocked := blocked || 'stalled'::text;
    if not p_all then return; end if;
  end if;

  if v_facts.in_flight then
    blocked := blocked || 'wake_in_flight'::text;
    if not p_all then return; end if;
  end if;

  if v_facts.agent_status in ('paused', 'hibernating') then
    blocked := blocked || 'agent_paused'::text;
    if not p_all then return; end if;
  end if;

  if v_facts.leased_until is not null then
    blocked := blocked || 'active_lease'::text;
    retry_at := v_facts.leased_until;
    if not p_all then return; end if;
  end if;

  if v_facts.budget_status = 'exceeded' and public.budget_blocks(p_agent_id, v_now) then
    blocked := blocked || 'budget_exceeded'::text;
    if not p_all then return; end if;
  end if;

  due_item_id := v_facts.due_id;
  chain_depth := v_facts.due_depth;
  if due_item_id is null then
    select min(due.due_at) into v_until from public.agent_inbox_due as due
     where due.agent_id = p_agent_id and due.tenant_id = v_facts.tenant_id and due.due_at > v_now and due.chain_depth < v_max_chain;
    retry_at := coalesce(v_until, retry_at);
    blocked := blocked || case when v_until is null and exists (
                                 select from public.agent_inbox_due as due
                                  where due.agent_id = p_agent_id and due.tenant_id = v_facts.tenant_id and due.due_at <= v_now
                                    and due.chain_depth >= v_max_chain)
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
comment on function public.wake_gates(uuid, jsonb, boolean) is
  'The gates of one agent in their order (all but the cap): blocked = the reasons that refuse a wake, the first one unless p_all; retry_at = when waiting alone would open it; due_item_id = the oldest item to work on; failures = its failures in a row.';

-- ---------------------------------------------------------------------------------------------------------------
-- Small parts
-- ---------------------------------------------------------------------------------------------------------------

create or replace function public.dispatcher_gateway_topic(p_gateway_id uuid) returns text
language sql immutable set search_path = ''
as $$ select 'gateway:' || p_gateway_id::text $$;
comment on function public.dispatcher_gateway_topic(uuid) is 'The private Realtime topic of a gateway.';

create or replace function public.reset_wake_failures(p_agent_id uuid) returns void
language sql volatile set search_path = ''
as $$
  update public.agent_wake_state
     set consecutive_failures = 0, stalled_at = null, updated_at = now()
   where agent_id = p_agent_id and (consecutive_failures > 0 or stalled_at is not null)
$$;
comment on function public.reset_wake_failures(uuid) is 'New context for an agent: its failures in a row and its stall are forgotten; the base cooldown stays.';

create or replace function public.wake_blockers(p_item_id uuid) returns jsonb
language plpgsql stable set search_path = ''
as $$
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
comment on function public.wake_blockers(uuid) is 'Titles of the unresolved tasks that block the task of a task_assignment item; NULL when there are none.';

-- ---------------------------------------------------------------------------------------------------------------
-- Claims
-- ---------------------------------------------------------------------------------------------------------------

create or replace function public.wake_grant(p_wake public.agent_wakes) returns jsonb
language plpgsql stable set search_path = ''
as $$
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
comment on function public.wake_grant(public.agent_wakes) is 'Everything a spawn needs, as the answer to a granted claim.';

create or replace function public.claim_one_wake(
  p_instance public.dispatcher_instances, p_agent_id uuid, p_path text, p_item_ids uuid[], p_request uuid
) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_agent record;
  v_gates record;
  v_live integer;
  v_items uuid[];
  v_heads uuid[];
  v_wake public.agent_wakes;
  v_path text;
  v_depth integer;
  v_max_chain constant integer := public.wake_chain_limit(p_instance.settings);
begin
  select id, slug, tenant_id into v_agent from public.agents
   where id = p_agent_id and gateway_id = p_instance.gateway_id and tenant_id = p_instance.tenant_id;
  if v_agent is null then
    return jsonb_build_object('granted', false, 'agent_id', p_agent_id, 'skip_reason', 'not_local');
  end if;
  perform from public.dispatcher_gateways where gateway_id = p_instance.gateway_id for update;
  -- Asked before under the same request: the same grant.
  select * into v_wake from public.agent_wakes as wake
   where wake.claim_request = p_request and wake.agent_id = p_agent_id and wake.state in ('starting', 'running');
  if v_wake.id is not null then
    return public.wake_grant(v_wake);
  end if;
  insert into public.agent_wake_state (agent_id, tenant_id) values (p_agent_id, v_agent.tenant_id) on conflict do nothing;
  select coalesce(max(waitlist_path) filter (where waitlist_path = 'command'), p_path) into v_path
    from (select waitlist_path from public.agent_wake_state where agent_id = p_agent_id for update) as locked;

  -- The insert trigger resets an agent at once, unless its row was locked or the database lacks the trigger: then the items do.
  if exists (select from public.agent_wake_state as state
              join public.agent_inbox_items as item on item.agent_id = state.agent_id
             where state.agent_id = p_agent_id and state.consecutive_failures > 0 and item.tenant_id = v_agent.tenant_id
               and item.status in ('pending', 'failed') and item.attempt_count < item.max_attempts
               and item.created_at > state.last_ended_at and item.created_at <= now()
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
                              'retry_in', extract(epoch from v_gates.retry_at - now()), 'failures', v_gates.failures);
  end if;

  -- item_ids: those that hints named (at most 100), else the oldest; then the ones the agent will lease first.
  select array_agg(due.id order by due.created_at), max(due.chain_depth) into v_heads, v_depth
    from (select * from public.agent_inbox_due as due
           where due.agent_id = p_agent_id and due.tenant_id = v_agent.tenant_id and due.due_at <= now() and due.chain_depth < v_max_chain
           order by due.created_at limit 100) as due;
  v_items := array(select due.id from public.agent_inbox_due as due
                    where due.agent_id = p_agent_id and due.tenant_id = v_agent.tenant_id and due.id = any (p_item_ids)
                      and due.due_at <= now() and due.chain_depth < v_max_chain
                    order by due.created_at limit 100);
  if cardinality(v_items) = 0 then
    v_items := v_heads[1:1];
  end if;
  v_items := v_items || array(select head.id from unnest(v_heads[1:3]) with ordinality as head (id, place)
                               where head.id <> all (v_items) order by head.place);
  insert into public.agent_wakes (tenant_id, agent_id, gateway_id, instance_id, claim_request, path, item_ids, chain_depth, model_override,
                                  thinking_override, deadline_at)
  select v_agent.tenant_id, p_agent_id, p_instance.gateway_id, p_instance.id, p_request, v_path, v_items, coalesce(v_depth, 0),
         case when jsonb_typeof(item.context -> 'model_override') = 'string' then nullif(item.context ->> 'model_override', '') end,
         case when jsonb_typeof(item.context -> 'thinking_override') = 'string' then nullif(item.context ->> 'thinking_override', '') end,
         now() + make_interval(secs => (p_instance.settings ->> 'agent_process_timeout')::double precision + 15)
    from public.agent_inbox_items as item where item.id = v_items[1]
  returning * into v_wake;
  update public.agent_wake_state
     set last_wake_id = v_wake.id, last_claimed_at = v_wake.claimed_at, waitlisted_at = null, waitlist_path = null, waiting_since = null, updated_at = now()
   where agent_id = p_agent_id;
  -- A stamp is not worth a wait: a row that somebody holds goes without it.
  update public.agent_inbox_items set last_wake_attempt_at = now()
   where id in (select item.id from public.agent_inbox_items as item where item.id = any (v_items) for update skip locked);
  return public.wake_grant(v_wake);
end
$$;
comment on function public.claim_one_wake(public.dispatcher_instances, uuid, text, uuid[], uuid) is
  'Evaluates every gate of one agent under the gateway''s lock and, when all are open, writes the wake (state starting). Answers {granted, …}.';

create or replace function public.running_instance(p_instance_id uuid) returns public.dispatcher_instances
language plpgsql stable set search_path = ''
as $$
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
comment on function public.running_instance(uuid) is 'The row of an instance; raises OD001 when it is not registered.';

create or replace function public.claim_wakes(p_instance_id uuid, p_claims jsonb, p_request uuid) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '3s'
as $$
declare
  v_instance constant public.dispatcher_instances := public.running_instance(p_instance_id);
  v_claim jsonb;
  v_answer jsonb;
  v_answers jsonb := '[]';
begin
  -- Before anything else: an earlier try of this request may be under way still.
  perform from public.dispatcher_gateways where gateway_id = v_instance.gateway_id for update;
  for v_claim in select value from jsonb_array_elements(p_claims) loop
    begin
      v_answer := public.claim_one_wake(
        v_instance, (v_claim ->> 'agent_id')::uuid, v_claim ->> 'path',
        array(select jsonb_array_elements_text(coalesce(v_claim -> 'item_ids', '[]'))::uuid), p_request);
    exception when query_canceled or deadlock_detected or serialization_failure then
      raise;
    when lock_not_available then
      v_answer := jsonb_build_object('granted', false, 'agent_id', v_claim ->> 'agent_id', 'skip_reason', 'busy', 'retry_in', 5,
                                     'agent_slug', (select slug from public.agents where id = (v_claim ->> 'agent_id')::uuid));
    when others then
      v_answer := jsonb_build_object('granted', false, 'agent_id', v_claim ->> 'agent_id', 'skip_reason', 'error', 'error', sqlerrm, 'error_code', sqlstate);
    end;
    v_answers := v_answers || v_answer;
  end loop;
  return v_answers;
end
$$;
comment on function public.claim_wakes(uuid, jsonb, uuid) is
  'Claims wakes for p_claims = [{agent_id, path, item_ids}]; answers one verdict per claim, in order. p_request makes a repeated call hand back the same grants. One agent whose data raises does not stop the others.';

create or replace function public.claim_waiting_wakes(p_instance_id uuid, p_limit integer, p_request uuid) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '3s'
as $$
declare
  v_instance constant public.dispatcher_instances := public.running_instance(p_instance_id);
  v_waiting record;
  v_answer jsonb;
  v_answers jsonb := '[]';
  v_granted integer := 0;
  v_page constant integer := 100;
  v_seen integer;
begin
  select jsonb_agg(public.wake_grant(wake)) into v_answer from public.agent_wakes as wake
   where wake.claim_request = p_request and wake.state in ('starting', 'running');
  if v_answer is not null then
    return v_answer;
  end if;
  if p_limit <= 0 then
    return v_answers;
  end if;
  -- In pages: the plan then walks the index of the waitlist instead of sorting all of it for one free slot.
  loop
    v_seen := 0;
    for v_waiting in
      select state.agent_id, state.waitlist_path from public.agent_wake_state as state
        join public.agents as agent on agent.id = state.agent_id
       where state.waitlisted_at is not null and agent.gateway_id = v_instance.gateway_id and agent.tenant_id = v_instance.tenant_id
       order by state.waitlisted_at, state.waiting_since, state.agent_id limit v_page
    loop
      v_seen := v_seen + 1;
      begin
        v_answer := public.claim_one_wake(v_instance, v_waiting.agent_id, v_waiting.waitlist_path, '{}', p_request);
      exception when query_canceled or deadlock_detected or serialization_failure then
        raise;
      when lock_not_available then
        v_answer := jsonb_build_object('granted', false, 'agent_id', v_waiting.agent_id, 'skip_reason', 'busy', 'retry_in', 5,
                                       'agent_slug', (select slug from public.agents where id = v_waiting.agent_id));
      when others then
        -- Off the list with it, or it would stand at its head for ever; the sweep lists it again.
        update public.agent_wake_state set waitlisted_at = null, waitlist_path = null, waiting_since = null where agent_id = v_waiting.agent_id;
        v_answer := jsonb_build_object('granted', false, 'agent_id', v_waiting.agent_id, 'skip_reason', 'error', 'error', sqlerrm, 'error_code', sqlstate);
      end;
      if v_answer ->> 'skip_reason' = 'concurrency_limit' then
        return v_answers;
      end if;
      v_answers := v_answers || v_answer;
      v_granted := v_granted + (v_answer ->> 'granted')::boolean::integer;
      if v_granted >= p_limit then
        return v_answers;
      end if;
    end loop;
    exit when v_seen < v_page or v_answers @? '$[*] ? (@.skip_reason == "busy")';
  end loop;
  return v_answers;
end
$$;
comment on function public.claim_waiting_wakes(uuid, integer, uuid) is
  'Claims up to p_limit wakes from the waitlist of the instance''s gateway, longest waiting first; an agent that may no longer be woken leaves the list and hides nobody.';

-- ---------------------------------------------------------------------------------------------------------------
-- The life of a wake
-- ---------------------------------------------------------------------------------------------------------------

create or replace function public.start_wake(
  p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision
) returns jsonb
language plpgsql volatile set search_path = ''
as $$
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
  update public.agent_inbox_items set last_wake_success_at = now()
   where id in (select item.id from public.agent_inbox_items as item where item.id = any (v_wake.item_ids) for update skip locked);
  return jsonb_build_object('wake_id', p_wake_id, 'applied', true, 'code', 'ok');
end
$$;
comment on function public.start_wake(uuid, uuid, text, integer, double precision) is
  'The process of a claimed wake started: keeps its pid, start time and host, and stamps last_wake_success_at. Needs the claim token.';

create or replace function public.wake_has_progress(p_wake public.agent_wakes) returns boolean
language plpgsql stable set search_path = ''
as $$
begin
  return (
    select p_wake.progressed_at is not null
      or exists (select from public.inbox_item_leases as lease
                  where lease.wake_id = p_wake.id and lease.outcome in ('done', 'failed', 'dead_letter', 'escalated'))
      or exists (select from public.agent_inbox_items as item
                  where item.agent_id = p_wake.agent_id and item.completed_at >= p_wake.claimed_at)
      or not exists (select from public.agent_inbox_items as item
                      where item.agent_id = p_wake.agent_id and item.status in ('pending', 'failed', 'leased') and item.attempt_count < item.max_attempts)
  );
end
$$;
comment on function public.wake_has_progress(public.agent_wakes) is 'Whether an item of the agent was finished during the wake, or nothing is left to do.';

create or replace function public.give_up_item(p_item_id uuid, p_reason text) returns void
language sql volatile set search_path = ''
as $$
  update public.agent_inbox_items
     set status = 'dead_letter', failed_at = now(), leased_at = null, leased_until = null, updated_at = now(),
         context = public.merge_inbox_context(context, jsonb_build_object('last_failure_reason', p_reason))
   where id = p_item_id
$$;
comment on function public.give_up_item(uuid, text) is 'dead_letter with its reason.';

create or replace function public.release_wake_leases(p_wake public.agent_wakes, p_give_back boolean, p_reason text) returns integer
language plpgsql volatile set search_path = ''
as $$
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
comment on function public.release_wake_leases(public.agent_wakes, boolean, text) is
  'Releases the leases taken during a wake; gives their attempts back when p_give_back, else an item without attempts left becomes dead_letter with p_reason.';

create or replace function public.spend_attempt_of_lost_wake(p_wake public.agent_wakes) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_item record;
  v_agent record;
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
    select slug, tenant_id into v_agent from public.agents where id = p_wake.agent_id;
    insert into public.notifications (tenant_id, type, title, body, entity_type, entity_id, actor_type, actor_agent_id, meta)
    values (v_agent.tenant_id, 'worker_lost', format('An item of agent %s was given up', v_agent.slug),
            format('%s daemon(s) were lost before its run could be seen to begin or end. `dispatcher inbox requeue %s` brings it back.',
                   v_item.attempt_count, v_item.id),
            'agent', p_wake.agent_id, 'system', p_wake.agent_id, jsonb_build_object('item_id', v_item.id, 'attempts', v_item.attempt_count));
  end if;
end
$$;
comment on function public.spend_attempt_of_lost_wake(public.agent_wakes) is
  'A poison item ends at max_attempts also when it is the daemon that dies of it; a notification says so, for a daemon may die of something else.';

create or replace function public.mark_agent_stalled(p_agent_id uuid) returns integer
language plpgsql volatile set search_path = ''
as $$
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
         context = public.merge_inbox_context(context, jsonb_build_object('last_failure_reason', 'agent_stalled'))
   where id in (select item.id from public.agent_inbox_items as item
                 where item.agent_id = p_agent_id and item.status = 'pending' and item.attempt_count < item.max_attempts
                 limit 500 for update skip locked);
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
comment on function public.mark_agent_stalled(uuid) is
  'Sets pending items of an agent aside (failed, reason agent_stalled, attempts untouched), at most 500 a call: the sweep takes the rest. Tells the operator once per stall.';

create or replace function public.wake_end_state(p_wake public.agent_wakes, p_ending text, p_exit_code integer) returns text
language plpgsql stable set search_path = ''
as $$
begin
  return (
    select case
    when p_ending in ('timed_out', 'interrupted', 'lost', 'spawn_failed') then p_ending
    when p_ending = 'exited' and p_exit_code <> 0 then 'failed'
    when public.wake_has_progress(p_wake) then 'succeeded'
    else 'no_progress' end
  );
end
$$;
comment on function public.wake_end_state(public.agent_wakes, text, integer) is
  'The state a wake ends in. Exit 0 without progress is no_progress; an unknown exit code (adopted child) is judged by progress alone.';

create or replace function public.end_wake(p_wake_id uuid, p_claim_token uuid, p_ending text, p_exit_code integer, p_error text) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_wake public.agent_wakes;
  v_state text;
  v_settings jsonb;
  v_failures integer;
  v_max integer;
  v_released integer;
begin
  if p_ending not in ('exited', 'timed_out', 'interrupted', 'lost', 'spawn_failed') then
    raise exception 'unknown ending %', p_ending using errcode = 'OD002';
  end if;
  perform from public.agent_wake_state where agent_id = (select agent_id from public.agent_wakes where id = p_wake_id) for update;
  select * into v_wake from public.agent_wakes where id = p_wake_id for update;
  if v_wake.id is null or v_wake.claim_token <> p_claim_token then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'state', v_wake.state,
                              'code', case when v_wake.id is null then 'not_found' else 'fence_lost' end);
  end if;
  select settings into v_settings from public.dispatcher_instances where id = v_wake.instance_id;
  v_settings := coalesce(v_settings, (select settings from public.dispatcher_instances where gateway_id = v_wake.gateway_id order by last_heartbeat_at desc limit 1));
  if v_wake.ended_at is not null then
    -- Whoever asks again did not hear the first answer, and so not when to look at the agent next.
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'code', 'already', 'state', v_wake.state, 'agent_id', v_wake.agent_id)
           || public.wait_for_next_wake(v_wake.agent_id, v_settings,
             case when v_wake.state in ('interrupted', 'lost') then v_wake.claimed_at else now() end);
  end if;
  perform set_config('dispatcher.quiet', 'on', true);
  v_state := public.wake_end_state(v_wake, p_ending, p_exit_code);
  update public.agent_wakes set state = v_state, ended_at = now(), exit_code = p_exit_code, error = left(p_error, 2000) where id = p_wake_id;
  v_released := public.release_wake_leases(v_wake, v_state in ('interrupted', 'spawn_failed'), format('wake ended (%s) with the item unfinished', v_state));
  if v_state = 'lost' and v_released = 0 then
    perform public.spend_attempt_of_lost_wake(v_wake);
  end if;

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
                            'consecutive_failures', v_failures) || public.wait_for_next_wake(v_wake.agent_id, v_settings,
             case when v_state in ('interrupted', 'lost') then v_wake.claimed_at else now() end);
end
$$;
comment on function public.end_wake(uuid, uuid, text, integer, text) is
  'Ends a wake: final state, leases released, failures counted, and what is next for its agent (waitlisted, or retry_in seconds). p_ending: exited, timed_out, interrupted, lost, spawn_failed. Needs the claim token.';

drop function if exists public.wait_for_next_wake(uuid, jsonb);
create or replace function public.wait_for_next_wake(p_agent_id uuid, p_settings jsonb, p_since timestamptz) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_gates record;
begin
  select * into v_gates from public.wake_gates(p_agent_id, p_settings);
  if cardinality(v_gates.blocked) > 0 then
    return jsonb_build_object('next', v_gates.blocked[1], 'retry_in', extract(epoch from v_gates.retry_at - now()));
  end if;
  update public.agent_wake_state
     set waitlisted_at = coalesce(waitlisted_at, p_since), waitlist_path = coalesce(waitlist_path, 'waitlist'),
         waiting_since = coalesce(waiting_since, (select created_at from public.agent_inbox_items where id = v_gates.due_item_id)), updated_at = now()
   where agent_id = p_agent_id;
  return jsonb_build_object('next', 'waitlisted');
end
$$;
comment on function public.wait_for_next_wake(uuid, jsonb, timestamptz) is 'After a wake: puts an agent with work left on the waitlist, waiting since p_since (one whose wake came to nothing keeps its place), or says when it may be looked at again.';

create or replace function public.report_wakes(p_instance_id uuid, p_reports jsonb, p_claim_limit integer, p_request uuid) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '3s'
as $$
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
    exception when query_canceled or deadlock_detected or serialization_failure then
      raise;
    when others then
      v_answer := jsonb_build_object('wake_id', v_report ->> 'wake_id', 'applied', false, 'code', 'error', 'error', sqlerrm, 'error_code', sqlstate);
    end;
    v_answers := v_answers || (v_answer || jsonb_build_object('report', v_report ->> 'report'));
  end loop;
  return jsonb_build_object('results', v_answers, 'claims', public.claim_waiting_wakes(p_instance_id, p_claim_limit, p_request));
end
$$;
comment on function public.report_wakes(uuid, jsonb, integer, uuid) is
  'What happened to wakes since the last call, and the next claims off the waitlist, in one round trip. p_reports: [{report: started|ended, wake_id, claim_token, …}].';

-- ---------------------------------------------------------------------------------------------------------------
-- Instances
-- ---------------------------------------------------------------------------------------------------------------

create or replace function public.broadcast_hints_available() returns boolean
language sql stable set search_path = ''
as $$
  select to_regprocedure('realtime.send(jsonb,text,text,boolean)') is not null
     and exists (select from pg_catalog.pg_trigger where tgrelid = 'public.agent_inbox_items'::regclass
                  and tgname = 'dispatcher_inbox_insert_hint' and tgenabled <> 'D')
$$;
comment on function public.broadcast_hints_available() is 'Whether an insert is broadcast here: realtime.send exists and the insert trigger is in place and enabled.';

create or replace function public.open_wake_facts(p_wake public.agent_wakes) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object(
           'wake_id', p_wake.id, 'claim_token', p_wake.claim_token, 'claim_request', p_wake.claim_request, 'agent_id', p_wake.agent_id,
           'agent_slug', agent.slug, 'state', p_wake.state, 'host_id', coalesce(p_wake.host_id, owner.host_id), 'hostname', owner.hostname,
           'pid', p_wake.pid, 'pid_started_at', p_wake.pid_started_at,
           'age', extract(epoch from now() - p_wake.claimed_at), 'deadline_in', extract(epoch from p_wake.deadline_at - now()),
           'owner_state', coalesce(owner.state, 'lost'), 'owner_pid', owner.pid, 'owner_pid_started_at', owner.pid_started_at,
           'owner_host_id', owner.host_id, 'owner_silent_for', extract(epoch from now() - owner.last_heartbeat_at))
    from public.agents as agent
    left join public.dispatcher_instances as owner on owner.id = p_wake.instance_id
   where agent.id = p_wake.agent_id
$$;
comment on function public.open_wake_facts(public.agent_wakes) is 'What is needed to tell whether the process of a live wake and its owner live.';

create or replace function public.open_wakes_of_others(p_instance_id uuid) returns jsonb
language sql stable set search_path = ''
as $$
  select coalesce(jsonb_agg(public.open_wake_facts(wake) order by wake.claimed_at), '[]')
    from public.agent_wakes as wake
    join public.dispatcher_instances as me on me.id = p_instance_id and me.gateway_id = wake.gateway_id
   where wake.state in ('starting', 'running') and wake.instance_id is distinct from p_instance_id
$$;
comment on function public.open_wakes_of_others(uuid) is 'Live wakes of the instance''s gateway that another instance owns, with what is needed to tell whether their process and owner live.';

create or replace function public.register_dispatcher_instance(p_tenant_id uuid, p_gateway text, p_identity jsonb, p_settings jsonb) returns jsonb
language plpgsql volatile set search_path = ''
as $$
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
comment on function public.register_dispatcher_instance(uuid, text, jsonb, jsonb) is
  'Registers a daemon for a gateway (slug or id) under the id it chose (p_identity.instance_id); a repeat is the same row. Answers {code: ok, instance_id, gateway_id, topic, broadcast_available, open_wakes} or {code: unknown_gateway, known}.';

create or replace function public.adopt_wake(p_instance_id uuid, p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_wake public.agent_wakes;
begin
  update public.agent_wakes
     set instance_id = p_instance_id, claim_token = gen_random_uuid(), state = 'running', host_id = p_host_id, pid = p_pid,
         pid_started_at = p_pid_started_at, started_at = coalesce(started_at, now())
   where id = p_wake_id and claim_token = p_claim_token and state in ('starting', 'running')
  returning * into v_wake;
  update public.agent_inbox_items set last_wake_success_at = v_wake.started_at
   where id in (select item.id from public.agent_inbox_items as item
                 where item.id = any (v_wake.item_ids) and item.last_wake_success_at is distinct from v_wake.started_at
                   and (item.last_wake_success_at is null or item.last_wake_success_at < v_wake.claimed_at) for update skip locked);
  if v_wake.id is null then
    -- An adoption whose answer was lost is asked for again, with the token it has replaced.
    select * into v_wake from public.agent_wakes
     where id = p_wake_id and instance_id = p_instance_id and state = 'running' and host_id = p_host_id and pid = p_pid
       and pid_started_at is not distinct from p_pid_started_at;
  end if;
  if v_wake.id is null then
    return jsonb_build_object('applied', false, 'code', 'fence_lost');
  end if;
  return jsonb_build_object('applied', true, 'claim_token', v_wake.claim_token, 'agent_id', v_wake.agent_id,
                            'deadline_in', extract(epoch from v_wake.deadline_at - now()));
end
$$;
comment on function public.adopt_wake(uuid, uuid, uuid, text, integer, double precision) is
  'Takes over a live wake: new owner, new claim token (the old one can change nothing any more). One adopter wins; its repeat gets the same answer.';

create or replace function public.renew_wake_leases(p_instance_id uuid, p_wake_ids uuid[], p_lease_seconds integer) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_count integer;
begin
  with renewed as (
    update public.agent_inbox_items as item
       set leased_until = now() + make_interval(secs => p_lease_seconds)
      from public.agent_wakes as wake
     where wake.id = any (p_wake_ids) and wake.instance_id = p_instance_id and wake.state in ('starting', 'running')
       and item.id in (select held.id from public.agent_inbox_items as held
                        where held.agent_id = wake.agent_id and held.status = 'leased' and held.leased_at >= wake.claimed_at
                          and held.leased_until < now() + make_interval(secs => p_lease_seconds * 0.75) for update skip locked)
    returning item.id, item.leased_until
  ), leases as (
    update public.inbox_item_leases as lease set leased_until = renewed.leased_until
      from renewed where lease.item_id = renewed.id and lease.closed_at is null
  )
  select count(*) into v_count from renewed;
  return v_count;
end
$$;
comment on function public.renew_wake_leases(uuid, uuid[], integer) is
  'Prolongs the leases taken during the given live wakes of this instance, so that a lease never ends before the work. Answers how many.';

create or replace function public.is_instance_silent(p_instance public.dispatcher_instances) returns boolean
language sql stable set search_path = ''
as $$
  select p_instance.last_heartbeat_at < now() - make_interval(secs => coalesce((p_instance.settings ->> 'instance_timeout')::double precision, 45))
$$;
comment on function public.is_instance_silent(public.dispatcher_instances) is 'Whether an instance has sent no heartbeat for longer than its own instance_timeout.';

create or replace function public.wakes_without_owner(p_instance public.dispatcher_instances) returns jsonb
language sql stable set search_path = ''
as $$
  select coalesce(jsonb_agg(wake.id), '[]') from public.agent_wakes as wake
    left join public.dispatcher_instances as owner on owner.id = wake.instance_id
   where wake.gateway_id = p_instance.gateway_id and wake.state in ('starting', 'running') and wake.instance_id is distinct from p_instance.id
     and (owner.id is null or owner.state <> 'running' or public.is_instance_silent(owner))
$$;
comment on function public.wakes_without_owner(public.dispatcher_instances) is
  'Live wakes of the instance''s gateway whose own instance is gone, stopped or silent: nobody watches their time, so whoever hears of them sweeps.';

create or replace function public.heartbeat_dispatcher_instance(p_instance_id uuid, p_live_wake_ids uuid[], p_nonce uuid, p_facts jsonb) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '3s'
as $$
declare
  v_instance public.dispatcher_instances;
  v_renewed integer;
  v_fenced jsonb;
  v_unattended jsonb;
begin
  v_instance := public.running_instance(p_instance_id);
  update public.dispatcher_instances
     set last_heartbeat_at = now(), canary = p_nonce, realtime = coalesce(p_facts -> 'realtime', realtime), health = coalesce(p_facts -> 'health', health),
         state = case state when 'lost' then 'running' else state end
   where id = p_instance_id;
  perform public.send_gateway_hint(v_instance.gateway_id, 'canary', jsonb_build_object('instance_id', p_instance_id, 'nonce', p_nonce));
  v_renewed := public.renew_wake_leases(p_instance_id, p_live_wake_ids, (v_instance.settings ->> 'lease_seconds')::integer);
  select jsonb_agg(live.id) into v_fenced from unnest(p_live_wake_ids) as live (id)
   where not exists (select from public.agent_wakes as wake where wake.id = live.id and wake.instance_id = p_instance_id and wake.ended_at is null);
  -- Named, not closed: this call may be an old one that arrives late, and the instance alone knows whether a process runs.
  select jsonb_agg(public.open_wake_facts(wake) order by wake.claimed_at) into v_unattended from public.agent_wakes as wake
   where wake.instance_id = p_instance_id and wake.state in ('starting', 'running') and wake.id <> all (p_live_wake_ids);
  return jsonb_build_object('renewed', v_renewed, 'broadcast_available', public.broadcast_hints_available(),
                            'fenced', coalesce(v_fenced, '[]'), 'unattended', coalesce(v_unattended, '[]'),
                            'orphaned', public.wakes_without_owner(v_instance), 'now', now());
end
$$;
comment on function public.heartbeat_dispatcher_instance(uuid, uuid[], uuid, jsonb) is
  'One heartbeat: the instance lives, its leases are renewed, its canary (p_nonce) is sent; named are wakes it no longer owns (fenced) and wakes it owns without knowing of them (unattended: the answer to a claim or an adoption was lost).';

create or replace function public.stop_dispatcher_instance(p_instance_id uuid) returns void
language sql volatile set search_path = ''
as $$
  update public.dispatcher_instances set state = 'stopped', stopped_at = now(), last_heartbeat_at = now()
   where id = p_instance_id and state <> 'stopped'
$$;
comment on function public.stop_dispatcher_instance(uuid) is 'A daemon ended in good order.';

-- ---------------------------------------------------------------------------------------------------------------
-- Sweep
-- ---------------------------------------------------------------------------------------------------------------

create or replace function public.expire_stale_items(p_instance public.dispatcher_instances) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_hours constant double precision := (p_instance.settings ->> 'stale_item_age_hours')::double precision;
  v_oldest timestamptz;
  v_count integer;
begin
  if v_hours <= 0 then
    return 0;
  end if;
  v_oldest := now() - make_interval(secs => v_hours * 3600);
  update public.agent_inbox_items as item
     set status = 'failed', attempt_count = greatest(item.attempt_count, item.max_attempts), failed_at = now(), updated_at = now(),
         context = public.merge_inbox_context(item.context, jsonb_build_object('last_failure_reason', format('stale: pending for more than %s h', v_hours)))
   where item.id in (
     select stale.id from public.agents as agent
       join public.agent_inbox_items as stale on stale.agent_id = agent.id and stale.tenant_id = agent.tenant_id
       left join public.agent_wake_state as state on state.agent_id = agent.id
       left join public.inbox_item_reopenings as reopening on reopening.item_id = stale.id
      where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id and agent.status not in ('paused', 'hibernating')
        and stale.status = 'pending' and stale.attempt_count < stale.max_attempts and stale.created_at < v_oldest
        and coalesce(reopening.reopened_at, '-infinity') < v_oldest and coalesce(state.resumed_at, '-infinity') < v_oldest
      limit 1000 for update of stale skip locked);
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
comment on function public.expire_stale_items(public.dispatcher_instances) is
  'Items pending for longer than stale_item_age_hours fail for good, reason recorded, at most 1,000 a call. The age counts from the creation, the last requeue or the end of its agent''s pause; items of paused or hibernating agents wait.';

create or replace function public.bury_spent_items(p_instance public.dispatcher_instances) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_count integer;
begin
  with spent as (
    update public.agent_inbox_items as item
       set status = 'dead_letter', failed_at = now(), leased_at = null, leased_until = null, updated_at = now(),
           context = public.merge_inbox_context(item.context, jsonb_build_object('last_failure_reason',
             case item.status when 'leased' then 'lease expired with no attempts left' else 'no attempts left' end))
     where item.id in (
       select held.id from public.agents as agent
         join public.agent_inbox_items as held on held.agent_id = agent.id and held.tenant_id = agent.tenant_id
        where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id
          and held.status in ('pending', 'leased') and held.attempt_count >= held.max_attempts
          and (held.status = 'pending' or held.leased_until < now())
          -- A lease that ran out while the database was away is renewed by the heartbeat of the wake that works on it.
          and not exists (select from public.agent_wakes as wake where wake.agent_id = agent.id and wake.state in ('starting', 'running'))
        limit 1000 for update of held skip locked)
    returning item.id
  ), leases as (
    update public.inbox_item_leases as lease set closed_at = now(), outcome = 'dead_letter'
      from spent where lease.item_id = spent.id and lease.closed_at is null
  )
  select count(*) into v_count from spent;
  return v_count;
end
$$;
comment on function public.bury_spent_items(public.dispatcher_instances) is 'Expired leases and pending items without attempts left become dead_letter, with the reason.';

create or replace function public.stop_wake_chains(p_instance public.dispatcher_instances) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_limit constant integer := public.wake_chain_limit(p_instance.settings);
  v_chain record;
  v_count integer := 0;
begin
  for v_chain in
    -- From the few deep origins to their items, and not the other way: no statistics may turn this into a look at every item.
    with deep as materialized (
      select origin.item_id, origin.chain_depth from public.inbox_item_origins as origin
       where origin.tenant_id = p_instance.tenant_id and origin.chain_depth >= v_limit)
    select agent.id, agent.slug, agent.tenant_id, array_agg(item.id) as item_ids, max(deep.chain_depth) as depth
      from deep
      join public.agent_inbox_items as item on item.id = deep.item_id and item.status in ('pending', 'failed') and item.attempt_count < item.max_attempts
      join public.agents as agent on agent.id = item.agent_id and agent.tenant_id = item.tenant_id
     where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id
     group by agent.id, agent.slug, agent.tenant_id
  loop
    update public.agent_inbox_items
       set status = 'dead_letter', failed_at = now(), updated_at = now(),
           context = public.merge_inbox_context(context, jsonb_build_object('last_failure_reason', format('wake chain limit (%s) reached', v_limit)))
     where id in (select item.id from public.agent_inbox_items as item where item.id = any (v_chain.item_ids[1:1000]) for update skip locked);
    v_count := v_count + cardinality(v_chain.item_ids[1:1000]);
    -- One alert per agent and hour: a ring that goes on posting must not flood the operator either.
    insert into public.agent_wake_state (agent_id, tenant_id) values (v_chain.id, v_chain.tenant_id) on conflict do nothing;
    update public.agent_wake_state set chain_notified_at = now()
     where agent_id = v_chain.id and (chain_notified_at is null or chain_notified_at < now() - interval '1 hour');
    if found then
      insert into public.notifications (tenant_id, type, title, body, entity_type, entity_id, actor_type, actor_agent_id, meta)
      values (v_chain.tenant_id, 'wake_chain_limit', format('Agent %s was stopped in a chain of wakes', v_chain.slug),
              format('Agents woke each other %s times in a row; %s item(s) were set aside. `dispatcher inbox requeue --agent %s` brings them back.',
                     v_chain.depth, cardinality(v_chain.item_ids), v_chain.slug),
              'agent', v_chain.id, 'system', v_chain.id, jsonb_build_object('chain_depth', v_chain.depth, 'item_ids', v_chain.item_ids));
    end if;
  end loop;
  return v_count;
end
$$;
comment on function public.stop_wake_chains(public.dispatcher_instances) is
  'Items whose chain of wakes reached max_wake_chain become dead_letter; one notification per agent and hour.';

create or replace function public.settle_stalled_agents(p_instance public.dispatcher_instances) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_agent_id uuid;
  v_count integer := 0;
begin
  for v_agent_id in
    select state.agent_id from public.agent_wake_state as state join public.agents as agent on agent.id = state.agent_id
     where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id
       and state.consecutive_failures >= (p_instance.settings ->> 'max_consecutive_failures')::integer
       and (state.stalled_at is null
            or exists (select from public.agent_inbox_items as item
                       where item.agent_id = state.agent_id and item.status = 'pending' and item.attempt_count < item.max_attempts))
     order by state.agent_id limit 100 for update of state skip locked
  loop
    v_count := v_count + public.mark_agent_stalled(v_agent_id);
  end loop;
  return v_count;
end
$$;
comment on function public.settle_stalled_agents(public.dispatcher_instances) is 'Sets the pending items of stalled agents aside and notifies once per stall.';

create or replace function public.fill_waitlist(p_instance public.dispatcher_instances) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_agent record;
  v_gates record;
  v_ready uuid[] := '{}';
  v_oldest timestamptz[] := '{}';
  v_skipped jsonb := '[]';
begin
  for v_agent in
    select agent.id, agent.slug, oldest.created_at from public.agents as agent
     cross join lateral (select due.created_at from public.agent_inbox_due as due
                          where due.agent_id = agent.id and due.tenant_id = agent.tenant_id order by due.created_at limit 1) as oldest
     where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id
       and not exists (select from public.agent_wake_state as state where state.agent_id = agent.id and state.waitlisted_at is not null)
       and not exists (select from public.agent_wakes as wake where wake.agent_id = agent.id and wake.state in ('starting', 'running'))
     order by oldest.created_at
  loop
    begin
      select * into v_gates from public.wake_gates(v_agent.id, p_instance.settings);
      if cardinality(v_gates.blocked) = 0 then
        v_ready := v_ready || v_agent.id;
        v_oldest := v_oldest || v_agent.created_at;
      else
        v_skipped := v_skipped || jsonb_build_object('granted', false, 'agent_id', v_agent.id, 'agent_slug', v_agent.slug,
          'skip_reason', v_gates.blocked[1], 'retry_in', extract(epoch from v_gates.retry_at - now()), 'failures', v_gates.failures);
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
comment on function public.fill_waitlist(public.dispatcher_instances) is
  'Puts every agent of the gateway that has work and open gates on the waitlist, oldest item first; answers the refused ones with their reason.';

create or replace function public.sweep_inbox(p_instance_id uuid, p_claim_limit integer, p_request uuid) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '3s'
as $$
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
            select id from public.agent_wakes where gateway_id = v_instance.gateway_id and ended_at < now() - interval '30 days' order by ended_at limit 200);
          get diagnostics v_count = row_count;
      end case;
      if v_phase not in ('skipped', 'claims') then
        v_answer := v_answer || jsonb_build_object(v_phase, v_count);
      end if;
    exception when query_canceled or deadlock_detected or serialization_failure then
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
comment on function public.sweep_inbox(uuid, integer, uuid) is
  'One sweep of the instance''s gateway, phase by phase, each isolated: expire stale, bury spent, stop chains, settle stalled, fill the waitlist, claim up to p_claim_limit wakes, prune. One bounded call whatever the backlog.';

-- ---------------------------------------------------------------------------------------------------------------
-- Operator
-- ---------------------------------------------------------------------------------------------------------------

create or replace function public.gateway_settings(p_gateway_id uuid) returns jsonb
language sql stable set search_path = ''
as $$
  select settings from public.dispatcher_instances as instance where gateway_id = p_gateway_id
   order by (state = 'running' and not public.is_instance_silent(instance)) desc, last_heartbeat_at desc limit 1
$$;
comment on function public.gateway_settings(uuid) is 'The settings of the gateway''s most recent daemon; NULL when none ever ran.';

create or replace function public.request_wake(p_tenant_id uuid, p_gateway text, p_agent text, p_dry_run boolean, p_settings jsonb) returns jsonb
language plpgsql volatile set search_path = ''
as $$
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
                            'daemons', (select count(*) from public.dispatcher_instances as instance where gateway_id = v_gateway_id and state = 'running'
                                          and not public.is_instance_silent(instance)), 'now', clock_timestamp());
end
$$;
comment on function public.request_wake(uuid, text, text, boolean, jsonb) is
  'Asks for one wake through the gates: puts the agent on the waitlist and hints its daemon, or names the gates that refuse (all of them when p_dry_run).';

create or replace function public.requeue_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_item_ids uuid[]) returns jsonb
language plpgsql volatile set search_path = ''
as $$
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
       and case when p_item_ids is null
                then (item.status = 'failed' and item.context ->> 'last_failure_reason' = 'agent_stalled')
                  or (p_agent is not null and item.status = 'dead_letter' and item.context ->> 'last_failure_reason' like 'wake chain limit%')
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
  update public.agent_wake_state as state set consecutive_failures = 0, stalled_at = null, chain_notified_at = null, updated_at = now()
    from public.agents as agent join public.gateways as gateway on gateway.id = agent.gateway_id
   where agent.id = state.agent_id and agent.tenant_id = p_tenant_id and (gateway.slug = p_gateway or gateway.id::text = p_gateway)
     and (agent.id = any (v_agents) or agent.slug = p_agent or agent.id::text = p_agent);
  return jsonb_build_object('requeued', coalesce(cardinality(v_ids), 0), 'item_ids', coalesce(to_jsonb(v_ids), '[]'));
end
$$;
comment on function public.requeue_inbox_items(uuid, text, text, uuid[]) is
  'Brings items back to pending and clears their agents'' stall: the given failed or dead_letter ids, or all that a stall set aside, of one agent also what a chain limit did. Spent attempts start anew.';

create or replace function public.expire_inbox_items(p_tenant_id uuid, p_gateway text, p_item_ids uuid[], p_reason text) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_ids uuid[];
begin
  with expired as (
    update public.agent_inbox_items as item
       set status = 'failed', attempt_count = greatest(item.attempt_count, item.max_attempts), failed_at = now(), leased_until = null, updated_at = now(),
           context = public.merge_inbox_context(item.context, jsonb_build_object('last_failure_reason', coalesce(p_reason, 'expired by the operator')))
      from public.agents as agent join public.gateways as gateway on gateway.id = agent.gateway_id
     where item.id = any (p_item_ids) and agent.id = item.agent_id and item.tenant_id = p_tenant_id
       and (gateway.slug = p_gateway or gateway.id::text = p_gateway) and item.status in ('pending', 'failed')
    returning item.id)
  select array_agg(id) into v_ids from expired;
  return jsonb_build_object('expired', coalesce(cardinality(v_ids), 0), 'item_ids', coalesce(to_jsonb(v_ids), '[]'));
end
$$;
comment on function public.expire_inbox_items(uuid, text, uuid[], text) is 'Ends open items by the operator''s hand: failed, attempts at the ceiling, reason recorded.';

create or replace function public.list_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_status text, p_limit integer) returns jsonb
language plpgsql stable set search_path = ''
as $$
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
comment on function public.list_inbox_items(uuid, text, text, text, integer) is 'The newest items of a gateway''s agents, or of one of them, for an operator.';

create or replace function public.dispatcher_status(p_tenant_id uuid, p_gateway text, p_settings jsonb) returns jsonb
language plpgsql stable set search_path = ''
as $$
declare
  v_gateway record;
  v_settings jsonb;
  v_is_full boolean;
begin
  select id, slug into v_gateway from public.gateways where tenant_id = p_tenant_id and (slug = p_gateway or id::text = p_gateway);
  if v_gateway is null then
    return jsonb_build_object('code', 'unknown_gateway', 'known',
      coalesce((select jsonb_agg(slug order by slug) from public.gateways where tenant_id = p_tenant_id), '[]'));
  end if;
  v_settings := coalesce(public.gateway_settings(v_gateway.id), p_settings);
  v_is_full := (select count(*) from public.agent_wakes where gateway_id = v_gateway.id and state in ('starting', 'running'))
               >= (v_settings ->> 'max_concurrent_wakes')::integer;
  return jsonb_build_object(
    'code', 'ok', 'gateway', v_gateway.slug, 'now', now(),
    -- Of one that has gone the last word is no news: how it did then would read as how it does now.
    'instances', (select coalesce(jsonb_agg(jsonb_build_object('id', id, 'state', seen.state,
                    'hostname', hostname, 'pid', pid, 'version', version, 'started_at', started_at, 'last_heartbeat_at', last_heartbeat_at,
                    'last_sweep_at', last_sweep_at, 'last_sweep', last_sweep, 'realtime', case when seen.state = 'running' then realtime else '{}' end,
                    'health', case when seen.state = 'running' then health else '{}' end) order by started_at desc), '[]')
                    from public.dispatcher_instances as instance
                    cross join lateral (select case when instance.state = 'running' and public.is_instance_silent(instance) then 'silent' else instance.state end) as seen (state)
                   where gateway_id = v_gateway.id and (instance.state = 'running' or last_heartbeat_at > now() - interval '1 hour')),
    'wakes', (select coalesce(jsonb_agg(jsonb_build_object('wake_id', wake.id, 'agent', agent.slug, 'state', wake.state, 'path', wake.path, 'pid', wake.pid,
                    'claimed_at', wake.claimed_at, 'seconds', round(extract(epoch from now() - wake.claimed_at))) order by wake.claimed_at), '[]')
                from public.agent_wakes as wake join public.agents as agent on agent.id = wake.agent_id
               where wake.gateway_id = v_gateway.id and wake.state in ('starting', 'running')),
    'waitlist', (select coalesce(jsonb_agg(jsonb_build_object('agent', agent.slug, 'since', state.waitlisted_at) order by state.waitlisted_at, state.waiting_since), '[]')
                   from public.agent_wake_state as state join public.agents as agent on agent.id = state.agent_id
                  where agent.gateway_id = v_gateway.id and state.waitlisted_at is not null),
    'backlog', public.gateway_backlog(v_gateway.id),
    'agents', (select coalesce(jsonb_agg(jsonb_build_object('agent', agent.slug, 'status', agent.status, 'items', work.items,
                    'blocked', to_jsonb(gates.blocked || case when v_is_full and cardinality(gates.blocked) = 0 then array['concurrency_limit'] else '{}' end),
                    'retry_in', round(extract(epoch from gates.retry_at - now())),
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
comment on function public.dispatcher_status(uuid, text, jsonb) is
  'What an operator sees of one gateway: instances, live wakes, waitlist, backlog by age, and for each agent every gate that keeps it asleep.';

notify pgrst, 'reload schema';
