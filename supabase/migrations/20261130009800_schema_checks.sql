-- What stands in the database against what the files make, and who may reach it. `dispatcher migrate` reads these at
-- its end, the daemon at its start. Safe to apply twice.
begin;
set local lock_timeout = '3s';
-- What these functions read of the next file's does not exist yet.
set local check_function_bodies = off;

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
                       proc.proisstrict, proc.proconfig::text))
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
$$;
comment on function dispatcher.present_objects() is
  'Every function, table, view, type, column, constraint, index, trigger and policy of the schemas public and '
  'dispatcher, with what of its definition reads the same in every PostgreSQL.';

create or replace function dispatcher.schema_drift() returns table (kind text, name text, problem text)
language sql stable set search_path = ''
as $$
  with expected as (
    select expected.* from dispatcher.expected_objects() as expected
     where expected.base_of is null or dispatcher.owns(expected.base_of)
  ),
  present as materialized (
    select * from dispatcher.present_objects()
  )
  select expected.kind, expected.name, case when present.name is null then 'missing' else 'differs' end
    from expected
    left join present on present.kind = expected.kind and present.name = expected.name
   where (present.name is null or present.definition <> expected.definition)
         -- A table or view that is gone is told once, without its columns and all that stood on them.
     and (expected.kind in ('table', 'view', 'type', 'function')
          or exists (select from present as parent
                      where parent.kind in ('table', 'view', 'type')
                        and parent.name = regexp_replace(expected.name, '[.][^.]+$', '')))
  union all
  select present.kind, present.name, 'retired'
    from present
   where present.kind in ('function', 'view', 'trigger')
     and (present.name like 'dispatcher.%' or present.kind = 'trigger' and present.definition like 'dispatcher.%'
          or exists (select from dispatcher.made_objects as made
                      where made.kind = present.kind and made.name = present.name
                         or present.kind = 'trigger' and made.name = split_part(present.definition, ' ', 1) || '()'))
     and not exists (select from dispatcher.expected_objects() as expected
                      where expected.kind = present.kind and expected.name = present.name)
   order by 1, 2
$$;
comment on function dispatcher.schema_drift() is
  'What differs from what the files make: missing, differs, or retired (a function, view or trigger of an earlier '
  'version). Empty when all is well.';

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

create or replace function dispatcher.schema_exposure() returns table (name text, fault text)
language sql stable set search_path = ''
as $$
  with ours as (
    select distinct expected.kind, expected.name from dispatcher.expected_objects() as expected
     where expected.kind in ('table', 'view', 'function') and (expected.base_of is null
       or dispatcher.owns(expected.base_of))
    union
    select present.kind, present.name from dispatcher.present_objects() as present
     where present.kind in ('table', 'view', 'function') and present.name like 'dispatcher.%'
  ),
  relations as (
    select class.oid, class.oid::regclass::text as name, class.relkind, class.relowner, class.relrowsecurity,
        class.relacl
      from pg_catalog.pg_class as class
      join ours on ours.kind <> 'function' and class.oid = to_regclass(ours.name)
  ),
  grants as (
    select relations.name, grant_.grantee, grant_.privilege_type, 'relation' as kind
      from relations, pg_catalog.aclexplode(coalesce(relations.relacl,
          pg_catalog.acldefault('r', relations.relowner))) as grant_
    union all
    select relations.name || '.' || attribute.attname, grant_.grantee, grant_.privilege_type, 'relation'
      from relations
      join pg_catalog.pg_attribute as attribute on attribute.attrelid = relations.oid and attribute.attacl is not null,
           pg_catalog.aclexplode(attribute.attacl) as grant_
    union all
    select sequence.oid::regclass::text, grant_.grantee, grant_.privilege_type, 'sequence'
      from relations
      join pg_catalog.pg_depend as link on link.refobjid = relations.oid
          and link.refclassid = 'pg_catalog.pg_class'::regclass
                                       and link.classid = 'pg_catalog.pg_class'::regclass and link.deptype in ('a', 'i')
      join pg_catalog.pg_class as sequence on sequence.oid = link.objid and sequence.relkind = 'S',
           pg_catalog.aclexplode(coalesce(sequence.relacl, pg_catalog.acldefault('s', sequence.relowner))) as grant_
    union all
    select ours.name, grant_.grantee, grant_.privilege_type, 'function'
      from ours
      join pg_catalog.pg_proc as proc on ours.kind = 'function' and proc.oid = to_regprocedure(ours.name),
           pg_catalog.aclexplode(coalesce(proc.proacl, pg_catalog.acldefault('f', proc.proowner))) as grant_
    union all
    select 'schema dispatcher', grant_.grantee, grant_.privilege_type, 'schema'
      from pg_catalog.pg_namespace as namespace,
           pg_catalog.aclexplode(coalesce(namespace.nspacl, pg_catalog.acldefault('n', namespace.nspowner))) as grant_
     where namespace.nspname = 'dispatcher'
  )
  select relations.name, 'row level security is off' from relations
   where relations.relkind in ('r', 'p') and not relations.relrowsecurity
  union all
  select grants.name, string_agg(lower(grants.privilege_type), ', ' order by grants.privilege_type) || ' is granted to '
                      || coalesce(role.rolname, 'public')
    from grants
    left join pg_catalog.pg_roles as role on role.oid = grants.grantee
   where grants.grantee = 0 or role.rolname = 'anon'
      or (role.rolname = 'authenticated' and grants.kind <> 'relation' and grants.name <> 'public.current_tenant_id()')
   group by grants.name, role.rolname
   order by 1, 2
$$;
comment on function dispatcher.schema_exposure() is
  'Every table of ours without row level security, every right on anything of ours that public or anon holds, every '
  'function and sequence that authenticated may use. Empty when all is well.';

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
