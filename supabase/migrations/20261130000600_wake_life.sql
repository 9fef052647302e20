-- The life of a wake after its claim: its process starts, it ends, and what follows from how it ended.

create or replace function dispatcher.start_wake(
  p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision
) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_wake public.agent_wakes;
begin
  update public.agent_wakes
     set state = 'running', host_id = p_host_id, pid = p_pid, pid_started_at = p_pid_started_at, started_at = now()
   where id = p_wake_id and claim_token = p_claim_token and state = 'starting'
  returning * into v_wake;
  if v_wake.id is null then
    select * into v_wake from public.agent_wakes where id = p_wake_id;
    return jsonb_build_object('wake_id', p_wake_id, 'applied', v_wake.state = 'running' and v_wake.claim_token = p_claim_token and v_wake.pid = p_pid,
                              'code', case when v_wake.claim_token = p_claim_token and v_wake.pid = p_pid then 'already' else 'fence_lost' end);
  end if;
  update public.agent_inbox_items set last_wake_success_at = now()
   where id in (select item.id from public.agent_inbox_items as item where item.id = any (v_wake.item_ids) for update skip locked);
  return jsonb_build_object('wake_id', p_wake_id, 'applied', true, 'code', 'ok');
end
$$;
comment on function dispatcher.start_wake(uuid, uuid, text, integer, double precision) is
  'The process of a claimed wake started: keeps its pid, start time and host, and stamps last_wake_success_at. Needs the claim token.';

create or replace function dispatcher.wake_has_progress(p_wake public.agent_wakes) returns boolean
language plpgsql stable set search_path = ''
as $$
begin
  return (
    select p_wake.progressed_at is not null
      or exists (select from public.inbox_item_leases as lease
                  where lease.wake_id = p_wake.id and lease.outcome in ('done', 'failed', 'dead_letter', 'escalated'))
      or exists (select from public.agent_inbox_items as item
                  where item.agent_id = p_wake.agent_id and item.completed_at >= p_wake.claimed_at)
      or not exists (select from public.agent_inbox_items as item
                      where item.agent_id = p_wake.agent_id and item.status in ('pending', 'failed', 'leased') and item.attempt_count < item.max_attempts)
  );
end
$$;
comment on function dispatcher.wake_has_progress(public.agent_wakes) is 'Whether an item of the agent was finished during the wake, or nothing is left to do.';

create or replace function dispatcher.give_up_item(p_item_id uuid, p_reason text) returns void
language sql volatile set search_path = ''
as $$
  update public.agent_inbox_items
     set status = 'dead_letter', failed_at = now(), leased_at = null, leased_until = null, updated_at = now(),
         context = dispatcher.merge_inbox_context(context, jsonb_build_object('last_failure_reason', p_reason))
   where id = p_item_id
$$;
comment on function dispatcher.give_up_item(uuid, text) is 'dead_letter with its reason.';

create or replace function dispatcher.release_wake_leases(p_wake public.agent_wakes, p_give_back boolean, p_reason text) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_item record;
  v_count integer := 0;
begin
  for v_item in
    select item.id, item.attempt_count, item.max_attempts from public.agent_inbox_items as item
     where item.agent_id = p_wake.agent_id and item.status = 'leased'
       and (item.leased_at >= p_wake.claimed_at
            or exists (select from public.inbox_item_leases as lease where lease.item_id = item.id and lease.wake_id = p_wake.id and lease.closed_at is null))
     order by item.created_at for update
  loop
    v_count := v_count + 1;
    update public.inbox_item_leases set closed_at = now(), outcome = case when p_give_back then 'released' else 'lost' end
     where item_id = v_item.id and closed_at is null;
    if not p_give_back and v_item.attempt_count >= v_item.max_attempts then
      perform dispatcher.give_up_item(v_item.id, p_reason);
    else
      update public.agent_inbox_items
         set status = 'pending', leased_at = null, leased_until = null, updated_at = now(),
             attempt_count = greatest(attempt_count - p_give_back::integer, 0)
       where id = v_item.id;
    end if;
  end loop;
  return v_count;
end
$$;
comment on function dispatcher.release_wake_leases(public.agent_wakes, boolean, text) is
  'Releases the leases taken during a wake; gives their attempts back when p_give_back, else an item without attempts left becomes dead_letter with p_reason.';

create or replace function dispatcher.spend_attempt_of_lost_wake(p_wake public.agent_wakes) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_item record;
  v_agent record;
begin
  -- A daemon that dies again and again over one item must end too: a lost wake during which nothing was leased costs its first item an attempt.
  if exists (select from public.inbox_item_leases where wake_id = p_wake.id) then
    return;
  end if;
  update public.agent_inbox_items set attempt_count = attempt_count + 1, updated_at = now()
   where id = p_wake.item_ids[1] and status in ('pending', 'failed') and attempt_count < max_attempts
  returning id, attempt_count, max_attempts into v_item;
  if v_item.attempt_count >= v_item.max_attempts then
    perform dispatcher.give_up_item(v_item.id, 'worker lost');
    select slug, tenant_id into v_agent from public.agents where id = p_wake.agent_id;
    insert into public.notifications (tenant_id, type, title, body, entity_type, entity_id, actor_type, actor_agent_id, meta)
    values (v_agent.tenant_id, 'worker_lost', format('An item of agent %s was given up', v_agent.slug),
            format('%s daemon(s) were lost before its run could be seen to begin or end. `dispatcher inbox requeue %s` brings it back.',
                   v_item.attempt_count, v_item.id),
            'agent', p_wake.agent_id, 'system', p_wake.agent_id, jsonb_build_object('item_id', v_item.id, 'attempts', v_item.attempt_count));
  end if;
end
$$;
comment on function dispatcher.spend_attempt_of_lost_wake(public.agent_wakes) is
  'A poison item ends at max_attempts also when it is the daemon that dies of it; a notification says so, for a daemon may die of something else.';

create or replace function dispatcher.mark_agent_stalled(p_agent_id uuid) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_agent record;
  v_first boolean;
  v_count integer;
begin
  update public.agent_wake_state set stalled_at = now(), waitlisted_at = null, waitlist_path = null, waiting_since = null, updated_at = now()
   where agent_id = p_agent_id and stalled_at is null;
  v_first := found;
  update public.agent_inbox_items
     set status = 'failed', failed_at = now(), updated_at = now(),
         context = dispatcher.merge_inbox_context(context, jsonb_build_object('last_failure_reason', 'agent_stalled'))
   where id in (select item.id from public.agent_inbox_items as item
                 where item.agent_id = p_agent_id and item.status = 'pending' and item.attempt_count < item.max_attempts
                 limit 500 for update skip locked);
  get diagnostics v_count = row_count;
  if v_first then
    select * into v_agent from public.agents where id = p_agent_id;
    insert into public.notifications (tenant_id, type, title, body, entity_type, entity_id, actor_type, actor_agent_id, meta)
    select v_agent.tenant_id, 'agent_stalled', format('Agent %s is stalled', v_agent.slug),
           format('%s wakes in a row failed. Its %s pending item(s) wait as failed; a new item, or `dispatcher inbox requeue --agent %s`, wakes it again.',
                  state.consecutive_failures, v_count, v_agent.slug),
           'agent', p_agent_id, 'system', p_agent_id, jsonb_build_object('consecutive_failures', state.consecutive_failures, 'items', v_count)
      from public.agent_wake_state as state where state.agent_id = p_agent_id;
  end if;
  return v_count;
end
$$;
comment on function dispatcher.mark_agent_stalled(uuid) is
  'Sets pending items of an agent aside (failed, reason agent_stalled, attempts untouched), at most 500 a call: the sweep takes the rest. Tells the operator once per stall.';

create or replace function dispatcher.wake_end_state(p_wake public.agent_wakes, p_ending text, p_exit_code integer) returns text
language plpgsql stable set search_path = ''
as $$
begin
  return (
    select case
    when p_ending in ('timed_out', 'interrupted', 'lost', 'spawn_failed') then p_ending
    when p_ending = 'exited' and p_exit_code <> 0 then 'failed'
    when dispatcher.wake_has_progress(p_wake) then 'succeeded'
    else 'no_progress' end
  );
end
$$;
comment on function dispatcher.wake_end_state(public.agent_wakes, text, integer) is
  'The state a wake ends in. Exit 0 without progress is no_progress; an unknown exit code (adopted child) is judged by progress alone.';

create or replace function dispatcher.end_wake(p_wake_id uuid, p_claim_token uuid, p_ending text, p_exit_code integer, p_error text) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_wake public.agent_wakes;
  v_state text;
  v_settings jsonb;
  v_failures integer;
  v_max integer;
  v_released integer;
begin
  if p_ending not in ('exited', 'timed_out', 'interrupted', 'lost', 'spawn_failed') then
    raise exception 'unknown ending %', p_ending using errcode = 'OD002';
  end if;
  perform from public.agent_wake_state where agent_id = (select agent_id from public.agent_wakes where id = p_wake_id) for update;
  select * into v_wake from public.agent_wakes where id = p_wake_id for update;
  if v_wake.id is null or v_wake.claim_token <> p_claim_token then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'state', v_wake.state,
                              'code', case when v_wake.id is null then 'not_found' else 'fence_lost' end);
  end if;
  select settings into v_settings from public.dispatcher_instances where id = v_wake.instance_id;
  v_settings := coalesce(v_settings, (select settings from public.dispatcher_instances where gateway_id = v_wake.gateway_id order by last_heartbeat_at desc limit 1));
  if v_wake.ended_at is not null then
    -- Whoever asks again did not hear the first answer, and so not when to look at the agent next.
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'code', 'already', 'state', v_wake.state, 'agent_id', v_wake.agent_id)
           || dispatcher.wait_for_next_wake(v_wake.agent_id, v_settings,
             case when v_wake.state in ('interrupted', 'lost') then v_wake.claimed_at else now() end);
  end if;
  perform set_config('dispatcher.quiet', 'on', true);
  v_state := dispatcher.wake_end_state(v_wake, p_ending, p_exit_code);
  update public.agent_wakes set state = v_state, ended_at = now(), exit_code = p_exit_code, error = left(p_error, 2000) where id = p_wake_id;
  v_released := dispatcher.release_wake_leases(v_wake, v_state in ('interrupted', 'spawn_failed'), format('wake ended (%s) with the item unfinished', v_state));
  if v_state = 'lost' and v_released = 0 then
    perform dispatcher.spend_attempt_of_lost_wake(v_wake);
  end if;

  v_max := (v_settings ->> 'max_consecutive_failures')::integer;
  update public.agent_wake_state as wake_state
     set last_ended_at = now(), last_end_state = v_state, updated_at = now(),
         consecutive_failures = case
           when v_state = 'succeeded' then 0
           when v_state in ('interrupted', 'lost') then wake_state.consecutive_failures
           -- slow but working: a longer cooldown, never a stall of its own making
           when v_state = 'timed_out' and dispatcher.wake_has_progress(v_wake)
             then greatest(least(wake_state.consecutive_failures + 1, v_max - 1), wake_state.consecutive_failures)
           else wake_state.consecutive_failures + 1 end
   where wake_state.agent_id = v_wake.agent_id
  returning wake_state.consecutive_failures into v_failures;
  if v_failures >= v_max then
    perform dispatcher.mark_agent_stalled(v_wake.agent_id);
  end if;
  return jsonb_build_object('wake_id', p_wake_id, 'applied', true, 'code', 'ok', 'state', v_state, 'agent_id', v_wake.agent_id,
                            'agent_slug', (select slug from public.agents where id = v_wake.agent_id),
                            'consecutive_failures', v_failures) || dispatcher.wait_for_next_wake(v_wake.agent_id, v_settings,
             case when v_state in ('interrupted', 'lost') then v_wake.claimed_at else now() end);
end
$$;
comment on function dispatcher.end_wake(uuid, uuid, text, integer, text) is
  'Ends a wake: final state, leases released, failures counted, and what is next for its agent (waitlisted, or retry_in seconds). p_ending: exited, timed_out, interrupted, lost, spawn_failed. Needs the claim token.';

create or replace function dispatcher.wait_for_next_wake(p_agent_id uuid, p_settings jsonb, p_since timestamptz) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_gates record;
begin
  select * into v_gates from dispatcher.wake_gates(p_agent_id, p_settings);
  if cardinality(v_gates.blocked) > 0 then
    return jsonb_build_object('next', v_gates.blocked[1], 'retry_in', extract(epoch from v_gates.retry_at - now()));
  end if;
  update public.agent_wake_state
     set waitlisted_at = coalesce(waitlisted_at, p_since), waitlist_path = coalesce(waitlist_path, 'waitlist'),
         waiting_since = coalesce(waiting_since, (select created_at from public.agent_inbox_items where id = v_gates.due_item_id)), updated_at = now()
   where agent_id = p_agent_id;
  return jsonb_build_object('next', 'waitlisted');
end
$$;
comment on function dispatcher.wait_for_next_wake(uuid, jsonb, timestamptz) is 'After a wake: puts an agent with work left on the waitlist, waiting since p_since (one whose wake came to nothing keeps its place), or says when it may be looked at again.';

create or replace function public.report_wakes(p_instance_id uuid, p_reports jsonb, p_claim_limit integer, p_request uuid) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '3s'
as $$
declare
  v_report jsonb;
  v_answer jsonb;
  v_answers jsonb := '[]';
begin
  -- The gateway's lock first: everything below may need it, and one order of locks is what keeps two daemons from waiting for each other.
  perform from public.dispatcher_gateways
   where gateway_id = (select gateway_id from public.dispatcher_instances where id = p_instance_id) for update;
  for v_report in select value from jsonb_array_elements(p_reports) loop
    begin
      if v_report ->> 'report' = 'started' then
        v_answer := dispatcher.start_wake((v_report ->> 'wake_id')::uuid, (v_report ->> 'claim_token')::uuid, v_report ->> 'host_id',
                                      (v_report ->> 'pid')::integer, (v_report ->> 'pid_started_at')::double precision);
      else
        v_answer := dispatcher.end_wake((v_report ->> 'wake_id')::uuid, (v_report ->> 'claim_token')::uuid, v_report ->> 'ending',
                                    (v_report ->> 'exit_code')::integer, v_report ->> 'error');
      end if;
    exception when query_canceled or deadlock_detected or serialization_failure then
      raise;
    when others then
      v_answer := jsonb_build_object('wake_id', v_report ->> 'wake_id', 'applied', false, 'code', 'error', 'error', sqlerrm, 'error_code', sqlstate);
    end;
    v_answers := v_answers || (v_answer || jsonb_build_object('report', v_report ->> 'report'));
  end loop;
  return jsonb_build_object('results', v_answers, 'claims', dispatcher.claim_waiting_wakes(p_instance_id, p_claim_limit, p_request));
end
$$;
comment on function public.report_wakes(uuid, jsonb, integer, uuid) is
  'What happened to wakes since the last call, and the next claims off the waitlist, in one round trip. p_reports: [{report: started|ended, wake_id, claim_token, …}].';

select dispatcher.restrict_functions(array[
  'report_wakes'
]);

notify pgrst, 'reload schema';
