-- The life of a workflow run: one function per thing that may happen to a run. Each is one transaction on the
-- database's clock; a refusal is data ({applied: false, code}), never an error. The only wait is for the run's own row
-- (and its claim), and a short one: then the answer is `busy`, and the caller asks again. Locks are taken in this
-- order: run, its claims, its notifications.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.workflow_run_json(p_run public.workflow_runs) returns jsonb
language sql stable set search_path = ''
as $$ select dispatcher.shown_row(to_jsonb(p_run) - array['claim_token', 'reserved_usd', 'reserved_tokens',
    'assumed_usd', 'assumed_tokens', 'request_key']) $$;
comment on function dispatcher.workflow_run_json(public.workflow_runs) is
  'A run as it is shown: everything but its fence and what is internal to budgets.';

create or replace function dispatcher.workflow_answer(p_code text, p_run public.workflow_runs) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object('applied', p_code in ('ok', 'already', 'kept'), 'code', p_code, 'run_id', p_run.id,
                            'status', p_run.status,
                            'run', case when p_run.id is not null then dispatcher.workflow_run_json(p_run)
                                -- Whose it is not learns no session: that is half of its fence.
                                - case when p_code in ('not_yours', 'claimed_by_another')
                                       then array['session_id', 'wake_id'] else '{}'::text[] end end)
$$;
comment on function dispatcher.workflow_answer(text, public.workflow_runs) is
  'The answer of what may be done to a run: {applied, code, run_id, status, run}; run is the record as it is now, '
  'null when there is none.';

create or replace function dispatcher.refuse_run(p_run_id uuid, p_code text) returns jsonb
language sql immutable set search_path = ''
as $$ select jsonb_build_object('applied', false, 'code', p_code, 'run_id', p_run_id, 'status', null, 'run', null) $$;
comment on function dispatcher.refuse_run(uuid, text) is
  'The refusal without a record: not_found, bad_session, or busy (another session holds the run, ask again).';

create or replace function dispatcher.invalid(p_faults text[]) returns jsonb
language sql immutable set search_path = ''
as $$ select jsonb_build_object('applied', false, 'code', 'invalid', 'faults', to_jsonb(p_faults)) $$;
comment on function dispatcher.invalid(text[]) is
  'The refusal of arguments: {applied: false, code: invalid, faults}, every fault named.';

create or replace function dispatcher.faults_of_text(p_name text, p_value text, p_longest integer, p_is_needed boolean)
    returns text[]
language sql immutable set search_path = ''
as $$
  select case when p_is_needed and coalesce(btrim(p_value), '') = '' then array[p_name || ': empty']
              when length(p_value) > p_longest
              then array[format('%s: must be %s to %s characters', p_name, p_is_needed::integer, p_longest)]
                  else '{}' end
$$;
comment on function dispatcher.faults_of_text(text, text, integer, boolean) is
  'What is wrong with a text argument, if anything.';

create or replace function dispatcher.faults_of_tenant(p_tenant_id uuid) returns text[]
language sql stable set search_path = ''
as $$
  select case when exists (select from public.tenants where id = p_tenant_id) then '{}'::text[]
      else array['tenant_id: unknown'] end
$$;
comment on function dispatcher.faults_of_tenant(uuid) is 'A tenant that does not exist is a fault.';

create or replace function dispatcher.lock_workflow_run(p_tenant_id uuid, p_run_id uuid) returns public.workflow_runs
language sql volatile set search_path = ''
as $$ select * from public.workflow_runs where id = p_run_id and tenant_id = p_tenant_id for update $$;
comment on function dispatcher.lock_workflow_run(uuid, uuid) is
  'The run, locked; all NULL when the tenant has none of that id. Waits for at most lock_timeout.';

create or replace function dispatcher.workflow_claim_state(p_run public.workflow_runs, p_session text,
    p_claim_token uuid) returns text
language sql immutable set search_path = ''
as $$
  select case
    when p_run.id is null then 'not_found'
    when p_session is null or p_run.session_id is distinct from p_session
      or (p_claim_token is not null and p_run.claim_token is distinct from p_claim_token) then 'not_yours'
    when p_run.status in ('claimed', 'running') then 'ok'
    when p_run.status in ('waiting_for_approval', 'blocked') then 'held'
    else 'finished' end
$$;
comment on function dispatcher.workflow_claim_state(public.workflow_runs, text, uuid) is
  'Whether a session (and the claim token, where it gives one) holds a run: ok, held (paused, still its own), '
  'finished (was its own), not_yours, not_found. No session holds nothing.';

create or replace function dispatcher.end_workflow_claim(p_run public.workflow_runs, p_as text) returns void
language sql volatile set search_path = ''
as $$
  update public.workflow_claims set ended_at = now(), ended_as = p_as where claim_token = p_run.claim_token and ended_at
      is null
$$;
comment on function dispatcher.end_workflow_claim(public.workflow_runs, text) is
  'Closes the present claim of a run in the history of claims.';

create or replace function dispatcher.drop_notifications(p_run_ids uuid[]) returns void
language plpgsql volatile set search_path = '' set lock_timeout = '100ms'
as $$
begin
  -- One that somebody holds is dropped when it is claimed: its run has moved on.
  update public.workflow_notifications set state = 'obsolete'
   where id in (select note.id from public.workflow_notifications as note
                 where note.run_id = any (p_run_ids) and note.state = 'pending' for update skip locked);
  perform dispatcher.settle_constraints('public.workflow_notifications');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault((select tenant_id from public.workflow_runs where id = p_run_ids[1]), null,
                                'dropped notification of a run', format('%s (%s)', sqlerrm, sqlstate));
end
$$;
comment on function dispatcher.drop_notifications(uuid[]) is
  'Nobody has to be told of these runs any more. A side write: the claim of a notification looks at its run again. '
  'Never waits.';

create or replace function dispatcher.book(p_run public.workflow_runs, p_attempt integer, p_agent text, p_usd numeric,
    p_tokens bigint, p_source text) returns void
language sql volatile security definer set search_path = ''
as $$
  insert into public.workflow_bookings (tenant_id, run_id, attempt, agent_id, workflow_type, cost_usd, tokens, source)
  select p_run.tenant_id, p_run.id, p_attempt, p_agent, p_run.workflow_type, coalesce(p_usd, 0), coalesce(p_tokens, 0),
         coalesce(nullif(current_setting('dispatcher.booking_source', true), ''), p_source)
   where coalesce(p_usd, 0) <> 0 or coalesce(p_tokens, 0) <> 0
$$;
comment on function dispatcher.book(public.workflow_runs, integer, text, numeric, bigint, text) is
  'Books what a claim that its run has left behind has cost besides; what a run itself costs is booked by trigger.';

create or replace function dispatcher.settle_workflow_claim(p_run public.workflow_runs, p_as text) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_configured constant record := dispatcher.configured_estimates(p_run.tenant_id);
  v_usd constant numeric := coalesce(dispatcher.known_cost(p_run.cost_estimate),
      dispatcher.known_cost(p_run.assumed_usd), greatest(dispatcher.known_cost(p_run.reserved_usd), v_configured.usd));
  v_tokens constant bigint := coalesce(dispatcher.known_tokens(p_run.input_tokens, p_run.output_tokens),
      case when p_run.assumed_tokens >= 0 then p_run.assumed_tokens end,
      greatest(p_run.reserved_tokens, v_configured.tokens));
begin
  -- Whoever gave a sign of life has worked: what it did not report is assumed, never nothing.
  if p_run.reported_at is null and p_run.started_at is null and p_run.finished_at is null then
    return;
  elsif p_run.finished_at is not null and p_run.claimed_at is null and p_run.reported_at is null then
    return;
  end if;
  insert into public.workflow_claims as claim (
    claim_token, tenant_id, run_id, workflow_type, agent_id, session_id, attempt, claimed_at, ended_at, ended_as,
        cost_usd, tokens)
  values (coalesce(p_run.claim_token, gen_random_uuid()), p_run.tenant_id, p_run.id, p_run.workflow_type,
          p_run.owner_agent_id, coalesce(p_run.session_id, 'unknown'), p_run.dispatch_attempts,
          coalesce(p_run.claimed_at, now()), now(), p_as, v_usd, v_tokens)
  on conflict (claim_token) do update set cost_usd = excluded.cost_usd, tokens = excluded.tokens;
  perform dispatcher.book(p_run, p_run.dispatch_attempts, p_run.owner_agent_id,
      v_usd - dispatcher.booked_usd(p_run), v_tokens - dispatcher.booked_tokens(p_run), 'assumed');
end
$$;
comment on function dispatcher.settle_workflow_claim(public.workflow_runs, text) is
  'Keeps with the present claim of a run what is booked for it, and books what is assumed for what it did not report. '
  'A claim without a report or a heartbeat cost nothing. The caller empties the run.';

create or replace function public.poll_workflow_runs(p_tenant_id uuid, p_agent text, p_limit integer) returns jsonb
language sql stable set search_path = '' set lock_timeout = '1s'
as $$
  select jsonb_build_object('agent', p_agent, 'count', count(*), 'runs',
      coalesce(jsonb_agg(dispatcher.workflow_run_json(pending)
                              order by pending.priority desc, pending.dispatched_at, pending.id), '[]'))
    from (select * from public.workflow_runs
           where tenant_id = p_tenant_id and status = 'dispatched' and (p_agent is null or owner_agent_id = p_agent)
           order by priority desc, dispatched_at, id limit least(greatest(p_limit, 1), 100)) as pending
$$;
comment on function public.poll_workflow_runs(uuid, text, integer) is
  'The runs that wait to be claimed by an agent (or by any): {agent, count, runs}.';

create or replace function dispatcher.is_same_attempt(p_run public.workflow_runs, p_session text, p_wake_id uuid)
    returns boolean
language sql stable set search_path = ''
as $$
  -- One session name may serve attempt after attempt. The process of an earlier wake must not be handed what a later
  -- one holds.
  select p_run.session_id = p_session
     and (p_wake_id is null or p_run.wake_id is null or p_run.wake_id = p_wake_id
          or (select asking.claimed_at >= holding.claimed_at from public.agent_wakes as asking,
              public.agent_wakes as holding
               where asking.id = p_wake_id and holding.id = p_run.wake_id) is true)
$$;
comment on function dispatcher.is_same_attempt(public.workflow_runs, text, uuid) is
  'Whether the session that asks for a run again is the one that holds it: the same name, and not from a wake before '
  'the one that holds it.';

create or replace function dispatcher.refuse_claim(p_run public.workflow_runs, p_agent text) returns text
language sql immutable set search_path = ''
as $$
  select case when p_run.status = 'queued' then 'not_dispatched'
              when p_run.status in ('claimed', 'running') then 'claimed_by_another'
              when p_run.finished_at is not null then 'finished'
              when p_run.status <> 'dispatched' then 'held'
              when p_agent is not null and p_agent is distinct from p_run.owner_agent_id then 'not_yours' end
$$;
comment on function dispatcher.refuse_claim(public.workflow_runs, text) is
  'Why a run cannot be claimed by an agent; NULL when it can.';

create or replace function dispatcher.claimed_answer(p_code text, p_run public.workflow_runs) returns jsonb
language sql stable set search_path = ''
as $$
  select dispatcher.workflow_answer(p_code, p_run)
         || jsonb_build_object('claim_token', p_run.claim_token, 'deadline_in',
             dispatcher.seconds_until(p_run.deadline_at))
$$;
comment on function dispatcher.claimed_answer(text, public.workflow_runs) is
  'The answer to who holds a run now, with its fence; deadline_in (s) is NULL when the deadline is no known time.';

create or replace function dispatcher.take_run(p_run public.workflow_runs, p_session text, p_agent text, p_wake_id uuid)
returns public.workflow_runs
language plpgsql volatile set search_path = ''
as $$
begin
  perform dispatcher.note_workflow_actor(coalesce(p_agent, p_run.owner_agent_id), null);
  update public.workflow_runs as run
     set status = 'claimed', claimed_at = now(), claimed_by = coalesce(p_agent, run.owner_agent_id),
         session_id = p_session, assumed_usd = null, assumed_tokens = null, reported_at = null,
         cost_estimate = case when run.reported_at is null then run.cost_estimate end,
         claim_token = gen_random_uuid(), last_heartbeat_at = now(), started_at = null, blocker_type = null,
             blocker_description = null,
         deadline_at = dispatcher.deadline_of_run(now(), dispatcher.workflow_timeout_minutes(run.tenant_id,
             run.workflow_type)),
         wake_id = (select wake.id from public.agent_wakes as wake
                     where wake.id = p_wake_id and wake.tenant_id = run.tenant_id
                       and wake.state in ('starting', 'running'))
   where id = p_run.id returning * into p_run;
  insert into public.workflow_claims (claim_token, tenant_id, run_id, workflow_type, agent_id, session_id, attempt,
      wake_id)
  values (p_run.claim_token, p_run.tenant_id, p_run.id, p_run.workflow_type, p_run.owner_agent_id, p_session,
          p_run.dispatch_attempts, p_run.wake_id);
  perform dispatcher.drop_notifications(array[p_run.id]);
  return p_run;
end
$$;
comment on function dispatcher.take_run(public.workflow_runs, text, text, uuid) is
  'Gives a dispatched run, which the caller has locked, to a session: a new fence, a deadline, a line in the history '
  'of claims.';

create or replace function public.claim_workflow_run(
  p_tenant_id uuid, p_run_id uuid, p_session text, p_agent text default null, p_wake_id uuid default null
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_run public.workflow_runs;
  v_refusal text;
begin
  if coalesce(btrim(p_session), '') = '' or length(p_session) > 500 then
    return dispatcher.refuse_run(p_run_id, 'bad_session');
  end if;
  v_run := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  if v_run.id is null then
    return dispatcher.refuse_run(p_run_id, 'not_found');
  elsif v_run.status in ('claimed', 'running') and dispatcher.is_same_attempt(v_run, p_session, p_wake_id) then
    return dispatcher.claimed_answer('already', v_run);
  end if;
  v_refusal := dispatcher.refuse_claim(v_run, p_agent);
  if v_refusal is not null then
    return dispatcher.workflow_answer(v_refusal, v_run);
  end if;
  return dispatcher.claimed_answer('ok', dispatcher.take_run(v_run, p_session, p_agent, p_wake_id));
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;
comment on function public.claim_workflow_run(uuid, uuid, text, text, uuid) is
  'Takes a dispatched run for a session: one wins. Answers the run, its claim_token and deadline_in (s); already for '
  'the session that holds it, unless it asks from an earlier wake than the one that holds it; else not_dispatched, '
  'claimed_by_another, not_yours, finished, held, not_found, bad_session, busy. p_wake_id: the wake the session runs '
  'in.';

create or replace function dispatcher.workflow_usage_values(p_usage jsonb) returns jsonb
language plpgsql immutable set search_path = ''
as $$
declare
  v_values jsonb := '{}';
  v_field text;
  v_text text;
  v_number numeric;
begin
  foreach v_field in array array['cost_usd', 'input_tokens', 'output_tokens', 'cached_tokens'] loop
    v_text := p_usage ->> v_field;
    if v_text is null then
      continue;
    end if;
    begin
      v_number := v_text::numeric;
      if v_number >= 0 and v_number < 'Infinity' and v_number < (case v_field when 'cost_usd' then 1000000
          else 1e15 end) then
        v_values := v_values || jsonb_build_object(v_field, case v_field when 'cost_usd' then round(v_number, 6)
            else trunc(v_number) end);
      end if;
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      continue;  -- not a number: unknown, as if it had not been said
    end;
  end loop;
  return v_values || case when btrim(p_usage ->> 'model') <> ''
      then jsonb_build_object('model', left(p_usage ->> 'model', 300))
                          else '{}'::jsonb end;
end
$$;
comment on function dispatcher.workflow_usage_values(jsonb) is
  'What a report of usage {cost_usd, input_tokens, output_tokens, cached_tokens, model} really says: what is no '
  'number, negative, NaN or beyond belief is left out, so it stays unknown.';

create or replace function dispatcher.book_workflow_usage(p_run public.workflow_runs, p_usage jsonb)
    returns public.workflow_runs
language plpgsql volatile set search_path = ''
as $$
declare
  v_usage constant jsonb := dispatcher.workflow_usage_values(coalesce(p_usage, '{}'));
  v_says_something constant boolean := v_usage ?| array['cost_usd', 'input_tokens', 'output_tokens'];
begin
  if v_usage = '{}' then
    return p_run;
  end if;
  update public.workflow_runs
     set cost_estimate = coalesce((v_usage ->> 'cost_usd')::numeric, cost_estimate),
         input_tokens = coalesce((v_usage ->> 'input_tokens')::bigint, input_tokens),
         output_tokens = coalesce((v_usage ->> 'output_tokens')::bigint, output_tokens),
         cached_tokens = coalesce((v_usage ->> 'cached_tokens')::bigint, cached_tokens),
         model_id = coalesce(v_usage ->> 'model', model_id),
         reported_at = case when v_says_something then now() else reported_at end
   where id = p_run.id returning * into p_run;
  return p_run;
end
$$;
comment on function dispatcher.book_workflow_usage(public.workflow_runs, jsonb) is
  'Keeps what a run is said to have cost. Totals, not increments: a repeat changes nothing, and what is new is booked '
  'in the period it arrives in.';

create or replace function dispatcher.booked_since(p_before public.workflow_runs, p_run public.workflow_runs)
    returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object('cost_usd', dispatcher.booked_usd(p_run) - dispatcher.booked_usd(p_before),
                            'tokens', dispatcher.booked_tokens(p_run) - dispatcher.booked_tokens(p_before))
$$;
comment on function dispatcher.booked_since(public.workflow_runs, public.workflow_runs) is
  'What a call has booked for the claim of a run: {cost_usd, tokens}, below 0 where it took something back.';

drop function if exists dispatcher.book_lost_claim_usage(uuid, uuid, text, uuid, jsonb);
create or replace function dispatcher.book_lost_claim(p_run public.workflow_runs, p_session text, p_claim_token uuid,
    p_usage jsonb) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_usage constant jsonb := dispatcher.workflow_usage_values(coalesce(p_usage, '{}'));
  v_claim public.workflow_claims;
  v_usd numeric;
  v_tokens bigint;
begin
  select claim.* into v_claim from public.workflow_claims as claim
   where claim.run_id = p_run.id and claim.session_id = p_session and claim.ended_at is not null
     and claim.claim_token is distinct from p_run.claim_token
     and (p_claim_token is null or claim.claim_token = p_claim_token)
   order by claim.claimed_at desc limit 1 for update;
  if v_claim.claim_token is null or not v_usage ?| array['cost_usd', 'input_tokens', 'output_tokens'] then
    return null;
  end if;
  v_usd := coalesce((v_usage ->> 'cost_usd')::numeric, v_claim.cost_usd);
  v_tokens := coalesce(dispatcher.known_tokens((v_usage ->> 'input_tokens')::bigint,
      (v_usage ->> 'output_tokens')::bigint), v_claim.tokens);
  update public.workflow_claims set cost_usd = v_usd, tokens = v_tokens where claim_token = v_claim.claim_token;
  v_usd := coalesce(v_usd, 0) - coalesce(v_claim.cost_usd, 0);
  v_tokens := coalesce(v_tokens, 0) - coalesce(v_claim.tokens, 0);
  perform dispatcher.book(p_run, v_claim.attempt, v_claim.agent_id, v_usd, v_tokens, 'report');
  return jsonb_build_object('cost_usd', v_usd, 'tokens', v_tokens);
end
$$;
comment on function dispatcher.book_lost_claim(public.workflow_runs, text, uuid, jsonb) is
  'The cost of a claim that was lost meanwhile, in all: the money is spent all the same, so what is new is booked now. '
  'Answers what was booked, {cost_usd, tokens}; NULL where the session has lost no claim of the run, or says nothing.';

create or replace function dispatcher.refuse_workflow_caller(
  p_code text, p_run public.workflow_runs, p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid,
      p_usage jsonb
) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_before constant public.workflow_runs := p_run;
  v_booked jsonb;
begin
  if p_run.id is null then
    return dispatcher.refuse_run(p_run_id, 'not_found') || '{"usage_booked": false}';
  elsif p_code = 'not_yours' then
    v_booked := dispatcher.book_lost_claim(p_run, p_session, p_claim_token, p_usage);
  elsif dispatcher.workflow_usage_values(coalesce(p_usage, '{}')) <> '{}' then
    p_run := dispatcher.book_workflow_usage(p_run, p_usage);
    v_booked := dispatcher.booked_since(v_before, p_run);
  end if;
  return dispatcher.workflow_answer(p_code, p_run)
      || jsonb_build_object('usage_booked', v_booked is not null, 'booked', v_booked);
end
$$;
comment on function dispatcher.refuse_workflow_caller(text, public.workflow_runs, uuid, uuid, text, uuid, jsonb) is
  'The answer to a session that does not hold the run (any more), or may not end it while it is paused; a cost it '
  'brings is booked nevertheless: usage_booked, booked {cost_usd, tokens}.';

create or replace function dispatcher.wake_worked_on_a_run(p_wake_id uuid) returns boolean
language sql stable set search_path = ''
as $$ select exists (select from public.workflow_claims as claim where claim.wake_id = p_wake_id
    and claim.worked_at is not null) $$;
comment on function dispatcher.wake_worked_on_a_run(uuid) is
  'Whether a run that was claimed in a wake showed a sign of life: work on a run is progress.';

create or replace function dispatcher.note_work_on_claim(p_run public.workflow_runs) returns void
language sql volatile set search_path = ''
as $$
  update public.workflow_claims set worked_at = now(), wake_id = coalesce(wake_id, p_run.wake_id)
   where claim_token = p_run.claim_token and worked_at is null
$$;
comment on function dispatcher.note_work_on_claim(public.workflow_runs) is
  'Keeps with a claim that its session showed a sign of life, and in which wake.';

create or replace function dispatcher.start_workflow_run(p_run public.workflow_runs) returns public.workflow_runs
language plpgsql volatile set search_path = ''
as $$
begin
  update public.workflow_runs
     set status = case status when 'claimed' then 'running' else status end, last_heartbeat_at = now(),
         started_at = case status when 'claimed' then now() else started_at end
   where id = p_run.id returning * into p_run;
  perform dispatcher.note_work_on_claim(p_run);
  return p_run;
end
$$;
comment on function dispatcher.start_workflow_run(public.workflow_runs) is
  'A sign of life of a held run: claimed becomes running.';

create or replace function public.heartbeat_workflow_run(
  p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid default null, p_usage jsonb default null
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_run public.workflow_runs;
  v_before public.workflow_runs;
  v_code text;
begin
  v_run := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  v_code := dispatcher.workflow_claim_state(v_run, p_session, p_claim_token);
  if v_code not in ('ok', 'held') then
    return dispatcher.refuse_workflow_caller(v_code, v_run, p_tenant_id, p_run_id, p_session, p_claim_token, p_usage);
  end if;
  perform dispatcher.note_workflow_actor(v_run.claimed_by, null);
  v_run := dispatcher.start_workflow_run(v_run);
  v_before := v_run;
  v_run := dispatcher.book_workflow_usage(v_run, p_usage);
  return dispatcher.workflow_answer('ok', v_run) || jsonb_build_object(
    'booked', dispatcher.booked_since(v_before, v_run),
    'deadline_in', dispatcher.seconds_until(dispatcher.put_off(v_run.deadline_at, v_run.paused_at)));
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;
comment on function public.heartbeat_workflow_run(uuid, uuid, text, uuid, jsonb) is
  'A sign of life from the session that holds the run: the first one makes it running. May carry usage so far. '
  'not_yours, finished, not_found: stop working on it; busy: ask again.';

create or replace function public.report_workflow_usage(
  p_tenant_id uuid, p_run_id uuid, p_session text, p_usage jsonb, p_claim_token uuid default null
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_before public.workflow_runs;
  v_run public.workflow_runs;
  v_code text;
begin
  v_before := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  v_code := dispatcher.workflow_claim_state(v_before, p_session, p_claim_token);
  if v_code not in ('ok', 'held', 'finished') then
    return dispatcher.refuse_workflow_caller(v_code, v_before, p_tenant_id, p_run_id, p_session, p_claim_token,
        p_usage);
  end if;
  v_run := dispatcher.book_workflow_usage(v_before, p_usage);
  return dispatcher.workflow_answer('ok', v_run) || jsonb_build_object(
    'usage_booked', dispatcher.workflow_usage_values(coalesce(p_usage, '{}')) <> '{}',
    'booked', dispatcher.booked_since(v_before, v_run));
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;
comment on function public.report_workflow_usage(uuid, uuid, text, jsonb, uuid) is
  'What the run has cost so far, in all. Also after its end (ok), and after a lost claim (not_yours, booked with that '
  'claim). usage_booked: whether anything could be kept; booked: what that added, {cost_usd, tokens}.';

create or replace function dispatcher.repeat_end(p_run public.workflow_runs, p_usage jsonb) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_before constant public.workflow_runs := p_run;
  v_usage constant jsonb := dispatcher.workflow_usage_values(coalesce(p_usage, '{}'));
begin
  -- A repeat says the same once more: only a cost that was not known yet is news. Another one is for the usage command.
  if p_run.cost_estimate is null then
    p_run := dispatcher.book_workflow_usage(p_run, p_usage);
  end if;
  return dispatcher.workflow_answer('already', p_run) || jsonb_build_object(
    'booked', dispatcher.booked_since(v_before, p_run),
    'usage_ignored', v_before.cost_estimate is not null
        and (v_usage ->> 'cost_usd')::numeric is distinct from v_before.cost_estimate and v_usage ? 'cost_usd');
end
$$;
comment on function dispatcher.repeat_end(public.workflow_runs, jsonb) is
  'The answer to a session that ends its run once more. usage_ignored: it brought another cost than the one that is '
  'booked, and that was left as it is.';

create or replace function dispatcher.keep_end(p_run public.workflow_runs, p_status text, p_output jsonb, p_error text,
    p_usage jsonb) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_before constant public.workflow_runs := p_run;
begin
  p_run := dispatcher.book_workflow_usage(p_run, p_usage);
  update public.workflow_runs
     set kept_status = p_status,
         kept_error = case p_status when 'failed' then dispatcher.clean_inbox_reason(p_error) end,
         output_summary = coalesce(p_output, output_summary)
   where id = p_run.id returning * into p_run;
  return dispatcher.workflow_answer('kept', p_run) || jsonb_build_object(
    'usage_booked', dispatcher.workflow_usage_values(coalesce(p_usage, '{}')) <> '{}',
    'booked', dispatcher.booked_since(v_before, p_run));
end
$$;
comment on function dispatcher.keep_end(public.workflow_runs, text, jsonb, text, jsonb) is
  'Keeps how a session ended its run while that is held: the work is done and is not to be done again.';

create or replace function dispatcher.apply_kept_end(p_run public.workflow_runs) returns void
language plpgsql volatile set search_path = ''
as $$
begin
  if p_run.status = 'claimed' and p_run.kept_status = 'completed' then
    perform dispatcher.start_workflow_run(p_run);  -- as running it comes here again
    return;
  end if;
  perform dispatcher.note_workflow_actor(p_run.claimed_by, 'ended while it was held');
  perform dispatcher.end_workflow_claim(p_run, p_run.kept_status);
  perform dispatcher.note_work_on_claim(p_run);
  update public.workflow_runs
     set status = p_run.kept_status, finished_at = now(), wake_id = null,
         last_error = case p_run.kept_status when 'failed' then p_run.kept_error else last_error end,
         last_error_at = case p_run.kept_status when 'failed' then now() else last_error_at end
   where id = p_run.id;
end
$$;
comment on function dispatcher.apply_kept_end(public.workflow_runs) is
  'Ends a run that went on after its session had ended it. The caller holds its row.';

create or replace function dispatcher.finish_workflow_run(
  p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid, p_status text, p_output jsonb, p_error text,
      p_usage jsonb
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_before public.workflow_runs;
  v_run public.workflow_runs;
  v_code text;
begin
  v_run := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  v_code := dispatcher.workflow_claim_state(v_run, p_session, p_claim_token);
  if v_code = 'finished' and v_run.status = p_status then
    return dispatcher.repeat_end(v_run, p_usage);
  elsif v_code = 'held' and v_run.paused_from in ('claimed', 'running') then
    return dispatcher.keep_end(v_run, p_status, p_output, p_error, p_usage);
  end if;
  if v_code <> 'ok' then
    return dispatcher.refuse_workflow_caller(v_code, v_run, p_tenant_id, p_run_id, p_session, p_claim_token, p_usage);
  end if;
  perform dispatcher.note_workflow_actor(v_run.claimed_by, p_error);
  if p_status = 'completed' then
    v_run := dispatcher.start_workflow_run(v_run);
  end if;
  v_before := v_run;
  perform dispatcher.end_workflow_claim(v_run, p_status);
  v_run := dispatcher.book_workflow_usage(v_run, p_usage);
  perform dispatcher.note_work_on_claim(v_run);
  update public.workflow_runs
     set status = p_status, finished_at = now(), output_summary = coalesce(p_output, output_summary), wake_id = null,
         last_error = case p_status when 'failed' then dispatcher.clean_inbox_reason(p_error) else last_error end,
         last_error_at = case p_status when 'failed' then now() else last_error_at end
   where id = p_run_id returning * into v_run;
  return dispatcher.workflow_answer('ok', v_run)
      || jsonb_build_object('booked', dispatcher.booked_since(v_before, v_run));
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;
comment on function dispatcher.finish_workflow_run(uuid, uuid, text, uuid, text, jsonb, text, jsonb) is
  'Ends a run as completed or failed on behalf of the session that holds it. already for a repeat; kept while the run '
  'is held: its end is applied when it goes on.';

create or replace function public.complete_workflow_run(
  p_tenant_id uuid, p_run_id uuid, p_session text, p_output jsonb default null, p_usage jsonb default null,
      p_claim_token uuid default null
) returns jsonb
language sql volatile set search_path = '' set lock_timeout = '1s'
as $$ select dispatcher.finish_workflow_run(p_tenant_id, p_run_id, p_session, p_claim_token, 'completed', p_output,
    null, p_usage) $$;
comment on function public.complete_workflow_run(uuid, uuid, text, jsonb, jsonb, uuid) is
  'The session that holds the run finished it, with its output and usage {cost_usd, input_tokens, output_tokens, '
  'cached_tokens, model}. A repeat is already; kept: the run is held, and this is its end when it goes on; busy: ask '
  'again. booked: what that added to the books, {cost_usd, tokens}.';

create or replace function public.fail_workflow_run(
  p_tenant_id uuid, p_run_id uuid, p_session text, p_error text, p_usage jsonb default null,
      p_claim_token uuid default null
) returns jsonb
language sql volatile set search_path = '' set lock_timeout = '1s'
as $$ select dispatcher.finish_workflow_run(p_tenant_id, p_run_id, p_session, p_claim_token, 'failed', null, p_error,
    p_usage) $$;
comment on function public.fail_workflow_run(uuid, uuid, text, text, jsonb, uuid) is
  'The session that holds the run gave it up, with the reason. A repeat is already; kept: the run is held, and this is '
  'its end when it goes on; busy: ask again.';

create or replace function dispatcher.return_workflow_run(p_run public.workflow_runs, p_how text)
    returns public.workflow_runs
language plpgsql volatile set search_path = ''
as $$
begin
  perform dispatcher.end_workflow_claim(p_run, p_how);
  if p_run.release_count >= 3 then
    -- The last claim's cost stays with the run: it is its end.
    perform dispatcher.note_workflow_actor(current_setting('dispatcher.actor', true), 'released too often');
    update public.workflow_runs
       set status = 'failed', finished_at = now(), wake_id = null, last_error_at = now(),
           last_error = format('Claim lost after %s releases (%s)', p_run.release_count, p_how)
     where id = p_run.id returning * into p_run;
  else
    perform dispatcher.settle_workflow_claim(p_run, p_how);
    update public.workflow_runs
       set status = 'queued', release_count = release_count + 1, dispatched_at = null, claimed_at = null,
           claimed_by = null,
           started_at = null, deadline_at = null, last_heartbeat_at = null, claim_token = null, session_id = null,
               wake_id = null,
           reserved_usd = null, reserved_tokens = null, cost_estimate = null, input_tokens = null, output_tokens = null,
           cached_tokens = null, reported_at = null, assumed_usd = null, assumed_tokens = null
     where id = p_run.id returning * into p_run;
  end if;
  return p_run;
end
$$;
comment on function dispatcher.return_workflow_run(public.workflow_runs, text) is
  'Gives a claim back: the run returns to the queue with its reservation freed, at most 3 times, then it fails. The '
  'caller has locked it.';

create or replace function dispatcher.has_released(
  p_run public.workflow_runs, p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid
) returns boolean
language sql stable set search_path = ''
as $$
  select p_run.status in ('queued', 'dispatched')
     and exists (select from public.workflow_claims
                  where run_id = p_run_id and tenant_id = p_tenant_id and session_id = p_session
                    and ended_as = 'released'
                    and (p_claim_token is null or claim_token = p_claim_token))
$$;
comment on function dispatcher.has_released(public.workflow_runs, uuid, uuid, text, uuid) is
  'Whether a session that does not hold a run has given it back before: then its release is a repeat.';

create or replace function public.release_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text,
    p_claim_token uuid default null)
returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_run public.workflow_runs;
  v_code text;
begin
  v_run := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  v_code := dispatcher.workflow_claim_state(v_run, p_session, p_claim_token);
  if v_code = 'not_yours' and dispatcher.has_released(v_run, p_tenant_id, p_run_id, p_session, p_claim_token) then
    return dispatcher.workflow_answer('already', v_run);
  elsif v_code <> 'ok' then
    return dispatcher.refuse_workflow_caller(v_code, v_run, p_tenant_id, p_run_id, p_session, p_claim_token, null);
  end if;
  perform dispatcher.note_workflow_actor(v_run.claimed_by, 'released');
  return dispatcher.workflow_answer('ok', dispatcher.return_workflow_run(v_run, 'released'));
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;
comment on function public.release_workflow_run(uuid, uuid, text, uuid) is
  'The session that holds the run gives it back to the queue; the fourth time it fails. A repeat is already; busy: '
  'ask again.';

create or replace function dispatcher.audit_workflow_action(
  p_tenant_id uuid, p_actor text, p_action text, p_target text, p_before jsonb, p_after jsonb,
      p_allowed boolean default true
) returns void
language plpgsql volatile security definer set search_path = '' set lock_timeout = '100ms'
as $$
begin
  insert into public.workflow_audit_log (tenant_id, actor, action, class, severity, target, before, after, allowed)
  values (p_tenant_id, coalesce(nullif(left(p_actor, 300), ''), 'unknown'), p_action, 'intervention', 'warning',
      p_target,
          p_before, p_after, p_allowed);
  perform dispatcher.settle_constraints('public.workflow_audit_log');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_tenant_id, null, 'audit of ' || p_action, format('%s (%s)', sqlerrm, sqlstate));
end
$$;
comment on function dispatcher.audit_workflow_action(uuid, text, text, text, jsonb, jsonb, boolean) is
  'One line in workflow_audit_log. A side write: when it fails, what it tells of is done all the same and the fault '
  'is noted.';

create or replace function dispatcher.correct_run(p_run public.workflow_runs, p_session text, p_usage jsonb)
    returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_before constant public.workflow_runs := p_run;
  v_booked jsonb;
begin
  if p_session is not null and p_session is distinct from p_run.session_id then
    v_booked := dispatcher.book_lost_claim(p_run, p_session, null, p_usage);
  elsif p_run.claimed_at is not null and coalesce(p_run.paused_from, p_run.status) not in ('queued', 'dispatched') then
    p_run := dispatcher.book_workflow_usage(p_run, p_usage);
    v_booked := dispatcher.booked_since(v_before, p_run);
  end if;
  return dispatcher.workflow_answer(case when v_booked is null then 'nothing_booked' else 'ok' end, p_run)
      || jsonb_build_object('booked', v_booked);
end
$$;
comment on function dispatcher.correct_run(public.workflow_runs, text, jsonb) is
  'Books what a run, which the caller has locked, or a session it has lost, has really cost in all.';

create or replace function public.correct_workflow_usage(
  p_tenant_id uuid, p_run_id uuid, p_usage jsonb, p_actor text, p_reason text default null,
      p_session text default null
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '2s'
as $$
declare
  v_run public.workflow_runs;
  v_usage constant jsonb := dispatcher.workflow_usage_values(coalesce(p_usage, '{}'));
  v_answer jsonb;
begin
  if not v_usage ?| array['cost_usd', 'input_tokens', 'output_tokens'] then
    return dispatcher.invalid(array['usage: neither a cost nor tokens, from 0 on']);
  end if;
  v_run := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  if v_run.id is null then
    return dispatcher.refuse_run(p_run_id, 'not_found');
  end if;
  perform set_config('dispatcher.booking_source', 'correction', true);
  v_answer := dispatcher.correct_run(v_run, p_session, v_usage);
  perform set_config('dispatcher.booking_source', '', true);
  if v_answer ->> 'code' = 'ok' then
    perform dispatcher.audit_workflow_action(p_tenant_id, p_actor, 'correct_usage', 'run:' || p_run_id,
      jsonb_build_object('cost_usd', v_run.cost_estimate, 'input_tokens', v_run.input_tokens,
                         'output_tokens', v_run.output_tokens),
      v_usage || jsonb_build_object('session', left(p_session, 500), 'reason', left(p_reason, 4000),
                                    'booked', v_answer -> 'booked'));
  end if;
  return v_answer;
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;
comment on function public.correct_workflow_usage(uuid, uuid, jsonb, text, text, text) is
  'An operator says what a run has really cost in all ({cost_usd, input_tokens, output_tokens}), also after its end; '
  'p_session: a session the run has lost. The difference is booked now; audited. Answers {applied, code: ok | '
  'nothing_booked (nobody has worked on it) | invalid | not_found | busy, booked {cost_usd, tokens}, run}.';

create or replace function dispatcher.faults_of_delay(p_seconds double precision, p_not_before timestamptz)
    returns text[]
language sql immutable set search_path = ''
as $$
  select case when p_seconds < 0 or p_seconds > 315360000 or p_seconds = 'NaN'
      then array['delay_seconds: outside 0 to 315360000']
              else '{}' end
         || case when not isfinite(p_not_before) then array['not_before: infinite'] else '{}' end
$$;
comment on function dispatcher.faults_of_delay(double precision, timestamptz) is
  'What is wrong with when a run may go out: at most ten years of delay, and no infinite time.';

create or replace function dispatcher.faults_of_new_run(
  p_tenant_id uuid, p_workflow_type text, p_priority integer, p_initiator text, p_task_id text, p_agent text,
      p_request_key text
) returns text[]
language sql stable set search_path = ''
as $$
  select dispatcher.faults_of_tenant(p_tenant_id) || dispatcher.faults_of_text('workflow_type', p_workflow_type, 200,
      true)
      || dispatcher.faults_of_text('initiator', p_initiator, 500, false)
          || dispatcher.faults_of_text('task_id', p_task_id, 500, false)
      || dispatcher.faults_of_text('agent', p_agent, 200, false)
          || dispatcher.faults_of_text('request_key', p_request_key, 500, false)
      || case when abs(p_priority::bigint) > 1000000 then array['priority: outside -1000000 to 1000000'] else '{}' end
$$;
comment on function dispatcher.faults_of_new_run(uuid, text, integer, text, text, text, text) is
  'What is wrong with a run that is to be queued; empty when nothing is.';

create or replace function dispatcher.differs_from_run(p_run public.workflow_runs, p_workflow_type text,
    p_input jsonb, p_agent text) returns text[]
language sql immutable set search_path = ''
as $$
  select case when p_run.workflow_type <> btrim(p_workflow_type) then array['workflow type'] else '{}'::text[] end
      || case when p_run.input_payload <> coalesce(p_input, '{}') then array['input'] else '{}'::text[] end
      || case when p_agent is not null and p_run.pinned_agent_id is distinct from nullif(btrim(p_agent), '')
              then array['agent'] else '{}'::text[] end
$$;
comment on function dispatcher.differs_from_run(public.workflow_runs, text, jsonb, text) is
  'In what a run that is to be queued differs from the one that has its key already.';

drop function if exists public.enqueue_workflow_run(uuid, text, jsonb, integer, text, text, text, timestamptz, text);
create or replace function public.enqueue_workflow_run(
  p_tenant_id uuid, p_workflow_type text, p_input jsonb default '{}', p_priority integer default 0,
      p_initiator text default null,
  p_task_id text default null, p_agent text default null, p_not_before timestamptz default null,
      p_request_key text default null,
  p_delay_seconds double precision default null
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_faults constant text[] := dispatcher.faults_of_new_run(p_tenant_id, p_workflow_type, p_priority, p_initiator,
      p_task_id, p_agent, p_request_key)
                              || dispatcher.faults_of_delay(p_delay_seconds, p_not_before);
  v_run public.workflow_runs;
  v_differs text[];
begin
  if cardinality(v_faults) > 0 then
    return dispatcher.invalid(v_faults);
  end if;
  insert into public.workflow_runs as run (
    tenant_id, workflow_type, input_payload, priority, initiator, task_id, pinned_agent_id, request_key,
        next_attempt_at)
  values (p_tenant_id, btrim(p_workflow_type), coalesce(p_input, '{}'), coalesce(p_priority, 0), p_initiator, p_task_id,
          nullif(btrim(p_agent), ''), nullif(p_request_key, ''),
          greatest(p_not_before, case when p_delay_seconds > 0 then now() + make_interval(secs => p_delay_seconds) end))
  on conflict (tenant_id, request_key) where request_key is not null do nothing
  returning * into v_run;
  if v_run.id is not null then
    return dispatcher.workflow_answer('ok', v_run)
      || jsonb_build_object('routed', v_run.pinned_agent_id is not null
          or exists (select from public.workflow_agent_routing as route
           where route.tenant_id = p_tenant_id and route.workflow_type = v_run.workflow_type
             and route.max_concurrent > 0));
  end if;
  select * into v_run from public.workflow_runs where tenant_id = p_tenant_id and request_key = p_request_key;
  v_differs := dispatcher.differs_from_run(v_run, p_workflow_type, p_input, p_agent);
  if cardinality(v_differs) > 0 then
    return dispatcher.workflow_answer('key_taken', v_run) || jsonb_build_object('faults', jsonb_build_array(format(
      'request_key: run %s has it, with another %s', v_run.id, array_to_string(v_differs, ' and '))));
  end if;
  return dispatcher.workflow_answer('already', v_run);
exception when lock_not_available then
  return dispatcher.refuse_run(null, 'busy');
end
$$;
comment on function public.enqueue_workflow_run(
  uuid, text, jsonb, integer, text, text, text, timestamptz, text, double precision
) is
  'Puts a run into the queue. p_agent pins it to an agent, p_delay_seconds (by the database''s clock) or p_not_before '
  'keeps it back, p_request_key makes a repeat answer the same run (already), and something else under the same key is '
  'refused (key_taken). invalid and key_taken name every fault.';

create or replace function dispatcher.stop_workflow_run(p_run public.workflow_runs, p_error text)
    returns public.workflow_runs
language plpgsql volatile set search_path = ''
as $$
begin
  perform dispatcher.end_workflow_claim(p_run, 'cancelled');
  update public.workflow_runs set status = 'cancelled', finished_at = now(), last_error = p_error, last_error_at = now()
   where id = p_run.id returning * into p_run;
  perform dispatcher.drop_notifications(array[p_run.id]);
  return p_run;
end
$$;
comment on function dispatcher.stop_workflow_run(public.workflow_runs, text) is 'Cancels a run the caller has locked.';

create or replace function public.cancel_workflow_run(p_tenant_id uuid, p_run_id uuid, p_actor text,
    p_reason text default null) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_before public.workflow_runs;
  v_run public.workflow_runs;
begin
  v_before := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  if v_before.id is null then
    return dispatcher.refuse_run(p_run_id, 'not_found');
  elsif v_before.status = 'cancelled' then
    return dispatcher.workflow_answer('already', v_before);
  elsif v_before.finished_at is not null then
    return dispatcher.workflow_answer('finished', v_before);
  end if;
  perform dispatcher.note_workflow_actor(p_actor, p_reason);
  v_run := dispatcher.stop_workflow_run(v_before, coalesce(nullif(btrim(left(p_reason, 4000)), ''),
                                                           format('Cancelled by %s',
                                                               coalesce(nullif(left(p_actor, 300), ''), 'unknown'))));
  perform dispatcher.audit_workflow_action(p_tenant_id, p_actor, 'cancel_run', 'run:' || p_run_id,
      jsonb_build_object('status', v_before.status),
                                           jsonb_build_object('status', v_run.status, 'reason', left(p_reason, 4000)));
  return dispatcher.workflow_answer('ok', v_run);
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;
comment on function public.cancel_workflow_run(uuid, uuid, text, text) is
  'Cancels a run that is not finished; audited. Its process, where a daemon has one, is stopped. busy: another '
  'session holds the run, ask again.';

create or replace function dispatcher.start_anew(p_run public.workflow_runs) returns public.workflow_runs
language plpgsql volatile set search_path = ''
as $$
begin
  perform set_config('dispatcher.override_run', p_run.id::text, true);
  update public.workflow_runs
     set status = 'queued', dispatch_attempts = 0, release_count = 0, queued_at = now(), dispatched_at = null,
         claimed_at = null,
         claimed_by = null, started_at = null, deadline_at = null, last_heartbeat_at = null, next_attempt_at = null,
             claim_token = null,
         session_id = null, wake_id = null, reserved_usd = null, reserved_tokens = null, cost_estimate = null,
             input_tokens = null,
         output_tokens = null, cached_tokens = null, reported_at = null, assumed_usd = null, assumed_tokens = null,
         last_error = null, last_error_at = null
   where id = p_run.id returning * into p_run;
  perform set_config('dispatcher.override_run', '', true);
  delete from public.workflow_respawns where run_id = p_run.id;
  delete from public.workflow_notifications where run_id = p_run.id;
  return p_run;
end
$$;
comment on function dispatcher.start_anew(public.workflow_runs) is
  'Puts a failed run, which the caller has locked, back into the queue as if it were new.';

create or replace function public.retry_workflow_run(p_tenant_id uuid, p_run_id uuid, p_actor text,
    p_reason text default null) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_before public.workflow_runs;
  v_run public.workflow_runs;
begin
  v_before := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  if v_before.id is null then
    return dispatcher.refuse_run(p_run_id, 'not_found');
  elsif v_before.status not in ('failed', 'timed_out') then
    return dispatcher.workflow_answer('not_failed', v_before);
  end if;
  -- What the failed try cost stays spent.
  perform dispatcher.settle_workflow_claim(v_before, v_before.status);
  perform dispatcher.note_workflow_actor(p_actor, coalesce(p_reason, 'override_failure'));
  v_run := dispatcher.start_anew(v_before);
  perform dispatcher.audit_workflow_action(
    p_tenant_id, p_actor, 'override_failure', 'run:' || p_run_id,
    jsonb_build_object('status', v_before.status, 'last_error', v_before.last_error),
    jsonb_build_object('status', v_run.status, 'reason', left(p_reason, 4000)));
  return dispatcher.workflow_answer('ok', v_run);
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;
comment on function public.retry_workflow_run(uuid, uuid, text, text) is
  'override_failure: a failed or timed out run starts anew, with all its attempts; audited. The only way out of a '
  'final state. busy: another session holds the run, ask again.';

create or replace function public.list_workflow_runs(
  p_tenant_id uuid, p_status text default null, p_workflow_type text default null, p_agent text default null,
      p_limit integer default 50
) returns jsonb
language sql stable set search_path = '' set lock_timeout = '1s'
as $$
  select jsonb_build_object('count', count(*), 'runs',
      coalesce(jsonb_agg(dispatcher.workflow_run_json(listed) - 'input_payload' - 'output_summary'
                              order by listed.created_at desc, listed.id), '[]'))
    from (select * from public.workflow_runs
           where tenant_id = p_tenant_id and (p_status is null or status = p_status)
             and (p_workflow_type is null or workflow_type = p_workflow_type)
             and (p_agent is null or owner_agent_id = p_agent or pinned_agent_id = p_agent)
           order by created_at desc, id limit least(greatest(p_limit, 1), 1000)) as listed
$$;
comment on function public.list_workflow_runs(uuid, text, text, text, integer) is
  'The newest runs, without their payloads: {count, runs}.';

create or replace function public.show_workflow_run(p_tenant_id uuid, p_run_id uuid) returns jsonb
language sql stable set search_path = '' set lock_timeout = '1s'
as $$
  select case when run.id is null then jsonb_build_object('code', 'not_found', 'run_id', p_run_id) else
    jsonb_build_object('code', 'ok', 'run', dispatcher.workflow_run_json(run),
      'events', (select coalesce(jsonb_agg(jsonb_build_object('at', event.at, 'from', event.from_status, 'to',
          event.to_status, 'attempt', event.attempt,
                   'actor', event.actor, 'reason', event.reason) order by event.id), '[]')
                       from public.workflow_run_events as event where event.run_id = p_run_id),
      'claims', (select coalesce(jsonb_agg(to_jsonb(claim) - array['claim_token', 'tenant_id', 'run_id',
          'workflow_type'] order by claim.claimed_at), '[]')
                   from public.workflow_claims as claim where claim.run_id = p_run_id),
      'bookings', (select coalesce(jsonb_agg(to_jsonb(booking) - array['id', 'tenant_id', 'run_id', 'workflow_type']
          order by booking.id), '[]')
                     from public.workflow_bookings as booking where booking.run_id = p_run_id),
      'notifications', (select coalesce(jsonb_agg(to_jsonb(note) - array['claim_token', 'tenant_id', 'run_id']
          order by note.attempt), '[]')
                          from public.workflow_notifications as note where note.run_id = p_run_id),
      'approvals', (select coalesce(jsonb_agg(to_jsonb(approval) - array['tenant_id', 'run_id']
          order by approval.created_at), '[]')
                      from public.workflow_approvals as approval where approval.run_id = p_run_id)) end
    from (select 1) as one_row left join public.workflow_runs as run on run.id = p_run_id
        and run.tenant_id = p_tenant_id
$$;
comment on function public.show_workflow_run(uuid, uuid) is
  'One run whole: record, events, claims, what is booked for it, notifications, approvals.';

create or replace function dispatcher.faults_of_route(
  p_tenant_id uuid, p_workflow_type text, p_agent text, p_priority integer, p_max_concurrent integer,
      p_timeout_minutes integer
) returns text[]
language sql stable set search_path = ''
as $$
  select dispatcher.faults_of_tenant(p_tenant_id) || dispatcher.faults_of_text('workflow_type', p_workflow_type, 200,
      true)
      || dispatcher.faults_of_text('agent', p_agent, 200, true)
      || case when abs(p_priority::bigint) > 1000000 then array['priority: outside -1000000 to 1000000'] else '{}' end
      || case when p_max_concurrent < 0 then array['max_concurrent: below 0'] else '{}' end
      || case when p_timeout_minutes < 1 then array['timeout_minutes: below 1'] else '{}' end
$$;
comment on function dispatcher.faults_of_route(uuid, text, text, integer, integer, integer) is
  'What is wrong with a route that is to be set; empty when nothing is.';

create or replace function public.set_workflow_route(
  p_tenant_id uuid, p_workflow_type text, p_agent text, p_priority integer default null,
      p_max_concurrent integer default null,
  p_timeout_minutes integer default null
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_faults constant text[] := dispatcher.faults_of_route(p_tenant_id, p_workflow_type, p_agent, p_priority,
      p_max_concurrent, p_timeout_minutes);
  v_route public.workflow_agent_routing;
begin
  if cardinality(v_faults) > 0 then
    return dispatcher.invalid(v_faults);
  end if;
  insert into public.workflow_agent_routing as route (tenant_id, workflow_type, agent_id, priority, max_concurrent,
      timeout_minutes)
  values (p_tenant_id, btrim(p_workflow_type), btrim(p_agent), coalesce(p_priority, 0), coalesce(p_max_concurrent, 1),
          coalesce(p_timeout_minutes, 60))
  on conflict (tenant_id, workflow_type) do update
     set agent_id = excluded.agent_id, priority = coalesce(p_priority, route.priority),
         max_concurrent = coalesce(p_max_concurrent, route.max_concurrent),
         timeout_minutes = coalesce(p_timeout_minutes, route.timeout_minutes)
  returning * into v_route;
  return jsonb_build_object('applied', true, 'code', 'ok', 'route', to_jsonb(v_route) - 'tenant_id');
exception when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy', 'workflow_type', p_workflow_type);
end
$$;
comment on function public.set_workflow_route(uuid, text, text, integer, integer, integer) is
  'Routes a workflow type to an agent; what is not given keeps its value (else 0, 1 and 60). max_concurrent 0 '
  'disables it. invalid names every fault; busy: another session holds the route, ask again.';

create or replace function public.remove_workflow_route(p_tenant_id uuid, p_workflow_type text) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
begin
  delete from public.workflow_agent_routing where tenant_id = p_tenant_id and workflow_type = p_workflow_type;
  return jsonb_build_object('applied', found, 'code', case when found then 'ok' else 'not_found' end, 'workflow_type',
      p_workflow_type);
exception when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy', 'workflow_type', p_workflow_type);
end
$$;
comment on function public.remove_workflow_route(uuid, text) is
  'Takes a route away; queued runs of the type wait for another one. busy: another session holds the route, ask again.';

create or replace function dispatcher.add_reference_routes(p_tenant_id uuid) returns jsonb
language sql volatile set search_path = ''
as $$
  with seeded as (
    insert into public.workflow_agent_routing (tenant_id, workflow_type, agent_id)
    select p_tenant_id, mapping.workflow_type, mapping.agent_id from (values
      ('citation-improvement', 'affiliate-editorial'), ('affiliate-article', 'affiliate-editorial'),
          ('code-change', 'code-change'),
      ('image-generation', 'comfyui-image-agent'), ('qa-review', 'qa-review'),
          ('incident-investigation', 'incident-investigation'),
      ('system-improvement-scan', 'main'), ('improvement-suggestion', 'coder')) as mapping (workflow_type, agent_id)
    on conflict (tenant_id, workflow_type) do nothing
    returning workflow_type, agent_id)
  select jsonb_build_object('applied', true, 'code', 'ok', 'seeded', count(*), 'routes',
           coalesce(jsonb_agg(jsonb_build_object('workflow_type', workflow_type, 'agent_id', agent_id)
               order by workflow_type), '[]'))
    from seeded
$$;
comment on function dispatcher.add_reference_routes(uuid) is
  'Adds the reference routes that a tenant has not; answers which.';

create or replace function public.seed_workflow_routes(p_tenant_id uuid) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_faults constant text[] := dispatcher.faults_of_tenant(p_tenant_id);
begin
  return case when cardinality(v_faults) > 0 then dispatcher.invalid(v_faults)
      else dispatcher.add_reference_routes(p_tenant_id) end;
exception when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy', 'seeded', 0, 'routes', jsonb_build_array());
end
$$;
comment on function public.seed_workflow_routes(uuid) is
  'The reference routes, where a type has none yet. busy: ask again.';

select dispatcher.restrict_functions(array[
  'poll_workflow_runs', 'claim_workflow_run', 'heartbeat_workflow_run', 'report_workflow_usage',
  'complete_workflow_run', 'fail_workflow_run', 'release_workflow_run', 'correct_workflow_usage',
  'enqueue_workflow_run',
  'cancel_workflow_run', 'retry_workflow_run', 'list_workflow_runs', 'show_workflow_run', 'set_workflow_route',
  'remove_workflow_route', 'seed_workflow_routes'
]);

notify pgrst, 'reload schema';
commit;
