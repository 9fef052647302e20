-- The life of a wake after its claim: its process starts, it ends, and what follows from how it ended. Nothing here
-- waits for a row that one agent, item or wake owns: a report that meets a held row is `busy`, and the daemon reports
-- it again.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.lock_wake(p_wake_id uuid, out wake public.agent_wakes, out verdict text)
language plpgsql volatile set search_path = ''
as $$
declare
  v_agent_id uuid;
  v_tenant_id uuid;
begin
  select agent_id, tenant_id into v_agent_id, v_tenant_id from public.agent_wakes where id = p_wake_id;
  verdict := case when v_agent_id is null then 'not_found' else 'busy' end;
  perform from public.agent_wake_state where agent_id = v_agent_id for update skip locked;
  -- Somebody may have deleted the row: it is made anew, or the wake could never end.
  if found or (v_agent_id is not null and (dispatcher.lock_wake_state(v_agent_id,
      v_tenant_id)).agent_id is not null) then
    select * into wake from public.agent_wakes where id = p_wake_id for update skip locked;
    verdict := case when wake.id is null then 'busy' else 'ok' end;
  end if;
end
$$;
comment on function dispatcher.lock_wake(uuid) is
  'Locks what the gates remember of the agent, then the wake: verdict ok, busy (somebody holds one of them) or '
  'not_found. Never waits.';

create or replace function dispatcher.must_be_written(p_found boolean, p_what text) returns void
language plpgsql volatile set search_path = ''
as $$
begin
  if not p_found then
    raise exception 'a trigger keeps the % of the wake from being written', p_what;
  end if;
  -- What follows is less than this: what a trigger puts off until the commit speaks now, before it.
  set constraints all immediate;
end
$$;
comment on function dispatcher.must_be_written(boolean, text) is
  'Raises unless the row of a wake was written, also for the triggers that others put off until the commit.';

create or replace function dispatcher.start_wake(
  p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision
) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_wake public.agent_wakes;
begin
  select * into v_wake from public.agent_wakes where id = p_wake_id for update skip locked;
  if v_wake.id is null then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'code',
                              case when exists (select from public.agent_wakes where id = p_wake_id) then 'busy'
                                  else 'not_found' end);
  end if;
  if p_claim_token is null or v_wake.claim_token <> p_claim_token or p_pid is null then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'code', 'fence_lost');
  end if;
  if v_wake.state <> 'starting' then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', v_wake.state = 'running'
        and v_wake.pid is not distinct from p_pid,
                              'code', case when v_wake.pid is not distinct from p_pid then 'already'
                                  else 'fence_lost' end);
  end if;
  update public.agent_wakes
     set state = 'running', host_id = p_host_id, pid = p_pid, pid_started_at = p_pid_started_at, started_at = now()
   where id = p_wake_id;
  perform dispatcher.must_be_written(found, 'start');
  perform dispatcher.stamp_items(v_wake, now());
  return jsonb_build_object('wake_id', p_wake_id, 'applied', true, 'code', 'ok');
end
$$;
comment on function dispatcher.start_wake(uuid, uuid, text, integer, double precision) is
  'The process of a claimed wake started: keeps its pid, start time and host, and stamps its items. Needs the claim '
  'token.';

create or replace function dispatcher.stamp_items(p_wake public.agent_wakes, p_started_at timestamptz) returns void
language plpgsql volatile set search_path = ''
as $$
begin
  -- A stamp is not worth a wait, nor the report that brings it: a row that somebody holds, or whose triggers raise,
  -- goes without.
  update dispatcher.agent_inbox_items
     set last_wake_attempt_at = p_wake.claimed_at, last_wake_success_at = coalesce(p_started_at, last_wake_success_at)
   where id in (select item.id from dispatcher.agent_inbox_items as item
                 where item.id = any (p_wake.item_ids)
                   and (item.last_wake_attempt_at is null or item.last_wake_attempt_at < p_wake.claimed_at
                        or (p_started_at is not null and item.last_wake_success_at is null
                        or item.last_wake_success_at < p_wake.claimed_at))
                   for update skip locked);
  perform dispatcher.settle_constraints('public.agent_inbox_items');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_wake.tenant_id, p_wake.gateway_id, 'stamp of items',
      format('%s (%s)', sqlerrm, sqlstate));
end
$$;
comment on function dispatcher.stamp_items(public.agent_wakes, timestamptz) is
  'Stamps the items of a wake: last_wake_attempt_at when it was claimed, last_wake_success_at when its process '
  'started (p_started_at; NULL: it did not).';

create or replace function dispatcher.wake_has_progress(p_wake public.agent_wakes) returns boolean
language plpgsql stable set search_path = ''
as $$
begin
  return (
    -- What its own agent did: it closed what it had leased in this wake by our functions, or by YourHQ's, which know no
    -- leases of ours,
    select exists (select from public.inbox_item_leases as lease
                    where lease.wake_id = p_wake.id and lease.outcome in ('done', 'failed', 'dead_letter', 'escalated'))
      or exists (select from dispatcher.agent_inbox_items as item
                  where item.agent_id = p_wake.agent_id and item.tenant_id = p_wake.tenant_id and item.status = 'done'
                    and item.completed_at between p_wake.claimed_at and clock_timestamp()
                    and not exists (select from public.inbox_item_marks as mark
                                     where mark.item_id = item.id and mark.closed_by_user_at >= p_wake.claimed_at))
      or exists (select from dispatcher.agent_inbox_items as item
                  where item.agent_id = p_wake.agent_id and item.tenant_id = p_wake.tenant_id
                    and item.status in ('failed', 'dead_letter')
                    and item.failed_at between p_wake.claimed_at and clock_timestamp()
                    and item.leased_at between p_wake.claimed_at and item.failed_at)
      -- or worked on a run,
      or dispatcher.wake_worked_on_a_run(p_wake.id)
      -- or there was nothing left to do: what it holds and did not close is left.
      or not exists (select from dispatcher.agent_inbox_items as item
                      where item.agent_id = p_wake.agent_id and item.tenant_id = p_wake.tenant_id
                        and (item.status = 'leased' or (item.status in ('pending', 'failed')
                        and item.attempt_count < item.max_attempts)))
  );
end
$$;
comment on function dispatcher.wake_has_progress(public.agent_wakes) is
  'Whether the agent itself finished an item or worked on a run in this wake, or nothing is left to do. What others '
  'closed meanwhile does not count.';

create or replace function dispatcher.tell_dead_letters(p_agent_id uuid, p_item_ids uuid[], p_reason text) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_agent record;
begin
  if coalesce(cardinality(p_item_ids), 0) = 0 then
    return;
  end if;
  select slug, tenant_id into v_agent from dispatcher.agents where id = p_agent_id;
  perform dispatcher.notify_operator(
    v_agent.tenant_id, 'dead_letter', format('%s item(s) of agent %s were given up', cardinality(p_item_ids),
        v_agent.slug),
    format('Reason: %s. `dispatcher inbox requeue %s` brings back the first of them, `dispatcher inbox requeue --dead '
           '--agent %s` all.',
           p_reason, p_item_ids[1], v_agent.slug),
    p_agent_id, jsonb_build_object('item_ids', p_item_ids[1:100], 'items', cardinality(p_item_ids), 'reason',
        p_reason));
end
$$;
comment on function dispatcher.tell_dead_letters(uuid, uuid[], text) is
  'One notification for items of an agent that nobody will try again.';

create or replace function dispatcher.give_up_items(p_item_ids uuid[], p_reason text) returns uuid[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_ids uuid[];
begin
  with given_up as (
    update dispatcher.agent_inbox_items
       set status = 'dead_letter', failed_at = now(), leased_at = null, leased_until = null, updated_at = now(),
           context = dispatcher.merge_inbox_context(context, jsonb_build_object('last_failure_reason', p_reason))
     where id in (select item.id from dispatcher.agent_inbox_items as item
                   where item.id = any (p_item_ids) and item.status <> 'dead_letter' for update skip locked)
    returning id)
  select array_agg(id) into v_ids from given_up;
  return coalesce(v_ids, '{}');
end
$$;
comment on function dispatcher.give_up_items(uuid[], text) is
  'dead_letter with its reason, for those that nobody holds; answers which.';

create or replace function dispatcher.close_leases(p_tenant_id uuid, p_gateway_id uuid, p_item_ids uuid[],
    p_outcome text) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_half constant integer := coalesce(cardinality(p_item_ids), 0) / 2;
begin
  -- A side write. A lease left open owns nothing: its item is not leased any more, or was leased at another time.
  update public.inbox_item_leases set closed_at = now(), outcome = p_outcome
   where item_id in (select lease.item_id from public.inbox_item_leases as lease
                      where lease.item_id = any (p_item_ids) and lease.closed_at is null for update skip locked);
  perform dispatcher.settle_constraints('public.inbox_item_leases');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  if v_half = 0 then
    perform dispatcher.note_fault(p_tenant_id, p_gateway_id, 'end of a lease',
        format('item %s: %s (%s)', p_item_ids[1], sqlerrm, sqlstate));
    return;
  end if;
  perform dispatcher.close_leases(p_tenant_id, p_gateway_id, p_item_ids[:v_half], p_outcome);
  perform dispatcher.close_leases(p_tenant_id, p_gateway_id, p_item_ids[v_half + 1:], p_outcome);
end
$$;
comment on function dispatcher.close_leases(uuid, uuid, uuid[], text) is
  'Closes the open leases of items that nobody holds. One that raises stays open and is noted; it owns nothing once '
  'its item is released.';

create or replace function dispatcher.release_wake_leases(p_wake public.agent_wakes, p_give_back boolean,
    p_reason text, out released integer, out dead uuid[])
language plpgsql volatile set search_path = ''
as $$
declare
  v_items uuid[];
begin
  select array_agg(held.id) into v_items from (
    select item.id from dispatcher.agent_inbox_items as item
     where item.agent_id = p_wake.agent_id and item.tenant_id = p_wake.tenant_id and item.status = 'leased'
       and (item.leased_at >= p_wake.claimed_at
            or exists (select from public.inbox_item_leases as lease where lease.item_id = item.id
            and lease.wake_id = p_wake.id and lease.closed_at is null))
     order by item.created_at limit 500 for update skip locked) as held;
  released := coalesce(cardinality(v_items), 0);
  dead := '{}';
  if released = 0 then
    return;
  end if;
  perform dispatcher.close_leases(p_wake.tenant_id, p_wake.gateway_id, v_items,
      case when p_give_back then 'released' else 'lost' end);
  if not p_give_back then
    dead := dispatcher.give_up_items(array(select item.id from dispatcher.agent_inbox_items as item
                                            where item.id = any (v_items) and item.attempt_count >= item.max_attempts),
                                                p_reason);
  end if;
  update dispatcher.agent_inbox_items
     set status = 'pending', leased_at = null, leased_until = null, updated_at = now(),
         attempt_count = case when p_give_back then greatest(attempt_count, 1) - 1 else attempt_count end
   where id = any (v_items) and id <> all (dead);
  get diagnostics released = row_count;
  released := released + cardinality(dead);
end
$$;
comment on function dispatcher.release_wake_leases(public.agent_wakes, boolean, text) is
  'Releases the leases taken during a wake; gives their attempts back when p_give_back, else an item without attempts '
  'left becomes dead_letter with p_reason. What somebody holds at this moment is left to the sweep.';

create or replace function dispatcher.spend_attempt_of_lost_wake(p_wake public.agent_wakes) returns uuid[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_item record;
  v_agent record;
begin
  -- A daemon that dies again and again over one item must end too: a lost wake during which nothing was leased costs
  -- its first item an attempt.
  if exists (select from public.inbox_item_leases where wake_id = p_wake.id) then
    return '{}';
  end if;
  update dispatcher.agent_inbox_items set attempt_count = attempt_count + 1, updated_at = now()
   where id in (select item.id from dispatcher.agent_inbox_items as item where item.id = p_wake.item_ids[1]
       for update skip locked)
     and status in ('pending', 'failed') and attempt_count < max_attempts
  returning id, attempt_count, max_attempts into v_item;
  if v_item.attempt_count is null or v_item.attempt_count < v_item.max_attempts then
    return '{}';
  end if;
  select slug, tenant_id into v_agent from dispatcher.agents where id = p_wake.agent_id;
  perform dispatcher.notify_operator(
    v_agent.tenant_id, 'worker_lost', format('An item of agent %s was given up', v_agent.slug),
    format('%s daemon(s) were lost before its run could be seen to begin or end. `dispatcher inbox requeue %s` brings '
           'it back.', v_item.attempt_count, v_item.id),
    p_wake.agent_id, jsonb_build_object('item_id', v_item.id, 'attempts', v_item.attempt_count));
  return dispatcher.give_up_items(array[v_item.id], 'worker lost');
end
$$;
comment on function dispatcher.spend_attempt_of_lost_wake(public.agent_wakes) is
  'A poison item ends at max_attempts also when it is the daemon that dies of it; a notification says so, for a '
  'daemon may die of something else. Answers the item given up.';

create or replace function dispatcher.mark_as_set_aside(p_item_ids uuid[], p_as text) returns void
language plpgsql volatile set search_path = '' set lock_timeout = '100ms'
as $$
begin
  insert into public.inbox_item_marks as mark (item_id, tenant_id, set_aside_at, set_aside_as)
  select item.id, item.tenant_id, item.failed_at, p_as from dispatcher.agent_inbox_items as item
      where item.id = any (p_item_ids)
  on conflict (item_id) do update set set_aside_at = excluded.set_aside_at, set_aside_as = excluded.set_aside_as;
  perform dispatcher.settle_constraints('public.inbox_item_marks');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault((select tenant_id from dispatcher.agent_inbox_items where id = p_item_ids[1]), null,
                                'mark of items', format('%s (%s)', sqlerrm, sqlstate));
end
$$;
comment on function dispatcher.mark_as_set_aside(uuid[], text) is
  'Marks why items that were just set aside are. A side write: without its mark an item is one that failed by itself.';

create or replace function dispatcher.set_items_aside(p_item_ids uuid[], p_as text, p_reason text) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_ids uuid[];
begin
  with aside as (
    update dispatcher.agent_inbox_items
       set status = case p_as when 'agent_stalled' then 'failed' else 'dead_letter' end::public.inbox_item_status,
           failed_at = now(), updated_at = now(),
           context = dispatcher.merge_inbox_context(context, jsonb_build_object('last_failure_reason', p_reason))
     where id in (select item.id from dispatcher.agent_inbox_items as item
                   where item.id = any (p_item_ids) and item.status in ('pending', 'failed') for update skip locked)
    returning id)
  select array_agg(id) into v_ids from aside;
  if v_ids is not null then
    perform dispatcher.mark_as_set_aside(v_ids, p_as);
  end if;
  return coalesce(cardinality(v_ids), 0);
end
$$;
comment on function dispatcher.set_items_aside(uuid[], text, text) is
  'Sets items aside and marks why (agent_stalled: failed, tried again when the agent recovers; wake_chain_limit: '
  'dead_letter). Answers how many.';

create or replace function dispatcher.mark_agent_stalled(p_agent_id uuid, p_cause text default null) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_state public.agent_wake_state;
  v_slug text;
  v_count integer := 0;
  v_is_new boolean;
begin
  select * into v_state from public.agent_wake_state where agent_id = p_agent_id for update skip locked;
  if v_state.agent_id is null then
    return 0;
  end if;
  v_is_new := v_state.stalled_at is null;
  update public.agent_wake_state
     set stalled_at = coalesce(stalled_at, now()), waitlisted_at = null, waitlist_path = null, waiting_since = null,
         updated_at = now()
   where agent_id = p_agent_id;
  v_is_new := v_is_new and found;  -- whom nobody keeps, nobody tells of at every look
  select slug into v_slug from dispatcher.agents where id = p_agent_id;
  begin
    v_count := dispatcher.set_items_aside(array(
      select item.id from dispatcher.agent_inbox_items as item
       where item.agent_id = p_agent_id and item.tenant_id = v_state.tenant_id and item.status = 'pending'
         and item.attempt_count < item.max_attempts
           limit 500), 'agent_stalled', 'agent_stalled');
    perform dispatcher.settle_constraints('public.agent_inbox_items');
  exception when others then
    if dispatcher.must_abort(sqlstate) then raise; end if;
    perform dispatcher.note_fault(v_state.tenant_id, (select gateway_id from dispatcher.agents where id = p_agent_id),
                                  'items of a stalled agent', format('%s (%s)', sqlerrm, sqlstate));
  end;
  if v_is_new then
    perform dispatcher.notify_operator(
      v_state.tenant_id, 'agent_stalled', format('Agent %s is stalled', v_slug),
      coalesce(p_cause || '. ', format('%s wakes in a row failed. ', v_state.consecutive_failures))
      || format('Its %s pending item(s) wait as failed; a new item, or `dispatcher inbox requeue --agent %s`, wakes it '
                'again.', v_count, v_slug),
      p_agent_id, jsonb_build_object('consecutive_failures', v_state.consecutive_failures, 'items', v_count, 'cause',
          p_cause));
  end if;
  return v_count;
end
$$;
comment on function dispatcher.mark_agent_stalled(uuid, text) is
  'Sets pending items of an agent aside (failed, marked agent_stalled, attempts untouched), at most 500 a call: the '
  'sweep takes the rest. Tells the operator once per stall, with p_cause where there is one.';

create or replace function dispatcher.stall_at_end(p_wake public.agent_wakes, p_cause text) returns void
language plpgsql volatile set search_path = ''
as $$
begin
  perform dispatcher.mark_agent_stalled(p_wake.agent_id, p_cause);
  perform dispatcher.settle_constraints('public.agent_wake_state');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_wake.tenant_id, p_wake.gateway_id, 'stall', format('%s (%s)', sqlerrm, sqlstate));
end
$$;
comment on function dispatcher.stall_at_end(public.agent_wakes, text) is
  'mark_agent_stalled at the end of a wake, which stands whatever becomes of it: the sweep tries again.';

create or replace function dispatcher.wake_end_state(p_wake public.agent_wakes, p_ending text, p_exit_code integer)
    returns text
language plpgsql stable set search_path = ''
as $$
begin
  return (
    select case
    when p_ending in ('timed_out', 'interrupted', 'lost', 'spawn_failed') then p_ending
    when p_ending in ('item_refused', 'agent_refused') then 'spawn_failed'
    when p_ending = 'exited' and p_exit_code <> 0 then 'failed'
    when dispatcher.wake_has_progress(p_wake) then 'succeeded'
    else 'no_progress' end
  );
end
$$;
comment on function dispatcher.wake_end_state(public.agent_wakes, text, integer) is
  'The state a wake ends in. Exit 0 without progress is no_progress; an unknown exit code (adopted child) is judged '
  'by progress alone.';

create or replace function dispatcher.failures_after(p_before integer, p_state text, p_ending text,
    p_has_progress boolean, p_max integer) returns integer
language sql immutable set search_path = ''
as $$
  select case
    when p_state = 'succeeded' then 0
    when p_state in ('interrupted', 'lost') or p_ending = 'item_refused' then p_before
    when p_ending = 'agent_refused' then greatest(p_before, p_max)
    -- slow but working: a longer cooldown, never a stall of its own making
    when p_state = 'timed_out' and p_has_progress then greatest(least(p_before + 1, p_max - 1), p_before)
    else least(p_before, 2147483646) + 1 end
$$;
comment on function dispatcher.failures_after(integer, text, text, boolean, integer) is
  'Failures in a row after a wake that ended so.';

create or replace function dispatcher.settle_items_of_wake(p_wake public.agent_wakes, p_state text, p_ending text,
    p_error text) returns uuid[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_released record;
  v_dead uuid[];
  v_reason constant text := case when p_ending = 'item_refused'
      then format('it cannot be started: %s', left(p_error, 500))
                                 else format('wake ended (%s) with the item unfinished', p_state) end;
begin
  v_released := dispatcher.release_wake_leases(p_wake, p_state in ('interrupted', 'spawn_failed'), v_reason);
  v_dead := v_released.dead;
  if p_state = 'lost' and v_released.released = 0 then
    v_dead := v_dead || dispatcher.spend_attempt_of_lost_wake(p_wake);
    perform dispatcher.settle_constraints('public.agent_inbox_items');
    return v_dead;
  end if;
  if p_ending = 'item_refused' then
    v_dead := v_dead || dispatcher.give_up_items(p_wake.item_ids[1:1], v_reason);
  end if;
  perform dispatcher.settle_constraints('public.agent_inbox_items');
  perform dispatcher.tell_dead_letters(p_wake.agent_id, v_dead, v_reason);
  return v_dead;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_wake.tenant_id, p_wake.gateway_id, 'items of an ended wake',
      format('%s (%s)', sqlerrm, sqlstate));
  return '{}';
end
$$;
comment on function dispatcher.settle_items_of_wake(public.agent_wakes, text, text, text) is
  'What a wake''s end means for its items: leases released, spent and refused ones given up and told. Never fails the '
  'end; answers the items given up.';

create or replace function dispatcher.end_wake(p_wake_id uuid, p_claim_token uuid, p_ending text, p_exit_code integer,
    p_error text) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_locked record;
  v_wake public.agent_wakes;
  v_settings public.dispatcher_settings;
  v_state text;
  v_failures integer;
  v_dead uuid[];
begin
  if p_ending is null or p_ending not in ('exited', 'timed_out', 'interrupted', 'lost', 'spawn_failed', 'item_refused',
      'agent_refused') then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'code', 'invalid', 'error',
        format('unknown ending %s', left(p_ending, 100)));
  end if;
  v_locked := dispatcher.lock_wake(p_wake_id);
  v_wake := v_locked.wake;
  if v_locked.verdict <> 'ok' then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'code', v_locked.verdict);
  end if;
  if p_claim_token is null or v_wake.claim_token <> p_claim_token then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'state', v_wake.state, 'code', 'fence_lost');
  end if;
  select * into v_settings from public.dispatcher_settings where instance_id = v_wake.instance_id;
  if v_settings.instance_id is null then
    v_settings := dispatcher.settings_of_gateway(v_wake.gateway_id, '{}');
  end if;
  if v_wake.ended_at is not null then
    -- Whoever asks again did not hear the first answer, and so not when to look at the agent next.
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'code', 'already', 'state', v_wake.state,
        'agent_id', v_wake.agent_id)
           || dispatcher.wait_for_next_wake(v_wake, v_settings, v_wake.state);
  end if;
  perform set_config('dispatcher.quiet', 'on', true);
  v_state := dispatcher.wake_end_state(v_wake, p_ending, p_exit_code);
  update public.agent_wakes set state = v_state, ended_at = now(), exit_code = p_exit_code, error = left(p_error, 2000)
      where id = p_wake_id;
  perform dispatcher.must_be_written(found, 'end');
  update public.agent_wake_state as memory
     set last_ended_at = now(), last_end_state = v_state, updated_at = now(),
         consecutive_failures = dispatcher.failures_after(memory.consecutive_failures, v_state, p_ending,
             v_state = 'timed_out'
                                  and dispatcher.wake_has_progress(v_wake), v_settings.max_consecutive_failures)
   where memory.agent_id = v_wake.agent_id
  returning memory.consecutive_failures into v_failures;
  perform dispatcher.must_be_written(found, 'end');
  v_dead := dispatcher.settle_items_of_wake(v_wake, v_state, p_ending, p_error);
  if v_wake.started_at is null then
    perform dispatcher.stamp_items(v_wake, null);
  end if;
  if v_failures >= v_settings.max_consecutive_failures then
    perform dispatcher.stall_at_end(v_wake, case when p_ending = 'agent_refused'
        then format('It cannot be started: %s', left(p_error, 500)) end);
  end if;
  return jsonb_build_object('wake_id', p_wake_id, 'applied', true, 'code', 'ok', 'state', v_state, 'agent_id',
      v_wake.agent_id,
                            'agent_slug', (select slug from dispatcher.agents where id = v_wake.agent_id),
                                'consecutive_failures', v_failures,
                            'cause', case when p_ending = 'agent_refused' then left(p_error, 500) end,
                            'dead_letters', to_jsonb(v_dead || dispatcher.dead_letters_of_wake(v_wake, v_dead)))
         || dispatcher.wait_for_next_wake(v_wake, v_settings, v_state);
end
$$;
comment on function dispatcher.end_wake(uuid, uuid, text, integer, text) is
  'Ends a wake: final state, leases released, failures counted, items given up (dead_letters), and what is next for '
  'its agent (waitlisted, or retry_in seconds). p_ending: exited, timed_out, interrupted, lost, spawn_failed, '
  'item_refused (its first item is at fault and given up), agent_refused (the agent is stalled at once). Needs the '
  'claim token; busy where another session holds a row of the agent.';

create or replace function dispatcher.dead_letters_of_wake(p_wake public.agent_wakes, p_known uuid[]) returns uuid[]
language sql stable set search_path = ''
as $$
  -- YourHQ's functions, too, leave their time, and know no leases of ours.
  select coalesce(array_agg(item.id order by item.created_at, item.id), '{}')
    from dispatcher.agent_inbox_items as item
   where item.agent_id = p_wake.agent_id and item.tenant_id = p_wake.tenant_id and item.status = 'dead_letter'
     and item.id <> all (p_known)
     and item.failed_at between p_wake.claimed_at and clock_timestamp()
     and item.leased_at between p_wake.claimed_at and item.failed_at
$$;
comment on function dispatcher.dead_letters_of_wake(public.agent_wakes, uuid[]) is
  'Items the agent itself failed for good in a wake, without p_known.';

create or replace function dispatcher.wait_after_end(p_wake public.agent_wakes, p_since timestamptz,
    p_oldest timestamptz) returns boolean
language plpgsql volatile set search_path = ''
as $$
begin
  perform dispatcher.join_waitlist(p_wake.agent_id, 'waitlist', p_since, p_oldest);
  perform dispatcher.settle_constraints('public.agent_wake_state');
  return true;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_wake.tenant_id, p_wake.gateway_id, 'waitlist', format('%s (%s)', sqlerrm, sqlstate));
  return false;
end
$$;
comment on function dispatcher.wait_after_end(public.agent_wakes, timestamptz, timestamptz) is
  'join_waitlist at the end of a wake, which stands whatever becomes of it. False when it raised, which is noted.';

create or replace function dispatcher.wait_for_next_wake(p_wake public.agent_wakes,
    p_settings public.dispatcher_settings, p_state text) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_facts dispatcher.gate_facts := dispatcher.read_gate_facts(p_wake.agent_id, p_settings);
  v_gates record;
  v_is_listed boolean;
begin
  v_gates := dispatcher.wake_gates(v_facts, p_settings);
  if v_facts.agent_id is null then
    return jsonb_build_object('next', 'no_actionable_work', 'retry_in', null);
  end if;
  if cardinality(v_gates.blocked) > 0 then
    return jsonb_build_object('next', v_gates.blocked[1], 'retry_in', dispatcher.seconds_until(v_gates.retry_at));
  end if;
  -- One whose wake came to nothing keeps its place.
  v_is_listed := dispatcher.wait_after_end(
    p_wake, case when p_state in ('interrupted', 'lost') then p_wake.claimed_at else now() end, v_facts.oldest_due);
  return jsonb_build_object('next', 'waitlisted', 'retry_in', case when not v_is_listed then 60 end);
end
$$;
comment on function dispatcher.wait_for_next_wake(public.agent_wakes, public.dispatcher_settings, text) is
  'After a wake that ended in p_state: puts an agent with work left on the waitlist, or says when it may be looked at '
  'again. The caller holds its wake state.';

create or replace function dispatcher.apply_report(p_report jsonb, p_gateway_id uuid) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_answer jsonb;
begin
  -- What a trigger puts off until the commit would take the reports of all with it: it speaks here, for this one alone.
  set constraints all deferred;
  if not exists (select from public.agent_wakes
                  where id = (p_report ->> 'wake_id')::uuid and gateway_id = p_gateway_id) then
    return jsonb_build_object('wake_id', p_report ->> 'wake_id', 'applied', false, 'code', 'not_found');
  end if;
  case p_report ->> 'report'
    when 'started' then
      v_answer := dispatcher.start_wake((p_report ->> 'wake_id')::uuid, (p_report ->> 'claim_token')::uuid,
          left(p_report ->> 'host_id', 500),
                                        (p_report ->> 'pid')::integer,
                                            (p_report ->> 'pid_started_at')::double precision);
    when 'ended' then
      v_answer := dispatcher.end_wake((p_report ->> 'wake_id')::uuid, (p_report ->> 'claim_token')::uuid,
          p_report ->> 'ending',
                                      (p_report ->> 'exit_code')::integer, p_report ->> 'error');
    else
      v_answer := jsonb_build_object('wake_id', p_report ->> 'wake_id', 'applied', false, 'code', 'invalid', 'error',
          'unknown report');
  end case;
  set constraints all immediate;
  return v_answer;
exception when lock_not_available then
  return jsonb_build_object('wake_id', p_report ->> 'wake_id', 'applied', false, 'code', 'busy');
when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return jsonb_build_object('wake_id', p_report ->> 'wake_id', 'applied', false, 'code', 'error', 'error',
      left(sqlerrm, 500), 'error_code', sqlstate);
end
$$;
comment on function dispatcher.apply_report(jsonb, uuid) is
  'One report {report: started|ended, wake_id, claim_token, …} of a wake of the gateway; what raises for one is its '
  'own answer (code error).';

create or replace function public.report_wakes(p_instance_id uuid, p_reports jsonb, p_claim_limit integer,
    p_request uuid) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_report jsonb;
  v_answer jsonb;
  v_busy text[] := '{}';
  v_results jsonb := '[]';
  v_claims jsonb := '[]';
  v_claims_busy boolean := false;
  v_instance public.dispatcher_instances;
  v_held text;
  v_ends_at constant timestamptz := clock_timestamp() + interval '2 seconds';
begin
  if jsonb_typeof(p_reports) is distinct from 'array' then
    raise exception 'p_reports must be an array of {report, wake_id, claim_token}' using errcode = 'OD002';
  end if;
  v_instance := dispatcher.running_instance(p_instance_id);
  perform set_config('lock_timeout', '100ms', true);
  for v_report in select value from jsonb_array_elements(p_reports) loop
    -- The end of a wake does not overtake its start: what was busy once in this call stays so.
    if v_report ->> 'wake_id' = any (v_busy) or clock_timestamp() > v_ends_at then
      v_answer := jsonb_build_object('wake_id', v_report ->> 'wake_id', 'applied', false, 'code', 'busy');
    else
      v_answer := dispatcher.apply_report(v_report, v_instance.gateway_id);
    end if;
    if v_answer ->> 'code' = 'busy' then
      v_busy := v_busy || (v_report ->> 'wake_id');
    end if;
    v_results := v_results || (v_answer || jsonb_build_object('report', v_report ->> 'report'));
  end loop;
  -- The gateway's row is the last to be waited for, and whoever holds it waits for nobody: what is reported stands in
  -- any case.
  begin
    v_claims := dispatcher.claim_waiting_wakes(p_instance_id, p_claim_limit, p_request);
  exception when lock_not_available then
    v_claims_busy := true;
    v_held := left(sqlerrm, 1000);
  end;
  perform dispatcher.warm_backend();
  return jsonb_build_object('results', v_results, 'claims', v_claims, 'claims_busy', v_claims_busy, 'held', v_held);
end
$$;
comment on function public.report_wakes(uuid, jsonb, integer, uuid) is
  'What happened to wakes since the last call, and the next claims off the waitlist, in one round trip: {results, '
  'claims, claims_busy, held}. p_reports: [{report: started|ended, wake_id, claim_token, …}]. A result whose code is '
  'busy is to be reported again; claims_busy: another session held the gateway (held: what, and who), look again soon.';

select dispatcher.restrict_functions(array[
  'report_wakes'
]);

notify pgrst, 'reload schema';
commit;
