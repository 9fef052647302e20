-- The sweep: the net under the hints. Each phase is a call, and so a transaction, of its own: it settles at most 500
-- rows, says whether there is more (`again`), waits for nobody, and what it raises costs no other phase.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.open_items_of_gateway(p_claimant dispatcher.claimant)
    returns setof dispatcher.agent_inbox_items
language sql stable set search_path = ''
as $$
  select item.* from dispatcher.agents as agent
    join dispatcher.agent_inbox_items as item on item.agent_id = agent.id and item.tenant_id = agent.tenant_id
   where agent.gateway_id = p_claimant.gateway_id and agent.tenant_id = p_claimant.tenant_id
     and item.status in ('pending', 'failed', 'leased')
$$;
comment on function dispatcher.open_items_of_gateway(dispatcher.claimant) is
  'Open items of the agents of a claimant''s gateway.';

create or replace function dispatcher.sweeper(p_instance_id uuid) returns dispatcher.claimant
language plpgsql stable set search_path = ''
as $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
begin
  return row(v_instance.id, v_instance.tenant_id, v_instance.gateway_id,
      dispatcher.settings_of_instance(p_instance_id))::dispatcher.claimant;
end
$$;
comment on function dispatcher.sweeper(uuid) is
  'Who sweeps, with which settings; locks nothing. Raises OD001 for an unknown instance.';

create or replace function dispatcher.in_parts(p_sweeper dispatcher.claimant, p_step text, p_what text, p_ids uuid[])
    returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_half constant integer := coalesce(cardinality(p_ids), 0) / 2;
  v_count integer;
begin
  if coalesce(cardinality(p_ids), 0) = 0 then
    return 0;
  end if;
  -- What a trigger puts off until the commit speaks here, while it can still be told whose row it is about.
  set constraints all deferred;
  execute format('select dispatcher.%I($1, $2)', p_step) into v_count using p_sweeper, p_ids;
  set constraints all immediate;
  return coalesce(v_count, 0);
exception when others then
  if dispatcher.must_abort(sqlstate) or sqlstate = '55P03' then raise; end if;
  if v_half = 0 then
    perform dispatcher.note_fault(p_sweeper.tenant_id, p_sweeper.gateway_id, p_what,
        format('%s: %s (%s)', p_ids[1], sqlerrm, sqlstate));
    return 0;
  end if;
  return dispatcher.in_parts(p_sweeper, p_step, p_what, p_ids[:v_half])
         + dispatcher.in_parts(p_sweeper, p_step, p_what, p_ids[v_half + 1:]);
end
$$;
comment on function dispatcher.in_parts(dispatcher.claimant, text, text, uuid[]) is
  'Takes a step, a function (sweeper, ids) that answers how many rows it changed, for all ids at once; where that '
  'raises, for each half. What raises for one id alone is noted as p_what and costs no other. Answers the sum.';

create or replace function dispatcher.stale_item_ids(p_sweeper dispatcher.claimant, p_limit integer) returns uuid[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_oldest constant timestamptz := now() - make_interval(secs => (p_sweeper.settings).stale_item_age_hours * 3600);
  v_ids uuid[];
begin
  if (p_sweeper.settings).stale_item_age_hours <= 0 then
    return '{}';
  end if;
  select array_agg(stale.id) into v_ids from (
    select item.id from dispatcher.agents as agent
      join dispatcher.agent_inbox_items as item on item.agent_id = agent.id and item.tenant_id = agent.tenant_id
      left join public.agent_resumptions as resumption on resumption.agent_id = agent.id
      left join public.inbox_item_marks as mark on mark.item_id = item.id
     where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
       and agent.status not in ('paused', 'hibernating')
       and item.status = 'pending' and item.attempt_count < item.max_attempts and item.created_at < v_oldest
       and coalesce(mark.reopened_at, '-infinity') < v_oldest
       and coalesce(resumption.resumed_at, '-infinity') < v_oldest
     limit p_limit for update of item skip locked) as stale;
  return coalesce(v_ids, '{}');
end
$$;
comment on function dispatcher.stale_item_ids(dispatcher.claimant, integer) is
  'Items pending for longer than stale_item_age_hours, locked. The age counts from the creation, the last requeue or '
  'the end of its agent''s pause; items of paused or hibernating agents wait.';

create or replace function dispatcher.expire_picked(p_sweeper dispatcher.claimant, p_item_ids uuid[]) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_count integer;
begin
  update dispatcher.agent_inbox_items as item
     set status = 'failed', attempt_count = greatest(item.attempt_count, item.max_attempts), failed_at = now(),
         updated_at = now(),
         context = dispatcher.merge_inbox_context(item.context, jsonb_build_object(
           'last_failure_reason', format('stale: pending for more than %s h',
               (p_sweeper.settings).stale_item_age_hours)))
   where item.id = any (p_item_ids);
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
comment on function dispatcher.expire_picked(dispatcher.claimant, uuid[]) is
  'Stale items fail for good, reason recorded; answers how many did.';

create or replace function dispatcher.expire_stale_items(p_sweeper dispatcher.claimant, p_limit integer) returns integer
language plpgsql volatile set search_path = ''
as $$
begin
  return dispatcher.in_parts(p_sweeper, 'expire_picked', 'expiry of an item',
      dispatcher.stale_item_ids(p_sweeper, p_limit));
end
$$;
comment on function dispatcher.expire_stale_items(dispatcher.claimant, integer) is
  'Stale items fail for good; one that raises costs no other.';

create or replace function dispatcher.spent_items(p_sweeper dispatcher.claimant, p_limit integer)
    returns table (item_id uuid, agent_id uuid)
language plpgsql volatile set search_path = ''
as $$
begin
  return query
    select item.id, agent.id from dispatcher.agents as agent
      join dispatcher.agent_inbox_items as item on item.agent_id = agent.id and item.tenant_id = agent.tenant_id
     where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
       and item.status in ('pending', 'leased') and item.attempt_count >= item.max_attempts
       and (item.status = 'pending' or coalesce(item.leased_until, '-infinity') < now()
       or item.leased_until >= now() + interval '7 days')
       -- A lease that ran out while the database was away is renewed by the heartbeat of the wake that works on it.
       and not exists (select from public.agent_wakes as wake where wake.agent_id = agent.id
       and wake.state in ('starting', 'running'))
     limit p_limit for update of item skip locked;
end
$$;
comment on function dispatcher.spent_items(dispatcher.claimant, integer) is
  'Expired leases and pending items without attempts left, locked.';

create or replace function dispatcher.give_up_spent(p_sweeper dispatcher.claimant, p_item_ids uuid[]) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_agent record;
  v_dead uuid[];
  v_reason constant text := 'no attempts left';
  v_count integer := 0;
begin
  for v_agent in
    select item.agent_id, array_agg(item.id) as item_ids from dispatcher.agent_inbox_items as item
     where item.id = any (p_item_ids) group by item.agent_id
  loop
    perform dispatcher.close_leases(p_sweeper.tenant_id, p_sweeper.gateway_id, v_agent.item_ids, 'dead_letter');
    v_dead := dispatcher.give_up_items(v_agent.item_ids, v_reason);
    perform dispatcher.tell_dead_letters(v_agent.agent_id, v_dead, v_reason);
    v_count := v_count + cardinality(v_dead);
  end loop;
  return v_count;
end
$$;
comment on function dispatcher.give_up_spent(dispatcher.claimant, uuid[]) is
  'Items without attempts left become dead_letter, with the reason; one notification per agent. Answers how many did.';

create or replace function dispatcher.give_up_spent_items(p_sweeper dispatcher.claimant, p_limit integer)
    returns integer
language plpgsql volatile set search_path = ''
as $$
begin
  return dispatcher.in_parts(p_sweeper, 'give_up_spent', 'end of an item without attempts',
      array(select spent.item_id from dispatcher.spent_items(p_sweeper, p_limit) as spent));
end
$$;
comment on function dispatcher.give_up_spent_items(dispatcher.claimant, integer) is
  'Items without attempts left become dead_letter; one that raises costs no other.';

create or replace function dispatcher.chained_items(p_sweeper dispatcher.claimant, p_limit integer)
returns table (agent_id uuid, item_id uuid, chain_depth integer)
language plpgsql stable set search_path = ''
as $$
begin
  return query
    -- From the few deep origins to their items, and not the other way: no statistics may turn this into a look at every
    -- item.
    with deep as materialized (
      select origin.item_id, origin.chain_depth from public.inbox_item_origins as origin
       where origin.tenant_id = p_sweeper.tenant_id
         and origin.chain_depth >= dispatcher.wake_chain_limit(p_sweeper.settings))
    select agent.id, item.id, deep.chain_depth
      from deep
      join dispatcher.agent_inbox_items as item on item.id = deep.item_id and item.status in ('pending', 'failed')
          and item.attempt_count < item.max_attempts
      join dispatcher.agents as agent on agent.id = item.agent_id and agent.tenant_id = item.tenant_id
     where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
     limit p_limit;
end
$$;
comment on function dispatcher.chained_items(dispatcher.claimant, integer) is
  'Open items whose chain of wakes reached max_wake_chain.';

create or replace function dispatcher.tell_chain(p_sweeper dispatcher.claimant, p_agent_id uuid, p_depth integer,
    p_item_ids uuid[]) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_slug text;
begin
  -- One alert per agent and hour: a ring that goes on posting must not flood the operator either.
  if (dispatcher.lock_wake_state(p_agent_id, p_sweeper.tenant_id)).agent_id is null then
    return;
  end if;
  update public.agent_wake_state set chain_notified_at = now()
   where agent_id = p_agent_id and (chain_notified_at is null or chain_notified_at < now() - interval '1 hour');
  if found then
    select slug into v_slug from dispatcher.agents where id = p_agent_id;
    perform dispatcher.notify_operator(
      p_sweeper.tenant_id, 'wake_chain_limit', format('Agent %s was stopped in a chain of wakes', v_slug),
      format('Agents woke each other %s times in a row; %s item(s) were set aside. `dispatcher inbox requeue --agent '
             '%s` brings them back.',
             p_depth, cardinality(p_item_ids), v_slug),
      p_agent_id, jsonb_build_object('chain_depth', p_depth, 'item_ids', p_item_ids[1:100]));
  end if;
  perform dispatcher.settle_constraints('public.agent_wake_state');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_sweeper.tenant_id, p_sweeper.gateway_id, 'alert of a chain',
      format('%s (%s)', sqlerrm, sqlstate));
end
$$;
comment on function dispatcher.tell_chain(dispatcher.claimant, uuid, integer, uuid[]) is
  'One notification per agent and hour of a chain that was stopped. A side write.';

create or replace function dispatcher.stop_chains(p_sweeper dispatcher.claimant, p_item_ids uuid[]) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_reason constant text := format('wake chain limit (%s) reached', dispatcher.wake_chain_limit(p_sweeper.settings));
  v_chain record;
  v_stopped integer;
  v_count integer := 0;
begin
  for v_chain in
    select item.agent_id, array_agg(item.id) as item_ids, max(origin.chain_depth) as depth
      from dispatcher.agent_inbox_items as item join public.inbox_item_origins as origin on origin.item_id = item.id
     where item.id = any (p_item_ids) group by item.agent_id
  loop
    v_stopped := dispatcher.set_items_aside(v_chain.item_ids, 'wake_chain_limit', v_reason);
    if v_stopped > 0 then
      perform dispatcher.tell_chain(p_sweeper, v_chain.agent_id, v_chain.depth, v_chain.item_ids);
    end if;
    v_count := v_count + v_stopped;
  end loop;
  return v_count;
end
$$;
comment on function dispatcher.stop_chains(dispatcher.claimant, uuid[]) is
  'Items at the end of a chain of wakes become dead_letter; one notification per agent and hour. Answers how many did.';

create or replace function dispatcher.stop_wake_chains(p_sweeper dispatcher.claimant, p_limit integer) returns integer
language plpgsql volatile set search_path = ''
as $$
begin
  return dispatcher.in_parts(p_sweeper, 'stop_chains', 'stop of a chain',
      array(select chained.item_id from dispatcher.chained_items(p_sweeper, p_limit) as chained));
end
$$;
comment on function dispatcher.stop_wake_chains(dispatcher.claimant, integer) is
  'Items whose chain of wakes reached max_wake_chain become dead_letter; one that raises costs no other.';

create or replace function dispatcher.agents_to_settle(p_sweeper dispatcher.claimant, p_limit integer)
    returns setof uuid
language sql stable set search_path = ''
as $$
  select state.agent_id from public.agent_wake_state as state
    join dispatcher.agents as agent on agent.id = state.agent_id
   where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
     and state.consecutive_failures >= (p_sweeper.settings).max_consecutive_failures
     and (state.stalled_at is null
          or exists (select from dispatcher.agent_inbox_items as item
                     where item.agent_id = agent.id and item.tenant_id = agent.tenant_id and item.status = 'pending'
                       and item.attempt_count < item.max_attempts))
     -- What came from outside since the last end has ended the stall.
     and (dispatcher.read_gate_facts(state.agent_id,
         p_sweeper.settings)).failures >= (p_sweeper.settings).max_consecutive_failures
   order by state.agent_id limit p_limit
$$;
comment on function dispatcher.agents_to_settle(dispatcher.claimant, integer) is
  'Stalled agents of which nobody was told yet, or that have pending items.';

create or replace function dispatcher.settle_stalled(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_agent_id uuid;
  v_count integer := 0;
begin
  foreach v_agent_id in array p_agent_ids loop
    v_count := v_count + dispatcher.mark_agent_stalled(v_agent_id);
    exit when v_count >= 500;
  end loop;
  return v_count;
end
$$;
comment on function dispatcher.settle_stalled(dispatcher.claimant, uuid[]) is
  'Sets the pending items of stalled agents aside, about 500, and notifies once per stall. Answers how many.';

create or replace function dispatcher.settle_stalled_agents(p_sweeper dispatcher.claimant) returns integer
language plpgsql volatile set search_path = ''
as $$
begin
  return dispatcher.in_parts(p_sweeper, 'settle_stalled', 'stall',
      array(select * from dispatcher.agents_to_settle(p_sweeper, 100)));
end
$$;
comment on function dispatcher.settle_stalled_agents(dispatcher.claimant) is
  'Settles stalled agents; one that raises costs no other.';

create or replace function dispatcher.forgotten_leases(p_sweeper dispatcher.claimant, p_limit integer)
    returns setof public.agent_wakes
language sql stable set search_path = ''
as $$
  select distinct on (wake.id) wake.* from public.inbox_item_leases as lease
    join public.agent_wakes as wake on wake.id = lease.wake_id
    join dispatcher.agent_inbox_items as item on item.id = lease.item_id
   where lease.closed_at is null and wake.gateway_id = p_sweeper.gateway_id
     and wake.ended_at < now() - interval '5 seconds'
     and item.status = 'leased' and item.leased_at = lease.leased_at
   limit p_limit
$$;
comment on function dispatcher.forgotten_leases(dispatcher.claimant, integer) is
  'Ended wakes that still hold a lease: somebody held the item when the wake ended.';
create index if not exists inbox_item_leases_open_by_wake on public.inbox_item_leases (wake_id) where closed_at is null
    and wake_id is not null;

create or replace function dispatcher.release_forgotten(p_sweeper dispatcher.claimant, p_wake_ids uuid[])
    returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_wake public.agent_wakes;
  v_released record;
  v_count integer := 0;
  v_reason text;
begin
  for v_wake in select * from public.agent_wakes where id = any (p_wake_ids) loop
    -- The agent may have its next wake by now: only what this one leased, and only where no wake lives.
    continue when exists (select from public.agent_wakes where agent_id = v_wake.agent_id
        and state in ('starting', 'running'));
    v_reason := format('wake ended (%s) with the item unfinished', v_wake.state);
    v_released := dispatcher.release_wake_leases(v_wake, v_wake.state in ('interrupted', 'spawn_failed'), v_reason);
    perform dispatcher.tell_dead_letters(v_wake.agent_id, v_released.dead, v_reason);
    v_count := v_count + v_released.released;
  end loop;
  return v_count;
end
$$;
comment on function dispatcher.release_forgotten(dispatcher.claimant, uuid[]) is
  'Releases what wakes hold that have ended, unless their agent has another one. Answers how many items.';

create or replace function dispatcher.release_forgotten_leases(p_sweeper dispatcher.claimant, p_limit integer)
    returns integer
language plpgsql volatile set search_path = ''
as $$
begin
  return dispatcher.in_parts(p_sweeper, 'release_forgotten', 'release of leases',
      array(select wake.id from dispatcher.forgotten_leases(p_sweeper, p_limit) as wake));
end
$$;
comment on function dispatcher.release_forgotten_leases(dispatcher.claimant, integer) is
  'Releases leases whose wake ended while somebody held the item; a wake for which that raises costs no other.';

create or replace function dispatcher.often_woken_agents(p_sweeper dispatcher.claimant, p_limit integer)
returns table (agent_id uuid, agent_slug text, wakes integer)
language sql stable set search_path = ''
as $$
  select agent.id, agent.slug, lately.wakes
    from public.agent_wake_state as state
    join dispatcher.agents as agent on agent.id = state.agent_id
   cross join lateral (select count(*)::integer as wakes from public.agent_wakes as wake
                        where wake.agent_id = agent.id and wake.claimed_at > now() - interval '1 hour') as lately
   where (p_sweeper.settings).alert_wakes_per_hour > 0
     and agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
     and state.last_claimed_at > now() - interval '1 hour'
     and (state.often_notified_at is null or state.often_notified_at <= now() - interval '1 hour')
     and lately.wakes > (p_sweeper.settings).alert_wakes_per_hour
   limit p_limit
$$;
comment on function dispatcher.often_woken_agents(dispatcher.claimant, integer) is
  'Agents woken more than alert_wakes_per_hour times in the last hour, whatever woke them, of whom nobody was told in '
  'that hour.';

create or replace function dispatcher.tell_often(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_often record;
  v_count integer := 0;
begin
  for v_often in
    select often.* from dispatcher.often_woken_agents(p_sweeper, 500) as often where often.agent_id = any (p_agent_ids)
  loop
    continue when (dispatcher.lock_wake_state(v_often.agent_id, p_sweeper.tenant_id)).agent_id is null;
    update public.agent_wake_state set often_notified_at = now() where agent_id = v_often.agent_id;
    continue when not found;  -- whom nobody keeps, nobody tells of at every look
    perform dispatcher.notify_operator(
      p_sweeper.tenant_id, 'often_woken', format('Agent %s is woken unusually often', v_often.agent_slug),
      format('%s wakes in the last hour (ALERT_WAKES_PER_HOUR is %s). It goes on. `dispatcher inbox list --agent %s` '
             'shows what wakes it; '
             'MAX_WAKES_PER_DAY bounds it, and a paused agent is not woken.',
             v_often.wakes, (p_sweeper.settings).alert_wakes_per_hour, v_often.agent_slug),
      v_often.agent_id, jsonb_build_object('wakes', v_often.wakes, 'alert_wakes_per_hour',
          (p_sweeper.settings).alert_wakes_per_hour));
    v_count := v_count + 1;
  end loop;
  return v_count;
end
$$;
comment on function dispatcher.tell_often(dispatcher.claimant, uuid[]) is
  'Tells of agents that are woken unusually often, and keeps when. Answers how many.';

create or replace function dispatcher.tell_often_woken(p_sweeper dispatcher.claimant, p_limit integer) returns integer
language plpgsql volatile set search_path = ''
as $$
begin
  return dispatcher.in_parts(p_sweeper, 'tell_often', 'alert',
      array(select often.agent_id from dispatcher.often_woken_agents(p_sweeper, p_limit) as often));
end
$$;
comment on function dispatcher.tell_often_woken(dispatcher.claimant, integer) is
  'One notification per agent and hour for agents that are woken unusually often; stops nobody.';

create or replace function dispatcher.prune_wakes(p_sweeper dispatcher.claimant, p_wake_ids uuid[]) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_count integer;
begin
  delete from public.agent_wakes where id = any (p_wake_ids) and gateway_id = p_sweeper.gateway_id;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
comment on function dispatcher.prune_wakes(dispatcher.claimant, uuid[]) is 'Removes wakes; answers how many went.';

create or replace function dispatcher.prune_old_rows(p_sweeper dispatcher.claimant, p_limit integer) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_wakes integer;
  v_faults integer;
begin
  v_wakes := dispatcher.in_parts(p_sweeper, 'prune_wakes', 'removal of old wakes', array(
    select id from public.agent_wakes where gateway_id = p_sweeper.gateway_id and ended_at < now() - interval '30 days'
     order by ended_at limit p_limit for update skip locked));
  delete from public.dispatcher_faults where id in (
    select id from public.dispatcher_faults where tenant_id = p_sweeper.tenant_id and at < now() - interval '7 days'
        limit p_limit for update skip locked);
  get diagnostics v_faults = row_count;
  return greatest(v_wakes, v_faults);
end
$$;
comment on function dispatcher.prune_old_rows(dispatcher.claimant, integer) is
  'Wakes that ended 30 days ago and faults of last week go.';

create or replace function dispatcher.agents_with_work(p_sweeper dispatcher.claimant, p_after uuid, p_limit integer)
returns table (agent_id uuid, agent_slug text, oldest timestamptz)
language sql stable set search_path = ''
as $$
  select agent.id, agent.slug, oldest.created_at from dispatcher.agents as agent
   cross join lateral (select due.created_at from dispatcher.inbox_due_of_pair as due
                        where due.agent_id = agent.id and due.tenant_id = agent.tenant_id order by due.created_at
                            limit 1) as oldest
   where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
     and (p_after is null or agent.id > p_after)
     and not exists (select from public.agent_wake_state as state where state.agent_id = agent.id
     and state.waitlisted_at is not null)
     and not exists (select from public.agent_wakes as wake where wake.agent_id = agent.id
     and wake.state in ('starting', 'running'))
   order by agent.id limit p_limit
$$;
comment on function dispatcher.agents_with_work(dispatcher.claimant, uuid, integer) is
  'Agents with open items that neither wait nor run, in the order of their ids after p_after, each with its oldest '
  'item.';

create or replace function dispatcher.refusal_at_sweep(p_sweeper dispatcher.claimant, p_agent_id uuid,
    p_agent_slug text)
returns jsonb
language plpgsql stable set search_path = ''
as $$
declare
  v_facts dispatcher.gate_facts;
  v_gates record;
begin
  v_facts := dispatcher.read_gate_facts(p_agent_id, p_sweeper.settings);
  v_gates := dispatcher.wake_gates(v_facts, p_sweeper.settings);
  if cardinality(v_gates.blocked) = 0 then
    return null;
  end if;
  return dispatcher.refusal(p_agent_id, p_agent_slug, v_gates.blocked[1], dispatcher.seconds_until(v_gates.retry_at),
                            v_facts.failures);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return dispatcher.refusal(p_agent_id, p_agent_slug, 'error', null)
         || jsonb_build_object('error', left(sqlerrm, 500), 'error_code', sqlstate);
end
$$;
comment on function dispatcher.refusal_at_sweep(dispatcher.claimant, uuid, text) is
  'What keeps an agent asleep, as a refused claim says it; NULL when its gates are open.';

create or replace function dispatcher.list_agents(
  p_sweeper dispatcher.claimant, p_agent_ids uuid[], p_oldest timestamptz[], p_since timestamptz
) returns uuid[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_half constant integer := coalesce(cardinality(p_agent_ids), 0) / 2;
  v_listed uuid[];
begin
  insert into public.agent_wake_state (agent_id, tenant_id)
  select free.id, p_sweeper.tenant_id
    from (select agent.id from dispatcher.agents as agent
           where agent.id = any (p_agent_ids)
             and not exists (select from public.agent_wake_state as state where state.agent_id = agent.id)
             for key share skip locked) as free
  on conflict do nothing;
  with held as (
    select state.agent_id from public.agent_wake_state as state where state.agent_id = any (p_agent_ids)
        for update skip locked
  ), listed as (
    update public.agent_wake_state as state
       set waitlist_path = coalesce(state.waitlist_path, 'sweep'),
           waitlisted_at = coalesce(state.waitlisted_at, p_since),
           waiting_since = coalesce(state.waiting_since, ready.oldest), updated_at = now()
      from held join unnest(p_agent_ids, p_oldest) as ready (agent_id, oldest) on ready.agent_id = held.agent_id
     where state.agent_id = held.agent_id
    returning state.agent_id)
  select array_agg(agent_id) into v_listed from listed;
  perform dispatcher.settle_constraints('public.agent_wake_state');
  return coalesce(v_listed, '{}');
exception when others then
  -- Also a row that somebody has inserted and not committed: the others do not wait with it.
  if dispatcher.must_abort(sqlstate)
     or (sqlstate = '55P03' and clock_timestamp() > now() + interval '2 seconds') then raise; end if;
  if v_half > 0 then
    return dispatcher.list_agents(p_sweeper, p_agent_ids[:v_half], p_oldest[:v_half], p_since)
           || dispatcher.list_agents(p_sweeper, p_agent_ids[v_half + 1:], p_oldest[v_half + 1:], p_since);
  end if;
  if sqlstate <> '55P03' then
    perform dispatcher.note_fault(p_sweeper.tenant_id, p_sweeper.gateway_id, 'waitlist',
        format('agent %s: %s (%s)', p_agent_ids[1], sqlerrm, sqlstate));
  end if;
  return '{}';
end
$$;
comment on function dispatcher.list_agents(dispatcher.claimant, uuid[], timestamptz[], timestamptz) is
  'Puts agents, whose oldest items are from p_oldest, on the waitlist, all at once and held for a moment; answers '
  'which: those that somebody holds, or whose row raises, are not.';

create or replace function dispatcher.fill_waitlist(p_sweeper dispatcher.claimant, p_cursor jsonb, p_limit integer)
    returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  -- All pages of one sweep carry the time of its first: agents wait in the order of their oldest items, whatever the
  -- page.
  v_since constant timestamptz := coalesce((p_cursor ->> 'since')::timestamptz, now());
  v_agent record;
  v_refusal jsonb;
  v_skipped jsonb := '[]';
  v_ready uuid[] := '{}';
  v_oldest timestamptz[] := '{}';
  v_listed uuid[];
  v_seen integer := 0;
  v_last uuid;
begin
  perform set_config('lock_timeout', '100ms', true);
  for v_agent in select * from dispatcher.agents_with_work(p_sweeper, (p_cursor ->> 'after')::uuid, p_limit) loop
    v_seen := v_seen + 1;
    v_last := v_agent.agent_id;
    v_refusal := dispatcher.refusal_at_sweep(p_sweeper, v_agent.agent_id, v_agent.agent_slug);
    if v_refusal is null then
      v_ready := v_ready || v_agent.agent_id;
      v_oldest := v_oldest || v_agent.oldest;
    else
      v_skipped := v_skipped || v_refusal;
    end if;
  end loop;
  v_listed := dispatcher.list_agents(p_sweeper, v_ready, v_oldest, v_since);
  return jsonb_build_object(
    'count', cardinality(v_listed), 'again', v_seen >= p_limit, 'cursor',
        jsonb_build_object('after', v_last, 'since', v_since),
    'skipped', v_skipped || coalesce((select jsonb_agg(dispatcher.busy_agent(ready.id))
        from unnest(v_ready) as ready (id)
                                       where ready.id <> all (v_listed)), '[]'));
end
$$;
comment on function dispatcher.fill_waitlist(dispatcher.claimant, jsonb, integer) is
  'Puts agents of the gateway that have work and open gates on the waitlist; answers the refused ones with their '
  'reason. p_cursor: {after, since} of the page before.';

create or replace function dispatcher.queue_agents(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_count integer;
begin
  update public.agent_wake_state set waitlist_path = 'waitlist'
   where agent_id = any (p_agent_ids) and waitlist_path = 'sweep';
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
comment on function dispatcher.queue_agents(dispatcher.claimant, uuid[]) is
  'Agents that a sweep listed wait for a slot from now on; answers how many.';

create or replace function dispatcher.claim_at_sweep(p_sweeper dispatcher.claimant, p_claim_limit integer,
    p_request uuid) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_claims jsonb := dispatcher.claim_waiting_wakes(p_sweeper.instance_id, p_claim_limit, p_request);
  v_queued integer;
begin
  -- Whoever did not get a slot now waits for one.
  v_queued := dispatcher.in_parts(p_sweeper, 'queue_agents', 'waitlist', array(
    select state.agent_id from public.agent_wake_state as state
      join dispatcher.agents as agent on agent.id = state.agent_id
     where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
       and state.waitlist_path = 'sweep' limit 500
         for update of state skip locked));
  return jsonb_build_object('count', jsonb_array_length(v_claims), 'claims', v_claims, 'queued', v_queued, 'waiting',
    (select count(*) from public.agent_wake_state as state
       join dispatcher.agents as agent on agent.id = state.agent_id
      where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
        and state.waitlisted_at is not null));
end
$$;
comment on function dispatcher.claim_at_sweep(dispatcher.claimant, integer, uuid) is
  'Claims wakes off the waitlist; how many were queued for a slot by this sweep, and how many wait in all.';

create or replace function dispatcher.phases_due(p_sweeper dispatcher.claimant) returns text[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_phase text;
  v_is_due boolean;
  v_due text[] := '{}';
begin
  foreach v_phase in array array['expired', 'dead', 'chained', 'stalled', 'released', 'listed', 'claims', 'alerted',
      'pruned'] loop
    begin
      v_is_due := case v_phase
        when 'expired' then cardinality(dispatcher.stale_item_ids(p_sweeper, 1)) > 0
        when 'dead' then exists (select from dispatcher.spent_items(p_sweeper, 1))
        when 'chained' then exists (select from dispatcher.chained_items(p_sweeper, 1))
        when 'stalled' then exists (select from dispatcher.agents_to_settle(p_sweeper, 1))
        when 'released' then exists (select from dispatcher.forgotten_leases(p_sweeper, 1))
        when 'listed' then exists (select from dispatcher.agents_with_work(p_sweeper, null, 1))
        when 'claims' then v_due @> array['listed'] or exists (
          select from public.agent_wake_state as state join dispatcher.agents as agent on agent.id = state.agent_id
           where agent.gateway_id = p_sweeper.gateway_id and state.waitlisted_at is not null)
        when 'alerted' then exists (select from dispatcher.often_woken_agents(p_sweeper, 1))
        when 'pruned' then exists (select from public.agent_wakes where gateway_id = p_sweeper.gateway_id
            and ended_at < now() - interval '30 days')
          or exists (select from public.dispatcher_faults where tenant_id = p_sweeper.tenant_id
          and at < now() - interval '7 days')
      end;
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      v_is_due := true;  -- its own call says what is wrong
    end;
    if v_is_due then
      v_due := v_due || v_phase;
    end if;
  end loop;
  return v_due;
end
$$;
comment on function dispatcher.phases_due(dispatcher.claimant) is
  'The phases of a sweep that have something to do, in their order.';

create or replace function dispatcher.look_around(p_sweeper dispatcher.claimant) returns jsonb
language plpgsql volatile set search_path = ''
as $$
begin
  -- Much is looked at, and a table that somebody holds is met again and again.
  perform set_config('lock_timeout', '100ms', true);
  perform dispatcher.warm_backend();
  return jsonb_build_object(
    'agents', (select coalesce(jsonb_agg(jsonb_build_object('id', id, 'slug', slug)), '[]') from dispatcher.agents
        where gateway_id = p_sweeper.gateway_id and tenant_id = p_sweeper.tenant_id),
    'open_wakes', dispatcher.open_wakes_of_others(p_sweeper.instance_id), 'broadcast_available',
        dispatcher.broadcast_hints_available(),
    'due', to_jsonb(dispatcher.phases_due(p_sweeper)));
end
$$;
comment on function dispatcher.look_around(dispatcher.claimant) is
  'Where a sweep begins: {agents (the gateway''s: id, slug), open_wakes (of other instances), broadcast_available, '
  'due (the phases that have something to do)}.';

create or replace function public.sweep_inbox(
  p_instance_id uuid, p_phase text default 'look', p_cursor jsonb default null, p_claim_limit integer default 0,
      p_request uuid default null
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_sweeper constant dispatcher.claimant := dispatcher.sweeper(p_instance_id);
  v_limit constant integer := 500;
  v_started constant timestamptz := clock_timestamp();
  v_count integer;
  v_answer jsonb := '{}';
begin
  perform set_config('dispatcher.quiet', 'on', true);
  case p_phase
    when 'look' then v_answer := dispatcher.look_around(v_sweeper);
    when 'expired' then v_count := dispatcher.expire_stale_items(v_sweeper, v_limit);
    when 'dead' then v_count := dispatcher.give_up_spent_items(v_sweeper, v_limit);
    when 'chained' then v_count := dispatcher.stop_wake_chains(v_sweeper, v_limit);
    when 'stalled' then v_count := dispatcher.settle_stalled_agents(v_sweeper);
    when 'released' then v_count := dispatcher.release_forgotten_leases(v_sweeper, v_limit);
    when 'listed' then v_answer := dispatcher.fill_waitlist(v_sweeper, p_cursor, v_limit);
    when 'claims' then v_answer := dispatcher.claim_at_sweep(v_sweeper, p_claim_limit, p_request);
    when 'alerted' then v_count := dispatcher.tell_often_woken(v_sweeper, v_limit);
    when 'pruned' then v_count := dispatcher.prune_old_rows(v_sweeper, v_limit);
    else raise exception 'unknown phase %', left(p_phase, 100) using errcode = 'OD002',
      hint = 'look, expired, dead, chained, stalled, released, listed, claims, alerted or pruned';
  end case;
  return jsonb_build_object('phase', p_phase, 'count', v_count, 'again', coalesce(v_count >= v_limit, false))
      || v_answer
         || jsonb_build_object('ms', round(extract(epoch from clock_timestamp() - v_started) * 1000));
end
$$;
comment on function public.sweep_inbox(uuid, text, jsonb, integer, uuid) is
  'One phase of a sweep of the instance''s gateway, at most 500 rows: {phase, count, again, ms}. look: {agents (id, '
  'slug), open_wakes, broadcast_available, due}; listed: {skipped, cursor}, p_cursor is the one of the page before; '
  'claims: {claims, queued, waiting}, up to p_claim_limit wakes under p_request.';

create or replace function public.note_sweep(p_instance_id uuid, p_sweep jsonb) returns void
language sql volatile set search_path = '' set lock_timeout = '1s'
as $$
  update public.dispatcher_instances set last_sweep_at = now(), last_heartbeat_at = now(), last_sweep = p_sweep
      where id = p_instance_id
$$;
comment on function public.note_sweep(uuid, jsonb) is
  'Keeps what a sweep did, for status: counts by phase, errors, ms.';

select dispatcher.restrict_functions(array[
  'sweep_inbox', 'note_sweep'
]);

notify pgrst, 'reload schema';
commit;
