-- Workflow runs: their queue, who they are routed to, what they may cost, and the trail they leave. Safe to apply
-- twice.
begin;
set local lock_timeout = '3s';
select dispatcher.lock_tables('tenants', 'gateways');

create table if not exists public.departments (
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  id text not null default gen_random_uuid()::text check (id <> ''),
  name text not null,
  created_at timestamptz not null default now(),
  primary key (tenant_id, id)
);
comment on table public.departments is 'Departments agents belong to, for budgets.';

create table if not exists public.agent_profiles (
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  agent_id text not null check (agent_id <> ''),
  department_id text,
  display_name text,
  role text,
  capabilities text[] not null default '{}',
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  primary key (tenant_id, agent_id)
);
comment on table public.agent_profiles is
  'What an agent (by slug) is in the organisation: department, role, capabilities. A department without a row in '
  'departments is a name of its own.';
create index if not exists agent_profiles_by_department on public.agent_profiles (tenant_id, department_id)
    where department_id is not null;

create table if not exists public.workflow_agent_routing (
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  workflow_type text not null check (workflow_type <> ''),
  agent_id text not null check (agent_id <> ''),
  priority integer not null default 0 check (priority between -1000000 and 1000000),
  max_concurrent integer not null default 1 check (max_concurrent >= 0),
  timeout_minutes integer not null default 60 check (timeout_minutes > 0),
  created_at timestamptz not null default now(),
  primary key (tenant_id, workflow_type)
);
comment on table public.workflow_agent_routing is
  'Which agent (slug) runs a workflow type, how many at once (0: none), and for how long.';

create table if not exists public.workflow_runs (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  workflow_type text not null check (workflow_type <> ''),
  status text not null default 'queued' constraint workflow_runs_status_known check (status in (
    'queued', 'dispatched', 'claimed', 'running', 'waiting_for_approval', 'blocked', 'completed', 'failed',
        'timed_out', 'cancelled')),
  priority integer not null default 0 check (priority between -1000000 and 1000000),
  initiator text,
  task_id text,
  owner_agent_id text,
  pinned_agent_id text check (pinned_agent_id <> ''),
  dispatch_attempts integer not null default 0 check (dispatch_attempts >= 0),
  release_count integer not null default 0 check (release_count >= 0),
  queued_at timestamptz not null default now(),
  dispatched_at timestamptz,
  claimed_at timestamptz,
  claimed_by text,
  started_at timestamptz,
  finished_at timestamptz,
  deadline_at timestamptz,
  last_heartbeat_at timestamptz,
  next_attempt_at timestamptz check (isfinite(next_attempt_at)),
  claim_token uuid,
  session_id text,
  wake_id uuid,
  paused_from text check (paused_from in ('queued', 'dispatched', 'claimed', 'running')),
  paused_at timestamptz,
  blocker_type text,
  blocker_description text,
  escalated_to text,
  last_error text,
  last_error_at timestamptz,
  input_payload jsonb not null default '{}',
  output_summary jsonb,
  input_tokens bigint,
  output_tokens bigint,
  cached_tokens bigint,
  model_id text,
  cost_estimate numeric(12, 6),
  currency text not null default 'USD',
  reserved_usd numeric(12, 6),
  reserved_tokens bigint,
  assumed_usd numeric(12, 6),
  assumed_tokens bigint,
  reported_at timestamptz,
  kept_status text check (kept_status in ('completed', 'failed')),
  kept_error text,
  request_key text,
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  constraint workflow_runs_dispatched_has_time check (status <> 'dispatched'
      or (dispatched_at is not null and owner_agent_id is not null)),
  constraint workflow_runs_claimed_is_held check (status not in ('claimed', 'running')
    or (claimed_at is not null and claim_token is not null and deadline_at is not null)),
  constraint workflow_runs_running_has_start check (status <> 'running' or started_at is not null),
  constraint workflow_runs_finished_has_time check ((status in ('completed', 'failed', 'timed_out',
      'cancelled')) = (finished_at is not null)),
  constraint workflow_runs_paused_knows_from check ((status in ('waiting_for_approval',
      'blocked')) = (paused_from is not null)),
  constraint workflow_runs_paused_knows_since check ((paused_from is null) = (paused_at is null))
);
comment on table public.workflow_runs is
  'The queue of workflow runs and their whole life. Cost and tokens that are NULL were not reported; they are never '
  'taken as zero.';
comment on column public.workflow_runs.task_id is 'The task the run serves, of tasks or of another system.';
comment on column public.workflow_runs.owner_agent_id is 'Slug of the agent it was dispatched to.';
comment on column public.workflow_runs.pinned_agent_id is
  'Slug of the agent it was reassigned to; wins over the route.';
comment on column public.workflow_runs.deadline_at is
  'When a claimed or running run is timed out; set at the claim from the route, put off by what it is held.';
comment on column public.workflow_runs.paused_from is
  'Where a held run returns to; from dispatched, claimed or running it keeps its slot and its reservation.';
comment on column public.workflow_runs.paused_at is 'Since when it is held.';
comment on column public.workflow_runs.claim_token is 'The fence of the present claim.';
comment on column public.workflow_runs.wake_id is 'The wake whose process works on it, where the daemon started one.';
alter table public.workflow_runs add column if not exists assumed_usd numeric(12, 6),
  add column if not exists assumed_tokens bigint, add column if not exists kept_error text,
  add column if not exists kept_status text check (kept_status in ('completed', 'failed'));
comment on column public.workflow_runs.cost_estimate is 'What the agent reported it cost, in all.';
comment on column public.workflow_runs.reserved_usd is
  'What was set aside for it at its dispatch. While it is open, what it has not reported of that counts in budgets.';
comment on column public.workflow_runs.assumed_usd is
  'What counts for it where it ended without a report of its cost: what was reserved, at least the configured '
  'estimate.';
comment on column public.workflow_runs.assumed_tokens is 'The same in tokens.';
comment on column public.workflow_runs.reported_at is
  'When cost or tokens were last reported. A cost without it is a guess of whoever queued the run.';
comment on column public.workflow_runs.kept_status is
  'How its session ended it while it was held; applied when it goes on.';
comment on column public.workflow_runs.kept_error is 'The reason that came with kept_status failed.';
create index if not exists workflow_runs_queued on public.workflow_runs (tenant_id, workflow_type, priority, queued_at)
    where status = 'queued';
drop index if exists public.workflow_runs_unrouted;
create index if not exists workflow_runs_no_route on public.workflow_runs (tenant_id, workflow_type)
  where status = 'queued' and blocker_type = 'no_route';
create index if not exists workflow_runs_active on public.workflow_runs (tenant_id, workflow_type, status)
  where status in ('dispatched', 'claimed', 'running');
create index if not exists workflow_runs_held_active on public.workflow_runs (tenant_id, workflow_type)
  where paused_from in ('dispatched', 'claimed', 'running');
create index if not exists workflow_runs_dispatched_to on public.workflow_runs (tenant_id, owner_agent_id,
    dispatched_at) where status = 'dispatched';
create index if not exists workflow_runs_finished on public.workflow_runs (tenant_id, finished_at)
    where finished_at is not null;
create index if not exists workflow_runs_newest on public.workflow_runs (tenant_id, created_at desc);
drop index if exists public.workflow_runs_accounted, public.workflow_runs_reported;
alter table public.workflow_runs drop column if exists accounted_at;
create index if not exists workflow_runs_reported_cost on public.workflow_runs (tenant_id, workflow_type,
    reported_at desc) include (cost_estimate)
  where reported_at is not null and finished_at is not null and cost_estimate > 0 and cost_estimate < 'Infinity';
create index if not exists workflow_runs_reported_tokens on public.workflow_runs (tenant_id, workflow_type,
    reported_at desc) include (input_tokens, output_tokens)
  where reported_at is not null and finished_at is not null and greatest(input_tokens, output_tokens) > 0;
create unique index if not exists workflow_runs_once on public.workflow_runs (tenant_id, request_key)
    where request_key is not null;
create index if not exists workflow_runs_by_wake on public.workflow_runs (wake_id) where wake_id is not null;

create table if not exists public.workflow_run_transitions (
  from_status text not null,
  to_status text not null,
  meaning text not null,
  needs_override boolean not null default false,
  primary key (from_status, to_status)
);
comment on table public.workflow_run_transitions is
  'The whole state table of a run: what is not in it is refused. needs_override: only override_failure, which is '
  'audited, may do it.';

insert into public.workflow_run_transitions (from_status, to_status, meaning, needs_override) values
  ('queued', 'dispatched', 'handed to the agent its type is routed to', false),
  ('dispatched', 'dispatched', 'nobody claimed it in time: a fresh attempt', false),
  ('dispatched', 'queued', 'taken back without spending an attempt: held by a budget, or its route is gone', false),
  ('dispatched', 'claimed', 'an agent''s session took it', false),
  ('dispatched', 'failed', 'nobody claimed it in any of its attempts', false),
  ('claimed', 'running', 'first heartbeat', false),
  ('claimed', 'queued', 'released: by the agent, or for want of a heartbeat', false),
  ('claimed', 'failed', 'failed before its first heartbeat, or released too often', false),
  ('claimed', 'timed_out', 'over its deadline', false),
  ('running', 'queued', 'released: by the agent, or for want of a heartbeat', false),
  ('running', 'completed', 'the agent finished it', false),
  ('running', 'failed', 'the agent gave it up, or it was released too often', false),
  ('running', 'timed_out', 'over its deadline', false),
  ('queued', 'cancelled', 'stopped by an operator or a budget', false),
  ('dispatched', 'cancelled', 'stopped by an operator or a budget', false),
  ('claimed', 'cancelled', 'stopped by an operator or a budget', false),
  ('running', 'cancelled', 'stopped by an operator or a budget', false),
  ('queued', 'waiting_for_approval', 'an approval is asked for', false),
  ('dispatched', 'waiting_for_approval', 'an approval is asked for', false),
  ('claimed', 'waiting_for_approval', 'an approval is asked for', false),
  ('running', 'waiting_for_approval', 'an approval is asked for', false),
  ('queued', 'blocked', 'paused or blocked', false),
  ('dispatched', 'blocked', 'paused or blocked', false),
  ('claimed', 'blocked', 'paused or blocked', false),
  ('running', 'blocked', 'paused or blocked', false),
  ('waiting_for_approval', 'blocked', 'an approval was rejected', false),
  ('blocked', 'waiting_for_approval', 'an approval is asked for', false),
  ('waiting_for_approval', 'queued', 'back to where it was', false),
  ('waiting_for_approval', 'dispatched', 'back to where it was', false),
  ('waiting_for_approval', 'claimed', 'back to where it was', false),
  ('waiting_for_approval', 'running', 'back to where it was', false),
  ('blocked', 'queued', 'back to where it was', false),
  ('blocked', 'dispatched', 'back to where it was', false),
  ('blocked', 'claimed', 'back to where it was', false),
  ('blocked', 'running', 'back to where it was', false),
  ('waiting_for_approval', 'cancelled', 'stopped by an operator', false),
  ('blocked', 'cancelled', 'stopped by an operator', false),
  ('failed', 'queued', 'tried again by override_failure', true),
  ('timed_out', 'queued', 'tried again by override_failure', true)
on conflict (from_status, to_status) do update set meaning = excluded.meaning, needs_override = excluded.needs_override;

create table if not exists public.workflow_run_events (
  id bigint generated always as identity primary key,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  run_id uuid not null,
  from_status text not null,
  to_status text not null,
  attempt integer not null,
  actor text,
  reason text,
  at timestamptz not null default clock_timestamp()
);
comment on table public.workflow_run_events is 'One row per transition of a run, written by trigger. Append-only.';
comment on column public.workflow_run_events.run_id is
  'The run. No foreign key: what happened to a run stays known when the run is deleted.';
alter table public.workflow_run_events drop constraint if exists workflow_run_events_run_id_fkey;
create index if not exists workflow_run_events_by_run on public.workflow_run_events (run_id, id);

create table if not exists public.workflow_claims (
  claim_token uuid primary key,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  run_id uuid not null references public.workflow_runs (id) on delete cascade,
  workflow_type text not null,
  agent_id text,
  session_id text not null,
  attempt integer not null,
  claimed_at timestamptz not null default now(),
  ended_at timestamptz,
  ended_as text,
  wake_id uuid,
  worked_at timestamptz,
  cost_usd numeric(12, 6),
  tokens bigint,
  constraint workflow_claims_ended_as_something check ((ended_at is null) = (ended_as is null))
);
comment on table public.workflow_claims is
  'Every claim of a run: which session held which attempt and how that ended. cost_usd and tokens: what is booked for '
  'a claim that its run has left behind.';
alter table public.workflow_claims add column if not exists wake_id uuid;
comment on column public.workflow_claims.wake_id is
  'The wake it was made in. No foreign key, as for workflow_runs.wake_id: its check would wait for whoever holds the '
  'wake.';
alter table public.workflow_claims drop constraint if exists workflow_claims_wake_id_fkey;
alter table public.workflow_runs drop constraint if exists workflow_runs_wake_id_fkey;
alter table public.workflow_claims add column if not exists worked_at timestamptz;
create index if not exists workflow_claims_by_wake on public.workflow_claims (wake_id) where wake_id is not null;
create index if not exists workflow_claims_by_run on public.workflow_claims (run_id, claimed_at);
drop index if exists public.workflow_claims_accounted;
alter table public.workflow_claims drop column if exists accounted_at;

create table if not exists public.workflow_bookings (
  id bigint generated always as identity primary key,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  run_id uuid not null,
  attempt integer not null,
  agent_id text,
  workflow_type text not null,
  at timestamptz not null default now(),
  cost_usd numeric(14, 6) not null check (cost_usd <> 'NaN'),
  tokens bigint not null,
  source text not null check (source in ('report', 'assumed', 'correction')),
  constraint workflow_bookings_book_something check (cost_usd <> 0 or tokens <> 0)
);
comment on table public.workflow_bookings is
  'The books of workflow runs: what each report, end without a report or correction added to what was booked before '
  '(or took from it), in the moment it arrived. Budgets, stats and reports are sums of it. Append-only.';
comment on column public.workflow_bookings.run_id is
  'The run. No foreign key: what was spent stays spent when the row of its run is deleted.';
comment on column public.workflow_bookings.agent_id is 'Slug of the agent it was spent by.';
comment on column public.workflow_bookings.source is
  'report: of the agent. assumed: an end without a report. correction: of an operator.';
create index if not exists workflow_bookings_of_period on public.workflow_bookings (tenant_id, at)
  include (agent_id, workflow_type, cost_usd, tokens);
create index if not exists workflow_bookings_by_run on public.workflow_bookings (run_id);

create table if not exists public.workflow_notifications (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  run_id uuid not null references public.workflow_runs (id) on delete cascade,
  attempt integer not null,
  agent_id text not null,
  gateway_id uuid references public.gateways (id) on delete cascade,
  state text not null default 'pending' check (state in ('pending', 'sending', 'sent', 'failed', 'obsolete')),
  tries integer not null default 0,
  next_try_at timestamptz not null default now(),
  claim_token uuid,
  claimed_until timestamptz,
  last_error text,
  sent_at timestamptz,
  created_at timestamptz not null default now(),
  unique (run_id, attempt),
  constraint workflow_notifications_sending_is_claimed check ((state = 'sending') = (claim_token is not null
      and claimed_until is not null)),
  constraint workflow_notifications_sent_has_time check ((state = 'sent') = (sent_at is not null))
);
comment on table public.workflow_notifications is
  'The outbox: one row per dispatch, to be told to its agent by the daemon of its gateway (any daemon of the tenant '
  'where the agent has none).';
create index if not exists workflow_notifications_by_age on public.workflow_notifications (tenant_id, created_at);
create index if not exists workflow_notifications_due on public.workflow_notifications (tenant_id, next_try_at)
    where state in ('pending', 'sending');

create table if not exists public.workflow_respawns (
  run_id uuid not null references public.workflow_runs (id) on delete cascade,
  attempt integer not null,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  wake_id uuid references public.agent_wakes (id) on delete set null,
  session_id text not null,
  previous_session_id text,
  created_at timestamptz not null default now(),
  primary key (run_id, attempt)
);
comment on table public.workflow_respawns is
  'Orphans that were spawned again: at most one row per attempt of a run, whatever restarts in between.';
create index if not exists workflow_respawns_by_wake on public.workflow_respawns (wake_id) where wake_id is not null;

create table if not exists public.workflow_approvals (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  run_id uuid not null references public.workflow_runs (id) on delete cascade,
  step_name text not null,
  approver_id text,
  status text not null default 'pending' check (status in ('pending', 'approved', 'rejected', 'cancelled', 'expired')),
  note text,
  requested_by text,
  decided_by text,
  decided_at timestamptz,
  due_at timestamptz,
  expires_at timestamptz,
  escalated_to text,
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now()
);
comment on table public.workflow_approvals is 'Approvals a run waits for.';
create index if not exists workflow_approvals_by_run on public.workflow_approvals (run_id, status);
create index if not exists workflow_approvals_expiring on public.workflow_approvals (tenant_id, expires_at)
    where status = 'pending' and expires_at is not null;

create table if not exists public.budgets (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  name text not null check (name <> ''),
  scope text not null check (scope in ('agent', 'department', 'project', 'fleet')),
  scope_id text check (scope_id <> ''),
  period text not null check (period in ('daily', 'weekly', 'monthly')),
  timezone text not null default 'UTC',
  cap_usd numeric(14, 6) check (cap_usd >= 0 and cap_usd <> 'NaN'),
  cap_tokens bigint check (cap_tokens >= 0),
  action_on_exceed text not null default 'warn' check (action_on_exceed in ('warn', 'pause_new_runs', 'hard_stop')),
  active boolean not null default true,
  fail_closed boolean not null default false,
  revision integer not null default 1,
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  constraint budgets_fleet_has_no_scope_id check ((scope = 'fleet') = (scope_id is null)),
  constraint budgets_one_cap check (num_nonnulls(cap_usd, cap_tokens) = 1)
);
comment on table public.budgets is
  'What may be spent per period of its zone by an agent, a department, a project (a workflow type) or the whole '
  'fleet. fail_closed: holds runs when it cannot be evaluated.';
alter table public.budgets add column if not exists revision integer not null default 1;
comment on column public.budgets.revision is
  'One more with every change of cap or action: what happens after it is told anew.';
create unique index if not exists budgets_one_active on public.budgets (tenant_id, scope, coalesce(scope_id, ''),
    period) where active;

create table if not exists public.budget_events (
  id bigint generated always as identity primary key,
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  budget_id uuid not null references public.budgets (id) on delete cascade,
  period_key text not null,
  event_kind text not null check (event_kind in ('warned', 'paused', 'hard_stopped', 'recovered')),
  detail jsonb not null default '{}',
  created_at timestamptz not null default clock_timestamp(),
  revision integer not null default 1,
  constraint budget_events_once unique (budget_id, period_key, event_kind, revision)
);
comment on table public.budget_events is
  'Breaches of budgets and their ends: each kind once per budget, period and revision of the budget.';
alter table public.budget_events add column if not exists revision integer not null default 1;
do $$
begin
  if not exists (select from pg_catalog.pg_constraint where conrelid = 'public.budget_events'::regclass
      and conname = 'budget_events_once' and pg_catalog.pg_get_constraintdef(oid) like '%revision%') then
    alter table public.budget_events drop constraint if exists budget_events_once;
    alter table public.budget_events add constraint budget_events_once
      unique (budget_id, period_key, event_kind, revision);
  end if;
end
$$;

-- A YourHQ database has an audit_log of another shape already: ours has a name of its own, and the short one where it
-- is free.
create table if not exists public.workflow_audit_log (
  id bigint generated always as identity primary key,
  tenant_id uuid not null default '00000000-0000-0000-0000-000000000000'
      references public.tenants (id) on delete cascade,
  actor text not null,
  action text not null,
  class text,
  severity text,
  target text,
  before jsonb,
  after jsonb,
  allowed boolean not null default true,
  at timestamptz not null default now()
);
comment on table public.workflow_audit_log is 'Who did, or was denied, what to which run. Denials are audited too.';
create index if not exists workflow_audit_log_by_time on public.workflow_audit_log (tenant_id, at desc);

insert into dispatcher.owned_objects (kind, name)
select 'view', 'public.audit_log'
 where to_regclass('public.audit_log') is null
    or obj_description(to_regclass('public.audit_log'),
        'pg_class') = 'workflow_audit_log under its short name, where no other table has it.'
on conflict do nothing;

do $$
begin
  if dispatcher.owns('public.audit_log') then
    create or replace view public.audit_log with (security_invoker = true) as
      select id, tenant_id, actor, action, class, severity, target, before, after, allowed, at
          from public.workflow_audit_log;
    comment on view public.audit_log is 'workflow_audit_log under its short name, where no other table has it.';
    revoke all on public.audit_log from public, anon, authenticated, service_role;
    grant select on public.audit_log to service_role;
    grant select on public.audit_log to authenticated;
  end if;
end
$$;

-- A respawned orphan is a wake like any other, on a path of its own.
alter table public.agent_wakes add column if not exists workflow_run_id uuid
    references public.workflow_runs (id) on delete set null;
alter table public.agent_wakes drop column if exists stop_cause;
comment on column public.agent_wakes.workflow_run_id is 'The orphaned run this wake was started for.';
create index if not exists agent_wakes_by_workflow_run on public.agent_wakes (workflow_run_id)
    where workflow_run_id is not null;

do $$
begin
  if not exists (select from pg_catalog.pg_constraint where conrelid = 'public.agent_wakes'::regclass
      and conname = 'agent_wakes_path_check'
                    and pg_catalog.pg_get_constraintdef(oid) like '%workflow%') then
    alter table public.agent_wakes drop constraint if exists agent_wakes_path_check;
    alter table public.agent_wakes add constraint agent_wakes_path_check
      check (path in ('event', 'sweep', 'waitlist', 'due', 'command', 'workflow'));
  end if;
  perform dispatcher.publish_table('workflow_runs');
end
$$;

select dispatcher.guard_tenant('agent_wakes', true, 'agent_id agents', 'gateway_id gateways',
                               'instance_id dispatcher_instances', 'workflow_run_id workflow_runs');
select dispatcher.guard_tenant('workflow_runs', true, 'wake_id agent_wakes');
select dispatcher.guard_tenant('workflow_run_events', true, 'run_id workflow_runs');
select dispatcher.guard_tenant('workflow_claims', true, 'run_id workflow_runs', 'wake_id agent_wakes');
select dispatcher.guard_tenant('workflow_notifications', true, 'run_id workflow_runs', 'gateway_id gateways');
select dispatcher.guard_tenant('workflow_respawns', true, 'run_id workflow_runs', 'wake_id agent_wakes');
select dispatcher.guard_tenant('workflow_approvals', true, 'run_id workflow_runs');
select dispatcher.guard_tenant('budget_events', true, 'budget_id budgets');

do $$
declare
  v_table text;
begin
  foreach v_table in array array['departments', 'agent_profiles', 'workflow_agent_routing', 'workflow_runs',
      'workflow_run_transitions',
                                 'workflow_run_events', 'workflow_claims', 'workflow_bookings',
                                     'workflow_notifications', 'workflow_respawns', 'workflow_approvals',
                                 'budgets', 'budget_events', 'workflow_audit_log'] loop
    execute format('alter table public.%I enable row level security', v_table);
    execute format('revoke all on public.%I from public, anon, authenticated', v_table);
    execute format('grant all on public.%I to service_role', v_table);
    if v_table not in ('workflow_claims', 'workflow_notifications', 'workflow_respawns') then
      perform dispatcher.let_users_read(v_table, case v_table when 'workflow_run_transitions' then 'true' end);
    end if;
  end loop;
  perform dispatcher.let_users_read('agent_wakes');  -- it has more columns by now
  -- Written by their functions alone, never changed: also for the service role.
  revoke insert, update, delete, truncate on public.workflow_run_events, public.workflow_bookings,
    public.workflow_audit_log from service_role;
end
$$;

-- Default privileges of a Supabase project open sequences to anon and authenticated by name, too: one set back makes
-- every later insert into its table fail.
do $$
declare
  v_table text;
begin
  foreach v_table in array array['workflow_run_events', 'workflow_bookings', 'workflow_audit_log',
      'budget_events'] loop
    execute format('revoke all on sequence %s from public, anon, authenticated',
        pg_get_serial_sequence('public.' || v_table, 'id'));
    execute format('grant usage, select on sequence %s to service_role',
        pg_get_serial_sequence('public.' || v_table, 'id'));
  end loop;
end
$$;

select dispatcher.restrict_functions();

notify pgrst, 'reload schema';
commit;
