-- Budgets of workflow runs: what was spent and what is reserved, who may still start, and what is told when it is too much.
-- Nothing here names a budget table outside a function body: a database that has lost them dispatches on, loudly.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.workflow_period(
  p_period text, p_timezone text, p_now timestamptz, out period_key text, out starts_at timestamptz, out ends_at timestamptz
)
language plpgsql stable set search_path = ''
as $$
declare
  v_local constant timestamp := p_now at time zone p_timezone;
  v_start timestamp;
begin
  case p_period
    when 'daily' then
      v_start := date_trunc('day', v_local);
      period_key := to_char(v_start, 'YYYY-MM-DD');
      ends_at := (v_start + interval '1 day') at time zone p_timezone;
    when 'weekly' then
      v_start := date_trunc('week', v_local);
      period_key := to_char(v_start, 'IYYY"-W"IW');
      ends_at := (v_start + interval '7 days') at time zone p_timezone;
    when 'monthly' then
      v_start := date_trunc('month', v_local);
      period_key := to_char(v_start, 'YYYY-MM');
      ends_at := (v_start + interval '1 month') at time zone p_timezone;
    else
      raise exception 'unknown period %', p_period using errcode = 'OD011';
  end case;
  starts_at := v_start at time zone p_timezone;
end
$$;
comment on function dispatcher.workflow_period(text, text, timestamptz) is
  'The period a moment falls into in a zone: its key (2026-11-30, 2026-W49, 2026-11), local start and end. Raises for an unknown zone.';

create or replace function dispatcher.workflow_estimates(p_tenant_id uuid, p_default_usd numeric) returns jsonb
language sql stable set search_path = ''
as $$
  with types as (
    select workflow_type from public.workflow_agent_routing where tenant_id = p_tenant_id
    union
    select workflow_type from public.workflow_runs where tenant_id = p_tenant_id and status = 'queued'
    union
    select workflow_type from public.workflow_runs where tenant_id = p_tenant_id and status in ('dispatched', 'claimed', 'running')
  ), reported as (
    select types.workflow_type, average.usd, average.tokens
      from types
      cross join lateral (
        select avg(recent.cost_estimate) filter (where recent.cost_estimate >= 0 and recent.cost_estimate <> 'NaN') as usd,
               avg(coalesce(recent.input_tokens, 0) + coalesce(recent.output_tokens, 0))
                 filter (where num_nonnulls(recent.input_tokens, recent.output_tokens) > 0) as tokens
          from (select run.cost_estimate, run.input_tokens, run.output_tokens from public.workflow_runs as run
                 where run.tenant_id = p_tenant_id and run.workflow_type = types.workflow_type and run.reported_at is not null and run.finished_at is not null
                 order by run.reported_at desc limit 20) as recent) as average
  )
  select coalesce(jsonb_object_agg(workflow_type, jsonb_build_object('usd', usd, 'tokens', tokens)), '{}')
         || jsonb_build_object('', jsonb_build_object('usd', coalesce(p_default_usd, (select avg(usd) from reported), 0.10),
                                                      'tokens', coalesce((select avg(tokens) from reported), 0)))
    from reported
$$;
comment on function dispatcher.workflow_estimates(uuid, numeric) is
  'What a run of each type is expected to cost: {type: {usd, tokens}} as the mean of its last 20 reported runs; under "" what holds for a type without any (the setting, else the mean of the other types, else 0.10 USD).';

create or replace function dispatcher.workflow_estimate(p_estimates jsonb, p_workflow_type text, p_what text) returns numeric
language sql immutable set search_path = ''
as $$ select coalesce((p_estimates -> p_workflow_type ->> p_what)::numeric, (p_estimates -> '' ->> p_what)::numeric, 0) $$;
comment on function dispatcher.workflow_estimate(jsonb, text, text) is 'The estimate (usd or tokens) for a type out of workflow_estimates.';

create or replace function dispatcher.workflow_spend(p_tenant_id uuid, p_starts timestamptz[], p_estimates jsonb) returns table (
  starts_at timestamptz, scope text, scope_id text, settled_usd numeric, settled_tokens numeric, reserved_usd numeric, reserved_tokens numeric
)
language sql stable set search_path = ''
as $$
  -- What is unknown, negative or NaN counts as its estimate. Unreported active runs belong to every running period: they will be
  -- settled in it. A held one still is: what it reserves must be there when it goes on.
  with spent as (
    select period.starts_at, run.owner_agent_id as agent_id, run.workflow_type,
           sum(case when run.cost_estimate >= 0 and run.cost_estimate <> 'NaN' then run.cost_estimate
                    else coalesce(run.reserved_usd, (p_estimates -> run.workflow_type ->> 'usd')::numeric, (p_estimates -> '' ->> 'usd')::numeric) end) as settled_usd,
           sum(case when num_nonnulls(run.input_tokens, run.output_tokens) > 0 and coalesce(run.input_tokens, 0) >= 0 and coalesce(run.output_tokens, 0) >= 0
                    then coalesce(run.input_tokens, 0) + coalesce(run.output_tokens, 0)
                    else coalesce(run.reserved_tokens, (p_estimates -> run.workflow_type ->> 'tokens')::numeric, (p_estimates -> '' ->> 'tokens')::numeric) end) as settled_tokens,
           0::numeric as reserved_usd, 0::numeric as reserved_tokens
      from unnest(p_starts) as period (starts_at)
      join public.workflow_runs as run on run.tenant_id = p_tenant_id and run.accounted_at >= period.starts_at
     group by period.starts_at, run.owner_agent_id, run.workflow_type
    union all
    select period.starts_at, claim.agent_id, claim.workflow_type,
           sum(coalesce(claim.cost_usd, (p_estimates -> claim.workflow_type ->> 'usd')::numeric, (p_estimates -> '' ->> 'usd')::numeric)),
           sum(coalesce(claim.tokens, (p_estimates -> claim.workflow_type ->> 'tokens')::numeric, (p_estimates -> '' ->> 'tokens')::numeric)), 0, 0
      from unnest(p_starts) as period (starts_at)
      join public.workflow_claims as claim on claim.tenant_id = p_tenant_id and claim.accounted_at >= period.starts_at
     group by period.starts_at, claim.agent_id, claim.workflow_type
    union all
    select period.starts_at, run.owner_agent_id, run.workflow_type, 0, 0,
           sum(coalesce(run.reserved_usd, (p_estimates -> run.workflow_type ->> 'usd')::numeric, (p_estimates -> '' ->> 'usd')::numeric)),
           sum(coalesce(run.reserved_tokens, (p_estimates -> run.workflow_type ->> 'tokens')::numeric, (p_estimates -> '' ->> 'tokens')::numeric))
      from unnest(p_starts) as period (starts_at)
      join public.workflow_runs as run on run.tenant_id = p_tenant_id and run.accounted_at is null
       and (run.status in ('dispatched', 'claimed', 'running') or run.paused_from in ('dispatched', 'claimed', 'running'))
     group by period.starts_at, run.owner_agent_id, run.workflow_type
  )
  select spent.starts_at,
         case when grouping(spent.agent_id) = 0 then 'agent' when grouping(profile.department_id) = 0 then 'department'
              when grouping(spent.workflow_type) = 0 then 'project' else 'fleet' end,
         case when grouping(spent.agent_id) = 0 then spent.agent_id when grouping(profile.department_id) = 0 then profile.department_id
              when grouping(spent.workflow_type) = 0 then spent.workflow_type end,
         sum(spent.settled_usd), sum(spent.settled_tokens), sum(spent.reserved_usd), sum(spent.reserved_tokens)
    from spent
    left join public.agent_profiles as profile on profile.tenant_id = p_tenant_id and profile.agent_id = spent.agent_id
   group by grouping sets ((spent.starts_at, spent.agent_id), (spent.starts_at, profile.department_id), (spent.starts_at, spent.workflow_type), (spent.starts_at))
$$;
comment on function dispatcher.workflow_spend(uuid, timestamptz[], jsonb) is
  'What every agent, department, project and the fleet have spent since each of the given moments, and what their unreported active runs reserve: one aggregate per period, whatever the number of budgets.';

create or replace function dispatcher.budget_periods(p_tenant_id uuid, p_now timestamptz) returns jsonb
language plpgsql stable set search_path = ''
as $$
declare
  v_kind record;
  v_period record;
  v_periods jsonb := '{}';
begin
  for v_kind in select distinct period, timezone from public.budgets where tenant_id = p_tenant_id and active loop
    begin
      select * into v_period from dispatcher.workflow_period(v_kind.period, v_kind.timezone, p_now);
      v_periods := v_periods || jsonb_build_object(v_kind.period || ' ' || v_kind.timezone,
        jsonb_build_object('period_key', v_period.period_key, 'starts_at', v_period.starts_at, 'ends_at', v_period.ends_at));
    exception when query_canceled then
      raise;
    when others then
      v_periods := v_periods || jsonb_build_object(v_kind.period || ' ' || v_kind.timezone, jsonb_build_object('error', format('%s (%s)', sqlerrm, sqlstate)));
    end;
  end loop;
  return v_periods;
end
$$;
comment on function dispatcher.budget_periods(uuid, timestamptz) is
  'The running period of every kind the tenant''s active budgets have, by "period zone"; for a zone that is none, the error.';

create or replace function dispatcher.evaluate_budgets(p_tenant_id uuid, p_estimates jsonb, p_now timestamptz default now()) returns jsonb
language plpgsql stable set search_path = ''
as $$
declare
  v_periods constant jsonb := dispatcher.budget_periods(p_tenant_id, p_now);
  v_spends jsonb := '{}';
  v_error text;
begin
  if v_periods = '{}' then
    return '[]';
  end if;
  begin
    select coalesce(jsonb_object_agg(concat_ws('|', extract(epoch from spend.starts_at), spend.scope, spend.scope_id),
             jsonb_build_object('settled_usd', spend.settled_usd, 'settled_tokens', spend.settled_tokens, 'reserved_usd', spend.reserved_usd, 'reserved_tokens', spend.reserved_tokens)), '{}')
      into v_spends
      from dispatcher.workflow_spend(p_tenant_id, array(select distinct (kind.value ->> 'starts_at')::timestamptz from jsonb_each(v_periods) as kind
                                                     where kind.value ? 'starts_at'), p_estimates) as spend
     where spend.scope_id is not null or spend.scope = 'fleet';
  exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
    raise;
  when others then
    v_error := format('%s (%s)', sqlerrm, sqlstate);
  end;
  return (
    select coalesce(jsonb_agg(jsonb_build_object(
             'id', budget.id, 'name', budget.name, 'scope', budget.scope, 'scope_id', budget.scope_id, 'period', budget.period, 'cap_usd', budget.cap_usd,
             'cap_tokens', budget.cap_tokens, 'action', budget.action_on_exceed, 'fail_closed', budget.fail_closed,
             'settled_usd', 0, 'settled_tokens', 0, 'reserved_usd', 0, 'reserved_tokens', 0, 'error', v_error)
             || (v_periods -> (budget.period || ' ' || budget.timezone))
             || coalesce(v_spends -> concat_ws('|', extract(epoch from (v_periods -> (budget.period || ' ' || budget.timezone) ->> 'starts_at')::timestamptz),
                                               budget.scope, budget.scope_id), '{}') order by budget.scope, budget.scope_id, budget.period, budget.id), '[]')
      from public.budgets as budget where budget.tenant_id = p_tenant_id and budget.active);
end
$$;
comment on function dispatcher.evaluate_budgets(uuid, jsonb, timestamptz) is
  'Every active budget with its period and spend; one aggregate per period, however many budgets there are and runs wait. A budget that cannot be evaluated carries its error.';

create or replace function dispatcher.tight_budgets(p_budgets jsonb, p_estimates jsonb, p_runs integer) returns jsonb
language sql immutable set search_path = ''
as $$
  select coalesce(jsonb_agg(b.value order by b.ordinality), '[]')
    from jsonb_array_elements(p_budgets) with ordinality as b
    cross join (select coalesce(max((estimate.value ->> 'usd')::numeric), 0) as usd, coalesce(max((estimate.value ->> 'tokens')::numeric), 0) as tokens
                  from jsonb_each(p_estimates) as estimate) as dearest
   where b.value ->> 'error' is not null
      or (b.value ->> 'settled_usd')::numeric + (b.value ->> 'reserved_usd')::numeric + p_runs * dearest.usd >= (b.value ->> 'cap_usd')::numeric
      or (b.value ->> 'settled_tokens')::numeric + (b.value ->> 'reserved_tokens')::numeric + p_runs * dearest.tokens >= (b.value ->> 'cap_tokens')::numeric
$$;
comment on function dispatcher.tight_budgets(jsonb, jsonb, integer) is
  'The evaluated budgets that so many runs of the dearest kind could fill: no other can have a say in a tick.';

create or replace function dispatcher.budget_states(p_budgets jsonb) returns table (
  id uuid, name text, scope text, scope_id text, period text, period_key text, action text, fail_closed boolean, error text,
  cap numeric, settled numeric, reserved numeric, is_usd boolean
)
language sql immutable set search_path = ''
as $$
  select b.id, b.name, b.scope, b.scope_id, b.period, b.period_key, b.action, b.fail_closed, b.error, coalesce(b.cap_usd, b.cap_tokens),
         case when b.cap_usd is not null then b.settled_usd else b.settled_tokens end,
         case when b.cap_usd is not null then b.reserved_usd else b.reserved_tokens end, b.cap_usd is not null
    from jsonb_to_recordset(p_budgets) as b (
      id uuid, name text, scope text, scope_id text, period text, period_key text, action text, fail_closed boolean, error text,
      cap_usd numeric, cap_tokens numeric, settled_usd numeric, settled_tokens numeric, reserved_usd numeric, reserved_tokens numeric)
$$;
comment on function dispatcher.budget_states(jsonb) is 'Evaluated budgets as rows, in the unit of their cap.';

create or replace function dispatcher.is_in_budget_scope(p_scope text, p_scope_id text, p_agent_id text, p_department_id text, p_workflow_type text) returns boolean
language sql immutable set search_path = ''
as $$
  select case p_scope when 'fleet' then true when 'agent' then p_scope_id = p_agent_id when 'department' then p_scope_id = p_department_id
                      else p_scope_id = p_workflow_type end is true
$$;
comment on function dispatcher.is_in_budget_scope(text, text, text, text, text) is 'The scope chain of a run: its agent, that agent''s department, its type as project, the fleet.';

create or replace function dispatcher.budget_verdict(
  p_budgets jsonb, p_agent_id text, p_department_id text, p_workflow_type text, p_usd numeric, p_tokens numeric,
  out verdict text, out holders uuid[], out warned integer
)
language sql immutable set search_path = ''
as $$
  with hit as (
    select b.id, b.action, b.error is not null as is_broken, b.fail_closed, b.settled >= b.cap as is_spent, b.settled + b.reserved >= b.cap as is_full,
           b.settled + b.reserved + case when b.is_usd then p_usd else p_tokens end > b.cap as is_too_much
      from dispatcher.budget_states(p_budgets) as b
     where case b.scope when 'fleet' then true when 'agent' then b.scope_id = p_agent_id when 'department' then b.scope_id = p_department_id
                        else b.scope_id = p_workflow_type end
  ), ranked as (
    select hit.id, case when is_broken then case when fail_closed then 2 else 0 end
                        when action = 'hard_stop' and is_spent then 3
                        when action <> 'warn' and (is_full or is_too_much) then 2
                        when is_full then 1 else 0 end as weight
      from hit
  )
  select (array['ok', 'ok', 'held', 'stopped'])[coalesce(max(weight), 0) + 1],
         coalesce(array_agg(ranked.id order by ranked.id) filter (where weight >= 2), '{}'),
         (count(*) filter (where weight = 1))::integer
    from ranked
$$;
comment on function dispatcher.budget_verdict(jsonb, text, text, text, numeric, numeric) is
  'May one more run start that is expected to cost this much: ok, held (a pause, a hard stop whose rest is reserved, or a broken fail_closed budget), or stopped (a hard stop that is spent). The strictest budget wins; holders are all that say no.';

create or replace function dispatcher.reserve_in_budgets(
  p_budgets jsonb, p_agent_id text, p_department_id text, p_workflow_type text, p_usd numeric, p_tokens numeric
) returns jsonb
language sql immutable set search_path = ''
as $$
  select coalesce(jsonb_agg(case when dispatcher.is_in_budget_scope(b.value ->> 'scope', b.value ->> 'scope_id', p_agent_id, p_department_id, p_workflow_type)
           then b.value || jsonb_build_object('reserved_usd', (b.value ->> 'reserved_usd')::numeric + p_usd,
                                              'reserved_tokens', (b.value ->> 'reserved_tokens')::numeric + p_tokens)
           else b.value end order by b.ordinality), '[]')
    from jsonb_array_elements(p_budgets) with ordinality as b
$$;
comment on function dispatcher.reserve_in_budgets(jsonb, text, text, text, numeric, numeric) is
  'The evaluated budgets after one more run was dispatched (or taken back: negative amounts).';

create or replace function dispatcher.budget_frame(p_budget jsonb, p_kind text) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object(
    'id', concat_ws(':', p_budget ->> 'id', p_budget ->> 'period_key', p_kind), 'budget_id', p_budget ->> 'id', 'budget_name', p_budget ->> 'name',
    'scope', p_budget ->> 'scope', 'scope_id', p_budget ->> 'scope_id', 'period', p_budget ->> 'period', 'period_key', p_budget ->> 'period_key',
    'event_kind', p_kind, 'action', p_budget ->> 'action',
    'spend_usd', (p_budget ->> 'settled_usd')::numeric + (p_budget ->> 'reserved_usd')::numeric,
    'spend_tokens', trunc((p_budget ->> 'settled_tokens')::numeric + (p_budget ->> 'reserved_tokens')::numeric),
    'cap_usd', p_budget -> 'cap_usd', 'cap_tokens', p_budget -> 'cap_tokens',
    'message', format('Budget %s (%s) %s', p_budget ->> 'name', p_budget ->> 'period_key',
      case p_kind when 'recovered' then 'has recovered: a new period began' when 'warned' then 'is over its cap'
                  when 'paused' then 'holds new runs' else 'has stopped its runs' end),
    'timestamp', to_char(now() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'))
$$;
comment on function dispatcher.budget_frame(jsonb, text) is 'What is broadcast of a budget event.';

create or replace function dispatcher.broadcast_budget_event(p_tenant_id uuid, p_frame jsonb) returns void
language plpgsql volatile security definer set search_path = ''
as $$
begin
  if to_regprocedure('realtime.send(jsonb,text,text,boolean)') is not null then
    execute 'select realtime.send($1, $2, $3, true)' using p_frame, 'budget:breach',
      case p_tenant_id when '00000000-0000-0000-0000-000000000000' then 'budgets' else 'budgets:' || p_tenant_id end;
  end if;
exception when others then
  -- The event stands in its table; dispatch goes on.
  null;
end
$$;
comment on function dispatcher.broadcast_budget_event(uuid, jsonb) is
  'Sends budget:breach to the private topic budgets (budgets:<tenant> for any but the default tenant). Never fails.';

create or replace function dispatcher.record_budget_event(p_tenant_id uuid, p_budget jsonb, p_kind text, p_detail jsonb) returns boolean
language plpgsql volatile set search_path = ''
as $$
declare
  v_frame constant jsonb := dispatcher.budget_frame(p_budget, p_kind);
  v_is_new boolean;
begin
  insert into public.budget_events (tenant_id, budget_id, period_key, event_kind, detail)
  values (p_tenant_id, (p_budget ->> 'id')::uuid, p_budget ->> 'period_key', p_kind,
          jsonb_build_object('spend_usd', v_frame -> 'spend_usd', 'spend_tokens', v_frame -> 'spend_tokens', 'cap_usd', v_frame -> 'cap_usd',
                             'cap_tokens', v_frame -> 'cap_tokens', 'action', v_frame -> 'action') || p_detail)
  on conflict on constraint budget_events_once do nothing;
  v_is_new := found;
  if v_is_new and p_kind <> 'warned' then
    perform dispatcher.broadcast_budget_event(p_tenant_id, v_frame);
  elsif not v_is_new and p_kind = 'hard_stopped' and jsonb_array_length(p_detail -> 'cancelled_run_ids') > 0 then
    update public.budget_events as event
       set detail = jsonb_set(event.detail, '{cancelled_run_ids}', coalesce(event.detail -> 'cancelled_run_ids', '[]') || (p_detail -> 'cancelled_run_ids'))
     where event.budget_id = (p_budget ->> 'id')::uuid and event.period_key = p_budget ->> 'period_key' and event.event_kind = p_kind;
  end if;
  return v_is_new;
end
$$;
comment on function dispatcher.record_budget_event(uuid, jsonb, text, jsonb) is
  'Writes a budget event once per budget, period and kind, and broadcasts it once unless it is a warning. Runs a hard stop cancels later join the ids of its one event. True when it is new.';

create or replace function dispatcher.record_budget_recoveries(p_tenant_id uuid, p_budgets jsonb) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_budget jsonb;
  v_count integer := 0;
begin
  for v_budget in
    select b.value from jsonb_array_elements(p_budgets) as b
      cross join lateral (
        select max(event.id) filter (where event.event_kind <> 'recovered' and event.period_key <> b.value ->> 'period_key') as breach,
               max(event.id) filter (where event.event_kind = 'recovered') as recovery
          from public.budget_events as event where event.budget_id = (b.value ->> 'id')::uuid) as history
     where b.value ->> 'period_key' is not null and history.breach > coalesce(history.recovery, 0)
  loop
    v_count := v_count + dispatcher.record_budget_event(p_tenant_id, v_budget, 'recovered', '{}')::integer;
  end loop;
  return v_count;
end
$$;
comment on function dispatcher.record_budget_recoveries(uuid, jsonb) is
  'The first evaluation in a new period writes recovered for every budget that had a breach in an earlier one since its last recovery.';

create or replace function dispatcher.stop_runs_of_budget(p_tenant_id uuid, p_budget jsonb) returns uuid[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_run public.workflow_runs;
  v_stopped uuid[] := '{}';
  v_error constant text := format('Budget hard stop: %s (%s)', p_budget ->> 'name', p_budget ->> 'period_key');
begin
  perform dispatcher.note_workflow_actor('dispatcher', v_error);
  for v_run in
    select run.* from public.workflow_runs as run
      left join public.workflow_agent_routing as route on route.tenant_id = run.tenant_id and route.workflow_type = run.workflow_type
      left join public.agent_profiles as profile on profile.tenant_id = run.tenant_id
        and profile.agent_id = case run.status when 'queued' then coalesce(run.pinned_agent_id, route.agent_id) else run.owner_agent_id end
     where run.tenant_id = p_tenant_id and run.status in ('queued', 'dispatched', 'claimed', 'running')
       -- What is kept back for later belongs to the budget of its day.
       and (run.status <> 'queued' or run.next_attempt_at is null or run.next_attempt_at <= now())
       and dispatcher.is_in_budget_scope(p_budget ->> 'scope', p_budget ->> 'scope_id',
             case run.status when 'queued' then coalesce(run.pinned_agent_id, route.agent_id) else run.owner_agent_id end, profile.department_id, run.workflow_type)
     order by run.created_at, run.id
     for update of run skip locked
  loop
    begin
      perform dispatcher.stop_workflow_run(v_run, v_error);
      v_stopped := v_stopped || v_run.id;
    exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
      raise;
    when others then
      raise warning 'run % could not be stopped: %', v_run.id, sqlerrm;
    end;
  end loop;
  return v_stopped;
end
$$;
comment on function dispatcher.stop_runs_of_budget(uuid, jsonb) is 'Cancels every run in the scope of a spent hard stop that is queued and due, dispatched, claimed or running, all at once; answers their ids.';

create or replace function dispatcher.tell_budget_event(p_tenant_id uuid, p_budget jsonb, p_kind text, p_detail jsonb) returns text
language plpgsql volatile set search_path = ''
as $$
begin
  perform dispatcher.record_budget_event(p_tenant_id, p_budget, p_kind, p_detail);
  return null;
exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
  raise;
when others then
  return format('%s (%s)', sqlerrm, sqlstate);
end
$$;
comment on function dispatcher.tell_budget_event(uuid, jsonb, text, jsonb) is
  'Records an event of a budget; the error when it cannot be, because a budget does its work whether or not that can be written down.';

create or replace function dispatcher.enforce_budgets(
  p_tenant_id uuid, p_budgets jsonb, p_estimates jsonb, out stopped integer, out budgets jsonb, out event_error text
)
language plpgsql volatile set search_path = ''
as $$
declare
  v_budget record;
  v_ids uuid[];
begin
  stopped := 0;
  budgets := p_budgets;
  begin
    perform dispatcher.record_budget_recoveries(p_tenant_id, p_budgets);
  exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
    raise;
  when others then
    event_error := format('%s (%s)', sqlerrm, sqlstate);
  end;
  for v_budget in
    select b.value
      from dispatcher.budget_states(p_budgets) as state
      join jsonb_array_elements(p_budgets) as b on (b.value ->> 'id')::uuid = state.id
     where state.error is null and state.action = 'hard_stop' and state.settled >= state.cap
     order by state.id
  loop
    v_ids := dispatcher.stop_runs_of_budget(p_tenant_id, v_budget.value);
    event_error := coalesce(dispatcher.tell_budget_event(p_tenant_id, v_budget.value, 'hard_stopped', jsonb_build_object('cancelled_run_ids', to_jsonb(v_ids))),
                            event_error);
    stopped := stopped + cardinality(v_ids);
  end loop;
  if stopped > 0 then
    -- What was stopped reserves nothing any more, and that may have been what filled another budget.
    budgets := dispatcher.evaluate_budgets(p_tenant_id, p_estimates);
  end if;
  for v_budget in
    select b.value, state.action
      from dispatcher.budget_states(budgets) as state
      join jsonb_array_elements(budgets) as b on (b.value ->> 'id')::uuid = state.id
     where state.error is null and state.action <> 'hard_stop' and state.settled + state.reserved >= state.cap
     order by state.id
  loop
    event_error := coalesce(dispatcher.tell_budget_event(p_tenant_id, v_budget.value, case v_budget.action when 'warn' then 'warned' else 'paused' end, '{}'),
                            event_error);
  end loop;
end
$$;
comment on function dispatcher.enforce_budgets(uuid, jsonb, jsonb) is
  'What follows from evaluated budgets whatever is queued: recoveries, hard stops, one event per breach. Answers how many runs were stopped, and the budgets as they stand after that.';

create or replace function public.set_budget(
  p_tenant_id uuid, p_name text, p_scope text, p_scope_id text, p_period text, p_cap_usd numeric, p_cap_tokens bigint, p_action text,
  p_timezone text default 'UTC', p_fail_closed boolean default false, p_budget_id uuid default null
) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_faults text[] := '{}';
  v_budget jsonb;
  v_id uuid;
begin
  if coalesce(btrim(p_name), '') = '' then v_faults := v_faults || 'name: empty'::text; end if;
  if p_scope is null or p_scope not in ('agent', 'department', 'project', 'fleet') then v_faults := v_faults || 'scope: none of agent, department, project, fleet'::text; end if;
  if (p_scope = 'fleet') <> (coalesce(p_scope_id, '') = '') then v_faults := v_faults || 'scope_id: needed for every scope but fleet, and only there'::text; end if;
  if p_period is null or p_period not in ('daily', 'weekly', 'monthly') then v_faults := v_faults || 'period: none of daily, weekly, monthly'::text; end if;
  if num_nonnulls(p_cap_usd, p_cap_tokens) <> 1 then v_faults := v_faults || 'cap: exactly one of cap_usd and cap_tokens'::text; end if;
  if p_cap_usd < 0 or p_cap_usd = 'NaN' or p_cap_usd >= 100000000 then v_faults := v_faults || 'cap_usd: outside 0 to 99999999'::text; end if;
  if p_cap_tokens < 0 then v_faults := v_faults || 'cap_tokens: below 0'::text; end if;
  if p_action is null or p_action not in ('warn', 'pause_new_runs', 'hard_stop') then v_faults := v_faults || 'action: none of warn, pause_new_runs, hard_stop'::text; end if;
  begin
    perform now() at time zone coalesce(p_timezone, 'UTC');
  exception when invalid_parameter_value then
    v_faults := v_faults || 'timezone: not a known zone'::text;
  end;
  if cardinality(v_faults) > 0 then
    return jsonb_build_object('applied', false, 'code', 'invalid', 'faults', to_jsonb(v_faults));
  end if;
  begin
    if p_budget_id is null then
      select id into v_id from public.budgets
       where tenant_id = p_tenant_id and active and scope = p_scope and coalesce(scope_id, '') = coalesce(p_scope_id, '') and period = p_period for update;
    else
      select id into v_id from public.budgets where tenant_id = p_tenant_id and id = p_budget_id for update;
      if v_id is null then
        return jsonb_build_object('applied', false, 'code', 'not_found', 'budget_id', p_budget_id);
      end if;
    end if;
    if v_id is null then
      insert into public.budgets (tenant_id, name, scope, scope_id, period, timezone, cap_usd, cap_tokens, action_on_exceed, fail_closed)
      values (p_tenant_id, btrim(p_name), p_scope, nullif(p_scope_id, ''), p_period, coalesce(p_timezone, 'UTC'), p_cap_usd, p_cap_tokens, p_action, coalesce(p_fail_closed, false))
      returning id into v_id;
    else
      update public.budgets
         set name = btrim(p_name), scope = p_scope, scope_id = nullif(p_scope_id, ''), period = p_period, timezone = coalesce(p_timezone, 'UTC'), cap_usd = p_cap_usd,
             cap_tokens = p_cap_tokens, action_on_exceed = p_action, fail_closed = coalesce(p_fail_closed, false), active = true, updated_at = now()
       where id = v_id;
    end if;
  exception when unique_violation then
    return jsonb_build_object('applied', false, 'code', 'exists', 'faults', jsonb_build_array('another active budget has this scope and period'));
  end;
  select to_jsonb(budget) - 'tenant_id' into v_budget from public.budgets as budget where budget.id = v_id;
  return jsonb_build_object('applied', true, 'code', 'ok', 'budget', v_budget);
end
$$;
comment on function public.set_budget(uuid, text, text, text, text, numeric, bigint, text, text, boolean, uuid) is
  'Makes the active budget of a scope and period what is given (or the budget p_budget_id). Answers {applied, code: ok | invalid | exists | not_found, budget | faults}, every fault named.';

create or replace function public.deactivate_budget(p_tenant_id uuid, p_budget text) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_active jsonb;
  v_known boolean;
begin
  with named as (
    select budget.* from public.budgets as budget where budget.tenant_id = p_tenant_id and p_budget in (budget.id::text, budget.name)
  )
  select coalesce(jsonb_agg(jsonb_build_object('id', named.id, 'name', named.name, 'scope', named.scope, 'scope_id', named.scope_id, 'period', named.period)
                            order by named.created_at, named.id) filter (where named.active), '[]'), count(*) > 0
    into v_active, v_known
    from named
   where named.id::text = p_budget or not exists (select from named as same where same.id::text = p_budget); -- what is an id is no name
  if jsonb_array_length(v_active) > 1 then
    return jsonb_build_object('applied', false, 'code', 'ambiguous', 'budget', p_budget, 'budgets', v_active);
  end if;
  update public.budgets set active = false, updated_at = now() where tenant_id = p_tenant_id and id = (v_active -> 0 ->> 'id')::uuid and active;
  return jsonb_build_object('applied', v_known, 'code', case when found then 'ok' when v_known then 'already' else 'not_found' end,
                            'budget', p_budget, 'budgets', v_active);
end
$$;
comment on function public.deactivate_budget(uuid, text) is
  'Ends the one active budget of an id or name: what it held goes out with the next tick. Answers {applied, code: ok | already | ambiguous | not_found, budget, budgets}; budgets: what was ended, or the several of that name.';

create or replace function public.list_budgets(p_tenant_id uuid, p_default_usd numeric default null) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object('code', 'ok', 'budgets', coalesce(jsonb_agg(
           (to_jsonb(budget) - 'tenant_id') || coalesce(evaluated.value - array['id', 'name', 'scope', 'scope_id', 'period', 'action', 'fail_closed', 'cap_usd', 'cap_tokens'], '{}')
           || jsonb_build_object('events', (select coalesce(jsonb_agg(event.event_kind order by event.id), '[]') from public.budget_events as event
                                             where event.budget_id = budget.id and event.period_key = evaluated.value ->> 'period_key'))
           order by budget.active desc, budget.scope, budget.scope_id, budget.period, budget.created_at), '[]'))
    from public.budgets as budget
    left join jsonb_array_elements(dispatcher.evaluate_budgets(p_tenant_id, dispatcher.workflow_estimates(p_tenant_id, p_default_usd))) as evaluated
      on (evaluated.value ->> 'id')::uuid = budget.id
   where budget.tenant_id = p_tenant_id
$$;
comment on function public.list_budgets(uuid, numeric) is 'All budgets; the active ones with period, settled and reserved spend, and this period''s events.';

create or replace function public.budget_ledger(p_tenant_id uuid, p_limit integer default 50) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object('code', 'ok', 'events', coalesce(jsonb_agg(jsonb_build_object('at', event.created_at, 'budget_id', event.budget_id, 'budget', budget.name,
           'scope', budget.scope, 'scope_id', budget.scope_id, 'period_key', event.period_key, 'event_kind', event.event_kind, 'detail', event.detail) order by event.id desc), '[]'))
    from (select * from public.budget_events where tenant_id = p_tenant_id order by id desc limit least(greatest(p_limit, 1), 1000)) as event
    join public.budgets as budget on budget.id = event.budget_id
$$;
comment on function public.budget_ledger(uuid, integer) is 'The latest budget events, newest first, with their budgets.';

do $$
begin
  -- Signed-in people of the tenant may listen to their budgets; the service role may anyway.
  if to_regclass('realtime.messages') is not null then
    execute 'drop policy if exists dispatcher_budget_topic on realtime.messages';
    execute $policy$
      create policy dispatcher_budget_topic on realtime.messages for select to authenticated
      using (realtime.topic() = case public.current_tenant_id() when '00000000-0000-0000-0000-000000000000' then 'budgets'
                                                                else 'budgets:' || public.current_tenant_id()::text end)
    $policy$;
  end if;
exception when others then
  raise notice 'no policy for the budgets topic: %', sqlerrm;
end
$$;

select dispatcher.restrict_functions(array[
  'set_budget', 'deactivate_budget', 'list_budgets', 'budget_ledger'
]);

notify pgrst, 'reload schema';
commit;
