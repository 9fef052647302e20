-- Who holds what many share: seen from the locks themselves, so that whoever waits can name the session to look for.
-- pg_locks shows every session's locks to everybody. What a session does, and since when, its own role and members of
-- pg_read_all_stats alone may see; where the owner of these functions is neither, that is said.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.pids_of_rows(p_xmax xid[]) returns integer[]
language plpgsql volatile set search_path = ''
as $$
declare
  v_xmax xid;
  v_pids integer[] := '{}';
  v_found integer[];
begin
  foreach v_xmax in array p_xmax loop
    select array_agg(coalesce(lock.pid, 0)) into v_found from pg_catalog.pg_locks as lock
     where lock.locktype = 'transactionid' and lock.granted and lock.transactionid = v_xmax
       and lock.pid is distinct from pg_catalog.pg_backend_pid();
    if v_found is null then
      -- Several hold it together: the number is that of their list.
      begin
        select array_agg(coalesce(lock.pid, 0)) into v_found
          from pg_catalog.pg_get_multixact_members(v_xmax) as member
          join pg_catalog.pg_locks as lock on lock.locktype = 'transactionid' and lock.granted
              and lock.transactionid = member.xid
         where lock.pid is distinct from pg_catalog.pg_backend_pid();
      exception when others then
        if dispatcher.must_abort(sqlstate) then raise; end if;  -- no such list: whoever held it has gone
      end;
    end if;
    v_pids := v_pids || coalesce(v_found, '{}');
  end loop;
  return array(select distinct unnest(v_pids));
end
$$;
comment on function dispatcher.pids_of_rows(xid[]) is
  'The sessions whose transactions hold rows with these xmax; 0 stands for a prepared transaction.';

create or replace function dispatcher.sessions_of(p_pids integer[]) returns jsonb
language sql volatile security definer set search_path = ''
as $$
  select coalesce(jsonb_agg(jsonb_build_object(
           'pid', holder.pid, 'application', nullif(left(activity.application_name, 60), ''),
           'user', activity.usename, 'state', activity.state,
           'seconds', round(extract(epoch from clock_timestamp() - activity.xact_start)::numeric, 1))
           order by activity.xact_start, holder.pid), '[]')
    from (select held.pid from unnest(p_pids) as held (pid) limit 5) as holder
    left join pg_catalog.pg_stat_activity as activity on activity.pid = holder.pid
$$;
comment on function dispatcher.sessions_of(integer[]) is
  'Up to five sessions: [{pid, application, user, state, seconds}]. state and seconds (its transaction has been open '
  'for) are NULL where the owner of this function may not see them.';

create or replace function dispatcher.held_thing(p_kind text, p_table text, p_pids integer[]) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_sessions constant jsonb := dispatcher.sessions_of(p_pids);
begin
  return jsonb_build_object(
    'kind', p_kind, 'table', p_table, 'sessions', v_sessions,
    'text', format('%s %s is held by %s', case p_kind when 'row' then 'a row of' else 'the whole table' end, p_table,
      coalesce((
        select string_agg(
          case when (session.value ->> 'pid')::integer = 0
               then 'a prepared transaction (see pg_prepared_xacts)'
               else format('pid %s (%s, user %s, %s)', session.value ->> 'pid',
                 coalesce('application ' || (session.value ->> 'application'), 'no application name'),
                 coalesce(session.value ->> 'user', 'unknown'),
                 coalesce(format('%s, its transaction open for %s s', session.value ->> 'state',
                                 round((session.value ->> 'seconds')::numeric)),
                          'what it does is hidden from us: see pg_stat_activity')) end, ', ')
          from jsonb_array_elements(v_sessions) as session), 'a session that has just gone')));
end
$$;
comment on function dispatcher.held_thing(text, text, integer[]) is
  '{kind: row | table, table, sessions, text}: what is held, and by whom.';

create or replace function dispatcher.held_tables() returns jsonb
language sql volatile set search_path = ''
as $$
  select coalesce(jsonb_agg(dispatcher.held_thing('table', held.name, held.pids) order by held.name), '[]')
    from (
      select class.relname::text as name, array_agg(distinct coalesce(blocker.pid, 0)) as pids
        from pg_catalog.pg_locks as lock
        join pg_catalog.pg_class as class on class.oid = lock.relation and class.relkind in ('r', 'p')
            and class.relnamespace = 'public'::regnamespace
       cross join lateral unnest(array[lock.pid] || case when lock.granted then '{}'
           else pg_catalog.pg_blocking_pids(lock.pid) end) as blocker (pid)
       where lock.locktype = 'relation'
         and lock.database = (select oid from pg_catalog.pg_database where datname = current_database())
         -- What waits for a whole table has everybody wait behind it.
         and lock.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
         and lock.pid is distinct from pg_catalog.pg_backend_pid()
       group by class.relname limit 20) as held
$$;
comment on function dispatcher.held_tables() is
  'The tables of schema public that somebody holds, or waits for, as a whole: [{kind: table, table, sessions, text}].';

create or replace function dispatcher.held_rows(p_tenant_id uuid, p_gateway_id uuid) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_probe text[];
  v_xmax xid[];
  v_held jsonb := '[]';
begin
  foreach v_probe slice 1 in array array[
    ['dispatcher_gateways', 'gateway_id = $2', 'update'],
    ['gateways', 'id = $2', 'key share'],
    ['tenants', 'id = $1', 'key share'],
    ['dispatcher_instances', 'gateway_id = $2 and state = ''running''', 'no key update'],
    ['dispatcher_settings',
     'instance_id in (select id from public.dispatcher_instances where gateway_id = $2 and state = ''running'')',
     'update']
  ] loop
    begin
      execute format(
        'with free as (select ctid from public.%1$I where %2$s for %3$s skip locked) '
        'select array_agg(xmax) from public.%1$I where %2$s and ctid not in (select ctid from free)',
        v_probe[1], v_probe[2], v_probe[3]) into v_xmax using p_tenant_id, p_gateway_id;
      raise exception 'looked' using errcode = 'OD013';
    exception
      when sqlstate 'OD013' then null;  -- what was free is so again: whoever needs it does not wait for this look
      when lock_not_available then v_xmax := null;  -- the table as a whole is held
    end;
    if v_xmax is not null then
      v_held := v_held || dispatcher.held_thing('row', v_probe[1], dispatcher.pids_of_rows(v_xmax));
    end if;
  end loop;
  return v_held;
end
$$;
comment on function dispatcher.held_rows(uuid, uuid) is
  'The rows that a gateway''s daemons share and somebody holds at this moment: [{kind: row, table, sessions, text}]. '
  'Takes those that are free for a moment, and lets them go; waits for nobody, but up to lock_timeout for a table.';

create or replace function dispatcher.held_lasting(p_tenant_id uuid, p_gateway_id uuid) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_before jsonb := dispatcher.held_tables() || dispatcher.held_rows(p_tenant_id, p_gateway_id);
  v_after jsonb;
begin
  if v_before = '[]' then
    return v_before;
  end if;
  perform pg_catalog.pg_sleep(0.1);
  v_after := dispatcher.held_tables() || dispatcher.held_rows(p_tenant_id, p_gateway_id);
  return coalesce((
    select jsonb_agg(still.value) from jsonb_array_elements(v_after) as still
     where exists (select from jsonb_array_elements(v_before) as once,
                     jsonb_array_elements(once.value -> 'sessions') as session_before,
                     jsonb_array_elements(still.value -> 'sessions') as session_now
                    where once.value ->> 'table' = still.value ->> 'table'
                      and session_before.value -> 'pid' = session_now.value -> 'pid')), '[]');
end
$$;
comment on function dispatcher.held_lasting(uuid, uuid) is
  'What a gateway''s daemons share and the same session has held for a tenth of a second: no claim does.';

create or replace function public.dispatcher_holders(p_tenant_id uuid, p_gateway text) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '100ms'
as $$
declare
  v_gateway_id uuid;
begin
  begin
    v_gateway_id := dispatcher.find_gateway(p_tenant_id, p_gateway);
    if v_gateway_id is null then
      return dispatcher.unknown_gateway(p_tenant_id);
    end if;
  exception when lock_not_available then
    null;  -- the table itself is held, which is the answer
  end;
  return jsonb_build_object('code', 'ok', 'held', dispatcher.held_lasting(p_tenant_id, v_gateway_id));
end
$$;
comment on function public.dispatcher_holders(uuid, text) is
  'Which rows that a gateway''s daemons share, and which whole tables, other sessions hold, and who: {code: ok, held: '
  '[{kind: row | table, table, text, sessions: [{pid, application, user, state, seconds}]}]}. state and seconds are '
  'NULL where the owner of our functions may not see them. Never waits longer than a second.';

select dispatcher.restrict_functions(array[
  'dispatcher_holders'
]);

notify pgrst, 'reload schema';
commit;
