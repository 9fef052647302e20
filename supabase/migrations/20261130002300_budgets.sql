-- Budgets of workflow runs: what was spent and what is reserved, who may still start, and what is told when it is too
-- much.
-- Nothing here names a budget table outside a function body: a database that has lost them dispatches on, loudly.
begin;
set local lock_timeout = '3s';

select dispatcher.ensure_type('evaluated_budget',
    'id uuid, name text, scope text, scope_id text, period text, period_key text, '
  'starts_at timestamp with time zone, ends_at timestamp with time zone, action text, fail_closed boolean, cap_usd '
  'numeric, '
  'cap_tokens numeric, settled_usd numeric, settled_tokens numeric, reserved_usd numeric, reserved_tokens numeric, '
  'error text, revision integer');
comment on type dispatcher.evaluated_budget is
  'An active budget in its running period: what is settled in it and what active runs reserve. error: why it cannot '
  'be evaluated.';

create or replace function dispatcher.earliest_instant(p_local timestamp, p_timezone text) returns timestamptz
language sql stable set search_path = ''
as $$
  -- Where clocks go back over it, a local time comes twice (or a whole day does): the first one counts.
  select (p_local at time zone p_timezone) - coalesce(max(back.step), interval '0')
    from unnest(array['20 minutes', '30 minutes', '1 hour', '90 minutes', '2 hours', '24 hours']::interval[])
      as back (step)
   where ((p_local at time zone p_timezone) - back.step) at time zone p_timezone >= p_local
$$;
comment on function dispatcher.earliest_instant(timestamp, text) is 'The first instant of a local time in a zone.';

create or replace function dispatcher.workflow_period(
  p_period text, p_timezone text, p_now timestamptz, out period_key text, out starts_at timestamptz,
      out ends_at timestamptz
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
      ends_at := dispatcher.earliest_instant(v_start + interval '1 day', p_timezone);
    when 'weekly' then
      v_start := date_trunc('week', v_local);
      period_key := to_char(v_start, 'IYYY"-W"IW');
      ends_at := dispatcher.earliest_instant(v_start + interval '7 days', p_timezone);
    when 'monthly' then
      v_start := date_trunc('month', v_local);
      period_key := to_char(v_start, 'YYYY-MM');
      ends_at := dispatcher.earliest_instant(v_start + interval '1 month', p_timezone);
    else
      raise exception 'unknown period %', p_period using errcode = 'OD011';
  end case;
  starts_at := least(dispatcher.earliest_instant(v_start, p_timezone), p_now);
end
$$;
comment on function dispatcher.workflow_period(text, text, timestamptz) is
  'The period a moment falls into in a zone: its key (2026-11-30, 2026-W49, 2026-11), the earliest instants of its '
  'first local date and of the date after its last. It never starts after p_now. Raises for an unknown zone.';

create or replace function dispatcher.queued_types(p_tenant_id uuid) returns table (workflow_type text)
language sql stable set search_path = ''
as $$
  -- From one type to the next in the index, however long the queue of each is.
  with recursive found as (
    (select run.workflow_type from public.workflow_runs as run
      where run.tenant_id = p_tenant_id and run.status = 'queued' order by run.workflow_type limit 1)
    union all
    select (select run.workflow_type from public.workflow_runs as run
             where run.tenant_id = p_tenant_id and run.status = 'queued' and run.workflow_type > found.workflow_type
             order by run.workflow_type limit 1)
      from found where found.workflow_type is not null)
  select found.workflow_type from found where found.workflow_type is not null
$$;
comment on function dispatcher.queued_types(uuid) is 'The workflow types that have queued runs.';

create or replace function dispatcher.estimates_of_types(p_tenant_id uuid, p_types text[]) returns table (
  workflow_type text, usd numeric, usd_reports bigint, tokens bigint, tokens_reports bigint
)
language sql stable set search_path = ''
as $$
  -- A reported zero is a zero for its run, and no estimate for others.
  select types.workflow_type, coalesce(cost.usd, configured.usd), cost.reports,
         coalesce(used.tokens, configured.tokens), used.reports
    from unnest(p_types) as types (workflow_type)
    cross join dispatcher.configured_estimates(p_tenant_id) as configured
    cross join lateral (
      select round((percentile_cont(0.5) within group (order by recent.cost))::numeric, 6) as usd, count(*) as reports
        from (select run.cost_estimate::double precision as cost from public.workflow_runs as run
               where run.tenant_id = p_tenant_id and run.workflow_type = types.workflow_type
                 and run.reported_at is not null and run.finished_at is not null
                 and run.cost_estimate > 0 and run.cost_estimate < 'Infinity'
               order by run.reported_at desc limit 20) as recent) as cost
    cross join lateral (
      select round(percentile_cont(0.5) within group (order by least(recent.tokens, 1e15)))::bigint as tokens,
             count(*) as reports
        from (select dispatcher.known_tokens(run.input_tokens, run.output_tokens)::double precision as tokens
                from public.workflow_runs as run
               where run.tenant_id = p_tenant_id and run.workflow_type = types.workflow_type
                 and run.reported_at is not null and run.finished_at is not null
                 and greatest(run.input_tokens, run.output_tokens) > 0
               order by run.reported_at desc limit 20) as recent
       where recent.tokens is not null) as used
$$;
comment on function dispatcher.estimates_of_types(uuid, text[]) is
  'What a run of each type is expected to cost, in USD and in tokens: the median of its last 20 reports above zero, '
  'and of how many; what is configured where there is none (0 reports).';

create or replace function dispatcher.estimate_of_type(p_tenant_id uuid, p_workflow_type text, out usd numeric,
    out tokens bigint)
language sql stable set search_path = ''
as $$ select usd, tokens from dispatcher.estimates_of_types(p_tenant_id, array[p_workflow_type]) $$;
comment on function dispatcher.estimate_of_type(uuid, text) is 'What a run of one type is expected to cost.';

drop function if exists dispatcher.workflow_estimates(uuid, numeric);
create or replace function dispatcher.workflow_estimates(p_tenant_id uuid) returns jsonb
language sql stable set search_path = ''
as $$
  with types as (
    select workflow_type from public.workflow_agent_routing where tenant_id = p_tenant_id
    union
    select queued.workflow_type from dispatcher.queued_types(p_tenant_id) as queued
    union
    select workflow_type from public.workflow_runs where tenant_id = p_tenant_id
        and status in ('dispatched', 'claimed', 'running')
  )
  select coalesce(jsonb_object_agg(estimate.workflow_type, to_jsonb(estimate) - 'workflow_type'), '{}')
         || jsonb_build_object('', (select jsonb_build_object('usd', usd, 'usd_reports', 0, 'tokens', tokens,
             'tokens_reports', 0) from dispatcher.configured_estimates(p_tenant_id)))
    from dispatcher.estimates_of_types(p_tenant_id, array(select workflow_type from types)) as estimate
$$;
comment on function dispatcher.workflow_estimates(uuid) is
  'What a run of each type is expected to cost: {type: {usd, usd_reports, tokens, tokens_reports}}, the median of so '
  'many reports, or what is configured (0 reports); under "" what is configured.';

create or replace function dispatcher.workflow_estimate(p_estimates jsonb, p_workflow_type text, p_what text)
    returns numeric
language sql immutable set search_path = ''
as $$ select coalesce((p_estimates -> p_workflow_type ->> p_what)::numeric, (p_estimates -> '' ->> p_what)::numeric,
    0) $$;
comment on function dispatcher.workflow_estimate(jsonb, text, text) is
  'The estimate (usd or tokens) for a type out of workflow_estimates.';

drop function if exists dispatcher.workflow_spend(uuid, timestamptz[], jsonb);
create or replace function dispatcher.workflow_spend(p_tenant_id uuid, p_starts timestamptz[]) returns table (
  starts_at timestamptz, scope text, scope_id text, settled_usd numeric, settled_tokens numeric, reserved_usd numeric,
      reserved_tokens numeric
)
language sql stable set search_path = '' set work_mem = '32MB'
as $$
  -- The books are read once: each booking falls behind the last of the moments it is not before. With the usual
  -- work_mem they would be sorted on disk for that.
  with booked as (
    select width_bucket(booking.at, p_starts) as place, booking.agent_id, booking.workflow_type,
           sum(booking.cost_usd) as usd, sum(booking.tokens) as tokens
      from public.workflow_bookings as booking
     where booking.tenant_id = p_tenant_id and booking.at >= p_starts[1]
     group by 1, 2, 3
  ), spent as (
    select period.starts_at, booked.agent_id, booked.workflow_type, booked.usd as settled_usd,
           booked.tokens as settled_tokens, 0::numeric as reserved_usd, 0::numeric as reserved_tokens
      from unnest(p_starts) with ordinality as period (starts_at, place)
      join booked on booked.place >= period.place
    union all
    -- What an open run has not reported of its reservation belongs to every running period: it will be booked in it. A
    -- held run is open: what it reserves must be there when it goes on.
    select period.starts_at, open.agent_id, open.workflow_type, 0, 0, open.usd, open.tokens
      from unnest(p_starts) as period (starts_at)
      cross join (
        select run.owner_agent_id as agent_id, run.workflow_type,
               sum(greatest(coalesce(dispatcher.known_cost(run.reserved_usd), 0) - dispatcher.booked_usd(run),
                            0)) as usd,
               sum(greatest(coalesce(run.reserved_tokens, 0) - dispatcher.booked_tokens(run), 0)) as tokens
          from public.workflow_runs as run
         where run.tenant_id = p_tenant_id and (run.status in ('dispatched', 'claimed', 'running')
             or run.paused_from in ('dispatched', 'claimed', 'running'))
         group by run.owner_agent_id, run.workflow_type) as open
  )
  select spent.starts_at,
         case when grouping(spent.agent_id) = 0 then 'agent' when grouping(profile.department_id) = 0 then 'department'
              when grouping(spent.workflow_type) = 0 then 'project' else 'fleet' end,
         case when grouping(spent.agent_id) = 0 then spent.agent_id when grouping(profile.department_id) = 0
             then profile.department_id
              when grouping(spent.workflow_type) = 0 then spent.workflow_type end,
         sum(spent.settled_usd), sum(spent.settled_tokens), sum(spent.reserved_usd), sum(spent.reserved_tokens)
    from spent
    left join public.agent_profiles as profile on profile.tenant_id = p_tenant_id and profile.agent_id = spent.agent_id
   group by grouping sets ((spent.starts_at, spent.agent_id), (spent.starts_at, profile.department_id),
                           (spent.starts_at, spent.workflow_type), (spent.starts_at))
$$;
comment on function dispatcher.workflow_spend(uuid, timestamptz[]) is
  'What is booked for every agent, department, project and the fleet since each of the given moments (each once, in '
  'their order), and what their '
  'open runs reserve beyond that: one pass over the books, whatever the number of budgets and periods.';

create or replace function dispatcher.budget_periods(p_tenant_id uuid, p_now timestamptz) returns table (
  period text, timezone text, period_key text, starts_at timestamptz, ends_at timestamptz, error text
)
language plpgsql stable set search_path = ''
as $$
begin
  for period, timezone in
    select distinct budget.period, budget.timezone from public.budgets as budget where budget.tenant_id = p_tenant_id
        and budget.active
  loop
    begin
      error := null;
      select running.period_key, running.starts_at, running.ends_at into period_key, starts_at, ends_at
        from dispatcher.workflow_period(period, timezone, p_now) as running;
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      period_key := null; starts_at := null; ends_at := null;
      error := format('%s (%s)', sqlerrm, sqlstate);
    end;
    return next;
  end loop;
end
$$;
comment on function dispatcher.budget_periods(uuid, timestamptz) is
  'The running period of every kind the tenant''s active budgets have; for a zone that is none, the error.';

create or replace function dispatcher.unspent_budgets(p_tenant_id uuid, p_action text, p_now timestamptz)
    returns dispatcher.evaluated_budget[]
language sql stable set search_path = ''
as $$
  select coalesce(array_agg(row(
           budget.id, budget.name, budget.scope, budget.scope_id, budget.period, running.period_key, running.starts_at,
               running.ends_at,
           budget.action_on_exceed, budget.fail_closed, budget.cap_usd, budget.cap_tokens, 0, 0, 0, 0, running.error,
               budget.revision
         )::dispatcher.evaluated_budget order by budget.scope, budget.scope_id, budget.period, budget.id), '{}')
    from public.budgets as budget
    left join dispatcher.budget_periods(p_tenant_id, p_now) as running on running.period = budget.period
        and running.timezone = budget.timezone
   where budget.tenant_id = p_tenant_id and budget.active and (p_action is null or budget.action_on_exceed = p_action)
$$;
comment on function dispatcher.unspent_budgets(uuid, text, timestamptz) is
  'The tenant''s active budgets (of one action, or all) with their running periods, as if nothing were spent.';

drop function if exists dispatcher.with_spend(uuid, dispatcher.evaluated_budget[], jsonb);
create or replace function dispatcher.with_spend(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[])
returns dispatcher.evaluated_budget[]
language sql stable set search_path = ''
as $$
  select coalesce(array_agg(row(
           budget.id, budget.name, budget.scope, budget.scope_id, budget.period, budget.period_key, budget.starts_at,
               budget.ends_at,
           budget.action, budget.fail_closed, budget.cap_usd, budget.cap_tokens, coalesce(spend.settled_usd, 0),
           coalesce(spend.settled_tokens, 0), coalesce(spend.reserved_usd, 0), coalesce(spend.reserved_tokens, 0),
               budget.error, budget.revision
         )::dispatcher.evaluated_budget order by budget.scope, budget.scope_id, budget.period, budget.id), '{}')
    from unnest(p_budgets) as budget
    left join dispatcher.workflow_spend(
           p_tenant_id, array(select distinct one.starts_at from unnest(p_budgets) as one
               where one.starts_at is not null order by one.starts_at)) as spend
      on spend.starts_at = budget.starts_at and spend.scope = budget.scope
          and coalesce(spend.scope_id, '') = coalesce(budget.scope_id, '')
$$;
comment on function dispatcher.with_spend(uuid, dispatcher.evaluated_budget[]) is
  'Budgets with what their periods have spent and reserved.';

create or replace function dispatcher.with_error(p_budgets dispatcher.evaluated_budget[], p_error text)
    returns dispatcher.evaluated_budget[]
language plpgsql immutable set search_path = ''
as $$
begin
  for v_place in 1 .. cardinality(p_budgets) loop
    p_budgets[v_place].error := coalesce(p_budgets[v_place].error, p_error);
  end loop;
  return p_budgets;
end
$$;
comment on function dispatcher.with_error(dispatcher.evaluated_budget[], text) is
  'Budgets that cannot be evaluated, each with the error: those that are fail_closed hold.';

drop function if exists dispatcher.evaluate_budgets(uuid, jsonb, text, timestamptz);
create or replace function dispatcher.evaluate_budgets(
  p_tenant_id uuid, p_action text default null, p_now timestamptz default now()
) returns dispatcher.evaluated_budget[]
language plpgsql stable set search_path = ''
as $$
declare
  v_budgets constant dispatcher.evaluated_budget[] := dispatcher.unspent_budgets(p_tenant_id, p_action, p_now);
begin
  if cardinality(v_budgets) = 0 then
    return v_budgets;
  end if;
  return dispatcher.with_spend(p_tenant_id, v_budgets);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  -- What the budgets are is known by now, or this raises in its turn.
  return dispatcher.with_error(dispatcher.unspent_budgets(p_tenant_id, p_action, p_now),
      format('%s (%s)', sqlerrm, sqlstate));
end
$$;
comment on function dispatcher.evaluate_budgets(uuid, text, timestamptz) is
  'Every active budget (of one action, or all) with its period and spend; one pass over the books, however many '
  'budgets there are and runs wait. A budget that cannot be evaluated carries its error.';

create or replace function dispatcher.tight_budgets(p_budgets dispatcher.evaluated_budget[], p_estimates jsonb,
    p_runs integer)
returns dispatcher.evaluated_budget[]
language sql immutable set search_path = ''
as $$
  select coalesce(array_agg(row(b.*)::dispatcher.evaluated_budget order by b.scope, b.scope_id, b.period, b.id), '{}')
    from unnest(p_budgets) as b
    cross join (select coalesce(max((estimate.value ->> 'usd')::numeric), 0) as usd,
                       coalesce(max((estimate.value ->> 'tokens')::numeric), 0) as tokens
                  from jsonb_each(p_estimates) as estimate) as dearest
   where b.error is not null
      or b.settled_usd + b.reserved_usd + p_runs * dearest.usd >= b.cap_usd
      or b.settled_tokens + b.reserved_tokens + p_runs * dearest.tokens >= b.cap_tokens
$$;
comment on function dispatcher.tight_budgets(dispatcher.evaluated_budget[], jsonb, integer) is
  'The evaluated budgets that so many runs of the dearest kind could fill: no other can have a say in a pass.';

create or replace function dispatcher.spent_of(p_budget dispatcher.evaluated_budget, p_with_reserved boolean)
    returns numeric
language sql immutable set search_path = ''
as $$
  select case when p_budget.cap_usd is not null then p_budget.settled_usd + case when p_with_reserved
      then p_budget.reserved_usd else 0 end
              else p_budget.settled_tokens + case when p_with_reserved then p_budget.reserved_tokens else 0 end end
$$;
comment on function dispatcher.spent_of(dispatcher.evaluated_budget, boolean) is
  'What a budget has spent, with or without what is reserved, in the unit of its cap.';

create or replace function dispatcher.cap_of(p_budget dispatcher.evaluated_budget) returns numeric
language sql immutable set search_path = ''
as $$ select coalesce(p_budget.cap_usd, p_budget.cap_tokens) $$;
comment on function dispatcher.cap_of(dispatcher.evaluated_budget) is 'The cap of a budget, in USD or in tokens.';

create or replace function dispatcher.is_in_budget_scope(
  p_scope text, p_scope_id text, p_agent_id text, p_department_id text, p_workflow_type text
) returns boolean
language sql immutable set search_path = ''
as $$
  select case p_scope when 'fleet' then true when 'agent' then p_scope_id = p_agent_id when 'department'
      then p_scope_id = p_department_id
                      else p_scope_id = p_workflow_type end is true
$$;
comment on function dispatcher.is_in_budget_scope(text, text, text, text, text) is
  'The scope chain of a run: its agent, that agent''s department, its type as project, the fleet.';

create or replace function dispatcher.budget_verdict(
  p_budgets dispatcher.evaluated_budget[], p_agent_id text, p_department_id text, p_workflow_type text, p_usd numeric,
      p_tokens numeric,
  out verdict text, out holders uuid[], out warned integer, out reason text
)
language sql immutable set search_path = ''
as $$
  with hit as (
    select b.id, b.action, b.error is not null as is_broken, b.fail_closed,
           case when b.cap_usd is not null then b.settled_usd else b.settled_tokens end as settled,
           case when b.cap_usd is not null then b.reserved_usd else b.reserved_tokens end as reserved,
           case when b.cap_usd is not null then p_usd else p_tokens end as one_more,
               coalesce(b.cap_usd, b.cap_tokens) as cap
      from unnest(p_budgets) as b
     where case b.scope when 'fleet' then true when 'agent' then b.scope_id = p_agent_id when 'department'
         then b.scope_id = p_department_id
                        else b.scope_id = p_workflow_type end
  ), ranked as (
    select hit.id, case when is_broken then case when fail_closed then 2 else 0 end
                        when action = 'hard_stop' and settled >= cap then 3
                        when action <> 'warn' and settled + reserved >= cap then 2
                        -- An empty budget lets one run go, however dear: else it would wait in every period.
                        when action <> 'warn' and settled + reserved + one_more > cap and settled + reserved > 0 then 2
                        when settled + reserved >= cap then 1 else 0 end as weight,
           not is_broken and one_more > cap as is_too_dear
      from hit
  )
  select (array['ok', 'ok', 'held', 'stopped'])[coalesce(max(weight), 0) + 1],
         coalesce(array_agg(ranked.id order by ranked.id) filter (where weight >= 2), '{}'),
         (count(*) filter (where weight = 1))::integer,
         case when bool_or(is_too_dear) filter (where weight >= 2) then 'estimate_over_cap'
              when max(weight) >= 2 then 'budget' end
    from ranked
$$;
comment on function dispatcher.budget_verdict(dispatcher.evaluated_budget[], text, text, text, numeric, numeric) is
  'May one more run start that is expected to cost this much: ok (also the first in a budget of which nothing is spent '
  'or reserved), held (a pause, a hard stop whose rest is reserved, '
  'or a broken fail_closed budget), or stopped (a hard stop that is spent). The strictest budget wins; holders are '
  'all that say no. reason: estimate_over_cap where one of them would hold the run whatever else was spent, else '
  'budget.';

create or replace function dispatcher.reserve_in_budgets(
  p_budgets dispatcher.evaluated_budget[], p_agent_id text, p_department_id text, p_workflow_type text, p_usd numeric,
      p_tokens numeric
) returns dispatcher.evaluated_budget[]
language plpgsql immutable set search_path = ''
as $$
begin
  for v_place in 1 .. cardinality(p_budgets) loop
    if dispatcher.is_in_budget_scope(p_budgets[v_place].scope, p_budgets[v_place].scope_id, p_agent_id,
        p_department_id, p_workflow_type) then
      p_budgets[v_place].reserved_usd := p_budgets[v_place].reserved_usd + p_usd;
      p_budgets[v_place].reserved_tokens := p_budgets[v_place].reserved_tokens + p_tokens;
    end if;
  end loop;
  return p_budgets;
end
$$;
comment on function dispatcher.reserve_in_budgets(dispatcher.evaluated_budget[], text, text, text, numeric, numeric) is
  'The evaluated budgets after one more run was dispatched (or taken back: negative amounts).';

create or replace function dispatcher.budget_frame(p_budget dispatcher.evaluated_budget, p_kind text) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object(
    'id', concat_ws(':', p_budget.id, p_budget.period_key, p_kind), 'budget_id', p_budget.id, 'budget_name',
        p_budget.name,
    'scope', p_budget.scope, 'scope_id', p_budget.scope_id, 'period', p_budget.period, 'period_key',
        p_budget.period_key,
    'event_kind', p_kind, 'action', p_budget.action, 'spend_usd', p_budget.settled_usd + p_budget.reserved_usd,
    'spend_tokens', trunc(p_budget.settled_tokens + p_budget.reserved_tokens), 'cap_usd', p_budget.cap_usd,
        'cap_tokens', p_budget.cap_tokens,
    'message', format('Budget %s (%s) %s', p_budget.name, p_budget.period_key,
      case p_kind when 'recovered' then 'has recovered: a new period began' when 'warned' then 'is over its cap'
                  when 'paused' then 'holds new runs' else 'has stopped its runs' end),
    'timestamp', to_char(now() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'))
$$;
comment on function dispatcher.budget_frame(dispatcher.evaluated_budget, text) is
  'What is broadcast of a budget event.';

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
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_tenant_id, null, 'broadcast of a budget', format('%s (%s)', sqlerrm, sqlstate));
end
$$;
comment on function dispatcher.broadcast_budget_event(uuid, jsonb) is
  'Sends budget:breach to the private topic budgets (budgets:<tenant> for any but the default tenant). Never fails: '
  'the fault is noted.';

create or replace function dispatcher.add_stopped_runs(p_budget dispatcher.evaluated_budget, p_run_ids uuid[])
    returns void
language sql volatile set search_path = ''
as $$
  -- The ids of the first thousand, so that the row stays small however many passes add to it; the number of all.
  update public.budget_events as event
     set detail = event.detail || jsonb_build_object(
           'cancelled_run_ids', (select coalesce(jsonb_agg(listed.value), '[]') from (
               select told.value from jsonb_array_elements(
                   coalesce(event.detail -> 'cancelled_run_ids', '[]') || to_jsonb(p_run_ids)) with ordinality as told
                order by told.ordinality limit 1000) as listed),
           'cancelled_runs', coalesce((event.detail ->> 'cancelled_runs')::bigint, 0) + cardinality(p_run_ids))
   where event.id in (select known.id from public.budget_events as known
                       where known.budget_id = p_budget.id and known.period_key = p_budget.period_key
                         and known.event_kind = 'hard_stopped' and known.revision = p_budget.revision
                         for update skip locked)
$$;
comment on function dispatcher.add_stopped_runs(dispatcher.evaluated_budget, uuid[]) is
  'Adds runs that a hard stop has cancelled to its event of the period: cancelled_runs counts all, cancelled_run_ids '
  'has the first 1,000.';

create or replace function dispatcher.record_budget_event(
  p_tenant_id uuid, p_budget dispatcher.evaluated_budget, p_kind text, p_run_ids uuid[] default '{}'
) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_frame jsonb;
begin
  if p_budget.period_key is null then
    return;
  end if;
  if not exists (select from public.budget_events where budget_id = p_budget.id and period_key = p_budget.period_key
      and event_kind = p_kind and revision = p_budget.revision) then
    -- Whoever holds the budget is not waited for: the next pass tells it.
    perform from public.budgets where id = p_budget.id for key share skip locked;
    if not found then
      return;
    end if;
    v_frame := dispatcher.budget_frame(p_budget, p_kind);
    insert into public.budget_events (tenant_id, budget_id, period_key, event_kind, revision, detail)
    values (p_tenant_id, p_budget.id, p_budget.period_key, p_kind, p_budget.revision, jsonb_build_object(
      'spend_usd', v_frame -> 'spend_usd', 'spend_tokens', v_frame -> 'spend_tokens', 'cap_usd', v_frame -> 'cap_usd',
      'cap_tokens', v_frame -> 'cap_tokens', 'action', v_frame -> 'action'))
    on conflict on constraint budget_events_once do nothing;
    if found and p_kind <> 'warned' then
      perform dispatcher.broadcast_budget_event(p_tenant_id, v_frame);
    end if;
  end if;
  if p_kind = 'hard_stopped' then
    perform dispatcher.add_stopped_runs(p_budget, p_run_ids);
  end if;
  perform dispatcher.settle_constraints('public.budget_events');
end
$$;
comment on function dispatcher.record_budget_event(uuid, dispatcher.evaluated_budget, text, uuid[]) is
  'Writes a budget event once per budget, its revision, period and kind, and broadcasts it once unless it is a '
  'warning. Runs a hard stop has cancelled (p_run_ids) join its one event.';

create or replace function dispatcher.tell_budget_event(
  p_tenant_id uuid, p_budget dispatcher.evaluated_budget, p_kind text, p_run_ids uuid[] default '{}'
) returns text
language plpgsql volatile set search_path = '' set lock_timeout = '100ms'
as $$
begin
  perform dispatcher.record_budget_event(p_tenant_id, p_budget, p_kind, p_run_ids);
  return null;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_tenant_id, null, 'event of a budget', format('%s (%s)', sqlerrm, sqlstate));
  return format('%s (%s)', sqlerrm, sqlstate);
end
$$;
comment on function dispatcher.tell_budget_event(uuid, dispatcher.evaluated_budget, text, uuid[]) is
  'Records an event of a budget; the error when it cannot be, because a budget does its work whether or not that can '
  'be written down.';

create or replace function dispatcher.tell_budget_recoveries(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[])
    returns text
language plpgsql volatile set search_path = ''
as $$
declare
  v_error text;
begin
  select max(dispatcher.tell_budget_event(p_tenant_id, row(b.*)::dispatcher.evaluated_budget, 'recovered')) into v_error
    from unnest(p_budgets) as b
    cross join lateral (
      select max(event.id) filter (where event.event_kind <> 'recovered'
          and event.period_key <> b.period_key) as breach,
             max(event.id) filter (where event.event_kind = 'recovered') as recovery
        from public.budget_events as event where event.budget_id = b.id) as history
   where b.period_key is not null and history.breach > coalesce(history.recovery, 0);
  return v_error;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return format('%s (%s)', sqlerrm, sqlstate);
end
$$;
comment on function dispatcher.tell_budget_recoveries(uuid, dispatcher.evaluated_budget[]) is
  'The first evaluation in a new period writes recovered for every budget that had a breach in an earlier one since '
  'its last recovery. Answers an error, if one could not be written.';

create or replace function dispatcher.tell_full_budgets(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[],
    p_holders uuid[])
returns text
language sql volatile set search_path = ''
as $$
  select max(dispatcher.tell_budget_event(p_tenant_id, row(b.*)::dispatcher.evaluated_budget,
                                          case b.action when 'warn' then 'warned' else 'paused' end))
    from unnest(p_budgets) as b
   where b.error is null
     and case b.action when 'hard_stop' then b.id = any (p_holders)
     and dispatcher.spent_of(b, false) < dispatcher.cap_of(b)
                       else dispatcher.spent_of(b, true) >= dispatcher.cap_of(b)
                           or (b.action <> 'warn' and b.id = any (p_holders)) end
$$;
comment on function dispatcher.tell_full_budgets(uuid, dispatcher.evaluated_budget[], uuid[]) is
  'One warned or paused event per period for budgets that are full, and for those that hold runs (p_holders) because '
  'their rest is too small: also a hard stop that is not spent yet. Answers an error, if one could not be written.';

create or replace function dispatcher.is_timezone(p_timezone text) returns boolean
language plpgsql stable set search_path = ''
as $$
begin
  perform now() at time zone p_timezone;
  return p_timezone is not null;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return false;
end
$$;
comment on function dispatcher.is_timezone(text) is 'Whether the database knows a zone of this name.';

create or replace function dispatcher.faults_of_budget(
  p_tenant_id uuid, p_name text, p_scope text, p_scope_id text, p_period text, p_cap_usd numeric, p_cap_tokens bigint,
      p_action text,
  p_timezone text
) returns text[]
language sql stable set search_path = ''
as $$
  select dispatcher.faults_of_tenant(p_tenant_id) || dispatcher.faults_of_text('name', p_name, 300, true)
      || case when p_scope in ('agent', 'department', 'project', 'fleet') then '{}'
          else array['scope: none of agent, department, project, fleet'] end
      || case when (p_scope = 'fleet') <> (coalesce(p_scope_id, '') = '')
          then array['scope_id: needed for every scope but fleet, and only there']
              else dispatcher.faults_of_text('scope_id', p_scope_id, 200, false) end
      || case when p_period in ('daily', 'weekly', 'monthly') then '{}'
          else array['period: none of daily, weekly, monthly'] end
      || case when num_nonnulls(p_cap_usd, p_cap_tokens) = 1 then '{}'
          else array['cap: exactly one of cap_usd and cap_tokens'] end
      || case when p_cap_usd < 0 or p_cap_usd = 'NaN' or p_cap_usd >= 99999999.9999995
          then array['cap_usd: outside 0 to 99999999'] else '{}' end
      || case when p_cap_tokens < 0 then array['cap_tokens: below 0'] else '{}' end
      || case when p_action in ('warn', 'pause_new_runs', 'hard_stop') then '{}'
          else array['action: none of warn, pause_new_runs, hard_stop'] end
      || case when dispatcher.is_timezone(coalesce(p_timezone, 'UTC')) then '{}'
          else array['timezone: not a known zone'] end
$$;
comment on function dispatcher.faults_of_budget(uuid, text, text, text, text, numeric, bigint, text, text) is
  'What is wrong with a budget that is to be set; empty when nothing is.';

drop function if exists dispatcher.lock_budget(uuid, text, text, text, uuid);
create or replace function dispatcher.budgets_to_set(p_tenant_id uuid, p_budget_id uuid, p_name text, p_scope text,
    p_scope_id text, p_period text) returns jsonb[]
language plpgsql volatile set search_path = ''
as $$
begin
  return array(
    select to_jsonb(budget) from public.budgets as budget
     where budget.tenant_id = p_tenant_id
       and case when p_budget_id is not null then budget.id = p_budget_id
                else budget.active and budget.name = btrim(p_name)
                 and (p_scope is null or budget.scope = p_scope)
                 and (p_scope_id is null or budget.scope_id = p_scope_id)
                 and (p_period is null or budget.period = p_period) end
     order by budget.created_at, budget.id
       for no key update);
end
$$;
comment on function dispatcher.budgets_to_set(uuid, uuid, text, text, text, text) is
  'Locks the budgets that are meant: the one of an id, or the active ones of a name, and of the scope and period where '
  'they are given. Waits for at most lock_timeout.';

create or replace function dispatcher.changed_budget(p_budget jsonb, p_change jsonb) returns jsonb
language sql immutable set search_path = ''
as $$
  -- A cap in one unit takes the place of one in the other, and another scope has another scope_id.
  select p_budget
         || case when p_change ? 'cap_usd' or p_change ? 'cap_tokens' then '{"cap_usd": null, "cap_tokens": null}'
                 else '{}'::jsonb end
         || case when p_change ->> 'scope' <> p_budget ->> 'scope' then '{"scope_id": null}' else '{}'::jsonb end
         || p_change
$$;
comment on function dispatcher.changed_budget(jsonb, jsonb) is
  'A budget (a row) with what is given of a change (no nulls); what is not given is kept.';

create or replace function dispatcher.differences(p_before jsonb, p_after jsonb) returns jsonb
language sql immutable set search_path = ''
as $$
  select coalesce(jsonb_object_agg(after.key, jsonb_build_array(p_before -> after.key, after.value)), '{}')
    from jsonb_each(p_after - array['updated_at', 'created_at', 'revision', 'id', 'tenant_id']) as after
   where p_before -> after.key is distinct from after.value
$$;
comment on function dispatcher.differences(jsonb, jsonb) is
  'What differs between two rows: {column: [before, after]}, without what changes by itself.';

create or replace function dispatcher.write_budget(p_budget jsonb) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_budget public.budgets := jsonb_populate_record(null::public.budgets, p_budget);
begin
  insert into public.budgets as budget (
    id, tenant_id, name, scope, scope_id, period, timezone, cap_usd, cap_tokens, action_on_exceed, fail_closed)
  values (v_budget.id, v_budget.tenant_id, btrim(v_budget.name), v_budget.scope, v_budget.scope_id, v_budget.period,
          v_budget.timezone, v_budget.cap_usd, v_budget.cap_tokens, v_budget.action_on_exceed, v_budget.fail_closed)
  on conflict (id) do update
     set name = excluded.name, scope = excluded.scope, scope_id = excluded.scope_id, period = excluded.period,
         timezone = excluded.timezone, cap_usd = excluded.cap_usd, cap_tokens = excluded.cap_tokens,
         action_on_exceed = excluded.action_on_exceed, fail_closed = excluded.fail_closed, active = true
  returning * into v_budget;
  return to_jsonb(v_budget);
end
$$;
comment on function dispatcher.write_budget(jsonb) is 'Makes a budget, or makes it what is given.';

drop function if exists public.set_budget(uuid, text, text, text, text, numeric, bigint, text, text, boolean, uuid);
create or replace function public.set_budget(
  p_tenant_id uuid, p_name text, p_scope text default null, p_scope_id text default null, p_period text default null,
      p_cap_usd numeric default null, p_cap_tokens bigint default null, p_action text default null,
  p_timezone text default null, p_fail_closed boolean default null, p_budget_id uuid default null,
      p_new_name text default null, p_only_change boolean default false, p_actor text default null
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_found constant jsonb[] := dispatcher.budgets_to_set(p_tenant_id, p_budget_id, p_name, p_scope, p_scope_id,
      p_period);
  v_before constant jsonb := v_found[1];
  v_change constant jsonb := jsonb_strip_nulls(jsonb_build_object(
    'name', p_new_name, 'scope', p_scope, 'scope_id', nullif(p_scope_id, ''), 'period', p_period,
    'timezone', p_timezone, 'cap_usd', p_cap_usd, 'cap_tokens', p_cap_tokens, 'action_on_exceed', p_action,
    'fail_closed', p_fail_closed));
  v_budget jsonb := coalesce(v_before, jsonb_build_object(
    'id', gen_random_uuid(), 'tenant_id', p_tenant_id, 'name', p_name, 'scope', 'fleet', 'scope_id', null,
    'period', 'monthly', 'timezone', 'UTC', 'action_on_exceed', 'warn', 'fail_closed', false));
  v_changed jsonb := '{}';
  v_faults text[];
begin
  if cardinality(v_found) > 1 then
    return jsonb_build_object('applied', false, 'code', 'ambiguous', 'budget', p_name,
                              'budgets', (dispatcher.budgets_named(p_tenant_id, btrim(p_name))).active);
  elsif v_before is null and (p_budget_id is not null or p_only_change) then
    return jsonb_build_object('applied', false, 'code', 'not_found', 'budget_id', p_budget_id, 'budget', p_name);
  end if;
  v_budget := dispatcher.changed_budget(v_budget, v_change);
  v_faults := dispatcher.faults_of_budget(p_tenant_id, v_budget ->> 'name', v_budget ->> 'scope',
    v_budget ->> 'scope_id', v_budget ->> 'period', (v_budget ->> 'cap_usd')::numeric,
    (v_budget ->> 'cap_tokens')::bigint, v_budget ->> 'action_on_exceed', v_budget ->> 'timezone');
  if cardinality(v_faults) > 0 then
    return dispatcher.invalid(v_faults);
  end if;
  v_budget := dispatcher.write_budget(v_budget);
  if v_before is not null then
    v_changed := dispatcher.differences(v_before, v_budget);
  end if;
  if v_before is null or v_changed <> '{}' then
    perform dispatcher.audit_workflow_action(p_tenant_id, p_actor, 'set_budget', 'budget:' || (v_budget ->> 'id'),
        v_before - 'tenant_id', v_budget - 'tenant_id');
  end if;
  return jsonb_build_object('applied', true, 'code', 'ok', 'budget', v_budget - 'tenant_id',
                            'created', v_before is null, 'changed', v_changed);
exception when unique_violation then
  return jsonb_build_object('applied', false, 'code', 'exists', 'faults', jsonb_build_array(
    'another active budget has this scope and period: ' || (
      select format('%s (%s)', other.name, other.id) from public.budgets as other
       where other.tenant_id = p_tenant_id and other.active and other.scope = v_budget ->> 'scope'
         and coalesce(other.scope_id, '') = coalesce(v_budget ->> 'scope_id', '')
         and other.period = v_budget ->> 'period')));
when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy', 'budget_id', p_budget_id);
end
$$;
comment on function public.set_budget(uuid, text, text, text, text, numeric, bigint, text, text, boolean, uuid, text,
    boolean, text) is
  'Changes the active budget of a name (and scope and period, where they are given), or p_budget_id; what is not given '
  'is kept. Makes one where there is none (fleet, monthly, UTC, warn), unless p_only_change. Audited. Answers '
  '{applied, code: ok | invalid | ambiguous (several have the name) | exists | not_found | busy, budget, created, '
  'changed ({column: [before, after]}) | faults | budgets}; busy: another session holds the budget, ask again.';

create or replace function dispatcher.budgets_named(p_tenant_id uuid, p_budget text, out active jsonb,
    out is_known boolean)
language sql stable set search_path = ''
as $$
  with named as (
    select budget.* from public.budgets as budget where budget.tenant_id = p_tenant_id
        and p_budget in (budget.id::text, budget.name)
  )
  select coalesce(jsonb_agg(jsonb_build_object('id', named.id, 'name', named.name, 'scope', named.scope, 'scope_id',
      named.scope_id,
                                               'period', named.period)
                            order by named.created_at, named.id) filter (where named.active), '[]'), count(*) > 0
    from named
   -- what is an id is no name
   where named.id::text = p_budget or not exists (select from named as same where same.id::text = p_budget)
$$;
comment on function dispatcher.budgets_named(uuid, text) is
  'The active budgets of an id or name, and whether there are any at all.';

drop function if exists public.deactivate_budget(uuid, text);
create or replace function public.deactivate_budget(p_tenant_id uuid, p_budget text, p_actor text default null)
    returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_named constant record := dispatcher.budgets_named(p_tenant_id, p_budget);
  v_is_ended boolean;
begin
  if jsonb_array_length(v_named.active) > 1 then
    return jsonb_build_object('applied', false, 'code', 'ambiguous', 'budget', p_budget, 'budgets', v_named.active);
  end if;
  update public.budgets set active = false, updated_at = now()
   where tenant_id = p_tenant_id and id = (v_named.active -> 0 ->> 'id')::uuid and active;
  v_is_ended := found;
  if v_is_ended then
    perform dispatcher.audit_workflow_action(p_tenant_id, p_actor, 'deactivate_budget',
        'budget:' || (v_named.active -> 0 ->> 'id'), v_named.active -> 0, '{"active": false}');
  end if;
  return jsonb_build_object('applied', v_named.is_known, 'budget', p_budget, 'budgets', v_named.active,
                            'code', case when v_is_ended then 'ok' when v_named.is_known then 'already'
                                else 'not_found' end);
exception when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy', 'budget', p_budget, 'budgets', jsonb_build_array());
end
$$;
comment on function public.deactivate_budget(uuid, text, text) is
  'Ends the one active budget of an id or name: what it held goes out with the next tick. Audited. Answers {applied, '
  'code: ok | already | ambiguous | not_found | busy, budget, budgets}; budgets: what was ended, or the several of '
  'that name.';

drop function if exists public.list_budgets(uuid, numeric);
create or replace function public.list_budgets(p_tenant_id uuid) returns jsonb
language sql stable set search_path = '' set lock_timeout = '1s'
as $$
  select jsonb_build_object('code', 'ok', 'budgets', coalesce(jsonb_agg(
           dispatcher.shown_row(to_jsonb(budget) - 'tenant_id') || coalesce(dispatcher.shown_row(to_jsonb(evaluated))
              - array['id', 'name', 'scope', 'scope_id', 'period', 'action', 'fail_closed', 'cap_usd', 'cap_tokens',
                      'revision'],
                  '{}')
           || jsonb_build_object('events', (select coalesce(jsonb_agg(event.event_kind order by event.id), '[]')
                                              from public.budget_events as event
                                             where event.budget_id = budget.id
                                               and event.period_key = evaluated.period_key))
           order by budget.active desc, budget.scope, budget.scope_id, budget.period, budget.created_at), '[]'))
    from public.budgets as budget
    left join unnest(dispatcher.evaluate_budgets(p_tenant_id)) as evaluated
      on evaluated.id = budget.id
   where budget.tenant_id = p_tenant_id
$$;
comment on function public.list_budgets(uuid) is
  'All budgets; the active ones with period, settled and reserved spend, and this period''s events.';

create or replace function public.budget_ledger(p_tenant_id uuid, p_limit integer default 50) returns jsonb
language sql stable set search_path = '' set lock_timeout = '1s'
as $$
  select jsonb_build_object('code', 'ok', 'events', coalesce(jsonb_agg(jsonb_build_object(
           'at', event.created_at, 'budget_id', event.budget_id, 'budget', budget.name, 'scope', budget.scope,
               'scope_id', budget.scope_id,
           'period_key', event.period_key, 'event_kind', event.event_kind, 'detail', event.detail)
               order by event.id desc), '[]'))
    from (select * from public.budget_events where tenant_id = p_tenant_id order by id desc
        limit least(greatest(p_limit, 1), 1000)) as event
    join public.budgets as budget on budget.id = event.budget_id
$$;
comment on function public.budget_ledger(uuid, integer) is
  'The latest budget events, newest first, with their budgets.';

do $$
begin
  -- Signed-in people of the tenant may listen to their budgets; the service role may anyway.
  if to_regclass('realtime.messages') is not null then
    execute 'drop policy if exists dispatcher_budget_topic on realtime.messages';
    execute $policy$
      create policy dispatcher_budget_topic on realtime.messages for select to authenticated
      using (realtime.topic() = case public.current_tenant_id() when '00000000-0000-0000-0000-000000000000'
          then 'budgets'
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
