-- Claims: one wake for one agent, granted under the lock of its gateway. While that row is locked nothing waits: what
-- belongs to one agent is taken when it is free, else the agent is `busy` and everybody else goes on.
begin;
set local lock_timeout = '3s';

select dispatcher.ensure_type('claimant',
    'instance_id uuid, tenant_id uuid, gateway_id uuid, settings public.dispatcher_settings');
comment on type dispatcher.claimant is 'The daemon that claims, with its settings.';

create or replace function dispatcher.running_instance(p_instance_id uuid) returns public.dispatcher_instances
language plpgsql stable set search_path = ''
as $$
declare
  v_instance public.dispatcher_instances;
begin
  select * into v_instance from public.dispatcher_instances where id = p_instance_id;
  if v_instance.id is null then
    raise exception 'no dispatcher instance %', p_instance_id using errcode = 'OD001',
        hint = 'Register the instance again.';
  end if;
  return v_instance;
end
$$;
comment on function dispatcher.running_instance(uuid) is
  'The row of an instance; raises OD001 when it is not registered.';

create or replace function dispatcher.lock_gateway(p_instance_id uuid) returns dispatcher.claimant
language plpgsql volatile set search_path = '' set plan_cache_mode = force_generic_plan
as $$
declare
  v_found record;
begin
  for v_try in 1 .. 2 loop
    -- The rows that a wake refers to are held along with it: the check of a foreign key then waits for nobody.
    select instance.id, instance.tenant_id, instance.gateway_id, settings into v_found
      from public.dispatcher_instances as instance
      join public.dispatcher_settings as settings on settings.instance_id = instance.id
      join public.dispatcher_gateways as lock on lock.gateway_id = instance.gateway_id
      join public.gateways as gateway on gateway.id = instance.gateway_id
      join public.tenants as tenant on tenant.id = instance.tenant_id
     where instance.id = p_instance_id
       for update of lock skip locked for key share of instance, gateway, tenant skip locked;
    if v_found.id is not null then
      return row(v_found.id, v_found.tenant_id, v_found.gateway_id, v_found.settings)::dispatcher.claimant;
    end if;
    exit when v_try = 2;
    perform dispatcher.wait_for_gateway(p_instance_id);
  end loop;
  perform dispatcher.running_instance(p_instance_id);
  raise exception 'the gateway of dispatcher instance % is gone', p_instance_id using errcode = 'OD001',
      hint = 'Register the instance again.';
end
$$;
comment on function dispatcher.lock_gateway(uuid) is
  'Locks the gateway of an instance, which makes its cap exact, and answers who claims with which settings. The only '
  'wait of a claim: see wait_for_gateway. Raises OD001 for an unknown instance.';

create or replace function dispatcher.wait_for_gateway(p_instance_id uuid) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_ends_at constant timestamptz := clock_timestamp() + interval '1 second';
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
begin
  loop
    begin
      -- lock_timeout bounds one wait, and each row may cost two: short ones keep the sum near its bound.
      perform set_config('lock_timeout', '100ms', true);
      perform from public.dispatcher_gateways as lock, public.dispatcher_instances as instance,
          public.gateways as gateway, public.tenants as tenant
        where lock.gateway_id = v_instance.gateway_id and instance.id = p_instance_id
          and gateway.id = v_instance.gateway_id and tenant.id = v_instance.tenant_id
          for update of lock for key share of instance, gateway, tenant;
      return;
    exception when lock_not_available then
      exit when clock_timestamp() >= v_ends_at;
    end;
  end loop;
  raise exception '%', coalesce(
    (select string_agg(held.value ->> 'text', '; ')
       from jsonb_array_elements(dispatcher.held_tables()
                                 || dispatcher.held_rows(v_instance.tenant_id, v_instance.gateway_id)) as held),
    'the rows of the gateway are asked for by too many at once') using errcode = '55P03';
end
$$;
comment on function dispatcher.wait_for_gateway(uuid) is
  'Waits for the rows that lock_gateway needs, a second for all of them together; then raises 55P03 with the rows that '
  'are held and who holds them.';

create or replace function dispatcher.lock_wake_state(p_agent_id uuid, p_tenant_id uuid) returns public.agent_wake_state
language plpgsql volatile set search_path = '' set plan_cache_mode = force_generic_plan
as $$
declare
  v_state public.agent_wake_state;
begin
  select * into v_state from public.agent_wake_state where agent_id = p_agent_id for update skip locked;
  if v_state.agent_id is null and p_agent_id is not null
     and not exists (select from public.agent_wake_state where agent_id = p_agent_id) then
    insert into public.agent_wake_state (agent_id, tenant_id) values (p_agent_id, p_tenant_id)
        on conflict do nothing returning * into v_state;
  end if;
  return v_state;
end
$$;
comment on function dispatcher.lock_wake_state(uuid, uuid) is
  'What the gates remember of an agent, locked, made where there is none; all NULL when somebody else holds it. Never '
  'waits.';

create or replace function dispatcher.lock_agent(
  p_claimant dispatcher.claimant, p_agent_id uuid, out slug text, out state public.agent_wake_state, out verdict text
)
language plpgsql volatile set search_path = '' set plan_cache_mode = force_generic_plan
as $$
declare
  v_found record;
begin
  select agent.slug, memory into v_found
    from public.agents as agent join public.agent_wake_state as memory on memory.agent_id = agent.id
   where agent.id = p_agent_id and agent.gateway_id = p_claimant.gateway_id and agent.tenant_id = p_claimant.tenant_id
     for key share of agent skip locked for update of memory skip locked;
  if v_found.slug is not null then
    slug := v_found.slug;
    state := v_found.memory;
    verdict := 'ok';
    return;
  end if;
  select agent.slug into slug from dispatcher.agents as agent
   where agent.id = p_agent_id and agent.gateway_id = p_claimant.gateway_id and agent.tenant_id = p_claimant.tenant_id;
  verdict := case when slug is null then 'not_local' else 'busy' end;
  if slug is not null and not exists (select from public.agent_wake_state where agent_id = p_agent_id) then
    -- Its first claim: the row the gates remember it by is made, unless the agent itself is held.
    perform from dispatcher.agents where id = p_agent_id for key share skip locked;
    if found then
      state := dispatcher.lock_wake_state(p_agent_id, p_claimant.tenant_id);
      verdict := case when state.agent_id is null then 'busy' else 'ok' end;
    end if;
  end if;
end
$$;
comment on function dispatcher.lock_agent(dispatcher.claimant, uuid) is
  'Holds an agent of the claimant''s gateway against its end, and what the gates remember of it: verdict ok, busy '
  '(somebody holds one of the rows) or not_local. Never waits.';

create or replace function dispatcher.wake_blockers(p_item_id uuid) returns jsonb
language plpgsql stable set search_path = ''
as $$
begin
  return (
    select jsonb_agg(blocker.title order by blocker.created_at, blocker.title)
      from (select left(target.title, 500) as title, relation.created_at
              from dispatcher.agent_inbox_items as item
              join public.task_relations as relation on relation.source_task_id = item.task_id
                  and relation.tenant_id = item.tenant_id and relation.relation_type = 'blocked_by'
              join public.tasks as target on target.id = relation.target_task_id and target.tenant_id = item.tenant_id
             where item.id = p_item_id and item.event_type = 'task_assignment'
               and target.status not in ('done', 'cancelled') and target.archived_at is null
             order by relation.created_at limit 100) as blocker);
end
$$;
comment on function dispatcher.wake_blockers(uuid) is
  'Titles of the unresolved tasks, at most 100, that block the task of a task_assignment item; NULL when there are '
  'none.';

create or replace function dispatcher.bounded_value(p_value jsonb) returns jsonb
language sql immutable parallel safe set search_path = ''
as $$
  select case jsonb_typeof(p_value) when 'string' then to_jsonb(left(p_value #>> '{}', 10000))
              when 'object' then '{}' when 'array' then '[]' else p_value end
$$;
comment on function dispatcher.bounded_value(jsonb) is
  'A single value that somebody wrote into a row, as it is handed on: a text of at most 10,000 characters; what is no '
  'single value is empty.';

create or replace function dispatcher.wake_grant(p_wake public.agent_wakes) returns jsonb
language plpgsql stable set search_path = '' set plan_cache_mode = force_generic_plan
as $$
declare
  v_grant jsonb;
  v_blockers jsonb;
begin
  select jsonb_build_object(
           'granted', true, 'wake_id', p_wake.id, 'claim_token', p_wake.claim_token, 'agent_id', agent.id,
               'agent_slug', agent.slug,
           'workspace_slug', (select workspace.slug from public.workspace where workspace.tenant_id = agent.tenant_id
               limit 1),
           'path', p_wake.path, 'item_ids', to_jsonb(p_wake.item_ids), 'chain_depth', p_wake.chain_depth,
           'event_type', item.event_type, 'summary', left(item.summary, 2000), 'item_created_at',
               case when item.created_at between '1970-01-01Z' and now() + interval '1 day' then item.created_at end,
           'model_override', dispatcher.bounded_value(item.context -> 'model_override'),
           'thinking_override', dispatcher.bounded_value(item.context -> 'thinking_override'),
           'blockers', '[]'::jsonb, 'blockers_error', null)
    into v_grant
    from public.agents as agent
    left join public.agent_inbox_items as item
      on item.id = p_wake.item_ids[1] and item.agent_id = agent.id and item.tenant_id = agent.tenant_id
   where agent.id = p_wake.agent_id and agent.tenant_id = p_wake.tenant_id;
  if v_grant ->> 'event_type' = 'task_assignment' then
    begin
      v_blockers := dispatcher.wake_blockers(p_wake.item_ids[1]);
      v_grant := v_grant || jsonb_build_object('blockers', coalesce(v_blockers, '[]'));
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      v_grant := v_grant || jsonb_build_object('blockers_error', sqlerrm);
    end;
  end if;
  return v_grant;
end
$$;
comment on function dispatcher.wake_grant(public.agent_wakes) is
  'Everything a spawn needs, as the answer to a granted claim.';

create or replace function dispatcher.refusal(p_agent_id uuid, p_agent_slug text, p_reason text,
    p_retry_in double precision, p_failures integer default null)
returns jsonb
language sql immutable set search_path = ''
as $$
  select jsonb_build_object('granted', false, 'agent_id', p_agent_id, 'agent_slug', p_agent_slug, 'skip_reason',
      p_reason,
                            'retry_in', p_retry_in, 'failures', p_failures)
$$;
comment on function dispatcher.refusal(uuid, text, text, double precision, integer) is
  'The answer to a refused claim: {granted: false, agent_id, agent_slug, skip_reason, retry_in (s), failures}.';

create or replace function dispatcher.busy_agent(p_agent_id uuid) returns jsonb
language sql stable set search_path = ''
as $$ select dispatcher.refusal(p_agent_id, (select agent.slug from dispatcher.agents as agent
    where agent.id = p_agent_id), 'busy', 1) $$;
comment on function dispatcher.busy_agent(uuid) is 'The refusal of an agent of which another session holds a row.';

create or replace function dispatcher.join_waitlist(p_agent_id uuid, p_path text, p_since timestamptz,
    p_oldest timestamptz) returns void
language sql volatile set search_path = ''
as $$
  update public.agent_wake_state
     set waitlist_path = coalesce(waitlist_path, p_path), waitlisted_at = coalesce(waitlisted_at, p_since),
         waiting_since = coalesce(waiting_since, p_oldest), updated_at = now()
   where agent_id = p_agent_id
$$;
comment on function dispatcher.join_waitlist(uuid, text, timestamptz, timestamptz) is
  'Puts an agent on the waitlist, or leaves it in its place there. The caller holds its wake state.';

create or replace function dispatcher.leave_waitlist(p_agent_id uuid) returns void
language sql volatile set search_path = ''
as $$
  update public.agent_wake_state set waitlisted_at = null, waitlist_path = null, waiting_since = null
   where agent_id = p_agent_id and waitlisted_at is not null
$$;
comment on function dispatcher.leave_waitlist(uuid) is
  'Takes an agent off the waitlist. The caller holds its wake state.';

create or replace function dispatcher.items_of_claim(p_facts dispatcher.gate_facts) returns uuid[]
language plpgsql immutable set search_path = ''
as $$
declare
  v_items uuid[] := p_facts.hinted_item_ids;
  v_head uuid;
begin
  foreach v_head in array p_facts.due_item_ids loop
    if v_head <> all (v_items) then
      v_items := v_items || v_head;
    end if;
  end loop;
  return v_items;
end
$$;
comment on function dispatcher.items_of_claim(dispatcher.gate_facts) is
  'The items a wake is for: those that hints named, else the oldest; then the ones the agent will lease first.';

create or replace function dispatcher.write_wake(
  p_claimant dispatcher.claimant, p_facts dispatcher.gate_facts, p_path text, p_request uuid
) returns public.agent_wakes
language plpgsql volatile set search_path = '' set plan_cache_mode = force_generic_plan
as $$
declare
  v_items constant uuid[] := dispatcher.items_of_claim(p_facts);
  v_wake public.agent_wakes;
  v_states integer;
begin
  insert into public.agent_wakes (tenant_id, agent_id, gateway_id, instance_id, claim_request, path, item_ids,
      chain_depth, model_override,
                                  thinking_override, deadline_at)
  select p_facts.tenant_id, p_facts.agent_id, p_claimant.gateway_id, p_claimant.instance_id, p_request, p_path,
      v_items, p_facts.chain_depth,
         case when jsonb_typeof(item.context -> 'model_override') = 'string'
             then nullif(left(item.context ->> 'model_override', 500), '') end,
         case when jsonb_typeof(item.context -> 'thinking_override') = 'string'
             then nullif(left(item.context ->> 'thinking_override', 500), '') end,
         now() + make_interval(secs => (p_claimant.settings).agent_process_timeout + 15)
    from public.agent_inbox_items as item
   where item.id = v_items[1] and item.agent_id = p_facts.agent_id and item.tenant_id = p_facts.tenant_id
  returning * into v_wake;
  update public.agent_wake_state
     set last_wake_id = v_wake.id, last_claimed_at = v_wake.claimed_at, waitlisted_at = null, waitlist_path = null,
         waiting_since = null,
         consecutive_failures = p_facts.failures, updated_at = now(),
         stalled_at = case when p_facts.failures = 0 then null else stalled_at end
   where agent_id = p_facts.agent_id and v_wake.id is not null;
  get diagnostics v_states = row_count;
  if v_states = 0 and (v_wake.id is not null or exists (
      select from dispatcher.agent_inbox_items as item
       where item.id = v_items[1] and item.agent_id = p_facts.agent_id and item.tenant_id = p_facts.tenant_id)) then
    raise exception 'a trigger keeps the wake from being written';
  end if;
  return v_wake;
end
$$;
comment on function dispatcher.write_wake(dispatcher.claimant, dispatcher.gate_facts, text, uuid) is
  'Writes the wake of a granted claim (state starting) and what the gates remember: failures that new context has '
  'ended are forgotten here. All NULL, and nothing written, when the item it was for is gone by now; raises when a '
  'trigger drops one of the rows.';

create or replace function dispatcher.claim_one_wake(
  p_claimant dispatcher.claimant, p_agent_id uuid, p_path text, p_item_ids uuid[], p_request uuid
) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_agent record;
  v_state public.agent_wake_state;
  v_facts dispatcher.gate_facts;
  v_gates record;
  v_wake public.agent_wakes;
begin
  v_agent := dispatcher.lock_agent(p_claimant, p_agent_id);
  if v_agent.verdict <> 'ok' then
    return dispatcher.refusal(p_agent_id, v_agent.slug, v_agent.verdict, case v_agent.verdict when 'busy' then 1 end);
  end if;
  v_state := v_agent.state;
  v_facts := dispatcher.read_gate_facts(p_agent_id, p_claimant.settings, coalesce(p_item_ids, '{}'), p_request);
  if v_facts.granted_wake_id is not null then  -- asked before under the same request: the same grant
    select * into v_wake from public.agent_wakes where id = v_facts.granted_wake_id;
    return dispatcher.wake_grant(v_wake);
  end if;
  v_gates := dispatcher.wake_gates(v_facts, p_claimant.settings);
  if cardinality(v_gates.blocked) > 0 then
    if v_state.waitlisted_at is not null then
      perform dispatcher.leave_waitlist(p_agent_id);
    end if;
    return dispatcher.refusal(p_agent_id, v_agent.slug, v_gates.blocked[1], dispatcher.seconds_until(v_gates.retry_at),
        v_facts.failures);
  end if;
  if v_facts.live_on_gateway >= (p_claimant.settings).max_concurrent_wakes then
    perform dispatcher.join_waitlist(p_agent_id, 'waitlist', now(), v_facts.oldest_due);
    return dispatcher.refusal(p_agent_id, v_agent.slug, 'concurrency_limit', null, v_facts.failures);
  end if;
  v_wake := dispatcher.write_wake(
    p_claimant, v_facts, case when v_state.waitlist_path = 'command' then 'command' else p_path end, p_request);
  if v_wake.id is null then  -- somebody deletes its items at this moment: what is left shows at the next look
    return dispatcher.refusal(p_agent_id, v_agent.slug, 'busy', 1);
  end if;
  return dispatcher.wake_grant(v_wake);
end
$$;
comment on function dispatcher.claim_one_wake(dispatcher.claimant, uuid, text, uuid[], uuid) is
  'Evaluates every gate of one agent, under the gateway''s lock that the caller holds, and writes the wake when all '
  'are open. Answers {granted, …}; busy where another session holds a row of the agent. Never waits.';

create or replace function dispatcher.contained_claim(p_claimant dispatcher.claimant, p_claim jsonb, p_request uuid)
    returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_answer jsonb;
  v_error text;
begin
  -- What a trigger puts off until the commit would take the claims of all with it: it speaks here, for this agent.
  set constraints all deferred;
  v_answer := dispatcher.claim_one_wake(p_claimant, (p_claim ->> 'agent_id')::uuid,
      coalesce(p_claim ->> 'path', 'event'), dispatcher.hinted_ids(p_claim), p_request);
  set constraints all immediate;
  return v_answer;
exception when lock_not_available then
  return dispatcher.busy_agent((p_claim ->> 'agent_id')::uuid);
when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  v_error := sqlerrm;
  perform dispatcher.note_fault(p_claimant.tenant_id, p_claimant.gateway_id, 'claim',
      format('agent %s: %s (%s)', p_claim ->> 'agent_id', v_error, sqlstate));
  return jsonb_build_object('granted', false, 'agent_id', p_claim -> 'agent_id', 'skip_reason', 'error', 'retry_in',
      null, 'failures', null,
                            'error', left(v_error, 500), 'error_code', sqlstate, 'agent_slug',
                            (select agent.slug from dispatcher.agents as agent
                                where agent.id::text = p_claim ->> 'agent_id'));
end
$$;
comment on function dispatcher.contained_claim(dispatcher.claimant, jsonb, uuid) is
  'claim_one_wake for a claim {agent_id, path, item_ids}, but what raises for one agent is that agent''s answer: '
  'skip_reason error, with error and error_code.';

create or replace function dispatcher.hinted_ids(p_claim jsonb) returns uuid[]
language plpgsql immutable set search_path = ''
as $$
begin
  if jsonb_typeof(p_claim -> 'item_ids') is distinct from 'array' or p_claim -> 'item_ids' = '[]' then
    return '{}';
  end if;
  return array(select item.value::uuid from jsonb_array_elements_text(p_claim -> 'item_ids') as item
      where item.value is not null limit 1000);
end
$$;
comment on function dispatcher.hinted_ids(jsonb) is 'The items that a claim {agent_id, path, item_ids} names.';

create or replace function dispatcher.warm_insert() returns void
language plpgsql volatile set search_path = ''
as $$
begin
  -- The checks of a wake's foreign keys are planned at the first insert. This one is undone at once.
  insert into public.agent_wakes (tenant_id, agent_id, gateway_id, instance_id, path, state, ended_at, deadline_at)
  select agent.tenant_id, agent.id, agent.gateway_id, instance.id, 'event', 'spawn_failed', now(), now()
    from public.dispatcher_instances as instance
    join dispatcher.agents as agent on agent.gateway_id = instance.gateway_id and agent.tenant_id = instance.tenant_id
    join public.gateways as gateway on gateway.id = instance.gateway_id
    join public.tenants as tenant on tenant.id = instance.tenant_id
   limit 1 for key share of agent, instance, gateway, tenant skip locked;
  raise exception 'undone' using errcode = 'OD003';
exception when sqlstate 'OD003' then
  null;
end
$$;
comment on function dispatcher.warm_insert() is 'Has the foreign keys of agent_wakes checked once, and undoes it.';

create or replace function dispatcher.warm_backend() returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_nobody dispatcher.claimant;
  v_facts dispatcher.gate_facts;
begin
  if current_setting('dispatcher.is_warm', true) = 'on' then
    return;
  end if;
  -- A pool's connection that never claimed pays for it at its first claim: every table looked up, every statement
  -- planned.
  -- So whoever is in no hurry makes one here, for nobody: no row is found, locked or written.
  v_nobody.settings := dispatcher.typed_settings('{}');
  perform dispatcher.contained_claim(v_nobody, '{"agent_id": "00000000-0000-0000-0000-000000000000"}', null);
  perform dispatcher.lock_wake_state(null, null);
  v_facts := dispatcher.read_gate_facts(null, v_nobody.settings, array['00000000-0000-0000-0000-000000000000'::uuid],
                                        '00000000-0000-0000-0000-000000000000');
  v_facts.due_item_ids := '{}';
  v_facts.hinted_item_ids := '{}';
  perform dispatcher.wake_gates(v_facts, v_nobody.settings, true);
  perform dispatcher.wake_grant(dispatcher.write_wake(v_nobody, v_facts, 'event', null));
  begin
    perform public.claim_wakes('00000000-0000-0000-0000-000000000000', '[]', null);
  exception when sqlstate 'OD001' then
    null;
  end;
  perform dispatcher.warm_insert();
  perform set_config('dispatcher.is_warm', 'on', false);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform set_config('dispatcher.is_warm', 'on', false);
  raise warning 'a backend could not be warmed: % (%)', sqlerrm, sqlstate;
end
$$;
comment on function dispatcher.warm_backend() is
  'Walks the way of a claim once per connection, for nobody, so that the first real claim on it is as quick as later '
  'ones. Called by the functions nobody waits for; changes nothing.';

create or replace function dispatcher.held_claims(p_claims jsonb, p_held text) returns jsonb
language sql volatile set search_path = ''
as $$
  select coalesce(jsonb_agg(dispatcher.refusal((claim.value ->> 'agent_id')::uuid, null, 'busy', 1)
                            || jsonb_build_object('held', left(p_held, 1000)) order by claim.ordinality), '[]')
    from jsonb_array_elements(p_claims) with ordinality as claim
$$;
comment on function dispatcher.held_claims(jsonb, text) is
  'The answers to claims while a row that all of the gateway need is held: busy, with what is held and by whom.';

create or replace function public.claim_wakes(p_instance_id uuid, p_claims jsonb, p_request uuid) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_claimant dispatcher.claimant;
  v_answers jsonb := '[]';
  v_ends_at constant timestamptz := clock_timestamp() + interval '2 seconds';
begin
  if jsonb_typeof(p_claims) is distinct from 'array' then
    raise exception 'p_claims must be an array of {agent_id, path, item_ids}' using errcode = 'OD002';
  end if;
  begin
    v_claimant := dispatcher.lock_gateway(p_instance_id);
  exception when lock_not_available then
    return dispatcher.held_claims(p_claims, sqlerrm);
  end;
  -- From here on nothing should wait; what could (a whole table, say) is cut short, and not once for each claim.
  perform set_config('lock_timeout', '100ms', true);
  for v_number in 0 .. jsonb_array_length(p_claims) - 1 loop
    if clock_timestamp() > v_ends_at then
      return v_answers || dispatcher.held_claims((select jsonb_agg(claim.value order by claim.ordinality)
          from jsonb_array_elements(p_claims) with ordinality as claim where claim.ordinality > v_number),
          'a table that claims need: they waited for two seconds');
    end if;
    v_answers := v_answers || dispatcher.contained_claim(v_claimant, p_claims -> v_number, p_request);
  end loop;
  return v_answers;
end
$$;
comment on function public.claim_wakes(uuid, jsonb, uuid) is
  'Claims wakes for p_claims = [{agent_id, path, item_ids}]; answers one verdict per claim, in order. p_request makes '
  'a repeated call hand back the same grants. An agent whose rows another session holds is busy (held: what all need '
  'is, and who holds it); one whose data raises is an error of its own; neither stops the others.';

create or replace function dispatcher.claim_waiting_wakes(p_instance_id uuid, p_limit integer, p_request uuid)
    returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_claimant dispatcher.claimant;
  v_waiting record;
  v_last record;
  v_answer jsonb;
  v_answers jsonb := '[]';
  v_granted integer := 0;
  v_page constant integer := 100;
  v_ends_at constant timestamptz := clock_timestamp() + interval '2 seconds';
  v_looked integer := 0;
  v_seen integer;
begin
  if coalesce(p_limit, 0) <= 0 then
    return v_answers;
  end if;
  v_claimant := dispatcher.lock_gateway(p_instance_id);
  perform set_config('lock_timeout', '100ms', true);
  select jsonb_agg(dispatcher.wake_grant(wake)) into v_answer from public.agent_wakes as wake
   where wake.claim_request = p_request and wake.state in ('starting', 'running');
  if v_answer is not null then
    return v_answer;
  end if;
  select '-infinity'::timestamptz as waitlisted_at, '-infinity'::timestamptz as waiting_since,
      '00000000-0000-0000-0000-000000000000'::uuid as agent_id
    into v_last;
  -- In pages: the plan then walks the index of the waitlist instead of sorting all of it for one free slot.
  loop
    v_seen := 0;
    for v_waiting in
      select state.agent_id, state.waitlist_path, state.waitlisted_at,
          coalesce(state.waiting_since, 'infinity') as waiting_since
        from public.agent_wake_state as state
        join dispatcher.agents as agent on agent.id = state.agent_id
       where state.waitlisted_at is not null and agent.gateway_id = v_claimant.gateway_id
         and agent.tenant_id = v_claimant.tenant_id
         and (state.waitlisted_at, coalesce(state.waiting_since, 'infinity'), state.agent_id) > (v_last.waitlisted_at,
             v_last.waiting_since, v_last.agent_id)
       order by state.waitlisted_at, coalesce(state.waiting_since, 'infinity'), state.agent_id limit v_page
    loop
      v_seen := v_seen + 1;
      v_answer := dispatcher.contained_claim(
        v_claimant, jsonb_build_object('agent_id', v_waiting.agent_id, 'path', v_waiting.waitlist_path), p_request);
      if v_answer ->> 'skip_reason' = 'concurrency_limit' then
        return v_answers;
      end if;
      if v_answer ->> 'skip_reason' = 'error' then
        perform dispatcher.set_off_waitlist(v_waiting.agent_id);
      end if;
      v_answers := v_answers || v_answer;
      v_granted := v_granted + (v_answer ->> 'granted')::boolean::integer;
      if v_granted >= p_limit or clock_timestamp() > v_ends_at then
        return v_answers;
      end if;
      select v_waiting.waitlisted_at, v_waiting.waiting_since, v_waiting.agent_id into v_last;
    end loop;
    v_looked := v_looked + v_seen;
    exit when v_seen < v_page or v_looked >= 500;
  end loop;
  return v_answers;
end
$$;
comment on function dispatcher.claim_waiting_wakes(uuid, integer, uuid) is
  'Claims up to p_limit wakes from the waitlist of the instance''s gateway, longest waiting first, at most 500 looked '
  'at. One that may no longer be woken leaves the list, one that is busy keeps its place; neither hides anybody.';

create or replace function dispatcher.set_off_waitlist(p_agent_id uuid) returns void
language plpgsql volatile set search_path = ''
as $$
begin
  -- An agent whose data raises would stand at the head of the list forever; the sweep lists it again.
  perform from public.agent_wake_state where agent_id = p_agent_id for update skip locked;
  if found then
    perform dispatcher.leave_waitlist(p_agent_id);
    perform dispatcher.settle_constraints('public.agent_wake_state');
  end if;
exception when others then
  -- What its row raises concerns it alone: the claims of the others, and what was reported with them, stand.
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(agent.tenant_id, agent.gateway_id, 'waitlist', format('%s (%s)', sqlerrm, sqlstate))
     from dispatcher.agents as agent where agent.id = p_agent_id;
end
$$;
comment on function dispatcher.set_off_waitlist(uuid) is
  'Takes an agent off the waitlist unless somebody holds its row, or it raises, which is noted.';

create index if not exists agent_wake_state_waitlist_order
  on public.agent_wake_state (waitlisted_at, (coalesce(waiting_since, 'infinity'::timestamptz)), agent_id)
      where waitlisted_at is not null;

select dispatcher.restrict_functions(array[
  'claim_wakes'
]);

notify pgrst, 'reload schema';
commit;
