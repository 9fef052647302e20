-- The sweep: the net under the hints.

create or replace function dispatcher.expire_stale_items(p_instance public.dispatcher_instances) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_hours constant double precision := (p_instance.settings ->> 'stale_item_age_hours')::double precision;
  v_oldest timestamptz;
  v_count integer;
begin
  if v_hours <= 0 then
    return 0;
  end if;
  v_oldest := now() - make_interval(secs => v_hours * 3600);
  update public.agent_inbox_items as item
     set status = 'failed', attempt_count = greatest(item.attempt_count, item.max_attempts), failed_at = now(), updated_at = now(),
         context = dispatcher.merge_inbox_context(item.context, jsonb_build_object('last_failure_reason', format('stale: pending for more than %s h', v_hours)))
   where item.id in (
     select stale.id from public.agents as agent
       join public.agent_inbox_items as stale on stale.agent_id = agent.id and stale.tenant_id = agent.tenant_id
       left join public.agent_wake_state as state on state.agent_id = agent.id
       left join public.inbox_item_reopenings as reopening on reopening.item_id = stale.id
      where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id and agent.status not in ('paused', 'hibernating')
        and stale.status = 'pending' and stale.attempt_count < stale.max_attempts and stale.created_at < v_oldest
        and coalesce(reopening.reopened_at, '-infinity') < v_oldest and coalesce(state.resumed_at, '-infinity') < v_oldest
      limit 1000 for update of stale skip locked);
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
comment on function dispatcher.expire_stale_items(public.dispatcher_instances) is
  'Items pending for longer than stale_item_age_hours fail for good, reason recorded, at most 1,000 a call. The age counts from the creation, the last requeue or the end of its agent''s pause; items of paused or hibernating agents wait.';

create or replace function dispatcher.bury_spent_items(p_instance public.dispatcher_instances) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_count integer;
begin
  with spent as (
    update public.agent_inbox_items as item
       set status = 'dead_letter', failed_at = now(), leased_at = null, leased_until = null, updated_at = now(),
           context = dispatcher.merge_inbox_context(item.context, jsonb_build_object('last_failure_reason',
             case item.status when 'leased' then 'lease expired with no attempts left' else 'no attempts left' end))
     where item.id in (
       select held.id from public.agents as agent
         join public.agent_inbox_items as held on held.agent_id = agent.id and held.tenant_id = agent.tenant_id
        where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id
          and held.status in ('pending', 'leased') and held.attempt_count >= held.max_attempts
          and (held.status = 'pending' or held.leased_until < now())
          -- A lease that ran out while the database was away is renewed by the heartbeat of the wake that works on it.
          and not exists (select from public.agent_wakes as wake where wake.agent_id = agent.id and wake.state in ('starting', 'running'))
        limit 1000 for update of held skip locked)
    returning item.id
  ), leases as (
    update public.inbox_item_leases as lease set closed_at = now(), outcome = 'dead_letter'
      from spent where lease.item_id = spent.id and lease.closed_at is null
  )
  select count(*) into v_count from spent;
  return v_count;
end
$$;
comment on function dispatcher.bury_spent_items(public.dispatcher_instances) is 'Expired leases and pending items without attempts left become dead_letter, with the reason.';

create or replace function dispatcher.stop_wake_chains(p_instance public.dispatcher_instances) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_limit constant integer := dispatcher.wake_chain_limit(p_instance.settings);
  v_chain record;
  v_count integer := 0;
begin
  for v_chain in
    -- From the few deep origins to their items, and not the other way: no statistics may turn this into a look at every item.
    with deep as materialized (
      select origin.item_id, origin.chain_depth from public.inbox_item_origins as origin
       where origin.tenant_id = p_instance.tenant_id and origin.chain_depth >= v_limit)
    select agent.id, agent.slug, agent.tenant_id, array_agg(item.id) as item_ids, max(deep.chain_depth) as depth
      from deep
      join public.agent_inbox_items as item on item.id = deep.item_id and item.status in ('pending', 'failed') and item.attempt_count < item.max_attempts
      join public.agents as agent on agent.id = item.agent_id and agent.tenant_id = item.tenant_id
     where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id
     group by agent.id, agent.slug, agent.tenant_id
  loop
    update public.agent_inbox_items
       set status = 'dead_letter', failed_at = now(), updated_at = now(),
           context = dispatcher.merge_inbox_context(context, jsonb_build_object('last_failure_reason', format('wake chain limit (%s) reached', v_limit)))
     where id in (select item.id from public.agent_inbox_items as item where item.id = any (v_chain.item_ids[1:1000]) for update skip locked);
    v_count := v_count + cardinality(v_chain.item_ids[1:1000]);
    -- One alert per agent and hour: a ring that goes on posting must not flood the operator either.
    insert into public.agent_wake_state (agent_id, tenant_id) values (v_chain.id, v_chain.tenant_id) on conflict do nothing;
    update public.agent_wake_state set chain_notified_at = now()
     where agent_id = v_chain.id and (chain_notified_at is null or chain_notified_at < now() - interval '1 hour');
    if found then
      insert into public.notifications (tenant_id, type, title, body, entity_type, entity_id, actor_type, actor_agent_id, meta)
      values (v_chain.tenant_id, 'wake_chain_limit', format('Agent %s was stopped in a chain of wakes', v_chain.slug),
              format('Agents woke each other %s times in a row; %s item(s) were set aside. `dispatcher inbox requeue --agent %s` brings them back.',
                     v_chain.depth, cardinality(v_chain.item_ids), v_chain.slug),
              'agent', v_chain.id, 'system', v_chain.id, jsonb_build_object('chain_depth', v_chain.depth, 'item_ids', v_chain.item_ids));
    end if;
  end loop;
  return v_count;
end
$$;
comment on function dispatcher.stop_wake_chains(public.dispatcher_instances) is
  'Items whose chain of wakes reached max_wake_chain become dead_letter; one notification per agent and hour.';

create or replace function dispatcher.settle_stalled_agents(p_instance public.dispatcher_instances) returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_agent_id uuid;
  v_count integer := 0;
begin
  for v_agent_id in
    select state.agent_id from public.agent_wake_state as state join public.agents as agent on agent.id = state.agent_id
     where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id
       and state.consecutive_failures >= (p_instance.settings ->> 'max_consecutive_failures')::integer
       and (state.stalled_at is null
            or exists (select from public.agent_inbox_items as item
                       where item.agent_id = state.agent_id and item.status = 'pending' and item.attempt_count < item.max_attempts))
     order by state.agent_id limit 100 for update of state skip locked
  loop
    v_count := v_count + dispatcher.mark_agent_stalled(v_agent_id);
  end loop;
  return v_count;
end
$$;
comment on function dispatcher.settle_stalled_agents(public.dispatcher_instances) is 'Sets the pending items of stalled agents aside and notifies once per stall.';

create or replace function dispatcher.fill_waitlist(p_instance public.dispatcher_instances) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_agent record;
  v_gates record;
  v_ready uuid[] := '{}';
  v_oldest timestamptz[] := '{}';
  v_skipped jsonb := '[]';
begin
  for v_agent in
    select agent.id, agent.slug, oldest.created_at from public.agents as agent
     cross join lateral (select due.created_at from dispatcher.inbox_due as due
                          where due.agent_id = agent.id and due.tenant_id = agent.tenant_id order by due.created_at limit 1) as oldest
     where agent.gateway_id = p_instance.gateway_id and agent.tenant_id = p_instance.tenant_id
       and not exists (select from public.agent_wake_state as state where state.agent_id = agent.id and state.waitlisted_at is not null)
       and not exists (select from public.agent_wakes as wake where wake.agent_id = agent.id and wake.state in ('starting', 'running'))
     order by oldest.created_at
  loop
    begin
      select * into v_gates from dispatcher.wake_gates(v_agent.id, p_instance.settings);
      if cardinality(v_gates.blocked) = 0 then
        v_ready := v_ready || v_agent.id;
        v_oldest := v_oldest || v_agent.created_at;
      else
        v_skipped := v_skipped || jsonb_build_object('granted', false, 'agent_id', v_agent.id, 'agent_slug', v_agent.slug,
          'skip_reason', v_gates.blocked[1], 'retry_in', extract(epoch from v_gates.retry_at - now()), 'failures', v_gates.failures);
      end if;
    exception when query_canceled then
      raise;
    when others then
      v_skipped := v_skipped || jsonb_build_object('granted', false, 'agent_id', v_agent.id, 'agent_slug', v_agent.slug,
        'skip_reason', 'error', 'error', sqlerrm, 'error_code', sqlstate);
    end;
  end loop;
  insert into public.agent_wake_state as state (agent_id, tenant_id, waitlisted_at, waitlist_path, waiting_since)
  select ready.id, p_instance.tenant_id, now(), 'sweep', ready.oldest from unnest(v_ready, v_oldest) as ready (id, oldest)
  on conflict (agent_id) do update
     set waitlisted_at = excluded.waitlisted_at, waitlist_path = excluded.waitlist_path, waiting_since = excluded.waiting_since, updated_at = now()
   where state.waitlisted_at is null;
  return v_skipped;
end
$$;
comment on function dispatcher.fill_waitlist(public.dispatcher_instances) is
  'Puts every agent of the gateway that has work and open gates on the waitlist, oldest item first; answers the refused ones with their reason.';

create or replace function public.sweep_inbox(p_instance_id uuid, p_claim_limit integer, p_request uuid) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '3s'
as $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
  v_started constant timestamptz := clock_timestamp();
  v_phase text;
  v_count integer;
  v_answer jsonb := jsonb_build_object('errors', '[]'::jsonb, 'skipped', '[]'::jsonb, 'claims', '[]'::jsonb);
begin
  perform set_config('dispatcher.quiet', 'on', true);
  perform from public.dispatcher_gateways where gateway_id = v_instance.gateway_id for update;
  v_answer := v_answer || jsonb_build_object(
    'agent_ids', (select coalesce(jsonb_agg(id), '[]') from public.agents where gateway_id = v_instance.gateway_id and tenant_id = v_instance.tenant_id),
    'open_wakes', dispatcher.open_wakes_of_others(p_instance_id), 'broadcast_available', dispatcher.broadcast_hints_available());
  foreach v_phase in array array['expired', 'buried', 'chained', 'stalled', 'skipped', 'claims', 'pruned'] loop
    begin
      case v_phase
        when 'expired' then v_count := dispatcher.expire_stale_items(v_instance);
        when 'buried' then v_count := dispatcher.bury_spent_items(v_instance);
        when 'chained' then v_count := dispatcher.stop_wake_chains(v_instance);
        when 'stalled' then v_count := dispatcher.settle_stalled_agents(v_instance);
        when 'skipped' then v_answer := v_answer || jsonb_build_object('skipped', dispatcher.fill_waitlist(v_instance));
        when 'claims' then
          v_answer := v_answer || jsonb_build_object('claims', dispatcher.claim_waiting_wakes(p_instance_id, p_claim_limit, p_request));
          -- Whoever did not get a slot now waits for one.
          update public.agent_wake_state as state set waitlist_path = 'waitlist'
            from public.agents as agent
           where agent.id = state.agent_id and agent.gateway_id = v_instance.gateway_id and state.waitlist_path = 'sweep';
          get diagnostics v_count = row_count;
          v_answer := v_answer || jsonb_build_object('queued', v_count);
        when 'pruned' then
          delete from public.agent_wakes where id in (
            select id from public.agent_wakes where gateway_id = v_instance.gateway_id and ended_at < now() - interval '30 days' order by ended_at limit 200);
          get diagnostics v_count = row_count;
      end case;
      if v_phase not in ('skipped', 'claims') then
        v_answer := v_answer || jsonb_build_object(v_phase, v_count);
      end if;
    exception when query_canceled or deadlock_detected or serialization_failure then
      raise;
    when others then
      v_answer := jsonb_set(v_answer, '{errors}', (v_answer -> 'errors') || jsonb_build_object('phase', v_phase, 'error', sqlerrm, 'error_code', sqlstate));
    end;
  end loop;
  v_answer := v_answer || jsonb_build_object('waiting', (select count(*) from public.agent_wake_state as state join public.agents as agent on agent.id = state.agent_id
                                                           where agent.gateway_id = v_instance.gateway_id and state.waitlisted_at is not null),
                                             'ms', round(extract(epoch from clock_timestamp() - v_started) * 1000));
  update public.dispatcher_instances
     set last_sweep_at = now(), last_heartbeat_at = now(),
         last_sweep = (v_answer - 'agent_ids' - 'open_wakes' - 'skipped' - 'claims')
                      || jsonb_build_object('skipped', jsonb_array_length(v_answer -> 'skipped'), 'claims', jsonb_array_length(v_answer -> 'claims'))
   where id = p_instance_id;
  return v_answer;
end
$$;
comment on function public.sweep_inbox(uuid, integer, uuid) is
  'One sweep of the instance''s gateway, phase by phase, each isolated: expire stale, bury spent, stop chains, settle stalled, fill the waitlist, claim up to p_claim_limit wakes, prune. One bounded call whatever the backlog.';

select dispatcher.restrict_functions(array[
  'sweep_inbox'
]);

notify pgrst, 'reload schema';
