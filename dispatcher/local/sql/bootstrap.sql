-- What a Supabase project has before its first migration, as far as this project meets it: roles, default privileges,
-- the auth and realtime schemas, the publication. Run at every start, so every statement is repeatable.
-- Connected as the superuser "postgres". The password of "authenticator" is set by the caller.

do $$
declare
  wanted constant text[][] := array[
    ['supabase_admin', 'superuser createdb createrole login replication bypassrls'],
    ['anon', 'nologin noinherit'],
    ['authenticated', 'nologin noinherit'],
    ['service_role', 'nologin noinherit bypassrls'],
    ['authenticator', 'login noinherit']
  ];
  entry text[];
begin
  foreach entry slice 1 in array wanted loop
    if not exists (select from pg_catalog.pg_roles where rolname = entry[1]) then
      begin
        execute format('create role %I with %s', entry[1], entry[2]);
      exception when duplicate_object or unique_violation then
        null; -- roles belong to the cluster: another database's bootstrap made it a moment ago
      end;
    end if;
  end loop;
end
$$;

grant anon, authenticated, service_role to authenticator;
alter role anon set statement_timeout = '3s';
alter role authenticated set statement_timeout = '8s';
alter role authenticator set statement_timeout = '8s';
alter role authenticator set lock_timeout = '8s';

create schema if not exists extensions;
grant usage on schema extensions to anon, authenticated, service_role;

-- A project's defaults: whatever a migration creates in public is open to all three roles BY NAME until it is
-- revoked from each of them by name. Rights tests are worth nothing without this.
grant usage on schema public to anon, authenticated, service_role;
alter default privileges for role postgres in schema public grant all on tables to anon, authenticated, service_role;
alter default privileges for role postgres in schema public grant all on sequences to anon, authenticated, service_role;
alter default privileges for role postgres in schema public grant all on functions to anon, authenticated, service_role;
alter default privileges for role supabase_admin in schema public
  grant all on tables to anon, authenticated, service_role;
alter default privileges for role supabase_admin in schema public
  grant all on sequences to anon, authenticated, service_role;
alter default privileges for role supabase_admin in schema public
  grant all on functions to anon, authenticated, service_role;

create schema if not exists auth;
grant usage on schema auth to anon, authenticated, service_role;

create or replace function auth.jwt() returns jsonb
language sql stable set search_path = '' as $$
  select nullif(current_setting('request.jwt.claims', true), '')::jsonb
$$;

create or replace function auth.uid() returns uuid
language sql stable set search_path = '' as $$
  select nullif(auth.jwt() ->> 'sub', '')::uuid
$$;

create or replace function auth.role() returns text
language sql stable set search_path = '' as $$
  select auth.jwt() ->> 'role'
$$;

create or replace function auth.email() returns text
language sql stable set search_path = '' as $$
  select auth.jwt() ->> 'email'
$$;

grant execute on all functions in schema auth to anon, authenticated, service_role;

create schema if not exists realtime;
grant usage on schema realtime to anon, authenticated, service_role;

-- One table instead of the server's daily partitions: the local server keeps it short itself.
create table if not exists realtime.messages (
  id uuid not null default gen_random_uuid() primary key,
  topic text not null,
  extension text not null,
  payload jsonb,
  event text,
  private boolean default false,
  updated_at timestamp not null default now(),
  inserted_at timestamp not null default now()
);
alter table realtime.messages enable row level security;
grant select, insert, update on realtime.messages to anon, authenticated, service_role;
create index if not exists messages_inserted_at_idx on realtime.messages (inserted_at);

create or replace function realtime.topic() returns text
language sql stable set search_path = '' as $$
  select nullif(current_setting('realtime.topic', true), '')
$$;

-- As on the real server: an error in sending is a warning and never the caller's failure.
create or replace function realtime.send(payload jsonb, event text, topic text, private boolean default true)
returns void
language plpgsql set search_path = '' as $$
declare
  message_id constant uuid := gen_random_uuid();
begin
  perform set_config('realtime.topic', send.topic, true);
  insert into realtime.messages (id, payload, event, topic, private, extension)
  values (
    message_id,
    case when send.payload ? 'id' then send.payload else jsonb_set(send.payload, '{id}', to_jsonb(message_id)) end,
    send.event, send.topic, send.private, 'broadcast'
  );
exception when others then
  raise warning 'ErrorSendingBroadcastMessage: %', sqlerrm;
end
$$;

-- The real server reads this table over replication; the local one listens, and pushes within a millisecond of commit.
create or replace function realtime.announce_message() returns trigger
language plpgsql set search_path = '' as $$
begin
  perform pg_notify('realtime_messages', new.id::text);
  return null;
end
$$;

create or replace trigger announce_message after insert on realtime.messages
for each row execute function realtime.announce_message();

grant execute on all functions in schema realtime to anon, authenticated, service_role;

do $$
begin
  if not exists (select from pg_catalog.pg_publication where pubname = 'supabase_realtime') then
    create publication supabase_realtime;
  end if;
end
$$;
