-- What stands in the database against what the files make, and who may reach it. `dispatcher migrate` reads these at
-- its end, the daemon at its start. Safe to apply twice.
begin;
set local lock_timeout = '3s';
-- What these functions read of the next file's does not exist yet.
set local check_function_bodies = off;

create or replace function dispatcher.granted_rights() returns table (
  kind text, name text, column_name text, grantee text, privilege text, grantor text, by_owner boolean
)
language sql stable set search_path = ''
as $$
  with objects (kind, name, column_name, owner, acl) as (
    select case class.relkind when 'S' then 'sequence' else 'table' end, class.oid::regclass::text, null::text,
           class.relowner,
           coalesce(class.relacl, pg_catalog.acldefault(case class.relkind when 'S' then 's' else 'r' end::"char",
                                                        class.relowner))
      from pg_catalog.pg_class as class
     where class.relnamespace in ('public'::regnamespace, 'dispatcher'::regnamespace)
       and class.relkind in ('r', 'p', 'v', 'S')
    union all
    select 'table', class.oid::regclass::text, attribute.attname::text, class.relowner, attribute.attacl
      from pg_catalog.pg_class as class
      join pg_catalog.pg_attribute as attribute on attribute.attrelid = class.oid and attribute.attacl is not null
     where class.relnamespace in ('public'::regnamespace, 'dispatcher'::regnamespace)
    union all
    select 'function', proc.oid::regprocedure::text, null, proc.proowner,
           coalesce(proc.proacl, pg_catalog.acldefault('f', proc.proowner))
      from pg_catalog.pg_proc as proc
     where proc.pronamespace in ('public'::regnamespace, 'dispatcher'::regnamespace)
    union all
    select 'schema', namespace.nspname::text, null, namespace.nspowner,
           coalesce(namespace.nspacl, pg_catalog.acldefault('n', namespace.nspowner))
      from pg_catalog.pg_namespace as namespace
     where namespace.nspname = 'dispatcher'
  )
  select objects.kind, objects.name, objects.column_name, coalesce(role.rolname::text, 'public'),
         lower(grant_.privilege_type), grantor.rolname::text, grant_.grantor = objects.owner
    from objects
    cross join lateral pg_catalog.aclexplode(objects.acl) as grant_
    left join pg_catalog.pg_roles as role on role.oid = grant_.grantee
    join pg_catalog.pg_roles as grantor on grantor.oid = grant_.grantor
   where grant_.grantee = 0 or role.rolname in ('anon', 'authenticated', 'service_role')
$$;
comment on function dispatcher.granted_rights() is
  'What public, anon, authenticated and service_role may do with what stands in schemas public and dispatcher, and '
  'with the latter itself. by_owner: its owner can take the right back.';

create or replace function dispatcher.object_of_right(p_kind text, p_name text, p_column text) returns text
language sql immutable set search_path = ''
as $$ select case when p_column is null then p_kind || ' ' || p_name else 'column ' || p_name || '.' || p_column end $$;
comment on function dispatcher.object_of_right(text, text, text) is
  'What a right is about, as it is written down: table public.agent_wakes, column public.agent_wakes.state.';

create or replace function dispatcher.present_objects() returns table (kind text, name text, definition text)
language sql stable set search_path = ''
as $$
  with relations as (
    select class.oid, class.oid::regclass::text as name, class.relkind
      from pg_catalog.pg_class as class
     where class.relnamespace in ('public'::regnamespace, 'dispatcher'::regnamespace)
       and class.relkind in ('r', 'p', 'v', 'c')
  )
  select 'function', proc.oid::regprocedure::text,
         md5(concat_ws('|', proc.prosrc, pg_catalog.pg_get_function_arguments(proc.oid),
                       pg_catalog.pg_get_function_result(proc.oid), language.lanname, proc.provolatile, proc.prosecdef,
                       proc.proisstrict, proc.proconfig::text, proc.proleakproof, proc.proparallel))
    from pg_catalog.pg_proc as proc
    join pg_catalog.pg_language as language on language.oid = proc.prolang
   where proc.pronamespace in ('public'::regnamespace, 'dispatcher'::regnamespace)
  union all
  select case relkind when 'v' then 'view' when 'c' then 'type' else 'table' end, name, '' from relations
  union all
  select 'column', relations.name || '.' || attribute.attname,
         pg_catalog.format_type(attribute.atttypid, attribute.atttypmod) || case when attribute.attnotnull
             then ' not null' else '' end
    from relations
    join pg_catalog.pg_attribute as attribute on attribute.attrelid = relations.oid
   where attribute.attnum > 0 and not attribute.attisdropped
  union all
  select 'constraint', relations.name || '.' || con.conname, case when con.convalidated then '' else 'not valid' end
    from relations
    join pg_catalog.pg_constraint as con on con.conrelid = relations.oid and con.contype <> 'n'
  union all
  select 'index', relations.name || '.' || class.relname, case when index.indisvalid then '' else 'not valid' end
    from relations
    join pg_catalog.pg_index as index on index.indrelid = relations.oid
    join pg_catalog.pg_class as class on class.oid = index.indexrelid
  union all
  select 'trigger', relations.name || '.' || trigger.tgname,
         trigger.tgfoid::regproc::text || case when trigger.tgenabled in ('O', 'A') then '' else ' disabled' end
    from relations
    join pg_catalog.pg_trigger as trigger on trigger.tgrelid = relations.oid and not trigger.tgisinternal
  union all
  select 'policy', relations.name || '.' || policy.polname, policy.polcmd::text
    from relations
    join pg_catalog.pg_policy as policy on policy.polrelid = relations.oid
  union all
  select 'right', grants.grantee || ' ' || dispatcher.object_of_right(grants.kind, grants.name, grants.column_name),
         string_agg(grants.privilege, ', ' order by grants.privilege)
    from dispatcher.granted_rights() as grants
   -- PostgreSQL 17 brought `maintain`: a right that no function of ours needs.
   where grants.grantee in ('service_role', 'authenticated') and grants.privilege <> 'maintain'
   group by 2
$$;
comment on function dispatcher.present_objects() is
  'Every function, table, view, type, column, constraint, index, trigger and policy of the schemas public and '
  'dispatcher, and what service_role and authenticated may do with it (right), with what of its definition reads the '
  'same in every PostgreSQL.';

create or replace function dispatcher.missing_rights() returns table (name text, remedy text)
language sql stable set search_path = ''
as $$
  with expected as (
    select split_part(expected.name, ' ', 1) as grantee, split_part(expected.name, ' ', 2) as kind,
           regexp_replace(expected.name, '^\S+ \S+ ', '') as object, right_.privilege
      from dispatcher.expected_objects() as expected,
           unnest(string_to_array(expected.definition, ', ')) as right_ (privilege)
     where expected.kind = 'right' and (expected.base_of is null or dispatcher.owns(expected.base_of))
  ),
  granted as materialized (
    select grants.*, dispatcher.object_of_right(grants.kind, grants.name, grants.column_name) as object
      from dispatcher.granted_rights() as grants
  ),
  missing as (
    select string_agg(expected.privilege, ', ' order by expected.privilege) as privileges, expected.kind,
           expected.object, expected.grantee
      from expected
     where case expected.kind when 'function' then to_regprocedure(expected.object) is not null
                              when 'schema' then to_regnamespace(expected.object) is not null
                              when 'column' then exists (
                                select from pg_catalog.pg_attribute as attribute
                                 where attribute.attrelid
                                       = to_regclass(regexp_replace(expected.object, '[.][^.]+$', ''))
                                   and attribute.attname = substring(expected.object from '[^.]+$'))
                              else to_regclass(expected.object) is not null end
       and not exists (select from granted
                        where granted.object = expected.kind || ' ' || expected.object
                          and granted.grantee = expected.grantee and granted.privilege = expected.privilege)
     group by expected.kind, expected.object, expected.grantee
    union all
    select 'usage', 'schema', 'public', 'service_role'
     where not pg_catalog.has_schema_privilege('service_role', 'public', 'usage')
  )
  select privileges || ' on ' || kind || ' ' || object || ' to ' || grantee,
         case kind when 'column' then format('grant %s (%I) on table %s to %s', privileges,
                                             substring(object from '[^.]+$'), regexp_replace(object, '[.][^.]+$', ''),
                                             grantee)
                   else format('grant %s on %s %s to %s', privileges, kind, object, grantee) end
    from missing
$$;
comment on function dispatcher.missing_rights() is
  'Rights of service_role and authenticated that the files give and that are gone, each with the statement that gives '
  'it back.';

create or replace function dispatcher.object_definitions() returns table (kind text, name text, definition text)
language sql stable set search_path = '' set timezone = 'UTC' set datestyle = 'ISO' set intervalstyle = 'postgres'
set quote_all_identifiers = 'off' set extra_float_digits = '1'
as $$
  with ours as materialized (
    select distinct expected.kind, expected.name from dispatcher.expected_objects() as expected
     where expected.base_of is null or dispatcher.owns(expected.base_of)
  ),
  relations as materialized (
    select class.oid, class.oid::regclass::text as name, class.relkind, class.relowner, class.reloptions
      from pg_catalog.pg_class as class
     where class.relnamespace in ('public'::regnamespace, 'dispatcher'::regnamespace)
       and class.relkind in ('r', 'p', 'v')
  ),
  functions as materialized (
    select proc.oid::regprocedure::text as name, role.rolname as owner
      from pg_catalog.pg_proc as proc join pg_catalog.pg_roles as role on role.oid = proc.proowner
     where proc.pronamespace in ('public'::regnamespace, 'dispatcher'::regnamespace)
  ),
  columns as materialized (
    select attribute.attrelid, attribute.attnum, attribute.attidentity,
           relations.name || '.' || attribute.attname as name
      from pg_catalog.pg_attribute as attribute join relations on relations.oid = attribute.attrelid
     where attribute.attnum > 0 and not attribute.attisdropped and relations.relkind <> 'v'
  ),
  found (kind, name, definition, of_kind, of_name) as materialized (
    select 'view', relations.name,
           concat_ws(' ', relations.reloptions::text, pg_catalog.pg_get_viewdef(relations.oid)), 'view', relations.name
      from relations where relations.relkind = 'v'
    union all
    select 'constraint', relations.name || '.' || con.conname, pg_catalog.pg_get_constraintdef(con.oid),
           'constraint', relations.name || '.' || con.conname
      from relations
      join pg_catalog.pg_constraint as con on con.conrelid = relations.oid and con.contype <> 'n'
    union all
    select 'index', relations.name || '.' || class.relname, pg_catalog.pg_get_indexdef(index.indexrelid),
           'index', relations.name || '.' || class.relname
      from relations
      join pg_catalog.pg_index as index on index.indrelid = relations.oid
      join pg_catalog.pg_class as class on class.oid = index.indexrelid
     where not exists (select from pg_catalog.pg_constraint as con
                        where con.conindid = index.indexrelid and con.contype in ('p', 'u', 'x'))
    union all
    select 'trigger', relations.name || '.' || trigger.tgname, pg_catalog.pg_get_triggerdef(trigger.oid),
           'trigger', relations.name || '.' || trigger.tgname
      from relations
      join pg_catalog.pg_trigger as trigger on trigger.tgrelid = relations.oid and not trigger.tgisinternal
    union all
    select 'default', columns.name,
           case when columns.attidentity <> '' then 'identity'
                else coalesce(pg_catalog.pg_get_expr(value.adbin, value.adrelid), '') end, 'column', columns.name
      from columns
      left join pg_catalog.pg_attrdef as value on value.adrelid = columns.attrelid and value.adnum = columns.attnum
    union all
    select 'owner', object.kind || ' ' || relations.name, role.rolname, object.kind, relations.name
      from relations
      join pg_catalog.pg_roles as role on role.oid = relations.relowner
      cross join lateral (values (case relations.relkind when 'v' then 'view' else 'table' end)) as object (kind)
    union all
    select 'owner', 'function ' || functions.name, functions.owner, 'function', functions.name from functions
  )
  select found.kind, found.name, found.definition from found
   where (found.of_kind, found.of_name) in (select ours.kind, ours.name from ours)
  union all
  select 'policy', policy.polrelid::regclass::text || '.' || policy.polname,
         concat_ws(' ', policy.polcmd, policy.polpermissive,
           array(select coalesce(role.rolname, 'public') from unnest(policy.polroles) as member (oid)
                   left join pg_catalog.pg_roles as role on role.oid = member.oid order by 1),
           pg_catalog.pg_get_expr(policy.polqual, policy.polrelid), '|',
           pg_catalog.pg_get_expr(policy.polwithcheck, policy.polrelid))
    from pg_catalog.pg_policy as policy
   where exists (select from ours where ours.kind = 'table' and ours.name = policy.polrelid::regclass::text)
      or policy.polname = 'dispatcher_budget_topic' and policy.polrelid in (
           select class.oid from pg_catalog.pg_class as class
             join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
            where namespace.nspname = 'realtime' and class.relname = 'messages')
  union all
  select 'owner', 'schema dispatcher', role.rolname
    from pg_catalog.pg_namespace as namespace
    join pg_catalog.pg_roles as role on role.oid = namespace.nspowner
   where namespace.nspname = 'dispatcher'
$$;
comment on function dispatcher.object_definitions() is
  'What of the definitions of our objects each PostgreSQL writes in its own way: views, defaults, constraints, '
  'indexes, triggers, every policy on a table of ours, owners.';

create or replace function dispatcher.record_definitions(p_fingerprint text) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_record record;
begin
  select * into v_record from dispatcher.recorded_objects where kind = 'record';
  if v_record.name is not null and (v_record.name = p_fingerprint
      or v_record.definition = 'kept' and coalesce(current_setting('dispatcher.runner', true), '') = 'on') then
    update dispatcher.recorded_objects set name = p_fingerprint, definition = 'kept' where kind = 'record';
    return;
  end if;
  delete from dispatcher.recorded_objects;
  insert into dispatcher.recorded_objects (kind, name, definition)
  select kind, name, definition from dispatcher.object_definitions()
  union all select 'record', p_fingerprint, 'kept';
end
$$;
comment on function dispatcher.record_definitions(text) is
  'Records the definitions as they are, where no record is or one of another version. A record of `dispatcher '
  'migrate` stands: it follows each file by itself.';

create or replace function dispatcher.definition_remedy(p_kind text, p_name text, p_definition text) returns text
language sql immutable set search_path = ''
as $$
  select case p_kind
    when 'default' then format('alter table %s alter column %s %s', named.parent, named.own,
      case p_definition when '' then 'drop default' when 'identity' then 'add generated always as identity'
                        else 'set default ' || p_definition end)
    when 'constraint' then format('alter table %1$s drop constraint if exists %2$s, add constraint %2$s %3$s',
      named.parent, named.own, p_definition)
    when 'index' then format('drop index if exists %s.%s; %s', split_part(named.parent, '.', 1), named.own,
      p_definition)
    when 'owner' then format('alter %s owner to %I', p_name, p_definition) end
  from (select regexp_replace(p_name, '[.][^.]+$', '') as parent,
               quote_ident(substring(p_name from '[^.]+$')) as own) as named
$$;
comment on function dispatcher.definition_remedy(text, text, text) is
  'The statement that brings back a recorded definition; NULL where applying the files does.';

create or replace function dispatcher.column_remedy(p_name text, p_present text, p_expected text) returns text
language sql immutable set search_path = ''
as $$
  -- A type that is right is left alone: where a view reads the column, even the same type is refused.
  select format('alter table %1$s ', regexp_replace(p_name, '[.][^.]+$', ''))
         || case when present_type = expected_type then ''
                 else format('alter column %1$s type %2$s using %1$s::%2$s, ', own, expected_type) end
         || format('alter column %s %s', own,
              case when p_expected = expected_type then 'drop not null' else 'set not null' end)
    from (select split_part(p_name, '.', 3) as own, replace(p_present, ' not null', '') as present_type,
                 replace(p_expected, ' not null', '') as expected_type) as named
$$;
comment on function dispatcher.column_remedy(text, text, text) is
  'The statement that gives a column its type and nullability back.';

create or replace function dispatcher.schema_drift()
returns table (kind text, name text, problem text, remedy text)
language sql stable set search_path = ''
as $$
  with expected as (
    select expected.* from dispatcher.expected_objects() as expected
     where expected.kind <> 'right' and (expected.base_of is null or dispatcher.owns(expected.base_of))
  ),
  present as materialized (
    select * from dispatcher.present_objects() as present where present.kind <> 'right'
  ),
  defined as materialized (
    select * from dispatcher.object_definitions()
  ),
  found (kind, name, problem, remedy) as (
    select expected.kind, expected.name, case when present.name is null then 'missing' else 'differs' end,
           case when recorded.name is not null and expected.kind <> 'index'
                  then dispatcher.definition_remedy(expected.kind, expected.name, recorded.definition)
                when expected.kind = 'index' and present.name is not null
                  then 'reindex index ' || split_part(expected.name, '.', 1) || '.' || split_part(expected.name, '.', 3)
                when expected.kind = 'column' and present.name is not null
                  then dispatcher.column_remedy(expected.name, present.definition, expected.definition) end
      from expected
      left join present on present.kind = expected.kind and present.name = expected.name
      left join dispatcher.recorded_objects as recorded on recorded.kind = expected.kind
          and recorded.name = expected.name
     where (present.name is null or present.definition <> expected.definition)
           -- A table or view that is gone is told once, without its columns and all that stood on them.
       and (expected.kind in ('table', 'view', 'type', 'function')
            or exists (select from present as parent
                        where parent.kind in ('table', 'view', 'type')
                          and parent.name = regexp_replace(expected.name, '[.][^.]+$', '')))
    union all
    select present.kind, present.name, 'retired', null
      from present
     where present.kind in ('function', 'view', 'trigger')
       and (present.name like 'dispatcher.%' or present.kind = 'trigger' and present.definition like 'dispatcher.%'
            or exists (select from dispatcher.made_objects as made
                        where made.kind = present.kind and made.name = present.name
                           or present.kind = 'trigger' and made.name = split_part(present.definition, ' ', 1) || '()'))
       and not exists (select from dispatcher.expected_objects() as expected
                        where expected.kind = present.kind and expected.name = present.name)
    union all
    select recorded.kind, recorded.name, 'differs',
           dispatcher.definition_remedy(recorded.kind, recorded.name, recorded.definition)
      from dispatcher.recorded_objects as recorded
      join defined on defined.kind = recorded.kind and defined.name = recorded.name
     where defined.definition <> recorded.definition
    union all
    select 'policy', recorded.name, 'missing', null
      from dispatcher.recorded_objects as recorded
     where recorded.kind = 'policy' and recorded.name like 'realtime.%'
       and not exists (select from defined where defined.kind = 'policy' and defined.name = recorded.name)
    union all
    select 'policy', defined.name, 'added', format('drop policy %s on %s',
           quote_ident(substring(defined.name from '[^.]+$')), regexp_replace(defined.name, '[.][^.]+$', ''))
      from defined
     where defined.kind = 'policy' and defined.name not like 'realtime.%'
       and not exists (select from expected where expected.kind = 'policy' and expected.name = defined.name)
    union all
    select 'right', missing.name, 'missing', missing.remedy from dispatcher.missing_rights() as missing
    union all
    select 'table', 'dispatcher.recorded_objects', 'has no record', null
     where not exists (select from dispatcher.recorded_objects as recorded
                        where recorded.kind = 'record' and recorded.definition = 'kept')
  )
  select distinct on (found.kind, found.name) found.kind, found.name, found.problem, found.remedy
    from found
   order by found.kind, found.name, found.remedy
$$;
comment on function dispatcher.schema_drift() is
  'What differs from what the files make: missing, differs, added (a policy), or retired (a function, view or trigger '
  'of an earlier version). remedy: the statement to type where applying the files again does not mend it. Empty when '
  'all is well.';

create or replace function dispatcher.drop_retired_objects() returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_retired record;
begin
  -- A view may stand on a function and a function on a view: whatever stands on nothing goes first.
  for v_pass in 1..3 loop
    for v_retired in
      select * from dispatcher.schema_drift() where problem = 'retired'
       order by array_position(array['trigger', 'view', 'function'], kind), name
    loop
      begin
        if v_retired.kind = 'trigger' then
          execute format('drop trigger %s on %s', split_part(v_retired.name, '.', 3),
              regexp_replace(v_retired.name, '[.][^.]+$', ''));
        else
          execute format('drop %s %s', v_retired.kind, v_retired.name);
        end if;
      exception when dependent_objects_still_exist then
        if v_pass = 3 then
          raise;
        end if;
      end;
    end loop;
  end loop;
end
$$;
comment on function dispatcher.drop_retired_objects() is
  'Drops the functions, views and triggers of earlier versions. An object of somebody else that depends on one stops '
  'it, and is named.';

create or replace function dispatcher.schema_exposure() returns table (name text, fault text, remedy text)
language sql stable set search_path = ''
as $$
  with ours as materialized (
    select case expected.kind when 'view' then 'table' else expected.kind end as kind, expected.name
      from dispatcher.expected_objects() as expected
     where expected.kind in ('table', 'view', 'function') and (expected.base_of is null
       or dispatcher.owns(expected.base_of))
    union
    select case present.kind when 'view' then 'table' else present.kind end, present.name
      from dispatcher.present_objects() as present
     where present.kind in ('table', 'view', 'function') and present.name like 'dispatcher.%'
    union
    select 'sequence', link.objid::regclass::text
      from pg_catalog.pg_depend as link
      join pg_catalog.pg_class as sequence on sequence.oid = link.objid and sequence.relkind = 'S'
     where link.refclassid = 'pg_catalog.pg_class'::regclass and link.classid = 'pg_catalog.pg_class'::regclass
       and link.deptype in ('a', 'i')
       and exists (select from dispatcher.expected_objects() as expected
                    where expected.kind = 'table' and expected.name = link.refobjid::regclass::text
                      and (expected.base_of is null or dispatcher.owns(expected.base_of)))
    union
    select 'schema', 'dispatcher'
  ),
  allowed as materialized (
    select expected.name, expected.definition from dispatcher.expected_objects() as expected
     where expected.kind = 'right'
  ),
  open as (
    select grants.kind, grants.name, grants.column_name, grants.grantee, grants.grantor, grants.by_owner,
           string_agg(grants.privilege, ', ' order by grants.privilege) as privileges,
           string_agg(grants.privilege || coalesce(' (' || quote_ident(grants.column_name) || ')', ''), ', '
                      order by grants.privilege) as written
      from dispatcher.granted_rights() as grants
      join ours on ours.kind = grants.kind and ours.name = grants.name
     where grants.grantee in ('public', 'anon')
        or grants.grantee = 'authenticated' and not exists (
             select from allowed
              where allowed.name = 'authenticated '
                      || dispatcher.object_of_right(grants.kind, grants.name, grants.column_name)
                and grants.privilege = any (string_to_array(allowed.definition, ', ')))
     group by 1, 2, 3, 4, 5, 6
  )
  select class.oid::regclass::text, 'row level security is off',
         format('alter table %s enable row level security', class.oid::regclass)
    from ours
    join pg_catalog.pg_class as class on class.oid = to_regclass(ours.name)
   where ours.kind = 'table' and class.relkind in ('r', 'p') and not class.relrowsecurity
  union all
  select case open.kind when 'schema' then 'schema ' else '' end || open.name || coalesce('.' || open.column_name, ''),
         open.privileges || ' is granted to ' || open.grantee
           || case when open.by_owner then '' else ' by ' || open.grantor end,
         case when open.by_owner
              then format('revoke %s on %s %s from %s', open.written, open.kind, open.name, open.grantee)
              else format('revoke grant option for %s on %s %s from %I cascade', open.written, open.kind, open.name,
                     open.grantor) end
    from open
   order by 1, 2
$$;
comment on function dispatcher.schema_exposure() is
  'Every table of ours without row level security, every right on anything of ours that public or anon holds, or '
  'authenticated beyond what the files give, and the statement that ends it. Empty when all is well.';

create or replace function dispatcher.mend_rights() returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_remedy text;
begin
  for v_remedy in
    select remedy from dispatcher.missing_rights()
    union all
    -- What another role gave on, by a grant option, stays: the operator decides.
    select remedy from dispatcher.schema_exposure() where remedy not like 'revoke grant option %'
  loop
    begin
      execute v_remedy;
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      raise warning '% (%): type this as the owner: %', sqlerrm, sqlstate, v_remedy;
    end;
  end loop;
end
$$;
comment on function dispatcher.mend_rights() is
  'Gives back what is missing and takes back what is too much, each by itself. Tells what it may not.';

create or replace function dispatcher.open_neighbours() returns setof text
language sql stable set search_path = ''
as $$
  select base.name
    from dispatcher.base_objects() as base
    join pg_catalog.pg_class as class on class.oid = to_regclass(base.name)
   where base.kind = 'table' and not dispatcher.owns(base.name) and not class.relrowsecurity
   order by 1
$$;
comment on function dispatcher.open_neighbours() is
  'Tables we share with YourHQ, not made by us, without row level security: theirs to close.';

select dispatcher.restrict_functions();

notify pgrst, 'reload schema';
commit;
