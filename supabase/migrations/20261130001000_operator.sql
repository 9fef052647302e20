-- What an operator asks and does, through the command line and /metrics.
begin;
set local lock_timeout = '3s';

create or replace function public.request_wake(p_tenant_id uuid, p_gateway text, p_agent text, p_dry_run boolean, p_settings jsonb) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_gateway_id uuid;
  v_agent record;
  v_gates record;
  v_settings public.dispatcher_settings;
begin
  v_gateway_id := dispatcher.find_gateway(p_tenant_id, p_gateway);
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  select id, slug into v_agent from public.agents where tenant_id = p_tenant_id and gateway_id = v_gateway_id and (slug = p_agent or id::text = p_agent);
  if v_agent is null then
    return jsonb_build_object('code', 'unknown_agent', 'known',
      coalesce((select jsonb_agg(slug order by slug) from public.agents where tenant_id = p_tenant_id and gateway_id = v_gateway_id), '[]'));
  end if;
  v_settings := dispatcher.settings_of_gateway(v_gateway_id, p_settings);
  v_gates := dispatcher.wake_gates(dispatcher.read_gate_facts(v_agent.id, v_settings), v_settings, p_dry_run);
  if dispatcher.live_wakes_of_gateway(v_gateway_id) >= v_settings.max_concurrent_wakes then
    v_gates.blocked := v_gates.blocked || 'concurrency_limit'::text;
  end if;
  if not p_dry_run and v_gates.blocked <@ array['concurrency_limit'] then
    insert into public.agent_wake_state as state (agent_id, tenant_id, waitlisted_at, waitlist_path, waiting_since)
    values (v_agent.id, p_tenant_id, now(), 'command', now())
    on conflict (agent_id) do update set waitlisted_at = coalesce(state.waitlisted_at, now()), waitlist_path = coalesce(state.waitlist_path, 'command'),
      waiting_since = coalesce(state.waiting_since, now()), updated_at = now();
    perform dispatcher.send_gateway_hint(v_gateway_id, 'agent', jsonb_build_object('agent_id', v_agent.id));
  end if;
  return jsonb_build_object('code', 'ok', 'agent', v_agent.slug, 'agent_id', v_agent.id, 'blocked', to_jsonb(v_gates.blocked),
                            'retry_in', dispatcher.seconds_until(v_gates.retry_at), 'requested', not p_dry_run and v_gates.blocked <@ array['concurrency_limit'],
                            'daemons', (select count(*) from public.dispatcher_instances as instance where gateway_id = v_gateway_id and state = 'running'
                                          and not dispatcher.is_instance_silent(instance)), 'now', clock_timestamp());
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
                then (item.status = 'failed' and dispatcher.is_set_aside_by_stall(item.id, item.failed_at))
                  or (p_agent is not null and item.status = 'dead_letter' and exists (
                      select from public.inbox_item_marks as mark
                       where mark.item_id = item.id and mark.set_aside_as = 'wake_chain_limit' and mark.set_aside_at = item.failed_at))
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
           context = dispatcher.merge_inbox_context(item.context, jsonb_build_object('last_failure_reason', coalesce(p_reason, 'expired by the operator')))
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
  v_gateway_id := dispatcher.find_gateway(p_tenant_id, p_gateway);
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
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
                    'hostname', hostname, 'pid', pid, 'version', version, 'started_at', started_at, 'last_heartbeat_at', last_heartbeat_at,
                    'last_sweep_at', last_sweep_at, 'last_sweep', last_sweep, 'realtime', case when seen.state = 'running' then realtime else '{}' end,
                    'health', case when seen.state = 'running' then health else '{}' end) order by started_at desc), '[]')
                    from public.dispatcher_instances as instance
                    cross join lateral (select case when instance.state = 'running' and dispatcher.is_instance_silent(instance) then 'silent' else instance.state end) as seen (state)
                   where gateway_id = v_gateway.id and (instance.state = 'running' or last_heartbeat_at > now() - interval '1 hour')),
    'wakes', (select coalesce(jsonb_agg(jsonb_build_object('wake_id', wake.id, 'agent', agent.slug, 'state', wake.state, 'path', wake.path, 'pid', wake.pid,
                    'claimed_at', wake.claimed_at, 'seconds', round(extract(epoch from now() - wake.claimed_at))) order by wake.claimed_at), '[]')
                from public.agent_wakes as wake join public.agents as agent on agent.id = wake.agent_id
               where wake.gateway_id = v_gateway.id and wake.state in ('starting', 'running')),
    'waitlist', (select coalesce(jsonb_agg(jsonb_build_object('agent', agent.slug, 'since', state.waitlisted_at) order by state.waitlisted_at, state.waiting_since), '[]')
                   from public.agent_wake_state as state join public.agents as agent on agent.id = state.agent_id
                  where agent.gateway_id = v_gateway.id and state.waitlisted_at is not null),
    'backlog', dispatcher.gateway_backlog(v_gateway.id),
    'agents', (select coalesce(jsonb_agg(jsonb_build_object('agent', agent.slug, 'status', agent.status, 'items', work.items,
                    'blocked', to_jsonb(gates.blocked || case when v_is_full and cardinality(gates.blocked) = 0 then array['concurrency_limit'] else '{}' end),
                    'retry_in', round(dispatcher.seconds_until(gates.retry_at)::numeric),
                    'failures', facts.failures, 'stalled_at', case when facts.failures > 0 then state.stalled_at end, 'last_wake_at', state.last_claimed_at,
                    'last_end', state.last_end_state,
                    'budget', (select jsonb_build_object('status', budget.status, 'limit_usd', budget.monthly_limit_usd, 'spend_usd', budget.current_period_spend_usd)
                                 from public.agent_budgets as budget where budget.agent_id = agent.id)) order by agent.slug), '[]')
                 from public.agents as agent
                 left join public.agent_wake_state as state on state.agent_id = agent.id
                 cross join lateral (select count(*) as items from dispatcher.inbox_due as due where due.agent_id = agent.id) as work
                 cross join lateral dispatcher.read_gate_facts(agent.id, v_settings) as facts
                 cross join lateral dispatcher.wake_gates(facts, v_settings, true) as gates
                where agent.gateway_id = v_gateway.id));
end
$$;
comment on function public.dispatcher_status(uuid, text, jsonb) is
  'What an operator sees of one gateway: instances, live wakes, waitlist, backlog by age, and for each agent every gate that keeps it asleep.';

create or replace function dispatcher.gateway_backlog(p_gateway_id uuid) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object('items', count(*), 'under_1m', count(*) filter (where age < interval '1 minute'),
                            'under_1h', count(*) filter (where age >= interval '1 minute' and age < interval '1 hour'),
                            'over_1h', count(*) filter (where age >= interval '1 hour'), 'oldest_seconds', round(extract(epoch from max(age))))
    from (select now() - dispatcher.known_time(due.created_at) as age from dispatcher.inbox_due as due join public.agents as agent on agent.id = due.agent_id
           where agent.gateway_id = p_gateway_id) as ages
$$;
comment on function dispatcher.gateway_backlog(uuid) is 'Open items of a gateway''s agents by age: items, under_1m, under_1h, over_1h, oldest_seconds (NULL when there are none).';

create or replace function public.dispatcher_gauges(p_instance_id uuid) returns jsonb
language plpgsql stable set search_path = ''
as $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
begin
  return jsonb_build_object(
    'backlog', dispatcher.gateway_backlog(v_instance.gateway_id),
    'runs', (select coalesce(jsonb_object_agg(counted.status, counted.number), '{}')
               from (select status, count(*) as number from public.workflow_runs where tenant_id = v_instance.tenant_id group by status) as counted),
    'held', (select coalesce((last_tick -> 'budget_enforcement' ->> 'held')::integer, 0) from public.dispatcher_instances
              where tenant_id = v_instance.tenant_id and last_tick is not null order by last_tick ->> 'at' desc limit 1));
end
$$;
comment on function public.dispatcher_gauges(uuid) is
  'For /metrics: backlog of the instance''s gateway by age, runs of its tenant by status, and how many runs budgets held at the tenant''s last tick.';

create or replace function public.list_wakes(p_tenant_id uuid, p_gateway text, p_agent text, p_limit integer) returns jsonb
language plpgsql stable set search_path = ''
as $$
declare
  v_gateway_id uuid;
begin
  v_gateway_id := dispatcher.find_gateway(p_tenant_id, p_gateway);
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  if p_agent is not null and not exists (select from public.agents where gateway_id = v_gateway_id and (slug = p_agent or id::text = p_agent)) then
    return jsonb_build_object('code', 'unknown_agent', 'known',
      coalesce((select jsonb_agg(slug order by slug) from public.agents where gateway_id = v_gateway_id), '[]'));
  end if;
  return jsonb_build_object('code', 'ok', 'wakes', coalesce((
    with listed as (
      select wake.*, agent.slug
        from public.agent_wakes as wake join public.agents as agent on agent.id = wake.agent_id
       where wake.gateway_id = v_gateway_id and (p_agent is null or agent.slug = p_agent or agent.id::text = p_agent)
       order by wake.ended_at is null desc, wake.claimed_at desc limit p_limit
    ), costs as (
      -- One join for all of them: usage has no index by agent, and must not be read once per wake.
      select listed.id, sum(usage.cost_total_usd) as cost_usd
        from listed join public.agent_usage as usage
          on usage.agent_id = listed.agent_id and usage.occurred_at between listed.started_at and coalesce(listed.ended_at, now())
       group by listed.id
    )
    select jsonb_agg(jsonb_build_object('wake_id', listed.id, 'agent', listed.slug, 'path', listed.path, 'state', listed.state,
                       'claimed_at', listed.claimed_at, 'started_at', listed.started_at, 'ended_at', listed.ended_at,
                       'seconds', round(extract(epoch from coalesce(listed.ended_at, now()) - listed.started_at), 1),
                       'exit_code', listed.exit_code, 'error', left(listed.error, 500), 'items', cardinality(listed.item_ids),
                       'cost_usd', costs.cost_usd)
                     order by listed.ended_at is null desc, listed.claimed_at desc)
      from listed left join costs using (id)), '[]'));
end
$$;
comment on function public.list_wakes(uuid, text, text, integer) is
  'The newest wakes of a gateway, or of one of its agents, live ones first, for an operator. cost_usd is what the agent''s rows in agent_usage say of the time between start and end: a run of the same agent outside the wake counts, too; NULL when there is none.';

select dispatcher.restrict_functions(array[
  'request_wake', 'requeue_inbox_items', 'expire_inbox_items', 'list_inbox_items', 'dispatcher_status',
  'dispatcher_gauges', 'list_wakes'
]);

notify pgrst, 'reload schema';
commit;
