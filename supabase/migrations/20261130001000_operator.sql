-- What an operator asks and does, through the command line and /metrics. Locks are taken in the order of the daemon's
-- functions (what the gates remember of the agent, the item, its lease, its mark); a row that somebody holds is left
-- alone and counted as busy.
begin;
set local lock_timeout = '3s';

create or replace function public.request_wake(p_tenant_id uuid, p_gateway text, p_agent text, p_dry_run boolean,
    p_settings jsonb) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_gateway_id uuid;
  v_agent record;
  v_gates record;
  v_settings public.dispatcher_settings;
  v_dry_run constant boolean := coalesce(p_dry_run, true);
begin
  v_gateway_id := dispatcher.find_gateway(p_tenant_id, p_gateway);
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  select id, slug into v_agent from dispatcher.agents where tenant_id = p_tenant_id and gateway_id = v_gateway_id
      and (slug = p_agent or id::text = p_agent);
  if v_agent is null then
    return jsonb_build_object('code', 'unknown_agent', 'known',
      coalesce((select jsonb_agg(slug order by slug) from dispatcher.agents where tenant_id = p_tenant_id
          and gateway_id = v_gateway_id), '[]'));
  end if;
  v_settings := dispatcher.settings_of_gateway(v_gateway_id, p_settings);
  v_gates := dispatcher.wake_gates(dispatcher.read_gate_facts(v_agent.id, v_settings), v_settings, v_dry_run);
  if dispatcher.live_wakes_of_gateway(v_gateway_id) >= v_settings.max_concurrent_wakes then
    v_gates.blocked := v_gates.blocked || 'concurrency_limit'::text;
  end if;
  if not v_dry_run and v_gates.blocked <@ array['concurrency_limit'] then
    if (dispatcher.lock_wake_state(v_agent.id, p_tenant_id)).agent_id is null then
      v_gates.blocked := array['busy'];
    else
      perform dispatcher.join_waitlist(v_agent.id, 'command', now(), now());
      perform dispatcher.send_gateway_hint(v_gateway_id, 'agent', jsonb_build_object('agent_id', v_agent.id));
    end if;
  end if;
  return jsonb_build_object('code', 'ok', 'agent', v_agent.slug, 'agent_id', v_agent.id, 'blocked',
      to_jsonb(v_gates.blocked),
                            'retry_in', dispatcher.seconds_until(v_gates.retry_at), 'requested', not v_dry_run
                                and v_gates.blocked <@ array['concurrency_limit'],
                            'daemons', (select count(*) from public.dispatcher_instances as instance
                                where gateway_id = v_gateway_id and state = 'running'
                                          and not dispatcher.is_instance_silent(instance)), 'now', clock_timestamp());
end
$$;
comment on function public.request_wake(uuid, text, text, boolean, jsonb) is
  'Asks for one wake through the gates: puts the agent on the waitlist and hints its daemon, or names the gates that '
  'refuse (all of them when p_dry_run).';

create or replace function dispatcher.unknown_agent(p_gateway_id uuid) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object('code', 'unknown_agent', 'known',
           coalesce((select jsonb_agg(slug order by slug) from dispatcher.agents
               where gateway_id = p_gateway_id), '[]'))
$$;
comment on function dispatcher.unknown_agent(uuid) is
  'The answer to an agent the gateway does not have: {code: unknown_agent, known: slugs}.';

create or replace function dispatcher.agents_of_operator(p_tenant_id uuid, p_gateway_id uuid, p_agent text)
    returns setof uuid
language sql stable set search_path = ''
as $$
  select id from dispatcher.agents
   where tenant_id = p_tenant_id and gateway_id = p_gateway_id
     and (p_agent is null or slug = p_agent or id::text = p_agent)
$$;
comment on function dispatcher.agents_of_operator(uuid, uuid, text) is
  'The agents of a gateway an operator speaks of: one by slug or id, or all.';

create or replace function dispatcher.since(p_since text) returns timestamptz
language plpgsql stable set search_path = ''
as $$
begin
  if p_since ~ '^\d{1,6}[smhd]$' then
    return now() - (left(p_since, -1) || case right(p_since, 1) when 's' then ' s' when 'm' then ' min' when 'h'
        then ' h' else ' days' end)::interval;
  end if;
  return p_since::timestamptz;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  raise exception 'p_since is neither a time nor an age such as 30m, 2h or 7d: %',
      left(p_since, 100) using errcode = 'OD002';
end
$$;
comment on function dispatcher.since(text) is
  'A time, or an age (90s, 30m, 2h, 7d) before now; NULL for NULL. Raises OD002 for anything else.';

create or replace function dispatcher.items_to_requeue(
  p_agent_ids uuid[], p_is_one_agent boolean, p_item_ids uuid[], p_dead boolean, p_since timestamptz, p_limit integer
) returns table (item_id uuid, agent_id uuid)
language sql stable set search_path = ''
as $$
  -- The marks are joined, not asked for one by one: history grows, and a call must stay within the statement timeout.
  select item.id, item.agent_id
    from dispatcher.agents as agent
    join dispatcher.agent_inbox_items as item on item.agent_id = agent.id and item.tenant_id = agent.tenant_id
    left join public.inbox_item_marks as mark on mark.item_id = item.id and mark.set_aside_at = item.failed_at
   where agent.id = any (p_agent_ids) and item.status in ('failed', 'dead_letter')
     and case when p_item_ids is not null then item.id = any (p_item_ids)
              -- Given up: also what went stale and what an older daemon gave up; not what an operator ended.
              when p_dead then (item.status = 'dead_letter' or item.attempt_count >= item.max_attempts)
                  and mark.set_aside_as is distinct from 'operator'
                  and (p_since is null or coalesce(item.failed_at, item.updated_at) >= p_since)
              when item.status = 'failed' then mark.set_aside_as = 'agent_stalled'
              else p_is_one_agent and mark.set_aside_as = 'wake_chain_limit' end
   order by item.created_at, item.id limit p_limit
$$;
comment on function dispatcher.items_to_requeue(uuid[], boolean, uuid[], boolean, timestamptz, integer) is
  'The items a requeue means, oldest first: the given ones; with p_dead what was given up since p_since; else what a '
  'stall, and of one agent a chain limit, set aside.';

create or replace function dispatcher.requeue_items_of_agent(p_agent_id uuid, p_item_ids uuid[]) returns uuid[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_ids uuid[];
begin
  if (dispatcher.lock_wake_state(p_agent_id, (select tenant_id from dispatcher.agents where id = p_agent_id))).agent_id
      is null then
    return '{}';
  end if;
  with requeued as (
    update dispatcher.agent_inbox_items as item
       set status = 'pending', failed_at = null, leased_at = null, leased_until = null, updated_at = now(),
           attempt_count = case when item.attempt_count >= item.max_attempts then 0 else item.attempt_count end
     where item.id in (select held.id from dispatcher.agent_inbox_items as held
                        where held.id = any (p_item_ids) and held.status in ('failed', 'dead_letter')
                            for update skip locked)
    returning item.id)
  select array_agg(id) into v_ids from requeued;
  update public.inbox_item_origins set chain_depth = 0 where item_id = any (v_ids);
  update public.agent_wake_state set consecutive_failures = 0, stalled_at = null, chain_notified_at = null,
      updated_at = now()
   where agent_id = p_agent_id;
  return coalesce(v_ids, '{}');
exception when lock_not_available then
  return '{}';
end
$$;
comment on function dispatcher.requeue_items_of_agent(uuid, uuid[]) is
  'Items of an agent back to pending, its stall cleared; spent attempts start anew. Answers which; those that '
  'somebody holds, or all while the agent''s state is held, are left alone.';

create or replace function dispatcher.requeue_chosen_items(p_agent_ids uuid[], p_items uuid[], p_owners uuid[])
    returns uuid[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_agent record;
  v_ids uuid[] := '{}';
begin
  for v_agent in
    select agent.id, coalesce(array_agg(chosen.item_id) filter (where chosen.item_id is not null), '{}') as item_ids
      from unnest(p_agent_ids) as agent (id) left join unnest(p_items, p_owners) as chosen (item_id,
          agent_id) on chosen.agent_id = agent.id
     group by agent.id order by agent.id
  loop
    v_ids := v_ids || dispatcher.requeue_items_of_agent(v_agent.id, v_agent.item_ids);
  end loop;
  return v_ids;
end
$$;
comment on function dispatcher.requeue_chosen_items(uuid[], uuid[], uuid[]) is
  'requeue_items_of_agent for each agent, in the order of their ids.';

create or replace function public.requeue_inbox_items(
  p_tenant_id uuid, p_gateway text, p_agent text, p_item_ids uuid[],
  p_dead boolean default false, p_since text default null, p_dry_run boolean default false
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_limit constant integer := 500;
  v_gateway_id constant uuid := dispatcher.find_gateway(p_tenant_id, p_gateway);
  v_agents constant uuid[] := array(select dispatcher.agents_of_operator(p_tenant_id, v_gateway_id, p_agent));
  v_since constant timestamptz := dispatcher.since(p_since);
  v_items uuid[];
  v_owners uuid[];
  v_done uuid[] := '{}';
begin
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  elsif p_agent is not null and cardinality(v_agents) = 0 then
    return dispatcher.unknown_agent(v_gateway_id);
  end if;
  select array_agg(chosen.item_id), array_agg(chosen.agent_id) into v_items, v_owners
    from dispatcher.items_to_requeue(v_agents, p_agent is not null, p_item_ids, coalesce(p_dead, false), v_since,
                                     case when p_dry_run then 100000 else v_limit end) as chosen;
  if not coalesce(p_dry_run, false) then
    -- Named alone, an agent is freed of its stall also where it has nothing to bring back.
    v_done := dispatcher.requeue_chosen_items(case when p_agent is not null then v_agents
        else array(select distinct unnest(v_owners)) end, v_items, v_owners);
  end if;
  return jsonb_build_object(
    'code', 'ok', 'requeued', cardinality(v_done), 'item_ids', to_jsonb(v_done), 'dry_run', coalesce(p_dry_run, false),
    'found', coalesce(cardinality(v_items), 0), 'found_ids', to_jsonb(coalesce(v_items[1:100], '{}')),
    'busy', case when coalesce(p_dry_run, false) then 0 else coalesce(cardinality(v_items),
        0) - cardinality(v_done) end,
    'again', cardinality(v_done) > 0 and cardinality(v_items) >= v_limit,
    'dead_letters_left', (select count(*) from dispatcher.items_to_requeue(v_agents, false, null, true, null, 10000)));
end
$$;
comment on function public.requeue_inbox_items(uuid, text, text, uuid[], boolean, text, boolean) is
  'Brings items back to pending and clears their agents'' stall, at most 500 a call (again: call once more): the '
  'given failed or dead_letter ids; with p_dead what was given up, since p_since (a time, or an age such as 2h); else '
  'all that a stall set aside, of one agent also what a chain limit did. Spent attempts start anew. busy: held by '
  'somebody at this moment, left alone; dead_letters_left: given up and not asked for; p_dry_run only says what it '
  'found.';

create or replace function dispatcher.expire_items(p_agent_ids uuid[], p_item_ids uuid[], p_reason text) returns uuid[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_ids uuid[];
begin
  with expired as (
    update dispatcher.agent_inbox_items as item
       set status = 'failed', attempt_count = greatest(item.attempt_count, item.max_attempts), failed_at = now(),
           leased_at = null, leased_until = null, updated_at = now(),
           context = dispatcher.merge_inbox_context(item.context, jsonb_build_object('last_failure_reason', p_reason))
     where item.id in (select held.id from dispatcher.agent_inbox_items as held
                        where held.id = any (p_item_ids) and held.agent_id = any (p_agent_ids)
                          and held.status in ('pending', 'failed')
                        order by held.id limit 500 for update skip locked)
    returning item.id)
  select array_agg(id) into v_ids from expired;
  if v_ids is not null then
    perform dispatcher.mark_as_set_aside(v_ids, 'operator');
  end if;
  return coalesce(v_ids, '{}');
end
$$;
comment on function dispatcher.expire_items(uuid[], uuid[], text) is
  'Ends pending and failed items by an operator''s hand and marks them so, at most 500; answers which. What somebody '
  'holds is left alone.';

create or replace function public.expire_inbox_items(p_tenant_id uuid, p_gateway text, p_item_ids uuid[], p_reason text)
    returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_gateway_id constant uuid := dispatcher.find_gateway(p_tenant_id, p_gateway);
  v_agents constant uuid[] := array(select dispatcher.agents_of_operator(p_tenant_id, v_gateway_id, null));
  v_found integer;
  v_ids uuid[];
begin
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  select count(*) into v_found from dispatcher.agent_inbox_items as item
   where item.id = any (p_item_ids) and item.agent_id = any (v_agents) and item.tenant_id = p_tenant_id
     and item.status in ('pending', 'failed');
  v_ids := dispatcher.expire_items(v_agents, p_item_ids, dispatcher.clean_inbox_reason(coalesce(p_reason,
      'expired by the operator')));
  return jsonb_build_object('code', 'ok', 'expired', cardinality(v_ids), 'item_ids', to_jsonb(v_ids),
                            'busy', greatest(least(v_found, 500) - cardinality(v_ids), 0), 'again', v_found > 500
                                and cardinality(v_ids) > 0);
exception when lock_not_available then
  return jsonb_build_object('code', 'ok', 'expired', 0, 'item_ids', '[]'::jsonb, 'busy', v_found, 'again', false);
end
$$;
comment on function public.expire_inbox_items(uuid, text, uuid[], text) is
  'Ends open items by the operator''s hand, at most 500 a call (again: call once more): failed, attempts at the '
  'ceiling, reason recorded. busy: held by somebody, left alone.';

create or replace function dispatcher.release_lease(p_item dispatcher.agent_inbox_items, p_reason text) returns uuid
language plpgsql volatile set search_path = ''
as $$
declare
  v_wake_id uuid;
begin
  update public.inbox_item_leases set closed_at = now(), outcome = 'released'
   where item_id = p_item.id and closed_at is null returning wake_id into v_wake_id;
  update dispatcher.agent_inbox_items
     set status = 'pending', attempt_count = greatest(attempt_count, 1) - 1, leased_at = null, leased_until = null,
         updated_at = now()
   where id = p_item.id;
  perform dispatcher.notify_operator(
    p_item.tenant_id, 'lease_released', format('The lease of an item of agent %s was ended by an operator',
        p_item.agent_slug), p_reason, p_item.agent_id,
    jsonb_build_object('item_id', p_item.id, 'wake_id', v_wake_id, 'attempt', p_item.attempt_count, 'leased_at',
        p_item.leased_at,
                       'leased_until', p_item.leased_until, 'reason', p_reason), 'inbox_item', p_item.id);
  return v_wake_id;
end
$$;
comment on function dispatcher.release_lease(dispatcher.agent_inbox_items, text) is
  'Ends the lease of an item the caller holds: pending, attempt given back, its token void; a notification keeps who '
  'had it. Answers its wake.';

create or replace function public.release_inbox_item(p_tenant_id uuid, p_gateway text, p_item_id uuid,
    p_reason text default null) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_gateway_id constant uuid := dispatcher.find_gateway(p_tenant_id, p_gateway);
  v_agents constant uuid[] := array(select dispatcher.agents_of_operator(p_tenant_id, v_gateway_id, null));
  v_item dispatcher.agent_inbox_items;
begin
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  select * into v_item from dispatcher.agent_inbox_items
   where id = p_item_id and tenant_id = p_tenant_id and agent_id = any (v_agents) for update skip locked;
  if v_item.id is null then
    return jsonb_build_object('applied', false, 'code', case when exists (
      select from dispatcher.agent_inbox_items where id = p_item_id and tenant_id = p_tenant_id
          and agent_id = any (v_agents)) then 'busy' else 'not_found' end);
  elsif v_item.status <> 'leased' then
    return jsonb_build_object('applied', false, 'code', 'not_leased', 'status', v_item.status);
  end if;
  return jsonb_build_object('applied', true, 'code', 'ok', 'status', 'pending', 'leased_until', v_item.leased_until,
    'wake_id', dispatcher.release_lease(v_item, dispatcher.clean_inbox_reason(coalesce(p_reason,
        'released by the operator'))));
exception when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy');
end
$$;
comment on function public.release_inbox_item(uuid, text, uuid, text) is
  'Ends the lease of an item, whoever holds it: pending again, the attempt given back, its token void (a late close '
  'is lease_lost), a notification. {applied, code: ok|not_leased|not_found|busy, status, leased_until, wake_id}.';

create or replace function public.list_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_status text,
    p_limit integer) returns jsonb
language plpgsql stable set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_gateway_id constant uuid := dispatcher.find_gateway(p_tenant_id, p_gateway);
  v_agents constant uuid[] := array(select dispatcher.agents_of_operator(p_tenant_id, v_gateway_id, p_agent));
begin
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  elsif p_agent is not null and cardinality(v_agents) = 0 then
    return dispatcher.unknown_agent(v_gateway_id);
  end if;
  return jsonb_build_object('code', 'ok', 'items', coalesce((
    select jsonb_agg(dispatcher.shown_row(to_jsonb(listed)) order by listed.created_at desc)
      from (select item.id, agent.slug as agent, item.event_type, item.status, item.attempt_count, item.max_attempts,
          item.created_at,
                   item.leased_until, left(item.summary, 200) as summary,
                       left(item.context ->> 'last_failure_reason', 500) as last_failure_reason
              from dispatcher.agent_inbox_items as item
              join dispatcher.agents as agent on agent.id = item.agent_id
             where item.tenant_id = p_tenant_id and item.agent_id = any (v_agents)
               and (p_status is null or item.status::text = p_status)
             order by item.created_at desc limit least(greatest(coalesce(p_limit, 50), 1), 1000)) as listed), '[]'));
end
$$;
comment on function public.list_inbox_items(uuid, text, text, text, integer) is
  'The newest items of a gateway''s agents, or of one of them, for an operator.';

create or replace function public.dispatcher_status(p_tenant_id uuid, p_gateway text, p_settings jsonb) returns jsonb
language plpgsql stable set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_gateway record;
  v_settings public.dispatcher_settings;
  v_is_full boolean;
begin
  select id, slug into v_gateway from public.gateways where id = dispatcher.find_gateway(p_tenant_id, p_gateway);
  if v_gateway.id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  v_settings := dispatcher.settings_of_gateway(v_gateway.id, p_settings);
  v_is_full := dispatcher.live_wakes_of_gateway(v_gateway.id) >= v_settings.max_concurrent_wakes;
  return jsonb_build_object(
    'code', 'ok', 'gateway', v_gateway.slug, 'now', now(),
    -- Of one that has gone the last word is no news: how it did then would read as how it does now.
    'instances', (select coalesce(jsonb_agg(jsonb_build_object('id', id, 'state', seen.state,
                    'hostname', hostname, 'pid', pid, 'version', version, 'started_at', started_at,
                        'last_heartbeat_at', last_heartbeat_at,
                    'last_sweep_at', last_sweep_at, 'last_sweep', last_sweep, 'realtime',
                        case when seen.state = 'running' then realtime else '{}' end,
                    'health', case when seen.state = 'running' then health else '{}' end) order by started_at desc),
                        '[]')
                    from public.dispatcher_instances as instance
                    cross join lateral (select case when instance.state = 'running'
                        and dispatcher.is_instance_silent(instance) then 'silent'
                            else instance.state end) as seen (state)
                   where gateway_id = v_gateway.id and (instance.state = 'running'
                     or last_heartbeat_at > now() - interval '1 hour')),
    'wakes', (select coalesce(jsonb_agg(jsonb_build_object('wake_id', wake.id, 'agent', agent.slug, 'state',
        wake.state, 'path', wake.path, 'pid', wake.pid,
                    'claimed_at', wake.claimed_at, 'seconds',
                        round(extract(epoch from now() - dispatcher.known_time(wake.claimed_at))))
                            order by wake.claimed_at), '[]')
                from public.agent_wakes as wake join dispatcher.agents as agent on agent.id = wake.agent_id
               where wake.gateway_id = v_gateway.id and wake.state in ('starting', 'running')),
    'waitlist', (select coalesce(jsonb_agg(jsonb_build_object('agent', agent.slug, 'since', state.waitlisted_at)
        order by state.waitlisted_at, state.waiting_since), '[]')
                   from public.agent_wake_state as state join dispatcher.agents as agent on agent.id = state.agent_id
                  where agent.gateway_id = v_gateway.id and state.waitlisted_at is not null),
    'backlog', dispatcher.gateway_backlog(v_gateway.id),
    'agents', (select coalesce(jsonb_agg(jsonb_build_object('agent', agent.slug, 'status', agent.status, 'items',
        work.items,
                    'blocked', to_jsonb(gates.blocked || case when v_is_full and cardinality(gates.blocked) = 0
                        then array['concurrency_limit'] else '{}' end),
                    'retry_in', round(dispatcher.seconds_until(gates.retry_at)::numeric),
                    'failures', facts.failures, 'stalled_at', case when facts.failures > 0 then state.stalled_at end,
                        'last_wake_at', state.last_claimed_at,
                    'last_end', state.last_end_state,
                    'budget', (select dispatcher.shown_row(jsonb_build_object('status', budget.status, 'limit_usd',
                        budget.monthly_limit_usd,
                                                                'spend_usd', budget.current_period_spend_usd))
                                 from dispatcher.agent_budgets as budget where budget.agent_id = agent.id))
                                     order by agent.slug), '[]')
                 from dispatcher.agents as agent
                 left join public.agent_wake_state as state on state.agent_id = agent.id
                 cross join lateral (select count(*) as items from dispatcher.inbox_due as due
                     where due.agent_id = agent.id and due.tenant_id = agent.tenant_id) as work
                 cross join lateral dispatcher.read_gate_facts(agent.id, v_settings) as facts
                 cross join lateral dispatcher.wake_gates(facts, v_settings, true) as gates
                where agent.gateway_id = v_gateway.id));
end
$$;
comment on function public.dispatcher_status(uuid, text, jsonb) is
  'What an operator sees of one gateway: instances, live wakes, waitlist, backlog by age, and for each agent every '
  'gate that keeps it asleep.';

create or replace function dispatcher.gateway_backlog(p_gateway_id uuid) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object(
           'items', count(*) filter (where not is_paused), 'under_1m',
               count(*) filter (where not is_paused and age < interval '1 minute'),
           'under_1h', count(*) filter (where not is_paused and age >= interval '1 minute' and age < interval '1 hour'),
           'over_1h', count(*) filter (where not is_paused and age >= interval '1 hour'),
           'oldest_seconds', round(extract(epoch from max(age) filter (where not is_paused))),
           'waiting_for_paused', count(*) filter (where is_paused))
    from (select now() - dispatcher.known_time(due.created_at) as age,
        agent.status in ('paused', 'hibernating') as is_paused
            from dispatcher.agents as agent
            -- Agent by agent, which `offset 0` says: all items at once would be those of every tenant.
           cross join lateral (select created_at from dispatcher.inbox_due_of_pair as open
                                where open.agent_id = agent.id and open.tenant_id = agent.tenant_id offset 0) as due
           where agent.gateway_id = p_gateway_id) as ages
$$;
comment on function dispatcher.gateway_backlog(uuid) is
  'Open items of a gateway''s agents by age: items, under_1m, under_1h, over_1h, oldest_seconds (NULL when there are '
  'none). Items of paused or hibernating agents, which nobody may take now, are waiting_for_paused instead.';

create or replace function public.dispatcher_gauges(p_instance_id uuid) returns jsonb
language plpgsql stable set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
begin
  return jsonb_build_object(
    'backlog', dispatcher.gateway_backlog(v_instance.gateway_id),
    'runs', (select coalesce(jsonb_object_agg(counted.status, counted.number), '{}')
               from (select status, count(*) as number from public.workflow_runs where tenant_id = v_instance.tenant_id
                   group by status) as counted),
    'held', (select coalesce((last_tick -> 'budget_enforcement' ->> 'held')::integer, 0)
        from public.dispatcher_instances
              where tenant_id = v_instance.tenant_id and last_tick is not null order by last_tick ->> 'at' desc
                  limit 1));
end
$$;
comment on function public.dispatcher_gauges(uuid) is
  'For /metrics: backlog of the instance''s gateway by age, runs of its tenant by status, and how many runs budgets '
  'held at the tenant''s last tick.';

create or replace function public.list_wakes(p_tenant_id uuid, p_gateway text, p_agent text, p_limit integer)
    returns jsonb
language plpgsql stable set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_gateway_id uuid;
begin
  v_gateway_id := dispatcher.find_gateway(p_tenant_id, p_gateway);
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  if p_agent is not null and not exists (select from dispatcher.agents where gateway_id = v_gateway_id
      and (slug = p_agent or id::text = p_agent)) then
    return dispatcher.unknown_agent(v_gateway_id);
  end if;
  return jsonb_build_object('code', 'ok', 'wakes', coalesce((
    with listed as (
      select wake.*, agent.slug
        from public.agent_wakes as wake join dispatcher.agents as agent on agent.id = wake.agent_id
       where wake.gateway_id = v_gateway_id and (p_agent is null or agent.slug = p_agent or agent.id::text = p_agent)
       order by wake.ended_at is null desc, wake.claimed_at desc limit least(greatest(coalesce(p_limit, 50), 1), 1000)
    ), costs as (
      -- One join for all of them: usage has no index by agent, and must not be read once per wake.
      select listed.id, sum(usage.cost_total_usd) as cost_usd
        from listed join dispatcher.agent_usage as usage
          on usage.agent_id = listed.agent_id
              and usage.occurred_at between listed.started_at and coalesce(listed.ended_at, now())
       group by listed.id
    )
    select jsonb_agg(jsonb_build_object('wake_id', listed.id, 'agent', listed.slug, 'path', listed.path, 'state',
        listed.state,
                       'claimed_at', listed.claimed_at, 'started_at', listed.started_at, 'ended_at', listed.ended_at,
                       'seconds', round(extract(epoch from dispatcher.known_time(coalesce(listed.ended_at,
                           now())) - dispatcher.known_time(listed.started_at)), 1),
                       'exit_code', listed.exit_code, 'error', left(listed.error, 500), 'items',
                           cardinality(listed.item_ids),
                       'cost_usd', costs.cost_usd)
                     order by listed.ended_at is null desc, listed.claimed_at desc)
      from listed left join costs using (id)), '[]'));
end
$$;
comment on function public.list_wakes(uuid, text, text, integer) is
  'The newest wakes of a gateway, or of one of its agents, live ones first, for an operator. cost_usd is what the '
  'agent''s rows in agent_usage say of the time between start and end: a run of the same agent outside the wake '
  'counts, too; NULL when there is none.';

select dispatcher.restrict_functions(array[
  'request_wake', 'requeue_inbox_items', 'expire_inbox_items', 'release_inbox_item', 'list_inbox_items',
      'dispatcher_status',
  'dispatcher_gauges', 'list_wakes'
]);

notify pgrst, 'reload schema';
commit;
