-- The gates: what keeps an agent asleep. The facts of one agent are read in one statement, so that gates and the choice
-- of items see one snapshot; the gates themselves are a pure function of the facts and the settings.
begin;
set local lock_timeout = '3s';

select dispatcher.ensure_type('gate_facts',
    'agent_id uuid, agent_slug text, tenant_id uuid, agent_status text, failures integer, '
  'is_live boolean, leased_until timestamp with time zone, budget_blocks boolean, wakes_today integer, due_item_ids '
  'uuid[], '
  'hinted_item_ids uuid[], chain_depth integer, oldest_due timestamp with time zone, next_due timestamp with time '
  'zone, '
  'is_at_chain_limit boolean, cooldown_from timestamp with time zone, granted_wake_id uuid, live_on_gateway integer');
comment on type dispatcher.gate_facts is
  'What the gates look at, read in one snapshot. failures: in effect, 0 when an item from outside is newer than the '
  'last end. due_item_ids: the three oldest. live_on_gateway: what the cap counts.';

create or replace function dispatcher.live_wakes_of_gateway(p_gateway_id uuid) returns integer
language sql stable set search_path = ''
as $$ select count(*)::integer from public.agent_wakes where gateway_id = p_gateway_id
    and state in ('starting', 'running') $$;
comment on function dispatcher.live_wakes_of_gateway(uuid) is
  'How many wakes of a gateway are alive: what the cap counts.';

create or replace function dispatcher.budget_blocks(p_agent_id uuid, p_now timestamptz) returns boolean
language plpgsql stable set search_path = ''
as $$
declare
  v_budget record;
  v_period_start date;
begin
  select status, hard_cutoff, monthly_limit_usd, period_anchor_tz, current_period_start, current_period_spend_usd
    into v_budget from dispatcher.agent_budgets where agent_id = p_agent_id;
  if v_budget is null or not v_budget.hard_cutoff then
    return false;
  end if;
  begin
    v_period_start := date_trunc('month', p_now at time zone v_budget.period_anchor_tz)::date;
  exception when invalid_parameter_value then
    v_period_start := date_trunc('month', p_now at time zone 'UTC')::date;
  end;
  return v_budget.current_period_start >= v_period_start
     and case when v_budget.monthly_limit_usd is null then v_budget.status = 'exceeded'
              else v_budget.current_period_spend_usd >= v_budget.monthly_limit_usd end;
end
$$;
comment on function dispatcher.budget_blocks(uuid, timestamptz) is
  'Whether the agent''s budget forbids a wake: a hard cutoff whose spend of the running month is at or above its '
  'limit, whatever its status says; without a limit the status exceeded says so.';

create or replace function dispatcher.wake_chain_limit(p_settings public.dispatcher_settings) returns integer
language plpgsql immutable set search_path = ''
as $$
begin
  return coalesce(nullif(p_settings.max_wake_chain, 0), 2147483647);
end
$$;
comment on function dispatcher.wake_chain_limit(public.dispatcher_settings) is
  'From which chain depth on an item wakes nobody; max_wake_chain = 0 means never.';

create or replace function dispatcher.start_of_today() returns timestamptz
language plpgsql stable set search_path = ''
as $$
begin
  return date_trunc('day', now() at time zone 'UTC') at time zone 'UTC';
end
$$;
comment on function dispatcher.start_of_today() is 'When the UTC day began.';

create or replace function dispatcher.read_gate_facts(
  p_agent_id uuid, p_settings public.dispatcher_settings, p_hinted uuid[] default '{}', p_request uuid default null
) returns dispatcher.gate_facts
language plpgsql stable set search_path = '' set plan_cache_mode = force_generic_plan
as $$
declare
  v_now constant timestamptz := now();
  v_max_chain constant integer := dispatcher.wake_chain_limit(p_settings);
  v_counts_wakes constant boolean := p_settings.max_wakes_per_day > 0;
  v_facts dispatcher.gate_facts;
begin
  select agent.id, agent.slug, agent.tenant_id, agent.status::text,
         case when coalesce(state.consecutive_failures, 0) = 0 then 0
              when exists (select from public.agent_inbox_items as item
                            where item.agent_id = agent.id and item.tenant_id = agent.tenant_id
                              and item.status in ('pending', 'failed')
                              and item.attempt_count < item.max_attempts
                              and item.created_at > state.last_ended_at and item.created_at <= v_now
                              and not exists (select from public.inbox_item_origins as origin
                                               where origin.item_id = item.id and origin.from_agent_id = agent.id))
                                                   then 0
              else state.consecutive_failures end,
         exists (select from public.agent_wakes as wake where wake.agent_id = agent.id
             and wake.state in ('starting', 'running')),
         -- A lease of more than a week is none: whoever wrote that row, it must not put the agent to sleep.
         (select max(item.leased_until) from public.agent_inbox_items as item
           where item.agent_id = agent.id and item.tenant_id = agent.tenant_id and item.status = 'leased'
             and item.leased_until > v_now and item.leased_until < v_now + interval '7 days'),
         coalesce((select budget.hard_cutoff and dispatcher.budget_blocks(agent.id, v_now)
                     from dispatcher.agent_budgets as budget where budget.agent_id = agent.id), false),
         case when v_counts_wakes then (select count(*) from public.agent_wakes as wake
                                         where wake.agent_id = agent.id and wake.state <> 'spawn_failed'
                                           and wake.claimed_at >= dispatcher.start_of_today()) else 0 end,
         coalesce(heads.ids, '{}'),
         case when cardinality(p_hinted) = 0 then '{}'
              else array(select due.id from dispatcher.inbox_due_of_pair as due
                          where due.id = any (p_hinted) and due.agent_id = agent.id and due.tenant_id = agent.tenant_id
                            and due.due_at <= v_now and due.chain_depth < v_max_chain
                          order by due.created_at limit 100) end,
         coalesce(heads.chain_depth, 0), heads.oldest,
         case when heads.ids is null then (select min(due.due_at) from dispatcher.inbox_due_of_pair as due
                                            where due.agent_id = agent.id and due.tenant_id = agent.tenant_id
                                              and due.due_at > v_now and due.chain_depth < v_max_chain) end,
         heads.ids is null and exists (select from dispatcher.inbox_due_of_pair as due
                                        where due.agent_id = agent.id and due.tenant_id = agent.tenant_id
                                          and due.due_at <= v_now and due.chain_depth >= v_max_chain),
         case when state.last_end_state in ('failed', 'timed_out', 'no_progress', 'spawn_failed')
              then coalesce(state.last_ended_at, state.last_claimed_at)
              -- A wake that came to nothing without anybody's fault is none to rest from.
              when state.last_end_state = 'interrupted' and coalesce(state.consecutive_failures, 0) = 0
              and state.last_ended_at >= state.last_claimed_at then null
              else state.last_claimed_at end,
         case when p_request is not null
              then (select wake.id from public.agent_wakes as wake
                     where wake.claim_request = p_request and wake.agent_id = agent.id
                       and wake.state in ('starting', 'running')) end,
         (select count(*)::integer from public.agent_wakes as wake
           where wake.gateway_id = agent.gateway_id and wake.state in ('starting', 'running'))
    into v_facts
    from public.agents as agent
    left join public.agent_wake_state as state on state.agent_id = agent.id
    left join lateral (
      select array_agg(head.id order by head.created_at, head.id) as ids, max(head.chain_depth) as chain_depth,
          min(head.created_at) as oldest
        from (select due.id, due.created_at, due.chain_depth from dispatcher.inbox_due_of_pair as due
               where due.agent_id = agent.id and due.tenant_id = agent.tenant_id and due.due_at <= v_now
                 and due.chain_depth < v_max_chain
               order by due.created_at limit 3) as head) as heads on true
   where agent.id = p_agent_id;
  return v_facts;
end
$$;
comment on function dispatcher.read_gate_facts(uuid, public.dispatcher_settings, uuid[], uuid) is
  'The facts of one agent, in one statement. p_hinted: items that hints named, of which those that are due come back; '
  'p_request: the claim request whose grant, if there is one, comes back. All NULL for an unknown agent.';

create or replace function dispatcher.wake_cooldown(p_failures integer, p_settings public.dispatcher_settings)
    returns interval
language plpgsql immutable set search_path = ''
as $$
begin
  return make_interval(secs => least(p_settings.max_wake_cooldown,
      p_settings.wake_cooldown * power(2, least(p_failures, 30))));
end
$$;
comment on function dispatcher.wake_cooldown(integer, public.dispatcher_settings) is
  'The effective cooldown: wake_cooldown doubled per failure in a row, at most max_wake_cooldown.';

create or replace function dispatcher.wake_gates(
  p_facts dispatcher.gate_facts, p_settings public.dispatcher_settings, p_all boolean default false,
      out blocked text[], out retry_at timestamptz
)
language plpgsql stable set search_path = ''
as $$
declare
  v_cooldown_ends constant timestamptz := p_facts.cooldown_from + dispatcher.wake_cooldown(p_facts.failures,
      p_settings);
begin
  blocked := '{}';
  if p_facts.failures >= p_settings.max_consecutive_failures then
    blocked := blocked || 'stalled'::text;
    if not p_all then return; end if;
  end if;
  if p_facts.is_live then
    blocked := blocked || 'wake_in_flight'::text;
    if not p_all then return; end if;
  end if;
  if p_facts.agent_status in ('paused', 'hibernating') then
    blocked := blocked || 'agent_paused'::text;
    if not p_all then return; end if;
  end if;
  if p_facts.leased_until is not null then
    blocked := blocked || 'active_lease'::text;
    retry_at := p_facts.leased_until;
    if not p_all then return; end if;
  end if;
  if p_facts.budget_blocks then
    blocked := blocked || 'budget_exceeded'::text;
    if not p_all then return; end if;
  end if;
  if cardinality(p_facts.due_item_ids) = 0 then
    retry_at := coalesce(p_facts.next_due, retry_at);
    blocked := blocked || case when p_facts.next_due is null and p_facts.is_at_chain_limit then 'chain_limit'
        else 'no_actionable_work' end;
    if not p_all then return; end if;
  end if;
  if p_settings.max_wakes_per_day > 0 and p_facts.wakes_today >= p_settings.max_wakes_per_day then
    blocked := blocked || 'daily_limit'::text;
    retry_at := dispatcher.start_of_today() + interval '1 day';
    if not p_all then return; end if;
  end if;
  if v_cooldown_ends > now() then
    blocked := blocked || format('cooldown(%ss)', ceil(extract(epoch from v_cooldown_ends - now())));
    retry_at := v_cooldown_ends;
  end if;
end
$$;
comment on function dispatcher.wake_gates(dispatcher.gate_facts, public.dispatcher_settings, boolean) is
  'The gates of one agent in their order (all but the cap): blocked = the reasons that refuse a wake, the first one '
  'unless p_all; retry_at = when waiting alone would open it.';

create or replace function dispatcher.seconds_until(p_at timestamptz) returns double precision
language sql stable set search_path = ''
as $$ select case when isfinite(p_at) then least(extract(epoch from p_at - now()), 1e9)::double precision end $$;
comment on function dispatcher.seconds_until(timestamptz) is
  'Seconds from now to a time, below 0 for a past one; NULL for a time nobody can wait for.';

create or replace function dispatcher.known_time(p_at timestamptz) returns timestamptz
language sql stable set search_path = ''
as $$ select case when p_at between '1970-01-01Z' and now() + interval '1 day' then p_at end $$;
comment on function dispatcher.known_time(timestamptz) is
  'A time of a row as it is shown; NULL for one that no clock has shown yet.';

create or replace function dispatcher.finite_time(p_at timestamptz) returns timestamptz
language sql immutable parallel safe set search_path = ''
as $$ select case when isfinite(p_at) then p_at end $$;
comment on function dispatcher.finite_time(timestamptz) is
  'A time as it is shown; NULL for an infinite one, which is no known time.';

create or replace function dispatcher.shown_row(p_row jsonb) returns jsonb
language sql immutable parallel safe set search_path = ''
as $$
  select p_row || coalesce(jsonb_object_agg(field.key, null), '{}')
    from jsonb_each_text(p_row) as field
   where field.value in ('infinity', '-infinity', 'NaN', 'Infinity', '-Infinity')
     and field.key ~ '(_at|_until|_date|_usd|_cost|_estimate)$'
$$;
comment on function dispatcher.shown_row(jsonb) is
  'A row as it is shown: its infinite times and amounts that are no numbers are null, as no reader of JSON knows them.';

select dispatcher.restrict_functions();

notify pgrst, 'reload schema';
commit;
