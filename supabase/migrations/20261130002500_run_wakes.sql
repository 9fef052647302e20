-- Telling agents of their runs, and finding the runs whose session died: what the daemon of a gateway does for its own
-- agents.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.drop_outdated_notifications(p_tenant_id uuid, p_limit integer) returns void
language sql volatile set search_path = ''
as $$
  update public.workflow_notifications set state = 'obsolete', claim_token = null, claimed_until = null
   where id in (select note.id from public.workflow_notifications as note
       join public.workflow_runs as run on run.id = note.run_id
                 where note.tenant_id = p_tenant_id and (note.state = 'pending'
                   or (note.state = 'sending' and note.claimed_until < now()))
                   and (run.status <> 'dispatched' or run.dispatch_attempts <> note.attempt)
                 limit p_limit for update of note skip locked)
$$;
comment on function dispatcher.drop_outdated_notifications(uuid, integer) is
  'Drops notifications whose run has moved on. Never waits.';

create or replace function dispatcher.is_notification_due(p_note public.workflow_notifications) returns boolean
language sql stable set search_path = ''
as $$
  -- A lease or a next try from the day after tomorrow is no known time: nobody waits for it.
  select (p_note.state = 'pending' and (p_note.next_try_at <= now() or p_note.next_try_at > now() + interval '1 day'))
      or (p_note.state = 'sending' and (p_note.claimed_until < now()
      or p_note.claimed_until > now() + interval '1 day'))
$$;
comment on function dispatcher.is_notification_due(public.workflow_notifications) is
  'Whether a notification is to be sent now: it is pending and its time has come, or its sender''s lease is over.';

create or replace function dispatcher.take_notifications(
  p_instance public.dispatcher_instances, p_limit integer, p_lease_seconds integer, p_known_agents text[]
) returns setof public.workflow_notifications
language sql volatile set search_path = ''
as $$
  update public.workflow_notifications as note
     set state = 'sending', claim_token = gen_random_uuid(),
         claimed_until = now() + make_interval(secs => p_lease_seconds),
         tries = least(note.tries, 1000000) + 1
   where note.id in (
     select due.id from public.workflow_notifications as due
      where due.tenant_id = p_instance.tenant_id and due.state in ('pending', 'sending')
        and dispatcher.is_notification_due(due)
        and (due.gateway_id = p_instance.gateway_id
             -- An agent of nobody's: whoever knows it from openclaw.json, and after a moment whoever comes.
             or (due.gateway_id is null and (due.agent_id = any (p_known_agents)
             or due.created_at < now() - interval '5 seconds')))
      order by due.next_try_at limit p_limit for update skip locked)
  returning note.*
$$;
comment on function dispatcher.take_notifications(public.dispatcher_instances, integer, integer, text[]) is
  'Leases notifications that are due for the agents of an instance''s gateway. Never waits.';

create or replace function dispatcher.next_notification(p_instance public.dispatcher_instances) returns double precision
language sql stable set search_path = ''
as $$
  select dispatcher.seconds_until(min(case note.state when 'pending' then note.next_try_at else note.claimed_until end))
    from public.workflow_notifications as note
   where note.tenant_id = p_instance.tenant_id and (note.gateway_id = p_instance.gateway_id or note.gateway_id is null)
     and note.state in ('pending', 'sending') and isfinite(note.next_try_at)
     and coalesce(isfinite(note.claimed_until), true)
$$;
comment on function dispatcher.next_notification(public.dispatcher_instances) is
  'In how many seconds another notification is due; NULL when none is.';

create or replace function public.claim_workflow_notifications(
  p_instance_id uuid, p_limit integer, p_lease_seconds integer default 60, p_known_agents text[] default '{}'
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
  v_limit constant integer := least(greatest(p_limit, 0), 100);
  v_seconds constant integer := least(greatest(coalesce(p_lease_seconds, 60), 1), 3600);
  v_claimed jsonb;
begin
  perform dispatcher.drop_outdated_notifications(v_instance.tenant_id, 500);
  select jsonb_agg(jsonb_build_object(
           'id', taken.id, 'claim_token', taken.claim_token, 'run_id', taken.run_id, 'attempt', taken.attempt, 'tries',
               taken.tries,
           'agent_id', taken.agent_id, 'workflow_type', run.workflow_type,
           'workspace_slug', (select slug from public.workspace where tenant_id = taken.tenant_id limit 1))
               order by taken.next_try_at)
    into v_claimed
    from dispatcher.take_notifications(v_instance, v_limit, v_seconds, coalesce(p_known_agents, '{}')) as taken
    join public.workflow_runs as run on run.id = taken.run_id;
  return jsonb_build_object('notifications', coalesce(v_claimed, '[]'), 'next_in',
      dispatcher.next_notification(v_instance));
end
$$;
comment on function public.claim_workflow_notifications(uuid, integer, integer, text[]) is
  'Takes notifications that are due for the agents of the instance''s gateway: {notifications, next_in}. Those whose '
  'run has moved on are dropped; one whose sender died is taken again after its lease.';

create or replace function dispatcher.finish_notification(p_result jsonb, p_tenant_id uuid) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_is_sent constant boolean := coalesce(p_result -> 'sent' = 'true'::jsonb, false);
  v_count integer;
begin
  update public.workflow_notifications as note
     set state = case when v_is_sent then 'sent' when note.tries >= 12 then 'failed' else 'pending' end,
         sent_at = case when v_is_sent then now() end, claim_token = null, claimed_until = null,
             last_error = left(p_result ->> 'error', 1000),
         -- Spread, so that what failed together with a Gateway does not come back together.
         next_try_at = now() + make_interval(secs => least(300,
             5 * power(2, least(note.tries, 12) - 1)) * (0.75 + random() / 2))
   where note.id = (p_result ->> 'id')::uuid and note.claim_token = (p_result ->> 'claim_token')::uuid
     and note.tenant_id = p_tenant_id
     and note.state = 'sending';
  get diagnostics v_count = row_count;
  return v_count;
exception when others then
  -- Nonsense, or a row that somebody holds: it is sent again after its lease.
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return 0;
end
$$;
comment on function dispatcher.finish_notification(jsonb, uuid) is
  'What became of one claimed notification; 1 when that was written down, 0 where its lease is lost, the row is held '
  'or the result is none.';

create or replace function public.finish_workflow_notifications(p_instance_id uuid, p_results jsonb) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_count integer;
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
begin
  if jsonb_typeof(p_results) is distinct from 'array' then
    raise exception 'p_results must be an array of {id, claim_token, sent, error}' using errcode = 'OD002';
  end if;
  select coalesce(sum(dispatcher.finish_notification(result.value, v_instance.tenant_id)), 0) into v_count
      from jsonb_array_elements(p_results) as result;
  return jsonb_build_object('finished', v_count);
end
$$;
comment on function public.finish_workflow_notifications(uuid, jsonb) is
  'What became of claimed notifications: [{id, claim_token, sent, error}]. One that failed is due again after 5 s, '
  'doubled per try, at most 300 s; after 12 tries it is given up.';

create or replace function dispatcher.orphan_after_seconds(p_settings public.dispatcher_settings)
    returns double precision
language sql immutable set search_path = ''
as $$ select least(360, 0.6 * p_settings.stale_claim_seconds) $$;
comment on function dispatcher.orphan_after_seconds(public.dispatcher_settings) is
  'After what silence a running run is suspected to be an orphan: a heartbeat of five minutes and one minute, and '
  'well before its claim is released.';

create or replace function dispatcher.last_heartbeat(p_run public.workflow_runs) returns timestamptz
language sql stable set search_path = ''
as $$ select coalesce(dispatcher.known_time(p_run.last_heartbeat_at), dispatcher.known_time(p_run.claimed_at),
    '-infinity') $$;
comment on function dispatcher.last_heartbeat(public.workflow_runs) is
  'When a run was last heard of; -infinity where the row tells of no time that a clock has shown.';

create or replace function dispatcher.is_suspect(p_run public.workflow_runs, p_settings public.dispatcher_settings)
    returns boolean
language sql stable set search_path = ''
as $$
  select p_run.status = 'running' and p_run.deadline_at > now()
     and dispatcher.last_heartbeat(p_run) < now() - make_interval(secs => dispatcher.orphan_after_seconds(p_settings))
     and not exists (select from public.workflow_respawns as respawn
                      where respawn.run_id = p_run.id and respawn.attempt = p_run.dispatch_attempts)
     and not exists (select from public.agent_wakes as wake where wake.id = p_run.wake_id and wake.ended_at is null)
$$;
comment on function dispatcher.is_suspect(public.workflow_runs, public.dispatcher_settings) is
  'Whether a running run has been silent for too long, has no living wake, and was not spawned again in this attempt.';

drop function if exists public.monitor_workflows(uuid, jsonb);
create or replace function public.monitor_workflows(p_instance_id uuid) returns jsonb
language plpgsql stable set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_tick constant dispatcher.tick := dispatcher.tick_of(p_instance_id);
begin
  return jsonb_build_object(
    'stop_wakes', dispatcher.wakes_to_stop(p_instance_id), 'orphan_after',
        dispatcher.orphan_after_seconds(v_tick.settings),
    'suspects', (
      select coalesce(jsonb_agg(jsonb_build_object(
               'run_id', run.id, 'attempt', run.dispatch_attempts, 'workflow_type', run.workflow_type, 'agent_id',
                   run.owner_agent_id,
               'session_id', run.session_id, 'claim_token', run.claim_token,
               'silent_for', -dispatcher.seconds_until(dispatcher.last_heartbeat(run)),
               'workspace_slug', (select slug from public.workspace where tenant_id = run.tenant_id limit 1))
               order by run.last_heartbeat_at), '[]')
        from public.workflow_runs as run
        join dispatcher.agents as agent on agent.tenant_id = run.tenant_id and agent.slug = run.owner_agent_id
         and agent.gateway_id = v_tick.gateway_id
       where run.tenant_id = v_tick.tenant_id and run.status = 'running'
         and dispatcher.is_suspect(run, v_tick.settings)));
end
$$;
comment on function public.monitor_workflows(uuid) is
  'What the monitor of a gateway looks at: silent running runs of its agents that were not spawned again in this '
  'attempt (suspects), the silence that makes one (orphan_after), and wakes whose run was ended (stop_wakes).';

create or replace function dispatcher.refuse_respawn(p_run_id uuid, p_reason text, p_agent_id uuid default null,
    p_agent_slug text default null)
returns jsonb
language sql immutable set search_path = ''
as $$
  select jsonb_build_object('granted', false, 'skip_reason', p_reason, 'run_id', p_run_id)
         || case when p_agent_id is null then '{}'::jsonb else jsonb_build_object('agent_id', p_agent_id, 'agent_slug',
             p_agent_slug) end
$$;
comment on function dispatcher.refuse_respawn(uuid, text, uuid, text) is
  'The answer to a respawn that is not granted: {granted: false, skip_reason, run_id}.';

create or replace function dispatcher.respawn_grant(p_wake public.agent_wakes, p_run public.workflow_runs) returns jsonb
language sql stable set search_path = ''
as $$
  select dispatcher.wake_grant(p_wake) || jsonb_build_object('run', dispatcher.workflow_run_json(p_run),
             'timeout_seconds', dispatcher.seconds_until(p_wake.deadline_at) - 15)
$$;
comment on function dispatcher.respawn_grant(public.agent_wakes, public.workflow_runs) is
  'The grant of a new process for an orphan: that of a wake, with the run and timeout_seconds.';

create or replace function dispatcher.fault_of_orphan(p_run public.workflow_runs, p_claim_token uuid,
    p_settings public.dispatcher_settings)
returns text
language sql stable set search_path = ''
as $$
  select case when p_run.id is null or p_run.status <> 'running' or p_claim_token is null
      or p_run.claim_token is distinct from p_claim_token
                or dispatcher.last_heartbeat(p_run)
                     >= now() - make_interval(secs => dispatcher.orphan_after_seconds(p_settings))
              then 'not_an_orphan'
              when exists (select from public.workflow_respawns where run_id = p_run.id
                  and attempt = p_run.dispatch_attempts)
              then 'already_respawned' end
$$;
comment on function dispatcher.fault_of_orphan(public.workflow_runs, uuid, public.dispatcher_settings) is
  'Why a run may have no new process; NULL when it may.';

create or replace function dispatcher.gate_of_respawn(p_claimant dispatcher.claimant, p_agent_id uuid) returns text
language plpgsql volatile set search_path = ''
as $$
declare
  v_gates record;
  v_reason text;
begin
  v_gates := dispatcher.wake_gates(dispatcher.read_gate_facts(p_agent_id, p_claimant.settings), p_claimant.settings,
      true);
  select reason into v_reason from unnest(v_gates.blocked) as reason
   where reason in ('stalled', 'wake_in_flight', 'agent_paused', 'active_lease', 'budget_exceeded', 'daily_limit')
       limit 1;
  if v_reason is null
     and dispatcher.live_wakes_of_gateway(p_claimant.gateway_id) >= (p_claimant.settings).max_concurrent_wakes then
    v_reason := 'concurrency_limit';
  end if;
  return v_reason;
end
$$;
comment on function dispatcher.gate_of_respawn(dispatcher.claimant, uuid) is
  'Which of the gates that are about the agent, or the cap, keeps it from a new process; NULL when none does.';

create or replace function dispatcher.write_respawn(
  p_claimant dispatcher.claimant, p_run public.workflow_runs, p_agent_id uuid, p_request uuid
) returns public.agent_wakes
language plpgsql volatile set search_path = ''
as $$
declare
  v_wake public.agent_wakes;
begin
  insert into public.agent_wakes (tenant_id, agent_id, gateway_id, instance_id, claim_request, path, workflow_run_id,
      deadline_at)
  values (p_claimant.tenant_id, p_agent_id, p_claimant.gateway_id, p_claimant.instance_id, p_request, 'workflow',
      p_run.id,
          -- of its run; the process ends 15 s before, the run 5 s before that
          least(greatest(p_run.deadline_at, now()), now() + interval '1 year') + interval '20 seconds')
  returning * into v_wake;
  update public.agent_wake_state set last_wake_id = v_wake.id, last_claimed_at = v_wake.claimed_at, updated_at = now()
   where agent_id = p_agent_id;
  insert into public.workflow_respawns (run_id, attempt, tenant_id, wake_id, session_id, previous_session_id)
  values (p_run.id, p_run.dispatch_attempts, p_run.tenant_id, v_wake.id, 'respawn-' || v_wake.id, p_run.session_id);
  return v_wake;
end
$$;
comment on function dispatcher.write_respawn(dispatcher.claimant, public.workflow_runs, uuid, uuid) is
  'Writes the wake of a granted respawn, and that this attempt has had its one.';

create or replace function dispatcher.give_to_respawn(p_run public.workflow_runs, p_wake public.agent_wakes,
    p_usd numeric, p_tokens numeric)
returns public.workflow_runs
language plpgsql volatile set search_path = ''
as $$
begin
  perform dispatcher.end_workflow_claim(p_run, 'orphaned');
  perform dispatcher.settle_workflow_claim(p_run, 'orphaned');
  -- A new owner with a new fence and a new account: the session that was lost can change nothing any more, should it
  -- come back.
  update public.workflow_runs
     set session_id = 'respawn-' || p_wake.id, claim_token = gen_random_uuid(), last_heartbeat_at = now(),
         wake_id = p_wake.id,
         reserved_usd = p_usd, reserved_tokens = least(p_tokens, 1e18), cost_estimate = null, input_tokens = null,
             output_tokens = null,
         cached_tokens = null, reported_at = null, assumed_usd = null, assumed_tokens = null
   where id = p_run.id returning * into p_run;
  insert into public.workflow_claims (claim_token, tenant_id, run_id, workflow_type, agent_id, session_id, attempt,
      wake_id)
  values (p_run.claim_token, p_run.tenant_id, p_run.id, p_run.workflow_type, p_run.owner_agent_id, p_run.session_id,
          p_run.dispatch_attempts, p_wake.id);
  return p_run;
end
$$;
comment on function dispatcher.give_to_respawn(public.workflow_runs, public.agent_wakes, numeric, numeric) is
  'The run of an orphan goes to its new wake, with a new session, fence and reservation; what the lost claim cost '
  'stays with that claim.';

create or replace function dispatcher.respawn_locked_run(p_claimant dispatcher.claimant, p_run public.workflow_runs,
    p_request uuid)
returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_tick constant dispatcher.tick :=
    row(p_claimant.instance_id, p_claimant.tenant_id, p_claimant.gateway_id, p_claimant.settings)::dispatcher.tick;
  v_agent_id constant uuid := dispatcher.find_inbox_agent(p_claimant.tenant_id, p_run.owner_agent_id);
  v_agent constant record := dispatcher.lock_agent(p_claimant, v_agent_id);
  v_money dispatcher.money;
  v_usd numeric;
  v_tokens numeric;
  v_reason text;
  v_wake public.agent_wakes;
begin
  if v_agent.verdict = 'not_local' then
    return dispatcher.refuse_respawn(p_run.id, 'not_local');
  elsif v_agent.verdict = 'busy' or (dispatcher.lock_wake_state(v_agent_id, p_claimant.tenant_id)).agent_id is null
     or cardinality(dispatcher.unlocked_runs(array[p_run])) = 0 then
    return dispatcher.refuse_respawn(p_run.id, 'busy', v_agent_id, v_agent.slug);
  end if;
  v_reason := dispatcher.gate_of_respawn(p_claimant, v_agent_id);
  -- What the lost session cost stays spent, reported or not: the new one needs room of its own.
  v_money := dispatcher.read_money(v_tick);
  v_usd := dispatcher.workflow_estimate(v_money.estimates, p_run.workflow_type, 'usd');
  v_tokens := dispatcher.workflow_estimate(v_money.estimates, p_run.workflow_type, 'tokens');
  if v_reason is null and (dispatcher.budget_verdict(
       v_money.budgets, v_agent.slug,
       (select department_id from public.agent_profiles where tenant_id = p_run.tenant_id
           and agent_id = p_run.owner_agent_id),
       p_run.workflow_type, v_usd, v_tokens)).verdict <> 'ok' then
    v_reason := 'workflow_budget';
  end if;
  if v_reason is not null then
    return dispatcher.refuse_respawn(p_run.id, v_reason, v_agent_id, v_agent.slug);
  end if;
  v_wake := dispatcher.write_respawn(p_claimant, p_run, v_agent_id, p_request);
  return dispatcher.respawn_grant(v_wake, dispatcher.give_to_respawn(p_run, v_wake, v_usd, v_tokens));
end
$$;
comment on function dispatcher.respawn_locked_run(dispatcher.claimant, public.workflow_runs, uuid) is
  'Grants an orphan, which the caller has locked along with the gateway, its new process. From here on nothing waits: '
  'what somebody holds is busy.';

drop function if exists public.respawn_workflow_run(uuid, uuid, uuid, jsonb, uuid);
create or replace function public.respawn_workflow_run(p_instance_id uuid, p_run_id uuid, p_claim_token uuid,
    p_request uuid) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_tick constant dispatcher.tick := dispatcher.tick_of(p_instance_id);
  v_claimant dispatcher.claimant;
  v_run public.workflow_runs;
  v_wake public.agent_wakes;
  v_fault text;
begin
  if p_request is null then
    return dispatcher.refuse_respawn(p_run_id, 'invalid');
  end if;
  select * into v_wake from public.agent_wakes where claim_request = p_request and state in ('starting', 'running')
      limit 1;
  if v_wake.id is not null then  -- asked before under the same request: the same grant
    select * into v_run from public.workflow_runs where id = v_wake.workflow_run_id;
    return dispatcher.respawn_grant(v_wake, v_run);
  end if;
  v_run := dispatcher.lock_workflow_run(v_tick.tenant_id, p_run_id);
  v_fault := dispatcher.fault_of_orphan(v_run, p_claim_token, v_tick.settings);
  if v_fault is not null then
    return dispatcher.refuse_respawn(p_run_id, v_fault);
  end if;
  v_claimant := dispatcher.lock_gateway(p_instance_id);
  perform set_config('lock_timeout', '100ms', true);
  return dispatcher.respawn_locked_run(v_claimant, v_run, p_request);
exception when lock_not_available then
  return dispatcher.refuse_respawn(p_run_id, 'busy');
end
$$;
comment on function public.respawn_workflow_run(uuid, uuid, uuid, uuid) is
  'Grants the one new process an orphan may have in this attempt, as a wake of its agent (path workflow) under the '
  'same cap, in-flight rule and budgets; the run gets a new session and fence. Else the reason: not_an_orphan, '
  'already_respawned, not_local, busy (another session holds a row that is needed), invalid, or a gate.';

select dispatcher.restrict_functions(array[
  'claim_workflow_notifications', 'finish_workflow_notifications', 'monitor_workflows', 'respawn_workflow_run'
]);

notify pgrst, 'reload schema';
commit;
