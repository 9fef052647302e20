-- The dispatcher's own tables: who runs (instances), what was started (wakes), why an agent sleeps (wake state),
-- who holds an item (leases) and where an item came from (origins). Safe to apply twice.
begin;
set local lock_timeout = '3s';
select dispatcher.lock_tables('tenants', 'gateways', 'agents', 'agent_inbox_items');

create table if not exists public.dispatcher_gateways (
  gateway_id uuid primary key references public.gateways (id) on delete cascade,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  created_at timestamptz not null default now()
);
comment on table public.dispatcher_gateways is
  'One row per gateway that a dispatcher serves. Claims lock it, which is what makes the cap of live wakes exact.';

create table if not exists public.dispatcher_instances (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  gateway_id uuid not null references public.gateways (id) on delete cascade,
  state text not null default 'running' check (state in ('running', 'stopping', 'stopped', 'lost')),
  hostname text not null,
  host_id text not null,
  pid integer not null,
  pid_started_at double precision,
  version text not null,
  started_at timestamptz not null default now(),
  last_heartbeat_at timestamptz not null default now(),
  stopped_at timestamptz,
  last_sweep_at timestamptz,
  last_sweep jsonb,
  last_tick jsonb,
  canary uuid,
  realtime jsonb not null default '{}',
  health jsonb not null default '{}',
  constraint dispatcher_instances_stopped_has_time check ((state = 'stopped') = (stopped_at is not null))
);
comment on table public.dispatcher_instances is
  'One row per running daemon: identity, heartbeat, last sweep and tick, health.';
create index if not exists dispatcher_instances_by_gateway on public.dispatcher_instances (gateway_id,
    last_heartbeat_at);

create table if not exists public.dispatcher_settings (
  instance_id uuid primary key references public.dispatcher_instances (id) on delete cascade,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  wake_cooldown double precision not null default 30,
  max_wake_cooldown double precision not null default 900,
  max_consecutive_failures integer not null default 5,
  max_concurrent_wakes integer not null default 2,
  agent_process_timeout double precision not null default 300,
  stale_item_age_hours double precision not null default 24,
  lease_seconds integer not null default 120,
  max_wake_chain integer not null default 6,
  max_wakes_per_day integer not null default 0,
  alert_wakes_per_hour integer not null default 60,
  instance_timeout double precision not null default 45,
  workflow_batch_size integer not null default 10,
  stale_dispatch_seconds double precision not null default 300,
  max_dispatch_retries integer not null default 3,
  stale_claim_seconds double precision not null default 600,
  workflow_cost_estimate_usd numeric(12, 6),
  workflow_token_estimate bigint
);
alter table public.dispatcher_settings add column if not exists workflow_token_estimate bigint;
comment on table public.dispatcher_settings is
  'The settings each daemon registered with, typed and within their bounds: what the gates, the sweep and the tick '
  'read.';
comment on column public.dispatcher_settings.workflow_cost_estimate_usd is
  'What a run costs of which nothing is known yet, and at least what counts for one that ends without a report. NULL: '
  '0.10.';
comment on column public.dispatcher_settings.workflow_token_estimate is 'The same in tokens. NULL: 20,000.';

create table if not exists public.agent_wakes (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  agent_id uuid not null references public.agents (id) on delete cascade,
  gateway_id uuid not null references public.gateways (id) on delete cascade,
  instance_id uuid references public.dispatcher_instances (id) on delete set null,
  claim_token uuid not null default gen_random_uuid(),
  claim_request uuid,
  state text not null default 'starting'
    check (state in ('starting', 'running', 'succeeded', 'failed', 'timed_out', 'no_progress', 'lost', 'interrupted',
        'spawn_failed')),
  path text not null check (path in ('event', 'sweep', 'waitlist', 'due', 'command')),
  item_ids uuid[] not null default '{}',
  chain_depth integer not null default 0,
  model_override text,
  thinking_override text,
  host_id text,
  pid integer,
  pid_started_at double precision,
  claimed_at timestamptz not null default now(),
  started_at timestamptz,
  deadline_at timestamptz not null,
  ended_at timestamptz,
  exit_code integer,
  error text,
  constraint agent_wakes_ended_has_time check ((state in ('starting', 'running')) = (ended_at is null)),
  constraint agent_wakes_running_has_pid check (state <> 'running' or (pid is not null and started_at is not null))
);
comment on table public.agent_wakes is
  'One row per wake: one run of `openclaw agent` for one agent, from its claim to its end.';
create unique index if not exists agent_wakes_one_live_per_agent on public.agent_wakes (agent_id)
    where state in ('starting', 'running');
create index if not exists agent_wakes_live_by_gateway on public.agent_wakes (gateway_id)
    where state in ('starting', 'running');
create index if not exists agent_wakes_by_agent on public.agent_wakes (agent_id, claimed_at desc);
create index if not exists agent_wakes_by_request on public.agent_wakes (claim_request) where claim_request is not null;
create index if not exists agent_wakes_by_instance on public.agent_wakes (instance_id);
create index if not exists agent_wakes_ended on public.agent_wakes (ended_at) where ended_at is not null;

create table if not exists public.agent_wake_state (
  agent_id uuid primary key references public.agents (id) on delete cascade,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  consecutive_failures integer not null default 0 check (consecutive_failures >= 0),
  stalled_at timestamptz,
  last_wake_id uuid,
  last_claimed_at timestamptz,
  last_ended_at timestamptz,
  last_end_state text,
  waitlisted_at timestamptz,
  waitlist_path text,
  waiting_since timestamptz,
  chain_notified_at timestamptz,
  often_notified_at timestamptz,
  updated_at timestamptz not null default now(),
  constraint agent_wake_state_waiting check ((waitlisted_at is null) = (waitlist_path is null))
);
comment on table public.agent_wake_state is
  'What the gates remember of an agent: failures in a row, stall, last wake, its place on the waitlist.';
alter table public.agent_wake_state add column if not exists often_notified_at timestamptz;
comment on column public.agent_wake_state.often_notified_at is
  'When the operator was last told that the agent is woken unusually often.';
comment on column public.agent_wake_state.waiting_since is
  'created_at of the oldest item that waits; orders agents that joined the waitlist together.';

create table if not exists public.inbox_item_leases (
  item_id uuid primary key references public.agent_inbox_items (id) on delete cascade,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  agent_id uuid not null references public.agents (id) on delete cascade,
  wake_id uuid references public.agent_wakes (id) on delete set null,
  lease_token uuid not null default gen_random_uuid(),
  attempt integer not null,
  leased_at timestamptz not null default now(),
  leased_until timestamptz not null,
  closed_at timestamptz,
  outcome text check (outcome in ('done', 'failed', 'dead_letter', 'escalated', 'released', 'lost')),
  constraint inbox_item_leases_closed_has_outcome check ((closed_at is null) = (outcome is null))
);
comment on table public.inbox_item_leases is
  'The latest lease of an item: its fencing token, the wake it was taken in, and how it ended.';
create index if not exists inbox_item_leases_by_wake on public.inbox_item_leases (wake_id) where wake_id is not null;

create table if not exists public.inbox_item_origins (
  item_id uuid primary key references public.agent_inbox_items (id) on delete cascade,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  wake_id uuid references public.agent_wakes (id) on delete set null,
  from_agent_id uuid references public.agents (id) on delete set null,
  chain_depth integer not null default 0 check (chain_depth >= 0),
  request_key text,
  content_key text,
  created_at timestamptz not null default now()
);
comment on table public.inbox_item_origins is
  'Where an item came from when an agent posted it: the wake, the sender, and how long the chain of wakes has grown.';
comment on column public.inbox_item_origins.request_key is
  'What names one request of a sender, ever: key:… as the caller chose it, else call:… of one run of its script.';
alter table public.inbox_item_origins add column if not exists content_key text;
comment on column public.inbox_item_origins.content_key is
  'Sender''s wake and content: the same post again is the same item while that is open.';
create index if not exists inbox_item_origins_by_content on public.inbox_item_origins (from_agent_id, content_key)
    where content_key is not null;
create index if not exists inbox_item_origins_by_depth on public.inbox_item_origins (tenant_id, chain_depth);
create index if not exists inbox_item_origins_by_wake on public.inbox_item_origins (wake_id) where wake_id is not null;
create unique index if not exists inbox_item_origins_once on public.inbox_item_origins (tenant_id, from_agent_id,
    request_key) where request_key is not null;

create table if not exists public.agent_resumptions (
  agent_id uuid primary key references public.agents (id) on delete cascade,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  resumed_at timestamptz not null default now()
);
comment on table public.agent_resumptions is
  'When an agent was last taken out of pause or hibernation: its waiting items grow stale from then on. Written by '
  'whoever changes the agent.';

create table if not exists public.inbox_item_marks (
  item_id uuid primary key references public.agent_inbox_items (id) on delete cascade,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  reopened_at timestamptz,
  set_aside_at timestamptz,
  set_aside_as text check (set_aside_as in ('agent_stalled', 'wake_chain_limit', 'operator')),
  closed_by_user_at timestamptz,
  constraint inbox_item_marks_set_aside_has_both check ((set_aside_at is null) = (set_aside_as is null))
);
comment on table public.inbox_item_marks is 'What the dispatcher knows of an item beside its row.';
comment on column public.inbox_item_marks.reopened_at is
  'When somebody set a finished item back to pending: it grows stale from then on, not from its creation.';
comment on column public.inbox_item_marks.closed_by_user_at is
  'When a signed-in user closed the item: that is no work of the agent that runs at that time.';
comment on column public.inbox_item_marks.set_aside_at is
  'When the dispatcher set the item aside; it still is while the item failed at that very time.';

create table if not exists public.dispatcher_faults (
  id bigint generated always as identity primary key,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  gateway_id uuid references public.gateways (id) on delete cascade,
  side_write text not null,
  error text not null,
  at timestamptz not null default clock_timestamp()
);
comment on table public.dispatcher_faults is
  'Side writes that failed (a notification, an event, a hint) while what they tell about was done. The daemons log '
  'them and show them in health.';
comment on column public.dispatcher_faults.gateway_id is 'Whose daemon tells it; NULL: any daemon of the tenant.';
create index if not exists dispatcher_faults_by_tenant on public.dispatcher_faults (tenant_id, side_write, at desc);
-- The tenant stands in every index beside the agent: what another tenant wrote for the agent is not even read.
create index if not exists agent_inbox_items_done_of on public.agent_inbox_items (agent_id, tenant_id, completed_at)
    where completed_at is not null;
create index if not exists agent_inbox_items_spent_of on public.agent_inbox_items (agent_id, tenant_id)
  where status in ('pending', 'leased') and attempt_count >= max_attempts;
create index if not exists agent_inbox_items_leased_of on public.agent_inbox_items (agent_id, tenant_id, leased_until)
    where status = 'leased';
create index if not exists agent_inbox_items_failed_of on public.agent_inbox_items (agent_id, tenant_id, failed_at)
    where status in ('failed', 'dead_letter');
create index if not exists agent_inbox_items_open_of on public.agent_inbox_items (agent_id, tenant_id, created_at)
  where status in ('pending', 'failed', 'leased') and attempt_count < max_attempts;
drop index if exists public.agent_inbox_items_completed;
drop index if exists public.agent_inbox_items_spent;
drop index if exists public.agent_inbox_items_leased;
drop index if exists public.agent_inbox_items_failed;
drop index if exists public.agent_inbox_items_open;

select dispatcher.guard_tenant('dispatcher_gateways', true, 'gateway_id gateways');
select dispatcher.guard_tenant('dispatcher_instances', true, 'gateway_id gateways');
select dispatcher.guard_tenant('dispatcher_settings', true, 'instance_id dispatcher_instances');
select dispatcher.guard_tenant('agent_wake_state', true, 'agent_id agents');
select dispatcher.guard_tenant('inbox_item_leases', true, 'item_id agent_inbox_items', 'agent_id agents',
                               'wake_id agent_wakes');
select dispatcher.guard_tenant('inbox_item_origins', true, 'item_id agent_inbox_items', 'wake_id agent_wakes',
                               'from_agent_id agents');
select dispatcher.guard_tenant('agent_resumptions', true, 'agent_id agents');
select dispatcher.guard_tenant('inbox_item_marks', true, 'item_id agent_inbox_items');
select dispatcher.guard_tenant('dispatcher_faults', true, 'gateway_id gateways');

do $$
declare
  v_table text;
begin
  foreach v_table in array array['dispatcher_gateways', 'dispatcher_instances', 'agent_wakes', 'agent_wake_state',
                                 'inbox_item_leases', 'inbox_item_origins', 'inbox_item_marks', 'agent_resumptions',
                                 'dispatcher_settings', 'dispatcher_faults'] loop
    execute format('alter table public.%I enable row level security', v_table);
    execute format('revoke all on public.%I from public, anon, authenticated', v_table);
    execute format('grant all on public.%I to service_role', v_table);
    if v_table not in ('inbox_item_leases', 'inbox_item_marks', 'agent_resumptions', 'dispatcher_gateways',
        'dispatcher_settings',
                       'dispatcher_faults') then
      perform dispatcher.let_users_read(v_table);
    end if;
  end loop;
end
$$;

do $$
begin
  execute format('revoke all on sequence %s from public, anon, authenticated',
      pg_get_serial_sequence('public.dispatcher_faults', 'id'));
  execute format('grant usage, select on sequence %s to service_role',
      pg_get_serial_sequence('public.dispatcher_faults', 'id'));
end
$$;

select dispatcher.restrict_functions();

notify pgrst, 'reload schema';
commit;
