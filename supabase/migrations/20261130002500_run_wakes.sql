-- Telling agents of their runs, and finding the runs whose session died: what the daemon of a gateway does for its own agents.
begin;
set local lock_timeout = '3s';

create or replace function public.claim_workflow_notifications(
  p_instance_id uuid, p_limit integer, p_lease_seconds integer default 60, p_known_agents text[] default '{}'
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '8s'
as $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
  v_claimed jsonb;
begin
  update public.workflow_notifications as note
     set state = 'obsolete', claim_token = null, claimed_until = null
    from public.workflow_runs as run
   where note.tenant_id = v_instance.tenant_id and (note.state = 'pending' or (note.state = 'sending' and note.claimed_until < now())) and run.id = note.run_id
     and (run.status <> 'dispatched' or run.dispatch_attempts <> note.attempt);
  with due as (
    select note.id from public.workflow_notifications as note
     where note.tenant_id = v_instance.tenant_id
       and (note.gateway_id = v_instance.gateway_id
            -- An agent of nobody's: whoever knows it from openclaw.json, and after a moment whoever comes.
            or (note.gateway_id is null and (note.agent_id = any (p_known_agents) or note.created_at < now() - interval '5 seconds')))
       and ((note.state = 'pending' and note.next_try_at <= now()) or (note.state = 'sending' and note.claimed_until < now()))
     order by note.next_try_at limit least(greatest(p_limit, 0), 100)
     for update skip locked
  ), taken as (
    update public.workflow_notifications as note
       set state = 'sending', claim_token = gen_random_uuid(), claimed_until = now() + make_interval(secs => p_lease_seconds), tries = note.tries + 1
      from due where note.id = due.id returning note.*)
  select jsonb_agg(jsonb_build_object('id', taken.id, 'claim_token', taken.claim_token, 'run_id', taken.run_id, 'attempt', taken.attempt, 'tries', taken.tries,
                                      'agent_id', taken.agent_id, 'workflow_type', run.workflow_type,
                                      'workspace_slug', (select slug from public.workspace where tenant_id = taken.tenant_id limit 1)) order by taken.next_try_at)
    into v_claimed from taken join public.workflow_runs as run on run.id = taken.run_id;
  return jsonb_build_object('notifications', coalesce(v_claimed, '[]'), 'next_in', (
    select extract(epoch from min(case note.state when 'pending' then note.next_try_at else note.claimed_until end) - now())
      from public.workflow_notifications as note
     where note.tenant_id = v_instance.tenant_id and (note.gateway_id = v_instance.gateway_id or note.gateway_id is null) and note.state in ('pending', 'sending')));
end
$$;
comment on function public.claim_workflow_notifications(uuid, integer, integer, text[]) is
  'Takes notifications that are due for the agents of the instance''s gateway: {notifications, next_in}. Those whose run has moved on are dropped; one whose sender died is taken again after its lease.';

create or replace function public.finish_workflow_notifications(p_instance_id uuid, p_results jsonb) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '8s'
as $$
declare
  v_result jsonb;
  v_count integer := 0;
begin
  perform dispatcher.running_instance(p_instance_id);
  for v_result in select value from jsonb_array_elements(p_results) loop
    update public.workflow_notifications as note
       set state = case when (v_result ->> 'sent')::boolean then 'sent' when note.tries >= 12 then 'failed' else 'pending' end,
           sent_at = case when (v_result ->> 'sent')::boolean then now() end, claim_token = null, claimed_until = null,
           last_error = left(v_result ->> 'error', 1000),
           -- Spread, so that what failed together with a Gateway does not come back together.
           next_try_at = now() + make_interval(secs => least(300, 5 * power(2, least(note.tries, 12) - 1)) * (0.75 + random() / 2))
     where note.id = (v_result ->> 'id')::uuid and note.claim_token = (v_result ->> 'claim_token')::uuid and note.state = 'sending';
    v_count := v_count + found::integer;
  end loop;
  return jsonb_build_object('finished', v_count);
end
$$;
comment on function public.finish_workflow_notifications(uuid, jsonb) is
  'What became of claimed notifications: [{id, claim_token, sent, error}]. One that failed is due again after 5 s, doubled per try, at most 300 s; after 12 tries it is given up.';

create or replace function dispatcher.orphan_after_seconds(p_settings jsonb) returns double precision
language sql immutable set search_path = ''
as $$ select least(360, 0.6 * (dispatcher.workflow_settings(p_settings) ->> 'stale_claim_seconds')::double precision) $$;
comment on function dispatcher.orphan_after_seconds(jsonb) is
  'After what silence a running run is suspected to be an orphan: a heartbeat of five minutes and one minute, and well before its claim is released.';

create or replace function public.monitor_workflows(p_instance_id uuid, p_settings jsonb default '{}') returns jsonb
language plpgsql stable set search_path = ''
as $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
begin
  return jsonb_build_object(
    'stop_wakes', dispatcher.wakes_to_stop(p_instance_id), 'orphan_after', dispatcher.orphan_after_seconds(p_settings),
    'suspects', (
      select coalesce(jsonb_agg(jsonb_build_object('run_id', run.id, 'attempt', run.dispatch_attempts, 'workflow_type', run.workflow_type, 'agent_id', run.owner_agent_id,
               'session_id', run.session_id, 'claim_token', run.claim_token, 'silent_for', extract(epoch from now() - run.last_heartbeat_at),
               'workspace_slug', (select slug from public.workspace where tenant_id = run.tenant_id limit 1)) order by run.last_heartbeat_at), '[]')
        from public.workflow_runs as run
        join public.agents as agent on agent.tenant_id = run.tenant_id and agent.slug = run.owner_agent_id and agent.gateway_id = v_instance.gateway_id
       where run.tenant_id = v_instance.tenant_id and run.status = 'running' and run.deadline_at > now()
         and run.last_heartbeat_at < now() - make_interval(secs => dispatcher.orphan_after_seconds(p_settings))
         and not exists (select from public.workflow_respawns as respawn where respawn.run_id = run.id and respawn.attempt = run.dispatch_attempts)
         and not exists (select from public.agent_wakes as wake where wake.id = run.wake_id and wake.ended_at is null)));
end
$$;
comment on function public.monitor_workflows(uuid, jsonb) is
  'What the monitor of a gateway looks at: silent running runs of its agents that were not spawned again in this attempt (suspects), the silence that makes one (orphan_after), and wakes whose run was ended (stop_wakes).';

create or replace function public.respawn_workflow_run(p_instance_id uuid, p_run_id uuid, p_claim_token uuid, p_settings jsonb, p_request uuid) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '8s'
as $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
  v_run public.workflow_runs;
  v_agent record;
  v_gates record;
  v_blocked text;
  v_wake public.agent_wakes;
  v_estimates jsonb;
  v_usd numeric;
  v_tokens numeric;
  v_verdict text := 'ok';
begin
  select * into v_wake from public.agent_wakes where claim_request = p_request and state in ('starting', 'running') limit 1;
  if v_wake.id is not null then
    select * into v_run from public.workflow_runs where id = v_wake.workflow_run_id;
    return dispatcher.wake_grant(v_wake) || jsonb_build_object('run', dispatcher.workflow_run_json(v_run), 'timeout_seconds',
                                                           extract(epoch from v_wake.deadline_at - now()) - 15);
  end if;
  v_run := dispatcher.lock_workflow_run(v_instance.tenant_id, p_run_id);
  if v_run.id is null or v_run.status <> 'running' or v_run.claim_token is distinct from p_claim_token
     or v_run.last_heartbeat_at >= now() - make_interval(secs => dispatcher.orphan_after_seconds(p_settings)) then
    return jsonb_build_object('granted', false, 'skip_reason', 'not_an_orphan', 'run_id', p_run_id);
  end if;
  if exists (select from public.workflow_respawns where run_id = v_run.id and attempt = v_run.dispatch_attempts) then
    return jsonb_build_object('granted', false, 'skip_reason', 'already_respawned', 'run_id', p_run_id);
  end if;
  select agent.id, agent.slug, agent.tenant_id, profile.department_id into v_agent from public.agents as agent
    left join public.agent_profiles as profile on profile.tenant_id = agent.tenant_id and profile.agent_id = agent.slug
   where agent.tenant_id = v_instance.tenant_id and agent.slug = v_run.owner_agent_id and agent.gateway_id = v_instance.gateway_id;
  if v_agent.id is null then
    return jsonb_build_object('granted', false, 'skip_reason', 'not_local', 'run_id', p_run_id);
  end if;

  -- From here on as any wake of the agent: the gateway's lock, the gates that are about the agent, the cap.
  perform from public.dispatcher_gateways where gateway_id = v_instance.gateway_id for update;
  insert into public.agent_wake_state (agent_id, tenant_id) values (v_agent.id, v_agent.tenant_id) on conflict do nothing;
  perform from public.agent_wake_state where agent_id = v_agent.id for update;
  v_gates := dispatcher.wake_gates(dispatcher.read_gate_facts(v_agent.id, dispatcher.settings_of_instance(p_instance_id)),
                                   dispatcher.settings_of_instance(p_instance_id), true);
  select reason into v_blocked from unnest(v_gates.blocked) as reason
   where reason in ('stalled', 'wake_in_flight', 'agent_paused', 'active_lease', 'budget_exceeded', 'daily_limit') limit 1;
  if v_blocked is null and dispatcher.live_wakes_of_gateway(v_instance.gateway_id) >= (dispatcher.settings_of_instance(p_instance_id)).max_concurrent_wakes then
    v_blocked := 'concurrency_limit';
  end if;
  begin
    -- What the lost session cost stays spent, reported or not: the new one needs room of its own.
    v_estimates := dispatcher.workflow_estimates(v_instance.tenant_id, (dispatcher.workflow_settings(p_settings) ->> 'workflow_cost_estimate_usd')::numeric);
    v_usd := dispatcher.workflow_estimate(v_estimates, v_run.workflow_type, 'usd');
    v_tokens := dispatcher.workflow_estimate(v_estimates, v_run.workflow_type, 'tokens');
    select gate.verdict into v_verdict from dispatcher.budget_verdict(
      dispatcher.evaluate_budgets(v_instance.tenant_id, v_estimates), v_agent.slug, v_agent.department_id, v_run.workflow_type, v_usd, v_tokens) as gate;
  exception when query_canceled or lock_not_available or deadlock_detected or serialization_failure then
    raise;
  when others then
    v_verdict := 'ok';
  end;
  v_blocked := coalesce(v_blocked, case when v_verdict <> 'ok' then 'workflow_budget' end);
  if v_blocked is not null then
    return jsonb_build_object('granted', false, 'skip_reason', v_blocked, 'run_id', p_run_id, 'agent_id', v_agent.id, 'agent_slug', v_agent.slug);
  end if;

  insert into public.agent_wakes (tenant_id, agent_id, gateway_id, instance_id, claim_request, path, workflow_run_id, deadline_at)
  values (v_agent.tenant_id, v_agent.id, v_instance.gateway_id, v_instance.id, p_request, 'workflow', v_run.id,
          greatest(v_run.deadline_at, now()) + interval '20 seconds')  -- of its run; the process ends 15 s before, the run 5 s before that
  returning * into v_wake;
  update public.agent_wake_state set last_wake_id = v_wake.id, last_claimed_at = v_wake.claimed_at, updated_at = now() where agent_id = v_agent.id;
  insert into public.workflow_respawns (run_id, attempt, tenant_id, wake_id, session_id, previous_session_id)
  values (v_run.id, v_run.dispatch_attempts, v_run.tenant_id, v_wake.id, 'respawn-' || v_wake.id, v_run.session_id);
  perform dispatcher.end_workflow_claim(v_run, 'orphaned');
  perform dispatcher.settle_workflow_claim(v_run, 'orphaned');
  -- A new owner with a new fence and a new account: the session that was lost can change nothing any more, should it come back.
  update public.workflow_runs
     set session_id = 'respawn-' || v_wake.id, claim_token = gen_random_uuid(), last_heartbeat_at = now(), wake_id = v_wake.id, reserved_usd = v_usd,
         reserved_tokens = v_tokens, cost_estimate = null, input_tokens = null, output_tokens = null, cached_tokens = null, reported_at = null, accounted_at = null
   where id = v_run.id returning * into v_run;
  insert into public.workflow_claims (claim_token, tenant_id, run_id, workflow_type, agent_id, session_id, attempt)
  values (v_run.claim_token, v_run.tenant_id, v_run.id, v_run.workflow_type, v_run.owner_agent_id, v_run.session_id, v_run.dispatch_attempts);
  return dispatcher.wake_grant(v_wake) || jsonb_build_object('run', dispatcher.workflow_run_json(v_run), 'timeout_seconds',
                                                         extract(epoch from v_wake.deadline_at - now()) - 15);
end
$$;
comment on function public.respawn_workflow_run(uuid, uuid, uuid, jsonb, uuid) is
  'Grants the one new process an orphan may have in this attempt, as a wake of its agent (path workflow) under the same cap, in-flight rule and budgets; the run gets a new session and fence. Else the reason: not_an_orphan, already_respawned, not_local, or a gate.';

select dispatcher.restrict_functions(array[
  'claim_workflow_notifications', 'finish_workflow_notifications', 'monitor_workflows', 'respawn_workflow_run'
]);

notify pgrst, 'reload schema';
commit;
