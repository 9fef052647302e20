-- The gates: what keeps an agent asleep, evaluated in their order on the database's clock.


create or replace function dispatcher.budget_blocks(p_agent_id uuid, p_now timestamptz) returns boolean
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
comment on function dispatcher.budget_blocks(uuid, timestamptz) is
  'Whether the agent''s budget forbids a wake: exceeded with hard cutoff, in the running month, and still at or above its limit.';

create or replace function dispatcher.wake_cooldown_ends(p_state public.agent_wake_state, p_settings jsonb) returns timestamptz
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
comment on function dispatcher.wake_cooldown_ends(public.agent_wake_state, jsonb) is
  'When the agent''s cooldown is over: wake_cooldown doubled per failure in a row, at most max_wake_cooldown, from the start of a good wake or the end of a failed one. NULL before the first wake.';

create or replace function dispatcher.wake_chain_limit(p_settings jsonb) returns integer
language sql immutable set search_path = ''
as $$ select coalesce(nullif((p_settings ->> 'max_wake_chain')::integer, 0), 2147483647) $$;
comment on function dispatcher.wake_chain_limit(jsonb) is 'From which chain depth on an item wakes nobody; max_wake_chain = 0 means never.';

create or replace function dispatcher.wake_gates(
  p_agent_id uuid, p_settings jsonb, p_all boolean default false,
  out blocked text[], out retry_at timestamptz, out due_item_id uuid, out chain_depth integer, out failures integer
)
language plpgsql stable set search_path = ''
as $$
declare
  v_now constant timestamptz := now();
  v_max_chain constant integer := dispatcher.wake_chain_limit(p_settings);
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
      select found.id, found.chain_depth from dispatcher.inbox_due as found
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

  if v_facts.budget_status = 'exceeded' and dispatcher.budget_blocks(p_agent_id, v_now) then
    blocked := blocked || 'budget_exceeded'::text;
    if not p_all then return; end if;
  end if;

  due_item_id := v_facts.due_id;
  chain_depth := v_facts.due_depth;
  if due_item_id is null then
    select min(due.due_at) into v_until from dispatcher.inbox_due as due
     where due.agent_id = p_agent_id and due.tenant_id = v_facts.tenant_id and due.due_at > v_now and due.chain_depth < v_max_chain;
    retry_at := coalesce(v_until, retry_at);
    blocked := blocked || case when v_until is null and exists (
                                 select from dispatcher.inbox_due as due
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

  v_until := dispatcher.wake_cooldown_ends(v_state, p_settings);
  if v_until > v_now then
    blocked := blocked || format('cooldown(%ss)', ceil(extract(epoch from v_until - v_now)));
    retry_at := v_until;
  end if;
end
$$;
comment on function dispatcher.wake_gates(uuid, jsonb, boolean) is
  'The gates of one agent in their order (all but the cap): blocked = the reasons that refuse a wake, the first one unless p_all; retry_at = when waiting alone would open it; due_item_id = the oldest item to work on; failures = its failures in a row.';

create or replace function dispatcher.reset_wake_failures(p_agent_id uuid) returns void
language sql volatile set search_path = ''
as $$
  update public.agent_wake_state
     set consecutive_failures = 0, stalled_at = null, updated_at = now()
   where agent_id = p_agent_id and (consecutive_failures > 0 or stalled_at is not null)
$$;
comment on function dispatcher.reset_wake_failures(uuid) is 'New context for an agent: its failures in a row and its stall are forgotten; the base cooldown stays.';

select dispatcher.restrict_functions();

notify pgrst, 'reload schema';
