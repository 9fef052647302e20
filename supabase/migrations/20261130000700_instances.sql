-- Instances: a daemon registers, beats, renews leases, adopts what an earlier one left, and stops.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.open_wake_facts(p_wake public.agent_wakes) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object(
           'wake_id', p_wake.id, 'claim_token', p_wake.claim_token, 'claim_request', p_wake.claim_request, 'agent_id',
               p_wake.agent_id,
           'agent_slug', coalesce(agent.slug, p_wake.agent_id::text), 'state', p_wake.state,
           'host_id', coalesce(p_wake.host_id, owner.host_id), 'hostname', owner.hostname,
           'pid', p_wake.pid, 'pid_started_at', p_wake.pid_started_at,
           'age', extract(epoch from now() - p_wake.claimed_at), 'deadline_in',
               extract(epoch from p_wake.deadline_at - now()),
           'owner_state', coalesce(owner.state, 'lost'), 'owner_pid', owner.pid, 'owner_pid_started_at',
               owner.pid_started_at,
           'owner_host_id', owner.host_id, 'owner_silent_for', extract(epoch from now() - owner.last_heartbeat_at))
    from (select 1) as one_row
    left join dispatcher.agents as agent on agent.id = p_wake.agent_id and agent.tenant_id = p_wake.tenant_id
    left join public.dispatcher_instances as owner on owner.id = p_wake.instance_id
$$;
comment on function dispatcher.open_wake_facts(public.agent_wakes) is
  'What is needed to tell whether the process of a live wake and its owner live.';

create or replace function dispatcher.open_wakes_of_others(p_instance_id uuid) returns jsonb
language sql stable set search_path = ''
as $$
  select coalesce(jsonb_agg(dispatcher.open_wake_facts(wake) order by wake.claimed_at), '[]')
    from public.agent_wakes as wake
    join public.dispatcher_instances as me on me.id = p_instance_id and me.gateway_id = wake.gateway_id
   where wake.state in ('starting', 'running') and wake.instance_id is distinct from p_instance_id
$$;
comment on function dispatcher.open_wakes_of_others(uuid) is
  'Live wakes of the instance''s gateway that another instance owns, with what is needed to tell whether their '
  'process and owner live.';

create or replace function dispatcher.keep_settings(p_instance_id uuid, p_tenant_id uuid, p_settings jsonb) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_settings public.dispatcher_settings := dispatcher.typed_settings(p_settings);
begin
  v_settings.instance_id := p_instance_id;
  v_settings.tenant_id := p_tenant_id;
  delete from public.dispatcher_settings where instance_id = p_instance_id;
  insert into public.dispatcher_settings select (v_settings).*;
end
$$;
comment on function dispatcher.keep_settings(uuid, uuid, jsonb) is
  'Keeps the settings a daemon registered with, typed.';

create or replace function dispatcher.forget_old_instances(p_tenant_id uuid, p_gateway_id uuid) returns void
language plpgsql volatile set search_path = ''
as $$
begin
  delete from public.dispatcher_instances where id in (
    select old.id from public.dispatcher_instances as old
     where old.gateway_id = p_gateway_id and old.last_heartbeat_at < now() - interval '7 days'
       -- Each of its wakes would be changed with it, in the one statement of a start.
       and not exists (select from public.agent_wakes as wake where wake.instance_id = old.id)
     limit 500 for update skip locked);
  perform dispatcher.settle_constraints(touched.name::regclass)
     from unnest(array['public.dispatcher_instances', 'public.agent_wakes']) as touched (name);
exception when others then
  -- What a neighbour's trigger makes of it keeps no daemon from its start.
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_tenant_id, p_gateway_id, 'removal of old instances',
      format('%s (%s)', sqlerrm, sqlstate));
end
$$;
comment on function dispatcher.forget_old_instances(uuid, uuid) is
  'Daemons of a gateway that were last heard of a week ago go, once no wake of theirs is kept any more. '
  'Never fails.';

create or replace function public.register_dispatcher_instance(p_tenant_id uuid, p_gateway text, p_identity jsonb,
    p_settings jsonb) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_gateway_id constant uuid := dispatcher.find_gateway(p_tenant_id, p_gateway);
  v_id uuid := coalesce((p_identity ->> 'instance_id')::uuid, gen_random_uuid());
begin
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  if num_nonnulls(p_identity ->> 'hostname', p_identity ->> 'host_id', p_identity ->> 'pid',
      p_identity ->> 'version') < 4 then
    return jsonb_build_object('code', 'invalid', 'error', 'p_identity needs hostname, host_id, pid and version');
  end if;
  insert into public.dispatcher_gateways (gateway_id, tenant_id) values (v_gateway_id, p_tenant_id)
      on conflict do nothing;
  perform dispatcher.forget_old_instances(p_tenant_id, v_gateway_id);
  insert into public.dispatcher_instances as instance (id, tenant_id, gateway_id, hostname, host_id, pid,
      pid_started_at, version)
  values (v_id, p_tenant_id, v_gateway_id, p_identity ->> 'hostname', p_identity ->> 'host_id',
      (p_identity ->> 'pid')::integer,
          (p_identity ->> 'pid_started_at')::double precision, p_identity ->> 'version')
  on conflict (id) do update set state = 'running', stopped_at = null, last_heartbeat_at = now()
   where instance.gateway_id = excluded.gateway_id and instance.tenant_id = excluded.tenant_id
     and instance.pid = excluded.pid
     and instance.host_id = excluded.host_id
  returning id into v_id;
  if v_id is null then
    return jsonb_build_object('code', 'id_taken', 'instance_id', p_identity ->> 'instance_id',
                              'error', 'another process is registered under this instance id');
  end if;
  perform dispatcher.keep_settings(v_id, p_tenant_id, p_settings);
  return jsonb_build_object('code', 'ok', 'instance_id', v_id, 'gateway_id', v_gateway_id,
                            'gateway_slug', (select slug from public.gateways where id = v_gateway_id),
                            'topic', dispatcher.dispatcher_gateway_topic(v_gateway_id), 'broadcast_available',
                                dispatcher.broadcast_hints_available(),
                            'open_wakes', dispatcher.open_wakes_of_others(v_id), 'now', now());
end
$$;
comment on function public.register_dispatcher_instance(uuid, text, jsonb, jsonb) is
  'Registers a daemon for a gateway (slug or id) under the id it chose (p_identity.instance_id); a repeat is the same '
  'row. Answers {code: ok, instance_id, gateway_id, topic, broadcast_available, open_wakes}, {code: unknown_gateway, '
  'known}, {code: id_taken, error} (the id is another process''s) or {code: invalid, error}.';

create or replace function public.adopt_wake(
  p_instance_id uuid, p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer,
      p_pid_started_at double precision
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_wake public.agent_wakes;
begin
  if p_pid is null or p_host_id is null then
    return jsonb_build_object('applied', false, 'code', 'invalid');
  end if;
  update public.agent_wakes
     set instance_id = p_instance_id, claim_token = gen_random_uuid(), state = 'running', host_id = p_host_id,
         pid = p_pid,
         pid_started_at = p_pid_started_at, started_at = coalesce(started_at, now())
   where id = p_wake_id and claim_token = p_claim_token and state in ('starting', 'running')
     and gateway_id = (select instance.gateway_id from public.dispatcher_instances as instance
                        where instance.id = p_instance_id)
  returning * into v_wake;
  perform dispatcher.stamp_items(v_wake, v_wake.started_at);
  if v_wake.id is null then
    -- An adoption whose answer was lost is asked for again, with the token it has replaced.
    select * into v_wake from public.agent_wakes
     where id = p_wake_id and instance_id = p_instance_id and state = 'running' and host_id = p_host_id and pid = p_pid
       and pid_started_at is not distinct from p_pid_started_at;
  end if;
  if v_wake.id is null then
    return jsonb_build_object('applied', false, 'code', 'fence_lost');
  end if;
  return jsonb_build_object('applied', true, 'claim_token', v_wake.claim_token, 'agent_id', v_wake.agent_id,
                            'deadline_in', extract(epoch from v_wake.deadline_at - now()));
end
$$;
comment on function public.adopt_wake(uuid, uuid, uuid, text, integer, double precision) is
  'Takes over a live wake: new owner, new claim token (the old one can change nothing any more). One adopter wins; '
  'its repeat gets the same answer.';

create or replace function dispatcher.renew_wake_leases(p_instance_id uuid, p_wake_ids uuid[], p_lease_seconds integer)
    returns integer
language plpgsql volatile set search_path = ''
as $$
declare
  v_half constant integer := coalesce(cardinality(p_wake_ids), 0) / 2;
  v_count integer;
begin
  with renewed as (
    update dispatcher.agent_inbox_items as item
       set leased_until = now() + make_interval(secs => p_lease_seconds)
      from public.agent_wakes as wake
     where wake.id = any (p_wake_ids) and wake.instance_id = p_instance_id and wake.state in ('starting', 'running')
       and item.id in (select held.id from dispatcher.agent_inbox_items as held
                        where held.agent_id = wake.agent_id and held.tenant_id = wake.tenant_id
                          and held.status = 'leased'
                          and held.leased_at >= wake.claimed_at
                          and held.leased_until < now() + make_interval(secs => p_lease_seconds * 0.75)
                              for update skip locked)
    returning item.id, item.leased_until
  ), leases as (
    update public.inbox_item_leases as lease set leased_until = renewed.leased_until
      from renewed
     where lease.item_id = renewed.id
       and lease.item_id in (select held.item_id from public.inbox_item_leases as held
                              where held.item_id in (select id from renewed) and held.closed_at is null
                                  for update skip locked)
  )
  select count(*) into v_count from renewed;
  perform dispatcher.settle_constraints(touched.name::regclass)
     from unnest(array['public.agent_inbox_items', 'public.inbox_item_leases']) as touched (name);
  return v_count;
exception when others then
  -- A neighbour's trigger must not silence the daemon, nor cost a wake the leases that it does not raise for.
  if dispatcher.must_abort(sqlstate) then raise; end if;
  if v_half > 0 and sqlstate <> '55P03' then
    return dispatcher.renew_wake_leases(p_instance_id, p_wake_ids[:v_half], p_lease_seconds)
           + dispatcher.renew_wake_leases(p_instance_id, p_wake_ids[v_half + 1:], p_lease_seconds);
  end if;
  perform dispatcher.note_fault(instance.tenant_id, instance.gateway_id, 'renewal of leases',
      format('%s (%s)', sqlerrm, sqlstate))
     from public.dispatcher_instances as instance where instance.id = p_instance_id;
  return 0;
end
$$;
comment on function dispatcher.renew_wake_leases(uuid, uuid[], integer) is
  'Prolongs the leases taken during the given live wakes of this instance, so that a lease never ends before the '
  'work. Answers how many.';

create or replace function dispatcher.wakes_without_owner(p_instance public.dispatcher_instances) returns jsonb
language sql stable set search_path = ''
as $$
  select coalesce(jsonb_agg(wake.id), '[]') from public.agent_wakes as wake
    left join public.dispatcher_instances as owner on owner.id = wake.instance_id
   where wake.gateway_id = p_instance.gateway_id and wake.state in ('starting', 'running')
     and wake.instance_id is distinct from p_instance.id
     and (owner.id is null or owner.state <> 'running' or dispatcher.is_instance_silent(owner))
$$;
comment on function dispatcher.wakes_without_owner(public.dispatcher_instances) is
  'Live wakes of the instance''s gateway whose own instance is gone, stopped or silent: nobody watches their time, so '
  'whoever hears of them sweeps.';

create or replace function dispatcher.new_faults(p_instance public.dispatcher_instances, p_after bigint) returns jsonb
language sql stable set search_path = ''
as $$
  select coalesce(jsonb_agg(jsonb_build_object('id', fault.id, 'side_write', fault.side_write, 'error', fault.error,
      'at', fault.at) order by fault.id), '[]')
    from (select * from public.dispatcher_faults
           where tenant_id = p_instance.tenant_id and (gateway_id is null or gateway_id = p_instance.gateway_id)
             and id > coalesce(p_after, 0) and at > now() - interval '10 minutes'
           order by id limit 50) as fault
$$;
comment on function dispatcher.new_faults(public.dispatcher_instances, bigint) is
  'Side writes that failed in the last ten minutes for the instance''s gateway, after the id it has seen: [{id, '
  'side_write, error, at}].';

create or replace function public.heartbeat_dispatcher_instance(p_instance_id uuid, p_live_wake_ids uuid[],
    p_nonce uuid, p_facts jsonb) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
declare
  v_instance public.dispatcher_instances;
  v_renewed integer;
  v_fenced jsonb;
  v_unattended jsonb;
  v_live constant uuid[] := coalesce(p_live_wake_ids, '{}');
begin
  v_instance := dispatcher.running_instance(p_instance_id);
  update public.dispatcher_instances
     set last_heartbeat_at = now(), canary = p_nonce, realtime = coalesce(p_facts -> 'realtime', realtime),
         health = coalesce(p_facts -> 'health', health),
         state = case state when 'lost' then 'running' else state end
   where id = p_instance_id;
  perform dispatcher.send_gateway_hint(v_instance.gateway_id, 'canary',
      jsonb_build_object('instance_id', p_instance_id, 'nonce', p_nonce));
  v_renewed := dispatcher.renew_wake_leases(p_instance_id, v_live,
      (dispatcher.settings_of_instance(p_instance_id)).lease_seconds);
  select jsonb_agg(live.id) into v_fenced from unnest(v_live) as live (id)
   where not exists (select from public.agent_wakes as wake where wake.id = live.id and wake.instance_id = p_instance_id
     and wake.ended_at is null);
  -- Named, not closed: this call may be an old one that arrives late, and the instance alone knows whether a process
  -- runs.
  select jsonb_agg(dispatcher.open_wake_facts(wake) order by wake.claimed_at) into v_unattended
      from public.agent_wakes as wake
   where wake.instance_id = p_instance_id and wake.state in ('starting', 'running') and wake.id <> all (v_live);
  perform dispatcher.warm_backend();
  return jsonb_build_object('renewed', v_renewed, 'broadcast_available', dispatcher.broadcast_hints_available(),
                            'fenced', coalesce(v_fenced, '[]'), 'unattended', coalesce(v_unattended, '[]'),
                            'orphaned', dispatcher.wakes_without_owner(v_instance),
                            'faults', dispatcher.new_faults(v_instance, (p_facts ->> 'faults_after')::bigint), 'now',
                                now());
end
$$;
comment on function public.heartbeat_dispatcher_instance(uuid, uuid[], uuid, jsonb) is
  'One heartbeat: the instance lives, its leases are renewed, its canary (p_nonce) is sent; named are wakes it no '
  'longer owns (fenced) and wakes it owns without knowing of them (unattended: the answer to a claim or an adoption '
  'was lost), wakes nobody watches (orphaned) and side writes that failed (faults, after p_facts.faults_after).';

create or replace function public.stop_dispatcher_instance(p_instance_id uuid) returns void
language sql volatile set search_path = '' set lock_timeout = '250ms'
as $$
  update public.dispatcher_instances set state = 'stopped', stopped_at = now(), last_heartbeat_at = now()
   where id = p_instance_id and state <> 'stopped'
$$;
comment on function public.stop_dispatcher_instance(uuid) is 'A daemon ended in good order.';

select dispatcher.restrict_functions(array[
  'register_dispatcher_instance', 'adopt_wake', 'heartbeat_dispatcher_instance', 'stop_dispatcher_instance'
]);

notify pgrst, 'reload schema';
commit;
