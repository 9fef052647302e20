-- The tables of YourHQ v0.2.3 that the dispatcher meets: created only where they are absent, equal to the
-- originals where it matters to us, never altered where they exist. What we make is recorded in
-- dispatcher.owned_objects in this transaction; only that gets row level security, policies and rights from us, each
-- time this file is applied. Safe to apply twice.
begin;
set local lock_timeout = '3s';

do $$
declare
  v_type record;
begin
  for v_type in
    select * from (values
      ('inbox_item_status', '''pending'', ''leased'', ''done'', ''dead_letter'', ''failed'''),
      ('inbox_event_type',
          '''task_assignment'', ''task_reassignment'', ''task_comment_mention'', ''routine_schedule'', '
          '''routine_event'', ''heartbeat'', ''deliverable_review'', ''blocker_resolved'''),
      ('agent_status', '''ready'', ''paused'', ''error'', ''provisioning'', ''hibernating'''),
      ('gateway_status', '''provisioning'', ''ready'', ''error'', ''hibernating'''),
      ('budget_status', '''ok'', ''warned'', ''exceeded'', ''unmetered'''),
      ('task_status', '''todo'', ''in_progress'', ''blocked'', ''done'', ''cancelled'', ''missed'''),
      ('task_priority', '''low'', ''medium'', ''high'', ''urgent'''),
      ('actor_type', '''human'', ''agent'', ''system'''),
      ('task_relation_type', '''blocks'', ''blocked_by'', ''relates_to'', ''parent_of'', ''child_of''')
    ) as enum_types(name, labels)
  loop
    if to_regtype('public.' || v_type.name) is null then
      execute format('create type public.%I as enum (%s)', v_type.name, v_type.labels);
    end if;
  end loop;
end
$$;

create or replace function dispatcher.base_objects() returns table (kind text, name text, comment text)
language sql immutable set search_path = ''
as $$
  values
    ('table', 'public.tenants', 'Who a row belongs to. Every look-up is scoped by one of these.'),
    ('table', 'public.workspace',
     'One per tenant: its name, the slug that stands before the agents'' ids, and the default budget.'),
    ('table', 'public.gateways', 'OpenClaw gateways: the machines on which agents run. A daemon serves one of them.'),
    ('table', 'public.agents', 'The agents, each on a gateway, with the status that says whether it may be woken.'),
    ('table', 'public.tasks',
     'What people and agents want done. Items speak of tasks; the dispatcher reads their titles.'),
    ('table', 'public.task_relations',
     'How tasks depend on one another; blocked_by is what the note in a wake''s message is made of.'),
    ('table', 'public.agent_inbox_items',
     'Work for agents: one row per item. The woken agent leases and closes it.'),
    ('table', 'public.agent_budgets',
     'What an agent may spend in a month, what it has spent, and whether that ends its wakes.'),
    ('table', 'public.agent_usage', 'What each run of an agent has used, as the gateway reports it.'),
    ('table', 'public.notifications',
     'What an operator should know: stalled agents, chains of wakes, escalations.'),
    ('function', 'public.current_tenant_id()', 'The tenant of the caller''s token, else the all-zero tenant.'),
    ('function', 'public.lease_inbox_item(uuid,integer)',
     'Leases the oldest item of an agent that has attempts left; spends one attempt.'),
    ('function', 'public.complete_inbox_item(uuid)', 'Closes an item as done.'),
    ('function', 'public.fail_inbox_item(uuid,text)',
     'Fails an item; dead_letter once its attempts are spent. The reason goes to context.last_failure_reason.')
$$;
comment on function dispatcher.base_objects() is
  'What of YourHQ''s schema this file makes where it is absent, and the comment it puts there.';

-- Ours is what is absent now, and what carries our comment: a build without this record made that.
insert into dispatcher.owned_objects (kind, name)
select kind, name
  from dispatcher.base_objects() as base
 where case kind when 'table' then to_regclass(name) is null or obj_description(to_regclass(name), 'pg_class') = comment
                 else to_regprocedure(name) is null or obj_description(to_regprocedure(name), 'pg_proc') = comment end
on conflict do nothing;

create or replace function dispatcher.owns(p_name text) returns boolean
language sql stable set search_path = ''
as $$
  select exists (select from dispatcher.owned_objects where name = p_name)
$$;
comment on function dispatcher.owns(text) is
  'Whether we made this table (public.agents) or function (public.fail_inbox_item(uuid,text)) of YourHQ''s schema.';

create table if not exists public.tenants (
  id uuid primary key default gen_random_uuid(),
  name text not null,
  slug text not null unique,
  status text not null default 'active',
  meta jsonb not null default '{}',
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now()
);

insert into public.tenants (id, name, slug)
select '00000000-0000-0000-0000-000000000000', 'Default', 'default'
where dispatcher.owns('public.tenants')
on conflict do nothing;

create table if not exists public.workspace (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000' unique
      references public.tenants (id) on delete cascade,
  name text not null default 'HQ',
  slug text,
  description text,
  initialized boolean not null default false,
  owner_name text,
  owner_email text,
  settings jsonb not null default '{}',
  default_agent_budget_usd numeric(12, 2),
  default_soft_threshold_pct integer not null default 80,
  default_hard_cutoff boolean not null default true,
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now()
);

create table if not exists public.gateways (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  slug text not null,
  label text not null,
  status public.gateway_status not null default 'ready',
  last_seen_at timestamptz,
  last_heartbeat_at timestamptz,
  meta jsonb not null default '{}',
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  unique (tenant_id, slug)
);

create table if not exists public.agents (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  gateway_id uuid references public.gateways (id) on delete set null,
  name text not null,
  slug text not null,
  description text,
  status public.agent_status not null default 'ready',
  last_seen_at timestamptz,
  last_heartbeat_at timestamptz,
  model text,
  thinking text,
  reports_to_id uuid references public.agents (id) on delete set null,
  domains text[] not null default '{}',
  capabilities text[],
  config jsonb not null default '{}',
  meta jsonb not null default '{}',
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  unique (tenant_id, slug)
);

create table if not exists public.tasks (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  title text not null,
  description text,
  status public.task_status not null default 'todo',
  priority public.task_priority,
  parent_id uuid references public.tasks (id) on delete set null,
  assignee_type public.actor_type,
  assignee_agent_id uuid references public.agents (id) on delete set null,
  model_override text,
  thinking_override text,
  due_date timestamptz,
  completed_at timestamptz,
  archived_at timestamptz,
  tags text[] not null default '{}',
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now()
);

create table if not exists public.task_relations (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  source_task_id uuid not null,
  target_task_id uuid not null,
  relation_type public.task_relation_type not null,
  created_by_type public.actor_type not null default 'human',
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  constraint task_relations_source_task_id_fkey foreign key (source_task_id)
      references public.tasks (id) on delete cascade,
  constraint task_relations_target_task_id_fkey foreign key (target_task_id)
      references public.tasks (id) on delete cascade
);
create index if not exists task_relations_by_source on public.task_relations (source_task_id, relation_type);

create table if not exists public.agent_inbox_items (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  agent_id uuid not null references public.agents (id) on delete cascade,
  agent_slug text not null,
  event_type public.inbox_event_type not null,
  task_id uuid references public.tasks (id) on delete cascade,
  comment_id uuid,
  contact_id uuid,
  status public.inbox_item_status not null default 'pending',
  leased_at timestamptz,
  leased_until timestamptz,
  completed_at timestamptz,
  failed_at timestamptz,
  attempt_count integer not null default 0,
  max_attempts integer not null default 3,
  summary text,
  context jsonb not null default '{}',
  last_wake_attempt_at timestamptz,
  last_wake_success_at timestamptz,
  dedup_key text not null,
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  constraint uq_inbox_dedup unique (tenant_id, dedup_key)
);

create table if not exists public.agent_budgets (
  agent_id uuid primary key references public.agents (id) on delete cascade,
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  monthly_limit_usd numeric(12, 2),
  soft_threshold_pct integer not null default 80,
  hard_cutoff boolean not null default true,
  period_anchor_tz text not null default 'UTC',
  current_period_start date not null default date_trunc('month', now())::date,
  current_period_spend_usd numeric(12, 6) not null default 0,
  current_period_tokens bigint not null default 0,
  current_period_metered_calls integer not null default 0,
  current_period_unmetered_calls integer not null default 0,
  status public.budget_status not null default 'ok',
  warned_at timestamptz,
  exceeded_at timestamptz,
  last_usage_at timestamptz,
  meta jsonb not null default '{}',
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now()
);

create table if not exists public.agent_usage (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  agent_id uuid references public.agents (id) on delete cascade,
  gateway_id uuid references public.gateways (id) on delete set null,
  session_id text,
  run_id text not null,
  provider text not null,
  model text not null,
  input_tokens bigint not null default 0,
  output_tokens bigint not null default 0,
  cache_read_tokens bigint not null default 0,
  cache_write_tokens bigint not null default 0,
  cost_input_usd numeric(12, 6),
  cost_output_usd numeric(12, 6),
  cost_total_usd numeric(12, 6),
  occurred_at timestamptz not null,
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  unique (run_id, provider, model, occurred_at)
);

create table if not exists public.notifications (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  type text not null,
  title text not null,
  body text,
  entity_type text,
  entity_id uuid,
  actor_type public.actor_type default 'system',
  actor_agent_id uuid references public.agents (id) on delete set null,
  read_at timestamptz,
  dismissed_at timestamptz,
  meta jsonb not null default '{}',
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now()
);

select dispatcher.publish_table('agent_inbox_items');

do $$
begin
  if dispatcher.owns('public.current_tenant_id()') then
    execute $f$
      create or replace function public.current_tenant_id() returns uuid
      language sql stable set search_path = ''
      as $body$
        -- YourHQ's claim. One at the top of a token is somebody else's. Without it: the all-zero tenant. One that is
        -- no id is no tenant's, and sees nothing.
        select case when claim.value is null then '00000000-0000-0000-0000-000000000000'::uuid
                    when claim.value ~ '^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$' then claim.value::uuid end
          from (select nullif(nullif(current_setting('request.jwt.claims', true), '')::jsonb
                                #>> '{app_metadata,tenant_id}', '') as value) as claim
      $body$
    $f$;
    revoke execute on function public.current_tenant_id() from public, anon;
    grant execute on function public.current_tenant_id() to authenticated, service_role;
  end if;

  if dispatcher.owns('public.lease_inbox_item(uuid,integer)') then
    execute $f$
      create or replace function public.lease_inbox_item(p_agent_id uuid, p_lease_seconds integer default 120)
      returns setof public.agent_inbox_items
      language sql volatile set search_path = ''
      as $body$
        update public.agent_inbox_items as item
           set status = 'leased', attempt_count = item.attempt_count + 1, leased_at = now(),
               leased_until = now() + make_interval(secs => p_lease_seconds), updated_at = now()
         where item.id = (select candidate.id from public.agent_inbox_items as candidate
                           where candidate.agent_id = p_agent_id
                             and candidate.attempt_count < candidate.max_attempts
                             and (candidate.status in ('pending', 'failed')
                                  or (candidate.status = 'leased' and candidate.leased_until < now()))
                           order by candidate.created_at
                           limit 1
                           for update skip locked)
        returning item.*
      $body$
    $f$;
    revoke execute on function public.lease_inbox_item(uuid, integer) from public, anon, authenticated;
    grant execute on function public.lease_inbox_item(uuid, integer) to service_role;
  end if;

  if dispatcher.owns('public.complete_inbox_item(uuid)') then
    execute $f$
      create or replace function public.complete_inbox_item(p_item_id uuid) returns void
      language sql volatile set search_path = ''
      as $body$
        update public.agent_inbox_items
           set status = 'done', completed_at = now(), leased_until = null, updated_at = now()
         where id = p_item_id
      $body$
    $f$;
    revoke execute on function public.complete_inbox_item(uuid) from public, anon, authenticated;
    grant execute on function public.complete_inbox_item(uuid) to service_role;
  end if;

  if dispatcher.owns('public.fail_inbox_item(uuid,text)') then
    execute $f$
      create or replace function public.fail_inbox_item(p_item_id uuid, p_reason text default null) returns void
      language sql volatile set search_path = ''
      as $body$
        update public.agent_inbox_items
           set status = case when attempt_count >= max_attempts then 'dead_letter'
               else 'failed' end::public.inbox_item_status,
               failed_at = now(), leased_until = null, updated_at = now(),
               context = context || jsonb_build_object('last_failure_reason', p_reason)
         where id = p_item_id
      $body$
    $f$;
    revoke execute on function public.fail_inbox_item(uuid, text) from public, anon, authenticated;
    grant execute on function public.fail_inbox_item(uuid, text) to service_role;
  end if;
end
$$;

do $$
declare
  v_table text;
  v_in_tenant text;
begin
  for v_table in select name from dispatcher.owned_objects where kind = 'table' order by name loop
    v_in_tenant := case v_table when 'public.tenants' then 'id' else 'tenant_id' end || ' = public.current_tenant_id()';
    execute format('alter table %s enable row level security', v_table);
    execute format('revoke all on %s from public, anon, authenticated', v_table);
    execute format('grant all on %s to service_role', v_table);
    execute format('grant select on %s to authenticated', v_table);
    execute format('drop policy if exists tenant_isolation on %s', v_table);
    execute format('create policy tenant_isolation on %s to authenticated using (%s) with check (%s)',
                   v_table, v_in_tenant, v_in_tenant);
  end loop;
  if dispatcher.owns('public.agent_inbox_items') then
    alter table public.agent_inbox_items replica identity full;
    -- The dashboard's Retry sets an item back to pending with the signed-in user's token.
    grant insert, update, delete on public.agent_inbox_items to authenticated;
  end if;
end
$$;

select dispatcher.guard_tenant(guarded.name, dispatcher.owns('public.' || guarded.name), variadic guarded.columns)
  from (values
    ('agents', array['gateway_id gateways', 'reports_to_id agents']),
    ('tasks', array['parent_id tasks', 'assignee_agent_id agents']),
    ('task_relations', array['source_task_id tasks', 'target_task_id tasks']),
    ('agent_inbox_items', array['agent_id agents', 'task_id tasks']),
    ('agent_budgets', array['agent_id agents']),
    ('agent_usage', array['agent_id agents', 'gateway_id gateways']),
    ('notifications', array['actor_agent_id agents'])) as guarded (name, columns);

do $$
declare
  v_base record;
begin
  for v_base in select * from dispatcher.base_objects() where dispatcher.owns(name) loop
    execute format('comment on %s %s is %L', v_base.kind, v_base.name, v_base.comment);
  end loop;
end
$$;

select dispatcher.restrict_functions();

notify pgrst, 'reload schema';
commit;
