-- What the local Realtime needs in a database, beside what bootstrap.sql makes. Repeatable.

-- The real server sees stored generated columns; logical replication leaves them out unless it is told (PostgreSQL 18).
do $$
begin
  if current_setting('server_version_num')::int >= 180000 then
    execute 'alter publication supabase_realtime set (publish_generated_columns = stored)';
  end if;
end
$$;

create or replace function realtime.local_published(p_schema text, p_table text) returns setof oid
language sql stable set search_path = '' as $$
  select format('%I.%I', published.schemaname, published.tablename)::regclass::oid
  from pg_catalog.pg_publication_tables as published
  where published.pubname = 'supabase_realtime'
    and p_schema in (published.schemaname, '*')
    and p_table in (published.tablename, '*')
  order by 1
$$;
comment on function realtime.local_published(text, text) is
  'Object ids of the published tables that a postgres_changes entry means. "*" means every one.';

create or replace function realtime.local_columns(p_relation oid)
returns table (attnum smallint, name text, type_name text, cast_to text, is_key boolean)
language sql stable set search_path = '' as $$
  select a.attnum, a.attname::text, base.typname::text,
    -- Without the length or precision, as the real server casts: char(5) becomes one character.
    pg_catalog.format_type(base.oid, null),
    coalesce(a.attnum = any (i.indkey), false)
  from pg_catalog.pg_attribute as a
  join pg_catalog.pg_type as declared on declared.oid = a.atttypid
  join pg_catalog.pg_type as base on base.oid = coalesce(nullif(declared.typbasetype, 0), declared.oid)
  left join pg_catalog.pg_index as i on i.indrelid = a.attrelid and i.indisprimary
  where a.attrelid = p_relation and a.attnum > 0 and not a.attisdropped
  order by a.attnum
$$;
comment on function realtime.local_columns(oid) is
  'Columns of a table in order, with the type names that go out and the type that a value is cast to.';

create or replace function realtime.local_table(p_relation oid, p_roles text[]) returns jsonb
language sql stable set search_path = '' as $$
  select jsonb_build_object(
    'schema', n.nspname,
    'name', c.relname,
    'rls', c.relrowsecurity,
    'columns', (
      select jsonb_agg(jsonb_build_object(
        'name', col.name, 'type', col.type_name, 'cast', col.cast_to, 'key', col.is_key,
        'readers', (
          select coalesce(jsonb_agg(r.role), '[]')
          from unnest(p_roles) as r (role)
          where exists (select from pg_catalog.pg_roles where rolname = r.role)
            and pg_catalog.has_column_privilege(r.role, p_relation, col.attnum, 'select')
        )
      ) order by col.attnum)
      from realtime.local_columns(p_relation) as col
    )
  )
  from pg_catalog.pg_class as c
  join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
  where c.oid = p_relation
$$;
comment on function realtime.local_table(oid, text[]) is
  'What is needed to write a change of this table: columns, which of them each role may read, row level security.';

create or replace function realtime.local_check_filter(p_relation oid, p_role text, p_filter jsonb) returns void
language plpgsql stable set search_path = '' as $$
declare
  type_name text;
  candidate text;
begin
  select col.cast_to into type_name
  from realtime.local_columns(p_relation) as col
  where col.name = p_filter ->> 'column'
    and pg_catalog.has_column_privilege(p_role, p_relation, col.attnum, 'select');
  if not found then
    raise exception 'invalid column for filter %', p_filter ->> 'column';
  end if;
  if p_filter ->> 'operator' = 'is' then
    if lower(p_filter ->> 'value') not in ('null', 'true', 'false', 'unknown') then
      raise exception 'invalid value for is filter: must be null, true, false, or unknown';
    end if;
  elsif p_filter ->> 'operator' not in ('like', 'ilike', 'match', 'imatch') then
    for candidate in select jsonb_array_elements_text(p_filter -> 'values') loop
      execute format('select %L::%s', candidate, type_name);
    end loop;
  end if;
end
$$;
comment on function realtime.local_check_filter(oid, text, jsonb) is
  'Raises what the real server raises for a filter on an unknown column or with a value of another type.';

create or replace function realtime.local_subscribe(
  p_role text, p_schema text, p_table text, p_filters jsonb, p_select text[]
) returns oid[]
language plpgsql stable set search_path = '' as $$
declare
  relations constant oid[] := array(select realtime.local_published(p_schema, p_table));
  relation oid;
  wanted text;
begin
  if cardinality(relations) = 0 then
    return relations;
  end if;
  perform pg_catalog.quote_ident(p_role)::regrole;
  foreach relation in array relations loop
    perform realtime.local_check_filter(relation, p_role, f.condition)
    from jsonb_array_elements(p_filters) as f (condition);
    foreach wanted in array coalesce(p_select, '{}') loop
      if not exists (select from realtime.local_columns(relation) as col where col.name = wanted) then
        raise exception 'invalid column for select %', wanted;
      end if;
    end loop;
  end loop;
  return relations;
end
$$;
comment on function realtime.local_subscribe(text, text, text, jsonb, text[]) is
  'The tables that an entry subscribes to, none when none is published. Raises for a bad role, filter or column.';

create or replace function realtime.local_published_state() returns text
language sql stable set search_path = '' as $$
  select string_agg(format('%s.%s', schemaname, tablename), ',' order by schemaname, tablename)
  from pg_catalog.pg_publication_tables
  where pubname = 'supabase_realtime'
$$;
comment on function realtime.local_published_state() is
  'Changes whenever the set of published tables changes.';
