-- The dispatcher's own tables: who runs (instances), what was started (wakes), why an agent sleeps (wake state),
-- who holds an item (leases) and where an item came from (origins). Safe to apply twice.

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
  settings jsonb not null default '{}',
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
comment on table public.dispatcher_instances is 'One row per running daemon: identity, settings, heartbeat, last sweep and tick, health.';
create index if not exists dispatcher_instances_by_gateway on public.dispatcher_instances (gateway_id, last_heartbeat_at);

create table if not exists public.agent_wakes (
  id uuid primary key default gen_random_uuid(),
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  agent_id uuid not null references public.agents (id) on delete cascade,
  gateway_id uuid not null references public.gateways (id) on delete cascade,
  instance_id uuid references public.dispatcher_instances (id) on delete set null,
  claim_token uuid not null default gen_random_uuid(),
  claim_request uuid,
  state text not null default 'starting'
    check (state in ('starting', 'running', 'succeeded', 'failed', 'timed_out', 'no_progress', 'lost', 'interrupted', 'spawn_failed')),
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
  progressed_at timestamptz,
  ended_at timestamptz,
  exit_code integer,
  error text,
  constraint agent_wakes_ended_has_time check ((state in ('starting', 'running')) = (ended_at is null)),
  constraint agent_wakes_running_has_pid check (state <> 'running' or (pid is not null and started_at is not null))
);
comment on table public.agent_wakes is 'One row per wake: one run of `openclaw agent` for one agent, from its claim to its end.';
create unique index if not exists agent_wakes_one_live_per_agent on public.agent_wakes (agent_id) where state in ('starting', 'running');
create index if not exists agent_wakes_live_by_gateway on public.agent_wakes (gateway_id) where state in ('starting', 'running');
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
  resumed_at timestamptz,
  updated_at timestamptz not null default now(),
  constraint agent_wake_state_waiting check ((waitlisted_at is null) = (waitlist_path is null))
);
comment on table public.agent_wake_state is 'What the gates remember of an agent: failures in a row, stall, last wake, its place on the waitlist.';
comment on column public.agent_wake_state.resumed_at is 'When the agent was last taken out of pause or hibernation: its waiting items grow stale from then on.';
comment on column public.agent_wake_state.waiting_since is 'created_at of the oldest item that waits; orders agents that joined the waitlist together.';
create index if not exists agent_wake_state_waitlist on public.agent_wake_state (waitlisted_at, waiting_since, agent_id) where waitlisted_at is not null;

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
comment on table public.inbox_item_leases is 'The latest lease of an item: its fencing token, the wake it was taken in, and how it ended.';
create index if not exists inbox_item_leases_by_wake on public.inbox_item_leases (wake_id) where wake_id is not null;

create table if not exists public.inbox_item_origins (
  item_id uuid primary key references public.agent_inbox_items (id) on delete cascade,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  wake_id uuid references public.agent_wakes (id) on delete set null,
  from_agent_id uuid references public.agents (id) on delete set null,
  chain_depth integer not null default 0 check (chain_depth >= 0),
  request_key text,
  created_at timestamptz not null default now()
);
comment on table public.inbox_item_origins is 'Where an item came from when an agent posted it: the wake, the sender, and how long the chain of wakes has grown.';
create index if not exists inbox_item_origins_by_depth on public.inbox_item_origins (tenant_id, chain_depth);
create index if not exists inbox_item_origins_by_wake on public.inbox_item_origins (wake_id) where wake_id is not null;
create unique index if not exists inbox_item_origins_once on public.inbox_item_origins (tenant_id, from_agent_id, request_key) where request_key is not null;

create table if not exists public.inbox_item_reopenings (
  item_id uuid primary key references public.agent_inbox_items (id) on delete cascade,
  tenant_id uuid not null references public.tenants (id) on delete cascade,
  reopened_at timestamptz not null default now()
);
comment on table public.inbox_item_reopenings is 'When somebody set a finished item back to pending: it grows stale from then on, not from its creation.';
create index if not exists agent_inbox_items_completed on public.agent_inbox_items (agent_id, completed_at) where completed_at is not null;
create index if not exists agent_inbox_items_spent on public.agent_inbox_items (agent_id)
  where status in ('pending', 'leased') and attempt_count >= max_attempts;
create index if not exists agent_inbox_items_leased on public.agent_inbox_items (agent_id, leased_until) where status = 'leased';
create index if not exists agent_inbox_items_open on public.agent_inbox_items (agent_id, created_at)
  where status in ('pending', 'failed', 'leased') and attempt_count < max_attempts;

do $$
declare
  v_table text;
begin
  foreach v_table in array array['dispatcher_gateways', 'dispatcher_instances', 'agent_wakes', 'agent_wake_state',
                                 'inbox_item_leases', 'inbox_item_origins', 'inbox_item_reopenings'] loop
    execute format('alter table public.%I enable row level security', v_table);
    execute format('revoke all on public.%I from public, anon, authenticated', v_table);
    execute format('grant all on public.%I to service_role', v_table);
    if v_table not in ('inbox_item_leases', 'inbox_item_reopenings', 'dispatcher_gateways') then
      execute format('grant select on public.%I to authenticated', v_table);
      execute format('drop policy if exists tenant_reads on public.%I', v_table);
      execute format('create policy tenant_reads on public.%I for select to authenticated using (tenant_id = public.current_tenant_id())', v_table);
    end if;
  end loop;
end
$$;

select dispatcher.restrict_functions();

notify pgrst, 'reload schema';
