-- What every story uses: settings as one typed row, the look-up of a gateway, which errors abort a call, and side
-- writes.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.setting(
  p_settings jsonb, p_name text, p_default double precision, p_lowest double precision, p_highest double precision
) returns double precision
language sql immutable parallel safe set search_path = ''
as $$
  select case when jsonb_typeof(p_settings -> p_name) = 'number'
              then least(greatest((p_settings ->> p_name)::numeric, p_lowest::numeric),
                  p_highest::numeric)::double precision
              else p_default end
$$;
comment on function dispatcher.setting(jsonb, text, double precision, double precision, double precision) is
  'A number of p_settings within its bounds; the default where it is missing or no number. A missing key never opens '
  'a gate.';

create or replace function dispatcher.typed_settings(p_settings jsonb) returns public.dispatcher_settings
language plpgsql stable set search_path = ''
as $$
declare
  v_settings public.dispatcher_settings;
begin
  v_settings.wake_cooldown := dispatcher.setting(p_settings, 'wake_cooldown', 30, 0, 86400 * 7);
  v_settings.max_wake_cooldown := dispatcher.setting(p_settings, 'max_wake_cooldown', 900, 0, 86400 * 7);
  v_settings.max_consecutive_failures := dispatcher.setting(p_settings, 'max_consecutive_failures', 5, 1, 1000000);
  v_settings.max_concurrent_wakes := dispatcher.setting(p_settings, 'max_concurrent_wakes', 2, 1, 10000);
  v_settings.agent_process_timeout := dispatcher.setting(p_settings, 'agent_process_timeout', 300, 0.1, 86400 * 7);
  v_settings.stale_item_age_hours := dispatcher.setting(p_settings, 'stale_item_age_hours', 24, 0, 24 * 36500);
  v_settings.lease_seconds := dispatcher.setting(p_settings, 'lease_seconds', 120, 1, 86400);
  v_settings.max_wake_chain := dispatcher.setting(p_settings, 'max_wake_chain', 6, 0, 1000000);
  v_settings.max_wakes_per_day := dispatcher.setting(p_settings, 'max_wakes_per_day', 0, 0, 100000000);
  v_settings.alert_wakes_per_hour := dispatcher.setting(p_settings, 'alert_wakes_per_hour', 60, 0, 100000000);
  v_settings.instance_timeout := dispatcher.setting(p_settings, 'instance_timeout', 45, 0.1, 86400);
  v_settings.workflow_batch_size := dispatcher.setting(p_settings, 'workflow_batch_size', 10, 1, 500);
  v_settings.stale_dispatch_seconds := dispatcher.setting(p_settings, 'stale_dispatch_seconds', 300, 0, 86400 * 365);
  v_settings.max_dispatch_retries := dispatcher.setting(p_settings, 'max_dispatch_retries', 3, 0, 1000000);
  v_settings.stale_claim_seconds := dispatcher.setting(p_settings, 'stale_claim_seconds', 600, 0, 86400 * 365);
  v_settings.workflow_cost_estimate_usd := dispatcher.setting(p_settings, 'workflow_cost_estimate_usd', 0.10, 0,
      999999);
  v_settings.workflow_token_estimate := dispatcher.setting(p_settings, 'workflow_token_estimate', 20000, 0, 1e15);
  return v_settings;
end
$$;
comment on function dispatcher.typed_settings(jsonb) is
  'Settings as a daemon sends them, as one typed row: every value within its bounds, defaults for what is missing. '
  'instance_id and tenant_id are NULL.';

create or replace function dispatcher.settings_of_instance(p_instance_id uuid) returns public.dispatcher_settings
language plpgsql stable set search_path = ''
as $$
declare
  v_settings public.dispatcher_settings;
begin
  select * into v_settings from public.dispatcher_settings where instance_id = p_instance_id;
  return case when v_settings.instance_id is null then dispatcher.typed_settings('{}') else v_settings end;
end
$$;
comment on function dispatcher.settings_of_instance(uuid) is
  'The settings of a daemon; the defaults for one that is not registered.';

create or replace function dispatcher.is_instance_silent(p_instance public.dispatcher_instances) returns boolean
language sql stable set search_path = ''
as $$
  select p_instance.last_heartbeat_at < now() - make_interval(secs => coalesce(
           (select settings.instance_timeout from public.dispatcher_settings as settings
               where settings.instance_id = p_instance.id), 45))
$$;
comment on function dispatcher.is_instance_silent(public.dispatcher_instances) is
  'Whether an instance has sent no heartbeat for longer than its own instance_timeout.';

create or replace function dispatcher.settings_of_gateway(p_gateway_id uuid, p_otherwise jsonb)
    returns public.dispatcher_settings
language plpgsql stable set search_path = ''
as $$
declare
  v_settings public.dispatcher_settings;
begin
  select settings.* into v_settings
    from public.dispatcher_instances as instance
        join public.dispatcher_settings as settings on settings.instance_id = instance.id
   where instance.gateway_id = p_gateway_id
   order by (instance.state = 'running' and not dispatcher.is_instance_silent(instance)) desc,
       instance.last_heartbeat_at desc limit 1;
  return case when v_settings.instance_id is null then dispatcher.typed_settings(p_otherwise) else v_settings end;
end
$$;
comment on function dispatcher.settings_of_gateway(uuid, jsonb) is
  'The settings of the gateway''s most recent daemon; p_otherwise, typed, where none ever ran.';

create or replace function dispatcher.find_gateway(p_tenant_id uuid, p_gateway text) returns uuid
language sql stable set search_path = ''
as $$
  select id from public.gateways where tenant_id = p_tenant_id and (slug = p_gateway or id::text = p_gateway)
   order by id::text = p_gateway desc limit 1
$$;
comment on function dispatcher.find_gateway(uuid, text) is
  'The id of a tenant''s gateway by id or slug; NULL when there is none.';

create or replace function dispatcher.unknown_gateway(p_tenant_id uuid) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object('code', 'unknown_gateway', 'known',
           coalesce((select jsonb_agg(slug order by slug) from public.gateways where tenant_id = p_tenant_id), '[]'))
$$;
comment on function dispatcher.unknown_gateway(uuid) is
  'The answer to a gateway nobody knows: {code: unknown_gateway, known: slugs}.';

create or replace function dispatcher.must_abort(p_sqlstate text) returns boolean
language sql immutable parallel safe set search_path = ''
as $$ select p_sqlstate in ('40001', '40P01', '57014', '57P01', '53100', '53200') $$;
comment on function dispatcher.must_abort(text) is
  'The one list of errors that no handler contains: serialization failure, deadlock, cancelled, shutdown, disk and '
  'memory full. Every other error costs its row, agent or phase alone. Idiom: exception when others then if '
  'dispatcher.must_abort(sqlstate) then raise; end if; ...';

create or replace function dispatcher.note_fault(p_tenant_id uuid, p_gateway_id uuid, p_side_write text, p_error text)
    returns void
language plpgsql volatile security definer set search_path = '' set lock_timeout = '100ms'
as $$
begin
  -- Once a minute is enough to be told. Whoever holds the tenant's or the gateway's row makes this wait, but not for
  -- long.
  insert into public.dispatcher_faults (tenant_id, gateway_id, side_write, error)
  select p_tenant_id, p_gateway_id, left(p_side_write, 100), left(p_error, 500)
   where not exists (select from public.dispatcher_faults as known
                      where known.tenant_id = p_tenant_id and known.side_write = left(p_side_write, 100)
                        and known.gateway_id is not distinct from p_gateway_id
                        and known.at > clock_timestamp() - interval '1 minute');
  perform dispatcher.settle_constraints('public.dispatcher_faults');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  raise warning 'side write % failed: %', p_side_write, p_error;
end
$$;
comment on function dispatcher.note_fault(uuid, uuid, text, text) is
  'Keeps that a side write failed, for the daemons to log and to show in health; at most one a minute of a kind. '
  'Never fails.';

create or replace function dispatcher.settle_constraints(p_table regclass) returns void
language plpgsql volatile set search_path = ''
as $$
begin
  if exists (select from pg_catalog.pg_trigger where tgrelid = p_table and tgdeferrable) then
    set constraints all immediate;
  end if;
end
$$;
comment on function dispatcher.settle_constraints(regclass) is
  'Has deferred constraints say what they have to say now, where a table has any: what waits for the commit would '
  'take everything with it.';

create or replace function dispatcher.shown(p_text text) returns text
language sql immutable set search_path = ''
as $$
  select regexp_replace(p_text, '[\u0001-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]',
                        U&'\FFFD', 'g')
$$;
comment on function dispatcher.shown(text) is
  'A text from outside as a person may see it: on one line, without what steers a terminal or turns the order.';

create or replace function dispatcher.notify_operator(
  p_tenant_id uuid, p_type text, p_title text, p_body text, p_agent_id uuid, p_meta jsonb,
      p_entity_type text default 'agent', p_entity_id uuid default null
) returns boolean
language plpgsql volatile set search_path = '' set lock_timeout = '100ms'
as $$
begin
  insert into public.notifications (tenant_id, type, title, body, entity_type, entity_id, actor_type, actor_agent_id,
      meta)
  values (p_tenant_id, p_type, dispatcher.shown(left(p_title, 300)), dispatcher.shown(left(p_body, 4000)),
          p_entity_type, coalesce(p_entity_id, p_agent_id),
          case p_type when 'agent_escalation' then 'agent' else 'system' end::public.actor_type, p_agent_id, p_meta);
  perform dispatcher.settle_constraints('public.notifications');
  return true;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_tenant_id, (select agent.gateway_id from dispatcher.agents as agent
      where agent.id = p_agent_id),
                                'notification ' || p_type, format('%s (%s)', sqlerrm, sqlstate));
  return false;
end
$$;
comment on function dispatcher.notify_operator(uuid, text, text, text, uuid, jsonb, text, uuid) is
  'Writes a notification about an agent (or p_entity_id). A side write: when it fails, what it tells about is done '
  'all the same and the fault is noted. True when it was written.';

select dispatcher.restrict_functions();

notify pgrst, 'reload schema';
commit;
