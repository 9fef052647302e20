-- The schema of what is internal, the record of what was applied and of what we made, and the helpers every later
-- file uses to lock, publish and close what it creates. PostgREST does not expose this schema. Safe to apply twice.
begin;
set local lock_timeout = '3s';

create schema if not exists dispatcher;
comment on schema dispatcher is 'Internal to openclaw-dispatcher. What others may call stands in public.';
revoke all on schema dispatcher from public, anon, authenticated;
grant usage on schema dispatcher to service_role;

create table if not exists dispatcher.migrations (
  name text primary key,
  checksum text not null,
  applied_at timestamptz not null default now()
);
comment on table dispatcher.migrations is
  'What `dispatcher migrate` has applied: the name of each file and the SHA-256 of its content. Plain psql leaves no '
  'row here.';

create table if not exists dispatcher.owned_objects (
  kind text not null check (kind in ('table', 'function', 'view')),
  name text not null,
  recorded_at timestamptz not null default now(),
  primary key (kind, name)
);
comment on table dispatcher.owned_objects is
  'What we made under names of YourHQ''s because nothing had them. Only these get rights, policies and repairs from '
  'us. Written in the transaction that creates them.';

create table if not exists dispatcher.made_objects (
  kind text not null check (kind in ('function', 'view')),
  name text not null,
  recorded_at timestamptz not null default now(),
  primary key (kind, name)
);
comment on table dispatcher.made_objects is
  'Every function and view of schema public that a version of the dispatcher made here: only these are dropped when a '
  'later version has them no more.';

create table if not exists dispatcher.recorded_objects (
  kind text not null,
  name text not null,
  definition text not null,
  primary key (kind, name)
);
comment on table dispatcher.recorded_objects is
  'How this PostgreSQL writes the definitions of our objects (dispatcher.object_definitions), as the files made them. '
  'Kind record: the fingerprint they belong to, kept, or open while plain psql applies files. Empty it and migrate: '
  'what stands here then is what is right.';
-- Plain psql tells nobody what its files change; the last of them closes the record again.
update dispatcher.recorded_objects set definition = 'open'
 where kind = 'record' and coalesce(current_setting('dispatcher.runner', true), '') <> 'on';

do $$
declare
  v_table text;
begin
  foreach v_table in array array['migrations', 'owned_objects', 'made_objects', 'recorded_objects'] loop
    execute format('alter table dispatcher.%I enable row level security', v_table);
    execute format('revoke all on dispatcher.%I from public, anon, authenticated', v_table);
    execute format('grant select on dispatcher.%I to service_role', v_table);
  end loop;
end
$$;

create or replace function dispatcher.restrict_functions(p_names text[] default '{}') returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_function record;
begin
  for v_function in
    select oid::regprocedure as signature from pg_catalog.pg_proc
     where pronamespace = 'dispatcher'::regnamespace or (pronamespace = 'public'::regnamespace
       and proname = any (p_names))
  loop
    execute format('revoke execute on function %s from public, anon, authenticated', v_function.signature);
    execute format('grant execute on function %s to service_role', v_function.signature);
  end loop;
end
$$;
comment on function dispatcher.restrict_functions(text[]) is
  'Leaves the named functions of schema public, and all of schema dispatcher, to the service role alone. The default '
  'privileges of a Supabase project grant execute to anon and authenticated by name: revoking from public is not '
  'enough.';

create or replace function dispatcher.ensure_type(p_name text, p_attributes text) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_present text;
begin
  select string_agg(attribute.attname || ' ' || format_type(attribute.atttypid, attribute.atttypmod), ', '
      order by attribute.attnum) into v_present
    from pg_catalog.pg_type as type join pg_catalog.pg_attribute as attribute on attribute.attrelid = type.typrelid
   where type.typnamespace = 'dispatcher'::regnamespace and type.typname = p_name and attribute.attnum > 0
     and not attribute.attisdropped;
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
  'Makes a composite type of schema dispatcher what p_attributes says (names and types as format_type writes them); '
  'one that differs goes, with the functions that use it, which the files make anew.';

create or replace function dispatcher.lock_tables(variadic p_tables text[]) returns void
language plpgsql volatile set search_path = '' set lock_timeout = '250ms'
as $$
declare
  v_ends_at constant timestamptz := clock_timestamp()
    + coalesce(nullif(current_setting('dispatcher.lock_patience', true), ''), '3 s')::interval;
  v_table text;
begin
  loop
    begin
      foreach v_table in array p_tables loop
        execute format('lock table public.%I in share row exclusive mode', v_table);
      end loop;
      return;
    exception when lock_not_available then
      -- What this try had locked is free again: the application goes on during the pause.
      if clock_timestamp() > v_ends_at then
        raise;
      end if;
    end;
    perform pg_catalog.pg_sleep(0.1);
  end loop;
end
$$;
comment on function dispatcher.lock_tables(text[]) is
  'Locks up to four tables of schema public for new keys, triggers and indexes: all at once or none, for 3 s at most, '
  'or for as long as dispatcher.lock_patience says (then 55P03). Each try ends before the deadlock check of the '
  'application (1 s), so that it is never the application that is cancelled.';

create or replace function dispatcher.publish_table(p_table text) returns void
language plpgsql volatile set search_path = ''
as $$
begin
  if not exists (select from pg_catalog.pg_publication where pubname = 'supabase_realtime') then
    create publication supabase_realtime;
  end if;
  if not exists (select from pg_catalog.pg_publication_tables
                  where pubname = 'supabase_realtime' and schemaname = 'public' and tablename = p_table) then
    execute format('alter publication supabase_realtime add table public.%I', p_table);
  end if;
exception when insufficient_privilege then
  raise warning 'publication supabase_realtime is not ours to change: % was not added. Broadcasts need no publication; '
                'only the fallback postgres_changes does', p_table;
end
$$;
comment on function dispatcher.publish_table(text) is
  'Adds a table to the publication of Realtime''s postgres_changes. Without the right to do so it warns: broadcasts '
  'need no publication.';

create or replace function dispatcher.guard_tenant(p_table text, p_is_ours boolean, variadic p_references text[])
    returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_name constant text := 'tenant_of_' || p_table;
  v_columns text[] := array['tenant_id'];
  v_body text := '';
  v_reference text[];
begin
  for v_place in 1 .. cardinality(p_references) loop
    v_reference := string_to_array(p_references[v_place], ' ');
    v_columns := v_columns || v_reference[1];
    v_body := v_body || format($body$
  if new.%1$I is not null and (new.%1$I, new.tenant_id) is distinct from (old.%1$I, old.tenant_id)
     and not exists (select from public.%2$I as named
                      where named.id = new.%1$I and named.tenant_id = new.tenant_id) then
    raise exception 'row of %%: its %1$s %% is not of its tenant %%', tg_table_name, new.%1$I, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of %2$s of its own tenant alone.';
  end if;$body$, v_reference[1], v_reference[2]);
  end loop;
  execute format('create or replace function dispatcher.%I() returns trigger language plpgsql volatile '
                 'set search_path = %L as %L', v_name, '', 'begin' || v_body || E'\n  return null;\nend');
  execute format('comment on function dispatcher.%I() is %L', v_name,
                 format('Refuses (OD020) a row of %s that names a row of another tenant.', p_table));
  if p_is_ours then
    execute format('create or replace trigger dispatcher_tenant after insert or update of %s on public.%I for each row '
                   'execute function dispatcher.%I()',
                   (select string_agg(quote_ident(name), ', ') from unnest(v_columns) as name), p_table, v_name);
  end if;
end
$$;
comment on function dispatcher.guard_tenant(text, boolean, text[]) is
  'Has a table refuse rows that name a row of another tenant. p_references: column and table, as in "agent_id agents". '
  'On a table of YourHQ''s there is no trigger (p_is_ours is false): there such rows do not count.';

create or replace function dispatcher.is_secret(p_column text) returns boolean
language sql immutable parallel safe set search_path = ''
as $$
  select p_column ~ '(token|session_id|canary|secret|settings|claim_request|request_key|host_id|pid_started_at)$'
$$;
comment on function dispatcher.is_secret(text) is
  'Whether a column of a table of ours is for daemons alone: what proves that somebody holds something, and what tells '
  'of the host.';

create or replace function dispatcher.let_users_read(p_table text, p_rows text default null) returns void
language plpgsql volatile set search_path = ''
as $$
declare
  v_columns constant text := (
    select string_agg(quote_ident(attribute.attname), ', ' order by attribute.attnum)
      from pg_catalog.pg_attribute as attribute
     where attribute.attrelid = ('public.' || quote_ident(p_table))::regclass and attribute.attnum > 0
       and not attribute.attisdropped and not dispatcher.is_secret(attribute.attname));
begin
  execute format('revoke all on public.%I from authenticated', p_table);
  execute format('grant select (%s) on public.%I to authenticated', v_columns, p_table);
  execute format('drop policy if exists tenant_reads on public.%I', p_table);
  execute format('create policy tenant_reads on public.%I for select to authenticated using (%s)', p_table,
                 coalesce(p_rows, 'tenant_id = public.current_tenant_id()'));
end
$$;
comment on function dispatcher.let_users_read(text, text) is
  'Lets signed-in users read the rows of their tenant (or p_rows) of a table of ours, without the columns that are for '
  'daemons alone: they name the columns, `select *` is refused to them.';

select dispatcher.restrict_functions();

notify pgrst, 'reload schema';
commit;
