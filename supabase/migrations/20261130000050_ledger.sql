-- The schema of what is internal: PostgREST does not expose it, and nobody but the service role may look into it.

create schema if not exists dispatcher;
comment on schema dispatcher is 'Internal to openclaw-dispatcher. What others may call stands in public.';
revoke all on schema dispatcher from public;
grant usage on schema dispatcher to service_role;

create or replace function dispatcher.restrict_functions(p_names text[] default '{}') returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_function record;
begin
  for v_function in
    select oid::regprocedure as signature from pg_catalog.pg_proc
     where pronamespace = 'dispatcher'::regnamespace or (pronamespace = 'public'::regnamespace and proname = any (p_names))
  loop
    execute format('revoke execute on function %s from public, anon, authenticated', v_function.signature);
    execute format('grant execute on function %s to service_role', v_function.signature);
  end loop;
end
$$;
comment on function dispatcher.restrict_functions(text[]) is
  'Leaves the named functions of schema public, and all of schema dispatcher, to the service role alone. The default privileges of a Supabase project grant execute to anon and authenticated by name: revoking from public is not enough.';

create or replace function dispatcher.ensure_type(p_name text, p_attributes text) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_present text;
begin
  select string_agg(attribute.attname || ' ' || format_type(attribute.atttypid, attribute.atttypmod), ', ' order by attribute.attnum) into v_present
    from pg_catalog.pg_type as type join pg_catalog.pg_attribute as attribute on attribute.attrelid = type.typrelid
   where type.typnamespace = 'dispatcher'::regnamespace and type.typname = p_name and attribute.attnum > 0 and not attribute.attisdropped;
  if v_present is not distinct from p_attributes then
    return;
  end if;
  if v_present is not null then
    execute format('drop type dispatcher.%I cascade', p_name);
  end if;
  execute format('create type dispatcher.%I as (%s)', p_name, p_attributes);
end
$$;
comment on function dispatcher.ensure_type(text, text) is
  'Makes a composite type of schema dispatcher what p_attributes says (names and types as format_type writes them); one that differs goes, with the functions that use it, which the files make anew.';
