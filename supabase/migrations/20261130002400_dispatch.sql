-- The tick: what moves runs without being asked by their agents. Each phase is a call, and so a transaction, of its
-- own: at most 500 runs (a batch, where runs are handed out), `again` when there is more, and what it raises costs no
-- other phase. Phases that count slots or money go one at a time per tenant: an advisory lock that is tried, never
-- waited for. Locks are taken in this order: tenant and gateways (shared), routes, runs, claims and notifications; only
-- the first is waited for, and that for at most two seconds.
begin;
set local lock_timeout = '3s';

select dispatcher.ensure_type('waiting_group',
    'workflow_type text, pinned_agent_id text, agent_id text, department_id text, '
  'gateway_id uuid, is_open boolean, due bigint, oldest timestamp with time zone, priorities integer[], route_priority '
  'integer, slots bigint, '
  'usd numeric, tokens numeric, verdict text, holders uuid[], reason text');
comment on type dispatcher.waiting_group is
  'Queued runs that are due, of one type and agent: equal before slots and budgets. is_open: it has an agent, and its '
  'route is not disabled.';

select dispatcher.ensure_type('tick',
    'instance_id uuid, tenant_id uuid, gateway_id uuid, settings public.dispatcher_settings');
comment on type dispatcher.tick is 'For whom a phase runs, with which settings.';

select dispatcher.ensure_type('run_choice', 'run_id uuid, agent_id text, gateway_id uuid, usd numeric, tokens numeric');
comment on type dispatcher.run_choice is
  'A run that goes out: to which agent of which gateway, and what is reserved for it.';

create or replace function dispatcher.workflow_age_points(p_queued_at timestamptz, p_now timestamptz) returns integer
language sql immutable set search_path = ''
as $$
  select case when p_queued_at >= p_now then 0 when p_queued_at < '1970-01-01Z' then 1000000
              else least(1000000, floor(power(extract(epoch from p_now - p_queued_at) / 600, 2)))::integer end
$$;
comment on function dispatcher.workflow_age_points(timestamptz, timestamptz) is
  'How much waiting adds to the priority of a run, and to its route''s: the square of every ten minutes, so 1 after '
  '10 minutes, 36 after an hour, 20736 after a day. Nothing starves.';

create or replace function dispatcher.gateway_of_workflow_agent(p_tenant_id uuid, p_agent_id text) returns uuid
language sql stable set search_path = ''
as $$
  select coalesce((select agent.gateway_id from dispatcher.agents as agent where agent.tenant_id = p_tenant_id
      and agent.slug = p_agent_id),
                  (select (array_agg(gateway.id))[1] from public.gateways as gateway
                      where gateway.tenant_id = p_tenant_id having count(*) = 1))
$$;
comment on function dispatcher.gateway_of_workflow_agent(uuid, text) is
  'The gateway of an agent by slug; the tenant''s only gateway for an agent without a row; else NULL.';

create or replace function dispatcher.tick_of(p_instance_id uuid) returns dispatcher.tick
language plpgsql stable set search_path = ''
as $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
begin
  return row(v_instance.id, v_instance.tenant_id, v_instance.gateway_id,
      dispatcher.settings_of_instance(p_instance_id))::dispatcher.tick;
end
$$;
comment on function dispatcher.tick_of(uuid) is
  'Who ticks, with which settings; locks nothing. Raises OD001 for an unknown instance.';

create or replace function dispatcher.has_the_pass(p_tick dispatcher.tick) returns boolean
language plpgsql volatile set search_path = ''
as $$
begin
  -- What new rows refer to is held along: the check of a foreign key then waits for nobody.
  perform from public.tenants where id = p_tick.tenant_id for key share;
  return pg_try_advisory_xact_lock(hashtextextended('dispatcher.workflows.' || p_tick.tenant_id, 0));
end
$$;
comment on function dispatcher.has_the_pass(dispatcher.tick) is
  'Whether this transaction may count slots and money of the tenant: one at a time does. Never waits for another pass.';

create or replace function dispatcher.held_gateways(p_tick dispatcher.tick) returns uuid[]
language sql volatile set search_path = ''
as $$
  select array(select gateway.id from public.gateways as gateway
      where gateway.tenant_id = p_tick.tenant_id for key share skip locked)
$$;
comment on function dispatcher.held_gateways(dispatcher.tick) is
  'The gateways of the tenant that nobody changes at this moment, held against it: agents of the others wait for the '
  'next pass.';

create or replace function dispatcher.lock_routes(p_tick dispatcher.tick) returns text[]
language sql volatile set search_path = ''
as $$
  select array(select route.workflow_type from public.workflow_agent_routing as route
                where route.tenant_id = p_tick.tenant_id order by route.workflow_type for update skip locked)
$$;
comment on function dispatcher.lock_routes(dispatcher.tick) is
  'Locks the tenant''s routes before anything is counted; a type whose route somebody holds is left out of this pass.';

create or replace function dispatcher.row_error(p_phase text, p_run_id uuid, p_error text, p_code text) returns jsonb
language sql immutable set search_path = ''
as $$ select jsonb_build_array(jsonb_build_object('phase', p_phase, 'run_id', p_run_id, 'error', left(p_error, 500),
    'error_code', p_code)) $$;
comment on function dispatcher.row_error(text, uuid, text, text) is 'What a run of a phase raised, as a list of one.';

create or replace function dispatcher.owe_notifications(p_runs dispatcher.run_choice[]) returns void
language plpgsql volatile set search_path = '' set lock_timeout = '100ms'
as $$
begin
  insert into public.workflow_notifications (tenant_id, run_id, attempt, agent_id, gateway_id)
  select run.tenant_id, run.id, run.dispatch_attempts, chosen.agent_id, chosen.gateway_id
    from unnest(p_runs) as chosen join public.workflow_runs as run on run.id = chosen.run_id
  on conflict (run_id, attempt) do nothing;
  perform dispatcher.settle_constraints('public.workflow_notifications');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault((select tenant_id from public.workflow_runs where id = p_runs[1].run_id), null,
                                'notification of a run', format('%s (%s)', sqlerrm, sqlstate));
end
$$;
comment on function dispatcher.owe_notifications(dispatcher.run_choice[]) is
  'Writes down that agents are to be told of runs that were dispatched. A side write: agents also ask by themselves.';

create or replace function dispatcher.dispatch_runs(p_runs dispatcher.run_choice[]) returns void
language plpgsql volatile set search_path = ''
as $$
begin
  update public.workflow_runs as run
     set status = 'dispatched', owner_agent_id = chosen.agent_id, dispatched_at = now(),
         dispatch_attempts = least(run.dispatch_attempts, 2147483646) + 1, reserved_usd = chosen.usd,
         reserved_tokens = least(chosen.tokens, 1e18), next_attempt_at = null, blocker_type = null,
             blocker_description = null
    from unnest(p_runs) as chosen where run.id = chosen.run_id;
  perform dispatcher.owe_notifications(p_runs);
end
$$;
comment on function dispatcher.dispatch_runs(dispatcher.run_choice[]) is
  'Hands runs, which the caller has locked, to their agents: with their reservations, and the notifications that are '
  'owed for them.';

create or replace function dispatcher.try_dispatch(p_run dispatcher.run_choice) returns jsonb
language plpgsql volatile set search_path = ''
as $$
begin
  perform dispatcher.dispatch_runs(array[p_run]);
  return '[]';
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return dispatcher.row_error('dispatched', p_run.run_id, sqlerrm, sqlstate);
end
$$;
comment on function dispatcher.try_dispatch(dispatcher.run_choice) is
  'Hands out one run; what that raises, as a list of errors.';

create or replace function dispatcher.due_queue(p_tenant_id uuid) returns table (
  workflow_type text, pinned_agent_id text, due bigint, oldest timestamptz, priorities integer[]
)
language sql stable set search_path = ''
as $$
  select level.workflow_type, level.pinned_agent_id, sum(level.due)::bigint, min(level.oldest),
      array_agg(level.priority)
    from (select run.workflow_type, run.pinned_agent_id, run.priority, count(*) as due, min(run.queued_at) as oldest
            from public.workflow_runs as run
           where run.tenant_id = p_tenant_id and run.status = 'queued'
             and (run.next_attempt_at is null or run.next_attempt_at <= now())
           group by run.workflow_type, run.pinned_agent_id, run.priority) as level
   group by level.workflow_type, level.pinned_agent_id
$$;
comment on function dispatcher.due_queue(uuid) is
  'What is queued and due, by type and pin: how many, since when, of which priorities.';

create or replace function dispatcher.active_runs(p_tenant_id uuid) returns table (workflow_type text, number bigint)
language sql stable set search_path = ''
as $$
  -- A held run keeps its slot: it returns to it whenever it is let go.
  select run.workflow_type, count(*) from public.workflow_runs as run
   where run.tenant_id = p_tenant_id
     and (run.status in ('dispatched', 'claimed', 'running') or run.paused_from in ('dispatched', 'claimed', 'running'))
   group by run.workflow_type
$$;
comment on function dispatcher.active_runs(uuid) is 'How many slots of each type are taken.';

create or replace function dispatcher.waiting_groups(p_tenant_id uuid, p_estimates jsonb,
    p_budgets dispatcher.evaluated_budget[])
returns dispatcher.waiting_group[]
language sql stable set search_path = ''
as $$
  select coalesce(array_agg(row(
           waiting.workflow_type, waiting.pinned_agent_id, waiting.agent_id, waiting.department_id, waiting.gateway_id,
               waiting.is_open,
           waiting.due, waiting.oldest, waiting.priorities, waiting.route_priority, waiting.slots, waiting.usd,
               waiting.tokens,
           gate.verdict, gate.holders, gate.reason)::dispatcher.waiting_group), '{}')
    from (
      select queued.*, coalesce(queued.pinned_agent_id, route.agent_id) as agent_id, profile.department_id,
             case when agent.id is not null then agent.gateway_id else only_one.gateway_id end as gateway_id,
             coalesce(queued.pinned_agent_id, route.agent_id) is not null
                 and coalesce(route.max_concurrent, 1) > 0 as is_open,
             coalesce(route.priority, 0) as route_priority,
                 coalesce(route.max_concurrent, 1) - coalesce(active.number, 0) as slots,
             dispatcher.workflow_estimate(p_estimates, queued.workflow_type, 'usd') as usd,
             dispatcher.workflow_estimate(p_estimates, queued.workflow_type, 'tokens') as tokens
        from dispatcher.due_queue(p_tenant_id) as queued
        left join public.workflow_agent_routing as route on route.tenant_id = p_tenant_id
            and route.workflow_type = queued.workflow_type
        left join public.agent_profiles as profile
          on profile.tenant_id = p_tenant_id and profile.agent_id = coalesce(queued.pinned_agent_id, route.agent_id)
        left join dispatcher.agents as agent on agent.tenant_id = p_tenant_id
            and agent.slug = coalesce(queued.pinned_agent_id, route.agent_id)
        cross join (select case when count(*) = 1 then (array_agg(id))[1] end as gateway_id
                      from public.gateways where tenant_id = p_tenant_id) as only_one
        left join dispatcher.active_runs(p_tenant_id) as active
          on active.workflow_type = queued.workflow_type) as waiting
    cross join lateral dispatcher.budget_verdict(
      p_budgets, waiting.agent_id, waiting.department_id, waiting.workflow_type, waiting.usd, waiting.tokens) as gate
$$;
comment on function dispatcher.waiting_groups(uuid, jsonb, dispatcher.evaluated_budget[]) is
  'The due queue by type and agent, each group with its free slots, its estimate and its budgets'' verdict: all runs '
  'of a group are equal before both.';

create or replace function dispatcher.unheld_groups(p_groups dispatcher.waiting_group[], p_tenant_id uuid,
    p_types text[], p_gateways uuid[])
returns dispatcher.waiting_group[]
language sql stable set search_path = ''
as $$
  select coalesce(array_agg(row(g.*)::dispatcher.waiting_group), '{}') from unnest(p_groups) as g
   where (g.workflow_type = any (p_types)
          or not exists (select from public.workflow_agent_routing as route
                          where route.tenant_id = p_tenant_id and route.workflow_type = g.workflow_type))
     and (g.gateway_id is null or g.gateway_id = any (p_gateways))
$$;
comment on function dispatcher.unheld_groups(dispatcher.waiting_group[], uuid, text[], uuid[]) is
  'The groups of which nobody else holds the route or the gateway.';

create or replace function dispatcher.run_candidates(p_tenant_id uuid, p_groups dispatcher.waiting_group[],
    p_batch integer) returns table (
  run_id uuid, workflow_type text, agent_id text, department_id text, gateway_id uuid, slots bigint, usd numeric,
      tokens numeric
)
language sql stable set search_path = ''
as $$
  select pick.id, g.workflow_type, g.agent_id, g.department_id, g.gateway_id, g.slots, g.usd, g.tokens
    from unnest(p_groups) as g
    cross join lateral unnest(g.priorities) as level (priority)
    -- Of one priority the oldest goes first whatever waiting adds, so the oldest few of each are all that can go out.
    cross join lateral (
      select run.id, run.priority, run.queued_at from public.workflow_runs as run
       where run.tenant_id = p_tenant_id and run.workflow_type = g.workflow_type and run.priority = level.priority
         and run.status = 'queued'
         and run.pinned_agent_id is not distinct from g.pinned_agent_id
         and (run.next_attempt_at is null or run.next_attempt_at <= now())
       order by run.queued_at
       limit least(g.slots, p_batch) + 20) as pick
   where g.verdict = 'ok' and g.is_open and g.slots > 0
   -- A group ages as its oldest run does, and its runs among themselves: minutes of waiting must not outweigh what a
   -- run is worth.
   order by g.route_priority::bigint + dispatcher.workflow_age_points(g.oldest, now()) desc,
            pick.priority::bigint + dispatcher.workflow_age_points(pick.queued_at, now()) desc, pick.queued_at, pick.id
$$;
comment on function dispatcher.run_candidates(uuid, dispatcher.waiting_group[], integer) is
  'The runs that may go out next, in their order: those that are held or whose type is full are left out before '
  'anything is limited.';

create or replace function dispatcher.hand_out_runs(
  p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_budgets dispatcher.evaluated_budget[], p_batch integer,
      p_one_by_one boolean
) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_candidate record;
  v_gate record;
  v_run dispatcher.run_choice;
  v_chosen dispatcher.run_choice[] := '{}';
  v_taken jsonb := '{}';
  v_closed text[] := '{}';
  v_holders jsonb := '[]';
  v_error jsonb;
  v_errors jsonb := '[]';
  v_warned integer := 0;
begin
  for v_candidate in select * from dispatcher.run_candidates(p_tenant_id, p_groups, p_batch) loop
    exit when cardinality(v_chosen) >= p_batch;
    continue when coalesce((v_taken ->> v_candidate.workflow_type)::integer, 0) >= v_candidate.slots
               or concat_ws('|', v_candidate.workflow_type, v_candidate.agent_id) = any (v_closed);
    if cardinality(p_budgets) > 0 then
      v_gate := dispatcher.budget_verdict(p_budgets, v_candidate.agent_id, v_candidate.department_id,
          v_candidate.workflow_type,
                                          v_candidate.usd, v_candidate.tokens);
      if v_gate.verdict <> 'ok' then
        v_closed := v_closed || concat_ws('|', v_candidate.workflow_type, v_candidate.agent_id);
        v_holders := v_holders || jsonb_build_object('workflow_type', v_candidate.workflow_type, 'holders',
            v_gate.holders, 'reason', v_gate.reason);
        continue;
      end if;
    end if;
    perform from public.workflow_runs where id = v_candidate.run_id and status = 'queued' for update skip locked;
    continue when not found;
    v_run := row(v_candidate.run_id, v_candidate.agent_id, v_candidate.gateway_id, v_candidate.usd,
        v_candidate.tokens)::dispatcher.run_choice;
    if p_one_by_one then
      v_error := dispatcher.try_dispatch(v_run);
      v_errors := v_errors || v_error;
      continue when v_error <> '[]';
    end if;
    v_chosen := v_chosen || v_run;
    v_taken := v_taken || jsonb_build_object(v_candidate.workflow_type,
        coalesce((v_taken ->> v_candidate.workflow_type)::integer, 0) + 1);
    if cardinality(p_budgets) > 0 then
      p_budgets := dispatcher.reserve_in_budgets(p_budgets, v_candidate.agent_id, v_candidate.department_id,
          v_candidate.workflow_type,
                                                 v_candidate.usd, v_candidate.tokens);
      v_warned := v_warned + least(v_gate.warned, 1);
    end if;
  end loop;
  if not p_one_by_one and cardinality(v_chosen) > 0 then
    perform dispatcher.dispatch_runs(v_chosen);
  end if;
  return jsonb_build_object('dispatched', cardinality(v_chosen), 'warned', v_warned, 'closed', v_holders, 'errors',
      v_errors);
end
$$;
comment on function dispatcher.hand_out_runs(
  uuid, dispatcher.waiting_group[], dispatcher.evaluated_budget[], integer, boolean
) is
  'Hands out up to a batch of runs, each reserved before the next is judged: {dispatched, warned, closed (groups that '
  'a budget has closed meanwhile), errors}. All in one update, or one by one: then a run that raises is named and '
  'hides nobody.';

create or replace function dispatcher.hand_out(
  p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_budgets dispatcher.evaluated_budget[], p_batch integer
) returns jsonb
language plpgsql volatile set search_path = ''
as $$
begin
  return dispatcher.hand_out_runs(p_tenant_id, p_groups, p_budgets, p_batch, false);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return dispatcher.hand_out_runs(p_tenant_id, p_groups, p_budgets, p_batch, true);
end
$$;
comment on function dispatcher.hand_out(uuid, dispatcher.waiting_group[], dispatcher.evaluated_budget[], integer) is
  'hand_out_runs in one update; one by one where that raises.';

create or replace function dispatcher.holds_of(p_groups dispatcher.waiting_group[], p_closed jsonb)
    returns table (workflow_type text, budget_id uuid)
language sql stable set search_path = ''
as $$
  select g.workflow_type, holder.id from unnest(p_groups) as g cross join lateral unnest(g.holders) as holder (id)
      where g.is_open
  union
  select closed.value ->> 'workflow_type', holder.id::uuid
    from jsonb_array_elements(p_closed) as closed cross
        join lateral jsonb_array_elements_text(closed.value -> 'holders') as holder (id)
$$;
comment on function dispatcher.holds_of(dispatcher.waiting_group[], jsonb) is
  'Which budgets hold which types, before a pass and since it.';

create or replace function dispatcher.held_by(p_groups dispatcher.waiting_group[], p_closed jsonb,
    p_budgets dispatcher.evaluated_budget[])
returns jsonb
language sql stable set search_path = ''
as $$
  select coalesce(jsonb_object_agg(held.workflow_type, held.names), '{}')
    from (select hold.workflow_type, jsonb_agg(distinct budget.name) as names
            from dispatcher.holds_of(p_groups, p_closed) as hold
                join unnest(p_budgets) as budget on budget.id = hold.budget_id
           group by hold.workflow_type) as held
$$;
comment on function dispatcher.held_by(dispatcher.waiting_group[], jsonb, dispatcher.evaluated_budget[]) is
  'The names of the budgets that hold each type.';

create or replace function dispatcher.blockers_of(p_groups dispatcher.waiting_group[], p_closed jsonb) returns jsonb
language sql stable set search_path = ''
as $$
  -- Of the two words for one type the plainer cause comes last, and stays.
  select coalesce(jsonb_object_agg(held.workflow_type, held.reason order by held.reason), '{}')
    from (select g.workflow_type, g.reason from unnest(p_groups) as g where g.is_open and g.reason is not null
          union
          select closed.value ->> 'workflow_type', closed.value ->> 'reason'
            from jsonb_array_elements(p_closed) as closed) as held
$$;
comment on function dispatcher.blockers_of(dispatcher.waiting_group[], jsonb) is
  'Why the types are held that budgets hold: {type: budget | estimate_over_cap}.';

-- What a pass that counts money starts with. error: why budgets cannot be evaluated; runs then go out as if there were
-- none.
select dispatcher.ensure_type('money', 'estimates jsonb, budgets dispatcher.evaluated_budget[], error text');
comment on type dispatcher.money is 'Estimates per type and evaluated budgets; error: why they cannot be evaluated.';

create or replace function dispatcher.fallback_estimates(p_settings public.dispatcher_settings) returns jsonb
language sql immutable set search_path = ''
as $$
  select jsonb_build_object('', jsonb_build_object('usd', coalesce(p_settings.workflow_cost_estimate_usd, 0.10),
                                                   'tokens', coalesce(p_settings.workflow_token_estimate, 20000)))
$$;
comment on function dispatcher.fallback_estimates(public.dispatcher_settings) is
  'The configured estimates as workflow_estimates has them, where the reports cannot be read.';

create or replace function dispatcher.read_estimates(p_tick dispatcher.tick, out estimates jsonb, out error text)
language plpgsql stable set search_path = ''
as $$
begin
  estimates := dispatcher.workflow_estimates(p_tick.tenant_id);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  estimates := dispatcher.fallback_estimates(p_tick.settings);
  error := format('estimates: %s (%s)', sqlerrm, sqlstate);
end
$$;
comment on function dispatcher.read_estimates(dispatcher.tick) is
  'The estimates per type; where they cannot be had, what is configured, and the error.';

create or replace function dispatcher.read_money(p_tick dispatcher.tick, p_action text default null)
    returns dispatcher.money
language plpgsql stable set search_path = ''
as $$
declare
  v_money dispatcher.money;
  v_read constant record := dispatcher.read_estimates(p_tick);
begin
  v_money.budgets := '{}';
  v_money.estimates := v_read.estimates;
  v_money.error := v_read.error;
  v_money.budgets := dispatcher.evaluate_budgets(p_tick.tenant_id, p_action);
  if v_read.error is not null then
    v_money.budgets := dispatcher.with_error(v_money.budgets, v_read.error);
  end if;
  return v_money;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  v_money.error := format('%s (%s)', sqlerrm, sqlstate);
  return v_money;
end
$$;
comment on function dispatcher.read_money(dispatcher.tick, text) is
  'Estimates and evaluated budgets (of one action, or all) of a tenant. Never fails. An error of either stands with '
  'every budget: those that are fail_closed hold, the others are open; where not even the budgets can be '
  'read, all are.';

create or replace function dispatcher.broken_budgets(p_budgets dispatcher.evaluated_budget[]) returns text
language sql stable set search_path = ''
as $$ select left(string_agg(format('%s: %s', b.name, b.error), '; '), 500) from unnest(p_budgets) as b
    where b.error is not null $$;
comment on function dispatcher.broken_budgets(dispatcher.evaluated_budget[]) is
  'The budgets that cannot be evaluated, each with its error; NULL when all can.';

create or replace function dispatcher.tell_of_money(p_tick dispatcher.tick, p_money dispatcher.money, p_holders uuid[])
    returns text
language plpgsql volatile set search_path = ''
as $$
declare
  v_error text := dispatcher.tell_budget_recoveries(p_tick.tenant_id, p_money.budgets);
begin
  return coalesce(v_error, dispatcher.tell_full_budgets(p_tick.tenant_id, p_money.budgets, p_holders));
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return format('%s (%s)', sqlerrm, sqlstate);
end
$$;
comment on function dispatcher.tell_of_money(dispatcher.tick, dispatcher.money, uuid[]) is
  'Writes and broadcasts the events of budgets: recoveries first, then those that are full or hold runs. Answers an '
  'error, never raises one.';

create or replace function dispatcher.dispatch_queued_runs(p_tick dispatcher.tick) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_batch constant integer := (p_tick.settings).workflow_batch_size;
  v_gateways constant uuid[] := dispatcher.held_gateways(p_tick);
  v_types constant text[] := dispatcher.lock_routes(p_tick);
  v_money constant dispatcher.money := dispatcher.read_money(p_tick);
  v_tight constant dispatcher.evaluated_budget[] := dispatcher.tight_budgets(v_money.budgets, v_money.estimates,
      v_batch + 500);
  v_groups constant dispatcher.waiting_group[] := dispatcher.waiting_groups(p_tick.tenant_id, v_money.estimates,
      v_tight);
  v_unheld constant dispatcher.waiting_group[] := dispatcher.unheld_groups(v_groups, p_tick.tenant_id, v_types,
      v_gateways);
  v_done jsonb;
  v_held bigint;
  v_told text;
  v_broken constant text := dispatcher.broken_budgets(v_money.budgets);
begin
  perform dispatcher.note_workflow_actor('dispatcher', 'dispatched');
  v_done := dispatcher.hand_out(p_tick.tenant_id, v_unheld, v_tight, v_batch);
  v_told := dispatcher.tell_of_money(p_tick, v_money, array(select budget_id
      from dispatcher.holds_of(v_groups, v_done -> 'closed')));
  select coalesce(sum(g.due), 0) into v_held from unnest(v_groups) as g where g.verdict = 'held' and g.is_open;
  return jsonb_build_object(
    'dispatched', v_done -> 'dispatched', 'held', v_held + jsonb_array_length(v_done -> 'closed'), 'warned',
        v_done -> 'warned',
    'held_by', dispatcher.held_by(v_groups, v_done -> 'closed', v_money.budgets),
    'blockers', dispatcher.blockers_of(v_groups, v_done -> 'closed'), 'errors', v_done -> 'errors',
    'locked', cardinality(v_groups) - cardinality(v_unheld), 'again', (v_done ->> 'dispatched')::integer >= v_batch,
    'budget_error', coalesce(v_broken, v_money.error, v_told), 'budgets_open', v_money.error is not null
        or v_broken is not null);
end
$$;
comment on function dispatcher.dispatch_queued_runs(dispatcher.tick) is
  'Hands out queued runs: by route priority, run priority and age, each with what its waiting adds. {dispatched, '
  'held, held_by, blockers ({type: budget | estimate_over_cap}), warned, locked (groups whose route '
  'or gateway another session holds), errors, budget_error, budgets_open, again}.';

create or replace function dispatcher.unlocked_runs(p_runs public.workflow_runs[]) returns public.workflow_runs[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_locked constant uuid[] := array(
    select claim.claim_token from public.workflow_claims as claim
     where claim.claim_token in (select run.claim_token from unnest(p_runs) as run) for update skip locked);
begin
  return array(
    select row(run.*)::public.workflow_runs from unnest(p_runs) as run
     where run.claim_token is null or run.claim_token = any (v_locked)
        or not exists (select from public.workflow_claims as claim where claim.claim_token = run.claim_token));
end
$$;
comment on function dispatcher.unlocked_runs(public.workflow_runs[]) is
  'Of runs the caller has locked, those whose claims it could lock as well. The others wait for the next pass.';

create or replace function dispatcher.runs_of_budget(p_tick dispatcher.tick, p_budget dispatcher.evaluated_budget,
    p_limit integer)
returns public.workflow_runs[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_runs public.workflow_runs[];
begin
  -- What costs money at this moment first.
  v_runs := array(
    select row(run.*)::public.workflow_runs from public.workflow_runs as run
      left join public.agent_profiles as profile on profile.tenant_id = run.tenant_id
          and profile.agent_id = run.owner_agent_id
     where run.tenant_id = p_tick.tenant_id and run.status in ('dispatched', 'claimed', 'running')
       and dispatcher.is_in_budget_scope(p_budget.scope, p_budget.scope_id, run.owner_agent_id, profile.department_id,
           run.workflow_type)
     order by run.created_at, run.id limit p_limit for update of run skip locked);
  return v_runs || array(
    select row(run.*)::public.workflow_runs from public.workflow_runs as run
      left join public.workflow_agent_routing as route on route.tenant_id = run.tenant_id
          and route.workflow_type = run.workflow_type
      left join public.agent_profiles as profile
        on profile.tenant_id = run.tenant_id and profile.agent_id = coalesce(run.pinned_agent_id, route.agent_id)
     -- What is kept back for later belongs to the budget of its day.
     where run.tenant_id = p_tick.tenant_id and run.status = 'queued'
       and (run.next_attempt_at is null or run.next_attempt_at <= now())
       and dispatcher.is_in_budget_scope(p_budget.scope, p_budget.scope_id,
           coalesce(run.pinned_agent_id, route.agent_id),
                                         profile.department_id, run.workflow_type)
     limit p_limit - cardinality(v_runs) for update of run skip locked);
end
$$;
comment on function dispatcher.runs_of_budget(dispatcher.tick, dispatcher.evaluated_budget, integer) is
  'Runs in the scope of a budget that are dispatched, claimed, running, or queued and due, locked; at most p_limit.';

create or replace function dispatcher.stop_runs(p_runs public.workflow_runs[], p_error text) returns uuid[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_ids uuid[];
begin
  update public.workflow_claims set ended_at = now(), ended_as = 'cancelled'
   where claim_token in (select run.claim_token from unnest(p_runs) as run) and ended_at is null;
  with stopped as (
    update public.workflow_runs set status = 'cancelled', finished_at = now(), last_error = p_error,
        last_error_at = now()
     where id in (select run.id from unnest(p_runs) as run) returning id)
  select coalesce(array_agg(id), '{}') into v_ids from stopped;
  perform dispatcher.drop_notifications(v_ids);
  return v_ids;
end
$$;
comment on function dispatcher.stop_runs(public.workflow_runs[], text) is
  'Cancels runs that the caller has locked with their claims, in one update; answers their ids.';

create or replace function dispatcher.try_to_stop(p_run public.workflow_runs, p_error text, out ids uuid[],
    out errors jsonb)
language plpgsql volatile set search_path = ''
as $$
begin
  errors := '[]';
  ids := dispatcher.stop_runs(array[p_run], p_error);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  ids := '{}';
  errors := dispatcher.row_error('stopped', p_run.id, sqlerrm, sqlstate);
end
$$;
comment on function dispatcher.try_to_stop(public.workflow_runs, text) is
  'Cancels one run; what that raises, as a list of errors.';

create or replace function dispatcher.stop_all(p_runs public.workflow_runs[], p_error text, out ids uuid[],
    out errors jsonb)
language plpgsql volatile set search_path = ''
as $$
declare
  v_run public.workflow_runs;
  v_one record;
begin
  errors := '[]';
  ids := dispatcher.stop_runs(p_runs, p_error);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  ids := '{}';
  foreach v_run in array p_runs loop
    v_one := dispatcher.try_to_stop(v_run, p_error);
    ids := ids || v_one.ids;
    errors := errors || v_one.errors;
  end loop;
end
$$;
comment on function dispatcher.stop_all(public.workflow_runs[], text) is
  'stop_runs in one update; one by one where that raises: then a run that raises is named and hides nobody.';

create or replace function dispatcher.stop_overspent_runs(p_tick dispatcher.tick, p_limit integer) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_money constant dispatcher.money := dispatcher.read_money(p_tick, 'hard_stop');
  v_budget dispatcher.evaluated_budget;
  v_runs public.workflow_runs[];
  v_reason text;
  v_part record;
  v_seen integer := 0;
  v_stopped integer := 0;
  v_errors jsonb := '[]';
  v_broken constant text := dispatcher.broken_budgets(v_money.budgets);
  v_told text := dispatcher.tell_budget_recoveries(p_tick.tenant_id, v_money.budgets);
begin
  foreach v_budget in array v_money.budgets loop
    continue when v_budget.error is not null or dispatcher.spent_of(v_budget, false) < dispatcher.cap_of(v_budget);
    v_reason := format('Budget hard stop: %s (%s)', v_budget.name, v_budget.period_key);
    perform dispatcher.note_workflow_actor('dispatcher', v_reason);
    v_runs := dispatcher.runs_of_budget(p_tick, v_budget, p_limit - v_seen);
    v_part := dispatcher.stop_all(dispatcher.unlocked_runs(v_runs), v_reason);
    v_told := coalesce(v_told, dispatcher.tell_budget_event(p_tick.tenant_id, v_budget, 'hard_stopped', v_part.ids));
    v_seen := v_seen + cardinality(v_runs);
    v_stopped := v_stopped + cardinality(v_part.ids);
    v_errors := v_errors || v_part.errors;
    exit when v_seen >= p_limit;
  end loop;
  return jsonb_build_object('stopped', v_stopped, 'errors', v_errors, 'again', v_seen >= p_limit and v_stopped > 0,
                            'budget_error', coalesce(v_broken, v_money.error, v_told),
                            'budgets_open', v_money.error is not null or v_broken is not null);
end
$$;
comment on function dispatcher.stop_overspent_runs(dispatcher.tick, integer) is
  'Cancels runs in the scope of every spent hard stop, at most p_limit a pass, and writes its one event: {stopped, '
  'errors, budget_error, again}.';

create or replace function dispatcher.is_stale_dispatch(p_run public.workflow_runs,
    p_settings public.dispatcher_settings) returns boolean
language sql stable set search_path = ''
as $$
  select p_run.dispatched_at < now() - make_interval(secs => p_settings.stale_dispatch_seconds)
      or p_run.dispatched_at > now() + interval '1 day'
$$;
comment on function dispatcher.is_stale_dispatch(public.workflow_runs, public.dispatcher_settings) is
  'Whether a dispatched run was not claimed in time. A dispatch from the day after tomorrow is no known time: nobody '
  'waits for it.';

create or replace function dispatcher.stale_dispatches(p_tick dispatcher.tick, p_limit integer)
    returns setof public.workflow_runs
language sql volatile set search_path = ''
as $$
  select run.* from public.workflow_runs as run
   where run.tenant_id = p_tick.tenant_id and run.status = 'dispatched'
     and dispatcher.is_stale_dispatch(run, p_tick.settings)
   order by run.dispatched_at limit p_limit for update skip locked
$$;
comment on function dispatcher.stale_dispatches(dispatcher.tick, integer) is
  'Dispatched runs that nobody claimed in time, locked.';

create or replace function dispatcher.target_of(p_run public.workflow_runs, out agent_id text, out department_id text,
    out gateway_id uuid, out is_open boolean)
language sql stable set search_path = ''
as $$
  select target.agent_id, profile.department_id, dispatcher.gateway_of_workflow_agent(p_run.tenant_id, target.agent_id),
         target.agent_id is not null and target.max_concurrent > 0
    from (select coalesce(p_run.pinned_agent_id, route.agent_id) as agent_id,
        coalesce(route.max_concurrent, 1) as max_concurrent
            from (select 1) as one_row
            left join public.workflow_agent_routing as route on route.tenant_id = p_run.tenant_id
                and route.workflow_type = p_run.workflow_type) as target
    left join public.agent_profiles as profile on profile.tenant_id = p_run.tenant_id
        and profile.agent_id = target.agent_id
$$;
comment on function dispatcher.target_of(public.workflow_runs) is
  'Where a run would go now: its pin or its route''s agent, with department and gateway; is_open: there is one, and '
  'the route is not disabled.';

create or replace function dispatcher.give_up_dispatch(p_run public.workflow_runs) returns void
language plpgsql volatile set search_path = ''
as $$
begin
  perform dispatcher.note_workflow_actor('dispatcher', 'nobody claimed it');
  update public.workflow_runs
     set status = 'failed', finished_at = now(), last_error_at = now(),
         last_error = format('Dispatch retries exhausted after %s attempts', p_run.dispatch_attempts)
   where id = p_run.id;
  perform dispatcher.drop_notifications(array[p_run.id]);
end
$$;
comment on function dispatcher.give_up_dispatch(public.workflow_runs) is
  'A run that nobody claimed in any of its attempts fails.';

create or replace function dispatcher.retry_stale_run(
  p_run public.workflow_runs, p_money dispatcher.money, p_gateways uuid[], out outcome text,
      out budgets dispatcher.evaluated_budget[]
)
language plpgsql volatile set search_path = ''
as $$
declare
  v_target constant record := dispatcher.target_of(p_run);
  v_usd constant numeric := dispatcher.workflow_estimate(p_money.estimates, p_run.workflow_type, 'usd');
  v_tokens constant numeric := dispatcher.workflow_estimate(p_money.estimates, p_run.workflow_type, 'tokens');
  v_gate record;
begin
  -- It must not stand in its own way.
  budgets := dispatcher.reserve_in_budgets(
    p_money.budgets, p_run.owner_agent_id,
    (select department_id from public.agent_profiles where tenant_id = p_run.tenant_id
        and agent_id = p_run.owner_agent_id),
    p_run.workflow_type, -coalesce(p_run.reserved_usd, 0), -coalesce(p_run.reserved_tokens, 0));
  v_gate := dispatcher.budget_verdict(budgets, v_target.agent_id, v_target.department_id, p_run.workflow_type, v_usd,
      v_tokens);
  if v_gate.verdict <> 'ok' or not v_target.is_open then
    outcome := case when v_gate.verdict <> 'ok' then 'held' else 'unrouted' end;
    perform dispatcher.note_workflow_actor('dispatcher', case outcome when 'held' then 'held by a budget'
        else 'its route is gone' end);
    update public.workflow_runs
       set status = 'queued', dispatched_at = null, reserved_usd = null, reserved_tokens = null,
           blocker_type = case when v_target.agent_id is null then 'no_route' end,
           blocker_description = case when v_target.agent_id is null
               then format('no route for workflow type %s', p_run.workflow_type) end
     where id = p_run.id;
  elsif v_target.gateway_id is not null and v_target.gateway_id <> all (p_gateways) then
    outcome := 'locked';
    budgets := p_money.budgets;
  else
    outcome := 'retried';
    perform dispatcher.note_workflow_actor('dispatcher', 'nobody claimed it in time');
    perform dispatcher.drop_notifications(array[p_run.id]);
    perform dispatcher.dispatch_runs(array[row(p_run.id, v_target.agent_id, v_target.gateway_id, v_usd,
        v_tokens)::dispatcher.run_choice]);
    budgets := dispatcher.reserve_in_budgets(budgets, v_target.agent_id, v_target.department_id, p_run.workflow_type,
        v_usd, v_tokens);
  end if;
end
$$;
comment on function dispatcher.retry_stale_run(public.workflow_runs, dispatcher.money, uuid[]) is
  'A fresh attempt for a stale run through the same budgets (retried), or back to the queue with no attempt spent '
  '(held, unrouted); locked: another session holds the agent''s gateway. budgets: as they stand after that.';

create or replace function dispatcher.retry_stale_dispatches(p_tick dispatcher.tick, p_limit integer) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_gateways constant uuid[] := dispatcher.held_gateways(p_tick);
  v_money dispatcher.money := dispatcher.read_money(p_tick);
  v_run public.workflow_runs;
  v_one record;
  v_done jsonb := '{"retried": 0, "failed": 0, "held": 0, "unrouted": 0, "locked": 0}';
  v_outcome text;
  v_seen integer := 0;
  v_errors jsonb := '[]';
begin
  v_money.budgets := dispatcher.tight_budgets(v_money.budgets, v_money.estimates, p_limit);
  for v_run in select * from dispatcher.stale_dispatches(p_tick, p_limit) loop
    v_seen := v_seen + 1;
    begin
      if v_run.dispatch_attempts::bigint - v_run.release_count > (p_tick.settings).max_dispatch_retries then
        perform dispatcher.give_up_dispatch(v_run);
        v_outcome := 'failed';
      else
        v_one := dispatcher.retry_stale_run(v_run, v_money, v_gateways);
        v_money.budgets := v_one.budgets;
        v_outcome := v_one.outcome;
      end if;
      v_done := v_done || jsonb_build_object(v_outcome, (v_done ->> v_outcome)::integer + 1);
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      v_errors := v_errors || dispatcher.row_error('retried', v_run.id, sqlerrm, sqlstate);
    end;
  end loop;
  return v_done - 'unrouted' || jsonb_build_object(
    'errors', v_errors, 'again', v_seen >= p_limit
        and v_seen > jsonb_array_length(v_errors) + (v_done ->> 'locked')::integer);
end
$$;
comment on function dispatcher.retry_stale_dispatches(dispatcher.tick, integer) is
  'Runs nobody claimed in time: out of retries they fail, whatever a budget says; else a fresh attempt through the '
  'same gate, or back to the queue where the gate holds it, with no attempt spent. {retried, failed, held, locked, '
  'errors, again}.';

create or replace function dispatcher.runs_over_deadline(p_tick dispatcher.tick, p_limit integer)
    returns setof public.workflow_runs
language sql volatile set search_path = ''
as $$
  select run.* from public.workflow_runs as run
   where run.tenant_id = p_tick.tenant_id and run.status in ('claimed', 'running') and run.deadline_at <= now()
   order by run.deadline_at limit p_limit for update skip locked
$$;
comment on function dispatcher.runs_over_deadline(dispatcher.tick, integer) is
  'Claimed and running runs over their deadline, locked.';

create or replace function dispatcher.time_out_run(p_run public.workflow_runs) returns void
language plpgsql volatile set search_path = ''
as $$
begin
  perform dispatcher.note_workflow_actor('dispatcher', 'over its deadline');
  perform dispatcher.end_workflow_claim(p_run, 'timed_out');
  update public.workflow_runs
     set status = 'timed_out', finished_at = now(), last_error_at = now(),
         last_error = format('Run exceeded timeout of %s minutes',
             dispatcher.workflow_timeout_minutes(p_run.tenant_id, p_run.workflow_type))
   where id = p_run.id;
end
$$;
comment on function dispatcher.time_out_run(public.workflow_runs) is
  'A run over its deadline becomes timed_out. The caller has locked it and its claim.';

create or replace function dispatcher.time_out_runs(p_tick dispatcher.tick, p_limit integer) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_runs constant public.workflow_runs[] := array(select row(run.*)::public.workflow_runs
      from dispatcher.runs_over_deadline(p_tick, p_limit) as run);
  v_run public.workflow_runs;
  v_count integer := 0;
  v_errors jsonb := '[]';
begin
  foreach v_run in array dispatcher.unlocked_runs(v_runs) loop
    begin
      perform dispatcher.time_out_run(v_run);
      v_count := v_count + 1;
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      v_errors := v_errors || dispatcher.row_error('timed_out', v_run.id, sqlerrm, sqlstate);
    end;
  end loop;
  return jsonb_build_object('timed_out', v_count, 'errors', v_errors, 'again', cardinality(v_runs) >= p_limit
      and v_count > 0);
end
$$;
comment on function dispatcher.time_out_runs(dispatcher.tick, integer) is
  'Claimed and running runs over their deadline become timed_out; the process one of our daemons has for them is '
  'asked to end. {timed_out, errors, again}.';

create or replace function dispatcher.silent_since(p_run public.workflow_runs) returns timestamptz
language sql stable set search_path = ''
as $$
  select coalesce(greatest(dispatcher.known_time(p_run.last_heartbeat_at), dispatcher.known_time(p_run.claimed_at)),
      '-infinity')
$$;
comment on function dispatcher.silent_since(public.workflow_runs) is
  'The last sign of life of a claimed run; -infinity where the row tells of none that a clock has shown.';

create or replace function dispatcher.silent_runs(p_tick dispatcher.tick, p_limit integer)
    returns setof public.workflow_runs
language sql volatile set search_path = ''
as $$
  select run.* from public.workflow_runs as run
   where run.tenant_id = p_tick.tenant_id and run.status in ('claimed', 'running')
     and dispatcher.silent_since(run) < now() - make_interval(secs => (p_tick.settings).stale_claim_seconds)
   order by run.last_heartbeat_at limit p_limit for update skip locked
$$;
comment on function dispatcher.silent_runs(dispatcher.tick, integer) is
  'Claimed and running runs without a heartbeat for too long, locked.';

create or replace function dispatcher.release_stale_claims(p_tick dispatcher.tick, p_limit integer) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_runs constant public.workflow_runs[] := array(select row(run.*)::public.workflow_runs
      from dispatcher.silent_runs(p_tick, p_limit) as run);
  v_run public.workflow_runs;
  v_released integer := 0;
  v_failed integer := 0;
  v_errors jsonb := '[]';
begin
  foreach v_run in array dispatcher.unlocked_runs(v_runs) loop
    begin
      perform dispatcher.note_workflow_actor('dispatcher', 'no heartbeat');
      v_run := dispatcher.return_workflow_run(v_run, 'no heartbeat');
      v_released := v_released + (v_run.status = 'queued')::integer;
      v_failed := v_failed + (v_run.status = 'failed')::integer;
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      v_errors := v_errors || dispatcher.row_error('released', v_run.id, sqlerrm, sqlstate);
    end;
  end loop;
  return jsonb_build_object('released', v_released, 'failed', v_failed, 'errors', v_errors,
                            'again', cardinality(v_runs) >= p_limit and v_released + v_failed > 0);
end
$$;
comment on function dispatcher.release_stale_claims(dispatcher.tick, integer) is
  'Claims without a heartbeat for too long are lost: the run returns to the queue, the fourth time it fails. '
  '{released, failed, errors, again}.';

create or replace function dispatcher.unrouted_types(p_tenant_id uuid) returns table (workflow_type text)
language sql stable set search_path = ''
as $$
  select queued.workflow_type from dispatcher.queued_types(p_tenant_id) as queued
   where not exists (select from public.workflow_agent_routing as route
                      where route.tenant_id = p_tenant_id and route.workflow_type = queued.workflow_type)
$$;
comment on function dispatcher.unrouted_types(uuid) is 'Types with queued runs and without a route.';

create or replace function dispatcher.runs_to_mark(p_tenant_id uuid) returns setof uuid
language sql stable set search_path = ''
as $$
  select run.id from dispatcher.unrouted_types(p_tenant_id) as unrouted
    join public.workflow_runs as run on run.tenant_id = p_tenant_id and run.workflow_type = unrouted.workflow_type
        and run.status = 'queued'
   where run.pinned_agent_id is null and run.blocker_type is distinct from 'no_route'
  union all
  select run.id from public.workflow_runs as run
   where run.tenant_id = p_tenant_id and run.status = 'queued' and run.blocker_type = 'no_route'
     and (run.pinned_agent_id is not null
          or exists (select from public.workflow_agent_routing as route
                      where route.tenant_id = p_tenant_id and route.workflow_type = run.workflow_type))
$$;
comment on function dispatcher.runs_to_mark(uuid) is
  'Queued runs whose blocker no_route is missing, or is true no more.';

create or replace function dispatcher.mark_runs(p_run_ids uuid[]) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_count integer;
begin
  with marked as (
    update public.workflow_runs as run
       set blocker_type = case when target.has_agent then null else 'no_route' end,
           blocker_description = case when target.has_agent then null
               else format('no route for workflow type %s', run.workflow_type) end
      from (select one.id, (dispatcher.target_of(one)).agent_id is not null as has_agent
          from public.workflow_runs as one
             where one.id = any (p_run_ids) and one.status = 'queued') as target
     where run.id = target.id
    returning run.blocker_type)
  select count(*) filter (where blocker_type = 'no_route') into v_count from marked;
  return v_count;
end
$$;
comment on function dispatcher.mark_runs(uuid[]) is
  'Writes or takes away blocker no_route of runs the caller has locked; answers how many carry it now.';

create or replace function dispatcher.mark_unrouted_runs(p_tick dispatcher.tick, p_limit integer) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_ids constant uuid[] := array(
    select run.id from public.workflow_runs as run
     where run.id in (select id from dispatcher.runs_to_mark(p_tick.tenant_id) as id limit p_limit)
         for update skip locked);
  v_id uuid;
  v_count integer := 0;
  v_errors jsonb := '[]';
begin
  begin
    v_count := dispatcher.mark_runs(v_ids);
  exception when others then
    if dispatcher.must_abort(sqlstate) then raise; end if;
    foreach v_id in array v_ids loop
      begin
        v_count := v_count + dispatcher.mark_runs(array[v_id]);
      exception when others then
        if dispatcher.must_abort(sqlstate) then raise; end if;
        v_errors := v_errors || dispatcher.row_error('unrouted', v_id, sqlerrm, sqlstate);
      end;
    end loop;
  end;
  return jsonb_build_object('unrouted', v_count, 'errors', v_errors,
                            'again', cardinality(v_ids) >= p_limit
                                and jsonb_array_length(v_errors) < cardinality(v_ids));
end
$$;
comment on function dispatcher.mark_unrouted_runs(dispatcher.tick, integer) is
  'Queued runs whose type has no route carry blocker no_route until it has one. {unrouted, errors, again}.';

create or replace function dispatcher.old_notifications(p_tenant_id uuid, p_limit integer) returns setof uuid
language sql stable set search_path = ''
as $$
  select id from public.workflow_notifications
   where tenant_id = p_tenant_id and state in ('sent', 'failed', 'obsolete') and created_at < now() - interval '7 days'
       limit p_limit
$$;
comment on function dispatcher.old_notifications(uuid, integer) is 'Notifications that were dealt with a week ago.';

create or replace function dispatcher.prune_workflow_rows(p_tick dispatcher.tick, p_limit integer) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_count integer;
begin
  delete from public.workflow_notifications where id in (
    select note.id from public.workflow_notifications as note
     where note.id in (select id from dispatcher.old_notifications(p_tick.tenant_id, p_limit) as id)
         for update skip locked);
  get diagnostics v_count = row_count;
  return jsonb_build_object('pruned', v_count, 'again', v_count >= p_limit);
end
$$;
comment on function dispatcher.prune_workflow_rows(dispatcher.tick, integer) is
  'Notifications that were dealt with a week ago go. {pruned, again}.';

-- The one home of "its run was taken away from whoever works on it": by a time-out, an operator, a budget, or for want
-- of a heartbeat.
create or replace view dispatcher.taken_wakes with (security_invoker = true) as
select wake.id as wake_id, wake.tenant_id, wake.gateway_id, wake.instance_id,
       format('run %s is %s', run.id, case claim.ended_as when 'no heartbeat' then 'released' when 'orphaned'
           then 'given to another'
                                        else coalesce(claim.ended_as, case when run.finished_at is not null
                                            then run.status else 'taken away' end)
                                        end) as cause
  from public.agent_wakes as wake
  join public.workflow_claims as claim on claim.wake_id = wake.id
  join public.workflow_runs as run on run.id = claim.run_id
 where wake.state in ('starting', 'running')
   and (claim.ended_as in ('cancelled', 'timed_out', 'no heartbeat', 'orphaned')
        -- Changed by hand, past our functions.
        or (claim.ended_at is null and (run.status in ('cancelled', 'timed_out')
        or run.claim_token is distinct from claim.claim_token)));
comment on view dispatcher.taken_wakes is
  'Live wakes whose run was ended or taken away from outside: their processes are to be stopped. A run that its own '
  'agent ended is none.';
revoke all on dispatcher.taken_wakes from public, anon, authenticated;
grant select on dispatcher.taken_wakes to service_role;

create or replace function dispatcher.wakes_to_stop(p_instance_id uuid) returns jsonb
language sql stable set search_path = ''
as $$
  select coalesce(jsonb_agg(jsonb_build_object('wake_id', taken.wake_id, 'cause', taken.cause) order by taken.wake_id),
      '[]')
    from (select wake_id, min(cause) as cause from dispatcher.taken_wakes
           where gateway_id = (select gateway_id from public.dispatcher_instances where id = p_instance_id)
             and instance_id = p_instance_id
           group by wake_id) as taken
$$;
comment on function dispatcher.wakes_to_stop(uuid) is
  'Live wakes of an instance whose run was ended from outside: their processes are to be stopped.';

create or replace function dispatcher.next_workflow_moment(p_tick dispatcher.tick) returns double precision
language sql stable set search_path = ''
as $$
  select min(due.seconds) from (
    select dispatcher.seconds_until(min(next_attempt_at)) as seconds
      from public.workflow_runs where tenant_id = p_tick.tenant_id and status = 'queued' and next_attempt_at > now()
    union all
    select dispatcher.seconds_until(min(dispatcher.known_time(dispatched_at)))
           + (p_tick.settings).stale_dispatch_seconds
      from public.workflow_runs where tenant_id = p_tick.tenant_id and status = 'dispatched'
    union all
    select least(dispatcher.seconds_until(min(deadline_at) filter (where isfinite(deadline_at))),
                 dispatcher.seconds_until(min(greatest(dispatcher.known_time(last_heartbeat_at),
                     dispatcher.known_time(claimed_at))))
                   + (p_tick.settings).stale_claim_seconds)
      from public.workflow_runs where tenant_id = p_tick.tenant_id and status in ('claimed', 'running')) as due
$$;
comment on function dispatcher.next_workflow_moment(dispatcher.tick) is
  'In how many seconds something becomes due by itself, below 0 for what is due already; NULL when nothing does.';

create or replace function dispatcher.is_phase_due(p_tick dispatcher.tick, p_phase text) returns boolean
language plpgsql volatile set search_path = ''
as $$
begin
  case p_phase
    when 'stopped' then return exists (select from public.budgets
                                 where tenant_id = p_tick.tenant_id and active and action_on_exceed = 'hard_stop');
    when 'dispatched' then return exists (select from public.workflow_runs
                                    where tenant_id = p_tick.tenant_id and status = 'queued'
                                      and (next_attempt_at is null or next_attempt_at <= now()))
                        or exists (select from public.budgets where tenant_id = p_tick.tenant_id and active);
    when 'retried' then return exists (select from public.workflow_runs as run where run.tenant_id = p_tick.tenant_id
        and run.status = 'dispatched'
                                   and dispatcher.is_stale_dispatch(run, p_tick.settings));
    when 'timed_out' then return exists (select from public.workflow_runs
                                   where tenant_id = p_tick.tenant_id and status in ('claimed', 'running')
                                     and deadline_at <= now());
    when 'released' then return exists (select from public.workflow_runs as run where run.tenant_id = p_tick.tenant_id
        and run.status in ('claimed', 'running')
                                    and dispatcher.silent_since(run)
                                        < now() - make_interval(secs => (p_tick.settings).stale_claim_seconds));
    when 'unrouted' then return exists (select from dispatcher.runs_to_mark(p_tick.tenant_id));
    when 'pruned' then return exists (select from dispatcher.old_notifications(p_tick.tenant_id, 1));
  end case;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return true;  -- its own call says what is wrong
end
$$;
comment on function dispatcher.is_phase_due(dispatcher.tick, text) is 'Whether a phase has something to do.';

create or replace function dispatcher.look_at_runs(p_tick dispatcher.tick) returns jsonb
language sql volatile set search_path = ''
as $$
  select jsonb_build_object('stop_wakes', dispatcher.wakes_to_stop(p_tick.instance_id), 'due', coalesce(
           (select jsonb_agg(phase.name order by phase.place)
              from unnest(array['stopped', 'dispatched', 'retried', 'timed_out', 'released', 'unrouted',
                  'pruned']) with ordinality as phase (name, place)
             where dispatcher.is_phase_due(p_tick, phase.name)), '[]'))
$$;
comment on function dispatcher.look_at_runs(dispatcher.tick) is
  'Where a tick begins: {due (the phases that have something to do, in their order), stop_wakes}.';

create or replace function dispatcher.note_tick(p_tick dispatcher.tick, p_facts jsonb) returns jsonb
language plpgsql volatile set search_path = ''
as $$
begin
  if jsonb_typeof(p_facts) is distinct from 'object' or length(p_facts::text) > 100000 then
    raise exception 'p_facts must be an object with the numbers of a tick, below 100 kB' using errcode = 'OD002';
  end if;
  update public.dispatcher_instances set last_tick = p_facts || jsonb_build_object('at', now())
   where id in (select id from public.dispatcher_instances where id = p_tick.instance_id for update skip locked);
  return jsonb_build_object('stop_wakes', dispatcher.wakes_to_stop(p_tick.instance_id), 'next_in',
      dispatcher.next_workflow_moment(p_tick));
end
$$;
comment on function dispatcher.note_tick(dispatcher.tick, jsonb) is
  'Where a tick ends: keeps what it did, for status and stats; answers {next_in, stop_wakes}.';

create or replace function dispatcher.hint_other_gateways(p_tick dispatcher.tick) returns void
language sql volatile set search_path = ''
as $$
  select dispatcher.send_gateway_hint(other.gateway_id, 'run', '{}')
    from (select note.gateway_id from public.workflow_notifications as note
           where note.tenant_id = p_tick.tenant_id and note.state = 'pending' and note.created_at = now()
          union
          select taken.gateway_id from dispatcher.taken_wakes as taken
           where taken.tenant_id = p_tick.tenant_id and taken.instance_id is distinct from p_tick.instance_id) as other
   where other.gateway_id is distinct from p_tick.gateway_id
$$;
comment on function dispatcher.hint_other_gateways(dispatcher.tick) is
  'Hints the gateways whose agents a phase has given something to do, or whose processes are to be stopped.';

create or replace function dispatcher.run_phase(p_tick dispatcher.tick, p_phase text) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_limit constant integer := 500;
  v_answer jsonb;
begin
  if p_phase in ('stopped', 'dispatched', 'retried') and not dispatcher.has_the_pass(p_tick) then
    return jsonb_build_object('busy', true);
  end if;
  case p_phase
    when 'stopped' then v_answer := dispatcher.stop_overspent_runs(p_tick, v_limit);
    when 'dispatched' then v_answer := dispatcher.dispatch_queued_runs(p_tick);
    when 'retried' then v_answer := dispatcher.retry_stale_dispatches(p_tick, v_limit);
    when 'timed_out' then v_answer := dispatcher.time_out_runs(p_tick, v_limit);
    when 'released' then v_answer := dispatcher.release_stale_claims(p_tick, v_limit);
    when 'unrouted' then v_answer := dispatcher.mark_unrouted_runs(p_tick, v_limit);
    when 'pruned' then v_answer := dispatcher.prune_workflow_rows(p_tick, v_limit);
  end case;
  perform dispatcher.hint_other_gateways(p_tick);
  return v_answer;
end
$$;
comment on function dispatcher.run_phase(dispatcher.tick, text) is
  'One pass of one phase; {busy: true} when another pass that counts is under way.';

drop function if exists public.dispatch_workflows(uuid, jsonb);
create or replace function public.dispatch_workflows(p_instance_id uuid, p_phase text default 'look',
    p_facts jsonb default null)
returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_tick constant dispatcher.tick := dispatcher.tick_of(p_instance_id);
  v_started constant timestamptz := clock_timestamp();
  v_answer jsonb;
begin
  perform set_config('dispatcher.quiet', 'on', true);
  case p_phase
    when 'look' then v_answer := dispatcher.look_at_runs(v_tick);
    when 'note' then v_answer := dispatcher.note_tick(v_tick, p_facts);
    when 'stopped', 'dispatched', 'retried', 'timed_out', 'released', 'unrouted', 'pruned' then
      v_answer := dispatcher.run_phase(v_tick, p_phase);
    else raise exception 'unknown phase %', left(p_phase, 100) using errcode = 'OD002',
      hint = 'look, stopped, dispatched, retried, timed_out, released, unrouted, pruned or note';
  end case;
  return jsonb_build_object('phase', p_phase, 'busy', false, 'again', false, 'errors', jsonb_build_array()) || v_answer
         || jsonb_build_object('ms', round(extract(epoch from clock_timestamp() - v_started) * 1000));
end
$$;
comment on function public.dispatch_workflows(uuid, text, jsonb) is
  'One phase of a tick for the tenant of an instance, at most 500 runs: {phase, busy, again, errors, ms} and its '
  'numbers. look: {due, stop_wakes}; stopped (hard stops): {stopped, budget_error}; dispatched: {dispatched, held, '
  'held_by, warned, locked, budget_error, budgets_open (runs went out without them)}; retried: {retried, failed, '
  'held, locked}; timed_out; released: {released, failed}; unrouted; pruned; note keeps p_facts as last_tick: '
  '{next_in, stop_wakes}. busy: another pass that counts slots and money is under way.';

create or replace function public.workflow_stats(p_tenant_id uuid) returns jsonb
language sql stable set search_path = '' set lock_timeout = '1s'
as $$
  select jsonb_build_object(
    'code', 'ok', 'now', now(),
    'by_status', (select coalesce(jsonb_object_agg(counted.status, counted.number), '{}')
                    from (select status, count(*) as number from public.workflow_runs where tenant_id = p_tenant_id
                        group by status) as counted),
    'by_type', (select coalesce(jsonb_agg(jsonb_build_object(
                  'workflow_type', types.workflow_type, 'agent_id', route.agent_id, 'priority', route.priority,
                      'max_concurrent', route.max_concurrent,
                  'timeout_minutes', route.timeout_minutes, 'queued', coalesce(types.queued, 0), 'active',
                      coalesce(types.active, 0),
                  'held_by', case when types.queued > 0 then coalesce(tick.held_by -> types.workflow_type, '[]')
                      else '[]' end,
                  'blocker', case when types.queued > 0 then tick.blockers ->> types.workflow_type end,
                  'estimate', estimates.of_types -> types.workflow_type,
                  'oldest_queued_seconds', round(-dispatcher.seconds_until(types.oldest)))
                      order by types.workflow_type), '[]')
                  from (select coalesce(open.workflow_type, routed.workflow_type) as workflow_type, open.queued,
                      open.active, open.oldest
                          from (select workflow_type, count(*) filter (where status = 'queued') as queued,
                                       count(*) filter (where status <> 'queued') as active,
                                       min(queued_at) filter (where status = 'queued' and isfinite(queued_at)) as oldest
                                  from public.workflow_runs where tenant_id = p_tenant_id
                                   and (status in ('queued', 'dispatched', 'claimed', 'running')
                                        or paused_from in ('dispatched', 'claimed', 'running'))
                                 group by workflow_type) as open
                          full join (select workflow_type from public.workflow_agent_routing
                              where tenant_id = p_tenant_id) as routed
                               using (workflow_type)) as types
                  left join public.workflow_agent_routing as route
                    on route.tenant_id = p_tenant_id and route.workflow_type = types.workflow_type
                  cross join (select dispatcher.workflow_estimates(p_tenant_id) as of_types) as estimates
                  left join (select last_tick -> 'held_by' as held_by, last_tick -> 'blockers' as blockers
                               from public.dispatcher_instances
                              where tenant_id = p_tenant_id and last_tick is not null order by last_tick ->> 'at' desc
                                  limit 1) as tick on true),
    'no_route', (select count(*) from public.workflow_runs as run where run.tenant_id = p_tenant_id
        and run.status = 'queued' and run.pinned_agent_id is null
                    and not exists (select from public.workflow_agent_routing as route
                        where route.tenant_id = p_tenant_id and route.workflow_type = run.workflow_type)),
    'finished_last_24h', (select coalesce(jsonb_object_agg(recent.status, recent.number), '{}')
                            from (select status, count(*) as number from public.workflow_runs
                                   where tenant_id = p_tenant_id and finished_at > now() - interval '24 hours'
                                       group by status) as recent),
    'cost_last_24h_usd', (select coalesce(sum(booking.cost_usd), 0) from public.workflow_bookings as booking
                           where booking.tenant_id = p_tenant_id and booking.at > now() - interval '24 hours'),
    'tokens_last_24h', (select coalesce(sum(booking.tokens), 0) from public.workflow_bookings as booking
                         where booking.tenant_id = p_tenant_id and booking.at > now() - interval '24 hours'),
    'notifications', (select coalesce(jsonb_object_agg(noted.state, noted.number), '{}')
                        from (select state, count(*) as number from public.workflow_notifications
                            where tenant_id = p_tenant_id group by state) as noted),
    'last_tick', (select last_tick from public.dispatcher_instances where tenant_id = p_tenant_id
        and last_tick is not null order by last_tick ->> 'at' desc limit 1))
$$;
comment on function public.workflow_stats(uuid) is
  'Runs by status and by type with their routes, the budgets that held them at the last tick and what a run is '
  'estimated to cost; runs without a route, the last day (its cost as the books have it), notifications, the last '
  'tick.';

select dispatcher.restrict_functions(array[
  'dispatch_workflows', 'workflow_stats'
]);

notify pgrst, 'reload schema';
commit;
