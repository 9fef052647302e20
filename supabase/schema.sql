-- Written by tools/dump_schema.py from supabase/migrations; edit those, then run it.

CREATE SCHEMA dispatcher;

COMMENT ON SCHEMA dispatcher IS 'Internal to openclaw-dispatcher. What others may call stands in public.';

CREATE SCHEMA public;

COMMENT ON SCHEMA public IS 'standard public schema';

CREATE TABLE public.dispatcher_settings (
    instance_id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    wake_cooldown double precision DEFAULT 30 NOT NULL,
    max_wake_cooldown double precision DEFAULT 900 NOT NULL,
    max_consecutive_failures integer DEFAULT 5 NOT NULL,
    max_concurrent_wakes integer DEFAULT 2 NOT NULL,
    agent_process_timeout double precision DEFAULT 300 NOT NULL,
    stale_item_age_hours double precision DEFAULT 24 NOT NULL,
    lease_seconds integer DEFAULT 120 NOT NULL,
    max_wake_chain integer DEFAULT 6 NOT NULL,
    max_wakes_per_day integer DEFAULT 0 NOT NULL,
    alert_wakes_per_hour integer DEFAULT 60 NOT NULL,
    instance_timeout double precision DEFAULT 45 NOT NULL,
    workflow_batch_size integer DEFAULT 10 NOT NULL,
    stale_dispatch_seconds double precision DEFAULT 300 NOT NULL,
    max_dispatch_retries integer DEFAULT 3 NOT NULL,
    stale_claim_seconds double precision DEFAULT 600 NOT NULL,
    workflow_cost_estimate_usd numeric(12,6),
    workflow_token_estimate bigint
);

COMMENT ON TABLE public.dispatcher_settings IS 'The settings each daemon registered with, typed and within their bounds: what the gates, the sweep and the tick read.';

COMMENT ON COLUMN public.dispatcher_settings.workflow_cost_estimate_usd IS 'What a run costs of which nothing is known yet, and at least what counts for one that ends without a report. NULL: 0.10.';

COMMENT ON COLUMN public.dispatcher_settings.workflow_token_estimate IS 'The same in tokens. NULL: 20,000.';

CREATE TYPE dispatcher.claimant AS (
	instance_id uuid,
	tenant_id uuid,
	gateway_id uuid,
	settings public.dispatcher_settings
);

COMMENT ON TYPE dispatcher.claimant IS 'The daemon that claims, with its settings.';

CREATE TYPE dispatcher.evaluated_budget AS (
	id uuid,
	name text,
	scope text,
	scope_id text,
	period text,
	period_key text,
	starts_at timestamp with time zone,
	ends_at timestamp with time zone,
	action text,
	fail_closed boolean,
	cap_usd numeric,
	cap_tokens numeric,
	settled_usd numeric,
	settled_tokens numeric,
	reserved_usd numeric,
	reserved_tokens numeric,
	error text,
	revision integer
);

COMMENT ON TYPE dispatcher.evaluated_budget IS 'An active budget in its running period: what is settled in it and what active runs reserve. error: why it cannot be evaluated.';

CREATE TYPE dispatcher.gate_facts AS (
	agent_id uuid,
	agent_slug text,
	tenant_id uuid,
	agent_status text,
	failures integer,
	is_live boolean,
	leased_until timestamp with time zone,
	budget_blocks boolean,
	wakes_today integer,
	due_item_ids uuid[],
	hinted_item_ids uuid[],
	chain_depth integer,
	oldest_due timestamp with time zone,
	next_due timestamp with time zone,
	is_at_chain_limit boolean,
	cooldown_from timestamp with time zone,
	granted_wake_id uuid,
	live_on_gateway integer
);

COMMENT ON TYPE dispatcher.gate_facts IS 'What the gates look at, read in one snapshot. failures: in effect, 0 when an item from outside is newer than the last end. due_item_ids: the three oldest. live_on_gateway: what the cap counts.';

CREATE TYPE dispatcher.money AS (
	estimates jsonb,
	budgets dispatcher.evaluated_budget[],
	error text
);

COMMENT ON TYPE dispatcher.money IS 'Estimates per type and evaluated budgets; error: why they cannot be evaluated.';

CREATE TYPE dispatcher.run_choice AS (
	run_id uuid,
	agent_id text,
	gateway_id uuid,
	usd numeric,
	tokens numeric
);

COMMENT ON TYPE dispatcher.run_choice IS 'A run that goes out: to which agent of which gateway, and what is reserved for it.';

CREATE TYPE dispatcher.tick AS (
	instance_id uuid,
	tenant_id uuid,
	gateway_id uuid,
	settings public.dispatcher_settings
);

COMMENT ON TYPE dispatcher.tick IS 'For whom a phase runs, with which settings.';

CREATE TYPE dispatcher.waiting_group AS (
	workflow_type text,
	pinned_agent_id text,
	agent_id text,
	department_id text,
	gateway_id uuid,
	is_open boolean,
	due bigint,
	oldest timestamp with time zone,
	priorities integer[],
	route_priority integer,
	slots bigint,
	usd numeric,
	tokens numeric,
	verdict text,
	holders uuid[],
	reason text
);

COMMENT ON TYPE dispatcher.waiting_group IS 'Queued runs that are due, of one type and agent: equal before slots and budgets. is_open: it has an agent, and its route is not disabled.';

CREATE TYPE public.actor_type AS ENUM (
    'human',
    'agent',
    'system'
);

CREATE TYPE public.agent_status AS ENUM (
    'ready',
    'paused',
    'error',
    'provisioning',
    'hibernating'
);

CREATE TYPE public.budget_status AS ENUM (
    'ok',
    'warned',
    'exceeded',
    'unmetered'
);

CREATE TYPE public.gateway_status AS ENUM (
    'provisioning',
    'ready',
    'error',
    'hibernating'
);

CREATE TYPE public.inbox_event_type AS ENUM (
    'task_assignment',
    'task_reassignment',
    'task_comment_mention',
    'routine_schedule',
    'routine_event',
    'heartbeat',
    'deliverable_review',
    'blocker_resolved'
);

CREATE TYPE public.inbox_item_status AS ENUM (
    'pending',
    'leased',
    'done',
    'dead_letter',
    'failed'
);

CREATE TYPE public.task_priority AS ENUM (
    'low',
    'medium',
    'high',
    'urgent'
);

CREATE TYPE public.task_relation_type AS ENUM (
    'blocks',
    'blocked_by',
    'relates_to',
    'parent_of',
    'child_of'
);

CREATE TYPE public.task_status AS ENUM (
    'todo',
    'in_progress',
    'blocked',
    'done',
    'cancelled',
    'missed'
);

CREATE FUNCTION dispatcher.active_runs(p_tenant_id uuid) RETURNS TABLE(workflow_type text, number bigint)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  -- A held run keeps its slot: it returns to it whenever it is let go.
  select run.workflow_type, count(*) from public.workflow_runs as run
   where run.tenant_id = p_tenant_id
     and (run.status in ('dispatched', 'claimed', 'running') or run.paused_from in ('dispatched', 'claimed', 'running'))
   group by run.workflow_type
$$;

COMMENT ON FUNCTION dispatcher.active_runs(p_tenant_id uuid) IS 'How many slots of each type are taken.';

CREATE FUNCTION dispatcher.add_reference_routes(p_tenant_id uuid) RETURNS jsonb
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  with seeded as (
    insert into public.workflow_agent_routing (tenant_id, workflow_type, agent_id)
    select p_tenant_id, mapping.workflow_type, mapping.agent_id from (values
      ('citation-improvement', 'affiliate-editorial'), ('affiliate-article', 'affiliate-editorial'),
          ('code-change', 'code-change'),
      ('image-generation', 'comfyui-image-agent'), ('qa-review', 'qa-review'),
          ('incident-investigation', 'incident-investigation'),
      ('system-improvement-scan', 'main'), ('improvement-suggestion', 'coder')) as mapping (workflow_type, agent_id)
    on conflict (tenant_id, workflow_type) do nothing
    returning workflow_type, agent_id)
  select jsonb_build_object('applied', true, 'code', 'ok', 'seeded', count(*), 'routes',
           coalesce(jsonb_agg(jsonb_build_object('workflow_type', workflow_type, 'agent_id', agent_id)
               order by workflow_type), '[]'))
    from seeded
$$;

COMMENT ON FUNCTION dispatcher.add_reference_routes(p_tenant_id uuid) IS 'Adds the reference routes that a tenant has not; answers which.';

CREATE FUNCTION dispatcher.add_stopped_runs(p_budget dispatcher.evaluated_budget, p_run_ids uuid[]) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  -- The ids of the first thousand, so that the row stays small however many passes add to it; the number of all.
  update public.budget_events as event
     set detail = event.detail || jsonb_build_object(
           'cancelled_run_ids', (select coalesce(jsonb_agg(listed.value), '[]') from (
               select told.value from jsonb_array_elements(
                   coalesce(event.detail -> 'cancelled_run_ids', '[]') || to_jsonb(p_run_ids)) with ordinality as told
                order by told.ordinality limit 1000) as listed),
           'cancelled_runs', coalesce((event.detail ->> 'cancelled_runs')::bigint, 0) + cardinality(p_run_ids))
   where event.id in (select known.id from public.budget_events as known
                       where known.budget_id = p_budget.id and known.period_key = p_budget.period_key
                         and known.event_kind = 'hard_stopped' and known.revision = p_budget.revision
                         for update skip locked)
$$;

COMMENT ON FUNCTION dispatcher.add_stopped_runs(p_budget dispatcher.evaluated_budget, p_run_ids uuid[]) IS 'Adds runs that a hard stop has cancelled to its event of the period: cancelled_runs counts all, cancelled_run_ids has the first 1,000.';

CREATE FUNCTION dispatcher.agents_of_operator(p_tenant_id uuid, p_gateway_id uuid, p_agent text) RETURNS SETOF uuid
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select id from dispatcher.agents
   where tenant_id = p_tenant_id and gateway_id = p_gateway_id
     and (p_agent is null or slug = p_agent or id::text = p_agent)
$$;

COMMENT ON FUNCTION dispatcher.agents_of_operator(p_tenant_id uuid, p_gateway_id uuid, p_agent text) IS 'The agents of a gateway an operator speaks of: one by slug or id, or all.';

CREATE FUNCTION dispatcher.agents_to_settle(p_sweeper dispatcher.claimant, p_limit integer) RETURNS SETOF uuid
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select state.agent_id from public.agent_wake_state as state
    join dispatcher.agents as agent on agent.id = state.agent_id
   where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
     and state.consecutive_failures >= (p_sweeper.settings).max_consecutive_failures
     and (state.stalled_at is null
          or exists (select from dispatcher.agent_inbox_items as item
                     where item.agent_id = agent.id and item.tenant_id = agent.tenant_id and item.status = 'pending'
                       and item.attempt_count < item.max_attempts))
     -- What came from outside since the last end has ended the stall.
     and (dispatcher.read_gate_facts(state.agent_id,
         p_sweeper.settings)).failures >= (p_sweeper.settings).max_consecutive_failures
   order by state.agent_id limit p_limit
$$;

COMMENT ON FUNCTION dispatcher.agents_to_settle(p_sweeper dispatcher.claimant, p_limit integer) IS 'Stalled agents of which nobody was told yet, or that have pending items.';

CREATE FUNCTION dispatcher.agents_with_work(p_sweeper dispatcher.claimant, p_after uuid, p_limit integer) RETURNS TABLE(agent_id uuid, agent_slug text, oldest timestamp with time zone)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select agent.id, agent.slug, oldest.created_at from dispatcher.agents as agent
   cross join lateral (select due.created_at from dispatcher.inbox_due_of_pair as due
                        where due.agent_id = agent.id and due.tenant_id = agent.tenant_id order by due.created_at
                            limit 1) as oldest
   where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
     and (p_after is null or agent.id > p_after)
     and not exists (select from public.agent_wake_state as state where state.agent_id = agent.id
     and state.waitlisted_at is not null)
     and not exists (select from public.agent_wakes as wake where wake.agent_id = agent.id
     and wake.state in ('starting', 'running'))
   order by agent.id limit p_limit
$$;

COMMENT ON FUNCTION dispatcher.agents_with_work(p_sweeper dispatcher.claimant, p_after uuid, p_limit integer) IS 'Agents with open items that neither wait nor run, in the order of their ids after p_after, each with its oldest item.';

CREATE TABLE public.workflow_runs (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    workflow_type text NOT NULL,
    status text DEFAULT 'queued'::text NOT NULL,
    priority integer DEFAULT 0 NOT NULL,
    initiator text,
    task_id text,
    owner_agent_id text,
    pinned_agent_id text,
    dispatch_attempts integer DEFAULT 0 NOT NULL,
    release_count integer DEFAULT 0 NOT NULL,
    queued_at timestamp with time zone DEFAULT now() NOT NULL,
    dispatched_at timestamp with time zone,
    claimed_at timestamp with time zone,
    claimed_by text,
    started_at timestamp with time zone,
    finished_at timestamp with time zone,
    deadline_at timestamp with time zone,
    last_heartbeat_at timestamp with time zone,
    next_attempt_at timestamp with time zone,
    claim_token uuid,
    session_id text,
    wake_id uuid,
    paused_from text,
    paused_at timestamp with time zone,
    blocker_type text,
    blocker_description text,
    escalated_to text,
    last_error text,
    last_error_at timestamp with time zone,
    input_payload jsonb DEFAULT '{}'::jsonb NOT NULL,
    output_summary jsonb,
    input_tokens bigint,
    output_tokens bigint,
    cached_tokens bigint,
    model_id text,
    cost_estimate numeric(12,6),
    currency text DEFAULT 'USD'::text NOT NULL,
    reserved_usd numeric(12,6),
    reserved_tokens bigint,
    assumed_usd numeric(12,6),
    assumed_tokens bigint,
    reported_at timestamp with time zone,
    kept_status text,
    kept_error text,
    request_key text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT workflow_runs_claimed_is_held CHECK (((status <> ALL (ARRAY['claimed'::text, 'running'::text])) OR ((claimed_at IS NOT NULL) AND (claim_token IS NOT NULL) AND (deadline_at IS NOT NULL)))),
    CONSTRAINT workflow_runs_dispatch_attempts_check CHECK ((dispatch_attempts >= 0)),
    CONSTRAINT workflow_runs_dispatched_has_time CHECK (((status <> 'dispatched'::text) OR ((dispatched_at IS NOT NULL) AND (owner_agent_id IS NOT NULL)))),
    CONSTRAINT workflow_runs_finished_has_time CHECK (((status = ANY (ARRAY['completed'::text, 'failed'::text, 'timed_out'::text, 'cancelled'::text])) = (finished_at IS NOT NULL))),
    CONSTRAINT workflow_runs_kept_status_check CHECK ((kept_status = ANY (ARRAY['completed'::text, 'failed'::text]))),
    CONSTRAINT workflow_runs_next_attempt_at_check CHECK (isfinite(next_attempt_at)),
    CONSTRAINT workflow_runs_paused_from_check CHECK ((paused_from = ANY (ARRAY['queued'::text, 'dispatched'::text, 'claimed'::text, 'running'::text]))),
    CONSTRAINT workflow_runs_paused_knows_from CHECK (((status = ANY (ARRAY['waiting_for_approval'::text, 'blocked'::text])) = (paused_from IS NOT NULL))),
    CONSTRAINT workflow_runs_paused_knows_since CHECK (((paused_from IS NULL) = (paused_at IS NULL))),
    CONSTRAINT workflow_runs_pinned_agent_id_check CHECK ((pinned_agent_id <> ''::text)),
    CONSTRAINT workflow_runs_priority_check CHECK (((priority >= '-1000000'::integer) AND (priority <= 1000000))),
    CONSTRAINT workflow_runs_release_count_check CHECK ((release_count >= 0)),
    CONSTRAINT workflow_runs_running_has_start CHECK (((status <> 'running'::text) OR (started_at IS NOT NULL))),
    CONSTRAINT workflow_runs_status_known CHECK ((status = ANY (ARRAY['queued'::text, 'dispatched'::text, 'claimed'::text, 'running'::text, 'waiting_for_approval'::text, 'blocked'::text, 'completed'::text, 'failed'::text, 'timed_out'::text, 'cancelled'::text]))),
    CONSTRAINT workflow_runs_workflow_type_check CHECK ((workflow_type <> ''::text))
);

COMMENT ON TABLE public.workflow_runs IS 'The queue of workflow runs and their whole life. Cost and tokens that are NULL were not reported; they are never taken as zero.';

COMMENT ON COLUMN public.workflow_runs.task_id IS 'The task the run serves, of tasks or of another system.';

COMMENT ON COLUMN public.workflow_runs.owner_agent_id IS 'Slug of the agent it was dispatched to.';

COMMENT ON COLUMN public.workflow_runs.pinned_agent_id IS 'Slug of the agent it was reassigned to; wins over the route.';

COMMENT ON COLUMN public.workflow_runs.deadline_at IS 'When a claimed or running run is timed out; set at the claim from the route, put off by what it is held.';

COMMENT ON COLUMN public.workflow_runs.claim_token IS 'The fence of the present claim.';

COMMENT ON COLUMN public.workflow_runs.wake_id IS 'The wake whose process works on it, where the daemon started one.';

COMMENT ON COLUMN public.workflow_runs.paused_from IS 'Where a held run returns to; from dispatched, claimed or running it keeps its slot and its reservation.';

COMMENT ON COLUMN public.workflow_runs.paused_at IS 'Since when it is held.';

COMMENT ON COLUMN public.workflow_runs.cost_estimate IS 'What the agent reported it cost, in all.';

COMMENT ON COLUMN public.workflow_runs.reserved_usd IS 'What was set aside for it at its dispatch. While it is open, what it has not reported of that counts in budgets.';

COMMENT ON COLUMN public.workflow_runs.assumed_usd IS 'What counts for it where it ended without a report of its cost: what was reserved, at least the configured estimate.';

COMMENT ON COLUMN public.workflow_runs.assumed_tokens IS 'The same in tokens.';

COMMENT ON COLUMN public.workflow_runs.reported_at IS 'When cost or tokens were last reported. A cost without it is a guess of whoever queued the run.';

COMMENT ON COLUMN public.workflow_runs.kept_status IS 'How its session ended it while it was held; applied when it goes on.';

COMMENT ON COLUMN public.workflow_runs.kept_error IS 'The reason that came with kept_status failed.';

CREATE FUNCTION dispatcher.apply_kept_end(p_run public.workflow_runs) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  if p_run.status = 'claimed' and p_run.kept_status = 'completed' then
    perform dispatcher.start_workflow_run(p_run);  -- as running it comes here again
    return;
  end if;
  perform dispatcher.note_workflow_actor(p_run.claimed_by, 'ended while it was held');
  perform dispatcher.end_workflow_claim(p_run, p_run.kept_status);
  perform dispatcher.note_work_on_claim(p_run);
  update public.workflow_runs
     set status = p_run.kept_status, finished_at = now(), wake_id = null,
         last_error = case p_run.kept_status when 'failed' then p_run.kept_error else last_error end,
         last_error_at = case p_run.kept_status when 'failed' then now() else last_error_at end
   where id = p_run.id;
end
$$;

COMMENT ON FUNCTION dispatcher.apply_kept_end(p_run public.workflow_runs) IS 'Ends a run that went on after its session had ended it. The caller holds its row.';

CREATE FUNCTION dispatcher.apply_kept_ends() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.apply_kept_end(run) from new_runs as run
   where run.kept_status is not null and run.status in ('claimed', 'running');
  return null;
end
$$;

COMMENT ON FUNCTION dispatcher.apply_kept_ends() IS 'After held runs went on: ends those whose session had ended them meanwhile.';

CREATE FUNCTION dispatcher.apply_report(p_report jsonb, p_gateway_id uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_answer jsonb;
begin
  -- What a trigger puts off until the commit would take the reports of all with it: it speaks here, for this one alone.
  set constraints all deferred;
  if not exists (select from public.agent_wakes
                  where id = (p_report ->> 'wake_id')::uuid and gateway_id = p_gateway_id) then
    return jsonb_build_object('wake_id', p_report ->> 'wake_id', 'applied', false, 'code', 'not_found');
  end if;
  case p_report ->> 'report'
    when 'started' then
      v_answer := dispatcher.start_wake((p_report ->> 'wake_id')::uuid, (p_report ->> 'claim_token')::uuid,
          left(p_report ->> 'host_id', 500),
                                        (p_report ->> 'pid')::integer,
                                            (p_report ->> 'pid_started_at')::double precision);
    when 'ended' then
      v_answer := dispatcher.end_wake((p_report ->> 'wake_id')::uuid, (p_report ->> 'claim_token')::uuid,
          p_report ->> 'ending',
                                      (p_report ->> 'exit_code')::integer, p_report ->> 'error');
    else
      v_answer := jsonb_build_object('wake_id', p_report ->> 'wake_id', 'applied', false, 'code', 'invalid', 'error',
          'unknown report');
  end case;
  set constraints all immediate;
  return v_answer;
exception when lock_not_available then
  return jsonb_build_object('wake_id', p_report ->> 'wake_id', 'applied', false, 'code', 'busy');
when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return jsonb_build_object('wake_id', p_report ->> 'wake_id', 'applied', false, 'code', 'error', 'error',
      left(sqlerrm, 500), 'error_code', sqlstate);
end
$$;

COMMENT ON FUNCTION dispatcher.apply_report(p_report jsonb, p_gateway_id uuid) IS 'One report {report: started|ended, wake_id, claim_token, …} of a wake of the gateway; what raises for one is its own answer (code error).';

CREATE FUNCTION dispatcher.audit_workflow_action(p_tenant_id uuid, p_actor text, p_action text, p_target text, p_before jsonb, p_after jsonb, p_allowed boolean DEFAULT true) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    SET lock_timeout TO '100ms'
    AS $$
begin
  insert into public.workflow_audit_log (tenant_id, actor, action, class, severity, target, before, after, allowed)
  values (p_tenant_id, coalesce(nullif(left(p_actor, 300), ''), 'unknown'), p_action, 'intervention', 'warning',
      p_target,
          p_before, p_after, p_allowed);
  perform dispatcher.settle_constraints('public.workflow_audit_log');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_tenant_id, null, 'audit of ' || p_action, format('%s (%s)', sqlerrm, sqlstate));
end
$$;

COMMENT ON FUNCTION dispatcher.audit_workflow_action(p_tenant_id uuid, p_actor text, p_action text, p_target text, p_before jsonb, p_after jsonb, p_allowed boolean) IS 'One line in workflow_audit_log. A side write: when it fails, what it tells of is done all the same and the fault is noted.';

CREATE FUNCTION dispatcher.base_objects() RETURNS TABLE(kind text, name text, comment text)
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
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

COMMENT ON FUNCTION dispatcher.base_objects() IS 'What of YourHQ''s schema this file makes where it is absent, and the comment it puts there.';

CREATE FUNCTION dispatcher.block_task_of_item(p_item_id uuid, p_at timestamp with time zone) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  -- A task that has ended stays ended: an escalation that comes late must not open it again.
  update public.tasks as task
     set status = 'blocked', updated_at = p_at
    from dispatcher.agent_inbox_items as item
   where item.id = p_item_id and task.id = item.task_id and task.tenant_id = item.tenant_id
     and task.status not in ('blocked', 'done', 'cancelled')
$$;

COMMENT ON FUNCTION dispatcher.block_task_of_item(p_item_id uuid, p_at timestamp with time zone) IS 'The task of an item becomes blocked, unless it has ended.';

CREATE FUNCTION dispatcher.blockers_of(p_groups dispatcher.waiting_group[], p_closed jsonb) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  -- Of the two words for one type the plainer cause comes last, and stays.
  select coalesce(jsonb_object_agg(held.workflow_type, held.reason order by held.reason), '{}')
    from (select g.workflow_type, g.reason from unnest(p_groups) as g where g.is_open and g.reason is not null
          union
          select closed.value ->> 'workflow_type', closed.value ->> 'reason'
            from jsonb_array_elements(p_closed) as closed) as held
$$;

COMMENT ON FUNCTION dispatcher.blockers_of(p_groups dispatcher.waiting_group[], p_closed jsonb) IS 'Why the types are held that budgets hold: {type: budget | estimate_over_cap}.';

CREATE FUNCTION dispatcher.book(p_run public.workflow_runs, p_attempt integer, p_agent text, p_usd numeric, p_tokens bigint, p_source text) RETURNS void
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO ''
    AS $$
  insert into public.workflow_bookings (tenant_id, run_id, attempt, agent_id, workflow_type, cost_usd, tokens, source)
  select p_run.tenant_id, p_run.id, p_attempt, p_agent, p_run.workflow_type, coalesce(p_usd, 0), coalesce(p_tokens, 0),
         coalesce(nullif(current_setting('dispatcher.booking_source', true), ''), p_source)
   where coalesce(p_usd, 0) <> 0 or coalesce(p_tokens, 0) <> 0
$$;

COMMENT ON FUNCTION dispatcher.book(p_run public.workflow_runs, p_attempt integer, p_agent text, p_usd numeric, p_tokens bigint, p_source text) IS 'Books what a claim that its run has left behind has cost besides; what a run itself costs is booked by trigger.';

CREATE FUNCTION dispatcher.book_changed_runs() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
begin
  insert into public.workflow_bookings (tenant_id, run_id, attempt, agent_id, workflow_type, cost_usd, tokens, source)
  select run.tenant_id, run.id, run.dispatch_attempts, run.owner_agent_id, run.workflow_type, added.usd, added.tokens,
         dispatcher.source_of_booking(run, added.usd)
    from new_runs as run
    join old_runs as before on before.id = run.id
    cross join lateral (
      -- Another claim, another account: what the earlier one cost stays booked.
      select run.claim_token is not distinct from before.claim_token or run.reported_at = before.reported_at as is_same
    ) as account
    cross join lateral (
      select dispatcher.booked_usd(run) - case when account.is_same is true then dispatcher.booked_usd(before)
                 else 0 end as usd,
             dispatcher.booked_tokens(run) - case when account.is_same is true then dispatcher.booked_tokens(before)
                 else 0 end as tokens) as added
   where coalesce(run.paused_from, run.status) not in ('queued', 'dispatched')
     and (added.usd <> 0 or added.tokens <> 0);
  return null;
end
$$;

COMMENT ON FUNCTION dispatcher.book_changed_runs() IS 'After an update of runs: books what was added to the cost of each (or taken from it) since its row was last changed, in this moment. A run that returns to the queue keeps what it has cost.';

CREATE FUNCTION dispatcher.book_lost_claim(p_run public.workflow_runs, p_session text, p_claim_token uuid, p_usage jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_usage constant jsonb := dispatcher.workflow_usage_values(coalesce(p_usage, '{}'));
  v_claim public.workflow_claims;
  v_usd numeric;
  v_tokens bigint;
begin
  select claim.* into v_claim from public.workflow_claims as claim
   where claim.run_id = p_run.id and claim.session_id = p_session and claim.ended_at is not null
     and claim.claim_token is distinct from p_run.claim_token
     and (p_claim_token is null or claim.claim_token = p_claim_token)
   order by claim.claimed_at desc limit 1 for update;
  if v_claim.claim_token is null or not v_usage ?| array['cost_usd', 'input_tokens', 'output_tokens'] then
    return null;
  end if;
  v_usd := coalesce((v_usage ->> 'cost_usd')::numeric, v_claim.cost_usd);
  v_tokens := coalesce(dispatcher.known_tokens((v_usage ->> 'input_tokens')::bigint,
      (v_usage ->> 'output_tokens')::bigint), v_claim.tokens);
  update public.workflow_claims set cost_usd = v_usd, tokens = v_tokens where claim_token = v_claim.claim_token;
  v_usd := coalesce(v_usd, 0) - coalesce(v_claim.cost_usd, 0);
  v_tokens := coalesce(v_tokens, 0) - coalesce(v_claim.tokens, 0);
  perform dispatcher.book(p_run, v_claim.attempt, v_claim.agent_id, v_usd, v_tokens, 'report');
  return jsonb_build_object('cost_usd', v_usd, 'tokens', v_tokens);
end
$$;

COMMENT ON FUNCTION dispatcher.book_lost_claim(p_run public.workflow_runs, p_session text, p_claim_token uuid, p_usage jsonb) IS 'The cost of a claim that was lost meanwhile, in all: the money is spent all the same, so what is new is booked now. Answers what was booked, {cost_usd, tokens}; NULL where the session has lost no claim of the run, or says nothing.';

CREATE FUNCTION dispatcher.book_new_runs() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
begin
  -- A row that arrives finished was spent when it says so, not when it was copied here.
  insert into public.workflow_bookings (tenant_id, run_id, attempt, agent_id, workflow_type, at, cost_usd, tokens,
      source)
  select run.tenant_id, run.id, run.dispatch_attempts, run.owner_agent_id, run.workflow_type,
         least(coalesce(dispatcher.known_time(run.reported_at), dispatcher.known_time(run.finished_at), now()), now()),
         booked.usd, booked.tokens, dispatcher.source_of_booking(run, booked.usd)
    from new_runs as run
    cross join lateral (select dispatcher.booked_usd(run) as usd, dispatcher.booked_tokens(run) as tokens) as booked
   where run.status not in ('queued', 'dispatched') and (booked.usd <> 0 or booked.tokens <> 0);
  return null;
end
$$;

COMMENT ON FUNCTION dispatcher.book_new_runs() IS 'After an insert of runs: books what those cost that arrive with a cost, or finished.';

CREATE FUNCTION dispatcher.book_workflow_usage(p_run public.workflow_runs, p_usage jsonb) RETURNS public.workflow_runs
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_usage constant jsonb := dispatcher.workflow_usage_values(coalesce(p_usage, '{}'));
  v_says_something constant boolean := v_usage ?| array['cost_usd', 'input_tokens', 'output_tokens'];
begin
  if v_usage = '{}' then
    return p_run;
  end if;
  update public.workflow_runs
     set cost_estimate = coalesce((v_usage ->> 'cost_usd')::numeric, cost_estimate),
         input_tokens = coalesce((v_usage ->> 'input_tokens')::bigint, input_tokens),
         output_tokens = coalesce((v_usage ->> 'output_tokens')::bigint, output_tokens),
         cached_tokens = coalesce((v_usage ->> 'cached_tokens')::bigint, cached_tokens),
         model_id = coalesce(v_usage ->> 'model', model_id),
         reported_at = case when v_says_something then now() else reported_at end
   where id = p_run.id returning * into p_run;
  return p_run;
end
$$;

COMMENT ON FUNCTION dispatcher.book_workflow_usage(p_run public.workflow_runs, p_usage jsonb) IS 'Keeps what a run is said to have cost. Totals, not increments: a repeat changes nothing, and what is new is booked in the period it arrives in.';

CREATE FUNCTION dispatcher.booked_since(p_before public.workflow_runs, p_run public.workflow_runs) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select jsonb_build_object('cost_usd', dispatcher.booked_usd(p_run) - dispatcher.booked_usd(p_before),
                            'tokens', dispatcher.booked_tokens(p_run) - dispatcher.booked_tokens(p_before))
$$;

COMMENT ON FUNCTION dispatcher.booked_since(p_before public.workflow_runs, p_run public.workflow_runs) IS 'What a call has booked for the claim of a run: {cost_usd, tokens}, below 0 where it took something back.';

CREATE FUNCTION dispatcher.booked_tokens(p_run public.workflow_runs) RETURNS bigint
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select case when coalesce(p_run.paused_from, p_run.status) in ('queued', 'dispatched')
                or (p_run.reported_at is null and (p_run.finished_at is null or p_run.claimed_at is null)) then 0
              else coalesce(dispatcher.known_tokens(p_run.input_tokens, p_run.output_tokens),
                            case when p_run.finished_at is not null then greatest(p_run.assumed_tokens, 0) end, 0) end
$$;

COMMENT ON FUNCTION dispatcher.booked_tokens(p_run public.workflow_runs) IS 'booked_usd in tokens.';

CREATE FUNCTION dispatcher.booked_usd(p_run public.workflow_runs) RETURNS numeric
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select case when coalesce(p_run.paused_from, p_run.status) in ('queued', 'dispatched')
                or (p_run.reported_at is null and (p_run.finished_at is null or p_run.claimed_at is null)) then 0
              else coalesce(dispatcher.known_cost(p_run.cost_estimate),
                            case when p_run.finished_at is not null then dispatcher.known_cost(p_run.assumed_usd) end,
                            0) end
$$;

COMMENT ON FUNCTION dispatcher.booked_usd(p_run public.workflow_runs) IS 'What the books hold for the present claim of a run: what was reported; after its end without a report what is assumed; nothing for one that nobody has worked on.';

CREATE FUNCTION dispatcher.bounded_context(p_context jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$
  select case when octet_length(p_context::text) > 1048576
              then jsonb_build_object('context_too_large', octet_length(p_context::text)) else p_context end
$$;

COMMENT ON FUNCTION dispatcher.bounded_context(p_context jsonb) IS 'The context of an item as it is handed on: one of more than 1 MiB is replaced by its size, {context_too_large}.';

CREATE FUNCTION dispatcher.bounded_value(p_value jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$
  select case jsonb_typeof(p_value) when 'string' then to_jsonb(left(p_value #>> '{}', 10000))
              when 'object' then '{}' when 'array' then '[]' else p_value end
$$;

COMMENT ON FUNCTION dispatcher.bounded_value(p_value jsonb) IS 'A single value that somebody wrote into a row, as it is handed on: a text of at most 10,000 characters; what is no single value is empty.';

CREATE FUNCTION dispatcher.broadcast_budget_event(p_tenant_id uuid, p_frame jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $_$
begin
  if to_regprocedure('realtime.send(jsonb,text,text,boolean)') is not null then
    execute 'select realtime.send($1, $2, $3, true)' using p_frame, 'budget:breach',
      case p_tenant_id when '00000000-0000-0000-0000-000000000000' then 'budgets' else 'budgets:' || p_tenant_id end;
  end if;
exception when others then
  -- The event stands in its table; dispatch goes on.
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_tenant_id, null, 'broadcast of a budget', format('%s (%s)', sqlerrm, sqlstate));
end
$_$;

COMMENT ON FUNCTION dispatcher.broadcast_budget_event(p_tenant_id uuid, p_frame jsonb) IS 'Sends budget:breach to the private topic budgets (budgets:<tenant> for any but the default tenant). Never fails: the fault is noted.';

CREATE FUNCTION dispatcher.broadcast_hints_available() RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select to_regprocedure('realtime.send(jsonb,text,text,boolean)') is not null
     and exists (select from pg_catalog.pg_trigger where tgrelid = 'public.agent_inbox_items'::regclass
                  and tgname = 'dispatcher_inbox_insert_hint' and tgenabled <> 'D')
$$;

COMMENT ON FUNCTION dispatcher.broadcast_hints_available() IS 'Whether an insert is broadcast here: realtime.send exists and the insert trigger is in place and enabled.';

CREATE FUNCTION dispatcher.broken_budgets(p_budgets dispatcher.evaluated_budget[]) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$ select left(string_agg(format('%s: %s', b.name, b.error), '; '), 500) from unnest(p_budgets) as b
    where b.error is not null $$;

COMMENT ON FUNCTION dispatcher.broken_budgets(p_budgets dispatcher.evaluated_budget[]) IS 'The budgets that cannot be evaluated, each with its error; NULL when all can.';

CREATE FUNCTION dispatcher.budget_blocks(p_agent_id uuid, p_now timestamp with time zone) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_budget record;
  v_period_start date;
begin
  select status, hard_cutoff, monthly_limit_usd, period_anchor_tz, current_period_start, current_period_spend_usd
    into v_budget from dispatcher.agent_budgets where agent_id = p_agent_id;
  if v_budget is null or not v_budget.hard_cutoff then
    return false;
  end if;
  begin
    v_period_start := date_trunc('month', p_now at time zone v_budget.period_anchor_tz)::date;
  exception when invalid_parameter_value then
    v_period_start := date_trunc('month', p_now at time zone 'UTC')::date;
  end;
  return v_budget.current_period_start >= v_period_start
     and case when v_budget.monthly_limit_usd is null then v_budget.status = 'exceeded'
              else v_budget.current_period_spend_usd >= v_budget.monthly_limit_usd end;
end
$$;

COMMENT ON FUNCTION dispatcher.budget_blocks(p_agent_id uuid, p_now timestamp with time zone) IS 'Whether the agent''s budget forbids a wake: a hard cutoff whose spend of the running month is at or above its limit, whatever its status says; without a limit the status exceeded says so.';

CREATE FUNCTION dispatcher.budget_frame(p_budget dispatcher.evaluated_budget, p_kind text) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select jsonb_build_object(
    'id', concat_ws(':', p_budget.id, p_budget.period_key, p_kind), 'budget_id', p_budget.id, 'budget_name',
        p_budget.name,
    'scope', p_budget.scope, 'scope_id', p_budget.scope_id, 'period', p_budget.period, 'period_key',
        p_budget.period_key,
    'event_kind', p_kind, 'action', p_budget.action, 'spend_usd', p_budget.settled_usd + p_budget.reserved_usd,
    'spend_tokens', trunc(p_budget.settled_tokens + p_budget.reserved_tokens), 'cap_usd', p_budget.cap_usd,
        'cap_tokens', p_budget.cap_tokens,
    'message', format('Budget %s (%s) %s', p_budget.name, p_budget.period_key,
      case p_kind when 'recovered' then 'has recovered: a new period began' when 'warned' then 'is over its cap'
                  when 'paused' then 'holds new runs' else 'has stopped its runs' end),
    'timestamp', to_char(now() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'))
$$;

COMMENT ON FUNCTION dispatcher.budget_frame(p_budget dispatcher.evaluated_budget, p_kind text) IS 'What is broadcast of a budget event.';

CREATE FUNCTION dispatcher.budget_periods(p_tenant_id uuid, p_now timestamp with time zone) RETURNS TABLE(period text, timezone text, period_key text, starts_at timestamp with time zone, ends_at timestamp with time zone, error text)
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  for period, timezone in
    select distinct budget.period, budget.timezone from public.budgets as budget where budget.tenant_id = p_tenant_id
        and budget.active
  loop
    begin
      error := null;
      select running.period_key, running.starts_at, running.ends_at into period_key, starts_at, ends_at
        from dispatcher.workflow_period(period, timezone, p_now) as running;
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      period_key := null; starts_at := null; ends_at := null;
      error := format('%s (%s)', sqlerrm, sqlstate);
    end;
    return next;
  end loop;
end
$$;

COMMENT ON FUNCTION dispatcher.budget_periods(p_tenant_id uuid, p_now timestamp with time zone) IS 'The running period of every kind the tenant''s active budgets have; for a zone that is none, the error.';

CREATE FUNCTION dispatcher.budget_verdict(p_budgets dispatcher.evaluated_budget[], p_agent_id text, p_department_id text, p_workflow_type text, p_usd numeric, p_tokens numeric, OUT verdict text, OUT holders uuid[], OUT warned integer, OUT reason text) RETURNS record
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  with hit as (
    select b.id, b.action, b.error is not null as is_broken, b.fail_closed,
           case when b.cap_usd is not null then b.settled_usd else b.settled_tokens end as settled,
           case when b.cap_usd is not null then b.reserved_usd else b.reserved_tokens end as reserved,
           case when b.cap_usd is not null then p_usd else p_tokens end as one_more,
               coalesce(b.cap_usd, b.cap_tokens) as cap
      from unnest(p_budgets) as b
     where case b.scope when 'fleet' then true when 'agent' then b.scope_id = p_agent_id when 'department'
         then b.scope_id = p_department_id
                        else b.scope_id = p_workflow_type end
  ), ranked as (
    select hit.id, case when is_broken then case when fail_closed then 2 else 0 end
                        when action = 'hard_stop' and settled >= cap then 3
                        when action <> 'warn' and settled + reserved >= cap then 2
                        -- An empty budget lets one run go, however dear: else it would wait in every period.
                        when action <> 'warn' and settled + reserved + one_more > cap and settled + reserved > 0 then 2
                        when settled + reserved >= cap then 1 else 0 end as weight,
           not is_broken and one_more > cap as is_too_dear
      from hit
  )
  select (array['ok', 'ok', 'held', 'stopped'])[coalesce(max(weight), 0) + 1],
         coalesce(array_agg(ranked.id order by ranked.id) filter (where weight >= 2), '{}'),
         (count(*) filter (where weight = 1))::integer,
         case when bool_or(is_too_dear) filter (where weight >= 2) then 'estimate_over_cap'
              when max(weight) >= 2 then 'budget' end
    from ranked
$$;

COMMENT ON FUNCTION dispatcher.budget_verdict(p_budgets dispatcher.evaluated_budget[], p_agent_id text, p_department_id text, p_workflow_type text, p_usd numeric, p_tokens numeric, OUT verdict text, OUT holders uuid[], OUT warned integer, OUT reason text) IS 'May one more run start that is expected to cost this much: ok (also the first in a budget of which nothing is spent or reserved), held (a pause, a hard stop whose rest is reserved, or a broken fail_closed budget), or stopped (a hard stop that is spent). The strictest budget wins; holders are all that say no. reason: estimate_over_cap where one of them would hold the run whatever else was spent, else budget.';

CREATE FUNCTION dispatcher.budgets_named(p_tenant_id uuid, p_budget text, OUT active jsonb, OUT is_known boolean) RETURNS record
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  with named as (
    select budget.* from public.budgets as budget where budget.tenant_id = p_tenant_id
        and p_budget in (budget.id::text, budget.name)
  )
  select coalesce(jsonb_agg(jsonb_build_object('id', named.id, 'name', named.name, 'scope', named.scope, 'scope_id',
      named.scope_id,
                                               'period', named.period)
                            order by named.created_at, named.id) filter (where named.active), '[]'), count(*) > 0
    from named
   -- what is an id is no name
   where named.id::text = p_budget or not exists (select from named as same where same.id::text = p_budget)
$$;

COMMENT ON FUNCTION dispatcher.budgets_named(p_tenant_id uuid, p_budget text, OUT active jsonb, OUT is_known boolean) IS 'The active budgets of an id or name, and whether there are any at all.';

CREATE FUNCTION dispatcher.budgets_to_set(p_tenant_id uuid, p_budget_id uuid, p_name text, p_scope text, p_scope_id text, p_period text) RETURNS jsonb[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  return array(
    select to_jsonb(budget) from public.budgets as budget
     where budget.tenant_id = p_tenant_id
       and case when p_budget_id is not null then budget.id = p_budget_id
                else budget.active and budget.name = btrim(p_name)
                 and (p_scope is null or budget.scope = p_scope)
                 and (p_scope_id is null or budget.scope_id = p_scope_id)
                 and (p_period is null or budget.period = p_period) end
     order by budget.created_at, budget.id
       for no key update);
end
$$;

COMMENT ON FUNCTION dispatcher.budgets_to_set(p_tenant_id uuid, p_budget_id uuid, p_name text, p_scope text, p_scope_id text, p_period text) IS 'Locks the budgets that are meant: the one of an id, or the active ones of a name, and of the scope and period where they are given. Waits for at most lock_timeout.';

CREATE FUNCTION dispatcher.busy_agent(p_agent_id uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$ select dispatcher.refusal(p_agent_id, (select agent.slug from dispatcher.agents as agent
    where agent.id = p_agent_id), 'busy', 1) $$;

COMMENT ON FUNCTION dispatcher.busy_agent(p_agent_id uuid) IS 'The refusal of an agent of which another session holds a row.';

CREATE FUNCTION dispatcher.cap_of(p_budget dispatcher.evaluated_budget) RETURNS numeric
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$ select coalesce(p_budget.cap_usd, p_budget.cap_tokens) $$;

COMMENT ON FUNCTION dispatcher.cap_of(p_budget dispatcher.evaluated_budget) IS 'The cap of a budget, in USD or in tokens.';

CREATE FUNCTION dispatcher.chained_items(p_sweeper dispatcher.claimant, p_limit integer) RETURNS TABLE(agent_id uuid, item_id uuid, chain_depth integer)
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  return query
    -- From the few deep origins to their items, and not the other way: no statistics may turn this into a look at every
    -- item.
    with deep as materialized (
      select origin.item_id, origin.chain_depth from public.inbox_item_origins as origin
       where origin.tenant_id = p_sweeper.tenant_id
         and origin.chain_depth >= dispatcher.wake_chain_limit(p_sweeper.settings))
    select agent.id, item.id, deep.chain_depth
      from deep
      join dispatcher.agent_inbox_items as item on item.id = deep.item_id and item.status in ('pending', 'failed')
          and item.attempt_count < item.max_attempts
      join dispatcher.agents as agent on agent.id = item.agent_id and agent.tenant_id = item.tenant_id
     where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
     limit p_limit;
end
$$;

COMMENT ON FUNCTION dispatcher.chained_items(p_sweeper dispatcher.claimant, p_limit integer) IS 'Open items whose chain of wakes reached max_wake_chain.';

CREATE FUNCTION dispatcher.changed_budget(p_budget jsonb, p_change jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  -- A cap in one unit takes the place of one in the other, and another scope has another scope_id.
  select p_budget
         || case when p_change ? 'cap_usd' or p_change ? 'cap_tokens' then '{"cap_usd": null, "cap_tokens": null}'
                 else '{}'::jsonb end
         || case when p_change ->> 'scope' <> p_budget ->> 'scope' then '{"scope_id": null}' else '{}'::jsonb end
         || p_change
$$;

COMMENT ON FUNCTION dispatcher.changed_budget(p_budget jsonb, p_change jsonb) IS 'A budget (a row) with what is given of a change (no nulls); what is not given is kept.';

CREATE FUNCTION dispatcher.claim_at_sweep(p_sweeper dispatcher.claimant, p_claim_limit integer, p_request uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_claims jsonb := dispatcher.claim_waiting_wakes(p_sweeper.instance_id, p_claim_limit, p_request);
  v_queued integer;
begin
  -- Whoever did not get a slot now waits for one.
  v_queued := dispatcher.in_parts(p_sweeper, 'queue_agents', 'waitlist', array(
    select state.agent_id from public.agent_wake_state as state
      join dispatcher.agents as agent on agent.id = state.agent_id
     where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
       and state.waitlist_path = 'sweep' limit 500
         for update of state skip locked));
  return jsonb_build_object('count', jsonb_array_length(v_claims), 'claims', v_claims, 'queued', v_queued, 'waiting',
    (select count(*) from public.agent_wake_state as state
       join dispatcher.agents as agent on agent.id = state.agent_id
      where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
        and state.waitlisted_at is not null));
end
$$;

COMMENT ON FUNCTION dispatcher.claim_at_sweep(p_sweeper dispatcher.claimant, p_claim_limit integer, p_request uuid) IS 'Claims wakes off the waitlist; how many were queued for a slot by this sweep, and how many wait in all.';

CREATE FUNCTION dispatcher.claim_one_wake(p_claimant dispatcher.claimant, p_agent_id uuid, p_path text, p_item_ids uuid[], p_request uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_agent record;
  v_state public.agent_wake_state;
  v_facts dispatcher.gate_facts;
  v_gates record;
  v_wake public.agent_wakes;
begin
  v_agent := dispatcher.lock_agent(p_claimant, p_agent_id);
  if v_agent.verdict <> 'ok' then
    return dispatcher.refusal(p_agent_id, v_agent.slug, v_agent.verdict, case v_agent.verdict when 'busy' then 1 end);
  end if;
  v_state := v_agent.state;
  v_facts := dispatcher.read_gate_facts(p_agent_id, p_claimant.settings, coalesce(p_item_ids, '{}'), p_request);
  if v_facts.granted_wake_id is not null then  -- asked before under the same request: the same grant
    select * into v_wake from public.agent_wakes where id = v_facts.granted_wake_id;
    return dispatcher.wake_grant(v_wake);
  end if;
  v_gates := dispatcher.wake_gates(v_facts, p_claimant.settings);
  if cardinality(v_gates.blocked) > 0 then
    if v_state.waitlisted_at is not null then
      perform dispatcher.leave_waitlist(p_agent_id);
    end if;
    return dispatcher.refusal(p_agent_id, v_agent.slug, v_gates.blocked[1], dispatcher.seconds_until(v_gates.retry_at),
        v_facts.failures);
  end if;
  if v_facts.live_on_gateway >= (p_claimant.settings).max_concurrent_wakes then
    perform dispatcher.join_waitlist(p_agent_id, 'waitlist', now(), v_facts.oldest_due);
    return dispatcher.refusal(p_agent_id, v_agent.slug, 'concurrency_limit', null, v_facts.failures);
  end if;
  v_wake := dispatcher.write_wake(
    p_claimant, v_facts, case when v_state.waitlist_path = 'command' then 'command' else p_path end, p_request);
  if v_wake.id is null then  -- somebody deletes its items at this moment: what is left shows at the next look
    return dispatcher.refusal(p_agent_id, v_agent.slug, 'busy', 1);
  end if;
  return dispatcher.wake_grant(v_wake);
end
$$;

COMMENT ON FUNCTION dispatcher.claim_one_wake(p_claimant dispatcher.claimant, p_agent_id uuid, p_path text, p_item_ids uuid[], p_request uuid) IS 'Evaluates every gate of one agent, under the gateway''s lock that the caller holds, and writes the wake when all are open. Answers {granted, …}; busy where another session holds a row of the agent. Never waits.';

CREATE FUNCTION dispatcher.claim_waiting_wakes(p_instance_id uuid, p_limit integer, p_request uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_claimant dispatcher.claimant;
  v_waiting record;
  v_last record;
  v_answer jsonb;
  v_answers jsonb := '[]';
  v_granted integer := 0;
  v_page constant integer := 100;
  v_ends_at constant timestamptz := clock_timestamp() + interval '2 seconds';
  v_looked integer := 0;
  v_seen integer;
begin
  if coalesce(p_limit, 0) <= 0 then
    return v_answers;
  end if;
  v_claimant := dispatcher.lock_gateway(p_instance_id);
  perform set_config('lock_timeout', '100ms', true);
  select jsonb_agg(dispatcher.wake_grant(wake)) into v_answer from public.agent_wakes as wake
   where wake.claim_request = p_request and wake.state in ('starting', 'running');
  if v_answer is not null then
    return v_answer;
  end if;
  select '-infinity'::timestamptz as waitlisted_at, '-infinity'::timestamptz as waiting_since,
      '00000000-0000-0000-0000-000000000000'::uuid as agent_id
    into v_last;
  -- In pages: the plan then walks the index of the waitlist instead of sorting all of it for one free slot.
  loop
    v_seen := 0;
    for v_waiting in
      select state.agent_id, state.waitlist_path, state.waitlisted_at,
          coalesce(state.waiting_since, 'infinity') as waiting_since
        from public.agent_wake_state as state
        join dispatcher.agents as agent on agent.id = state.agent_id
       where state.waitlisted_at is not null and agent.gateway_id = v_claimant.gateway_id
         and agent.tenant_id = v_claimant.tenant_id
         and (state.waitlisted_at, coalesce(state.waiting_since, 'infinity'), state.agent_id) > (v_last.waitlisted_at,
             v_last.waiting_since, v_last.agent_id)
       order by state.waitlisted_at, coalesce(state.waiting_since, 'infinity'), state.agent_id limit v_page
    loop
      v_seen := v_seen + 1;
      v_answer := dispatcher.contained_claim(
        v_claimant, jsonb_build_object('agent_id', v_waiting.agent_id, 'path', v_waiting.waitlist_path), p_request);
      if v_answer ->> 'skip_reason' = 'concurrency_limit' then
        return v_answers;
      end if;
      if v_answer ->> 'skip_reason' = 'error' then
        perform dispatcher.set_off_waitlist(v_waiting.agent_id);
      end if;
      v_answers := v_answers || v_answer;
      v_granted := v_granted + (v_answer ->> 'granted')::boolean::integer;
      if v_granted >= p_limit or clock_timestamp() > v_ends_at then
        return v_answers;
      end if;
      select v_waiting.waitlisted_at, v_waiting.waiting_since, v_waiting.agent_id into v_last;
    end loop;
    v_looked := v_looked + v_seen;
    exit when v_seen < v_page or v_looked >= 500;
  end loop;
  return v_answers;
end
$$;

COMMENT ON FUNCTION dispatcher.claim_waiting_wakes(p_instance_id uuid, p_limit integer, p_request uuid) IS 'Claims up to p_limit wakes from the waitlist of the instance''s gateway, longest waiting first, at most 500 looked at. One that may no longer be woken leaves the list, one that is busy keeps its place; neither hides anybody.';

CREATE FUNCTION dispatcher.claimed_answer(p_code text, p_run public.workflow_runs) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select dispatcher.workflow_answer(p_code, p_run)
         || jsonb_build_object('claim_token', p_run.claim_token, 'deadline_in',
             dispatcher.seconds_until(p_run.deadline_at))
$$;

COMMENT ON FUNCTION dispatcher.claimed_answer(p_code text, p_run public.workflow_runs) IS 'The answer to who holds a run now, with its fence; deadline_in (s) is NULL when the deadline is no known time.';

CREATE FUNCTION dispatcher.clean_inbox_reason(p_reason text) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$
  select coalesce(nullif(btrim(left(p_reason, 4000)), ''), 'no reason given')
$$;

COMMENT ON FUNCTION dispatcher.clean_inbox_reason(p_reason text) IS 'A reason as it is stored: trimmed, at most 4,000 characters, never empty.';

CREATE FUNCTION dispatcher.close_leased_item(p_item_id uuid, p_outcome text, p_reason text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_now constant timestamptz := clock_timestamp();
  v_item dispatcher.agent_inbox_items;
begin
  update dispatcher.agent_inbox_items as item
     set status = case
           when p_outcome = 'done' then 'done'
           when p_outcome = 'released' then 'pending'
           when item.attempt_count >= item.max_attempts then 'dead_letter'
           else 'failed'
         end::public.inbox_item_status,
         attempt_count = case when p_outcome = 'released' then greatest(item.attempt_count - 1, 0)
             else item.attempt_count end,
         leased_until = null,
         completed_at = case when p_outcome = 'done' then v_now else item.completed_at end,
         failed_at = case when p_outcome = 'failed' then v_now else item.failed_at end,
         context = case when p_outcome = 'failed'
                        then dispatcher.merge_inbox_context(item.context,
                            jsonb_build_object('last_failure_reason', p_reason))
                        else item.context end,
         updated_at = v_now
   where item.id = p_item_id
  returning item.* into v_item;
  update public.inbox_item_leases as lease
     set closed_at = v_now, outcome = case when p_outcome = 'failed' then v_item.status::text else p_outcome end
   where lease.item_id = p_item_id;
end
$$;

COMMENT ON FUNCTION dispatcher.close_leased_item(p_item_id uuid, p_outcome text, p_reason text) IS 'Writes how an item ends that the caller holds under its lease; the trigger of the table tells one that is given up.';

CREATE FUNCTION dispatcher.close_leases(p_tenant_id uuid, p_gateway_id uuid, p_item_ids uuid[], p_outcome text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_half constant integer := coalesce(cardinality(p_item_ids), 0) / 2;
begin
  -- A side write. A lease left open owns nothing: its item is not leased any more, or was leased at another time.
  update public.inbox_item_leases set closed_at = now(), outcome = p_outcome
   where item_id in (select lease.item_id from public.inbox_item_leases as lease
                      where lease.item_id = any (p_item_ids) and lease.closed_at is null for update skip locked);
  perform dispatcher.settle_constraints('public.inbox_item_leases');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  if v_half = 0 then
    perform dispatcher.note_fault(p_tenant_id, p_gateway_id, 'end of a lease',
        format('item %s: %s (%s)', p_item_ids[1], sqlerrm, sqlstate));
    return;
  end if;
  perform dispatcher.close_leases(p_tenant_id, p_gateway_id, p_item_ids[:v_half], p_outcome);
  perform dispatcher.close_leases(p_tenant_id, p_gateway_id, p_item_ids[v_half + 1:], p_outcome);
end
$$;

COMMENT ON FUNCTION dispatcher.close_leases(p_tenant_id uuid, p_gateway_id uuid, p_item_ids uuid[], p_outcome text) IS 'Closes the open leases of items that nobody holds. One that raises stays open and is noted; it owns nothing once its item is released.';

CREATE FUNCTION dispatcher.column_remedy(p_name text, p_present text, p_expected text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $_$
  -- A type that is right is left alone: where a view reads the column, even the same type is refused.
  select format('alter table %1$s ', regexp_replace(p_name, '[.][^.]+$', ''))
         || case when present_type = expected_type then ''
                 else format('alter column %1$s type %2$s using %1$s::%2$s, ', own, expected_type) end
         || format('alter column %s %s', own,
              case when p_expected = expected_type then 'drop not null' else 'set not null' end)
    from (select split_part(p_name, '.', 3) as own, replace(p_present, ' not null', '') as present_type,
                 replace(p_expected, ' not null', '') as expected_type) as named
$_$;

COMMENT ON FUNCTION dispatcher.column_remedy(p_name text, p_present text, p_expected text) IS 'The statement that gives a column its type and nullability back.';

CREATE FUNCTION dispatcher.complete_workflow_row(p_run public.workflow_runs) RETURNS public.workflow_runs
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  -- What a state implies, for whoever changes a row by hand as for our own functions.
  if p_run.status in ('waiting_for_approval', 'blocked') then
    p_run.paused_from := coalesce(p_run.paused_from, 'queued');
    p_run.paused_at := coalesce(p_run.paused_at, now());
  end if;
  if p_run.status = 'dispatched' then
    p_run.dispatched_at := coalesce(p_run.dispatched_at, now());
    p_run.owner_agent_id := coalesce(p_run.owner_agent_id, p_run.pinned_agent_id,
      (select agent_id from public.workflow_agent_routing where tenant_id = p_run.tenant_id
          and workflow_type = p_run.workflow_type));
  end if;
  if p_run.status in ('claimed', 'running') then
    p_run.claimed_at := coalesce(p_run.claimed_at, p_run.started_at, now());
    p_run.claim_token := coalesce(p_run.claim_token, gen_random_uuid());
    p_run.last_heartbeat_at := coalesce(p_run.last_heartbeat_at, now());
    if p_run.deadline_at is null then
      p_run.deadline_at := dispatcher.deadline_of_run(p_run.claimed_at,
        dispatcher.workflow_timeout_minutes(p_run.tenant_id, p_run.workflow_type));
    end if;
  end if;
  if p_run.status in ('running', 'completed') then
    p_run.started_at := coalesce(p_run.started_at, p_run.claimed_at, p_run.finished_at, now());
  end if;
  if p_run.status in ('completed', 'failed', 'timed_out', 'cancelled') then
    p_run.finished_at := coalesce(p_run.finished_at, now());
    p_run.kept_status := null;
    p_run.kept_error := null;
  else
    p_run.finished_at := null;
  end if;
  return dispatcher.with_estimates(p_run);
end
$$;

COMMENT ON FUNCTION dispatcher.complete_workflow_row(p_run public.workflow_runs) IS 'The row with the times, keys and estimates its state implies.';

CREATE FUNCTION dispatcher.configured_estimates(p_tenant_id uuid, OUT usd numeric, OUT tokens bigint) RETURNS record
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(latest.workflow_cost_estimate_usd, 0.10), coalesce(latest.workflow_token_estimate, 20000)
    from (select 1) as one_row
    left join lateral (
      select settings.workflow_cost_estimate_usd, settings.workflow_token_estimate
        from public.dispatcher_instances as instance
        join public.dispatcher_settings as settings on settings.instance_id = instance.id
       where instance.tenant_id = p_tenant_id
       order by instance.state = 'running' desc, instance.last_heartbeat_at desc limit 1) as latest on true
$$;

COMMENT ON FUNCTION dispatcher.configured_estimates(p_tenant_id uuid, OUT usd numeric, OUT tokens bigint) IS 'What a run is taken to cost of which nothing is known: the settings of the tenant''s latest daemon, else 0.10 USD and 20,000 tokens.';

CREATE FUNCTION dispatcher.contained_claim(p_claimant dispatcher.claimant, p_claim jsonb, p_request uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_answer jsonb;
  v_error text;
begin
  -- What a trigger puts off until the commit would take the claims of all with it: it speaks here, for this agent.
  set constraints all deferred;
  v_answer := dispatcher.claim_one_wake(p_claimant, (p_claim ->> 'agent_id')::uuid,
      coalesce(p_claim ->> 'path', 'event'), dispatcher.hinted_ids(p_claim), p_request);
  set constraints all immediate;
  return v_answer;
exception when lock_not_available then
  return dispatcher.busy_agent((p_claim ->> 'agent_id')::uuid);
when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  v_error := sqlerrm;
  perform dispatcher.note_fault(p_claimant.tenant_id, p_claimant.gateway_id, 'claim',
      format('agent %s: %s (%s)', p_claim ->> 'agent_id', v_error, sqlstate));
  return jsonb_build_object('granted', false, 'agent_id', p_claim -> 'agent_id', 'skip_reason', 'error', 'retry_in',
      null, 'failures', null,
                            'error', left(v_error, 500), 'error_code', sqlstate, 'agent_slug',
                            (select agent.slug from dispatcher.agents as agent
                                where agent.id::text = p_claim ->> 'agent_id'));
end
$$;

COMMENT ON FUNCTION dispatcher.contained_claim(p_claimant dispatcher.claimant, p_claim jsonb, p_request uuid) IS 'claim_one_wake for a claim {agent_id, path, item_ids}, but what raises for one agent is that agent''s answer: skip_reason error, with error and error_code.';

CREATE FUNCTION dispatcher.correct_run(p_run public.workflow_runs, p_session text, p_usage jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_before constant public.workflow_runs := p_run;
  v_booked jsonb;
begin
  if p_session is not null and p_session is distinct from p_run.session_id then
    v_booked := dispatcher.book_lost_claim(p_run, p_session, null, p_usage);
  elsif p_run.claimed_at is not null and coalesce(p_run.paused_from, p_run.status) not in ('queued', 'dispatched') then
    p_run := dispatcher.book_workflow_usage(p_run, p_usage);
    v_booked := dispatcher.booked_since(v_before, p_run);
  end if;
  return dispatcher.workflow_answer(case when v_booked is null then 'nothing_booked' else 'ok' end, p_run)
      || jsonb_build_object('booked', v_booked);
end
$$;

COMMENT ON FUNCTION dispatcher.correct_run(p_run public.workflow_runs, p_session text, p_usage jsonb) IS 'Books what a run, which the caller has locked, or a session it has lost, has really cost in all.';

CREATE TABLE public.agent_wakes (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid NOT NULL,
    agent_id uuid NOT NULL,
    gateway_id uuid NOT NULL,
    instance_id uuid,
    claim_token uuid DEFAULT gen_random_uuid() NOT NULL,
    claim_request uuid,
    state text DEFAULT 'starting'::text NOT NULL,
    path text NOT NULL,
    item_ids uuid[] DEFAULT '{}'::uuid[] NOT NULL,
    chain_depth integer DEFAULT 0 NOT NULL,
    model_override text,
    thinking_override text,
    host_id text,
    pid integer,
    pid_started_at double precision,
    claimed_at timestamp with time zone DEFAULT now() NOT NULL,
    started_at timestamp with time zone,
    deadline_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone,
    exit_code integer,
    error text,
    workflow_run_id uuid,
    CONSTRAINT agent_wakes_ended_has_time CHECK (((state = ANY (ARRAY['starting'::text, 'running'::text])) = (ended_at IS NULL))),
    CONSTRAINT agent_wakes_path_check CHECK ((path = ANY (ARRAY['event'::text, 'sweep'::text, 'waitlist'::text, 'due'::text, 'command'::text, 'workflow'::text]))),
    CONSTRAINT agent_wakes_running_has_pid CHECK (((state <> 'running'::text) OR ((pid IS NOT NULL) AND (started_at IS NOT NULL)))),
    CONSTRAINT agent_wakes_state_check CHECK ((state = ANY (ARRAY['starting'::text, 'running'::text, 'succeeded'::text, 'failed'::text, 'timed_out'::text, 'no_progress'::text, 'lost'::text, 'interrupted'::text, 'spawn_failed'::text])))
);

COMMENT ON TABLE public.agent_wakes IS 'One row per wake: one run of `openclaw agent` for one agent, from its claim to its end.';

COMMENT ON COLUMN public.agent_wakes.workflow_run_id IS 'The orphaned run this wake was started for.';

CREATE FUNCTION dispatcher.dead_letters_of_wake(p_wake public.agent_wakes, p_known uuid[]) RETURNS uuid[]
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  -- YourHQ's functions, too, leave their time, and know no leases of ours.
  select coalesce(array_agg(item.id order by item.created_at, item.id), '{}')
    from dispatcher.agent_inbox_items as item
   where item.agent_id = p_wake.agent_id and item.tenant_id = p_wake.tenant_id and item.status = 'dead_letter'
     and item.id <> all (p_known)
     and item.failed_at between p_wake.claimed_at and clock_timestamp()
     and item.leased_at between p_wake.claimed_at and item.failed_at
$$;

COMMENT ON FUNCTION dispatcher.dead_letters_of_wake(p_wake public.agent_wakes, p_known uuid[]) IS 'Items the agent itself failed for good in a wake, without p_known.';

CREATE FUNCTION dispatcher.deadline_of_run(p_claimed_at timestamp with time zone, p_minutes integer) RETURNS timestamp with time zone
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$ select least(p_claimed_at, now() + interval '1 year') + make_interval(mins => p_minutes) $$;

COMMENT ON FUNCTION dispatcher.deadline_of_run(p_claimed_at timestamp with time zone, p_minutes integer) IS 'When a claim runs out. A claim from beyond any clock counts from a year ahead, so that no sum overflows.';

CREATE FUNCTION dispatcher.definition_remedy(p_kind text, p_name text, p_definition text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $_$
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
$_$;

COMMENT ON FUNCTION dispatcher.definition_remedy(p_kind text, p_name text, p_definition text) IS 'The statement that brings back a recorded definition; NULL where applying the files does.';

CREATE FUNCTION dispatcher.depth_of_post(p_wake public.agent_wakes) RETURNS integer
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  -- Also deeper than what this wake has leased since its claim: agents that run side by side can pass work to and fro
  -- as well.
  select coalesce(greatest(p_wake.chain_depth, (select max(origin.chain_depth) from public.inbox_item_leases as lease
                                                  join public.inbox_item_origins as origin
                                                    on origin.item_id = lease.item_id
                                                 where lease.wake_id = p_wake.id)) + 1, 0)
$$;

COMMENT ON FUNCTION dispatcher.depth_of_post(p_wake public.agent_wakes) IS 'How long the chain of wakes behind a post is; 0 outside a wake.';

CREATE FUNCTION dispatcher.differences(p_before jsonb, p_after jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select coalesce(jsonb_object_agg(after.key, jsonb_build_array(p_before -> after.key, after.value)), '{}')
    from jsonb_each(p_after - array['updated_at', 'created_at', 'revision', 'id', 'tenant_id']) as after
   where p_before -> after.key is distinct from after.value
$$;

COMMENT ON FUNCTION dispatcher.differences(p_before jsonb, p_after jsonb) IS 'What differs between two rows: {column: [before, after]}, without what changes by itself.';

CREATE FUNCTION dispatcher.differs_from_run(p_run public.workflow_runs, p_workflow_type text, p_input jsonb, p_agent text) RETURNS text[]
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select case when p_run.workflow_type <> btrim(p_workflow_type) then array['workflow type'] else '{}'::text[] end
      || case when p_run.input_payload <> coalesce(p_input, '{}') then array['input'] else '{}'::text[] end
      || case when p_agent is not null and p_run.pinned_agent_id is distinct from nullif(btrim(p_agent), '')
              then array['agent'] else '{}'::text[] end
$$;

COMMENT ON FUNCTION dispatcher.differs_from_run(p_run public.workflow_runs, p_workflow_type text, p_input jsonb, p_agent text) IS 'In what a run that is to be queued differs from the one that has its key already.';

CREATE FUNCTION dispatcher.dispatch_queued_runs(p_tick dispatcher.tick) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_batch constant integer := (p_tick.settings).workflow_batch_size;
  v_gateways constant uuid[] := dispatcher.held_gateways(p_tick);
  v_types constant text[] := dispatcher.lock_routes(p_tick);
  v_money constant dispatcher.money := dispatcher.read_money(p_tick);
  v_tight constant dispatcher.evaluated_budget[] := dispatcher.tight_budgets(v_money.budgets, v_money.estimates,
      v_batch + 500);
  v_groups constant dispatcher.waiting_group[] := dispatcher.waiting_groups(p_tick.tenant_id, v_money.estimates,
      v_tight);
  v_unheld constant dispatcher.waiting_group[] := dispatcher.unheld_groups(v_groups, p_tick.tenant_id, v_types,
      v_gateways);
  v_done jsonb;
  v_held bigint;
  v_told text;
  v_broken constant text := dispatcher.broken_budgets(v_money.budgets);
begin
  perform dispatcher.note_workflow_actor('dispatcher', 'dispatched');
  v_done := dispatcher.hand_out(p_tick.tenant_id, v_unheld, v_tight, v_batch);
  v_told := dispatcher.tell_of_money(p_tick, v_money, array(select budget_id
      from dispatcher.holds_of(v_groups, v_done -> 'closed')));
  select coalesce(sum(g.due), 0) into v_held from unnest(v_groups) as g where g.verdict = 'held' and g.is_open;
  return jsonb_build_object(
    'dispatched', v_done -> 'dispatched', 'held', v_held + jsonb_array_length(v_done -> 'closed'), 'warned',
        v_done -> 'warned',
    'held_by', dispatcher.held_by(v_groups, v_done -> 'closed', v_money.budgets),
    'blockers', dispatcher.blockers_of(v_groups, v_done -> 'closed'), 'errors', v_done -> 'errors',
    'locked', cardinality(v_groups) - cardinality(v_unheld), 'again', (v_done ->> 'dispatched')::integer >= v_batch,
    'budget_error', coalesce(v_broken, v_money.error, v_told), 'budgets_open', v_money.error is not null
        or v_broken is not null);
end
$$;

COMMENT ON FUNCTION dispatcher.dispatch_queued_runs(p_tick dispatcher.tick) IS 'Hands out queued runs: by route priority, run priority and age, each with what its waiting adds. {dispatched, held, held_by, blockers ({type: budget | estimate_over_cap}), warned, locked (groups whose route or gateway another session holds), errors, budget_error, budgets_open, again}.';

CREATE FUNCTION dispatcher.dispatch_runs(p_runs dispatcher.run_choice[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  update public.workflow_runs as run
     set status = 'dispatched', owner_agent_id = chosen.agent_id, dispatched_at = now(),
         dispatch_attempts = least(run.dispatch_attempts, 2147483646) + 1, reserved_usd = chosen.usd,
         reserved_tokens = least(chosen.tokens, 1e18), next_attempt_at = null, blocker_type = null,
             blocker_description = null
    from unnest(p_runs) as chosen where run.id = chosen.run_id;
  perform dispatcher.owe_notifications(p_runs);
end
$$;

COMMENT ON FUNCTION dispatcher.dispatch_runs(p_runs dispatcher.run_choice[]) IS 'Hands runs, which the caller has locked, to their agents: with their reservations, and the notifications that are owed for them.';

CREATE FUNCTION dispatcher.dispatcher_gateway_topic(p_gateway_id uuid) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$ select 'gateway:' || p_gateway_id::text $$;

COMMENT ON FUNCTION dispatcher.dispatcher_gateway_topic(p_gateway_id uuid) IS 'The private Realtime topic of a gateway.';

CREATE FUNCTION dispatcher.drop_notifications(p_run_ids uuid[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '100ms'
    AS $$
begin
  -- One that somebody holds is dropped when it is claimed: its run has moved on.
  update public.workflow_notifications set state = 'obsolete'
   where id in (select note.id from public.workflow_notifications as note
                 where note.run_id = any (p_run_ids) and note.state = 'pending' for update skip locked);
  perform dispatcher.settle_constraints('public.workflow_notifications');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault((select tenant_id from public.workflow_runs where id = p_run_ids[1]), null,
                                'dropped notification of a run', format('%s (%s)', sqlerrm, sqlstate));
end
$$;

COMMENT ON FUNCTION dispatcher.drop_notifications(p_run_ids uuid[]) IS 'Nobody has to be told of these runs any more. A side write: the claim of a notification looks at its run again. Never waits.';

CREATE FUNCTION dispatcher.drop_outdated_notifications(p_tenant_id uuid, p_limit integer) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  update public.workflow_notifications set state = 'obsolete', claim_token = null, claimed_until = null
   where id in (select note.id from public.workflow_notifications as note
       join public.workflow_runs as run on run.id = note.run_id
                 where note.tenant_id = p_tenant_id and (note.state = 'pending'
                   or (note.state = 'sending' and note.claimed_until < now()))
                   and (run.status <> 'dispatched' or run.dispatch_attempts <> note.attempt)
                 limit p_limit for update of note skip locked)
$$;

COMMENT ON FUNCTION dispatcher.drop_outdated_notifications(p_tenant_id uuid, p_limit integer) IS 'Drops notifications whose run has moved on. Never waits.';

CREATE FUNCTION dispatcher.drop_retired_objects() RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $_$
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
$_$;

COMMENT ON FUNCTION dispatcher.drop_retired_objects() IS 'Drops the functions, views and triggers of earlier versions. An object of somebody else that depends on one stops it, and is named.';

CREATE FUNCTION dispatcher.due_queue(p_tenant_id uuid) RETURNS TABLE(workflow_type text, pinned_agent_id text, due bigint, oldest timestamp with time zone, priorities integer[])
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select level.workflow_type, level.pinned_agent_id, sum(level.due)::bigint, min(level.oldest),
      array_agg(level.priority)
    from (select run.workflow_type, run.pinned_agent_id, run.priority, count(*) as due, min(run.queued_at) as oldest
            from public.workflow_runs as run
           where run.tenant_id = p_tenant_id and run.status = 'queued'
             and (run.next_attempt_at is null or run.next_attempt_at <= now())
           group by run.workflow_type, run.pinned_agent_id, run.priority) as level
   group by level.workflow_type, level.pinned_agent_id
$$;

COMMENT ON FUNCTION dispatcher.due_queue(p_tenant_id uuid) IS 'What is queued and due, by type and pin: how many, since when, of which priorities.';

CREATE FUNCTION dispatcher.earliest_instant(p_local timestamp without time zone, p_timezone text) RETURNS timestamp with time zone
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  -- Where clocks go back over it, a local time comes twice (or a whole day does): the first one counts.
  select (p_local at time zone p_timezone) - coalesce(max(back.step), interval '0')
    from unnest(array['20 minutes', '30 minutes', '1 hour', '90 minutes', '2 hours', '24 hours']::interval[])
      as back (step)
   where ((p_local at time zone p_timezone) - back.step) at time zone p_timezone >= p_local
$$;

COMMENT ON FUNCTION dispatcher.earliest_instant(p_local timestamp without time zone, p_timezone text) IS 'The first instant of a local time in a zone.';

CREATE FUNCTION dispatcher.end_wake(p_wake_id uuid, p_claim_token uuid, p_ending text, p_exit_code integer, p_error text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_locked record;
  v_wake public.agent_wakes;
  v_settings public.dispatcher_settings;
  v_state text;
  v_failures integer;
  v_dead uuid[];
begin
  if p_ending is null or p_ending not in ('exited', 'timed_out', 'interrupted', 'lost', 'spawn_failed', 'item_refused',
      'agent_refused') then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'code', 'invalid', 'error',
        format('unknown ending %s', left(p_ending, 100)));
  end if;
  v_locked := dispatcher.lock_wake(p_wake_id);
  v_wake := v_locked.wake;
  if v_locked.verdict <> 'ok' then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'code', v_locked.verdict);
  end if;
  if p_claim_token is null or v_wake.claim_token <> p_claim_token then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'state', v_wake.state, 'code', 'fence_lost');
  end if;
  select * into v_settings from public.dispatcher_settings where instance_id = v_wake.instance_id;
  if v_settings.instance_id is null then
    v_settings := dispatcher.settings_of_gateway(v_wake.gateway_id, '{}');
  end if;
  if v_wake.ended_at is not null then
    -- Whoever asks again did not hear the first answer, and so not when to look at the agent next.
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'code', 'already', 'state', v_wake.state,
        'agent_id', v_wake.agent_id)
           || dispatcher.wait_for_next_wake(v_wake, v_settings, v_wake.state);
  end if;
  perform set_config('dispatcher.quiet', 'on', true);
  v_state := dispatcher.wake_end_state(v_wake, p_ending, p_exit_code);
  update public.agent_wakes set state = v_state, ended_at = now(), exit_code = p_exit_code, error = left(p_error, 2000)
      where id = p_wake_id;
  perform dispatcher.must_be_written(found, 'end');
  update public.agent_wake_state as memory
     set last_ended_at = now(), last_end_state = v_state, updated_at = now(),
         consecutive_failures = dispatcher.failures_after(memory.consecutive_failures, v_state, p_ending,
             v_state = 'timed_out'
                                  and dispatcher.wake_has_progress(v_wake), v_settings.max_consecutive_failures)
   where memory.agent_id = v_wake.agent_id
  returning memory.consecutive_failures into v_failures;
  perform dispatcher.must_be_written(found, 'end');
  v_dead := dispatcher.settle_items_of_wake(v_wake, v_state, p_ending, p_error);
  if v_wake.started_at is null then
    perform dispatcher.stamp_items(v_wake, null);
  end if;
  if v_failures >= v_settings.max_consecutive_failures then
    perform dispatcher.stall_at_end(v_wake, case when p_ending = 'agent_refused'
        then format('It cannot be started: %s', left(p_error, 500)) end);
  end if;
  return jsonb_build_object('wake_id', p_wake_id, 'applied', true, 'code', 'ok', 'state', v_state, 'agent_id',
      v_wake.agent_id,
                            'agent_slug', (select slug from dispatcher.agents where id = v_wake.agent_id),
                                'consecutive_failures', v_failures,
                            'cause', case when p_ending = 'agent_refused' then left(p_error, 500) end,
                            'dead_letters', to_jsonb(v_dead || dispatcher.dead_letters_of_wake(v_wake, v_dead)))
         || dispatcher.wait_for_next_wake(v_wake, v_settings, v_state);
end
$$;

COMMENT ON FUNCTION dispatcher.end_wake(p_wake_id uuid, p_claim_token uuid, p_ending text, p_exit_code integer, p_error text) IS 'Ends a wake: final state, leases released, failures counted, items given up (dead_letters), and what is next for its agent (waitlisted, or retry_in seconds). p_ending: exited, timed_out, interrupted, lost, spawn_failed, item_refused (its first item is at fault and given up), agent_refused (the agent is stalled at once). Needs the claim token; busy where another session holds a row of the agent.';

CREATE FUNCTION dispatcher.end_workflow_claim(p_run public.workflow_runs, p_as text) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  update public.workflow_claims set ended_at = now(), ended_as = p_as where claim_token = p_run.claim_token and ended_at
      is null
$$;

COMMENT ON FUNCTION dispatcher.end_workflow_claim(p_run public.workflow_runs, p_as text) IS 'Closes the present claim of a run in the history of claims.';

CREATE FUNCTION dispatcher.ensure_type(p_name text, p_attributes text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
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

COMMENT ON FUNCTION dispatcher.ensure_type(p_name text, p_attributes text) IS 'Makes a composite type of schema dispatcher what p_attributes says (names and types as format_type writes them); one that differs goes, with the functions that use it, which the files make anew.';

CREATE FUNCTION dispatcher.escalate_leased_item(p_item_id uuid, p_reason text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_now constant timestamptz := clock_timestamp();
begin
  update dispatcher.agent_inbox_items as item
     set status = 'done', completed_at = v_now, leased_until = null, updated_at = v_now,
         context = dispatcher.merge_inbox_context(item.context,
             jsonb_build_object('outcome', 'escalated', 'escalation_reason', p_reason))
   where item.id = p_item_id;
  update public.inbox_item_leases as lease set closed_at = v_now, outcome = 'escalated' where lease.item_id = p_item_id;
  perform dispatcher.block_task_of_item(p_item_id, v_now);
  perform dispatcher.tell_escalation(p_item_id, p_reason);
end
$$;

COMMENT ON FUNCTION dispatcher.escalate_leased_item(p_item_id uuid, p_reason text) IS 'Writes that an item, which the caller holds under its lease, is a human''s now.';

CREATE FUNCTION dispatcher.estimate_of_type(p_tenant_id uuid, p_workflow_type text, OUT usd numeric, OUT tokens bigint) RETURNS record
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$ select usd, tokens from dispatcher.estimates_of_types(p_tenant_id, array[p_workflow_type]) $$;

COMMENT ON FUNCTION dispatcher.estimate_of_type(p_tenant_id uuid, p_workflow_type text, OUT usd numeric, OUT tokens bigint) IS 'What a run of one type is expected to cost.';

CREATE FUNCTION dispatcher.estimates_of_types(p_tenant_id uuid, p_types text[]) RETURNS TABLE(workflow_type text, usd numeric, usd_reports bigint, tokens bigint, tokens_reports bigint)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  -- A reported zero is a zero for its run, and no estimate for others.
  select types.workflow_type, coalesce(cost.usd, configured.usd), cost.reports,
         coalesce(used.tokens, configured.tokens), used.reports
    from unnest(p_types) as types (workflow_type)
    cross join dispatcher.configured_estimates(p_tenant_id) as configured
    cross join lateral (
      select round((percentile_cont(0.5) within group (order by recent.cost))::numeric, 6) as usd, count(*) as reports
        from (select run.cost_estimate::double precision as cost from public.workflow_runs as run
               where run.tenant_id = p_tenant_id and run.workflow_type = types.workflow_type
                 and run.reported_at is not null and run.finished_at is not null
                 and run.cost_estimate > 0 and run.cost_estimate < 'Infinity'
               order by run.reported_at desc limit 20) as recent) as cost
    cross join lateral (
      select round(percentile_cont(0.5) within group (order by least(recent.tokens, 1e15)))::bigint as tokens,
             count(*) as reports
        from (select dispatcher.known_tokens(run.input_tokens, run.output_tokens)::double precision as tokens
                from public.workflow_runs as run
               where run.tenant_id = p_tenant_id and run.workflow_type = types.workflow_type
                 and run.reported_at is not null and run.finished_at is not null
                 and greatest(run.input_tokens, run.output_tokens) > 0
               order by run.reported_at desc limit 20) as recent
       where recent.tokens is not null) as used
$$;

COMMENT ON FUNCTION dispatcher.estimates_of_types(p_tenant_id uuid, p_types text[]) IS 'What a run of each type is expected to cost, in USD and in tokens: the median of its last 20 reports above zero, and of how many; what is configured where there is none (0 reports).';

CREATE FUNCTION dispatcher.evaluate_budgets(p_tenant_id uuid, p_action text DEFAULT NULL::text, p_now timestamp with time zone DEFAULT now()) RETURNS dispatcher.evaluated_budget[]
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_budgets constant dispatcher.evaluated_budget[] := dispatcher.unspent_budgets(p_tenant_id, p_action, p_now);
begin
  if cardinality(v_budgets) = 0 then
    return v_budgets;
  end if;
  return dispatcher.with_spend(p_tenant_id, v_budgets);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  -- What the budgets are is known by now, or this raises in its turn.
  return dispatcher.with_error(dispatcher.unspent_budgets(p_tenant_id, p_action, p_now),
      format('%s (%s)', sqlerrm, sqlstate));
end
$$;

COMMENT ON FUNCTION dispatcher.evaluate_budgets(p_tenant_id uuid, p_action text, p_now timestamp with time zone) IS 'Every active budget (of one action, or all) with its period and spend; one pass over the books, however many budgets there are and runs wait. A budget that cannot be evaluated carries its error.';

CREATE FUNCTION dispatcher.expected_objects() RETURNS TABLE(kind text, name text, definition text, base_of text)
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  -- see 20261130009900_schema_version.sql
$$;

COMMENT ON FUNCTION dispatcher.expected_objects() IS 'What the migration files make. base_of: made only where this table or function of YourHQ''s was absent.';

CREATE FUNCTION dispatcher.expire_items(p_agent_ids uuid[], p_item_ids uuid[], p_reason text) RETURNS uuid[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_ids uuid[];
begin
  with expired as (
    update dispatcher.agent_inbox_items as item
       set status = 'failed', attempt_count = greatest(item.attempt_count, item.max_attempts), failed_at = now(),
           leased_at = null, leased_until = null, updated_at = now(),
           context = dispatcher.merge_inbox_context(item.context, jsonb_build_object('last_failure_reason', p_reason))
     where item.id in (select held.id from dispatcher.agent_inbox_items as held
                        where held.id = any (p_item_ids) and held.agent_id = any (p_agent_ids)
                          and held.status in ('pending', 'failed')
                        order by held.id limit 500 for update skip locked)
    returning item.id)
  select array_agg(id) into v_ids from expired;
  if v_ids is not null then
    perform dispatcher.mark_as_set_aside(v_ids, 'operator');
  end if;
  return coalesce(v_ids, '{}');
end
$$;

COMMENT ON FUNCTION dispatcher.expire_items(p_agent_ids uuid[], p_item_ids uuid[], p_reason text) IS 'Ends pending and failed items by an operator''s hand and marks them so, at most 500; answers which. What somebody holds is left alone.';

CREATE FUNCTION dispatcher.expire_picked(p_sweeper dispatcher.claimant, p_item_ids uuid[]) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_count integer;
begin
  update dispatcher.agent_inbox_items as item
     set status = 'failed', attempt_count = greatest(item.attempt_count, item.max_attempts), failed_at = now(),
         updated_at = now(),
         context = dispatcher.merge_inbox_context(item.context, jsonb_build_object(
           'last_failure_reason', format('stale: pending for more than %s h',
               (p_sweeper.settings).stale_item_age_hours)))
   where item.id = any (p_item_ids);
  get diagnostics v_count = row_count;
  return v_count;
end
$$;

COMMENT ON FUNCTION dispatcher.expire_picked(p_sweeper dispatcher.claimant, p_item_ids uuid[]) IS 'Stale items fail for good, reason recorded; answers how many did.';

CREATE FUNCTION dispatcher.expire_stale_items(p_sweeper dispatcher.claimant, p_limit integer) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  return dispatcher.in_parts(p_sweeper, 'expire_picked', 'expiry of an item',
      dispatcher.stale_item_ids(p_sweeper, p_limit));
end
$$;

COMMENT ON FUNCTION dispatcher.expire_stale_items(p_sweeper dispatcher.claimant, p_limit integer) IS 'Stale items fail for good; one that raises costs no other.';

CREATE FUNCTION dispatcher.failures_after(p_before integer, p_state text, p_ending text, p_has_progress boolean, p_max integer) RETURNS integer
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select case
    when p_state = 'succeeded' then 0
    when p_state in ('interrupted', 'lost') or p_ending = 'item_refused' then p_before
    when p_ending = 'agent_refused' then greatest(p_before, p_max)
    -- slow but working: a longer cooldown, never a stall of its own making
    when p_state = 'timed_out' and p_has_progress then greatest(least(p_before + 1, p_max - 1), p_before)
    else least(p_before, 2147483646) + 1 end
$$;

COMMENT ON FUNCTION dispatcher.failures_after(p_before integer, p_state text, p_ending text, p_has_progress boolean, p_max integer) IS 'Failures in a row after a wake that ended so.';

CREATE FUNCTION dispatcher.fallback_estimates(p_settings public.dispatcher_settings) RETURNS jsonb
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select jsonb_build_object('', jsonb_build_object('usd', coalesce(p_settings.workflow_cost_estimate_usd, 0.10),
                                                   'tokens', coalesce(p_settings.workflow_token_estimate, 20000)))
$$;

COMMENT ON FUNCTION dispatcher.fallback_estimates(p_settings public.dispatcher_settings) IS 'The configured estimates as workflow_estimates has them, where the reports cannot be read.';

CREATE FUNCTION dispatcher.fault_of_orphan(p_run public.workflow_runs, p_claim_token uuid, p_settings public.dispatcher_settings) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select case when p_run.id is null or p_run.status <> 'running' or p_claim_token is null
      or p_run.claim_token is distinct from p_claim_token
                or dispatcher.last_heartbeat(p_run)
                     >= now() - make_interval(secs => dispatcher.orphan_after_seconds(p_settings))
              then 'not_an_orphan'
              when exists (select from public.workflow_respawns where run_id = p_run.id
                  and attempt = p_run.dispatch_attempts)
              then 'already_respawned' end
$$;

COMMENT ON FUNCTION dispatcher.fault_of_orphan(p_run public.workflow_runs, p_claim_token uuid, p_settings public.dispatcher_settings) IS 'Why a run may have no new process; NULL when it may.';

CREATE FUNCTION dispatcher.faults_of_budget(p_tenant_id uuid, p_name text, p_scope text, p_scope_id text, p_period text, p_cap_usd numeric, p_cap_tokens bigint, p_action text, p_timezone text) RETURNS text[]
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select dispatcher.faults_of_tenant(p_tenant_id) || dispatcher.faults_of_text('name', p_name, 300, true)
      || case when p_scope in ('agent', 'department', 'project', 'fleet') then '{}'
          else array['scope: none of agent, department, project, fleet'] end
      || case when (p_scope = 'fleet') <> (coalesce(p_scope_id, '') = '')
          then array['scope_id: needed for every scope but fleet, and only there']
              else dispatcher.faults_of_text('scope_id', p_scope_id, 200, false) end
      || case when p_period in ('daily', 'weekly', 'monthly') then '{}'
          else array['period: none of daily, weekly, monthly'] end
      || case when num_nonnulls(p_cap_usd, p_cap_tokens) = 1 then '{}'
          else array['cap: exactly one of cap_usd and cap_tokens'] end
      || case when p_cap_usd < 0 or p_cap_usd = 'NaN' or p_cap_usd >= 99999999.9999995
          then array['cap_usd: outside 0 to 99999999'] else '{}' end
      || case when p_cap_tokens < 0 then array['cap_tokens: below 0'] else '{}' end
      || case when p_action in ('warn', 'pause_new_runs', 'hard_stop') then '{}'
          else array['action: none of warn, pause_new_runs, hard_stop'] end
      || case when dispatcher.is_timezone(coalesce(p_timezone, 'UTC')) then '{}'
          else array['timezone: not a known zone'] end
$$;

COMMENT ON FUNCTION dispatcher.faults_of_budget(p_tenant_id uuid, p_name text, p_scope text, p_scope_id text, p_period text, p_cap_usd numeric, p_cap_tokens bigint, p_action text, p_timezone text) IS 'What is wrong with a budget that is to be set; empty when nothing is.';

CREATE FUNCTION dispatcher.faults_of_delay(p_seconds double precision, p_not_before timestamp with time zone) RETURNS text[]
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select case when p_seconds < 0 or p_seconds > 315360000 or p_seconds = 'NaN'
      then array['delay_seconds: outside 0 to 315360000']
              else '{}' end
         || case when not isfinite(p_not_before) then array['not_before: infinite'] else '{}' end
$$;

COMMENT ON FUNCTION dispatcher.faults_of_delay(p_seconds double precision, p_not_before timestamp with time zone) IS 'What is wrong with when a run may go out: at most ten years of delay, and no infinite time.';

CREATE FUNCTION dispatcher.faults_of_new_run(p_tenant_id uuid, p_workflow_type text, p_priority integer, p_initiator text, p_task_id text, p_agent text, p_request_key text) RETURNS text[]
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select dispatcher.faults_of_tenant(p_tenant_id) || dispatcher.faults_of_text('workflow_type', p_workflow_type, 200,
      true)
      || dispatcher.faults_of_text('initiator', p_initiator, 500, false)
          || dispatcher.faults_of_text('task_id', p_task_id, 500, false)
      || dispatcher.faults_of_text('agent', p_agent, 200, false)
          || dispatcher.faults_of_text('request_key', p_request_key, 500, false)
      || case when abs(p_priority::bigint) > 1000000 then array['priority: outside -1000000 to 1000000'] else '{}' end
$$;

COMMENT ON FUNCTION dispatcher.faults_of_new_run(p_tenant_id uuid, p_workflow_type text, p_priority integer, p_initiator text, p_task_id text, p_agent text, p_request_key text) IS 'What is wrong with a run that is to be queued; empty when nothing is.';

CREATE FUNCTION dispatcher.faults_of_route(p_tenant_id uuid, p_workflow_type text, p_agent text, p_priority integer, p_max_concurrent integer, p_timeout_minutes integer) RETURNS text[]
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select dispatcher.faults_of_tenant(p_tenant_id) || dispatcher.faults_of_text('workflow_type', p_workflow_type, 200,
      true)
      || dispatcher.faults_of_text('agent', p_agent, 200, true)
      || case when abs(p_priority::bigint) > 1000000 then array['priority: outside -1000000 to 1000000'] else '{}' end
      || case when p_max_concurrent < 0 then array['max_concurrent: below 0'] else '{}' end
      || case when p_timeout_minutes < 1 then array['timeout_minutes: below 1'] else '{}' end
$$;

COMMENT ON FUNCTION dispatcher.faults_of_route(p_tenant_id uuid, p_workflow_type text, p_agent text, p_priority integer, p_max_concurrent integer, p_timeout_minutes integer) IS 'What is wrong with a route that is to be set; empty when nothing is.';

CREATE FUNCTION dispatcher.faults_of_tenant(p_tenant_id uuid) RETURNS text[]
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select case when exists (select from public.tenants where id = p_tenant_id) then '{}'::text[]
      else array['tenant_id: unknown'] end
$$;

COMMENT ON FUNCTION dispatcher.faults_of_tenant(p_tenant_id uuid) IS 'A tenant that does not exist is a fault.';

CREATE FUNCTION dispatcher.faults_of_text(p_name text, p_value text, p_longest integer, p_is_needed boolean) RETURNS text[]
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select case when p_is_needed and coalesce(btrim(p_value), '') = '' then array[p_name || ': empty']
              when length(p_value) > p_longest
              then array[format('%s: must be %s to %s characters', p_name, p_is_needed::integer, p_longest)]
                  else '{}' end
$$;

COMMENT ON FUNCTION dispatcher.faults_of_text(p_name text, p_value text, p_longest integer, p_is_needed boolean) IS 'What is wrong with a text argument, if anything.';

CREATE FUNCTION dispatcher.fill_waitlist(p_sweeper dispatcher.claimant, p_cursor jsonb, p_limit integer) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  -- All pages of one sweep carry the time of its first: agents wait in the order of their oldest items, whatever the
  -- page.
  v_since constant timestamptz := coalesce((p_cursor ->> 'since')::timestamptz, now());
  v_agent record;
  v_refusal jsonb;
  v_skipped jsonb := '[]';
  v_ready uuid[] := '{}';
  v_oldest timestamptz[] := '{}';
  v_listed uuid[];
  v_seen integer := 0;
  v_last uuid;
begin
  perform set_config('lock_timeout', '100ms', true);
  for v_agent in select * from dispatcher.agents_with_work(p_sweeper, (p_cursor ->> 'after')::uuid, p_limit) loop
    v_seen := v_seen + 1;
    v_last := v_agent.agent_id;
    v_refusal := dispatcher.refusal_at_sweep(p_sweeper, v_agent.agent_id, v_agent.agent_slug);
    if v_refusal is null then
      v_ready := v_ready || v_agent.agent_id;
      v_oldest := v_oldest || v_agent.oldest;
    else
      v_skipped := v_skipped || v_refusal;
    end if;
  end loop;
  v_listed := dispatcher.list_agents(p_sweeper, v_ready, v_oldest, v_since);
  return jsonb_build_object(
    'count', cardinality(v_listed), 'again', v_seen >= p_limit, 'cursor',
        jsonb_build_object('after', v_last, 'since', v_since),
    'skipped', v_skipped || coalesce((select jsonb_agg(dispatcher.busy_agent(ready.id))
        from unnest(v_ready) as ready (id)
                                       where ready.id <> all (v_listed)), '[]'));
end
$$;

COMMENT ON FUNCTION dispatcher.fill_waitlist(p_sweeper dispatcher.claimant, p_cursor jsonb, p_limit integer) IS 'Puts agents of the gateway that have work and open gates on the waitlist; answers the refused ones with their reason. p_cursor: {after, since} of the page before.';

CREATE FUNCTION dispatcher.find_gateway(p_tenant_id uuid, p_gateway text) RETURNS uuid
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select id from public.gateways where tenant_id = p_tenant_id and (slug = p_gateway or id::text = p_gateway)
   order by id::text = p_gateway desc limit 1
$$;

COMMENT ON FUNCTION dispatcher.find_gateway(p_tenant_id uuid, p_gateway text) IS 'The id of a tenant''s gateway by id or slug; NULL when there is none.';

CREATE FUNCTION dispatcher.find_inbox_agent(p_tenant_id uuid, p_agent_slug text) RETURNS uuid
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select agent.id from dispatcher.agents as agent where agent.tenant_id = p_tenant_id and agent.slug = p_agent_slug
$$;

COMMENT ON FUNCTION dispatcher.find_inbox_agent(p_tenant_id uuid, p_agent_slug text) IS 'The id of a tenant''s agent by its present slug; null when there is none.';

CREATE TABLE public.inbox_item_origins (
    item_id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    wake_id uuid,
    from_agent_id uuid,
    chain_depth integer DEFAULT 0 NOT NULL,
    request_key text,
    content_key text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT inbox_item_origins_chain_depth_check CHECK ((chain_depth >= 0))
);

COMMENT ON TABLE public.inbox_item_origins IS 'Where an item came from when an agent posted it: the wake, the sender, and how long the chain of wakes has grown.';

COMMENT ON COLUMN public.inbox_item_origins.request_key IS 'What names one request of a sender, ever: key:… as the caller chose it, else call:… of one run of its script.';

COMMENT ON COLUMN public.inbox_item_origins.content_key IS 'Sender''s wake and content: the same post again is the same item while that is open.';

CREATE FUNCTION dispatcher.find_posted_item(p_tenant_id uuid, p_sender_id uuid, p_request_key text, p_content_keys text[]) RETURNS public.inbox_item_origins
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select origin.* from public.inbox_item_origins as origin
    join dispatcher.agent_inbox_items as item on item.id = origin.item_id
   where origin.tenant_id = p_tenant_id and origin.from_agent_id = p_sender_id
     and (origin.request_key = p_request_key
          or (origin.content_key = any (p_content_keys)
              and (item.status in ('pending', 'leased') or (item.status = 'failed'
              and item.attempt_count < item.max_attempts))))
   order by origin.request_key is not distinct from p_request_key desc, origin.created_at
   limit 1
$$;

COMMENT ON FUNCTION dispatcher.find_posted_item(p_tenant_id uuid, p_sender_id uuid, p_request_key text, p_content_keys text[]) IS 'The item a post has made before: of the same request whatever became of it, else an open one of the same content; null when there is none.';

CREATE FUNCTION dispatcher.find_sender_wake(p_agent_id uuid, p_wake_id uuid) RETURNS public.agent_wakes
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select known.* from (
    (select 1 as place, wake.* from public.agent_wakes as wake
      where wake.id = p_wake_id and wake.agent_id = p_agent_id
        and (wake.ended_at is null or wake.ended_at > clock_timestamp() - interval '24 hours'))
    union all
    (select 2, latest.* from (select wake.* from public.agent_wakes as wake where wake.agent_id = p_agent_id
        order by wake.claimed_at desc limit 1) as latest
      where latest.ended_at is null or latest.ended_at > clock_timestamp() - interval '10 minutes')
   ) as found cross join lateral (select wake.* from public.agent_wakes as wake where wake.id = found.id) as known
   order by found.place limit 1
$$;

COMMENT ON FUNCTION dispatcher.find_sender_wake(p_agent_id uuid, p_wake_id uuid) IS 'The wake an agent acts in: p_wake_id, which its script knows, until 24 h after its end; else its latest if that lives or ended within 10 minutes (a turn can outlive its process); null when it acts outside a wake.';

CREATE FUNCTION dispatcher.finish_notification(p_result jsonb, p_tenant_id uuid) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_is_sent constant boolean := coalesce(p_result -> 'sent' = 'true'::jsonb, false);
  v_count integer;
begin
  update public.workflow_notifications as note
     set state = case when v_is_sent then 'sent' when note.tries >= 12 then 'failed' else 'pending' end,
         sent_at = case when v_is_sent then now() end, claim_token = null, claimed_until = null,
             last_error = left(p_result ->> 'error', 1000),
         -- Spread, so that what failed together with a Gateway does not come back together.
         next_try_at = now() + make_interval(secs => least(300,
             5 * power(2, least(note.tries, 12) - 1)) * (0.75 + random() / 2))
   where note.id = (p_result ->> 'id')::uuid and note.claim_token = (p_result ->> 'claim_token')::uuid
     and note.tenant_id = p_tenant_id
     and note.state = 'sending';
  get diagnostics v_count = row_count;
  return v_count;
exception when others then
  -- Nonsense, or a row that somebody holds: it is sent again after its lease.
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return 0;
end
$$;

COMMENT ON FUNCTION dispatcher.finish_notification(p_result jsonb, p_tenant_id uuid) IS 'What became of one claimed notification; 1 when that was written down, 0 where its lease is lost, the row is held or the result is none.';

CREATE FUNCTION dispatcher.finish_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid, p_status text, p_output jsonb, p_error text, p_usage jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_before public.workflow_runs;
  v_run public.workflow_runs;
  v_code text;
begin
  v_run := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  v_code := dispatcher.workflow_claim_state(v_run, p_session, p_claim_token);
  if v_code = 'finished' and v_run.status = p_status then
    return dispatcher.repeat_end(v_run, p_usage);
  elsif v_code = 'held' and v_run.paused_from in ('claimed', 'running') then
    return dispatcher.keep_end(v_run, p_status, p_output, p_error, p_usage);
  end if;
  if v_code <> 'ok' then
    return dispatcher.refuse_workflow_caller(v_code, v_run, p_tenant_id, p_run_id, p_session, p_claim_token, p_usage);
  end if;
  perform dispatcher.note_workflow_actor(v_run.claimed_by, p_error);
  if p_status = 'completed' then
    v_run := dispatcher.start_workflow_run(v_run);
  end if;
  v_before := v_run;
  perform dispatcher.end_workflow_claim(v_run, p_status);
  v_run := dispatcher.book_workflow_usage(v_run, p_usage);
  perform dispatcher.note_work_on_claim(v_run);
  update public.workflow_runs
     set status = p_status, finished_at = now(), output_summary = coalesce(p_output, output_summary), wake_id = null,
         last_error = case p_status when 'failed' then dispatcher.clean_inbox_reason(p_error) else last_error end,
         last_error_at = case p_status when 'failed' then now() else last_error_at end
   where id = p_run_id returning * into v_run;
  return dispatcher.workflow_answer('ok', v_run)
      || jsonb_build_object('booked', dispatcher.booked_since(v_before, v_run));
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;

COMMENT ON FUNCTION dispatcher.finish_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid, p_status text, p_output jsonb, p_error text, p_usage jsonb) IS 'Ends a run as completed or failed on behalf of the session that holds it. already for a repeat; kept while the run is held: its end is applied when it goes on.';

CREATE FUNCTION dispatcher.finite_time(p_at timestamp with time zone) RETURNS timestamp with time zone
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$ select case when isfinite(p_at) then p_at end $$;

COMMENT ON FUNCTION dispatcher.finite_time(p_at timestamp with time zone) IS 'A time as it is shown; NULL for an infinite one, which is no known time.';

CREATE FUNCTION dispatcher.forget_old_instances(p_tenant_id uuid, p_gateway_id uuid) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  delete from public.dispatcher_instances where id in (
    select old.id from public.dispatcher_instances as old
     where old.gateway_id = p_gateway_id and old.last_heartbeat_at < now() - interval '7 days'
       -- Each of its wakes would be changed with it, in the one statement of a start.
       and not exists (select from public.agent_wakes as wake where wake.instance_id = old.id)
     limit 500 for update skip locked);
  perform dispatcher.settle_constraints(touched.name::regclass)
     from unnest(array['public.dispatcher_instances', 'public.agent_wakes']) as touched (name);
exception when others then
  -- What a neighbour's trigger makes of it keeps no daemon from its start.
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_tenant_id, p_gateway_id, 'removal of old instances',
      format('%s (%s)', sqlerrm, sqlstate));
end
$$;

COMMENT ON FUNCTION dispatcher.forget_old_instances(p_tenant_id uuid, p_gateway_id uuid) IS 'Daemons of a gateway that were last heard of a week ago go, once no wake of theirs is kept any more. Never fails.';

CREATE FUNCTION dispatcher.forgotten_leases(p_sweeper dispatcher.claimant, p_limit integer) RETURNS SETOF public.agent_wakes
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select distinct on (wake.id) wake.* from public.inbox_item_leases as lease
    join public.agent_wakes as wake on wake.id = lease.wake_id
    join dispatcher.agent_inbox_items as item on item.id = lease.item_id
   where lease.closed_at is null and wake.gateway_id = p_sweeper.gateway_id
     and wake.ended_at < now() - interval '5 seconds'
     and item.status = 'leased' and item.leased_at = lease.leased_at
   limit p_limit
$$;

COMMENT ON FUNCTION dispatcher.forgotten_leases(p_sweeper dispatcher.claimant, p_limit integer) IS 'Ended wakes that still hold a lease: somebody held the item when the wake ended.';

CREATE FUNCTION dispatcher.gate_of_respawn(p_claimant dispatcher.claimant, p_agent_id uuid) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_gates record;
  v_reason text;
begin
  v_gates := dispatcher.wake_gates(dispatcher.read_gate_facts(p_agent_id, p_claimant.settings), p_claimant.settings,
      true);
  select reason into v_reason from unnest(v_gates.blocked) as reason
   where reason in ('stalled', 'wake_in_flight', 'agent_paused', 'active_lease', 'budget_exceeded', 'daily_limit')
       limit 1;
  if v_reason is null
     and dispatcher.live_wakes_of_gateway(p_claimant.gateway_id) >= (p_claimant.settings).max_concurrent_wakes then
    v_reason := 'concurrency_limit';
  end if;
  return v_reason;
end
$$;

COMMENT ON FUNCTION dispatcher.gate_of_respawn(p_claimant dispatcher.claimant, p_agent_id uuid) IS 'Which of the gates that are about the agent, or the cap, keeps it from a new process; NULL when none does.';

CREATE FUNCTION dispatcher.gateway_backlog(p_gateway_id uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select jsonb_build_object(
           'items', count(*) filter (where not is_paused), 'under_1m',
               count(*) filter (where not is_paused and age < interval '1 minute'),
           'under_1h', count(*) filter (where not is_paused and age >= interval '1 minute' and age < interval '1 hour'),
           'over_1h', count(*) filter (where not is_paused and age >= interval '1 hour'),
           'oldest_seconds', round(extract(epoch from max(age) filter (where not is_paused))),
           'waiting_for_paused', count(*) filter (where is_paused))
    from (select now() - dispatcher.known_time(due.created_at) as age,
        agent.status in ('paused', 'hibernating') as is_paused
            from dispatcher.agents as agent
            -- Agent by agent, which `offset 0` says: all items at once would be those of every tenant.
           cross join lateral (select created_at from dispatcher.inbox_due_of_pair as open
                                where open.agent_id = agent.id and open.tenant_id = agent.tenant_id offset 0) as due
           where agent.gateway_id = p_gateway_id) as ages
$$;

COMMENT ON FUNCTION dispatcher.gateway_backlog(p_gateway_id uuid) IS 'Open items of a gateway''s agents by age: items, under_1m, under_1h, over_1h, oldest_seconds (NULL when there are none). Items of paused or hibernating agents, which nobody may take now, are waiting_for_paused instead.';

CREATE FUNCTION dispatcher.gateway_of_workflow_agent(p_tenant_id uuid, p_agent_id text) RETURNS uuid
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce((select agent.gateway_id from dispatcher.agents as agent where agent.tenant_id = p_tenant_id
      and agent.slug = p_agent_id),
                  (select (array_agg(gateway.id))[1] from public.gateways as gateway
                      where gateway.tenant_id = p_tenant_id having count(*) = 1))
$$;

COMMENT ON FUNCTION dispatcher.gateway_of_workflow_agent(p_tenant_id uuid, p_agent_id text) IS 'The gateway of an agent by slug; the tenant''s only gateway for an agent without a row; else NULL.';

CREATE FUNCTION dispatcher.give_to_respawn(p_run public.workflow_runs, p_wake public.agent_wakes, p_usd numeric, p_tokens numeric) RETURNS public.workflow_runs
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.end_workflow_claim(p_run, 'orphaned');
  perform dispatcher.settle_workflow_claim(p_run, 'orphaned');
  -- A new owner with a new fence and a new account: the session that was lost can change nothing any more, should it
  -- come back.
  update public.workflow_runs
     set session_id = 'respawn-' || p_wake.id, claim_token = gen_random_uuid(), last_heartbeat_at = now(),
         wake_id = p_wake.id,
         reserved_usd = p_usd, reserved_tokens = least(p_tokens, 1e18), cost_estimate = null, input_tokens = null,
             output_tokens = null,
         cached_tokens = null, reported_at = null, assumed_usd = null, assumed_tokens = null
   where id = p_run.id returning * into p_run;
  insert into public.workflow_claims (claim_token, tenant_id, run_id, workflow_type, agent_id, session_id, attempt,
      wake_id)
  values (p_run.claim_token, p_run.tenant_id, p_run.id, p_run.workflow_type, p_run.owner_agent_id, p_run.session_id,
          p_run.dispatch_attempts, p_wake.id);
  return p_run;
end
$$;

COMMENT ON FUNCTION dispatcher.give_to_respawn(p_run public.workflow_runs, p_wake public.agent_wakes, p_usd numeric, p_tokens numeric) IS 'The run of an orphan goes to its new wake, with a new session, fence and reservation; what the lost claim cost stays with that claim.';

CREATE FUNCTION dispatcher.give_up_dispatch(p_run public.workflow_runs) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.note_workflow_actor('dispatcher', 'nobody claimed it');
  update public.workflow_runs
     set status = 'failed', finished_at = now(), last_error_at = now(),
         last_error = format('Dispatch retries exhausted after %s attempts', p_run.dispatch_attempts)
   where id = p_run.id;
  perform dispatcher.drop_notifications(array[p_run.id]);
end
$$;

COMMENT ON FUNCTION dispatcher.give_up_dispatch(p_run public.workflow_runs) IS 'A run that nobody claimed in any of its attempts fails.';

CREATE FUNCTION dispatcher.give_up_items(p_item_ids uuid[], p_reason text) RETURNS uuid[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_ids uuid[];
begin
  with given_up as (
    update dispatcher.agent_inbox_items
       set status = 'dead_letter', failed_at = now(), leased_at = null, leased_until = null, updated_at = now(),
           context = dispatcher.merge_inbox_context(context, jsonb_build_object('last_failure_reason', p_reason))
     where id in (select item.id from dispatcher.agent_inbox_items as item
                   where item.id = any (p_item_ids) and item.status <> 'dead_letter' for update skip locked)
    returning id)
  select array_agg(id) into v_ids from given_up;
  return coalesce(v_ids, '{}');
end
$$;

COMMENT ON FUNCTION dispatcher.give_up_items(p_item_ids uuid[], p_reason text) IS 'dead_letter with its reason, for those that nobody holds; answers which.';

CREATE FUNCTION dispatcher.give_up_spent(p_sweeper dispatcher.claimant, p_item_ids uuid[]) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_agent record;
  v_dead uuid[];
  v_reason constant text := 'no attempts left';
  v_count integer := 0;
begin
  for v_agent in
    select item.agent_id, array_agg(item.id) as item_ids from dispatcher.agent_inbox_items as item
     where item.id = any (p_item_ids) group by item.agent_id
  loop
    perform dispatcher.close_leases(p_sweeper.tenant_id, p_sweeper.gateway_id, v_agent.item_ids, 'dead_letter');
    v_dead := dispatcher.give_up_items(v_agent.item_ids, v_reason);
    perform dispatcher.tell_dead_letters(v_agent.agent_id, v_dead, v_reason);
    v_count := v_count + cardinality(v_dead);
  end loop;
  return v_count;
end
$$;

COMMENT ON FUNCTION dispatcher.give_up_spent(p_sweeper dispatcher.claimant, p_item_ids uuid[]) IS 'Items without attempts left become dead_letter, with the reason; one notification per agent. Answers how many did.';

CREATE FUNCTION dispatcher.give_up_spent_items(p_sweeper dispatcher.claimant, p_limit integer) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  return dispatcher.in_parts(p_sweeper, 'give_up_spent', 'end of an item without attempts',
      array(select spent.item_id from dispatcher.spent_items(p_sweeper, p_limit) as spent));
end
$$;

COMMENT ON FUNCTION dispatcher.give_up_spent_items(p_sweeper dispatcher.claimant, p_limit integer) IS 'Items without attempts left become dead_letter; one that raises costs no other.';

CREATE FUNCTION dispatcher.granted_rights() RETURNS TABLE(kind text, name text, column_name text, grantee text, privilege text, grantor text, by_owner boolean)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
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

COMMENT ON FUNCTION dispatcher.granted_rights() IS 'What public, anon, authenticated and service_role may do with what stands in schemas public and dispatcher, and with the latter itself. by_owner: its owner can take the right back.';

CREATE FUNCTION dispatcher.guard_tenant(p_table text, p_is_ours boolean, VARIADIC p_references text[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $_$
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
$_$;

COMMENT ON FUNCTION dispatcher.guard_tenant(p_table text, p_is_ours boolean, VARIADIC p_references text[]) IS 'Has a table refuse rows that name a row of another tenant. p_references: column and table, as in "agent_id agents". On a table of YourHQ''s there is no trigger (p_is_ours is false): there such rows do not count.';

CREATE FUNCTION dispatcher.guard_workflow_transition() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_side constant text[] := array['waiting_for_approval', 'blocked'];
  v_transition record;
begin
  if new.status not in ('queued', 'dispatched') and new.reported_at is not distinct from old.reported_at
     and (new.cost_estimate is distinct from old.cost_estimate or new.input_tokens is distinct from old.input_tokens
          or new.output_tokens is distinct from old.output_tokens) then
    new := dispatcher.note_report(new);  -- changed by hand: a report as any other
  end if;
  if new.status = old.status and new.dispatch_attempts = old.dispatch_attempts then
    new.updated_at := now();
    return dispatcher.with_estimates(new);
  end if;
  select needs_override into v_transition from public.workflow_run_transitions
   where from_status = old.status and to_status = new.status;
  if not found
     or (v_transition.needs_override and coalesce(current_setting('dispatcher.override_run', true), '') <> old.id::text)
     or (old.status = any (v_side) and new.status <> all (v_side || array['cancelled'])
         and new.status is distinct from old.paused_from) then
    raise exception 'a run may not go from % to %', old.status, new.status using errcode = 'OD010',
      detail = format('run %s%s', old.id, case when old.paused_from is not null then ', held since it was '
          || old.paused_from else '' end),
      hint = 'The state table is workflow_run_transitions.';
  end if;
  new.paused_from := case when new.status = any (v_side) then coalesce(old.paused_from, old.status) end;
  new.paused_at := case when new.status = any (v_side) then coalesce(old.paused_at, now()) end;
  if old.status = any (v_side) and new.status in ('claimed', 'running') then
    -- It was held, not silent: whoever has it gets the usual time anew, and for its work what was left of it.
    new.last_heartbeat_at := now();
    new.deadline_at := dispatcher.put_off(new.deadline_at, old.paused_at);
  elsif old.status = any (v_side) and new.status = 'dispatched' then
    new.dispatched_at := now();
  end if;
  new.updated_at := now();
  return dispatcher.complete_workflow_row(new);
end
$$;

COMMENT ON FUNCTION dispatcher.guard_workflow_transition() IS 'Before an update of a run: refuses (OD010) what workflow_run_transitions does not list, and a return from a side state to anywhere but where it came from.';

CREATE FUNCTION dispatcher.hand_out(p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_budgets dispatcher.evaluated_budget[], p_batch integer) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  return dispatcher.hand_out_runs(p_tenant_id, p_groups, p_budgets, p_batch, false);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return dispatcher.hand_out_runs(p_tenant_id, p_groups, p_budgets, p_batch, true);
end
$$;

COMMENT ON FUNCTION dispatcher.hand_out(p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_budgets dispatcher.evaluated_budget[], p_batch integer) IS 'hand_out_runs in one update; one by one where that raises.';

CREATE FUNCTION dispatcher.hand_out_runs(p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_budgets dispatcher.evaluated_budget[], p_batch integer, p_one_by_one boolean) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_candidate record;
  v_gate record;
  v_run dispatcher.run_choice;
  v_chosen dispatcher.run_choice[] := '{}';
  v_taken jsonb := '{}';
  v_closed text[] := '{}';
  v_holders jsonb := '[]';
  v_error jsonb;
  v_errors jsonb := '[]';
  v_warned integer := 0;
begin
  for v_candidate in select * from dispatcher.run_candidates(p_tenant_id, p_groups, p_batch) loop
    exit when cardinality(v_chosen) >= p_batch;
    continue when coalesce((v_taken ->> v_candidate.workflow_type)::integer, 0) >= v_candidate.slots
               or concat_ws('|', v_candidate.workflow_type, v_candidate.agent_id) = any (v_closed);
    if cardinality(p_budgets) > 0 then
      v_gate := dispatcher.budget_verdict(p_budgets, v_candidate.agent_id, v_candidate.department_id,
          v_candidate.workflow_type,
                                          v_candidate.usd, v_candidate.tokens);
      if v_gate.verdict <> 'ok' then
        v_closed := v_closed || concat_ws('|', v_candidate.workflow_type, v_candidate.agent_id);
        v_holders := v_holders || jsonb_build_object('workflow_type', v_candidate.workflow_type, 'holders',
            v_gate.holders, 'reason', v_gate.reason);
        continue;
      end if;
    end if;
    perform from public.workflow_runs where id = v_candidate.run_id and status = 'queued' for update skip locked;
    continue when not found;
    v_run := row(v_candidate.run_id, v_candidate.agent_id, v_candidate.gateway_id, v_candidate.usd,
        v_candidate.tokens)::dispatcher.run_choice;
    if p_one_by_one then
      v_error := dispatcher.try_dispatch(v_run);
      v_errors := v_errors || v_error;
      continue when v_error <> '[]';
    end if;
    v_chosen := v_chosen || v_run;
    v_taken := v_taken || jsonb_build_object(v_candidate.workflow_type,
        coalesce((v_taken ->> v_candidate.workflow_type)::integer, 0) + 1);
    if cardinality(p_budgets) > 0 then
      p_budgets := dispatcher.reserve_in_budgets(p_budgets, v_candidate.agent_id, v_candidate.department_id,
          v_candidate.workflow_type,
                                                 v_candidate.usd, v_candidate.tokens);
      v_warned := v_warned + least(v_gate.warned, 1);
    end if;
  end loop;
  if not p_one_by_one and cardinality(v_chosen) > 0 then
    perform dispatcher.dispatch_runs(v_chosen);
  end if;
  return jsonb_build_object('dispatched', cardinality(v_chosen), 'warned', v_warned, 'closed', v_holders, 'errors',
      v_errors);
end
$$;

COMMENT ON FUNCTION dispatcher.hand_out_runs(p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_budgets dispatcher.evaluated_budget[], p_batch integer, p_one_by_one boolean) IS 'Hands out up to a batch of runs, each reserved before the next is judged: {dispatched, warned, closed (groups that a budget has closed meanwhile), errors}. All in one update, or one by one: then a run that raises is named and hides nobody.';

CREATE FUNCTION dispatcher.has_released(p_run public.workflow_runs, p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select p_run.status in ('queued', 'dispatched')
     and exists (select from public.workflow_claims
                  where run_id = p_run_id and tenant_id = p_tenant_id and session_id = p_session
                    and ended_as = 'released'
                    and (p_claim_token is null or claim_token = p_claim_token))
$$;

COMMENT ON FUNCTION dispatcher.has_released(p_run public.workflow_runs, p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid) IS 'Whether a session that does not hold a run has given it back before: then its release is a repeat.';

CREATE FUNCTION dispatcher.has_the_pass(p_tick dispatcher.tick) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  -- What new rows refer to is held along: the check of a foreign key then waits for nobody.
  perform from public.tenants where id = p_tick.tenant_id for key share;
  return pg_try_advisory_xact_lock(hashtextextended('dispatcher.workflows.' || p_tick.tenant_id, 0));
end
$$;

COMMENT ON FUNCTION dispatcher.has_the_pass(p_tick dispatcher.tick) IS 'Whether this transaction may count slots and money of the tenant: one at a time does. Never waits for another pass.';

CREATE FUNCTION dispatcher.held_by(p_groups dispatcher.waiting_group[], p_closed jsonb, p_budgets dispatcher.evaluated_budget[]) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(jsonb_object_agg(held.workflow_type, held.names), '{}')
    from (select hold.workflow_type, jsonb_agg(distinct budget.name) as names
            from dispatcher.holds_of(p_groups, p_closed) as hold
                join unnest(p_budgets) as budget on budget.id = hold.budget_id
           group by hold.workflow_type) as held
$$;

COMMENT ON FUNCTION dispatcher.held_by(p_groups dispatcher.waiting_group[], p_closed jsonb, p_budgets dispatcher.evaluated_budget[]) IS 'The names of the budgets that hold each type.';

CREATE FUNCTION dispatcher.held_claims(p_claims jsonb, p_held text) RETURNS jsonb
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  select coalesce(jsonb_agg(dispatcher.refusal((claim.value ->> 'agent_id')::uuid, null, 'busy', 1)
                            || jsonb_build_object('held', left(p_held, 1000)) order by claim.ordinality), '[]')
    from jsonb_array_elements(p_claims) with ordinality as claim
$$;

COMMENT ON FUNCTION dispatcher.held_claims(p_claims jsonb, p_held text) IS 'The answers to claims while a row that all of the gateway need is held: busy, with what is held and by whom.';

CREATE FUNCTION dispatcher.held_gateways(p_tick dispatcher.tick) RETURNS uuid[]
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  select array(select gateway.id from public.gateways as gateway
      where gateway.tenant_id = p_tick.tenant_id for key share skip locked)
$$;

COMMENT ON FUNCTION dispatcher.held_gateways(p_tick dispatcher.tick) IS 'The gateways of the tenant that nobody changes at this moment, held against it: agents of the others wait for the next pass.';

CREATE FUNCTION dispatcher.held_lasting(p_tenant_id uuid, p_gateway_id uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_before jsonb := dispatcher.held_tables() || dispatcher.held_rows(p_tenant_id, p_gateway_id);
  v_after jsonb;
begin
  if v_before = '[]' then
    return v_before;
  end if;
  perform pg_catalog.pg_sleep(0.1);
  v_after := dispatcher.held_tables() || dispatcher.held_rows(p_tenant_id, p_gateway_id);
  return coalesce((
    select jsonb_agg(still.value) from jsonb_array_elements(v_after) as still
     where exists (select from jsonb_array_elements(v_before) as once,
                     jsonb_array_elements(once.value -> 'sessions') as session_before,
                     jsonb_array_elements(still.value -> 'sessions') as session_now
                    where once.value ->> 'table' = still.value ->> 'table'
                      and session_before.value -> 'pid' = session_now.value -> 'pid')), '[]');
end
$$;

COMMENT ON FUNCTION dispatcher.held_lasting(p_tenant_id uuid, p_gateway_id uuid) IS 'What a gateway''s daemons share and the same session has held for a tenth of a second: no claim does.';

CREATE FUNCTION dispatcher.held_rows(p_tenant_id uuid, p_gateway_id uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $_$
declare
  v_probe text[];
  v_xmax xid[];
  v_held jsonb := '[]';
begin
  foreach v_probe slice 1 in array array[
    ['dispatcher_gateways', 'gateway_id = $2', 'update'],
    ['gateways', 'id = $2', 'key share'],
    ['tenants', 'id = $1', 'key share'],
    ['dispatcher_instances', 'gateway_id = $2 and state = ''running''', 'no key update'],
    ['dispatcher_settings',
     'instance_id in (select id from public.dispatcher_instances where gateway_id = $2 and state = ''running'')',
     'update']
  ] loop
    begin
      execute format(
        'with free as (select ctid from public.%1$I where %2$s for %3$s skip locked) '
        'select array_agg(xmax) from public.%1$I where %2$s and ctid not in (select ctid from free)',
        v_probe[1], v_probe[2], v_probe[3]) into v_xmax using p_tenant_id, p_gateway_id;
      raise exception 'looked' using errcode = 'OD013';
    exception
      when sqlstate 'OD013' then null;  -- what was free is so again: whoever needs it does not wait for this look
      when lock_not_available then v_xmax := null;  -- the table as a whole is held
    end;
    if v_xmax is not null then
      v_held := v_held || dispatcher.held_thing('row', v_probe[1], dispatcher.pids_of_rows(v_xmax));
    end if;
  end loop;
  return v_held;
end
$_$;

COMMENT ON FUNCTION dispatcher.held_rows(p_tenant_id uuid, p_gateway_id uuid) IS 'The rows that a gateway''s daemons share and somebody holds at this moment: [{kind: row, table, sessions, text}]. Takes those that are free for a moment, and lets them go; waits for nobody, but up to lock_timeout for a table.';

CREATE FUNCTION dispatcher.held_tables() RETURNS jsonb
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  select coalesce(jsonb_agg(dispatcher.held_thing('table', held.name, held.pids) order by held.name), '[]')
    from (
      select class.relname::text as name, array_agg(distinct coalesce(blocker.pid, 0)) as pids
        from pg_catalog.pg_locks as lock
        join pg_catalog.pg_class as class on class.oid = lock.relation and class.relkind in ('r', 'p')
            and class.relnamespace = 'public'::regnamespace
       cross join lateral unnest(array[lock.pid] || case when lock.granted then '{}'
           else pg_catalog.pg_blocking_pids(lock.pid) end) as blocker (pid)
       where lock.locktype = 'relation'
         and lock.database = (select oid from pg_catalog.pg_database where datname = current_database())
         -- What waits for a whole table has everybody wait behind it.
         and lock.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
         and lock.pid is distinct from pg_catalog.pg_backend_pid()
       group by class.relname limit 20) as held
$$;

COMMENT ON FUNCTION dispatcher.held_tables() IS 'The tables of schema public that somebody holds, or waits for, as a whole: [{kind: table, table, sessions, text}].';

CREATE FUNCTION dispatcher.held_thing(p_kind text, p_table text, p_pids integer[]) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_sessions constant jsonb := dispatcher.sessions_of(p_pids);
begin
  return jsonb_build_object(
    'kind', p_kind, 'table', p_table, 'sessions', v_sessions,
    'text', format('%s %s is held by %s', case p_kind when 'row' then 'a row of' else 'the whole table' end, p_table,
      coalesce((
        select string_agg(
          case when (session.value ->> 'pid')::integer = 0
               then 'a prepared transaction (see pg_prepared_xacts)'
               else format('pid %s (%s, user %s, %s)', session.value ->> 'pid',
                 coalesce('application ' || (session.value ->> 'application'), 'no application name'),
                 coalesce(session.value ->> 'user', 'unknown'),
                 coalesce(format('%s, its transaction open for %s s', session.value ->> 'state',
                                 round((session.value ->> 'seconds')::numeric)),
                          'what it does is hidden from us: see pg_stat_activity')) end, ', ')
          from jsonb_array_elements(v_sessions) as session), 'a session that has just gone')));
end
$$;

COMMENT ON FUNCTION dispatcher.held_thing(p_kind text, p_table text, p_pids integer[]) IS '{kind: row | table, table, sessions, text}: what is held, and by whom.';

CREATE FUNCTION dispatcher.hint_agent_change() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
begin
  if old.status in ('paused', 'hibernating') and new.status not in ('paused', 'hibernating') then
    insert into public.agent_resumptions (agent_id, tenant_id) values (new.id, new.tenant_id)
    on conflict (agent_id) do update set resumed_at = now();
  end if;
  -- Whoever may write an agent may write any gateway into it: one of another tenant is told nothing.
  perform dispatcher.send_gateway_hint(gateway.id, 'agent', jsonb_build_object('agent_id', new.id))
     from public.gateways as gateway
    where gateway.id in (new.gateway_id, old.gateway_id) and gateway.tenant_id = new.tenant_id;
  return null;
exception when others then
  perform dispatcher.note_fault(new.tenant_id, null, 'hint_agent_change', format('%s (%s)', sqlerrm, sqlstate));
  return null;
end
$$;

COMMENT ON FUNCTION dispatcher.hint_agent_change() IS 'After an agent''s status or gateway changed: a hint to its gateway, and to the one it left; the end of a pause is kept. Never fails the update.';

CREATE FUNCTION dispatcher.hint_budget_change() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.send_gateway_hint((select agent.gateway_id from dispatcher.agents as agent
      where agent.id = new.agent_id and agent.tenant_id = new.tenant_id), 'agent',
      jsonb_build_object('agent_id', new.agent_id));
  return null;
exception when others then
  perform dispatcher.note_fault(new.tenant_id, null, 'hint_budget_change', format('%s (%s)', sqlerrm, sqlstate));
  return null;
end
$$;

COMMENT ON FUNCTION dispatcher.hint_budget_change() IS 'After an agent''s budget changed its status, limit or cutoff: a hint to its gateway. Never fails the update.';

CREATE FUNCTION dispatcher.hint_inbox_insert() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.send_gateway_hint(hint.gateway_id, 'inbox',
            jsonb_build_object('agent_id', hint.agent_id, 'item_id', hint.item_ids[1])
            || case when cardinality(hint.item_ids) > 1 then jsonb_build_object('item_ids', hint.item_ids)
                else '{}'::jsonb end)
     from (select agent.gateway_id, agent.id as agent_id, (array_agg(item.id order by item.created_at,
         item.id))[1:50] as item_ids
             from new_items as item join dispatcher.agents as agent on agent.id = item.agent_id
                 and agent.tenant_id = item.tenant_id
            where item.status = 'pending'
            group by agent.gateway_id, agent.id) as hint;
  return null;
exception when others then
  perform dispatcher.note_fault((select item.tenant_id from new_items as item limit 1), null, 'hint_inbox_insert',
      format('%s (%s)', sqlerrm, sqlstate));
  return null;
end
$$;

COMMENT ON FUNCTION dispatcher.hint_inbox_insert() IS 'After an insert of items: one hint per agent to its gateway ({agent_id, item_id, item_ids}). Locks nothing, never fails the insert.';

CREATE FUNCTION dispatcher.hint_inbox_update() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.mark_item_changes(
    array(select item.id from new_items as item join old_items as before on before.id = item.id
           where before.status in ('done', 'failed', 'dead_letter') and item.status = 'pending'),
    array(select item.id from new_items as item join old_items as before on before.id = item.id
           where item.status = 'done' and before.status <> 'done' and dispatcher.is_signed_in_user()));
  if not dispatcher.is_quiet() then
    perform dispatcher.send_gateway_hint(hint.gateway_id, 'inbox',
        jsonb_build_object('agent_id', hint.agent_id, 'item_id', hint.item_id))
       from (select agent.gateway_id, agent.id as agent_id,
           (array_agg(item.id order by item.created_at, item.id))[1] as item_id
               from new_items as item
               join old_items as before on before.id = item.id and before.status is distinct from item.status
               join dispatcher.agents as agent on agent.id = item.agent_id and agent.tenant_id = item.tenant_id
              where item.status in ('pending', 'failed')
              group by agent.gateway_id, agent.id) as hint;
    -- Whoever gave them up: our functions, YourHQ's, or a row written by hand. What our own passes give up, they tell.
    perform dispatcher.tell_dead_letters(given_up.agent_id, given_up.item_ids, coalesce(given_up.reason, 'none given'))
       from (select item.agent_id, array_agg(item.id order by item.created_at, item.id) as item_ids,
                    (array_agg(left(item.context ->> 'last_failure_reason', 500)
                               order by item.created_at, item.id))[1] as reason
               from new_items as item
               join old_items as before on before.id = item.id and before.status is distinct from item.status
               join dispatcher.agents as agent on agent.id = item.agent_id and agent.tenant_id = item.tenant_id
              where item.status = 'dead_letter'
              group by item.agent_id) as given_up;
  end if;
  return null;
exception when others then
  perform dispatcher.note_fault((select item.tenant_id from new_items as item limit 1), null, 'hint_inbox_update',
      format('%s (%s)', sqlerrm, sqlstate));
  return null;
end
$$;

COMMENT ON FUNCTION dispatcher.hint_inbox_update() IS 'After an update of items: one hint per agent and statement for what is back to pending or failed, one notification for what was given up, and when a finished item was reopened. Never fails the update.';

CREATE FUNCTION dispatcher.hint_other_gateways(p_tick dispatcher.tick) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  select dispatcher.send_gateway_hint(other.gateway_id, 'run', '{}')
    from (select note.gateway_id from public.workflow_notifications as note
           where note.tenant_id = p_tick.tenant_id and note.state = 'pending' and note.created_at = now()
          union
          select taken.gateway_id from dispatcher.taken_wakes as taken
           where taken.tenant_id = p_tick.tenant_id and taken.instance_id is distinct from p_tick.instance_id) as other
   where other.gateway_id is distinct from p_tick.gateway_id
$$;

COMMENT ON FUNCTION dispatcher.hint_other_gateways(p_tick dispatcher.tick) IS 'Hints the gateways whose agents a phase has given something to do, or whose processes are to be stopped.';

CREATE FUNCTION dispatcher.hint_workflow_daemons(p_tenant_id uuid, p_run_id uuid) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.send_gateway_hint(live.gateway_id, 'run', jsonb_build_object('run_id', p_run_id))
     from (select distinct instance.gateway_id from public.dispatcher_instances as instance
            where instance.tenant_id = p_tenant_id and instance.state = 'running'
              and not dispatcher.is_instance_silent(instance)
            limit 20) as live;
exception when others then
  -- A hint is worth less than the row it speaks of; the next tick finds the row.
  perform dispatcher.note_fault(p_tenant_id, null, 'hint', format('%s (%s)', sqlerrm, sqlstate));
end
$$;

COMMENT ON FUNCTION dispatcher.hint_workflow_daemons(p_tenant_id uuid, p_run_id uuid) IS 'Hints the tenant''s living daemons that runs are to be looked at. Never fails.';

CREATE FUNCTION dispatcher.hint_workflow_insert() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.hint_workflow_daemons(hint.tenant_id, hint.run_id)
     from (select tenant_id, (array_agg(id))[1] as run_id from new_runs where status = 'queued'
         group by tenant_id) as hint;
  return null;
exception when others then
  return null;
end
$$;

COMMENT ON FUNCTION dispatcher.hint_workflow_insert() IS 'After an insert of queued runs: one hint to each living daemon of the tenant. Never fails the insert.';

CREATE FUNCTION dispatcher.hint_workflow_rules() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.hint_workflow_daemons(changed.tenant_id, null)
      from (select distinct tenant_id from new_rules) as changed;
  return null;
exception when others then
  return null;
end
$$;

COMMENT ON FUNCTION dispatcher.hint_workflow_rules() IS 'After routes or budgets changed: waiting runs may go out now. One hint per statement. Never fails the change.';

CREATE FUNCTION dispatcher.hint_workflow_update() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
begin
  if dispatcher.is_quiet() then  -- a tick looks again by itself
    return null;
  end if;
  perform dispatcher.hint_workflow_daemons(hint.tenant_id, hint.run_id)
     from (select run.tenant_id, (array_agg(run.id))[1] as run_id
             from new_runs as run join old_runs as before on before.id = run.id and before.status <> run.status
            where run.status in ('queued', 'completed', 'failed', 'timed_out', 'cancelled')
              and (run.status = 'queued' or before.wake_id is not null
                   or (coalesce(before.paused_from, before.status) in ('dispatched', 'claimed', 'running')
                       and exists (select from public.workflow_runs as waiting
                                    where waiting.tenant_id = run.tenant_id
                                      and waiting.workflow_type = run.workflow_type
                                      and waiting.status = 'queued')))
            group by run.tenant_id) as hint;
  return null;
exception when others then
  return null;
end
$$;

COMMENT ON FUNCTION dispatcher.hint_workflow_update() IS 'After runs came back to the queue, or gave up their slots while others of their type wait: one hint per statement to the tenant''s living daemons. Never fails the update.';

CREATE FUNCTION dispatcher.hinted_ids(p_claim jsonb) RETURNS uuid[]
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO ''
    AS $$
begin
  if jsonb_typeof(p_claim -> 'item_ids') is distinct from 'array' or p_claim -> 'item_ids' = '[]' then
    return '{}';
  end if;
  return array(select item.value::uuid from jsonb_array_elements_text(p_claim -> 'item_ids') as item
      where item.value is not null limit 1000);
end
$$;

COMMENT ON FUNCTION dispatcher.hinted_ids(p_claim jsonb) IS 'The items that a claim {agent_id, path, item_ids} names.';

CREATE FUNCTION dispatcher.holds_of(p_groups dispatcher.waiting_group[], p_closed jsonb) RETURNS TABLE(workflow_type text, budget_id uuid)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select g.workflow_type, holder.id from unnest(p_groups) as g cross join lateral unnest(g.holders) as holder (id)
      where g.is_open
  union
  select closed.value ->> 'workflow_type', holder.id::uuid
    from jsonb_array_elements(p_closed) as closed cross
        join lateral jsonb_array_elements_text(closed.value -> 'holders') as holder (id)
$$;

COMMENT ON FUNCTION dispatcher.holds_of(p_groups dispatcher.waiting_group[], p_closed jsonb) IS 'Which budgets hold which types, before a pass and since it.';

CREATE FUNCTION dispatcher.in_parts(p_sweeper dispatcher.claimant, p_step text, p_what text, p_ids uuid[]) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $_$
declare
  v_half constant integer := coalesce(cardinality(p_ids), 0) / 2;
  v_count integer;
begin
  if coalesce(cardinality(p_ids), 0) = 0 then
    return 0;
  end if;
  -- What a trigger puts off until the commit speaks here, while it can still be told whose row it is about.
  set constraints all deferred;
  execute format('select dispatcher.%I($1, $2)', p_step) into v_count using p_sweeper, p_ids;
  set constraints all immediate;
  return coalesce(v_count, 0);
exception when others then
  if dispatcher.must_abort(sqlstate) or sqlstate = '55P03' then raise; end if;
  if v_half = 0 then
    perform dispatcher.note_fault(p_sweeper.tenant_id, p_sweeper.gateway_id, p_what,
        format('%s: %s (%s)', p_ids[1], sqlerrm, sqlstate));
    return 0;
  end if;
  return dispatcher.in_parts(p_sweeper, p_step, p_what, p_ids[:v_half])
         + dispatcher.in_parts(p_sweeper, p_step, p_what, p_ids[v_half + 1:]);
end
$_$;

COMMENT ON FUNCTION dispatcher.in_parts(p_sweeper dispatcher.claimant, p_step text, p_what text, p_ids uuid[]) IS 'Takes a step, a function (sweeper, ids) that answers how many rows it changed, for all ids at once; where that raises, for each half. What raises for one id alone is noted as p_what and costs no other. Answers the sum.';

CREATE FUNCTION dispatcher.inbox_close_verdict(p_item_id uuid, p_code text) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select jsonb_build_object('applied', p_code in ('ok', 'already'), 'code', p_code,
                            'status', item.status, 'attempt', item.attempt_count, 'max_attempts', item.max_attempts)
  from (select 1) as one_row left join dispatcher.agent_inbox_items as item on item.id = p_item_id
$$;

COMMENT ON FUNCTION dispatcher.inbox_close_verdict(p_item_id uuid, p_code text) IS 'The answer of the closing functions: {applied, code, status, attempt, max_attempts}; the last three are null when the item is unknown.';

CREATE FUNCTION dispatcher.inbox_content_key(p_wake_id uuid, p_content text, p_at timestamp with time zone) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$
  select encode(sha256(convert_to(coalesce(p_wake_id::text, floor(extract(epoch from p_at) / 600)::text) || chr(31)
      || p_content, 'UTF8')), 'hex')
$$;

COMMENT ON FUNCTION dispatcher.inbox_content_key(p_wake_id uuid, p_content text, p_at timestamp with time zone) IS 'What makes two posts of a sender the same work: the same content within the same wake, outside a wake within the same ten minutes.';

CREATE FUNCTION dispatcher.inbox_items_of_lease(p_agent_id uuid, p_lease_token uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(jsonb_agg(jsonb_build_object(
           'inbox_item_id', item.id,
           'event_type', item.event_type,
           'summary', left(item.summary, 100000),
           'task_id', item.task_id,
           'comment_id', item.comment_id,
           'contact_id', item.contact_id,
           'attempt', item.attempt_count,
           'leased_until', item.leased_until,
           'lease_token', lease.lease_token,
           'context', case when task.id is null then dispatcher.bounded_context(item.context)
                           else jsonb_build_object('task', jsonb_build_object(
                                  'id', task.id, 'title', left(task.title, 500),
                                  'description', left(task.description, 100000), 'status', task.status,
                                  'priority', task.priority, 'tags', task.tags, 'due_date',
                                      dispatcher.finite_time(task.due_date)))
                                || dispatcher.merge_inbox_context(dispatcher.bounded_context(item.context), '{}') end
         ) order by item.created_at, item.id), '[]'::jsonb)
    from dispatcher.agent_inbox_items as item
    join public.inbox_item_leases as lease on lease.item_id = item.id
    left join public.tasks as task on task.id = item.task_id and task.tenant_id = item.tenant_id
   where item.agent_id = p_agent_id
     and item.status = 'leased'
     and item.leased_until > clock_timestamp()
     and lease.lease_token = p_lease_token
     and lease.leased_at = item.leased_at
     and lease.closed_at is null
$$;

COMMENT ON FUNCTION dispatcher.inbox_items_of_lease(p_agent_id uuid, p_lease_token uuid) IS 'The items an agent holds under one lease token, oldest first, as the agent''s script prints them; an item''s task is laid into its context.';

CREATE FUNCTION dispatcher.inbox_request_key(p_request_key text, p_post_id uuid) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$ select coalesce('key:' || nullif(p_request_key, ''), 'call:' || p_post_id::text) $$;

COMMENT ON FUNCTION dispatcher.inbox_request_key(p_request_key text, p_post_id uuid) IS 'What makes two posts of a sender one request: the name the caller gave it, else the id of one run of its script; null without either.';

CREATE FUNCTION dispatcher.inbox_retry_delay(p_attempt integer) RETURNS interval
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$
  select make_interval(secs => least(900, 30 * power(2, least(greatest(p_attempt, 1), 12) - 1)))
$$;

COMMENT ON FUNCTION dispatcher.inbox_retry_delay(p_attempt integer) IS 'How long a failed item rests after its n-th attempt: 30 s, doubled per attempt, at most 900 s.';

CREATE FUNCTION dispatcher.insert_post(p_origin public.inbox_item_origins, p_recipient_id uuid, p_recipient_slug text, p_event_type text, p_summary text, p_context jsonb) RETURNS uuid
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_item_id uuid;
begin
  -- One statement: what looks at new items after the insert must already see where they come from.
  with posted as (
    insert into public.agent_inbox_items (tenant_id, agent_id, agent_slug, event_type, task_id, summary, context,
        dedup_key)
    values (p_origin.tenant_id, p_recipient_id, p_recipient_slug, p_event_type::public.inbox_event_type,
            (select task.id from public.tasks as task
              where task.tenant_id = p_origin.tenant_id
                and task.id = dispatcher.named_task(p_context)),
            p_summary, p_context, 'handoff:' || gen_random_uuid()::text)
    returning id
  )
  insert into public.inbox_item_origins (item_id, tenant_id, wake_id, from_agent_id, chain_depth, request_key,
      content_key)
  select posted.id, p_origin.tenant_id, p_origin.wake_id, p_origin.from_agent_id, p_origin.chain_depth,
      p_origin.request_key, p_origin.content_key
    from posted
  returning item_id into v_item_id;
  return v_item_id;
end
$$;

COMMENT ON FUNCTION dispatcher.insert_post(p_origin public.inbox_item_origins, p_recipient_id uuid, p_recipient_slug text, p_event_type text, p_summary text, p_context jsonb) IS 'Writes the item of a post with its origin; answers its id.';

CREATE FUNCTION dispatcher.invalid(p_faults text[]) RETURNS jsonb
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$ select jsonb_build_object('applied', false, 'code', 'invalid', 'faults', to_jsonb(p_faults)) $$;

COMMENT ON FUNCTION dispatcher.invalid(p_faults text[]) IS 'The refusal of arguments: {applied: false, code: invalid, faults}, every fault named.';

CREATE FUNCTION dispatcher.is_in_budget_scope(p_scope text, p_scope_id text, p_agent_id text, p_department_id text, p_workflow_type text) RETURNS boolean
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select case p_scope when 'fleet' then true when 'agent' then p_scope_id = p_agent_id when 'department'
      then p_scope_id = p_department_id
                      else p_scope_id = p_workflow_type end is true
$$;

COMMENT ON FUNCTION dispatcher.is_in_budget_scope(p_scope text, p_scope_id text, p_agent_id text, p_department_id text, p_workflow_type text) IS 'The scope chain of a run: its agent, that agent''s department, its type as project, the fleet.';

CREATE TABLE public.dispatcher_instances (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid NOT NULL,
    gateway_id uuid NOT NULL,
    state text DEFAULT 'running'::text NOT NULL,
    hostname text NOT NULL,
    host_id text NOT NULL,
    pid integer NOT NULL,
    pid_started_at double precision,
    version text NOT NULL,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    last_heartbeat_at timestamp with time zone DEFAULT now() NOT NULL,
    stopped_at timestamp with time zone,
    last_sweep_at timestamp with time zone,
    last_sweep jsonb,
    last_tick jsonb,
    canary uuid,
    realtime jsonb DEFAULT '{}'::jsonb NOT NULL,
    health jsonb DEFAULT '{}'::jsonb NOT NULL,
    CONSTRAINT dispatcher_instances_state_check CHECK ((state = ANY (ARRAY['running'::text, 'stopping'::text, 'stopped'::text, 'lost'::text]))),
    CONSTRAINT dispatcher_instances_stopped_has_time CHECK (((state = 'stopped'::text) = (stopped_at IS NOT NULL)))
);

COMMENT ON TABLE public.dispatcher_instances IS 'One row per running daemon: identity, heartbeat, last sweep and tick, health.';

CREATE FUNCTION dispatcher.is_instance_silent(p_instance public.dispatcher_instances) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select p_instance.last_heartbeat_at < now() - make_interval(secs => coalesce(
           (select settings.instance_timeout from public.dispatcher_settings as settings
               where settings.instance_id = p_instance.id), 45))
$$;

COMMENT ON FUNCTION dispatcher.is_instance_silent(p_instance public.dispatcher_instances) IS 'Whether an instance has sent no heartbeat for longer than its own instance_timeout.';

CREATE TABLE public.workflow_notifications (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    attempt integer NOT NULL,
    agent_id text NOT NULL,
    gateway_id uuid,
    state text DEFAULT 'pending'::text NOT NULL,
    tries integer DEFAULT 0 NOT NULL,
    next_try_at timestamp with time zone DEFAULT now() NOT NULL,
    claim_token uuid,
    claimed_until timestamp with time zone,
    last_error text,
    sent_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT workflow_notifications_sending_is_claimed CHECK (((state = 'sending'::text) = ((claim_token IS NOT NULL) AND (claimed_until IS NOT NULL)))),
    CONSTRAINT workflow_notifications_sent_has_time CHECK (((state = 'sent'::text) = (sent_at IS NOT NULL))),
    CONSTRAINT workflow_notifications_state_check CHECK ((state = ANY (ARRAY['pending'::text, 'sending'::text, 'sent'::text, 'failed'::text, 'obsolete'::text])))
);

COMMENT ON TABLE public.workflow_notifications IS 'The outbox: one row per dispatch, to be told to its agent by the daemon of its gateway (any daemon of the tenant where the agent has none).';

CREATE FUNCTION dispatcher.is_notification_due(p_note public.workflow_notifications) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  -- A lease or a next try from the day after tomorrow is no known time: nobody waits for it.
  select (p_note.state = 'pending' and (p_note.next_try_at <= now() or p_note.next_try_at > now() + interval '1 day'))
      or (p_note.state = 'sending' and (p_note.claimed_until < now()
      or p_note.claimed_until > now() + interval '1 day'))
$$;

COMMENT ON FUNCTION dispatcher.is_notification_due(p_note public.workflow_notifications) IS 'Whether a notification is to be sent now: it is pending and its time has come, or its sender''s lease is over.';

CREATE FUNCTION dispatcher.is_phase_due(p_tick dispatcher.tick, p_phase text) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  case p_phase
    when 'stopped' then return exists (select from public.budgets
                                 where tenant_id = p_tick.tenant_id and active and action_on_exceed = 'hard_stop');
    when 'dispatched' then return exists (select from public.workflow_runs
                                    where tenant_id = p_tick.tenant_id and status = 'queued'
                                      and (next_attempt_at is null or next_attempt_at <= now()))
                        or exists (select from public.budgets where tenant_id = p_tick.tenant_id and active);
    when 'retried' then return exists (select from public.workflow_runs as run where run.tenant_id = p_tick.tenant_id
        and run.status = 'dispatched'
                                   and dispatcher.is_stale_dispatch(run, p_tick.settings));
    when 'timed_out' then return exists (select from public.workflow_runs
                                   where tenant_id = p_tick.tenant_id and status in ('claimed', 'running')
                                     and deadline_at <= now());
    when 'released' then return exists (select from public.workflow_runs as run where run.tenant_id = p_tick.tenant_id
        and run.status in ('claimed', 'running')
                                    and dispatcher.silent_since(run)
                                        < now() - make_interval(secs => (p_tick.settings).stale_claim_seconds));
    when 'unrouted' then return exists (select from dispatcher.runs_to_mark(p_tick.tenant_id));
    when 'pruned' then return exists (select from dispatcher.old_notifications(p_tick.tenant_id, 1));
  end case;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return true;  -- its own call says what is wrong
end
$$;

COMMENT ON FUNCTION dispatcher.is_phase_due(p_tick dispatcher.tick, p_phase text) IS 'Whether a phase has something to do.';

CREATE FUNCTION dispatcher.is_quiet() RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$ select coalesce(current_setting('dispatcher.quiet', true), '') = 'on' $$;

COMMENT ON FUNCTION dispatcher.is_quiet() IS 'Whether this transaction is one of ours that looks again by itself: its changes need no hint, and it tells what it gives up.';

CREATE FUNCTION dispatcher.is_same_attempt(p_run public.workflow_runs, p_session text, p_wake_id uuid) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  -- One session name may serve attempt after attempt. The process of an earlier wake must not be handed what a later
  -- one holds.
  select p_run.session_id = p_session
     and (p_wake_id is null or p_run.wake_id is null or p_run.wake_id = p_wake_id
          or (select asking.claimed_at >= holding.claimed_at from public.agent_wakes as asking,
              public.agent_wakes as holding
               where asking.id = p_wake_id and holding.id = p_run.wake_id) is true)
$$;

COMMENT ON FUNCTION dispatcher.is_same_attempt(p_run public.workflow_runs, p_session text, p_wake_id uuid) IS 'Whether the session that asks for a run again is the one that holds it: the same name, and not from a wake before the one that holds it.';

CREATE FUNCTION dispatcher.is_secret(p_column text) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $_$
  select p_column ~ '(token|session_id|canary|secret|settings|claim_request|request_key|host_id|pid_started_at)$'
$_$;

COMMENT ON FUNCTION dispatcher.is_secret(p_column text) IS 'Whether a column of a table of ours is for daemons alone: what proves that somebody holds something, and what tells of the host.';

CREATE FUNCTION dispatcher.is_set_aside_by_stall(p_item_id uuid, p_failed_at timestamp with time zone) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select exists (select from public.inbox_item_marks as mark
                  where mark.item_id = p_item_id and mark.set_aside_as = 'agent_stalled'
                    and mark.set_aside_at = p_failed_at)
$$;

COMMENT ON FUNCTION dispatcher.is_set_aside_by_stall(p_item_id uuid, p_failed_at timestamp with time zone) IS 'Whether an item failed because its agent stalled, and not by a try of its own: then it needs no rest.';

CREATE FUNCTION dispatcher.is_signed_in_user() RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$ select coalesce(nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'role' = 'authenticated',
    false) $$;

COMMENT ON FUNCTION dispatcher.is_signed_in_user() IS 'Whether this request comes with the token of a person.';

CREATE FUNCTION dispatcher.is_stale_dispatch(p_run public.workflow_runs, p_settings public.dispatcher_settings) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select p_run.dispatched_at < now() - make_interval(secs => p_settings.stale_dispatch_seconds)
      or p_run.dispatched_at > now() + interval '1 day'
$$;

COMMENT ON FUNCTION dispatcher.is_stale_dispatch(p_run public.workflow_runs, p_settings public.dispatcher_settings) IS 'Whether a dispatched run was not claimed in time. A dispatch from the day after tomorrow is no known time: nobody waits for it.';

CREATE FUNCTION dispatcher.is_suspect(p_run public.workflow_runs, p_settings public.dispatcher_settings) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select p_run.status = 'running' and p_run.deadline_at > now()
     and dispatcher.last_heartbeat(p_run) < now() - make_interval(secs => dispatcher.orphan_after_seconds(p_settings))
     and not exists (select from public.workflow_respawns as respawn
                      where respawn.run_id = p_run.id and respawn.attempt = p_run.dispatch_attempts)
     and not exists (select from public.agent_wakes as wake where wake.id = p_run.wake_id and wake.ended_at is null)
$$;

COMMENT ON FUNCTION dispatcher.is_suspect(p_run public.workflow_runs, p_settings public.dispatcher_settings) IS 'Whether a running run has been silent for too long, has no living wake, and was not spawned again in this attempt.';

CREATE FUNCTION dispatcher.is_timezone(p_timezone text) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  perform now() at time zone p_timezone;
  return p_timezone is not null;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return false;
end
$$;

COMMENT ON FUNCTION dispatcher.is_timezone(p_timezone text) IS 'Whether the database knows a zone of this name.';

CREATE FUNCTION dispatcher.items_of_claim(p_facts dispatcher.gate_facts) RETURNS uuid[]
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO ''
    AS $$
declare
  v_items uuid[] := p_facts.hinted_item_ids;
  v_head uuid;
begin
  foreach v_head in array p_facts.due_item_ids loop
    if v_head <> all (v_items) then
      v_items := v_items || v_head;
    end if;
  end loop;
  return v_items;
end
$$;

COMMENT ON FUNCTION dispatcher.items_of_claim(p_facts dispatcher.gate_facts) IS 'The items a wake is for: those that hints named, else the oldest; then the ones the agent will lease first.';

CREATE FUNCTION dispatcher.items_to_requeue(p_agent_ids uuid[], p_is_one_agent boolean, p_item_ids uuid[], p_dead boolean, p_since timestamp with time zone, p_limit integer) RETURNS TABLE(item_id uuid, agent_id uuid)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  -- The marks are joined, not asked for one by one: history grows, and a call must stay within the statement timeout.
  select item.id, item.agent_id
    from dispatcher.agents as agent
    join dispatcher.agent_inbox_items as item on item.agent_id = agent.id and item.tenant_id = agent.tenant_id
    left join public.inbox_item_marks as mark on mark.item_id = item.id and mark.set_aside_at = item.failed_at
   where agent.id = any (p_agent_ids) and item.status in ('failed', 'dead_letter')
     and case when p_item_ids is not null then item.id = any (p_item_ids)
              -- Given up: also what went stale and what an older daemon gave up; not what an operator ended.
              when p_dead then (item.status = 'dead_letter' or item.attempt_count >= item.max_attempts)
                  and mark.set_aside_as is distinct from 'operator'
                  and (p_since is null or coalesce(item.failed_at, item.updated_at) >= p_since)
              when item.status = 'failed' then mark.set_aside_as = 'agent_stalled'
              else p_is_one_agent and mark.set_aside_as = 'wake_chain_limit' end
   order by item.created_at, item.id limit p_limit
$$;

COMMENT ON FUNCTION dispatcher.items_to_requeue(p_agent_ids uuid[], p_is_one_agent boolean, p_item_ids uuid[], p_dead boolean, p_since timestamp with time zone, p_limit integer) IS 'The items a requeue means, oldest first: the given ones; with p_dead what was given up since p_since; else what a stall, and of one agent a chain limit, set aside.';

CREATE FUNCTION dispatcher.join_waitlist(p_agent_id uuid, p_path text, p_since timestamp with time zone, p_oldest timestamp with time zone) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  update public.agent_wake_state
     set waitlist_path = coalesce(waitlist_path, p_path), waitlisted_at = coalesce(waitlisted_at, p_since),
         waiting_since = coalesce(waiting_since, p_oldest), updated_at = now()
   where agent_id = p_agent_id
$$;

COMMENT ON FUNCTION dispatcher.join_waitlist(p_agent_id uuid, p_path text, p_since timestamp with time zone, p_oldest timestamp with time zone) IS 'Puts an agent on the waitlist, or leaves it in its place there. The caller holds its wake state.';

CREATE FUNCTION dispatcher.keep_end(p_run public.workflow_runs, p_status text, p_output jsonb, p_error text, p_usage jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_before constant public.workflow_runs := p_run;
begin
  p_run := dispatcher.book_workflow_usage(p_run, p_usage);
  update public.workflow_runs
     set kept_status = p_status,
         kept_error = case p_status when 'failed' then dispatcher.clean_inbox_reason(p_error) end,
         output_summary = coalesce(p_output, output_summary)
   where id = p_run.id returning * into p_run;
  return dispatcher.workflow_answer('kept', p_run) || jsonb_build_object(
    'usage_booked', dispatcher.workflow_usage_values(coalesce(p_usage, '{}')) <> '{}',
    'booked', dispatcher.booked_since(v_before, p_run));
end
$$;

COMMENT ON FUNCTION dispatcher.keep_end(p_run public.workflow_runs, p_status text, p_output jsonb, p_error text, p_usage jsonb) IS 'Keeps how a session ended its run while that is held: the work is done and is not to be done again.';

CREATE FUNCTION dispatcher.keep_settings(p_instance_id uuid, p_tenant_id uuid, p_settings jsonb) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_settings public.dispatcher_settings := dispatcher.typed_settings(p_settings);
begin
  v_settings.instance_id := p_instance_id;
  v_settings.tenant_id := p_tenant_id;
  delete from public.dispatcher_settings where instance_id = p_instance_id;
  insert into public.dispatcher_settings select (v_settings).*;
end
$$;

COMMENT ON FUNCTION dispatcher.keep_settings(p_instance_id uuid, p_tenant_id uuid, p_settings jsonb) IS 'Keeps the settings a daemon registered with, typed.';

CREATE FUNCTION dispatcher.known_cost(p_cost numeric) RETURNS numeric
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$ select case when p_cost >= 0 and p_cost < 'Infinity' then p_cost end $$;

COMMENT ON FUNCTION dispatcher.known_cost(p_cost numeric) IS 'A cost of a row; NULL when it is none: not told, negative, NaN, infinite.';

CREATE FUNCTION dispatcher.known_time(p_at timestamp with time zone) RETURNS timestamp with time zone
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$ select case when p_at between '1970-01-01Z' and now() + interval '1 day' then p_at end $$;

COMMENT ON FUNCTION dispatcher.known_time(p_at timestamp with time zone) IS 'A time of a row as it is shown; NULL for one that no clock has shown yet.';

CREATE FUNCTION dispatcher.known_tokens(p_input bigint, p_output bigint) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$
  select case when num_nonnulls(p_input, p_output) > 0 and least(p_input, p_output) >= 0
              then least(coalesce(p_input, 0)::numeric + coalesce(p_output, 0), 1e18)::bigint end
$$;

COMMENT ON FUNCTION dispatcher.known_tokens(p_input bigint, p_output bigint) IS 'The tokens that a row tells of; NULL when it tells of none, or of fewer than none.';

CREATE FUNCTION dispatcher.last_heartbeat(p_run public.workflow_runs) RETURNS timestamp with time zone
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$ select coalesce(dispatcher.known_time(p_run.last_heartbeat_at), dispatcher.known_time(p_run.claimed_at),
    '-infinity') $$;

COMMENT ON FUNCTION dispatcher.last_heartbeat(p_run public.workflow_runs) IS 'When a run was last heard of; -infinity where the row tells of no time that a clock has shown.';

CREATE FUNCTION dispatcher.lease_busy_inbox_item(p_tenant_id uuid, p_agent_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_timeout constant text := current_setting('lock_timeout');
  v_item_id uuid;
begin
  select due.id into v_item_id from dispatcher.inbox_due as due
   where due.tenant_id = p_tenant_id and due.agent_id = p_agent_id and due.due_at <= clock_timestamp()
   order by due.created_at, due.id
   limit 1;
  if v_item_id is not null then
    perform set_config('lock_timeout', '1s', true);
    perform 1 from dispatcher.agent_inbox_items as item where item.id = v_item_id for update;
    perform set_config('lock_timeout', v_timeout, true);
    perform dispatcher.lease_one_inbox_item(v_item_id, p_lease_seconds, p_lease_token, p_wake_id);
  end if;
exception when lock_not_available then
  null; -- whoever holds it that long is at work on it
end
$$;

COMMENT ON FUNCTION dispatcher.lease_busy_inbox_item(p_tenant_id uuid, p_agent_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) IS 'Leases the agent''s oldest due item although another session has it locked, if that session lets go of it within a second.';

CREATE FUNCTION dispatcher.lease_due_items(p_tenant_id uuid, p_agent_id uuid, p_wanted integer, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_wanted integer := p_wanted;
  v_is_leased boolean;
  v_raises boolean := false;
  v_item_id uuid;
  v_items jsonb;
begin
  for v_item_id in
    select due.id from dispatcher.inbox_due as due
     where due.tenant_id = p_tenant_id and due.agent_id = p_agent_id and due.due_at <= clock_timestamp()
     order by due.created_at, due.id
     limit 200 -- lets the planner walk the index instead of sorting the backlog; far more than others can hold locked
  loop
    v_is_leased := dispatcher.lease_one_inbox_item(v_item_id, p_lease_seconds, p_lease_token, p_wake_id);
    v_raises := v_raises or v_is_leased is null;
    v_wanted := v_wanted - coalesce(v_is_leased, false)::integer;
    exit when v_wanted = 0;
  end loop;
  v_items := dispatcher.inbox_items_of_lease(p_agent_id, p_lease_token);
  if jsonb_array_length(v_items) = 0 and v_raises then
    return null;
  end if;
  if jsonb_array_length(v_items) = 0 then
    -- An agent must not be told that its inbox is empty because a daemon stamps its item at this moment.
    perform dispatcher.lease_busy_inbox_item(p_tenant_id, p_agent_id, p_lease_seconds, p_lease_token, p_wake_id);
    v_items := dispatcher.inbox_items_of_lease(p_agent_id, p_lease_token);
  end if;
  return v_items;
end
$$;

COMMENT ON FUNCTION dispatcher.lease_due_items(p_tenant_id uuid, p_agent_id uuid, p_wanted integer, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) IS 'Leases up to p_wanted due items of an agent, oldest first, in the wake p_wake_id; answers what the token holds then; NULL when it holds nothing because what is due raises.';

CREATE FUNCTION dispatcher.lease_one_inbox_item(p_item_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_now timestamptz;
  v_written integer;
begin
  set constraints all deferred;
  perform 1 from dispatcher.agent_inbox_items as item where item.id = p_item_id for update skip locked;
  if not found then
    return false;
  end if;
  v_now := clock_timestamp();
  -- Read anew under the lock: another session may have leased or closed the item since it was picked.
  if not exists (select 1 from dispatcher.inbox_due as due where due.id = p_item_id and due.due_at <= v_now) then
    return false;
  end if;
  update dispatcher.agent_inbox_items as item
     set status = 'leased', leased_at = v_now, leased_until = v_now + make_interval(secs => p_lease_seconds),
         attempt_count = item.attempt_count + 1, updated_at = v_now
   where item.id = p_item_id;
  insert into public.inbox_item_leases as lease
         (item_id, tenant_id, agent_id, wake_id, lease_token, attempt, leased_at, leased_until)
  select item.id, item.tenant_id, item.agent_id, p_wake_id, p_lease_token, item.attempt_count, item.leased_at,
      item.leased_until
    from dispatcher.agent_inbox_items as item
   where item.id = p_item_id
  on conflict (item_id) do update
     set tenant_id = excluded.tenant_id, agent_id = excluded.agent_id, wake_id = excluded.wake_id,
         lease_token = excluded.lease_token, attempt = excluded.attempt, leased_at = excluded.leased_at,
         leased_until = excluded.leased_until, closed_at = null, outcome = null;
  get diagnostics v_written = row_count;
  if v_written = 0 then
    raise exception 'a trigger keeps the lease from being written';
  end if;
  set constraints all immediate;
  return true;
exception when others then
  if dispatcher.must_abort(sqlstate) or sqlstate = '55P03' then raise; end if;
  perform dispatcher.note_fault(item.tenant_id, agent.gateway_id, 'lease',
      format('item %s: %s (%s)', p_item_id, sqlerrm, sqlstate))
     from dispatcher.agent_inbox_items as item join dispatcher.agents as agent on agent.id = item.agent_id
    where item.id = p_item_id;
  return null;
end
$$;

COMMENT ON FUNCTION dispatcher.lease_one_inbox_item(p_item_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) IS 'Leases one item if it is free and due; false when another session has it, NULL when it raises, which is noted and costs no other item. The lease names the wake it is taken in, which keeps it alive.';

CREATE FUNCTION dispatcher.leave_waitlist(p_agent_id uuid) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  update public.agent_wake_state set waitlisted_at = null, waitlist_path = null, waiting_since = null
   where agent_id = p_agent_id and waitlisted_at is not null
$$;

COMMENT ON FUNCTION dispatcher.leave_waitlist(p_agent_id uuid) IS 'Takes an agent off the waitlist. The caller holds its wake state.';

CREATE FUNCTION dispatcher.let_users_read(p_table text, p_rows text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
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

COMMENT ON FUNCTION dispatcher.let_users_read(p_table text, p_rows text) IS 'Lets signed-in users read the rows of their tenant (or p_rows) of a table of ours, without the columns that are for daemons alone: they name the columns, `select *` is refused to them.';

CREATE FUNCTION dispatcher.list_agents(p_sweeper dispatcher.claimant, p_agent_ids uuid[], p_oldest timestamp with time zone[], p_since timestamp with time zone) RETURNS uuid[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_half constant integer := coalesce(cardinality(p_agent_ids), 0) / 2;
  v_listed uuid[];
begin
  insert into public.agent_wake_state (agent_id, tenant_id)
  select free.id, p_sweeper.tenant_id
    from (select agent.id from dispatcher.agents as agent
           where agent.id = any (p_agent_ids)
             and not exists (select from public.agent_wake_state as state where state.agent_id = agent.id)
             for key share skip locked) as free
  on conflict do nothing;
  with held as (
    select state.agent_id from public.agent_wake_state as state where state.agent_id = any (p_agent_ids)
        for update skip locked
  ), listed as (
    update public.agent_wake_state as state
       set waitlist_path = coalesce(state.waitlist_path, 'sweep'),
           waitlisted_at = coalesce(state.waitlisted_at, p_since),
           waiting_since = coalesce(state.waiting_since, ready.oldest), updated_at = now()
      from held join unnest(p_agent_ids, p_oldest) as ready (agent_id, oldest) on ready.agent_id = held.agent_id
     where state.agent_id = held.agent_id
    returning state.agent_id)
  select array_agg(agent_id) into v_listed from listed;
  perform dispatcher.settle_constraints('public.agent_wake_state');
  return coalesce(v_listed, '{}');
exception when others then
  -- Also a row that somebody has inserted and not committed: the others do not wait with it.
  if dispatcher.must_abort(sqlstate)
     or (sqlstate = '55P03' and clock_timestamp() > now() + interval '2 seconds') then raise; end if;
  if v_half > 0 then
    return dispatcher.list_agents(p_sweeper, p_agent_ids[:v_half], p_oldest[:v_half], p_since)
           || dispatcher.list_agents(p_sweeper, p_agent_ids[v_half + 1:], p_oldest[v_half + 1:], p_since);
  end if;
  if sqlstate <> '55P03' then
    perform dispatcher.note_fault(p_sweeper.tenant_id, p_sweeper.gateway_id, 'waitlist',
        format('agent %s: %s (%s)', p_agent_ids[1], sqlerrm, sqlstate));
  end if;
  return '{}';
end
$$;

COMMENT ON FUNCTION dispatcher.list_agents(p_sweeper dispatcher.claimant, p_agent_ids uuid[], p_oldest timestamp with time zone[], p_since timestamp with time zone) IS 'Puts agents, whose oldest items are from p_oldest, on the waitlist, all at once and held for a moment; answers which: those that somebody holds, or whose row raises, are not.';

CREATE FUNCTION dispatcher.live_wakes_of_gateway(p_gateway_id uuid) RETURNS integer
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$ select count(*)::integer from public.agent_wakes where gateway_id = p_gateway_id
    and state in ('starting', 'running') $$;

COMMENT ON FUNCTION dispatcher.live_wakes_of_gateway(p_gateway_id uuid) IS 'How many wakes of a gateway are alive: what the cap counts.';

CREATE TABLE public.agent_wake_state (
    agent_id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    consecutive_failures integer DEFAULT 0 NOT NULL,
    stalled_at timestamp with time zone,
    last_wake_id uuid,
    last_claimed_at timestamp with time zone,
    last_ended_at timestamp with time zone,
    last_end_state text,
    waitlisted_at timestamp with time zone,
    waitlist_path text,
    waiting_since timestamp with time zone,
    chain_notified_at timestamp with time zone,
    often_notified_at timestamp with time zone,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT agent_wake_state_consecutive_failures_check CHECK ((consecutive_failures >= 0)),
    CONSTRAINT agent_wake_state_waiting CHECK (((waitlisted_at IS NULL) = (waitlist_path IS NULL)))
);

COMMENT ON TABLE public.agent_wake_state IS 'What the gates remember of an agent: failures in a row, stall, last wake, its place on the waitlist.';

COMMENT ON COLUMN public.agent_wake_state.waiting_since IS 'created_at of the oldest item that waits; orders agents that joined the waitlist together.';

COMMENT ON COLUMN public.agent_wake_state.often_notified_at IS 'When the operator was last told that the agent is woken unusually often.';

CREATE FUNCTION dispatcher.lock_agent(p_claimant dispatcher.claimant, p_agent_id uuid, OUT slug text, OUT state public.agent_wake_state, OUT verdict text) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO ''
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
declare
  v_found record;
begin
  select agent.slug, memory into v_found
    from public.agents as agent join public.agent_wake_state as memory on memory.agent_id = agent.id
   where agent.id = p_agent_id and agent.gateway_id = p_claimant.gateway_id and agent.tenant_id = p_claimant.tenant_id
     for key share of agent skip locked for update of memory skip locked;
  if v_found.slug is not null then
    slug := v_found.slug;
    state := v_found.memory;
    verdict := 'ok';
    return;
  end if;
  select agent.slug into slug from dispatcher.agents as agent
   where agent.id = p_agent_id and agent.gateway_id = p_claimant.gateway_id and agent.tenant_id = p_claimant.tenant_id;
  verdict := case when slug is null then 'not_local' else 'busy' end;
  if slug is not null and not exists (select from public.agent_wake_state where agent_id = p_agent_id) then
    -- Its first claim: the row the gates remember it by is made, unless the agent itself is held.
    perform from dispatcher.agents where id = p_agent_id for key share skip locked;
    if found then
      state := dispatcher.lock_wake_state(p_agent_id, p_claimant.tenant_id);
      verdict := case when state.agent_id is null then 'busy' else 'ok' end;
    end if;
  end if;
end
$$;

COMMENT ON FUNCTION dispatcher.lock_agent(p_claimant dispatcher.claimant, p_agent_id uuid, OUT slug text, OUT state public.agent_wake_state, OUT verdict text) IS 'Holds an agent of the claimant''s gateway against its end, and what the gates remember of it: verdict ok, busy (somebody holds one of the rows) or not_local. Never waits.';

CREATE FUNCTION dispatcher.lock_gateway(p_instance_id uuid) RETURNS dispatcher.claimant
    LANGUAGE plpgsql
    SET search_path TO ''
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
declare
  v_found record;
begin
  for v_try in 1 .. 2 loop
    -- The rows that a wake refers to are held along with it: the check of a foreign key then waits for nobody.
    select instance.id, instance.tenant_id, instance.gateway_id, settings into v_found
      from public.dispatcher_instances as instance
      join public.dispatcher_settings as settings on settings.instance_id = instance.id
      join public.dispatcher_gateways as lock on lock.gateway_id = instance.gateway_id
      join public.gateways as gateway on gateway.id = instance.gateway_id
      join public.tenants as tenant on tenant.id = instance.tenant_id
     where instance.id = p_instance_id
       for update of lock skip locked for key share of instance, gateway, tenant skip locked;
    if v_found.id is not null then
      return row(v_found.id, v_found.tenant_id, v_found.gateway_id, v_found.settings)::dispatcher.claimant;
    end if;
    exit when v_try = 2;
    perform dispatcher.wait_for_gateway(p_instance_id);
  end loop;
  perform dispatcher.running_instance(p_instance_id);
  raise exception 'the gateway of dispatcher instance % is gone', p_instance_id using errcode = 'OD001',
      hint = 'Register the instance again.';
end
$$;

COMMENT ON FUNCTION dispatcher.lock_gateway(p_instance_id uuid) IS 'Locks the gateway of an instance, which makes its cap exact, and answers who claims with which settings. The only wait of a claim: see wait_for_gateway. Raises OD001 for an unknown instance.';

CREATE FUNCTION dispatcher.lock_inbox_lease(p_item_id uuid, p_lease_token uuid, p_outcomes text[], p_wake_id uuid) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_item dispatcher.agent_inbox_items;
  v_lease public.inbox_item_leases;
begin
  -- The wake first: one that ends at this moment ends before or after the item is closed, and so knows of it.
  perform from public.agent_wakes as wake
    where wake.id = (select lease.wake_id from public.inbox_item_leases as lease where lease.item_id = p_item_id)
      and wake.state in ('starting', 'running')
      for share;
  select * into v_item from dispatcher.agent_inbox_items as item where item.id = p_item_id for update;
  if not found then
    return 'not_found';
  end if;
  select * into v_lease from public.inbox_item_leases as lease where lease.item_id = p_item_id for update;
  if v_lease.item_id is null or p_lease_token is null or v_lease.lease_token <> p_lease_token then
    return 'lease_lost';
  end if;
  if p_wake_id is not null and v_lease.wake_id is not null and v_lease.wake_id <> p_wake_id then
    return 'lease_lost';
  end if;
  if v_lease.closed_at is not null then
    return case when v_lease.outcome = any (p_outcomes) then 'already' else 'lease_lost' end;
  end if;
  -- Callers of lease_inbox_item(uuid, integer) know no tokens: an item they took over differs in leased_at.
  if v_item.status = 'leased' and v_item.leased_at = v_lease.leased_at and v_item.leased_until > clock_timestamp() then
    return 'ok';
  end if;
  return 'lease_lost';
end
$$;

COMMENT ON FUNCTION dispatcher.lock_inbox_lease(p_item_id uuid, p_lease_token uuid, p_outcomes text[], p_wake_id uuid) IS 'Locks an item and its lease and says whether the token, in the wake p_wake_id (NULL: whichever), still owns it: ok, already (closed by this token with one of the outcomes), lease_lost, not_found.';

CREATE FUNCTION dispatcher.lock_routes(p_tick dispatcher.tick) RETURNS text[]
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  select array(select route.workflow_type from public.workflow_agent_routing as route
                where route.tenant_id = p_tick.tenant_id order by route.workflow_type for update skip locked)
$$;

COMMENT ON FUNCTION dispatcher.lock_routes(p_tick dispatcher.tick) IS 'Locks the tenant''s routes before anything is counted; a type whose route somebody holds is left out of this pass.';

CREATE FUNCTION dispatcher.lock_tables(VARIADIC p_tables text[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '250ms'
    AS $$
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

COMMENT ON FUNCTION dispatcher.lock_tables(VARIADIC p_tables text[]) IS 'Locks up to four tables of schema public for new keys, triggers and indexes: all at once or none, for 3 s at most, or for as long as dispatcher.lock_patience says (then 55P03). Each try ends before the deadlock check of the application (1 s), so that it is never the application that is cancelled.';

CREATE FUNCTION dispatcher.lock_wake(p_wake_id uuid, OUT wake public.agent_wakes, OUT verdict text) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_agent_id uuid;
  v_tenant_id uuid;
begin
  select agent_id, tenant_id into v_agent_id, v_tenant_id from public.agent_wakes where id = p_wake_id;
  verdict := case when v_agent_id is null then 'not_found' else 'busy' end;
  perform from public.agent_wake_state where agent_id = v_agent_id for update skip locked;
  -- Somebody may have deleted the row: it is made anew, or the wake could never end.
  if found or (v_agent_id is not null and (dispatcher.lock_wake_state(v_agent_id,
      v_tenant_id)).agent_id is not null) then
    select * into wake from public.agent_wakes where id = p_wake_id for update skip locked;
    verdict := case when wake.id is null then 'busy' else 'ok' end;
  end if;
end
$$;

COMMENT ON FUNCTION dispatcher.lock_wake(p_wake_id uuid, OUT wake public.agent_wakes, OUT verdict text) IS 'Locks what the gates remember of the agent, then the wake: verdict ok, busy (somebody holds one of them) or not_found. Never waits.';

CREATE FUNCTION dispatcher.lock_wake_state(p_agent_id uuid, p_tenant_id uuid) RETURNS public.agent_wake_state
    LANGUAGE plpgsql
    SET search_path TO ''
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
declare
  v_state public.agent_wake_state;
begin
  select * into v_state from public.agent_wake_state where agent_id = p_agent_id for update skip locked;
  if v_state.agent_id is null and p_agent_id is not null
     and not exists (select from public.agent_wake_state where agent_id = p_agent_id) then
    insert into public.agent_wake_state (agent_id, tenant_id) values (p_agent_id, p_tenant_id)
        on conflict do nothing returning * into v_state;
  end if;
  return v_state;
end
$$;

COMMENT ON FUNCTION dispatcher.lock_wake_state(p_agent_id uuid, p_tenant_id uuid) IS 'What the gates remember of an agent, locked, made where there is none; all NULL when somebody else holds it. Never waits.';

CREATE FUNCTION dispatcher.lock_workflow_run(p_tenant_id uuid, p_run_id uuid) RETURNS public.workflow_runs
    LANGUAGE sql
    SET search_path TO ''
    AS $$ select * from public.workflow_runs where id = p_run_id and tenant_id = p_tenant_id for update $$;

COMMENT ON FUNCTION dispatcher.lock_workflow_run(p_tenant_id uuid, p_run_id uuid) IS 'The run, locked; all NULL when the tenant has none of that id. Waits for at most lock_timeout.';

CREATE FUNCTION dispatcher.look_around(p_sweeper dispatcher.claimant) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  -- Much is looked at, and a table that somebody holds is met again and again.
  perform set_config('lock_timeout', '100ms', true);
  perform dispatcher.warm_backend();
  return jsonb_build_object(
    'agents', (select coalesce(jsonb_agg(jsonb_build_object('id', id, 'slug', slug)), '[]') from dispatcher.agents
        where gateway_id = p_sweeper.gateway_id and tenant_id = p_sweeper.tenant_id),
    'open_wakes', dispatcher.open_wakes_of_others(p_sweeper.instance_id), 'broadcast_available',
        dispatcher.broadcast_hints_available(),
    'due', to_jsonb(dispatcher.phases_due(p_sweeper)));
end
$$;

COMMENT ON FUNCTION dispatcher.look_around(p_sweeper dispatcher.claimant) IS 'Where a sweep begins: {agents (the gateway''s: id, slug), open_wakes (of other instances), broadcast_available, due (the phases that have something to do)}.';

CREATE FUNCTION dispatcher.look_at_runs(p_tick dispatcher.tick) RETURNS jsonb
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  select jsonb_build_object('stop_wakes', dispatcher.wakes_to_stop(p_tick.instance_id), 'due', coalesce(
           (select jsonb_agg(phase.name order by phase.place)
              from unnest(array['stopped', 'dispatched', 'retried', 'timed_out', 'released', 'unrouted',
                  'pruned']) with ordinality as phase (name, place)
             where dispatcher.is_phase_due(p_tick, phase.name)), '[]'))
$$;

COMMENT ON FUNCTION dispatcher.look_at_runs(p_tick dispatcher.tick) IS 'Where a tick begins: {due (the phases that have something to do, in their order), stop_wakes}.';

CREATE FUNCTION dispatcher.mark_agent_stalled(p_agent_id uuid, p_cause text DEFAULT NULL::text) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_state public.agent_wake_state;
  v_slug text;
  v_count integer := 0;
  v_is_new boolean;
begin
  select * into v_state from public.agent_wake_state where agent_id = p_agent_id for update skip locked;
  if v_state.agent_id is null then
    return 0;
  end if;
  v_is_new := v_state.stalled_at is null;
  update public.agent_wake_state
     set stalled_at = coalesce(stalled_at, now()), waitlisted_at = null, waitlist_path = null, waiting_since = null,
         updated_at = now()
   where agent_id = p_agent_id;
  v_is_new := v_is_new and found;  -- whom nobody keeps, nobody tells of at every look
  select slug into v_slug from dispatcher.agents where id = p_agent_id;
  begin
    v_count := dispatcher.set_items_aside(array(
      select item.id from dispatcher.agent_inbox_items as item
       where item.agent_id = p_agent_id and item.tenant_id = v_state.tenant_id and item.status = 'pending'
         and item.attempt_count < item.max_attempts
           limit 500), 'agent_stalled', 'agent_stalled');
    perform dispatcher.settle_constraints('public.agent_inbox_items');
  exception when others then
    if dispatcher.must_abort(sqlstate) then raise; end if;
    perform dispatcher.note_fault(v_state.tenant_id, (select gateway_id from dispatcher.agents where id = p_agent_id),
                                  'items of a stalled agent', format('%s (%s)', sqlerrm, sqlstate));
  end;
  if v_is_new then
    perform dispatcher.notify_operator(
      v_state.tenant_id, 'agent_stalled', format('Agent %s is stalled', v_slug),
      coalesce(p_cause || '. ', format('%s wakes in a row failed. ', v_state.consecutive_failures))
      || format('Its %s pending item(s) wait as failed; a new item, or `dispatcher inbox requeue --agent %s`, wakes it '
                'again.', v_count, v_slug),
      p_agent_id, jsonb_build_object('consecutive_failures', v_state.consecutive_failures, 'items', v_count, 'cause',
          p_cause));
  end if;
  return v_count;
end
$$;

COMMENT ON FUNCTION dispatcher.mark_agent_stalled(p_agent_id uuid, p_cause text) IS 'Sets pending items of an agent aside (failed, marked agent_stalled, attempts untouched), at most 500 a call: the sweep takes the rest. Tells the operator once per stall, with p_cause where there is one.';

CREATE FUNCTION dispatcher.mark_as_set_aside(p_item_ids uuid[], p_as text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '100ms'
    AS $$
begin
  insert into public.inbox_item_marks as mark (item_id, tenant_id, set_aside_at, set_aside_as)
  select item.id, item.tenant_id, item.failed_at, p_as from dispatcher.agent_inbox_items as item
      where item.id = any (p_item_ids)
  on conflict (item_id) do update set set_aside_at = excluded.set_aside_at, set_aside_as = excluded.set_aside_as;
  perform dispatcher.settle_constraints('public.inbox_item_marks');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault((select tenant_id from dispatcher.agent_inbox_items where id = p_item_ids[1]), null,
                                'mark of items', format('%s (%s)', sqlerrm, sqlstate));
end
$$;

COMMENT ON FUNCTION dispatcher.mark_as_set_aside(p_item_ids uuid[], p_as text) IS 'Marks why items that were just set aside are. A side write: without its mark an item is one that failed by itself.';

CREATE FUNCTION dispatcher.mark_item_changes(p_reopened uuid[], p_closed_by_user uuid[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  if cardinality(p_reopened || p_closed_by_user) = 0 then
    return;
  end if;
  begin
    insert into public.inbox_item_marks as mark (item_id, tenant_id, reopened_at, closed_by_user_at)
    select item.id, item.tenant_id, case when item.id = any (p_reopened) then now() end,
        case when item.id = any (p_closed_by_user) then now() end
      from dispatcher.agent_inbox_items as item where item.id = any (p_reopened || p_closed_by_user)
    on conflict (item_id) do update set reopened_at = coalesce(excluded.reopened_at, mark.reopened_at),
                                        closed_by_user_at = coalesce(excluded.closed_by_user_at,
                                            mark.closed_by_user_at);
    perform dispatcher.settle_constraints('public.inbox_item_marks');
  exception when others then
    if dispatcher.must_abort(sqlstate) then raise; end if;
    perform dispatcher.note_fault((select tenant_id from dispatcher.agent_inbox_items
        where id = (p_reopened || p_closed_by_user)[1]), null,
                                  'mark of items', format('%s (%s)', sqlerrm, sqlstate));
  end;
end
$$;

COMMENT ON FUNCTION dispatcher.mark_item_changes(p_reopened uuid[], p_closed_by_user uuid[]) IS 'Keeps when items were reopened, and when a person closed them. The caller''s statement holds these items.';

CREATE FUNCTION dispatcher.mark_runs(p_run_ids uuid[]) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_count integer;
begin
  with marked as (
    update public.workflow_runs as run
       set blocker_type = case when target.has_agent then null else 'no_route' end,
           blocker_description = case when target.has_agent then null
               else format('no route for workflow type %s', run.workflow_type) end
      from (select one.id, (dispatcher.target_of(one)).agent_id is not null as has_agent
          from public.workflow_runs as one
             where one.id = any (p_run_ids) and one.status = 'queued') as target
     where run.id = target.id
    returning run.blocker_type)
  select count(*) filter (where blocker_type = 'no_route') into v_count from marked;
  return v_count;
end
$$;

COMMENT ON FUNCTION dispatcher.mark_runs(p_run_ids uuid[]) IS 'Writes or takes away blocker no_route of runs the caller has locked; answers how many carry it now.';

CREATE FUNCTION dispatcher.mark_unrouted_runs(p_tick dispatcher.tick, p_limit integer) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_ids constant uuid[] := array(
    select run.id from public.workflow_runs as run
     where run.id in (select id from dispatcher.runs_to_mark(p_tick.tenant_id) as id limit p_limit)
         for update skip locked);
  v_id uuid;
  v_count integer := 0;
  v_errors jsonb := '[]';
begin
  begin
    v_count := dispatcher.mark_runs(v_ids);
  exception when others then
    if dispatcher.must_abort(sqlstate) then raise; end if;
    foreach v_id in array v_ids loop
      begin
        v_count := v_count + dispatcher.mark_runs(array[v_id]);
      exception when others then
        if dispatcher.must_abort(sqlstate) then raise; end if;
        v_errors := v_errors || dispatcher.row_error('unrouted', v_id, sqlerrm, sqlstate);
      end;
    end loop;
  end;
  return jsonb_build_object('unrouted', v_count, 'errors', v_errors,
                            'again', cardinality(v_ids) >= p_limit
                                and jsonb_array_length(v_errors) < cardinality(v_ids));
end
$$;

COMMENT ON FUNCTION dispatcher.mark_unrouted_runs(p_tick dispatcher.tick, p_limit integer) IS 'Queued runs whose type has no route carry blocker no_route until it has one. {unrouted, errors, again}.';

CREATE FUNCTION dispatcher.mend_rights() RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
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

COMMENT ON FUNCTION dispatcher.mend_rights() IS 'Gives back what is missing and takes back what is too much, each by itself. Tells what it may not.';

CREATE FUNCTION dispatcher.merge_inbox_context(p_context jsonb, p_changes jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$
  select case
    when p_context is null then p_changes
    when jsonb_typeof(p_context) = 'object' then p_context || p_changes
    else jsonb_build_object('original_context', p_context) || p_changes
  end
$$;

COMMENT ON FUNCTION dispatcher.merge_inbox_context(p_context jsonb, p_changes jsonb) IS 'An item''s context with changes laid over it. A context that is no object is kept under original_context.';

CREATE FUNCTION dispatcher.missing_rights() RETURNS TABLE(name text, remedy text)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $_$
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
$_$;

COMMENT ON FUNCTION dispatcher.missing_rights() IS 'Rights of service_role and authenticated that the files give and that are gone, each with the statement that gives it back.';

CREATE FUNCTION dispatcher.must_abort(p_sqlstate text) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$ select p_sqlstate in ('40001', '40P01', '57014', '57P01', '53100', '53200') $$;

COMMENT ON FUNCTION dispatcher.must_abort(p_sqlstate text) IS 'The one list of errors that no handler contains: serialization failure, deadlock, cancelled, shutdown, disk and memory full. Every other error costs its row, agent or phase alone. Idiom: exception when others then if dispatcher.must_abort(sqlstate) then raise; end if; ...';

CREATE FUNCTION dispatcher.must_be_written(p_found boolean, p_what text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  if not p_found then
    raise exception 'a trigger keeps the % of the wake from being written', p_what;
  end if;
  -- What follows is less than this: what a trigger puts off until the commit speaks now, before it.
  set constraints all immediate;
end
$$;

COMMENT ON FUNCTION dispatcher.must_be_written(p_found boolean, p_what text) IS 'Raises unless the row of a wake was written, also for the triggers that others put off until the commit.';

CREATE FUNCTION dispatcher.named_task(p_context jsonb) RETURNS uuid
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $_$
  select substring(p_context ->> 'task_id' from '^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$')::uuid
$_$;

COMMENT ON FUNCTION dispatcher.named_task(p_context jsonb) IS 'The task that the context of a post names; NULL where it names none by an id.';

CREATE FUNCTION dispatcher.new_faults(p_instance public.dispatcher_instances, p_after bigint) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(jsonb_agg(jsonb_build_object('id', fault.id, 'side_write', fault.side_write, 'error', fault.error,
      'at', fault.at) order by fault.id), '[]')
    from (select * from public.dispatcher_faults
           where tenant_id = p_instance.tenant_id and (gateway_id is null or gateway_id = p_instance.gateway_id)
             and id > coalesce(p_after, 0) and at > now() - interval '10 minutes'
           order by id limit 50) as fault
$$;

COMMENT ON FUNCTION dispatcher.new_faults(p_instance public.dispatcher_instances, p_after bigint) IS 'Side writes that failed in the last ten minutes for the instance''s gateway, after the id it has seen: [{id, side_write, error, at}].';

CREATE FUNCTION dispatcher.next_notification(p_instance public.dispatcher_instances) RETURNS double precision
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select dispatcher.seconds_until(min(case note.state when 'pending' then note.next_try_at else note.claimed_until end))
    from public.workflow_notifications as note
   where note.tenant_id = p_instance.tenant_id and (note.gateway_id = p_instance.gateway_id or note.gateway_id is null)
     and note.state in ('pending', 'sending') and isfinite(note.next_try_at)
     and coalesce(isfinite(note.claimed_until), true)
$$;

COMMENT ON FUNCTION dispatcher.next_notification(p_instance public.dispatcher_instances) IS 'In how many seconds another notification is due; NULL when none is.';

CREATE FUNCTION dispatcher.next_workflow_moment(p_tick dispatcher.tick) RETURNS double precision
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select min(due.seconds) from (
    select dispatcher.seconds_until(min(next_attempt_at)) as seconds
      from public.workflow_runs where tenant_id = p_tick.tenant_id and status = 'queued' and next_attempt_at > now()
    union all
    select dispatcher.seconds_until(min(dispatcher.known_time(dispatched_at)))
           + (p_tick.settings).stale_dispatch_seconds
      from public.workflow_runs where tenant_id = p_tick.tenant_id and status = 'dispatched'
    union all
    select least(dispatcher.seconds_until(min(deadline_at) filter (where isfinite(deadline_at))),
                 dispatcher.seconds_until(min(greatest(dispatcher.known_time(last_heartbeat_at),
                     dispatcher.known_time(claimed_at))))
                   + (p_tick.settings).stale_claim_seconds)
      from public.workflow_runs where tenant_id = p_tick.tenant_id and status in ('claimed', 'running')) as due
$$;

COMMENT ON FUNCTION dispatcher.next_workflow_moment(p_tick dispatcher.tick) IS 'In how many seconds something becomes due by itself, below 0 for what is due already; NULL when nothing does.';

CREATE FUNCTION dispatcher.note_fault(p_tenant_id uuid, p_gateway_id uuid, p_side_write text, p_error text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    SET lock_timeout TO '100ms'
    AS $$
begin
  -- Once a minute is enough to be told. Whoever holds the tenant's or the gateway's row makes this wait, but not for
  -- long.
  insert into public.dispatcher_faults (tenant_id, gateway_id, side_write, error)
  select p_tenant_id, p_gateway_id, left(p_side_write, 100), left(p_error, 500)
   where not exists (select from public.dispatcher_faults as known
                      where known.tenant_id = p_tenant_id and known.side_write = left(p_side_write, 100)
                        and known.gateway_id is not distinct from p_gateway_id
                        and known.at > clock_timestamp() - interval '1 minute');
  perform dispatcher.settle_constraints('public.dispatcher_faults');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  raise warning 'side write % failed: %', p_side_write, p_error;
end
$$;

COMMENT ON FUNCTION dispatcher.note_fault(p_tenant_id uuid, p_gateway_id uuid, p_side_write text, p_error text) IS 'Keeps that a side write failed, for the daemons to log and to show in health; at most one a minute of a kind. Never fails.';

CREATE FUNCTION dispatcher.note_report(p_run public.workflow_runs) RETURNS public.workflow_runs
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  if num_nonnulls(dispatcher.known_cost(p_run.cost_estimate),
                  dispatcher.known_tokens(p_run.input_tokens, p_run.output_tokens)) > 0 then
    p_run.reported_at := coalesce(p_run.finished_at, now());
  end if;
  return p_run;
end
$$;

COMMENT ON FUNCTION dispatcher.note_report(p_run public.workflow_runs) IS 'The row with the time of its report, where it tells of a cost or of tokens.';

CREATE FUNCTION dispatcher.note_tick(p_tick dispatcher.tick, p_facts jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  if jsonb_typeof(p_facts) is distinct from 'object' or length(p_facts::text) > 100000 then
    raise exception 'p_facts must be an object with the numbers of a tick, below 100 kB' using errcode = 'OD002';
  end if;
  update public.dispatcher_instances set last_tick = p_facts || jsonb_build_object('at', now())
   where id in (select id from public.dispatcher_instances where id = p_tick.instance_id for update skip locked);
  return jsonb_build_object('stop_wakes', dispatcher.wakes_to_stop(p_tick.instance_id), 'next_in',
      dispatcher.next_workflow_moment(p_tick));
end
$$;

COMMENT ON FUNCTION dispatcher.note_tick(p_tick dispatcher.tick, p_facts jsonb) IS 'Where a tick ends: keeps what it did, for status and stats; answers {next_in, stop_wakes}.';

CREATE FUNCTION dispatcher.note_work_on_claim(p_run public.workflow_runs) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  update public.workflow_claims set worked_at = now(), wake_id = coalesce(wake_id, p_run.wake_id)
   where claim_token = p_run.claim_token and worked_at is null
$$;

COMMENT ON FUNCTION dispatcher.note_work_on_claim(p_run public.workflow_runs) IS 'Keeps with a claim that its session showed a sign of life, and in which wake.';

CREATE FUNCTION dispatcher.note_workflow_actor(p_actor text, p_reason text) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  select set_config('dispatcher.actor', coalesce(left(p_actor, 300), ''), true),
         set_config('dispatcher.reason', coalesce(left(p_reason, 1000), ''), true)
$$;

COMMENT ON FUNCTION dispatcher.note_workflow_actor(p_actor text, p_reason text) IS 'Who acts, and why: what the next transitions of this transaction record.';

CREATE FUNCTION dispatcher.notify_operator(p_tenant_id uuid, p_type text, p_title text, p_body text, p_agent_id uuid, p_meta jsonb, p_entity_type text DEFAULT 'agent'::text, p_entity_id uuid DEFAULT NULL::uuid) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '100ms'
    AS $$
begin
  insert into public.notifications (tenant_id, type, title, body, entity_type, entity_id, actor_type, actor_agent_id,
      meta)
  values (p_tenant_id, p_type, dispatcher.shown(left(p_title, 300)), dispatcher.shown(left(p_body, 4000)),
          p_entity_type, coalesce(p_entity_id, p_agent_id),
          case p_type when 'agent_escalation' then 'agent' else 'system' end::public.actor_type, p_agent_id, p_meta);
  perform dispatcher.settle_constraints('public.notifications');
  return true;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_tenant_id, (select agent.gateway_id from dispatcher.agents as agent
      where agent.id = p_agent_id),
                                'notification ' || p_type, format('%s (%s)', sqlerrm, sqlstate));
  return false;
end
$$;

COMMENT ON FUNCTION dispatcher.notify_operator(p_tenant_id uuid, p_type text, p_title text, p_body text, p_agent_id uuid, p_meta jsonb, p_entity_type text, p_entity_id uuid) IS 'Writes a notification about an agent (or p_entity_id). A side write: when it fails, what it tells about is done all the same and the fault is noted. True when it was written.';

CREATE FUNCTION dispatcher.object_definitions() RETURNS TABLE(kind text, name text, definition text)
    LANGUAGE sql STABLE
    SET search_path TO ''
    SET "TimeZone" TO 'UTC'
    SET "DateStyle" TO 'ISO'
    SET "IntervalStyle" TO 'postgres'
    SET quote_all_identifiers TO 'off'
    SET extra_float_digits TO '1'
    AS $$
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

COMMENT ON FUNCTION dispatcher.object_definitions() IS 'What of the definitions of our objects each PostgreSQL writes in its own way: views, defaults, constraints, indexes, triggers, every policy on a table of ours, owners.';

CREATE FUNCTION dispatcher.object_of_right(p_kind text, p_name text, p_column text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$ select case when p_column is null then p_kind || ' ' || p_name else 'column ' || p_name || '.' || p_column end $$;

COMMENT ON FUNCTION dispatcher.object_of_right(p_kind text, p_name text, p_column text) IS 'What a right is about, as it is written down: table public.agent_wakes, column public.agent_wakes.state.';

CREATE FUNCTION dispatcher.often_woken_agents(p_sweeper dispatcher.claimant, p_limit integer) RETURNS TABLE(agent_id uuid, agent_slug text, wakes integer)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select agent.id, agent.slug, lately.wakes
    from public.agent_wake_state as state
    join dispatcher.agents as agent on agent.id = state.agent_id
   cross join lateral (select count(*)::integer as wakes from public.agent_wakes as wake
                        where wake.agent_id = agent.id and wake.claimed_at > now() - interval '1 hour') as lately
   where (p_sweeper.settings).alert_wakes_per_hour > 0
     and agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
     and state.last_claimed_at > now() - interval '1 hour'
     and (state.often_notified_at is null or state.often_notified_at <= now() - interval '1 hour')
     and lately.wakes > (p_sweeper.settings).alert_wakes_per_hour
   limit p_limit
$$;

COMMENT ON FUNCTION dispatcher.often_woken_agents(p_sweeper dispatcher.claimant, p_limit integer) IS 'Agents woken more than alert_wakes_per_hour times in the last hour, whatever woke them, of whom nobody was told in that hour.';

CREATE FUNCTION dispatcher.old_notifications(p_tenant_id uuid, p_limit integer) RETURNS SETOF uuid
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select id from public.workflow_notifications
   where tenant_id = p_tenant_id and state in ('sent', 'failed', 'obsolete') and created_at < now() - interval '7 days'
       limit p_limit
$$;

COMMENT ON FUNCTION dispatcher.old_notifications(p_tenant_id uuid, p_limit integer) IS 'Notifications that were dealt with a week ago.';

CREATE TABLE public.agent_inbox_items (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    agent_id uuid NOT NULL,
    agent_slug text NOT NULL,
    event_type public.inbox_event_type NOT NULL,
    task_id uuid,
    comment_id uuid,
    contact_id uuid,
    status public.inbox_item_status DEFAULT 'pending'::public.inbox_item_status NOT NULL,
    leased_at timestamp with time zone,
    leased_until timestamp with time zone,
    completed_at timestamp with time zone,
    failed_at timestamp with time zone,
    attempt_count integer DEFAULT 0 NOT NULL,
    max_attempts integer DEFAULT 3 NOT NULL,
    summary text,
    context jsonb DEFAULT '{}'::jsonb NOT NULL,
    last_wake_attempt_at timestamp with time zone,
    last_wake_success_at timestamp with time zone,
    dedup_key text NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

ALTER TABLE ONLY public.agent_inbox_items REPLICA IDENTITY FULL;

COMMENT ON TABLE public.agent_inbox_items IS 'Work for agents: one row per item. The woken agent leases and closes it.';

CREATE TABLE public.agents (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    gateway_id uuid,
    name text NOT NULL,
    slug text NOT NULL,
    description text,
    status public.agent_status DEFAULT 'ready'::public.agent_status NOT NULL,
    last_seen_at timestamp with time zone,
    last_heartbeat_at timestamp with time zone,
    model text,
    thinking text,
    reports_to_id uuid,
    domains text[] DEFAULT '{}'::text[] NOT NULL,
    capabilities text[],
    config jsonb DEFAULT '{}'::jsonb NOT NULL,
    meta jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.agents IS 'The agents, each on a gateway, with the status that says whether it may be woken.';

CREATE VIEW dispatcher.agent_inbox_items WITH (security_invoker='true') AS
 SELECT id,
    tenant_id,
    agent_id,
    event_type,
    task_id,
    comment_id,
    contact_id,
    status,
    leased_at,
    leased_until,
    completed_at,
    failed_at,
    attempt_count,
    max_attempts,
    summary,
    context,
    last_wake_attempt_at,
    last_wake_success_at,
    created_at,
    updated_at,
    agent_slug
   FROM public.agent_inbox_items item
  WHERE (EXISTS ( SELECT
           FROM public.agents agent
          WHERE ((agent.id = item.agent_id) AND (agent.tenant_id = item.tenant_id))));

COMMENT ON VIEW dispatcher.agent_inbox_items IS 'Items whose agent is of their own tenant.';

CREATE FUNCTION dispatcher.open_items_of_gateway(p_claimant dispatcher.claimant) RETURNS SETOF dispatcher.agent_inbox_items
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select item.* from dispatcher.agents as agent
    join dispatcher.agent_inbox_items as item on item.agent_id = agent.id and item.tenant_id = agent.tenant_id
   where agent.gateway_id = p_claimant.gateway_id and agent.tenant_id = p_claimant.tenant_id
     and item.status in ('pending', 'failed', 'leased')
$$;

COMMENT ON FUNCTION dispatcher.open_items_of_gateway(p_claimant dispatcher.claimant) IS 'Open items of the agents of a claimant''s gateway.';

CREATE FUNCTION dispatcher.open_neighbours() RETURNS SETOF text
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select base.name
    from dispatcher.base_objects() as base
    join pg_catalog.pg_class as class on class.oid = to_regclass(base.name)
   where base.kind = 'table' and not dispatcher.owns(base.name) and not class.relrowsecurity
   order by 1
$$;

COMMENT ON FUNCTION dispatcher.open_neighbours() IS 'Tables we share with YourHQ, not made by us, without row level security: theirs to close.';

CREATE FUNCTION dispatcher.open_wake_facts(p_wake public.agent_wakes) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select jsonb_build_object(
           'wake_id', p_wake.id, 'claim_token', p_wake.claim_token, 'claim_request', p_wake.claim_request, 'agent_id',
               p_wake.agent_id,
           'agent_slug', coalesce(agent.slug, p_wake.agent_id::text), 'state', p_wake.state,
           'host_id', coalesce(p_wake.host_id, owner.host_id), 'hostname', owner.hostname,
           'pid', p_wake.pid, 'pid_started_at', p_wake.pid_started_at,
           'age', extract(epoch from now() - p_wake.claimed_at), 'deadline_in',
               extract(epoch from p_wake.deadline_at - now()),
           'owner_state', coalesce(owner.state, 'lost'), 'owner_pid', owner.pid, 'owner_pid_started_at',
               owner.pid_started_at,
           'owner_host_id', owner.host_id, 'owner_silent_for', extract(epoch from now() - owner.last_heartbeat_at))
    from (select 1) as one_row
    left join dispatcher.agents as agent on agent.id = p_wake.agent_id and agent.tenant_id = p_wake.tenant_id
    left join public.dispatcher_instances as owner on owner.id = p_wake.instance_id
$$;

COMMENT ON FUNCTION dispatcher.open_wake_facts(p_wake public.agent_wakes) IS 'What is needed to tell whether the process of a live wake and its owner live.';

CREATE FUNCTION dispatcher.open_wakes_of_others(p_instance_id uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(jsonb_agg(dispatcher.open_wake_facts(wake) order by wake.claimed_at), '[]')
    from public.agent_wakes as wake
    join public.dispatcher_instances as me on me.id = p_instance_id and me.gateway_id = wake.gateway_id
   where wake.state in ('starting', 'running') and wake.instance_id is distinct from p_instance_id
$$;

COMMENT ON FUNCTION dispatcher.open_wakes_of_others(p_instance_id uuid) IS 'Live wakes of the instance''s gateway that another instance owns, with what is needed to tell whether their process and owner live.';

CREATE FUNCTION dispatcher.orphan_after_seconds(p_settings public.dispatcher_settings) RETURNS double precision
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$ select least(360, 0.6 * p_settings.stale_claim_seconds) $$;

COMMENT ON FUNCTION dispatcher.orphan_after_seconds(p_settings public.dispatcher_settings) IS 'After what silence a running run is suspected to be an orphan: a heartbeat of five minutes and one minute, and well before its claim is released.';

CREATE FUNCTION dispatcher.owe_notifications(p_runs dispatcher.run_choice[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '100ms'
    AS $$
begin
  insert into public.workflow_notifications (tenant_id, run_id, attempt, agent_id, gateway_id)
  select run.tenant_id, run.id, run.dispatch_attempts, chosen.agent_id, chosen.gateway_id
    from unnest(p_runs) as chosen join public.workflow_runs as run on run.id = chosen.run_id
  on conflict (run_id, attempt) do nothing;
  perform dispatcher.settle_constraints('public.workflow_notifications');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault((select tenant_id from public.workflow_runs where id = p_runs[1].run_id), null,
                                'notification of a run', format('%s (%s)', sqlerrm, sqlstate));
end
$$;

COMMENT ON FUNCTION dispatcher.owe_notifications(p_runs dispatcher.run_choice[]) IS 'Writes down that agents are to be told of runs that were dispatched. A side write: agents also ask by themselves.';

CREATE FUNCTION dispatcher.owns(p_name text) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select exists (select from dispatcher.owned_objects where name = p_name)
$$;

COMMENT ON FUNCTION dispatcher.owns(p_name text) IS 'Whether we made this table (public.agents) or function (public.fail_inbox_item(uuid,text)) of YourHQ''s schema.';

CREATE FUNCTION dispatcher.phases_due(p_sweeper dispatcher.claimant) RETURNS text[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_phase text;
  v_is_due boolean;
  v_due text[] := '{}';
begin
  foreach v_phase in array array['expired', 'dead', 'chained', 'stalled', 'released', 'listed', 'claims', 'alerted',
      'pruned'] loop
    begin
      v_is_due := case v_phase
        when 'expired' then cardinality(dispatcher.stale_item_ids(p_sweeper, 1)) > 0
        when 'dead' then exists (select from dispatcher.spent_items(p_sweeper, 1))
        when 'chained' then exists (select from dispatcher.chained_items(p_sweeper, 1))
        when 'stalled' then exists (select from dispatcher.agents_to_settle(p_sweeper, 1))
        when 'released' then exists (select from dispatcher.forgotten_leases(p_sweeper, 1))
        when 'listed' then exists (select from dispatcher.agents_with_work(p_sweeper, null, 1))
        when 'claims' then v_due @> array['listed'] or exists (
          select from public.agent_wake_state as state join dispatcher.agents as agent on agent.id = state.agent_id
           where agent.gateway_id = p_sweeper.gateway_id and state.waitlisted_at is not null)
        when 'alerted' then exists (select from dispatcher.often_woken_agents(p_sweeper, 1))
        when 'pruned' then exists (select from public.agent_wakes where gateway_id = p_sweeper.gateway_id
            and ended_at < now() - interval '30 days')
          or exists (select from public.dispatcher_faults where tenant_id = p_sweeper.tenant_id
          and at < now() - interval '7 days')
      end;
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      v_is_due := true;  -- its own call says what is wrong
    end;
    if v_is_due then
      v_due := v_due || v_phase;
    end if;
  end loop;
  return v_due;
end
$$;

COMMENT ON FUNCTION dispatcher.phases_due(p_sweeper dispatcher.claimant) IS 'The phases of a sweep that have something to do, in their order.';

CREATE FUNCTION dispatcher.pids_of_rows(p_xmax xid[]) RETURNS integer[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_xmax xid;
  v_pids integer[] := '{}';
  v_found integer[];
begin
  foreach v_xmax in array p_xmax loop
    select array_agg(coalesce(lock.pid, 0)) into v_found from pg_catalog.pg_locks as lock
     where lock.locktype = 'transactionid' and lock.granted and lock.transactionid = v_xmax
       and lock.pid is distinct from pg_catalog.pg_backend_pid();
    if v_found is null then
      -- Several hold it together: the number is that of their list.
      begin
        select array_agg(coalesce(lock.pid, 0)) into v_found
          from pg_catalog.pg_get_multixact_members(v_xmax) as member
          join pg_catalog.pg_locks as lock on lock.locktype = 'transactionid' and lock.granted
              and lock.transactionid = member.xid
         where lock.pid is distinct from pg_catalog.pg_backend_pid();
      exception when others then
        if dispatcher.must_abort(sqlstate) then raise; end if;  -- no such list: whoever held it has gone
      end;
    end if;
    v_pids := v_pids || coalesce(v_found, '{}');
  end loop;
  return array(select distinct unnest(v_pids));
end
$$;

COMMENT ON FUNCTION dispatcher.pids_of_rows(p_xmax xid[]) IS 'The sessions whose transactions hold rows with these xmax; 0 stands for a prepared transaction.';

CREATE FUNCTION dispatcher.prepare_workflow_run() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  -- A row that arrives finished was worked on, unless it says otherwise: what it cost counts.
  if new.status in ('completed', 'failed', 'timed_out') then
    new.claimed_at := coalesce(new.claimed_at, new.started_at, new.finished_at, now());
  end if;
  -- A cost given before anybody worked on it is a guess of whoever queued it, not a report.
  if new.status not in ('queued', 'dispatched') and new.reported_at is null then
    new := dispatcher.note_report(new);
  end if;
  return dispatcher.complete_workflow_row(new);
end
$$;

COMMENT ON FUNCTION dispatcher.prepare_workflow_run() IS 'Before an insert of a run: the times and keys its state implies.';

CREATE FUNCTION dispatcher.present_objects() RETURNS TABLE(kind text, name text, definition text)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
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

COMMENT ON FUNCTION dispatcher.present_objects() IS 'Every function, table, view, type, column, constraint, index, trigger and policy of the schemas public and dispatcher, and what service_role and authenticated may do with it (right), with what of its definition reads the same in every PostgreSQL.';

CREATE FUNCTION dispatcher.prune_old_rows(p_sweeper dispatcher.claimant, p_limit integer) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_wakes integer;
  v_faults integer;
begin
  v_wakes := dispatcher.in_parts(p_sweeper, 'prune_wakes', 'removal of old wakes', array(
    select id from public.agent_wakes where gateway_id = p_sweeper.gateway_id and ended_at < now() - interval '30 days'
     order by ended_at limit p_limit for update skip locked));
  delete from public.dispatcher_faults where id in (
    select id from public.dispatcher_faults where tenant_id = p_sweeper.tenant_id and at < now() - interval '7 days'
        limit p_limit for update skip locked);
  get diagnostics v_faults = row_count;
  return greatest(v_wakes, v_faults);
end
$$;

COMMENT ON FUNCTION dispatcher.prune_old_rows(p_sweeper dispatcher.claimant, p_limit integer) IS 'Wakes that ended 30 days ago and faults of last week go.';

CREATE FUNCTION dispatcher.prune_wakes(p_sweeper dispatcher.claimant, p_wake_ids uuid[]) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_count integer;
begin
  delete from public.agent_wakes where id = any (p_wake_ids) and gateway_id = p_sweeper.gateway_id;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;

COMMENT ON FUNCTION dispatcher.prune_wakes(p_sweeper dispatcher.claimant, p_wake_ids uuid[]) IS 'Removes wakes; answers how many went.';

CREATE FUNCTION dispatcher.prune_workflow_rows(p_tick dispatcher.tick, p_limit integer) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_count integer;
begin
  delete from public.workflow_notifications where id in (
    select note.id from public.workflow_notifications as note
     where note.id in (select id from dispatcher.old_notifications(p_tick.tenant_id, p_limit) as id)
         for update skip locked);
  get diagnostics v_count = row_count;
  return jsonb_build_object('pruned', v_count, 'again', v_count >= p_limit);
end
$$;

COMMENT ON FUNCTION dispatcher.prune_workflow_rows(p_tick dispatcher.tick, p_limit integer) IS 'Notifications that were dealt with a week ago go. {pruned, again}.';

CREATE FUNCTION dispatcher.publish_table(p_table text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
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

COMMENT ON FUNCTION dispatcher.publish_table(p_table text) IS 'Adds a table to the publication of Realtime''s postgres_changes. Without the right to do so it warns: broadcasts need no publication.';

CREATE FUNCTION dispatcher.put_off(p_deadline timestamp with time zone, p_held_since timestamp with time zone) RETURNS timestamp with time zone
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select case when isfinite(p_deadline) and p_deadline < now() + interval '5000 years'
      and p_held_since between '1970-01-01Z' and now()
              then p_deadline + (now() - p_held_since) else p_deadline end
$$;

COMMENT ON FUNCTION dispatcher.put_off(p_deadline timestamp with time zone, p_held_since timestamp with time zone) IS 'A deadline, later by the time a run was held; unchanged where one of the two is no known time.';

CREATE FUNCTION dispatcher.queue_agents(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_count integer;
begin
  update public.agent_wake_state set waitlist_path = 'waitlist'
   where agent_id = any (p_agent_ids) and waitlist_path = 'sweep';
  get diagnostics v_count = row_count;
  return v_count;
end
$$;

COMMENT ON FUNCTION dispatcher.queue_agents(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) IS 'Agents that a sweep listed wait for a slot from now on; answers how many.';

CREATE FUNCTION dispatcher.queued_types(p_tenant_id uuid) RETURNS TABLE(workflow_type text)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  -- From one type to the next in the index, however long the queue of each is.
  with recursive found as (
    (select run.workflow_type from public.workflow_runs as run
      where run.tenant_id = p_tenant_id and run.status = 'queued' order by run.workflow_type limit 1)
    union all
    select (select run.workflow_type from public.workflow_runs as run
             where run.tenant_id = p_tenant_id and run.status = 'queued' and run.workflow_type > found.workflow_type
             order by run.workflow_type limit 1)
      from found where found.workflow_type is not null)
  select found.workflow_type from found where found.workflow_type is not null
$$;

COMMENT ON FUNCTION dispatcher.queued_types(p_tenant_id uuid) IS 'The workflow types that have queued runs.';

CREATE FUNCTION dispatcher.read_estimates(p_tick dispatcher.tick, OUT estimates jsonb, OUT error text) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  estimates := dispatcher.workflow_estimates(p_tick.tenant_id);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  estimates := dispatcher.fallback_estimates(p_tick.settings);
  error := format('estimates: %s (%s)', sqlerrm, sqlstate);
end
$$;

COMMENT ON FUNCTION dispatcher.read_estimates(p_tick dispatcher.tick, OUT estimates jsonb, OUT error text) IS 'The estimates per type; where they cannot be had, what is configured, and the error.';

CREATE FUNCTION dispatcher.read_gate_facts(p_agent_id uuid, p_settings public.dispatcher_settings, p_hinted uuid[] DEFAULT '{}'::uuid[], p_request uuid DEFAULT NULL::uuid) RETURNS dispatcher.gate_facts
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
declare
  v_now constant timestamptz := now();
  v_max_chain constant integer := dispatcher.wake_chain_limit(p_settings);
  v_counts_wakes constant boolean := p_settings.max_wakes_per_day > 0;
  v_facts dispatcher.gate_facts;
begin
  select agent.id, agent.slug, agent.tenant_id, agent.status::text,
         case when coalesce(state.consecutive_failures, 0) = 0 then 0
              when exists (select from public.agent_inbox_items as item
                            where item.agent_id = agent.id and item.tenant_id = agent.tenant_id
                              and item.status in ('pending', 'failed')
                              and item.attempt_count < item.max_attempts
                              and item.created_at > state.last_ended_at and item.created_at <= v_now
                              and not exists (select from public.inbox_item_origins as origin
                                               where origin.item_id = item.id and origin.from_agent_id = agent.id))
                                                   then 0
              else state.consecutive_failures end,
         exists (select from public.agent_wakes as wake where wake.agent_id = agent.id
             and wake.state in ('starting', 'running')),
         -- A lease of more than a week is none: whoever wrote that row, it must not put the agent to sleep.
         (select max(item.leased_until) from public.agent_inbox_items as item
           where item.agent_id = agent.id and item.tenant_id = agent.tenant_id and item.status = 'leased'
             and item.leased_until > v_now and item.leased_until < v_now + interval '7 days'),
         coalesce((select budget.hard_cutoff and dispatcher.budget_blocks(agent.id, v_now)
                     from dispatcher.agent_budgets as budget where budget.agent_id = agent.id), false),
         case when v_counts_wakes then (select count(*) from public.agent_wakes as wake
                                         where wake.agent_id = agent.id and wake.state <> 'spawn_failed'
                                           and wake.claimed_at >= dispatcher.start_of_today()) else 0 end,
         coalesce(heads.ids, '{}'),
         case when cardinality(p_hinted) = 0 then '{}'
              else array(select due.id from dispatcher.inbox_due_of_pair as due
                          where due.id = any (p_hinted) and due.agent_id = agent.id and due.tenant_id = agent.tenant_id
                            and due.due_at <= v_now and due.chain_depth < v_max_chain
                          order by due.created_at limit 100) end,
         coalesce(heads.chain_depth, 0), heads.oldest,
         case when heads.ids is null then (select min(due.due_at) from dispatcher.inbox_due_of_pair as due
                                            where due.agent_id = agent.id and due.tenant_id = agent.tenant_id
                                              and due.due_at > v_now and due.chain_depth < v_max_chain) end,
         heads.ids is null and exists (select from dispatcher.inbox_due_of_pair as due
                                        where due.agent_id = agent.id and due.tenant_id = agent.tenant_id
                                          and due.due_at <= v_now and due.chain_depth >= v_max_chain),
         case when state.last_end_state in ('failed', 'timed_out', 'no_progress', 'spawn_failed')
              then coalesce(state.last_ended_at, state.last_claimed_at)
              -- A wake that came to nothing without anybody's fault is none to rest from.
              when state.last_end_state = 'interrupted' and coalesce(state.consecutive_failures, 0) = 0
              and state.last_ended_at >= state.last_claimed_at then null
              else state.last_claimed_at end,
         case when p_request is not null
              then (select wake.id from public.agent_wakes as wake
                     where wake.claim_request = p_request and wake.agent_id = agent.id
                       and wake.state in ('starting', 'running')) end,
         (select count(*)::integer from public.agent_wakes as wake
           where wake.gateway_id = agent.gateway_id and wake.state in ('starting', 'running'))
    into v_facts
    from public.agents as agent
    left join public.agent_wake_state as state on state.agent_id = agent.id
    left join lateral (
      select array_agg(head.id order by head.created_at, head.id) as ids, max(head.chain_depth) as chain_depth,
          min(head.created_at) as oldest
        from (select due.id, due.created_at, due.chain_depth from dispatcher.inbox_due_of_pair as due
               where due.agent_id = agent.id and due.tenant_id = agent.tenant_id and due.due_at <= v_now
                 and due.chain_depth < v_max_chain
               order by due.created_at limit 3) as head) as heads on true
   where agent.id = p_agent_id;
  return v_facts;
end
$$;

COMMENT ON FUNCTION dispatcher.read_gate_facts(p_agent_id uuid, p_settings public.dispatcher_settings, p_hinted uuid[], p_request uuid) IS 'The facts of one agent, in one statement. p_hinted: items that hints named, of which those that are due come back; p_request: the claim request whose grant, if there is one, comes back. All NULL for an unknown agent.';

CREATE FUNCTION dispatcher.read_money(p_tick dispatcher.tick, p_action text DEFAULT NULL::text) RETURNS dispatcher.money
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_money dispatcher.money;
  v_read constant record := dispatcher.read_estimates(p_tick);
begin
  v_money.budgets := '{}';
  v_money.estimates := v_read.estimates;
  v_money.error := v_read.error;
  v_money.budgets := dispatcher.evaluate_budgets(p_tick.tenant_id, p_action);
  if v_read.error is not null then
    v_money.budgets := dispatcher.with_error(v_money.budgets, v_read.error);
  end if;
  return v_money;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  v_money.error := format('%s (%s)', sqlerrm, sqlstate);
  return v_money;
end
$$;

COMMENT ON FUNCTION dispatcher.read_money(p_tick dispatcher.tick, p_action text) IS 'Estimates and evaluated budgets (of one action, or all) of a tenant. Never fails. An error of either stands with every budget: those that are fail_closed hold, the others are open; where not even the budgets can be read, all are.';

CREATE FUNCTION dispatcher.record_budget_event(p_tenant_id uuid, p_budget dispatcher.evaluated_budget, p_kind text, p_run_ids uuid[] DEFAULT '{}'::uuid[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_frame jsonb;
begin
  if p_budget.period_key is null then
    return;
  end if;
  if not exists (select from public.budget_events where budget_id = p_budget.id and period_key = p_budget.period_key
      and event_kind = p_kind and revision = p_budget.revision) then
    -- Whoever holds the budget is not waited for: the next pass tells it.
    perform from public.budgets where id = p_budget.id for key share skip locked;
    if not found then
      return;
    end if;
    v_frame := dispatcher.budget_frame(p_budget, p_kind);
    insert into public.budget_events (tenant_id, budget_id, period_key, event_kind, revision, detail)
    values (p_tenant_id, p_budget.id, p_budget.period_key, p_kind, p_budget.revision, jsonb_build_object(
      'spend_usd', v_frame -> 'spend_usd', 'spend_tokens', v_frame -> 'spend_tokens', 'cap_usd', v_frame -> 'cap_usd',
      'cap_tokens', v_frame -> 'cap_tokens', 'action', v_frame -> 'action'))
    on conflict on constraint budget_events_once do nothing;
    if found and p_kind <> 'warned' then
      perform dispatcher.broadcast_budget_event(p_tenant_id, v_frame);
    end if;
  end if;
  if p_kind = 'hard_stopped' then
    perform dispatcher.add_stopped_runs(p_budget, p_run_ids);
  end if;
  perform dispatcher.settle_constraints('public.budget_events');
end
$$;

COMMENT ON FUNCTION dispatcher.record_budget_event(p_tenant_id uuid, p_budget dispatcher.evaluated_budget, p_kind text, p_run_ids uuid[]) IS 'Writes a budget event once per budget, its revision, period and kind, and broadcasts it once unless it is a warning. Runs a hard stop has cancelled (p_run_ids) join its one event.';

CREATE FUNCTION dispatcher.record_definitions(p_fingerprint text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
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

COMMENT ON FUNCTION dispatcher.record_definitions(p_fingerprint text) IS 'Records the definitions as they are, where no record is or one of another version. A record of `dispatcher migrate` stands: it follows each file by itself.';

CREATE FUNCTION dispatcher.record_workflow_transition() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_actor text;
  v_reason text;
  v_events public.workflow_run_events[];
begin
  if not exists (select from new_runs as run join old_runs as before on before.id = run.id
                  where run.status <> before.status or run.dispatch_attempts <> before.dispatch_attempts) then
    return null;
  end if;
  v_actor := dispatcher.workflow_actor();
  v_reason := nullif(current_setting('dispatcher.reason', true), '');
  select array_agg(row(null, run.tenant_id, run.id, before.status, run.status, run.dispatch_attempts, v_actor, v_reason,
                       null)::public.workflow_run_events order by run.queued_at, run.id)
    into v_events
    from new_runs as run join old_runs as before on before.id = run.id
   where run.status <> before.status or run.dispatch_attempts <> before.dispatch_attempts;
  perform dispatcher.write_run_events(v_events);
  return null;
end
$$;

COMMENT ON FUNCTION dispatcher.record_workflow_transition() IS 'After an update of runs: one event per transition.';

CREATE FUNCTION dispatcher.refusal(p_agent_id uuid, p_agent_slug text, p_reason text, p_retry_in double precision, p_failures integer DEFAULT NULL::integer) RETURNS jsonb
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select jsonb_build_object('granted', false, 'agent_id', p_agent_id, 'agent_slug', p_agent_slug, 'skip_reason',
      p_reason,
                            'retry_in', p_retry_in, 'failures', p_failures)
$$;

COMMENT ON FUNCTION dispatcher.refusal(p_agent_id uuid, p_agent_slug text, p_reason text, p_retry_in double precision, p_failures integer) IS 'The answer to a refused claim: {granted: false, agent_id, agent_slug, skip_reason, retry_in (s), failures}.';

CREATE FUNCTION dispatcher.refusal_at_sweep(p_sweeper dispatcher.claimant, p_agent_id uuid, p_agent_slug text) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_facts dispatcher.gate_facts;
  v_gates record;
begin
  v_facts := dispatcher.read_gate_facts(p_agent_id, p_sweeper.settings);
  v_gates := dispatcher.wake_gates(v_facts, p_sweeper.settings);
  if cardinality(v_gates.blocked) = 0 then
    return null;
  end if;
  return dispatcher.refusal(p_agent_id, p_agent_slug, v_gates.blocked[1], dispatcher.seconds_until(v_gates.retry_at),
                            v_facts.failures);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return dispatcher.refusal(p_agent_id, p_agent_slug, 'error', null)
         || jsonb_build_object('error', left(sqlerrm, 500), 'error_code', sqlstate);
end
$$;

COMMENT ON FUNCTION dispatcher.refusal_at_sweep(p_sweeper dispatcher.claimant, p_agent_id uuid, p_agent_slug text) IS 'What keeps an agent asleep, as a refused claim says it; NULL when its gates are open.';

CREATE FUNCTION dispatcher.refuse_claim(p_run public.workflow_runs, p_agent text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select case when p_run.status = 'queued' then 'not_dispatched'
              when p_run.status in ('claimed', 'running') then 'claimed_by_another'
              when p_run.finished_at is not null then 'finished'
              when p_run.status <> 'dispatched' then 'held'
              when p_agent is not null and p_agent is distinct from p_run.owner_agent_id then 'not_yours' end
$$;

COMMENT ON FUNCTION dispatcher.refuse_claim(p_run public.workflow_runs, p_agent text) IS 'Why a run cannot be claimed by an agent; NULL when it can.';

CREATE FUNCTION dispatcher.refuse_post(p_sender_id uuid, p_recipient_id uuid, p_event_type text, p_context jsonb, p_request_key text, OUT code text, OUT detail text) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  code := case when p_sender_id is null then 'unknown_agent' when p_recipient_id is null then 'unknown_recipient' end;
  if code is not null then
    return;
  end if;
  if not exists (select 1 from pg_catalog.pg_enum as label
                  where label.enumtypid = 'public.inbox_event_type'::regtype and label.enumlabel = p_event_type) then
    code := 'invalid';
    detail := 'unknown event type';
  elsif jsonb_typeof(p_context) <> 'object' or octet_length(p_context::text) > 262144
      or length(p_request_key) > 500 then
    code := 'invalid';
    detail := 'context must be an object of at most 256 KiB, the request key at most 500 characters';
  -- An agent that wakes itself by accident never stops: a note to itself needs the word that it is meant.
  elsif p_sender_id = p_recipient_id and coalesce(p_context -> 'self_handoff', 'false') <> 'true' then
    code := 'self_handoff_unmarked';
  end if;
end
$$;

COMMENT ON FUNCTION dispatcher.refuse_post(p_sender_id uuid, p_recipient_id uuid, p_event_type text, p_context jsonb, p_request_key text, OUT code text, OUT detail text) IS 'Why a post is refused; code NULL when it is not.';

CREATE FUNCTION dispatcher.refuse_post_content(p_tenant_id uuid, p_summary text, p_context jsonb, OUT code text, OUT detail text) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  if coalesce(p_summary, '') !~ '\S' then
    code := 'invalid';
    detail := 'a summary must say something';
  elsif dispatcher.named_task(p_context) is not null
      and not exists (select from public.tasks as task
                       where task.id = dispatcher.named_task(p_context) and task.tenant_id = p_tenant_id) then
    code := 'unknown_task';
    detail := format('there is no task %s', dispatcher.named_task(p_context));
  end if;
end
$$;

COMMENT ON FUNCTION dispatcher.refuse_post_content(p_tenant_id uuid, p_summary text, p_context jsonb, OUT code text, OUT detail text) IS 'Why what a post says is refused; code NULL when it is not.';

CREATE FUNCTION dispatcher.refuse_respawn(p_run_id uuid, p_reason text, p_agent_id uuid DEFAULT NULL::uuid, p_agent_slug text DEFAULT NULL::text) RETURNS jsonb
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select jsonb_build_object('granted', false, 'skip_reason', p_reason, 'run_id', p_run_id)
         || case when p_agent_id is null then '{}'::jsonb else jsonb_build_object('agent_id', p_agent_id, 'agent_slug',
             p_agent_slug) end
$$;

COMMENT ON FUNCTION dispatcher.refuse_respawn(p_run_id uuid, p_reason text, p_agent_id uuid, p_agent_slug text) IS 'The answer to a respawn that is not granted: {granted: false, skip_reason, run_id}.';

CREATE FUNCTION dispatcher.refuse_run(p_run_id uuid, p_code text) RETURNS jsonb
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$ select jsonb_build_object('applied', false, 'code', p_code, 'run_id', p_run_id, 'status', null, 'run', null) $$;

COMMENT ON FUNCTION dispatcher.refuse_run(p_run_id uuid, p_code text) IS 'The refusal without a record: not_found, bad_session, or busy (another session holds the run, ask again).';

CREATE FUNCTION dispatcher.refuse_workflow_caller(p_code text, p_run public.workflow_runs, p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid, p_usage jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_before constant public.workflow_runs := p_run;
  v_booked jsonb;
begin
  if p_run.id is null then
    return dispatcher.refuse_run(p_run_id, 'not_found') || '{"usage_booked": false}';
  elsif p_code = 'not_yours' then
    v_booked := dispatcher.book_lost_claim(p_run, p_session, p_claim_token, p_usage);
  elsif dispatcher.workflow_usage_values(coalesce(p_usage, '{}')) <> '{}' then
    p_run := dispatcher.book_workflow_usage(p_run, p_usage);
    v_booked := dispatcher.booked_since(v_before, p_run);
  end if;
  return dispatcher.workflow_answer(p_code, p_run)
      || jsonb_build_object('usage_booked', v_booked is not null, 'booked', v_booked);
end
$$;

COMMENT ON FUNCTION dispatcher.refuse_workflow_caller(p_code text, p_run public.workflow_runs, p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid, p_usage jsonb) IS 'The answer to a session that does not hold the run (any more), or may not end it while it is paused; a cost it brings is booked nevertheless: usage_booked, booked {cost_usd, tokens}.';

CREATE FUNCTION dispatcher.refuse_workflow_event_change() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  raise exception '% is append-only', tg_table_name using errcode = 'OD012';
end
$$;

COMMENT ON FUNCTION dispatcher.refuse_workflow_event_change() IS 'Events and bookings of runs are append-only: an update is refused with OD012.';

CREATE FUNCTION dispatcher.release_forgotten(p_sweeper dispatcher.claimant, p_wake_ids uuid[]) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_wake public.agent_wakes;
  v_released record;
  v_count integer := 0;
  v_reason text;
begin
  for v_wake in select * from public.agent_wakes where id = any (p_wake_ids) loop
    -- The agent may have its next wake by now: only what this one leased, and only where no wake lives.
    continue when exists (select from public.agent_wakes where agent_id = v_wake.agent_id
        and state in ('starting', 'running'));
    v_reason := format('wake ended (%s) with the item unfinished', v_wake.state);
    v_released := dispatcher.release_wake_leases(v_wake, v_wake.state in ('interrupted', 'spawn_failed'), v_reason);
    perform dispatcher.tell_dead_letters(v_wake.agent_id, v_released.dead, v_reason);
    v_count := v_count + v_released.released;
  end loop;
  return v_count;
end
$$;

COMMENT ON FUNCTION dispatcher.release_forgotten(p_sweeper dispatcher.claimant, p_wake_ids uuid[]) IS 'Releases what wakes hold that have ended, unless their agent has another one. Answers how many items.';

CREATE FUNCTION dispatcher.release_forgotten_leases(p_sweeper dispatcher.claimant, p_limit integer) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  return dispatcher.in_parts(p_sweeper, 'release_forgotten', 'release of leases',
      array(select wake.id from dispatcher.forgotten_leases(p_sweeper, p_limit) as wake));
end
$$;

COMMENT ON FUNCTION dispatcher.release_forgotten_leases(p_sweeper dispatcher.claimant, p_limit integer) IS 'Releases leases whose wake ended while somebody held the item; a wake for which that raises costs no other.';

CREATE FUNCTION dispatcher.release_lease(p_item dispatcher.agent_inbox_items, p_reason text) RETURNS uuid
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_wake_id uuid;
begin
  update public.inbox_item_leases set closed_at = now(), outcome = 'released'
   where item_id = p_item.id and closed_at is null returning wake_id into v_wake_id;
  update dispatcher.agent_inbox_items
     set status = 'pending', attempt_count = greatest(attempt_count, 1) - 1, leased_at = null, leased_until = null,
         updated_at = now()
   where id = p_item.id;
  perform dispatcher.notify_operator(
    p_item.tenant_id, 'lease_released', format('The lease of an item of agent %s was ended by an operator',
        p_item.agent_slug), p_reason, p_item.agent_id,
    jsonb_build_object('item_id', p_item.id, 'wake_id', v_wake_id, 'attempt', p_item.attempt_count, 'leased_at',
        p_item.leased_at,
                       'leased_until', p_item.leased_until, 'reason', p_reason), 'inbox_item', p_item.id);
  return v_wake_id;
end
$$;

COMMENT ON FUNCTION dispatcher.release_lease(p_item dispatcher.agent_inbox_items, p_reason text) IS 'Ends the lease of an item the caller holds: pending, attempt given back, its token void; a notification keeps who had it. Answers its wake.';

CREATE FUNCTION dispatcher.release_stale_claims(p_tick dispatcher.tick, p_limit integer) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_runs constant public.workflow_runs[] := array(select row(run.*)::public.workflow_runs
      from dispatcher.silent_runs(p_tick, p_limit) as run);
  v_run public.workflow_runs;
  v_released integer := 0;
  v_failed integer := 0;
  v_errors jsonb := '[]';
begin
  foreach v_run in array dispatcher.unlocked_runs(v_runs) loop
    begin
      perform dispatcher.note_workflow_actor('dispatcher', 'no heartbeat');
      v_run := dispatcher.return_workflow_run(v_run, 'no heartbeat');
      v_released := v_released + (v_run.status = 'queued')::integer;
      v_failed := v_failed + (v_run.status = 'failed')::integer;
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      v_errors := v_errors || dispatcher.row_error('released', v_run.id, sqlerrm, sqlstate);
    end;
  end loop;
  return jsonb_build_object('released', v_released, 'failed', v_failed, 'errors', v_errors,
                            'again', cardinality(v_runs) >= p_limit and v_released + v_failed > 0);
end
$$;

COMMENT ON FUNCTION dispatcher.release_stale_claims(p_tick dispatcher.tick, p_limit integer) IS 'Claims without a heartbeat for too long are lost: the run returns to the queue, the fourth time it fails. {released, failed, errors, again}.';

CREATE FUNCTION dispatcher.release_wake_leases(p_wake public.agent_wakes, p_give_back boolean, p_reason text, OUT released integer, OUT dead uuid[]) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_items uuid[];
begin
  select array_agg(held.id) into v_items from (
    select item.id from dispatcher.agent_inbox_items as item
     where item.agent_id = p_wake.agent_id and item.tenant_id = p_wake.tenant_id and item.status = 'leased'
       and (item.leased_at >= p_wake.claimed_at
            or exists (select from public.inbox_item_leases as lease where lease.item_id = item.id
            and lease.wake_id = p_wake.id and lease.closed_at is null))
     order by item.created_at limit 500 for update skip locked) as held;
  released := coalesce(cardinality(v_items), 0);
  dead := '{}';
  if released = 0 then
    return;
  end if;
  perform dispatcher.close_leases(p_wake.tenant_id, p_wake.gateway_id, v_items,
      case when p_give_back then 'released' else 'lost' end);
  if not p_give_back then
    dead := dispatcher.give_up_items(array(select item.id from dispatcher.agent_inbox_items as item
                                            where item.id = any (v_items) and item.attempt_count >= item.max_attempts),
                                                p_reason);
  end if;
  update dispatcher.agent_inbox_items
     set status = 'pending', leased_at = null, leased_until = null, updated_at = now(),
         attempt_count = case when p_give_back then greatest(attempt_count, 1) - 1 else attempt_count end
   where id = any (v_items) and id <> all (dead);
  get diagnostics released = row_count;
  released := released + cardinality(dead);
end
$$;

COMMENT ON FUNCTION dispatcher.release_wake_leases(p_wake public.agent_wakes, p_give_back boolean, p_reason text, OUT released integer, OUT dead uuid[]) IS 'Releases the leases taken during a wake; gives their attempts back when p_give_back, else an item without attempts left becomes dead_letter with p_reason. What somebody holds at this moment is left to the sweep.';

CREATE FUNCTION dispatcher.renew_wake_leases(p_instance_id uuid, p_wake_ids uuid[], p_lease_seconds integer) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_half constant integer := coalesce(cardinality(p_wake_ids), 0) / 2;
  v_count integer;
begin
  with renewed as (
    update dispatcher.agent_inbox_items as item
       set leased_until = now() + make_interval(secs => p_lease_seconds)
      from public.agent_wakes as wake
     where wake.id = any (p_wake_ids) and wake.instance_id = p_instance_id and wake.state in ('starting', 'running')
       and item.id in (select held.id from dispatcher.agent_inbox_items as held
                        where held.agent_id = wake.agent_id and held.tenant_id = wake.tenant_id
                          and held.status = 'leased'
                          and held.leased_at >= wake.claimed_at
                          and held.leased_until < now() + make_interval(secs => p_lease_seconds * 0.75)
                              for update skip locked)
    returning item.id, item.leased_until
  ), leases as (
    update public.inbox_item_leases as lease set leased_until = renewed.leased_until
      from renewed
     where lease.item_id = renewed.id
       and lease.item_id in (select held.item_id from public.inbox_item_leases as held
                              where held.item_id in (select id from renewed) and held.closed_at is null
                                  for update skip locked)
  )
  select count(*) into v_count from renewed;
  perform dispatcher.settle_constraints(touched.name::regclass)
     from unnest(array['public.agent_inbox_items', 'public.inbox_item_leases']) as touched (name);
  return v_count;
exception when others then
  -- A neighbour's trigger must not silence the daemon, nor cost a wake the leases that it does not raise for.
  if dispatcher.must_abort(sqlstate) then raise; end if;
  if v_half > 0 and sqlstate <> '55P03' then
    return dispatcher.renew_wake_leases(p_instance_id, p_wake_ids[:v_half], p_lease_seconds)
           + dispatcher.renew_wake_leases(p_instance_id, p_wake_ids[v_half + 1:], p_lease_seconds);
  end if;
  perform dispatcher.note_fault(instance.tenant_id, instance.gateway_id, 'renewal of leases',
      format('%s (%s)', sqlerrm, sqlstate))
     from public.dispatcher_instances as instance where instance.id = p_instance_id;
  return 0;
end
$$;

COMMENT ON FUNCTION dispatcher.renew_wake_leases(p_instance_id uuid, p_wake_ids uuid[], p_lease_seconds integer) IS 'Prolongs the leases taken during the given live wakes of this instance, so that a lease never ends before the work. Answers how many.';

CREATE FUNCTION dispatcher.repeat_end(p_run public.workflow_runs, p_usage jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_before constant public.workflow_runs := p_run;
  v_usage constant jsonb := dispatcher.workflow_usage_values(coalesce(p_usage, '{}'));
begin
  -- A repeat says the same once more: only a cost that was not known yet is news. Another one is for the usage command.
  if p_run.cost_estimate is null then
    p_run := dispatcher.book_workflow_usage(p_run, p_usage);
  end if;
  return dispatcher.workflow_answer('already', p_run) || jsonb_build_object(
    'booked', dispatcher.booked_since(v_before, p_run),
    'usage_ignored', v_before.cost_estimate is not null
        and (v_usage ->> 'cost_usd')::numeric is distinct from v_before.cost_estimate and v_usage ? 'cost_usd');
end
$$;

COMMENT ON FUNCTION dispatcher.repeat_end(p_run public.workflow_runs, p_usage jsonb) IS 'The answer to a session that ends its run once more. usage_ignored: it brought another cost than the one that is booked, and that was left as it is.';

CREATE FUNCTION dispatcher.requeue_chosen_items(p_agent_ids uuid[], p_items uuid[], p_owners uuid[]) RETURNS uuid[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_agent record;
  v_ids uuid[] := '{}';
begin
  for v_agent in
    select agent.id, coalesce(array_agg(chosen.item_id) filter (where chosen.item_id is not null), '{}') as item_ids
      from unnest(p_agent_ids) as agent (id) left join unnest(p_items, p_owners) as chosen (item_id,
          agent_id) on chosen.agent_id = agent.id
     group by agent.id order by agent.id
  loop
    v_ids := v_ids || dispatcher.requeue_items_of_agent(v_agent.id, v_agent.item_ids);
  end loop;
  return v_ids;
end
$$;

COMMENT ON FUNCTION dispatcher.requeue_chosen_items(p_agent_ids uuid[], p_items uuid[], p_owners uuid[]) IS 'requeue_items_of_agent for each agent, in the order of their ids.';

CREATE FUNCTION dispatcher.requeue_items_of_agent(p_agent_id uuid, p_item_ids uuid[]) RETURNS uuid[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_ids uuid[];
begin
  if (dispatcher.lock_wake_state(p_agent_id, (select tenant_id from dispatcher.agents where id = p_agent_id))).agent_id
      is null then
    return '{}';
  end if;
  with requeued as (
    update dispatcher.agent_inbox_items as item
       set status = 'pending', failed_at = null, leased_at = null, leased_until = null, updated_at = now(),
           attempt_count = case when item.attempt_count >= item.max_attempts then 0 else item.attempt_count end
     where item.id in (select held.id from dispatcher.agent_inbox_items as held
                        where held.id = any (p_item_ids) and held.status in ('failed', 'dead_letter')
                            for update skip locked)
    returning item.id)
  select array_agg(id) into v_ids from requeued;
  update public.inbox_item_origins set chain_depth = 0 where item_id = any (v_ids);
  update public.agent_wake_state set consecutive_failures = 0, stalled_at = null, chain_notified_at = null,
      updated_at = now()
   where agent_id = p_agent_id;
  return coalesce(v_ids, '{}');
exception when lock_not_available then
  return '{}';
end
$$;

COMMENT ON FUNCTION dispatcher.requeue_items_of_agent(p_agent_id uuid, p_item_ids uuid[]) IS 'Items of an agent back to pending, its stall cleared; spent attempts start anew. Answers which; those that somebody holds, or all while the agent''s state is held, are left alone.';

CREATE FUNCTION dispatcher.reserve_in_budgets(p_budgets dispatcher.evaluated_budget[], p_agent_id text, p_department_id text, p_workflow_type text, p_usd numeric, p_tokens numeric) RETURNS dispatcher.evaluated_budget[]
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO ''
    AS $$
begin
  for v_place in 1 .. cardinality(p_budgets) loop
    if dispatcher.is_in_budget_scope(p_budgets[v_place].scope, p_budgets[v_place].scope_id, p_agent_id,
        p_department_id, p_workflow_type) then
      p_budgets[v_place].reserved_usd := p_budgets[v_place].reserved_usd + p_usd;
      p_budgets[v_place].reserved_tokens := p_budgets[v_place].reserved_tokens + p_tokens;
    end if;
  end loop;
  return p_budgets;
end
$$;

COMMENT ON FUNCTION dispatcher.reserve_in_budgets(p_budgets dispatcher.evaluated_budget[], p_agent_id text, p_department_id text, p_workflow_type text, p_usd numeric, p_tokens numeric) IS 'The evaluated budgets after one more run was dispatched (or taken back: negative amounts).';

CREATE FUNCTION dispatcher.respawn_grant(p_wake public.agent_wakes, p_run public.workflow_runs) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select dispatcher.wake_grant(p_wake) || jsonb_build_object('run', dispatcher.workflow_run_json(p_run),
             'timeout_seconds', dispatcher.seconds_until(p_wake.deadline_at) - 15)
$$;

COMMENT ON FUNCTION dispatcher.respawn_grant(p_wake public.agent_wakes, p_run public.workflow_runs) IS 'The grant of a new process for an orphan: that of a wake, with the run and timeout_seconds.';

CREATE FUNCTION dispatcher.respawn_locked_run(p_claimant dispatcher.claimant, p_run public.workflow_runs, p_request uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_tick constant dispatcher.tick :=
    row(p_claimant.instance_id, p_claimant.tenant_id, p_claimant.gateway_id, p_claimant.settings)::dispatcher.tick;
  v_agent_id constant uuid := dispatcher.find_inbox_agent(p_claimant.tenant_id, p_run.owner_agent_id);
  v_agent constant record := dispatcher.lock_agent(p_claimant, v_agent_id);
  v_money dispatcher.money;
  v_usd numeric;
  v_tokens numeric;
  v_reason text;
  v_wake public.agent_wakes;
begin
  if v_agent.verdict = 'not_local' then
    return dispatcher.refuse_respawn(p_run.id, 'not_local');
  elsif v_agent.verdict = 'busy' or (dispatcher.lock_wake_state(v_agent_id, p_claimant.tenant_id)).agent_id is null
     or cardinality(dispatcher.unlocked_runs(array[p_run])) = 0 then
    return dispatcher.refuse_respawn(p_run.id, 'busy', v_agent_id, v_agent.slug);
  end if;
  v_reason := dispatcher.gate_of_respawn(p_claimant, v_agent_id);
  -- What the lost session cost stays spent, reported or not: the new one needs room of its own.
  v_money := dispatcher.read_money(v_tick);
  v_usd := dispatcher.workflow_estimate(v_money.estimates, p_run.workflow_type, 'usd');
  v_tokens := dispatcher.workflow_estimate(v_money.estimates, p_run.workflow_type, 'tokens');
  if v_reason is null and (dispatcher.budget_verdict(
       v_money.budgets, v_agent.slug,
       (select department_id from public.agent_profiles where tenant_id = p_run.tenant_id
           and agent_id = p_run.owner_agent_id),
       p_run.workflow_type, v_usd, v_tokens)).verdict <> 'ok' then
    v_reason := 'workflow_budget';
  end if;
  if v_reason is not null then
    return dispatcher.refuse_respawn(p_run.id, v_reason, v_agent_id, v_agent.slug);
  end if;
  v_wake := dispatcher.write_respawn(p_claimant, p_run, v_agent_id, p_request);
  return dispatcher.respawn_grant(v_wake, dispatcher.give_to_respawn(p_run, v_wake, v_usd, v_tokens));
end
$$;

COMMENT ON FUNCTION dispatcher.respawn_locked_run(p_claimant dispatcher.claimant, p_run public.workflow_runs, p_request uuid) IS 'Grants an orphan, which the caller has locked along with the gateway, its new process. From here on nothing waits: what somebody holds is busy.';

CREATE FUNCTION dispatcher.restrict_functions(p_names text[] DEFAULT '{}'::text[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
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

COMMENT ON FUNCTION dispatcher.restrict_functions(p_names text[]) IS 'Leaves the named functions of schema public, and all of schema dispatcher, to the service role alone. The default privileges of a Supabase project grant execute to anon and authenticated by name: revoking from public is not enough.';

CREATE FUNCTION dispatcher.retry_stale_dispatches(p_tick dispatcher.tick, p_limit integer) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_gateways constant uuid[] := dispatcher.held_gateways(p_tick);
  v_money dispatcher.money := dispatcher.read_money(p_tick);
  v_run public.workflow_runs;
  v_one record;
  v_done jsonb := '{"retried": 0, "failed": 0, "held": 0, "unrouted": 0, "locked": 0}';
  v_outcome text;
  v_seen integer := 0;
  v_errors jsonb := '[]';
begin
  v_money.budgets := dispatcher.tight_budgets(v_money.budgets, v_money.estimates, p_limit);
  for v_run in select * from dispatcher.stale_dispatches(p_tick, p_limit) loop
    v_seen := v_seen + 1;
    begin
      if v_run.dispatch_attempts::bigint - v_run.release_count > (p_tick.settings).max_dispatch_retries then
        perform dispatcher.give_up_dispatch(v_run);
        v_outcome := 'failed';
      else
        v_one := dispatcher.retry_stale_run(v_run, v_money, v_gateways);
        v_money.budgets := v_one.budgets;
        v_outcome := v_one.outcome;
      end if;
      v_done := v_done || jsonb_build_object(v_outcome, (v_done ->> v_outcome)::integer + 1);
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      v_errors := v_errors || dispatcher.row_error('retried', v_run.id, sqlerrm, sqlstate);
    end;
  end loop;
  return v_done - 'unrouted' || jsonb_build_object(
    'errors', v_errors, 'again', v_seen >= p_limit
        and v_seen > jsonb_array_length(v_errors) + (v_done ->> 'locked')::integer);
end
$$;

COMMENT ON FUNCTION dispatcher.retry_stale_dispatches(p_tick dispatcher.tick, p_limit integer) IS 'Runs nobody claimed in time: out of retries they fail, whatever a budget says; else a fresh attempt through the same gate, or back to the queue where the gate holds it, with no attempt spent. {retried, failed, held, locked, errors, again}.';

CREATE FUNCTION dispatcher.retry_stale_run(p_run public.workflow_runs, p_money dispatcher.money, p_gateways uuid[], OUT outcome text, OUT budgets dispatcher.evaluated_budget[]) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_target constant record := dispatcher.target_of(p_run);
  v_usd constant numeric := dispatcher.workflow_estimate(p_money.estimates, p_run.workflow_type, 'usd');
  v_tokens constant numeric := dispatcher.workflow_estimate(p_money.estimates, p_run.workflow_type, 'tokens');
  v_gate record;
begin
  -- It must not stand in its own way.
  budgets := dispatcher.reserve_in_budgets(
    p_money.budgets, p_run.owner_agent_id,
    (select department_id from public.agent_profiles where tenant_id = p_run.tenant_id
        and agent_id = p_run.owner_agent_id),
    p_run.workflow_type, -coalesce(p_run.reserved_usd, 0), -coalesce(p_run.reserved_tokens, 0));
  v_gate := dispatcher.budget_verdict(budgets, v_target.agent_id, v_target.department_id, p_run.workflow_type, v_usd,
      v_tokens);
  if v_gate.verdict <> 'ok' or not v_target.is_open then
    outcome := case when v_gate.verdict <> 'ok' then 'held' else 'unrouted' end;
    perform dispatcher.note_workflow_actor('dispatcher', case outcome when 'held' then 'held by a budget'
        else 'its route is gone' end);
    update public.workflow_runs
       set status = 'queued', dispatched_at = null, reserved_usd = null, reserved_tokens = null,
           blocker_type = case when v_target.agent_id is null then 'no_route' end,
           blocker_description = case when v_target.agent_id is null
               then format('no route for workflow type %s', p_run.workflow_type) end
     where id = p_run.id;
  elsif v_target.gateway_id is not null and v_target.gateway_id <> all (p_gateways) then
    outcome := 'locked';
    budgets := p_money.budgets;
  else
    outcome := 'retried';
    perform dispatcher.note_workflow_actor('dispatcher', 'nobody claimed it in time');
    perform dispatcher.drop_notifications(array[p_run.id]);
    perform dispatcher.dispatch_runs(array[row(p_run.id, v_target.agent_id, v_target.gateway_id, v_usd,
        v_tokens)::dispatcher.run_choice]);
    budgets := dispatcher.reserve_in_budgets(budgets, v_target.agent_id, v_target.department_id, p_run.workflow_type,
        v_usd, v_tokens);
  end if;
end
$$;

COMMENT ON FUNCTION dispatcher.retry_stale_run(p_run public.workflow_runs, p_money dispatcher.money, p_gateways uuid[], OUT outcome text, OUT budgets dispatcher.evaluated_budget[]) IS 'A fresh attempt for a stale run through the same budgets (retried), or back to the queue with no attempt spent (held, unrouted); locked: another session holds the agent''s gateway. budgets: as they stand after that.';

CREATE FUNCTION dispatcher.return_workflow_run(p_run public.workflow_runs, p_how text) RETURNS public.workflow_runs
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.end_workflow_claim(p_run, p_how);
  if p_run.release_count >= 3 then
    -- The last claim's cost stays with the run: it is its end.
    perform dispatcher.note_workflow_actor(current_setting('dispatcher.actor', true), 'released too often');
    update public.workflow_runs
       set status = 'failed', finished_at = now(), wake_id = null, last_error_at = now(),
           last_error = format('Claim lost after %s releases (%s)', p_run.release_count, p_how)
     where id = p_run.id returning * into p_run;
  else
    perform dispatcher.settle_workflow_claim(p_run, p_how);
    update public.workflow_runs
       set status = 'queued', release_count = release_count + 1, dispatched_at = null, claimed_at = null,
           claimed_by = null,
           started_at = null, deadline_at = null, last_heartbeat_at = null, claim_token = null, session_id = null,
               wake_id = null,
           reserved_usd = null, reserved_tokens = null, cost_estimate = null, input_tokens = null, output_tokens = null,
           cached_tokens = null, reported_at = null, assumed_usd = null, assumed_tokens = null
     where id = p_run.id returning * into p_run;
  end if;
  return p_run;
end
$$;

COMMENT ON FUNCTION dispatcher.return_workflow_run(p_run public.workflow_runs, p_how text) IS 'Gives a claim back: the run returns to the queue with its reservation freed, at most 3 times, then it fails. The caller has locked it.';

CREATE FUNCTION dispatcher.revise_budget() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  if (new.cap_usd, new.cap_tokens, new.action_on_exceed) is distinct from
     (old.cap_usd, old.cap_tokens, old.action_on_exceed) then
    new.revision := old.revision + 1;
  end if;
  new.updated_at := now();
  return new;
end
$$;

COMMENT ON FUNCTION dispatcher.revise_budget() IS 'Before an update of a budget: another cap or action is another revision, whose breaches are told anew.';

CREATE FUNCTION dispatcher.row_error(p_phase text, p_run_id uuid, p_error text, p_code text) RETURNS jsonb
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$ select jsonb_build_array(jsonb_build_object('phase', p_phase, 'run_id', p_run_id, 'error', left(p_error, 500),
    'error_code', p_code)) $$;

COMMENT ON FUNCTION dispatcher.row_error(p_phase text, p_run_id uuid, p_error text, p_code text) IS 'What a run of a phase raised, as a list of one.';

CREATE FUNCTION dispatcher.run_candidates(p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_batch integer) RETURNS TABLE(run_id uuid, workflow_type text, agent_id text, department_id text, gateway_id uuid, slots bigint, usd numeric, tokens numeric)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select pick.id, g.workflow_type, g.agent_id, g.department_id, g.gateway_id, g.slots, g.usd, g.tokens
    from unnest(p_groups) as g
    cross join lateral unnest(g.priorities) as level (priority)
    -- Of one priority the oldest goes first whatever waiting adds, so the oldest few of each are all that can go out.
    cross join lateral (
      select run.id, run.priority, run.queued_at from public.workflow_runs as run
       where run.tenant_id = p_tenant_id and run.workflow_type = g.workflow_type and run.priority = level.priority
         and run.status = 'queued'
         and run.pinned_agent_id is not distinct from g.pinned_agent_id
         and (run.next_attempt_at is null or run.next_attempt_at <= now())
       order by run.queued_at
       limit least(g.slots, p_batch) + 20) as pick
   where g.verdict = 'ok' and g.is_open and g.slots > 0
   -- A group ages as its oldest run does, and its runs among themselves: minutes of waiting must not outweigh what a
   -- run is worth.
   order by g.route_priority::bigint + dispatcher.workflow_age_points(g.oldest, now()) desc,
            pick.priority::bigint + dispatcher.workflow_age_points(pick.queued_at, now()) desc, pick.queued_at, pick.id
$$;

COMMENT ON FUNCTION dispatcher.run_candidates(p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_batch integer) IS 'The runs that may go out next, in their order: those that are held or whose type is full are left out before anything is limited.';

CREATE FUNCTION dispatcher.run_phase(p_tick dispatcher.tick, p_phase text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_limit constant integer := 500;
  v_answer jsonb;
begin
  if p_phase in ('stopped', 'dispatched', 'retried') and not dispatcher.has_the_pass(p_tick) then
    return jsonb_build_object('busy', true);
  end if;
  case p_phase
    when 'stopped' then v_answer := dispatcher.stop_overspent_runs(p_tick, v_limit);
    when 'dispatched' then v_answer := dispatcher.dispatch_queued_runs(p_tick);
    when 'retried' then v_answer := dispatcher.retry_stale_dispatches(p_tick, v_limit);
    when 'timed_out' then v_answer := dispatcher.time_out_runs(p_tick, v_limit);
    when 'released' then v_answer := dispatcher.release_stale_claims(p_tick, v_limit);
    when 'unrouted' then v_answer := dispatcher.mark_unrouted_runs(p_tick, v_limit);
    when 'pruned' then v_answer := dispatcher.prune_workflow_rows(p_tick, v_limit);
  end case;
  perform dispatcher.hint_other_gateways(p_tick);
  return v_answer;
end
$$;

COMMENT ON FUNCTION dispatcher.run_phase(p_tick dispatcher.tick, p_phase text) IS 'One pass of one phase; {busy: true} when another pass that counts is under way.';

CREATE FUNCTION dispatcher.running_instance(p_instance_id uuid) RETURNS public.dispatcher_instances
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_instance public.dispatcher_instances;
begin
  select * into v_instance from public.dispatcher_instances where id = p_instance_id;
  if v_instance.id is null then
    raise exception 'no dispatcher instance %', p_instance_id using errcode = 'OD001',
        hint = 'Register the instance again.';
  end if;
  return v_instance;
end
$$;

COMMENT ON FUNCTION dispatcher.running_instance(p_instance_id uuid) IS 'The row of an instance; raises OD001 when it is not registered.';

CREATE FUNCTION dispatcher.runs_of_budget(p_tick dispatcher.tick, p_budget dispatcher.evaluated_budget, p_limit integer) RETURNS public.workflow_runs[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_runs public.workflow_runs[];
begin
  -- What costs money at this moment first.
  v_runs := array(
    select row(run.*)::public.workflow_runs from public.workflow_runs as run
      left join public.agent_profiles as profile on profile.tenant_id = run.tenant_id
          and profile.agent_id = run.owner_agent_id
     where run.tenant_id = p_tick.tenant_id and run.status in ('dispatched', 'claimed', 'running')
       and dispatcher.is_in_budget_scope(p_budget.scope, p_budget.scope_id, run.owner_agent_id, profile.department_id,
           run.workflow_type)
     order by run.created_at, run.id limit p_limit for update of run skip locked);
  return v_runs || array(
    select row(run.*)::public.workflow_runs from public.workflow_runs as run
      left join public.workflow_agent_routing as route on route.tenant_id = run.tenant_id
          and route.workflow_type = run.workflow_type
      left join public.agent_profiles as profile
        on profile.tenant_id = run.tenant_id and profile.agent_id = coalesce(run.pinned_agent_id, route.agent_id)
     -- What is kept back for later belongs to the budget of its day.
     where run.tenant_id = p_tick.tenant_id and run.status = 'queued'
       and (run.next_attempt_at is null or run.next_attempt_at <= now())
       and dispatcher.is_in_budget_scope(p_budget.scope, p_budget.scope_id,
           coalesce(run.pinned_agent_id, route.agent_id),
                                         profile.department_id, run.workflow_type)
     limit p_limit - cardinality(v_runs) for update of run skip locked);
end
$$;

COMMENT ON FUNCTION dispatcher.runs_of_budget(p_tick dispatcher.tick, p_budget dispatcher.evaluated_budget, p_limit integer) IS 'Runs in the scope of a budget that are dispatched, claimed, running, or queued and due, locked; at most p_limit.';

CREATE FUNCTION dispatcher.runs_over_deadline(p_tick dispatcher.tick, p_limit integer) RETURNS SETOF public.workflow_runs
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  select run.* from public.workflow_runs as run
   where run.tenant_id = p_tick.tenant_id and run.status in ('claimed', 'running') and run.deadline_at <= now()
   order by run.deadline_at limit p_limit for update skip locked
$$;

COMMENT ON FUNCTION dispatcher.runs_over_deadline(p_tick dispatcher.tick, p_limit integer) IS 'Claimed and running runs over their deadline, locked.';

CREATE FUNCTION dispatcher.runs_to_mark(p_tenant_id uuid) RETURNS SETOF uuid
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select run.id from dispatcher.unrouted_types(p_tenant_id) as unrouted
    join public.workflow_runs as run on run.tenant_id = p_tenant_id and run.workflow_type = unrouted.workflow_type
        and run.status = 'queued'
   where run.pinned_agent_id is null and run.blocker_type is distinct from 'no_route'
  union all
  select run.id from public.workflow_runs as run
   where run.tenant_id = p_tenant_id and run.status = 'queued' and run.blocker_type = 'no_route'
     and (run.pinned_agent_id is not null
          or exists (select from public.workflow_agent_routing as route
                      where route.tenant_id = p_tenant_id and route.workflow_type = run.workflow_type))
$$;

COMMENT ON FUNCTION dispatcher.runs_to_mark(p_tenant_id uuid) IS 'Queued runs whose blocker no_route is missing, or is true no more.';

CREATE FUNCTION dispatcher.schema_drift() RETURNS TABLE(kind text, name text, problem text, remedy text)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $_$
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
$_$;

COMMENT ON FUNCTION dispatcher.schema_drift() IS 'What differs from what the files make: missing, differs, added (a policy), or retired (a function, view or trigger of an earlier version). remedy: the statement to type where applying the files again does not mend it. Empty when all is well.';

CREATE FUNCTION dispatcher.schema_exposure() RETURNS TABLE(name text, fault text, remedy text)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
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

COMMENT ON FUNCTION dispatcher.schema_exposure() IS 'Every table of ours without row level security, every right on anything of ours that public or anon holds, or authenticated beyond what the files give, and the statement that ends it. Empty when all is well.';

CREATE FUNCTION dispatcher.seconds_until(p_at timestamp with time zone) RETURNS double precision
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$ select case when isfinite(p_at) then least(extract(epoch from p_at - now()), 1e9)::double precision end $$;

COMMENT ON FUNCTION dispatcher.seconds_until(p_at timestamp with time zone) IS 'Seconds from now to a time, below 0 for a past one; NULL for a time nobody can wait for.';

CREATE FUNCTION dispatcher.send_gateway_hint(p_gateway_id uuid, p_event text, p_payload jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $_$
begin
  if p_gateway_id is not null and to_regprocedure('realtime.send(jsonb,text,text,boolean)') is not null then
    execute 'select realtime.send($1, $2, $3, true)' using p_payload, p_event,
        dispatcher.dispatcher_gateway_topic(p_gateway_id);
  end if;
exception when others then
  -- A hint is worth less than the row it speaks of; the sweep finds the row.
  perform dispatcher.note_fault((select gateway.tenant_id from public.gateways as gateway
      where gateway.id = p_gateway_id), p_gateway_id,
                                'hint', format('%s (%s)', sqlerrm, sqlstate));
end
$_$;

COMMENT ON FUNCTION dispatcher.send_gateway_hint(p_gateway_id uuid, p_event text, p_payload jsonb) IS 'Broadcasts a hint to the private topic of a gateway once the transaction commits. Never fails; without realtime.send it does nothing.';

CREATE FUNCTION dispatcher.sessions_of(p_pids integer[]) RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO ''
    AS $$
  select coalesce(jsonb_agg(jsonb_build_object(
           'pid', holder.pid, 'application', nullif(left(activity.application_name, 60), ''),
           'user', activity.usename, 'state', activity.state,
           'seconds', round(extract(epoch from clock_timestamp() - activity.xact_start)::numeric, 1))
           order by activity.xact_start, holder.pid), '[]')
    from (select held.pid from unnest(p_pids) as held (pid) limit 5) as holder
    left join pg_catalog.pg_stat_activity as activity on activity.pid = holder.pid
$$;

COMMENT ON FUNCTION dispatcher.sessions_of(p_pids integer[]) IS 'Up to five sessions: [{pid, application, user, state, seconds}]. state and seconds (its transaction has been open for) are NULL where the owner of this function may not see them.';

CREATE FUNCTION dispatcher.set_items_aside(p_item_ids uuid[], p_as text, p_reason text) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_ids uuid[];
begin
  with aside as (
    update dispatcher.agent_inbox_items
       set status = case p_as when 'agent_stalled' then 'failed' else 'dead_letter' end::public.inbox_item_status,
           failed_at = now(), updated_at = now(),
           context = dispatcher.merge_inbox_context(context, jsonb_build_object('last_failure_reason', p_reason))
     where id in (select item.id from dispatcher.agent_inbox_items as item
                   where item.id = any (p_item_ids) and item.status in ('pending', 'failed') for update skip locked)
    returning id)
  select array_agg(id) into v_ids from aside;
  if v_ids is not null then
    perform dispatcher.mark_as_set_aside(v_ids, p_as);
  end if;
  return coalesce(cardinality(v_ids), 0);
end
$$;

COMMENT ON FUNCTION dispatcher.set_items_aside(p_item_ids uuid[], p_as text, p_reason text) IS 'Sets items aside and marks why (agent_stalled: failed, tried again when the agent recovers; wake_chain_limit: dead_letter). Answers how many.';

CREATE FUNCTION dispatcher.set_off_waitlist(p_agent_id uuid) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  -- An agent whose data raises would stand at the head of the list forever; the sweep lists it again.
  perform from public.agent_wake_state where agent_id = p_agent_id for update skip locked;
  if found then
    perform dispatcher.leave_waitlist(p_agent_id);
    perform dispatcher.settle_constraints('public.agent_wake_state');
  end if;
exception when others then
  -- What its row raises concerns it alone: the claims of the others, and what was reported with them, stand.
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(agent.tenant_id, agent.gateway_id, 'waitlist', format('%s (%s)', sqlerrm, sqlstate))
     from dispatcher.agents as agent where agent.id = p_agent_id;
end
$$;

COMMENT ON FUNCTION dispatcher.set_off_waitlist(p_agent_id uuid) IS 'Takes an agent off the waitlist unless somebody holds its row, or it raises, which is noted.';

CREATE FUNCTION dispatcher.setting(p_settings jsonb, p_name text, p_default double precision, p_lowest double precision, p_highest double precision) RETURNS double precision
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $$
  select case when jsonb_typeof(p_settings -> p_name) = 'number'
              then least(greatest((p_settings ->> p_name)::numeric, p_lowest::numeric),
                  p_highest::numeric)::double precision
              else p_default end
$$;

COMMENT ON FUNCTION dispatcher.setting(p_settings jsonb, p_name text, p_default double precision, p_lowest double precision, p_highest double precision) IS 'A number of p_settings within its bounds; the default where it is missing or no number. A missing key never opens a gate.';

CREATE FUNCTION dispatcher.settings_of_gateway(p_gateway_id uuid, p_otherwise jsonb) RETURNS public.dispatcher_settings
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_settings public.dispatcher_settings;
begin
  select settings.* into v_settings
    from public.dispatcher_instances as instance
        join public.dispatcher_settings as settings on settings.instance_id = instance.id
   where instance.gateway_id = p_gateway_id
   order by (instance.state = 'running' and not dispatcher.is_instance_silent(instance)) desc,
       instance.last_heartbeat_at desc limit 1;
  return case when v_settings.instance_id is null then dispatcher.typed_settings(p_otherwise) else v_settings end;
end
$$;

COMMENT ON FUNCTION dispatcher.settings_of_gateway(p_gateway_id uuid, p_otherwise jsonb) IS 'The settings of the gateway''s most recent daemon; p_otherwise, typed, where none ever ran.';

CREATE FUNCTION dispatcher.settings_of_instance(p_instance_id uuid) RETURNS public.dispatcher_settings
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_settings public.dispatcher_settings;
begin
  select * into v_settings from public.dispatcher_settings where instance_id = p_instance_id;
  return case when v_settings.instance_id is null then dispatcher.typed_settings('{}') else v_settings end;
end
$$;

COMMENT ON FUNCTION dispatcher.settings_of_instance(p_instance_id uuid) IS 'The settings of a daemon; the defaults for one that is not registered.';

CREATE FUNCTION dispatcher.settle_constraints(p_table regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  if exists (select from pg_catalog.pg_trigger where tgrelid = p_table and tgdeferrable) then
    set constraints all immediate;
  end if;
end
$$;

COMMENT ON FUNCTION dispatcher.settle_constraints(p_table regclass) IS 'Has deferred constraints say what they have to say now, where a table has any: what waits for the commit would take everything with it.';

CREATE FUNCTION dispatcher.settle_items_of_wake(p_wake public.agent_wakes, p_state text, p_ending text, p_error text) RETURNS uuid[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_released record;
  v_dead uuid[];
  v_reason constant text := case when p_ending = 'item_refused'
      then format('it cannot be started: %s', left(p_error, 500))
                                 else format('wake ended (%s) with the item unfinished', p_state) end;
begin
  v_released := dispatcher.release_wake_leases(p_wake, p_state in ('interrupted', 'spawn_failed'), v_reason);
  v_dead := v_released.dead;
  if p_state = 'lost' and v_released.released = 0 then
    v_dead := v_dead || dispatcher.spend_attempt_of_lost_wake(p_wake);
    perform dispatcher.settle_constraints('public.agent_inbox_items');
    return v_dead;
  end if;
  if p_ending = 'item_refused' then
    v_dead := v_dead || dispatcher.give_up_items(p_wake.item_ids[1:1], v_reason);
  end if;
  perform dispatcher.settle_constraints('public.agent_inbox_items');
  perform dispatcher.tell_dead_letters(p_wake.agent_id, v_dead, v_reason);
  return v_dead;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_wake.tenant_id, p_wake.gateway_id, 'items of an ended wake',
      format('%s (%s)', sqlerrm, sqlstate));
  return '{}';
end
$$;

COMMENT ON FUNCTION dispatcher.settle_items_of_wake(p_wake public.agent_wakes, p_state text, p_ending text, p_error text) IS 'What a wake''s end means for its items: leases released, spent and refused ones given up and told. Never fails the end; answers the items given up.';

CREATE FUNCTION dispatcher.settle_stalled(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_agent_id uuid;
  v_count integer := 0;
begin
  foreach v_agent_id in array p_agent_ids loop
    v_count := v_count + dispatcher.mark_agent_stalled(v_agent_id);
    exit when v_count >= 500;
  end loop;
  return v_count;
end
$$;

COMMENT ON FUNCTION dispatcher.settle_stalled(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) IS 'Sets the pending items of stalled agents aside, about 500, and notifies once per stall. Answers how many.';

CREATE FUNCTION dispatcher.settle_stalled_agents(p_sweeper dispatcher.claimant) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  return dispatcher.in_parts(p_sweeper, 'settle_stalled', 'stall',
      array(select * from dispatcher.agents_to_settle(p_sweeper, 100)));
end
$$;

COMMENT ON FUNCTION dispatcher.settle_stalled_agents(p_sweeper dispatcher.claimant) IS 'Settles stalled agents; one that raises costs no other.';

CREATE FUNCTION dispatcher.settle_workflow_claim(p_run public.workflow_runs, p_as text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_configured constant record := dispatcher.configured_estimates(p_run.tenant_id);
  v_usd constant numeric := coalesce(dispatcher.known_cost(p_run.cost_estimate),
      dispatcher.known_cost(p_run.assumed_usd), greatest(dispatcher.known_cost(p_run.reserved_usd), v_configured.usd));
  v_tokens constant bigint := coalesce(dispatcher.known_tokens(p_run.input_tokens, p_run.output_tokens),
      case when p_run.assumed_tokens >= 0 then p_run.assumed_tokens end,
      greatest(p_run.reserved_tokens, v_configured.tokens));
begin
  -- Whoever gave a sign of life has worked: what it did not report is assumed, never nothing.
  if p_run.reported_at is null and p_run.started_at is null and p_run.finished_at is null then
    return;
  elsif p_run.finished_at is not null and p_run.claimed_at is null and p_run.reported_at is null then
    return;
  end if;
  insert into public.workflow_claims as claim (
    claim_token, tenant_id, run_id, workflow_type, agent_id, session_id, attempt, claimed_at, ended_at, ended_as,
        cost_usd, tokens)
  values (coalesce(p_run.claim_token, gen_random_uuid()), p_run.tenant_id, p_run.id, p_run.workflow_type,
          p_run.owner_agent_id, coalesce(p_run.session_id, 'unknown'), p_run.dispatch_attempts,
          coalesce(p_run.claimed_at, now()), now(), p_as, v_usd, v_tokens)
  on conflict (claim_token) do update set cost_usd = excluded.cost_usd, tokens = excluded.tokens;
  perform dispatcher.book(p_run, p_run.dispatch_attempts, p_run.owner_agent_id,
      v_usd - dispatcher.booked_usd(p_run), v_tokens - dispatcher.booked_tokens(p_run), 'assumed');
end
$$;

COMMENT ON FUNCTION dispatcher.settle_workflow_claim(p_run public.workflow_runs, p_as text) IS 'Keeps with the present claim of a run what is booked for it, and books what is assumed for what it did not report. A claim without a report or a heartbeat cost nothing. The caller empties the run.';

CREATE FUNCTION dispatcher.shown(p_text text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select regexp_replace(p_text, '[\u0001-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]',
                        U&'\FFFD', 'g')
$$;

COMMENT ON FUNCTION dispatcher.shown(p_text text) IS 'A text from outside as a person may see it: on one line, without what steers a terminal or turns the order.';

CREATE FUNCTION dispatcher.shown_row(p_row jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    SET search_path TO ''
    AS $_$
  select p_row || coalesce(jsonb_object_agg(field.key, null), '{}')
    from jsonb_each_text(p_row) as field
   where field.value in ('infinity', '-infinity', 'NaN', 'Infinity', '-Infinity')
     and field.key ~ '(_at|_until|_date|_usd|_cost|_estimate)$'
$_$;

COMMENT ON FUNCTION dispatcher.shown_row(p_row jsonb) IS 'A row as it is shown: its infinite times and amounts that are no numbers are null, as no reader of JSON knows them.';

CREATE FUNCTION dispatcher.silent_runs(p_tick dispatcher.tick, p_limit integer) RETURNS SETOF public.workflow_runs
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  select run.* from public.workflow_runs as run
   where run.tenant_id = p_tick.tenant_id and run.status in ('claimed', 'running')
     and dispatcher.silent_since(run) < now() - make_interval(secs => (p_tick.settings).stale_claim_seconds)
   order by run.last_heartbeat_at limit p_limit for update skip locked
$$;

COMMENT ON FUNCTION dispatcher.silent_runs(p_tick dispatcher.tick, p_limit integer) IS 'Claimed and running runs without a heartbeat for too long, locked.';

CREATE FUNCTION dispatcher.silent_since(p_run public.workflow_runs) RETURNS timestamp with time zone
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(greatest(dispatcher.known_time(p_run.last_heartbeat_at), dispatcher.known_time(p_run.claimed_at)),
      '-infinity')
$$;

COMMENT ON FUNCTION dispatcher.silent_since(p_run public.workflow_runs) IS 'The last sign of life of a claimed run; -infinity where the row tells of none that a clock has shown.';

CREATE FUNCTION dispatcher.since(p_since text) RETURNS timestamp with time zone
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $_$
begin
  if p_since ~ '^\d{1,6}[smhd]$' then
    return now() - (left(p_since, -1) || case right(p_since, 1) when 's' then ' s' when 'm' then ' min' when 'h'
        then ' h' else ' days' end)::interval;
  end if;
  return p_since::timestamptz;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  raise exception 'p_since is neither a time nor an age such as 30m, 2h or 7d: %',
      left(p_since, 100) using errcode = 'OD002';
end
$_$;

COMMENT ON FUNCTION dispatcher.since(p_since text) IS 'A time, or an age (90s, 30m, 2h, 7d) before now; NULL for NULL. Raises OD002 for anything else.';

CREATE FUNCTION dispatcher.source_of_booking(p_run public.workflow_runs, p_usd numeric) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select case when nullif(current_setting('dispatcher.booking_source', true), '') is not null
              then current_setting('dispatcher.booking_source')
              when p_usd <> 0 and dispatcher.known_cost(p_run.cost_estimate) is null
                or p_usd = 0 and dispatcher.known_tokens(p_run.input_tokens, p_run.output_tokens) is null
              then 'assumed' else 'report' end
$$;

COMMENT ON FUNCTION dispatcher.source_of_booking(p_run public.workflow_runs, p_usd numeric) IS 'Where a booking comes from: what the transaction says (correction), else whether the run tells of it.';

CREATE FUNCTION dispatcher.spend_attempt_of_lost_wake(p_wake public.agent_wakes) RETURNS uuid[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_item record;
  v_agent record;
begin
  -- A daemon that dies again and again over one item must end too: a lost wake during which nothing was leased costs
  -- its first item an attempt.
  if exists (select from public.inbox_item_leases where wake_id = p_wake.id) then
    return '{}';
  end if;
  update dispatcher.agent_inbox_items set attempt_count = attempt_count + 1, updated_at = now()
   where id in (select item.id from dispatcher.agent_inbox_items as item where item.id = p_wake.item_ids[1]
       for update skip locked)
     and status in ('pending', 'failed') and attempt_count < max_attempts
  returning id, attempt_count, max_attempts into v_item;
  if v_item.attempt_count is null or v_item.attempt_count < v_item.max_attempts then
    return '{}';
  end if;
  select slug, tenant_id into v_agent from dispatcher.agents where id = p_wake.agent_id;
  perform dispatcher.notify_operator(
    v_agent.tenant_id, 'worker_lost', format('An item of agent %s was given up', v_agent.slug),
    format('%s daemon(s) were lost before its run could be seen to begin or end. `dispatcher inbox requeue %s` brings '
           'it back.', v_item.attempt_count, v_item.id),
    p_wake.agent_id, jsonb_build_object('item_id', v_item.id, 'attempts', v_item.attempt_count));
  return dispatcher.give_up_items(array[v_item.id], 'worker lost');
end
$$;

COMMENT ON FUNCTION dispatcher.spend_attempt_of_lost_wake(p_wake public.agent_wakes) IS 'A poison item ends at max_attempts also when it is the daemon that dies of it; a notification says so, for a daemon may die of something else. Answers the item given up.';

CREATE FUNCTION dispatcher.spent_items(p_sweeper dispatcher.claimant, p_limit integer) RETURNS TABLE(item_id uuid, agent_id uuid)
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  return query
    select item.id, agent.id from dispatcher.agents as agent
      join dispatcher.agent_inbox_items as item on item.agent_id = agent.id and item.tenant_id = agent.tenant_id
     where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
       and item.status in ('pending', 'leased') and item.attempt_count >= item.max_attempts
       and (item.status = 'pending' or coalesce(item.leased_until, '-infinity') < now()
       or item.leased_until >= now() + interval '7 days')
       -- A lease that ran out while the database was away is renewed by the heartbeat of the wake that works on it.
       and not exists (select from public.agent_wakes as wake where wake.agent_id = agent.id
       and wake.state in ('starting', 'running'))
     limit p_limit for update of item skip locked;
end
$$;

COMMENT ON FUNCTION dispatcher.spent_items(p_sweeper dispatcher.claimant, p_limit integer) IS 'Expired leases and pending items without attempts left, locked.';

CREATE FUNCTION dispatcher.spent_of(p_budget dispatcher.evaluated_budget, p_with_reserved boolean) RETURNS numeric
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select case when p_budget.cap_usd is not null then p_budget.settled_usd + case when p_with_reserved
      then p_budget.reserved_usd else 0 end
              else p_budget.settled_tokens + case when p_with_reserved then p_budget.reserved_tokens else 0 end end
$$;

COMMENT ON FUNCTION dispatcher.spent_of(p_budget dispatcher.evaluated_budget, p_with_reserved boolean) IS 'What a budget has spent, with or without what is reserved, in the unit of its cap.';

CREATE FUNCTION dispatcher.stale_dispatches(p_tick dispatcher.tick, p_limit integer) RETURNS SETOF public.workflow_runs
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  select run.* from public.workflow_runs as run
   where run.tenant_id = p_tick.tenant_id and run.status = 'dispatched'
     and dispatcher.is_stale_dispatch(run, p_tick.settings)
   order by run.dispatched_at limit p_limit for update skip locked
$$;

COMMENT ON FUNCTION dispatcher.stale_dispatches(p_tick dispatcher.tick, p_limit integer) IS 'Dispatched runs that nobody claimed in time, locked.';

CREATE FUNCTION dispatcher.stale_item_ids(p_sweeper dispatcher.claimant, p_limit integer) RETURNS uuid[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_oldest constant timestamptz := now() - make_interval(secs => (p_sweeper.settings).stale_item_age_hours * 3600);
  v_ids uuid[];
begin
  if (p_sweeper.settings).stale_item_age_hours <= 0 then
    return '{}';
  end if;
  select array_agg(stale.id) into v_ids from (
    select item.id from dispatcher.agents as agent
      join dispatcher.agent_inbox_items as item on item.agent_id = agent.id and item.tenant_id = agent.tenant_id
      left join public.agent_resumptions as resumption on resumption.agent_id = agent.id
      left join public.inbox_item_marks as mark on mark.item_id = item.id
     where agent.gateway_id = p_sweeper.gateway_id and agent.tenant_id = p_sweeper.tenant_id
       and agent.status not in ('paused', 'hibernating')
       and item.status = 'pending' and item.attempt_count < item.max_attempts and item.created_at < v_oldest
       and coalesce(mark.reopened_at, '-infinity') < v_oldest
       and coalesce(resumption.resumed_at, '-infinity') < v_oldest
     limit p_limit for update of item skip locked) as stale;
  return coalesce(v_ids, '{}');
end
$$;

COMMENT ON FUNCTION dispatcher.stale_item_ids(p_sweeper dispatcher.claimant, p_limit integer) IS 'Items pending for longer than stale_item_age_hours, locked. The age counts from the creation, the last requeue or the end of its agent''s pause; items of paused or hibernating agents wait.';

CREATE FUNCTION dispatcher.stall_at_end(p_wake public.agent_wakes, p_cause text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.mark_agent_stalled(p_wake.agent_id, p_cause);
  perform dispatcher.settle_constraints('public.agent_wake_state');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_wake.tenant_id, p_wake.gateway_id, 'stall', format('%s (%s)', sqlerrm, sqlstate));
end
$$;

COMMENT ON FUNCTION dispatcher.stall_at_end(p_wake public.agent_wakes, p_cause text) IS 'mark_agent_stalled at the end of a wake, which stands whatever becomes of it: the sweep tries again.';

CREATE FUNCTION dispatcher.stamp_items(p_wake public.agent_wakes, p_started_at timestamp with time zone) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  -- A stamp is not worth a wait, nor the report that brings it: a row that somebody holds, or whose triggers raise,
  -- goes without.
  update dispatcher.agent_inbox_items
     set last_wake_attempt_at = p_wake.claimed_at, last_wake_success_at = coalesce(p_started_at, last_wake_success_at)
   where id in (select item.id from dispatcher.agent_inbox_items as item
                 where item.id = any (p_wake.item_ids)
                   and (item.last_wake_attempt_at is null or item.last_wake_attempt_at < p_wake.claimed_at
                        or (p_started_at is not null and item.last_wake_success_at is null
                        or item.last_wake_success_at < p_wake.claimed_at))
                   for update skip locked);
  perform dispatcher.settle_constraints('public.agent_inbox_items');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_wake.tenant_id, p_wake.gateway_id, 'stamp of items',
      format('%s (%s)', sqlerrm, sqlstate));
end
$$;

COMMENT ON FUNCTION dispatcher.stamp_items(p_wake public.agent_wakes, p_started_at timestamp with time zone) IS 'Stamps the items of a wake: last_wake_attempt_at when it was claimed, last_wake_success_at when its process started (p_started_at; NULL: it did not).';

CREATE FUNCTION dispatcher.start_anew(p_run public.workflow_runs) RETURNS public.workflow_runs
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  perform set_config('dispatcher.override_run', p_run.id::text, true);
  update public.workflow_runs
     set status = 'queued', dispatch_attempts = 0, release_count = 0, queued_at = now(), dispatched_at = null,
         claimed_at = null,
         claimed_by = null, started_at = null, deadline_at = null, last_heartbeat_at = null, next_attempt_at = null,
             claim_token = null,
         session_id = null, wake_id = null, reserved_usd = null, reserved_tokens = null, cost_estimate = null,
             input_tokens = null,
         output_tokens = null, cached_tokens = null, reported_at = null, assumed_usd = null, assumed_tokens = null,
         last_error = null, last_error_at = null
   where id = p_run.id returning * into p_run;
  perform set_config('dispatcher.override_run', '', true);
  delete from public.workflow_respawns where run_id = p_run.id;
  delete from public.workflow_notifications where run_id = p_run.id;
  return p_run;
end
$$;

COMMENT ON FUNCTION dispatcher.start_anew(p_run public.workflow_runs) IS 'Puts a failed run, which the caller has locked, back into the queue as if it were new.';

CREATE FUNCTION dispatcher.start_of_today() RETURNS timestamp with time zone
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  return date_trunc('day', now() at time zone 'UTC') at time zone 'UTC';
end
$$;

COMMENT ON FUNCTION dispatcher.start_of_today() IS 'When the UTC day began.';

CREATE FUNCTION dispatcher.start_wake(p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_wake public.agent_wakes;
begin
  select * into v_wake from public.agent_wakes where id = p_wake_id for update skip locked;
  if v_wake.id is null then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'code',
                              case when exists (select from public.agent_wakes where id = p_wake_id) then 'busy'
                                  else 'not_found' end);
  end if;
  if p_claim_token is null or v_wake.claim_token <> p_claim_token or p_pid is null then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', false, 'code', 'fence_lost');
  end if;
  if v_wake.state <> 'starting' then
    return jsonb_build_object('wake_id', p_wake_id, 'applied', v_wake.state = 'running'
        and v_wake.pid is not distinct from p_pid,
                              'code', case when v_wake.pid is not distinct from p_pid then 'already'
                                  else 'fence_lost' end);
  end if;
  update public.agent_wakes
     set state = 'running', host_id = p_host_id, pid = p_pid, pid_started_at = p_pid_started_at, started_at = now()
   where id = p_wake_id;
  perform dispatcher.must_be_written(found, 'start');
  perform dispatcher.stamp_items(v_wake, now());
  return jsonb_build_object('wake_id', p_wake_id, 'applied', true, 'code', 'ok');
end
$$;

COMMENT ON FUNCTION dispatcher.start_wake(p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) IS 'The process of a claimed wake started: keeps its pid, start time and host, and stamps its items. Needs the claim token.';

CREATE FUNCTION dispatcher.start_workflow_run(p_run public.workflow_runs) RETURNS public.workflow_runs
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  update public.workflow_runs
     set status = case status when 'claimed' then 'running' else status end, last_heartbeat_at = now(),
         started_at = case status when 'claimed' then now() else started_at end
   where id = p_run.id returning * into p_run;
  perform dispatcher.note_work_on_claim(p_run);
  return p_run;
end
$$;

COMMENT ON FUNCTION dispatcher.start_workflow_run(p_run public.workflow_runs) IS 'A sign of life of a held run: claimed becomes running.';

CREATE FUNCTION dispatcher.stop_all(p_runs public.workflow_runs[], p_error text, OUT ids uuid[], OUT errors jsonb) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_run public.workflow_runs;
  v_one record;
begin
  errors := '[]';
  ids := dispatcher.stop_runs(p_runs, p_error);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  ids := '{}';
  foreach v_run in array p_runs loop
    v_one := dispatcher.try_to_stop(v_run, p_error);
    ids := ids || v_one.ids;
    errors := errors || v_one.errors;
  end loop;
end
$$;

COMMENT ON FUNCTION dispatcher.stop_all(p_runs public.workflow_runs[], p_error text, OUT ids uuid[], OUT errors jsonb) IS 'stop_runs in one update; one by one where that raises: then a run that raises is named and hides nobody.';

CREATE FUNCTION dispatcher.stop_chains(p_sweeper dispatcher.claimant, p_item_ids uuid[]) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_reason constant text := format('wake chain limit (%s) reached', dispatcher.wake_chain_limit(p_sweeper.settings));
  v_chain record;
  v_stopped integer;
  v_count integer := 0;
begin
  for v_chain in
    select item.agent_id, array_agg(item.id) as item_ids, max(origin.chain_depth) as depth
      from dispatcher.agent_inbox_items as item join public.inbox_item_origins as origin on origin.item_id = item.id
     where item.id = any (p_item_ids) group by item.agent_id
  loop
    v_stopped := dispatcher.set_items_aside(v_chain.item_ids, 'wake_chain_limit', v_reason);
    if v_stopped > 0 then
      perform dispatcher.tell_chain(p_sweeper, v_chain.agent_id, v_chain.depth, v_chain.item_ids);
    end if;
    v_count := v_count + v_stopped;
  end loop;
  return v_count;
end
$$;

COMMENT ON FUNCTION dispatcher.stop_chains(p_sweeper dispatcher.claimant, p_item_ids uuid[]) IS 'Items at the end of a chain of wakes become dead_letter; one notification per agent and hour. Answers how many did.';

CREATE FUNCTION dispatcher.stop_overspent_runs(p_tick dispatcher.tick, p_limit integer) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_money constant dispatcher.money := dispatcher.read_money(p_tick, 'hard_stop');
  v_budget dispatcher.evaluated_budget;
  v_runs public.workflow_runs[];
  v_reason text;
  v_part record;
  v_seen integer := 0;
  v_stopped integer := 0;
  v_errors jsonb := '[]';
  v_broken constant text := dispatcher.broken_budgets(v_money.budgets);
  v_told text := dispatcher.tell_budget_recoveries(p_tick.tenant_id, v_money.budgets);
begin
  foreach v_budget in array v_money.budgets loop
    continue when v_budget.error is not null or dispatcher.spent_of(v_budget, false) < dispatcher.cap_of(v_budget);
    v_reason := format('Budget hard stop: %s (%s)', v_budget.name, v_budget.period_key);
    perform dispatcher.note_workflow_actor('dispatcher', v_reason);
    v_runs := dispatcher.runs_of_budget(p_tick, v_budget, p_limit - v_seen);
    v_part := dispatcher.stop_all(dispatcher.unlocked_runs(v_runs), v_reason);
    v_told := coalesce(v_told, dispatcher.tell_budget_event(p_tick.tenant_id, v_budget, 'hard_stopped', v_part.ids));
    v_seen := v_seen + cardinality(v_runs);
    v_stopped := v_stopped + cardinality(v_part.ids);
    v_errors := v_errors || v_part.errors;
    exit when v_seen >= p_limit;
  end loop;
  return jsonb_build_object('stopped', v_stopped, 'errors', v_errors, 'again', v_seen >= p_limit and v_stopped > 0,
                            'budget_error', coalesce(v_broken, v_money.error, v_told),
                            'budgets_open', v_money.error is not null or v_broken is not null);
end
$$;

COMMENT ON FUNCTION dispatcher.stop_overspent_runs(p_tick dispatcher.tick, p_limit integer) IS 'Cancels runs in the scope of every spent hard stop, at most p_limit a pass, and writes its one event: {stopped, errors, budget_error, again}.';

CREATE FUNCTION dispatcher.stop_runs(p_runs public.workflow_runs[], p_error text) RETURNS uuid[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_ids uuid[];
begin
  update public.workflow_claims set ended_at = now(), ended_as = 'cancelled'
   where claim_token in (select run.claim_token from unnest(p_runs) as run) and ended_at is null;
  with stopped as (
    update public.workflow_runs set status = 'cancelled', finished_at = now(), last_error = p_error,
        last_error_at = now()
     where id in (select run.id from unnest(p_runs) as run) returning id)
  select coalesce(array_agg(id), '{}') into v_ids from stopped;
  perform dispatcher.drop_notifications(v_ids);
  return v_ids;
end
$$;

COMMENT ON FUNCTION dispatcher.stop_runs(p_runs public.workflow_runs[], p_error text) IS 'Cancels runs that the caller has locked with their claims, in one update; answers their ids.';

CREATE FUNCTION dispatcher.stop_wake_chains(p_sweeper dispatcher.claimant, p_limit integer) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  return dispatcher.in_parts(p_sweeper, 'stop_chains', 'stop of a chain',
      array(select chained.item_id from dispatcher.chained_items(p_sweeper, p_limit) as chained));
end
$$;

COMMENT ON FUNCTION dispatcher.stop_wake_chains(p_sweeper dispatcher.claimant, p_limit integer) IS 'Items whose chain of wakes reached max_wake_chain become dead_letter; one that raises costs no other.';

CREATE FUNCTION dispatcher.stop_workflow_run(p_run public.workflow_runs, p_error text) RETURNS public.workflow_runs
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.end_workflow_claim(p_run, 'cancelled');
  update public.workflow_runs set status = 'cancelled', finished_at = now(), last_error = p_error, last_error_at = now()
   where id = p_run.id returning * into p_run;
  perform dispatcher.drop_notifications(array[p_run.id]);
  return p_run;
end
$$;

COMMENT ON FUNCTION dispatcher.stop_workflow_run(p_run public.workflow_runs, p_error text) IS 'Cancels a run the caller has locked.';

CREATE FUNCTION dispatcher.sweeper(p_instance_id uuid) RETURNS dispatcher.claimant
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
begin
  return row(v_instance.id, v_instance.tenant_id, v_instance.gateway_id,
      dispatcher.settings_of_instance(p_instance_id))::dispatcher.claimant;
end
$$;

COMMENT ON FUNCTION dispatcher.sweeper(p_instance_id uuid) IS 'Who sweeps, with which settings; locks nothing. Raises OD001 for an unknown instance.';

CREATE FUNCTION dispatcher.take_notifications(p_instance public.dispatcher_instances, p_limit integer, p_lease_seconds integer, p_known_agents text[]) RETURNS SETOF public.workflow_notifications
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  update public.workflow_notifications as note
     set state = 'sending', claim_token = gen_random_uuid(),
         claimed_until = now() + make_interval(secs => p_lease_seconds),
         tries = least(note.tries, 1000000) + 1
   where note.id in (
     select due.id from public.workflow_notifications as due
      where due.tenant_id = p_instance.tenant_id and due.state in ('pending', 'sending')
        and dispatcher.is_notification_due(due)
        and (due.gateway_id = p_instance.gateway_id
             -- An agent of nobody's: whoever knows it from openclaw.json, and after a moment whoever comes.
             or (due.gateway_id is null and (due.agent_id = any (p_known_agents)
             or due.created_at < now() - interval '5 seconds')))
      order by due.next_try_at limit p_limit for update skip locked)
  returning note.*
$$;

COMMENT ON FUNCTION dispatcher.take_notifications(p_instance public.dispatcher_instances, p_limit integer, p_lease_seconds integer, p_known_agents text[]) IS 'Leases notifications that are due for the agents of an instance''s gateway. Never waits.';

CREATE FUNCTION dispatcher.take_run(p_run public.workflow_runs, p_session text, p_agent text, p_wake_id uuid) RETURNS public.workflow_runs
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.note_workflow_actor(coalesce(p_agent, p_run.owner_agent_id), null);
  update public.workflow_runs as run
     set status = 'claimed', claimed_at = now(), claimed_by = coalesce(p_agent, run.owner_agent_id),
         session_id = p_session, assumed_usd = null, assumed_tokens = null, reported_at = null,
         cost_estimate = case when run.reported_at is null then run.cost_estimate end,
         claim_token = gen_random_uuid(), last_heartbeat_at = now(), started_at = null, blocker_type = null,
             blocker_description = null,
         deadline_at = dispatcher.deadline_of_run(now(), dispatcher.workflow_timeout_minutes(run.tenant_id,
             run.workflow_type)),
         wake_id = (select wake.id from public.agent_wakes as wake
                     where wake.id = p_wake_id and wake.tenant_id = run.tenant_id
                       and wake.state in ('starting', 'running'))
   where id = p_run.id returning * into p_run;
  insert into public.workflow_claims (claim_token, tenant_id, run_id, workflow_type, agent_id, session_id, attempt,
      wake_id)
  values (p_run.claim_token, p_run.tenant_id, p_run.id, p_run.workflow_type, p_run.owner_agent_id, p_session,
          p_run.dispatch_attempts, p_run.wake_id);
  perform dispatcher.drop_notifications(array[p_run.id]);
  return p_run;
end
$$;

COMMENT ON FUNCTION dispatcher.take_run(p_run public.workflow_runs, p_session text, p_agent text, p_wake_id uuid) IS 'Gives a dispatched run, which the caller has locked, to a session: a new fence, a deadline, a line in the history of claims.';

CREATE FUNCTION dispatcher.target_of(p_run public.workflow_runs, OUT agent_id text, OUT department_id text, OUT gateway_id uuid, OUT is_open boolean) RETURNS record
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select target.agent_id, profile.department_id, dispatcher.gateway_of_workflow_agent(p_run.tenant_id, target.agent_id),
         target.agent_id is not null and target.max_concurrent > 0
    from (select coalesce(p_run.pinned_agent_id, route.agent_id) as agent_id,
        coalesce(route.max_concurrent, 1) as max_concurrent
            from (select 1) as one_row
            left join public.workflow_agent_routing as route on route.tenant_id = p_run.tenant_id
                and route.workflow_type = p_run.workflow_type) as target
    left join public.agent_profiles as profile on profile.tenant_id = p_run.tenant_id
        and profile.agent_id = target.agent_id
$$;

COMMENT ON FUNCTION dispatcher.target_of(p_run public.workflow_runs, OUT agent_id text, OUT department_id text, OUT gateway_id uuid, OUT is_open boolean) IS 'Where a run would go now: its pin or its route''s agent, with department and gateway; is_open: there is one, and the route is not disabled.';

CREATE FUNCTION dispatcher.tell_budget_event(p_tenant_id uuid, p_budget dispatcher.evaluated_budget, p_kind text, p_run_ids uuid[] DEFAULT '{}'::uuid[]) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '100ms'
    AS $$
begin
  perform dispatcher.record_budget_event(p_tenant_id, p_budget, p_kind, p_run_ids);
  return null;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_tenant_id, null, 'event of a budget', format('%s (%s)', sqlerrm, sqlstate));
  return format('%s (%s)', sqlerrm, sqlstate);
end
$$;

COMMENT ON FUNCTION dispatcher.tell_budget_event(p_tenant_id uuid, p_budget dispatcher.evaluated_budget, p_kind text, p_run_ids uuid[]) IS 'Records an event of a budget; the error when it cannot be, because a budget does its work whether or not that can be written down.';

CREATE FUNCTION dispatcher.tell_budget_recoveries(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[]) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_error text;
begin
  select max(dispatcher.tell_budget_event(p_tenant_id, row(b.*)::dispatcher.evaluated_budget, 'recovered')) into v_error
    from unnest(p_budgets) as b
    cross join lateral (
      select max(event.id) filter (where event.event_kind <> 'recovered'
          and event.period_key <> b.period_key) as breach,
             max(event.id) filter (where event.event_kind = 'recovered') as recovery
        from public.budget_events as event where event.budget_id = b.id) as history
   where b.period_key is not null and history.breach > coalesce(history.recovery, 0);
  return v_error;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return format('%s (%s)', sqlerrm, sqlstate);
end
$$;

COMMENT ON FUNCTION dispatcher.tell_budget_recoveries(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[]) IS 'The first evaluation in a new period writes recovered for every budget that had a breach in an earlier one since its last recovery. Answers an error, if one could not be written.';

CREATE FUNCTION dispatcher.tell_chain(p_sweeper dispatcher.claimant, p_agent_id uuid, p_depth integer, p_item_ids uuid[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_slug text;
begin
  -- One alert per agent and hour: a ring that goes on posting must not flood the operator either.
  if (dispatcher.lock_wake_state(p_agent_id, p_sweeper.tenant_id)).agent_id is null then
    return;
  end if;
  update public.agent_wake_state set chain_notified_at = now()
   where agent_id = p_agent_id and (chain_notified_at is null or chain_notified_at < now() - interval '1 hour');
  if found then
    select slug into v_slug from dispatcher.agents where id = p_agent_id;
    perform dispatcher.notify_operator(
      p_sweeper.tenant_id, 'wake_chain_limit', format('Agent %s was stopped in a chain of wakes', v_slug),
      format('Agents woke each other %s times in a row; %s item(s) were set aside. `dispatcher inbox requeue --agent '
             '%s` brings them back.',
             p_depth, cardinality(p_item_ids), v_slug),
      p_agent_id, jsonb_build_object('chain_depth', p_depth, 'item_ids', p_item_ids[1:100]));
  end if;
  perform dispatcher.settle_constraints('public.agent_wake_state');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_sweeper.tenant_id, p_sweeper.gateway_id, 'alert of a chain',
      format('%s (%s)', sqlerrm, sqlstate));
end
$$;

COMMENT ON FUNCTION dispatcher.tell_chain(p_sweeper dispatcher.claimant, p_agent_id uuid, p_depth integer, p_item_ids uuid[]) IS 'One notification per agent and hour of a chain that was stopped. A side write.';

CREATE FUNCTION dispatcher.tell_dead_letters(p_agent_id uuid, p_item_ids uuid[], p_reason text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_agent record;
begin
  if coalesce(cardinality(p_item_ids), 0) = 0 then
    return;
  end if;
  select slug, tenant_id into v_agent from dispatcher.agents where id = p_agent_id;
  perform dispatcher.notify_operator(
    v_agent.tenant_id, 'dead_letter', format('%s item(s) of agent %s were given up', cardinality(p_item_ids),
        v_agent.slug),
    format('Reason: %s. `dispatcher inbox requeue %s` brings back the first of them, `dispatcher inbox requeue --dead '
           '--agent %s` all.',
           p_reason, p_item_ids[1], v_agent.slug),
    p_agent_id, jsonb_build_object('item_ids', p_item_ids[1:100], 'items', cardinality(p_item_ids), 'reason',
        p_reason));
end
$$;

COMMENT ON FUNCTION dispatcher.tell_dead_letters(p_agent_id uuid, p_item_ids uuid[], p_reason text) IS 'One notification for items of an agent that nobody will try again.';

CREATE FUNCTION dispatcher.tell_escalation(p_item_id uuid, p_reason text) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  select dispatcher.notify_operator(
           item.tenant_id, 'agent_escalation',
           format('%s needs help: %s', agent.name, coalesce(nullif(item.summary, ''), task.title,
               item.event_type::text)), p_reason, item.agent_id,
           jsonb_build_object('inbox_item_id', item.id, 'task_id', item.task_id, 'event_type', item.event_type,
               'agent_slug', agent.slug),
           case when task.id is null then 'inbox_item' else 'task' end, coalesce(task.id, item.id))
    from dispatcher.agent_inbox_items as item
    join dispatcher.agents as agent on agent.id = item.agent_id
    left join public.tasks as task on task.id = item.task_id and task.tenant_id = item.tenant_id
   where item.id = p_item_id
$$;

COMMENT ON FUNCTION dispatcher.tell_escalation(p_item_id uuid, p_reason text) IS 'The notification of an escalation; a side write.';

CREATE FUNCTION dispatcher.tell_full_budgets(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[], p_holders uuid[]) RETURNS text
    LANGUAGE sql
    SET search_path TO ''
    AS $$
  select max(dispatcher.tell_budget_event(p_tenant_id, row(b.*)::dispatcher.evaluated_budget,
                                          case b.action when 'warn' then 'warned' else 'paused' end))
    from unnest(p_budgets) as b
   where b.error is null
     and case b.action when 'hard_stop' then b.id = any (p_holders)
     and dispatcher.spent_of(b, false) < dispatcher.cap_of(b)
                       else dispatcher.spent_of(b, true) >= dispatcher.cap_of(b)
                           or (b.action <> 'warn' and b.id = any (p_holders)) end
$$;

COMMENT ON FUNCTION dispatcher.tell_full_budgets(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[], p_holders uuid[]) IS 'One warned or paused event per period for budgets that are full, and for those that hold runs (p_holders) because their rest is too small: also a hard stop that is not spent yet. Answers an error, if one could not be written.';

CREATE FUNCTION dispatcher.tell_of_money(p_tick dispatcher.tick, p_money dispatcher.money, p_holders uuid[]) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_error text := dispatcher.tell_budget_recoveries(p_tick.tenant_id, p_money.budgets);
begin
  return coalesce(v_error, dispatcher.tell_full_budgets(p_tick.tenant_id, p_money.budgets, p_holders));
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return format('%s (%s)', sqlerrm, sqlstate);
end
$$;

COMMENT ON FUNCTION dispatcher.tell_of_money(p_tick dispatcher.tick, p_money dispatcher.money, p_holders uuid[]) IS 'Writes and broadcasts the events of budgets: recoveries first, then those that are full or hold runs. Answers an error, never raises one.';

CREATE FUNCTION dispatcher.tell_often(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_often record;
  v_count integer := 0;
begin
  for v_often in
    select often.* from dispatcher.often_woken_agents(p_sweeper, 500) as often where often.agent_id = any (p_agent_ids)
  loop
    continue when (dispatcher.lock_wake_state(v_often.agent_id, p_sweeper.tenant_id)).agent_id is null;
    update public.agent_wake_state set often_notified_at = now() where agent_id = v_often.agent_id;
    continue when not found;  -- whom nobody keeps, nobody tells of at every look
    perform dispatcher.notify_operator(
      p_sweeper.tenant_id, 'often_woken', format('Agent %s is woken unusually often', v_often.agent_slug),
      format('%s wakes in the last hour (ALERT_WAKES_PER_HOUR is %s). It goes on. `dispatcher inbox list --agent %s` '
             'shows what wakes it; '
             'MAX_WAKES_PER_DAY bounds it, and a paused agent is not woken.',
             v_often.wakes, (p_sweeper.settings).alert_wakes_per_hour, v_often.agent_slug),
      v_often.agent_id, jsonb_build_object('wakes', v_often.wakes, 'alert_wakes_per_hour',
          (p_sweeper.settings).alert_wakes_per_hour));
    v_count := v_count + 1;
  end loop;
  return v_count;
end
$$;

COMMENT ON FUNCTION dispatcher.tell_often(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) IS 'Tells of agents that are woken unusually often, and keeps when. Answers how many.';

CREATE FUNCTION dispatcher.tell_often_woken(p_sweeper dispatcher.claimant, p_limit integer) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  return dispatcher.in_parts(p_sweeper, 'tell_often', 'alert',
      array(select often.agent_id from dispatcher.often_woken_agents(p_sweeper, p_limit) as often));
end
$$;

COMMENT ON FUNCTION dispatcher.tell_often_woken(p_sweeper dispatcher.claimant, p_limit integer) IS 'One notification per agent and hour for agents that are woken unusually often; stops nobody.';

CREATE FUNCTION dispatcher.tenant_of_agent_budgets() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.agent_id is not null and (new.agent_id, new.tenant_id) is distinct from (old.agent_id, old.tenant_id)
     and not exists (select from public.agents as named
                      where named.id = new.agent_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its agent_id % is not of its tenant %', tg_table_name, new.agent_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agents of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_agent_budgets() IS 'Refuses (OD020) a row of agent_budgets that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_agent_inbox_items() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.agent_id is not null and (new.agent_id, new.tenant_id) is distinct from (old.agent_id, old.tenant_id)
     and not exists (select from public.agents as named
                      where named.id = new.agent_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its agent_id % is not of its tenant %', tg_table_name, new.agent_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agents of its own tenant alone.';
  end if;
  if new.task_id is not null and (new.task_id, new.tenant_id) is distinct from (old.task_id, old.tenant_id)
     and not exists (select from public.tasks as named
                      where named.id = new.task_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its task_id % is not of its tenant %', tg_table_name, new.task_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of tasks of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_agent_inbox_items() IS 'Refuses (OD020) a row of agent_inbox_items that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_agent_resumptions() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.agent_id is not null and (new.agent_id, new.tenant_id) is distinct from (old.agent_id, old.tenant_id)
     and not exists (select from public.agents as named
                      where named.id = new.agent_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its agent_id % is not of its tenant %', tg_table_name, new.agent_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agents of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_agent_resumptions() IS 'Refuses (OD020) a row of agent_resumptions that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_agent_usage() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.agent_id is not null and (new.agent_id, new.tenant_id) is distinct from (old.agent_id, old.tenant_id)
     and not exists (select from public.agents as named
                      where named.id = new.agent_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its agent_id % is not of its tenant %', tg_table_name, new.agent_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agents of its own tenant alone.';
  end if;
  if new.gateway_id is not null and (new.gateway_id, new.tenant_id) is distinct from (old.gateway_id, old.tenant_id)
     and not exists (select from public.gateways as named
                      where named.id = new.gateway_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its gateway_id % is not of its tenant %', tg_table_name, new.gateway_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of gateways of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_agent_usage() IS 'Refuses (OD020) a row of agent_usage that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_agent_wake_state() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.agent_id is not null and (new.agent_id, new.tenant_id) is distinct from (old.agent_id, old.tenant_id)
     and not exists (select from public.agents as named
                      where named.id = new.agent_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its agent_id % is not of its tenant %', tg_table_name, new.agent_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agents of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_agent_wake_state() IS 'Refuses (OD020) a row of agent_wake_state that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_agent_wakes() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.agent_id is not null and (new.agent_id, new.tenant_id) is distinct from (old.agent_id, old.tenant_id)
     and not exists (select from public.agents as named
                      where named.id = new.agent_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its agent_id % is not of its tenant %', tg_table_name, new.agent_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agents of its own tenant alone.';
  end if;
  if new.gateway_id is not null and (new.gateway_id, new.tenant_id) is distinct from (old.gateway_id, old.tenant_id)
     and not exists (select from public.gateways as named
                      where named.id = new.gateway_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its gateway_id % is not of its tenant %', tg_table_name, new.gateway_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of gateways of its own tenant alone.';
  end if;
  if new.instance_id is not null and (new.instance_id, new.tenant_id) is distinct from (old.instance_id, old.tenant_id)
     and not exists (select from public.dispatcher_instances as named
                      where named.id = new.instance_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its instance_id % is not of its tenant %', tg_table_name, new.instance_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of dispatcher_instances of its own tenant alone.';
  end if;
  if new.workflow_run_id is not null and (new.workflow_run_id, new.tenant_id) is distinct from (old.workflow_run_id, old.tenant_id)
     and not exists (select from public.workflow_runs as named
                      where named.id = new.workflow_run_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its workflow_run_id % is not of its tenant %', tg_table_name, new.workflow_run_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of workflow_runs of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_agent_wakes() IS 'Refuses (OD020) a row of agent_wakes that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_agents() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.gateway_id is not null and (new.gateway_id, new.tenant_id) is distinct from (old.gateway_id, old.tenant_id)
     and not exists (select from public.gateways as named
                      where named.id = new.gateway_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its gateway_id % is not of its tenant %', tg_table_name, new.gateway_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of gateways of its own tenant alone.';
  end if;
  if new.reports_to_id is not null and (new.reports_to_id, new.tenant_id) is distinct from (old.reports_to_id, old.tenant_id)
     and not exists (select from public.agents as named
                      where named.id = new.reports_to_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its reports_to_id % is not of its tenant %', tg_table_name, new.reports_to_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agents of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_agents() IS 'Refuses (OD020) a row of agents that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_budget_events() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.budget_id is not null and (new.budget_id, new.tenant_id) is distinct from (old.budget_id, old.tenant_id)
     and not exists (select from public.budgets as named
                      where named.id = new.budget_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its budget_id % is not of its tenant %', tg_table_name, new.budget_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of budgets of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_budget_events() IS 'Refuses (OD020) a row of budget_events that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_dispatcher_faults() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.gateway_id is not null and (new.gateway_id, new.tenant_id) is distinct from (old.gateway_id, old.tenant_id)
     and not exists (select from public.gateways as named
                      where named.id = new.gateway_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its gateway_id % is not of its tenant %', tg_table_name, new.gateway_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of gateways of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_dispatcher_faults() IS 'Refuses (OD020) a row of dispatcher_faults that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_dispatcher_gateways() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.gateway_id is not null and (new.gateway_id, new.tenant_id) is distinct from (old.gateway_id, old.tenant_id)
     and not exists (select from public.gateways as named
                      where named.id = new.gateway_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its gateway_id % is not of its tenant %', tg_table_name, new.gateway_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of gateways of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_dispatcher_gateways() IS 'Refuses (OD020) a row of dispatcher_gateways that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_dispatcher_instances() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.gateway_id is not null and (new.gateway_id, new.tenant_id) is distinct from (old.gateway_id, old.tenant_id)
     and not exists (select from public.gateways as named
                      where named.id = new.gateway_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its gateway_id % is not of its tenant %', tg_table_name, new.gateway_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of gateways of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_dispatcher_instances() IS 'Refuses (OD020) a row of dispatcher_instances that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_dispatcher_settings() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.instance_id is not null and (new.instance_id, new.tenant_id) is distinct from (old.instance_id, old.tenant_id)
     and not exists (select from public.dispatcher_instances as named
                      where named.id = new.instance_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its instance_id % is not of its tenant %', tg_table_name, new.instance_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of dispatcher_instances of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_dispatcher_settings() IS 'Refuses (OD020) a row of dispatcher_settings that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_inbox_item_leases() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.item_id is not null and (new.item_id, new.tenant_id) is distinct from (old.item_id, old.tenant_id)
     and not exists (select from public.agent_inbox_items as named
                      where named.id = new.item_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its item_id % is not of its tenant %', tg_table_name, new.item_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agent_inbox_items of its own tenant alone.';
  end if;
  if new.agent_id is not null and (new.agent_id, new.tenant_id) is distinct from (old.agent_id, old.tenant_id)
     and not exists (select from public.agents as named
                      where named.id = new.agent_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its agent_id % is not of its tenant %', tg_table_name, new.agent_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agents of its own tenant alone.';
  end if;
  if new.wake_id is not null and (new.wake_id, new.tenant_id) is distinct from (old.wake_id, old.tenant_id)
     and not exists (select from public.agent_wakes as named
                      where named.id = new.wake_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its wake_id % is not of its tenant %', tg_table_name, new.wake_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agent_wakes of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_inbox_item_leases() IS 'Refuses (OD020) a row of inbox_item_leases that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_inbox_item_marks() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.item_id is not null and (new.item_id, new.tenant_id) is distinct from (old.item_id, old.tenant_id)
     and not exists (select from public.agent_inbox_items as named
                      where named.id = new.item_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its item_id % is not of its tenant %', tg_table_name, new.item_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agent_inbox_items of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_inbox_item_marks() IS 'Refuses (OD020) a row of inbox_item_marks that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_inbox_item_origins() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.item_id is not null and (new.item_id, new.tenant_id) is distinct from (old.item_id, old.tenant_id)
     and not exists (select from public.agent_inbox_items as named
                      where named.id = new.item_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its item_id % is not of its tenant %', tg_table_name, new.item_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agent_inbox_items of its own tenant alone.';
  end if;
  if new.wake_id is not null and (new.wake_id, new.tenant_id) is distinct from (old.wake_id, old.tenant_id)
     and not exists (select from public.agent_wakes as named
                      where named.id = new.wake_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its wake_id % is not of its tenant %', tg_table_name, new.wake_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agent_wakes of its own tenant alone.';
  end if;
  if new.from_agent_id is not null and (new.from_agent_id, new.tenant_id) is distinct from (old.from_agent_id, old.tenant_id)
     and not exists (select from public.agents as named
                      where named.id = new.from_agent_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its from_agent_id % is not of its tenant %', tg_table_name, new.from_agent_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agents of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_inbox_item_origins() IS 'Refuses (OD020) a row of inbox_item_origins that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_notifications() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.actor_agent_id is not null and (new.actor_agent_id, new.tenant_id) is distinct from (old.actor_agent_id, old.tenant_id)
     and not exists (select from public.agents as named
                      where named.id = new.actor_agent_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its actor_agent_id % is not of its tenant %', tg_table_name, new.actor_agent_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agents of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_notifications() IS 'Refuses (OD020) a row of notifications that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_task_relations() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.source_task_id is not null and (new.source_task_id, new.tenant_id) is distinct from (old.source_task_id, old.tenant_id)
     and not exists (select from public.tasks as named
                      where named.id = new.source_task_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its source_task_id % is not of its tenant %', tg_table_name, new.source_task_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of tasks of its own tenant alone.';
  end if;
  if new.target_task_id is not null and (new.target_task_id, new.tenant_id) is distinct from (old.target_task_id, old.tenant_id)
     and not exists (select from public.tasks as named
                      where named.id = new.target_task_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its target_task_id % is not of its tenant %', tg_table_name, new.target_task_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of tasks of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_task_relations() IS 'Refuses (OD020) a row of task_relations that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_tasks() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.parent_id is not null and (new.parent_id, new.tenant_id) is distinct from (old.parent_id, old.tenant_id)
     and not exists (select from public.tasks as named
                      where named.id = new.parent_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its parent_id % is not of its tenant %', tg_table_name, new.parent_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of tasks of its own tenant alone.';
  end if;
  if new.assignee_agent_id is not null and (new.assignee_agent_id, new.tenant_id) is distinct from (old.assignee_agent_id, old.tenant_id)
     and not exists (select from public.agents as named
                      where named.id = new.assignee_agent_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its assignee_agent_id % is not of its tenant %', tg_table_name, new.assignee_agent_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agents of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_tasks() IS 'Refuses (OD020) a row of tasks that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_workflow_approvals() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.run_id is not null and (new.run_id, new.tenant_id) is distinct from (old.run_id, old.tenant_id)
     and not exists (select from public.workflow_runs as named
                      where named.id = new.run_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its run_id % is not of its tenant %', tg_table_name, new.run_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of workflow_runs of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_workflow_approvals() IS 'Refuses (OD020) a row of workflow_approvals that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_workflow_claims() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.run_id is not null and (new.run_id, new.tenant_id) is distinct from (old.run_id, old.tenant_id)
     and not exists (select from public.workflow_runs as named
                      where named.id = new.run_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its run_id % is not of its tenant %', tg_table_name, new.run_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of workflow_runs of its own tenant alone.';
  end if;
  if new.wake_id is not null and (new.wake_id, new.tenant_id) is distinct from (old.wake_id, old.tenant_id)
     and not exists (select from public.agent_wakes as named
                      where named.id = new.wake_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its wake_id % is not of its tenant %', tg_table_name, new.wake_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agent_wakes of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_workflow_claims() IS 'Refuses (OD020) a row of workflow_claims that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_workflow_notifications() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.run_id is not null and (new.run_id, new.tenant_id) is distinct from (old.run_id, old.tenant_id)
     and not exists (select from public.workflow_runs as named
                      where named.id = new.run_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its run_id % is not of its tenant %', tg_table_name, new.run_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of workflow_runs of its own tenant alone.';
  end if;
  if new.gateway_id is not null and (new.gateway_id, new.tenant_id) is distinct from (old.gateway_id, old.tenant_id)
     and not exists (select from public.gateways as named
                      where named.id = new.gateway_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its gateway_id % is not of its tenant %', tg_table_name, new.gateway_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of gateways of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_workflow_notifications() IS 'Refuses (OD020) a row of workflow_notifications that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_workflow_respawns() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.run_id is not null and (new.run_id, new.tenant_id) is distinct from (old.run_id, old.tenant_id)
     and not exists (select from public.workflow_runs as named
                      where named.id = new.run_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its run_id % is not of its tenant %', tg_table_name, new.run_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of workflow_runs of its own tenant alone.';
  end if;
  if new.wake_id is not null and (new.wake_id, new.tenant_id) is distinct from (old.wake_id, old.tenant_id)
     and not exists (select from public.agent_wakes as named
                      where named.id = new.wake_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its wake_id % is not of its tenant %', tg_table_name, new.wake_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agent_wakes of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_workflow_respawns() IS 'Refuses (OD020) a row of workflow_respawns that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_workflow_run_events() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.run_id is not null and (new.run_id, new.tenant_id) is distinct from (old.run_id, old.tenant_id)
     and not exists (select from public.workflow_runs as named
                      where named.id = new.run_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its run_id % is not of its tenant %', tg_table_name, new.run_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of workflow_runs of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_workflow_run_events() IS 'Refuses (OD020) a row of workflow_run_events that names a row of another tenant.';

CREATE FUNCTION dispatcher.tenant_of_workflow_runs() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$begin
  if new.wake_id is not null and (new.wake_id, new.tenant_id) is distinct from (old.wake_id, old.tenant_id)
     and not exists (select from public.agent_wakes as named
                      where named.id = new.wake_id and named.tenant_id = new.tenant_id) then
    raise exception 'row of %: its wake_id % is not of its tenant %', tg_table_name, new.wake_id, new.tenant_id
      using errcode = 'OD020', hint = 'A row may name rows of agent_wakes of its own tenant alone.';
  end if;
  return null;
end$$;

COMMENT ON FUNCTION dispatcher.tenant_of_workflow_runs() IS 'Refuses (OD020) a row of workflow_runs that names a row of another tenant.';

CREATE FUNCTION dispatcher.tick_of(p_instance_id uuid) RETURNS dispatcher.tick
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
begin
  return row(v_instance.id, v_instance.tenant_id, v_instance.gateway_id,
      dispatcher.settings_of_instance(p_instance_id))::dispatcher.tick;
end
$$;

COMMENT ON FUNCTION dispatcher.tick_of(p_instance_id uuid) IS 'Who ticks, with which settings; locks nothing. Raises OD001 for an unknown instance.';

CREATE FUNCTION dispatcher.tight_budgets(p_budgets dispatcher.evaluated_budget[], p_estimates jsonb, p_runs integer) RETURNS dispatcher.evaluated_budget[]
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select coalesce(array_agg(row(b.*)::dispatcher.evaluated_budget order by b.scope, b.scope_id, b.period, b.id), '{}')
    from unnest(p_budgets) as b
    cross join (select coalesce(max((estimate.value ->> 'usd')::numeric), 0) as usd,
                       coalesce(max((estimate.value ->> 'tokens')::numeric), 0) as tokens
                  from jsonb_each(p_estimates) as estimate) as dearest
   where b.error is not null
      or b.settled_usd + b.reserved_usd + p_runs * dearest.usd >= b.cap_usd
      or b.settled_tokens + b.reserved_tokens + p_runs * dearest.tokens >= b.cap_tokens
$$;

COMMENT ON FUNCTION dispatcher.tight_budgets(p_budgets dispatcher.evaluated_budget[], p_estimates jsonb, p_runs integer) IS 'The evaluated budgets that so many runs of the dearest kind could fill: no other can have a say in a pass.';

CREATE FUNCTION dispatcher.time_out_run(p_run public.workflow_runs) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.note_workflow_actor('dispatcher', 'over its deadline');
  perform dispatcher.end_workflow_claim(p_run, 'timed_out');
  update public.workflow_runs
     set status = 'timed_out', finished_at = now(), last_error_at = now(),
         last_error = format('Run exceeded timeout of %s minutes',
             dispatcher.workflow_timeout_minutes(p_run.tenant_id, p_run.workflow_type))
   where id = p_run.id;
end
$$;

COMMENT ON FUNCTION dispatcher.time_out_run(p_run public.workflow_runs) IS 'A run over its deadline becomes timed_out. The caller has locked it and its claim.';

CREATE FUNCTION dispatcher.time_out_runs(p_tick dispatcher.tick, p_limit integer) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_runs constant public.workflow_runs[] := array(select row(run.*)::public.workflow_runs
      from dispatcher.runs_over_deadline(p_tick, p_limit) as run);
  v_run public.workflow_runs;
  v_count integer := 0;
  v_errors jsonb := '[]';
begin
  foreach v_run in array dispatcher.unlocked_runs(v_runs) loop
    begin
      perform dispatcher.time_out_run(v_run);
      v_count := v_count + 1;
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      v_errors := v_errors || dispatcher.row_error('timed_out', v_run.id, sqlerrm, sqlstate);
    end;
  end loop;
  return jsonb_build_object('timed_out', v_count, 'errors', v_errors, 'again', cardinality(v_runs) >= p_limit
      and v_count > 0);
end
$$;

COMMENT ON FUNCTION dispatcher.time_out_runs(p_tick dispatcher.tick, p_limit integer) IS 'Claimed and running runs over their deadline become timed_out; the process one of our daemons has for them is asked to end. {timed_out, errors, again}.';

CREATE FUNCTION dispatcher.try_dispatch(p_run dispatcher.run_choice) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.dispatch_runs(array[p_run]);
  return '[]';
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return dispatcher.row_error('dispatched', p_run.run_id, sqlerrm, sqlstate);
end
$$;

COMMENT ON FUNCTION dispatcher.try_dispatch(p_run dispatcher.run_choice) IS 'Hands out one run; what that raises, as a list of errors.';

CREATE FUNCTION dispatcher.try_to_stop(p_run public.workflow_runs, p_error text, OUT ids uuid[], OUT errors jsonb) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  errors := '[]';
  ids := dispatcher.stop_runs(array[p_run], p_error);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  ids := '{}';
  errors := dispatcher.row_error('stopped', p_run.id, sqlerrm, sqlstate);
end
$$;

COMMENT ON FUNCTION dispatcher.try_to_stop(p_run public.workflow_runs, p_error text, OUT ids uuid[], OUT errors jsonb) IS 'Cancels one run; what that raises, as a list of errors.';

CREATE FUNCTION dispatcher.typed_settings(p_settings jsonb) RETURNS public.dispatcher_settings
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_settings public.dispatcher_settings;
begin
  v_settings.wake_cooldown := dispatcher.setting(p_settings, 'wake_cooldown', 30, 0, 86400 * 7);
  v_settings.max_wake_cooldown := dispatcher.setting(p_settings, 'max_wake_cooldown', 900, 0, 86400 * 7);
  v_settings.max_consecutive_failures := dispatcher.setting(p_settings, 'max_consecutive_failures', 5, 1, 1000000);
  v_settings.max_concurrent_wakes := dispatcher.setting(p_settings, 'max_concurrent_wakes', 2, 1, 10000);
  v_settings.agent_process_timeout := dispatcher.setting(p_settings, 'agent_process_timeout', 300, 0.1, 86400 * 7);
  v_settings.stale_item_age_hours := dispatcher.setting(p_settings, 'stale_item_age_hours', 24, 0, 24 * 36500);
  v_settings.lease_seconds := dispatcher.setting(p_settings, 'lease_seconds', 120, 1, 86400);
  v_settings.max_wake_chain := dispatcher.setting(p_settings, 'max_wake_chain', 6, 0, 1000000);
  v_settings.max_wakes_per_day := dispatcher.setting(p_settings, 'max_wakes_per_day', 0, 0, 100000000);
  v_settings.alert_wakes_per_hour := dispatcher.setting(p_settings, 'alert_wakes_per_hour', 60, 0, 100000000);
  v_settings.instance_timeout := dispatcher.setting(p_settings, 'instance_timeout', 45, 0.1, 86400);
  v_settings.workflow_batch_size := dispatcher.setting(p_settings, 'workflow_batch_size', 10, 1, 500);
  v_settings.stale_dispatch_seconds := dispatcher.setting(p_settings, 'stale_dispatch_seconds', 300, 0, 86400 * 365);
  v_settings.max_dispatch_retries := dispatcher.setting(p_settings, 'max_dispatch_retries', 3, 0, 1000000);
  v_settings.stale_claim_seconds := dispatcher.setting(p_settings, 'stale_claim_seconds', 600, 0, 86400 * 365);
  v_settings.workflow_cost_estimate_usd := dispatcher.setting(p_settings, 'workflow_cost_estimate_usd', 0.10, 0,
      999999);
  v_settings.workflow_token_estimate := dispatcher.setting(p_settings, 'workflow_token_estimate', 20000, 0, 1e15);
  return v_settings;
end
$$;

COMMENT ON FUNCTION dispatcher.typed_settings(p_settings jsonb) IS 'Settings as a daemon sends them, as one typed row: every value within its bounds, defaults for what is missing. instance_id and tenant_id are NULL.';

CREATE FUNCTION dispatcher.unheld_groups(p_groups dispatcher.waiting_group[], p_tenant_id uuid, p_types text[], p_gateways uuid[]) RETURNS dispatcher.waiting_group[]
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(array_agg(row(g.*)::dispatcher.waiting_group), '{}') from unnest(p_groups) as g
   where (g.workflow_type = any (p_types)
          or not exists (select from public.workflow_agent_routing as route
                          where route.tenant_id = p_tenant_id and route.workflow_type = g.workflow_type))
     and (g.gateway_id is null or g.gateway_id = any (p_gateways))
$$;

COMMENT ON FUNCTION dispatcher.unheld_groups(p_groups dispatcher.waiting_group[], p_tenant_id uuid, p_types text[], p_gateways uuid[]) IS 'The groups of which nobody else holds the route or the gateway.';

CREATE FUNCTION dispatcher.unknown_agent(p_gateway_id uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select jsonb_build_object('code', 'unknown_agent', 'known',
           coalesce((select jsonb_agg(slug order by slug) from dispatcher.agents
               where gateway_id = p_gateway_id), '[]'))
$$;

COMMENT ON FUNCTION dispatcher.unknown_agent(p_gateway_id uuid) IS 'The answer to an agent the gateway does not have: {code: unknown_agent, known: slugs}.';

CREATE FUNCTION dispatcher.unknown_gateway(p_tenant_id uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select jsonb_build_object('code', 'unknown_gateway', 'known',
           coalesce((select jsonb_agg(slug order by slug) from public.gateways where tenant_id = p_tenant_id), '[]'))
$$;

COMMENT ON FUNCTION dispatcher.unknown_gateway(p_tenant_id uuid) IS 'The answer to a gateway nobody knows: {code: unknown_gateway, known: slugs}.';

CREATE FUNCTION dispatcher.unlocked_runs(p_runs public.workflow_runs[]) RETURNS public.workflow_runs[]
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_locked constant uuid[] := array(
    select claim.claim_token from public.workflow_claims as claim
     where claim.claim_token in (select run.claim_token from unnest(p_runs) as run) for update skip locked);
begin
  return array(
    select row(run.*)::public.workflow_runs from unnest(p_runs) as run
     where run.claim_token is null or run.claim_token = any (v_locked)
        or not exists (select from public.workflow_claims as claim where claim.claim_token = run.claim_token));
end
$$;

COMMENT ON FUNCTION dispatcher.unlocked_runs(p_runs public.workflow_runs[]) IS 'Of runs the caller has locked, those whose claims it could lock as well. The others wait for the next pass.';

CREATE FUNCTION dispatcher.unrouted_types(p_tenant_id uuid) RETURNS TABLE(workflow_type text)
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select queued.workflow_type from dispatcher.queued_types(p_tenant_id) as queued
   where not exists (select from public.workflow_agent_routing as route
                      where route.tenant_id = p_tenant_id and route.workflow_type = queued.workflow_type)
$$;

COMMENT ON FUNCTION dispatcher.unrouted_types(p_tenant_id uuid) IS 'Types with queued runs and without a route.';

CREATE FUNCTION dispatcher.unspent_budgets(p_tenant_id uuid, p_action text, p_now timestamp with time zone) RETURNS dispatcher.evaluated_budget[]
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(array_agg(row(
           budget.id, budget.name, budget.scope, budget.scope_id, budget.period, running.period_key, running.starts_at,
               running.ends_at,
           budget.action_on_exceed, budget.fail_closed, budget.cap_usd, budget.cap_tokens, 0, 0, 0, 0, running.error,
               budget.revision
         )::dispatcher.evaluated_budget order by budget.scope, budget.scope_id, budget.period, budget.id), '{}')
    from public.budgets as budget
    left join dispatcher.budget_periods(p_tenant_id, p_now) as running on running.period = budget.period
        and running.timezone = budget.timezone
   where budget.tenant_id = p_tenant_id and budget.active and (p_action is null or budget.action_on_exceed = p_action)
$$;

COMMENT ON FUNCTION dispatcher.unspent_budgets(p_tenant_id uuid, p_action text, p_now timestamp with time zone) IS 'The tenant''s active budgets (of one action, or all) with their running periods, as if nothing were spent.';

CREATE FUNCTION dispatcher.wait_after_end(p_wake public.agent_wakes, p_since timestamp with time zone, p_oldest timestamp with time zone) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  perform dispatcher.join_waitlist(p_wake.agent_id, 'waitlist', p_since, p_oldest);
  perform dispatcher.settle_constraints('public.agent_wake_state');
  return true;
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform dispatcher.note_fault(p_wake.tenant_id, p_wake.gateway_id, 'waitlist', format('%s (%s)', sqlerrm, sqlstate));
  return false;
end
$$;

COMMENT ON FUNCTION dispatcher.wait_after_end(p_wake public.agent_wakes, p_since timestamp with time zone, p_oldest timestamp with time zone) IS 'join_waitlist at the end of a wake, which stands whatever becomes of it. False when it raised, which is noted.';

CREATE FUNCTION dispatcher.wait_for_gateway(p_instance_id uuid) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_ends_at constant timestamptz := clock_timestamp() + interval '1 second';
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
begin
  loop
    begin
      -- lock_timeout bounds one wait, and each row may cost two: short ones keep the sum near its bound.
      perform set_config('lock_timeout', '100ms', true);
      perform from public.dispatcher_gateways as lock, public.dispatcher_instances as instance,
          public.gateways as gateway, public.tenants as tenant
        where lock.gateway_id = v_instance.gateway_id and instance.id = p_instance_id
          and gateway.id = v_instance.gateway_id and tenant.id = v_instance.tenant_id
          for update of lock for key share of instance, gateway, tenant;
      return;
    exception when lock_not_available then
      exit when clock_timestamp() >= v_ends_at;
    end;
  end loop;
  raise exception '%', coalesce(
    (select string_agg(held.value ->> 'text', '; ')
       from jsonb_array_elements(dispatcher.held_tables()
                                 || dispatcher.held_rows(v_instance.tenant_id, v_instance.gateway_id)) as held),
    'the rows of the gateway are asked for by too many at once') using errcode = '55P03';
end
$$;

COMMENT ON FUNCTION dispatcher.wait_for_gateway(p_instance_id uuid) IS 'Waits for the rows that lock_gateway needs, a second for all of them together; then raises 55P03 with the rows that are held and who holds them.';

CREATE FUNCTION dispatcher.wait_for_next_wake(p_wake public.agent_wakes, p_settings public.dispatcher_settings, p_state text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_facts dispatcher.gate_facts := dispatcher.read_gate_facts(p_wake.agent_id, p_settings);
  v_gates record;
  v_is_listed boolean;
begin
  v_gates := dispatcher.wake_gates(v_facts, p_settings);
  if v_facts.agent_id is null then
    return jsonb_build_object('next', 'no_actionable_work', 'retry_in', null);
  end if;
  if cardinality(v_gates.blocked) > 0 then
    return jsonb_build_object('next', v_gates.blocked[1], 'retry_in', dispatcher.seconds_until(v_gates.retry_at));
  end if;
  -- One whose wake came to nothing keeps its place.
  v_is_listed := dispatcher.wait_after_end(
    p_wake, case when p_state in ('interrupted', 'lost') then p_wake.claimed_at else now() end, v_facts.oldest_due);
  return jsonb_build_object('next', 'waitlisted', 'retry_in', case when not v_is_listed then 60 end);
end
$$;

COMMENT ON FUNCTION dispatcher.wait_for_next_wake(p_wake public.agent_wakes, p_settings public.dispatcher_settings, p_state text) IS 'After a wake that ended in p_state: puts an agent with work left on the waitlist, or says when it may be looked at again. The caller holds its wake state.';

CREATE FUNCTION dispatcher.waiting_groups(p_tenant_id uuid, p_estimates jsonb, p_budgets dispatcher.evaluated_budget[]) RETURNS dispatcher.waiting_group[]
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(array_agg(row(
           waiting.workflow_type, waiting.pinned_agent_id, waiting.agent_id, waiting.department_id, waiting.gateway_id,
               waiting.is_open,
           waiting.due, waiting.oldest, waiting.priorities, waiting.route_priority, waiting.slots, waiting.usd,
               waiting.tokens,
           gate.verdict, gate.holders, gate.reason)::dispatcher.waiting_group), '{}')
    from (
      select queued.*, coalesce(queued.pinned_agent_id, route.agent_id) as agent_id, profile.department_id,
             case when agent.id is not null then agent.gateway_id else only_one.gateway_id end as gateway_id,
             coalesce(queued.pinned_agent_id, route.agent_id) is not null
                 and coalesce(route.max_concurrent, 1) > 0 as is_open,
             coalesce(route.priority, 0) as route_priority,
                 coalesce(route.max_concurrent, 1) - coalesce(active.number, 0) as slots,
             dispatcher.workflow_estimate(p_estimates, queued.workflow_type, 'usd') as usd,
             dispatcher.workflow_estimate(p_estimates, queued.workflow_type, 'tokens') as tokens
        from dispatcher.due_queue(p_tenant_id) as queued
        left join public.workflow_agent_routing as route on route.tenant_id = p_tenant_id
            and route.workflow_type = queued.workflow_type
        left join public.agent_profiles as profile
          on profile.tenant_id = p_tenant_id and profile.agent_id = coalesce(queued.pinned_agent_id, route.agent_id)
        left join dispatcher.agents as agent on agent.tenant_id = p_tenant_id
            and agent.slug = coalesce(queued.pinned_agent_id, route.agent_id)
        cross join (select case when count(*) = 1 then (array_agg(id))[1] end as gateway_id
                      from public.gateways where tenant_id = p_tenant_id) as only_one
        left join dispatcher.active_runs(p_tenant_id) as active
          on active.workflow_type = queued.workflow_type) as waiting
    cross join lateral dispatcher.budget_verdict(
      p_budgets, waiting.agent_id, waiting.department_id, waiting.workflow_type, waiting.usd, waiting.tokens) as gate
$$;

COMMENT ON FUNCTION dispatcher.waiting_groups(p_tenant_id uuid, p_estimates jsonb, p_budgets dispatcher.evaluated_budget[]) IS 'The due queue by type and agent, each group with its free slots, its estimate and its budgets'' verdict: all runs of a group are equal before both.';

CREATE FUNCTION dispatcher.wake_blockers(p_item_id uuid) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  return (
    select jsonb_agg(blocker.title order by blocker.created_at, blocker.title)
      from (select left(target.title, 500) as title, relation.created_at
              from dispatcher.agent_inbox_items as item
              join public.task_relations as relation on relation.source_task_id = item.task_id
                  and relation.tenant_id = item.tenant_id and relation.relation_type = 'blocked_by'
              join public.tasks as target on target.id = relation.target_task_id and target.tenant_id = item.tenant_id
             where item.id = p_item_id and item.event_type = 'task_assignment'
               and target.status not in ('done', 'cancelled') and target.archived_at is null
             order by relation.created_at limit 100) as blocker);
end
$$;

COMMENT ON FUNCTION dispatcher.wake_blockers(p_item_id uuid) IS 'Titles of the unresolved tasks, at most 100, that block the task of a task_assignment item; NULL when there are none.';

CREATE FUNCTION dispatcher.wake_chain_limit(p_settings public.dispatcher_settings) RETURNS integer
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO ''
    AS $$
begin
  return coalesce(nullif(p_settings.max_wake_chain, 0), 2147483647);
end
$$;

COMMENT ON FUNCTION dispatcher.wake_chain_limit(p_settings public.dispatcher_settings) IS 'From which chain depth on an item wakes nobody; max_wake_chain = 0 means never.';

CREATE FUNCTION dispatcher.wake_cooldown(p_failures integer, p_settings public.dispatcher_settings) RETURNS interval
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO ''
    AS $$
begin
  return make_interval(secs => least(p_settings.max_wake_cooldown,
      p_settings.wake_cooldown * power(2, least(p_failures, 30))));
end
$$;

COMMENT ON FUNCTION dispatcher.wake_cooldown(p_failures integer, p_settings public.dispatcher_settings) IS 'The effective cooldown: wake_cooldown doubled per failure in a row, at most max_wake_cooldown.';

CREATE FUNCTION dispatcher.wake_end_state(p_wake public.agent_wakes, p_ending text, p_exit_code integer) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  return (
    select case
    when p_ending in ('timed_out', 'interrupted', 'lost', 'spawn_failed') then p_ending
    when p_ending in ('item_refused', 'agent_refused') then 'spawn_failed'
    when p_ending = 'exited' and p_exit_code <> 0 then 'failed'
    when dispatcher.wake_has_progress(p_wake) then 'succeeded'
    else 'no_progress' end
  );
end
$$;

COMMENT ON FUNCTION dispatcher.wake_end_state(p_wake public.agent_wakes, p_ending text, p_exit_code integer) IS 'The state a wake ends in. Exit 0 without progress is no_progress; an unknown exit code (adopted child) is judged by progress alone.';

CREATE FUNCTION dispatcher.wake_gates(p_facts dispatcher.gate_facts, p_settings public.dispatcher_settings, p_all boolean DEFAULT false, OUT blocked text[], OUT retry_at timestamp with time zone) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_cooldown_ends constant timestamptz := p_facts.cooldown_from + dispatcher.wake_cooldown(p_facts.failures,
      p_settings);
begin
  blocked := '{}';
  if p_facts.failures >= p_settings.max_consecutive_failures then
    blocked := blocked || 'stalled'::text;
    if not p_all then return; end if;
  end if;
  if p_facts.is_live then
    blocked := blocked || 'wake_in_flight'::text;
    if not p_all then return; end if;
  end if;
  if p_facts.agent_status in ('paused', 'hibernating') then
    blocked := blocked || 'agent_paused'::text;
    if not p_all then return; end if;
  end if;
  if p_facts.leased_until is not null then
    blocked := blocked || 'active_lease'::text;
    retry_at := p_facts.leased_until;
    if not p_all then return; end if;
  end if;
  if p_facts.budget_blocks then
    blocked := blocked || 'budget_exceeded'::text;
    if not p_all then return; end if;
  end if;
  if cardinality(p_facts.due_item_ids) = 0 then
    retry_at := coalesce(p_facts.next_due, retry_at);
    blocked := blocked || case when p_facts.next_due is null and p_facts.is_at_chain_limit then 'chain_limit'
        else 'no_actionable_work' end;
    if not p_all then return; end if;
  end if;
  if p_settings.max_wakes_per_day > 0 and p_facts.wakes_today >= p_settings.max_wakes_per_day then
    blocked := blocked || 'daily_limit'::text;
    retry_at := dispatcher.start_of_today() + interval '1 day';
    if not p_all then return; end if;
  end if;
  if v_cooldown_ends > now() then
    blocked := blocked || format('cooldown(%ss)', ceil(extract(epoch from v_cooldown_ends - now())));
    retry_at := v_cooldown_ends;
  end if;
end
$$;

COMMENT ON FUNCTION dispatcher.wake_gates(p_facts dispatcher.gate_facts, p_settings public.dispatcher_settings, p_all boolean, OUT blocked text[], OUT retry_at timestamp with time zone) IS 'The gates of one agent in their order (all but the cap): blocked = the reasons that refuse a wake, the first one unless p_all; retry_at = when waiting alone would open it.';

CREATE FUNCTION dispatcher.wake_grant(p_wake public.agent_wakes) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
declare
  v_grant jsonb;
  v_blockers jsonb;
begin
  select jsonb_build_object(
           'granted', true, 'wake_id', p_wake.id, 'claim_token', p_wake.claim_token, 'agent_id', agent.id,
               'agent_slug', agent.slug,
           'workspace_slug', (select workspace.slug from public.workspace where workspace.tenant_id = agent.tenant_id
               limit 1),
           'path', p_wake.path, 'item_ids', to_jsonb(p_wake.item_ids), 'chain_depth', p_wake.chain_depth,
           'event_type', item.event_type, 'summary', left(item.summary, 2000), 'item_created_at',
               case when item.created_at between '1970-01-01Z' and now() + interval '1 day' then item.created_at end,
           'model_override', dispatcher.bounded_value(item.context -> 'model_override'),
           'thinking_override', dispatcher.bounded_value(item.context -> 'thinking_override'),
           'blockers', '[]'::jsonb, 'blockers_error', null)
    into v_grant
    from public.agents as agent
    left join public.agent_inbox_items as item
      on item.id = p_wake.item_ids[1] and item.agent_id = agent.id and item.tenant_id = agent.tenant_id
   where agent.id = p_wake.agent_id and agent.tenant_id = p_wake.tenant_id;
  if v_grant ->> 'event_type' = 'task_assignment' then
    begin
      v_blockers := dispatcher.wake_blockers(p_wake.item_ids[1]);
      v_grant := v_grant || jsonb_build_object('blockers', coalesce(v_blockers, '[]'));
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      v_grant := v_grant || jsonb_build_object('blockers_error', sqlerrm);
    end;
  end if;
  return v_grant;
end
$$;

COMMENT ON FUNCTION dispatcher.wake_grant(p_wake public.agent_wakes) IS 'Everything a spawn needs, as the answer to a granted claim.';

CREATE FUNCTION dispatcher.wake_has_progress(p_wake public.agent_wakes) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  return (
    -- What its own agent did: it closed what it had leased in this wake by our functions, or by YourHQ's, which know no
    -- leases of ours,
    select exists (select from public.inbox_item_leases as lease
                    where lease.wake_id = p_wake.id and lease.outcome in ('done', 'failed', 'dead_letter', 'escalated'))
      or exists (select from dispatcher.agent_inbox_items as item
                  where item.agent_id = p_wake.agent_id and item.tenant_id = p_wake.tenant_id and item.status = 'done'
                    and item.completed_at between p_wake.claimed_at and clock_timestamp()
                    and not exists (select from public.inbox_item_marks as mark
                                     where mark.item_id = item.id and mark.closed_by_user_at >= p_wake.claimed_at))
      or exists (select from dispatcher.agent_inbox_items as item
                  where item.agent_id = p_wake.agent_id and item.tenant_id = p_wake.tenant_id
                    and item.status in ('failed', 'dead_letter')
                    and item.failed_at between p_wake.claimed_at and clock_timestamp()
                    and item.leased_at between p_wake.claimed_at and item.failed_at)
      -- or worked on a run,
      or dispatcher.wake_worked_on_a_run(p_wake.id)
      -- or there was nothing left to do: what it holds and did not close is left.
      or not exists (select from dispatcher.agent_inbox_items as item
                      where item.agent_id = p_wake.agent_id and item.tenant_id = p_wake.tenant_id
                        and (item.status = 'leased' or (item.status in ('pending', 'failed')
                        and item.attempt_count < item.max_attempts)))
  );
end
$$;

COMMENT ON FUNCTION dispatcher.wake_has_progress(p_wake public.agent_wakes) IS 'Whether the agent itself finished an item or worked on a run in this wake, or nothing is left to do. What others closed meanwhile does not count.';

CREATE FUNCTION dispatcher.wake_to_lease_in(p_agent_id uuid, p_wake_id uuid, OUT wake_id uuid, OUT is_over boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  -- Held until the lease is written: a wake that ends now ends before or after it, and then gives the items back.
  select wake.id into wake_id from public.agent_wakes as wake
   where wake.agent_id = p_agent_id and wake.state in ('starting', 'running')
     for key share;
  is_over := coalesce(wake_id <> p_wake_id, false);
end
$$;

COMMENT ON FUNCTION dispatcher.wake_to_lease_in(p_agent_id uuid, p_wake_id uuid, OUT wake_id uuid, OUT is_over boolean) IS 'The agent''s live wake, locked, in which it leases (NULL: outside a wake). is_over: the caller belongs to p_wake_id, and another wake lives by now.';

CREATE FUNCTION dispatcher.wake_worked_on_a_run(p_wake_id uuid) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$ select exists (select from public.workflow_claims as claim where claim.wake_id = p_wake_id
    and claim.worked_at is not null) $$;

COMMENT ON FUNCTION dispatcher.wake_worked_on_a_run(p_wake_id uuid) IS 'Whether a run that was claimed in a wake showed a sign of life: work on a run is progress.';

CREATE FUNCTION dispatcher.wakes_to_stop(p_instance_id uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(jsonb_agg(jsonb_build_object('wake_id', taken.wake_id, 'cause', taken.cause) order by taken.wake_id),
      '[]')
    from (select wake_id, min(cause) as cause from dispatcher.taken_wakes
           where gateway_id = (select gateway_id from public.dispatcher_instances where id = p_instance_id)
             and instance_id = p_instance_id
           group by wake_id) as taken
$$;

COMMENT ON FUNCTION dispatcher.wakes_to_stop(p_instance_id uuid) IS 'Live wakes of an instance whose run was ended from outside: their processes are to be stopped.';

CREATE FUNCTION dispatcher.wakes_without_owner(p_instance public.dispatcher_instances) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(jsonb_agg(wake.id), '[]') from public.agent_wakes as wake
    left join public.dispatcher_instances as owner on owner.id = wake.instance_id
   where wake.gateway_id = p_instance.gateway_id and wake.state in ('starting', 'running')
     and wake.instance_id is distinct from p_instance.id
     and (owner.id is null or owner.state <> 'running' or dispatcher.is_instance_silent(owner))
$$;

COMMENT ON FUNCTION dispatcher.wakes_without_owner(p_instance public.dispatcher_instances) IS 'Live wakes of the instance''s gateway whose own instance is gone, stopped or silent: nobody watches their time, so whoever hears of them sweeps.';

CREATE FUNCTION dispatcher.warm_backend() RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_nobody dispatcher.claimant;
  v_facts dispatcher.gate_facts;
begin
  if current_setting('dispatcher.is_warm', true) = 'on' then
    return;
  end if;
  -- A pool's connection that never claimed pays for it at its first claim: every table looked up, every statement
  -- planned.
  -- So whoever is in no hurry makes one here, for nobody: no row is found, locked or written.
  v_nobody.settings := dispatcher.typed_settings('{}');
  perform dispatcher.contained_claim(v_nobody, '{"agent_id": "00000000-0000-0000-0000-000000000000"}', null);
  perform dispatcher.lock_wake_state(null, null);
  v_facts := dispatcher.read_gate_facts(null, v_nobody.settings, array['00000000-0000-0000-0000-000000000000'::uuid],
                                        '00000000-0000-0000-0000-000000000000');
  v_facts.due_item_ids := '{}';
  v_facts.hinted_item_ids := '{}';
  perform dispatcher.wake_gates(v_facts, v_nobody.settings, true);
  perform dispatcher.wake_grant(dispatcher.write_wake(v_nobody, v_facts, 'event', null));
  begin
    perform public.claim_wakes('00000000-0000-0000-0000-000000000000', '[]', null);
  exception when sqlstate 'OD001' then
    null;
  end;
  perform dispatcher.warm_insert();
  perform set_config('dispatcher.is_warm', 'on', false);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  perform set_config('dispatcher.is_warm', 'on', false);
  raise warning 'a backend could not be warmed: % (%)', sqlerrm, sqlstate;
end
$$;

COMMENT ON FUNCTION dispatcher.warm_backend() IS 'Walks the way of a claim once per connection, for nobody, so that the first real claim on it is as quick as later ones. Called by the functions nobody waits for; changes nothing.';

CREATE FUNCTION dispatcher.warm_insert() RETURNS void
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  -- The checks of a wake's foreign keys are planned at the first insert. This one is undone at once.
  insert into public.agent_wakes (tenant_id, agent_id, gateway_id, instance_id, path, state, ended_at, deadline_at)
  select agent.tenant_id, agent.id, agent.gateway_id, instance.id, 'event', 'spawn_failed', now(), now()
    from public.dispatcher_instances as instance
    join dispatcher.agents as agent on agent.gateway_id = instance.gateway_id and agent.tenant_id = instance.tenant_id
    join public.gateways as gateway on gateway.id = instance.gateway_id
    join public.tenants as tenant on tenant.id = instance.tenant_id
   limit 1 for key share of agent, instance, gateway, tenant skip locked;
  raise exception 'undone' using errcode = 'OD003';
exception when sqlstate 'OD003' then
  null;
end
$$;

COMMENT ON FUNCTION dispatcher.warm_insert() IS 'Has the foreign keys of agent_wakes checked once, and undoes it.';

CREATE FUNCTION dispatcher.with_error(p_budgets dispatcher.evaluated_budget[], p_error text) RETURNS dispatcher.evaluated_budget[]
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO ''
    AS $$
begin
  for v_place in 1 .. cardinality(p_budgets) loop
    p_budgets[v_place].error := coalesce(p_budgets[v_place].error, p_error);
  end loop;
  return p_budgets;
end
$$;

COMMENT ON FUNCTION dispatcher.with_error(p_budgets dispatcher.evaluated_budget[], p_error text) IS 'Budgets that cannot be evaluated, each with the error: those that are fail_closed hold.';

CREATE FUNCTION dispatcher.with_estimates(p_run public.workflow_runs) RETURNS public.workflow_runs
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_estimate record;
begin
  -- Unknown is never free, also for a row that somebody put in by hand.
  if coalesce(p_run.paused_from, p_run.status) in ('dispatched', 'claimed', 'running')
     and num_nonnulls(p_run.reserved_usd, p_run.reserved_tokens) < 2 then
    v_estimate := dispatcher.estimate_of_type(p_run.tenant_id, p_run.workflow_type);
    p_run.reserved_usd := coalesce(p_run.reserved_usd, v_estimate.usd);
    p_run.reserved_tokens := coalesce(p_run.reserved_tokens, v_estimate.tokens);
  elsif p_run.finished_at is not null and p_run.claimed_at is not null
     and (coalesce(dispatcher.known_cost(p_run.cost_estimate), p_run.assumed_usd) is null
          or coalesce(dispatcher.known_tokens(p_run.input_tokens, p_run.output_tokens), p_run.assumed_tokens) is null)
  then
    v_estimate := dispatcher.configured_estimates(p_run.tenant_id);
    p_run.assumed_usd := greatest(dispatcher.known_cost(p_run.reserved_usd), v_estimate.usd);
    p_run.assumed_tokens := greatest(p_run.reserved_tokens, v_estimate.tokens);
  end if;
  return p_run;
end
$$;

COMMENT ON FUNCTION dispatcher.with_estimates(p_run public.workflow_runs) IS 'The row with what is reserved for it while it is open, and what counts for it where it ended without a report: what was reserved, at least the configured estimate.';

CREATE FUNCTION dispatcher.with_spend(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[]) RETURNS dispatcher.evaluated_budget[]
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce(array_agg(row(
           budget.id, budget.name, budget.scope, budget.scope_id, budget.period, budget.period_key, budget.starts_at,
               budget.ends_at,
           budget.action, budget.fail_closed, budget.cap_usd, budget.cap_tokens, coalesce(spend.settled_usd, 0),
           coalesce(spend.settled_tokens, 0), coalesce(spend.reserved_usd, 0), coalesce(spend.reserved_tokens, 0),
               budget.error, budget.revision
         )::dispatcher.evaluated_budget order by budget.scope, budget.scope_id, budget.period, budget.id), '{}')
    from unnest(p_budgets) as budget
    left join dispatcher.workflow_spend(
           p_tenant_id, array(select distinct one.starts_at from unnest(p_budgets) as one
               where one.starts_at is not null order by one.starts_at)) as spend
      on spend.starts_at = budget.starts_at and spend.scope = budget.scope
          and coalesce(spend.scope_id, '') = coalesce(budget.scope_id, '')
$$;

COMMENT ON FUNCTION dispatcher.with_spend(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[]) IS 'Budgets with what their periods have spent and reserved.';

CREATE FUNCTION dispatcher.workflow_actor() RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
begin
  return coalesce(nullif(current_setting('dispatcher.actor', true), ''),
                  nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub',
                  nullif(current_setting('role'), 'none'), session_user);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return session_user;
end
$$;

COMMENT ON FUNCTION dispatcher.workflow_actor() IS 'Who acts in this transaction: what note_workflow_actor said, else the subject of the token, else the role.';

CREATE FUNCTION dispatcher.workflow_age_points(p_queued_at timestamp with time zone, p_now timestamp with time zone) RETURNS integer
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select case when p_queued_at >= p_now then 0 when p_queued_at < '1970-01-01Z' then 1000000
              else least(1000000, floor(power(extract(epoch from p_now - p_queued_at) / 600, 2)))::integer end
$$;

COMMENT ON FUNCTION dispatcher.workflow_age_points(p_queued_at timestamp with time zone, p_now timestamp with time zone) IS 'How much waiting adds to the priority of a run, and to its route''s: the square of every ten minutes, so 1 after 10 minutes, 36 after an hour, 20736 after a day. Nothing starves.';

CREATE FUNCTION dispatcher.workflow_answer(p_code text, p_run public.workflow_runs) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select jsonb_build_object('applied', p_code in ('ok', 'already', 'kept'), 'code', p_code, 'run_id', p_run.id,
                            'status', p_run.status,
                            'run', case when p_run.id is not null then dispatcher.workflow_run_json(p_run)
                                -- Whose it is not learns no session: that is half of its fence.
                                - case when p_code in ('not_yours', 'claimed_by_another')
                                       then array['session_id', 'wake_id'] else '{}'::text[] end end)
$$;

COMMENT ON FUNCTION dispatcher.workflow_answer(p_code text, p_run public.workflow_runs) IS 'The answer of what may be done to a run: {applied, code, run_id, status, run}; run is the record as it is now, null when there is none.';

CREATE FUNCTION dispatcher.workflow_claim_state(p_run public.workflow_runs, p_session text, p_claim_token uuid) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$
  select case
    when p_run.id is null then 'not_found'
    when p_session is null or p_run.session_id is distinct from p_session
      or (p_claim_token is not null and p_run.claim_token is distinct from p_claim_token) then 'not_yours'
    when p_run.status in ('claimed', 'running') then 'ok'
    when p_run.status in ('waiting_for_approval', 'blocked') then 'held'
    else 'finished' end
$$;

COMMENT ON FUNCTION dispatcher.workflow_claim_state(p_run public.workflow_runs, p_session text, p_claim_token uuid) IS 'Whether a session (and the claim token, where it gives one) holds a run: ok, held (paused, still its own), finished (was its own), not_yours, not_found. No session holds nothing.';

CREATE FUNCTION dispatcher.workflow_estimate(p_estimates jsonb, p_workflow_type text, p_what text) RETURNS numeric
    LANGUAGE sql IMMUTABLE
    SET search_path TO ''
    AS $$ select coalesce((p_estimates -> p_workflow_type ->> p_what)::numeric, (p_estimates -> '' ->> p_what)::numeric,
    0) $$;

COMMENT ON FUNCTION dispatcher.workflow_estimate(p_estimates jsonb, p_workflow_type text, p_what text) IS 'The estimate (usd or tokens) for a type out of workflow_estimates.';

CREATE FUNCTION dispatcher.workflow_estimates(p_tenant_id uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  with types as (
    select workflow_type from public.workflow_agent_routing where tenant_id = p_tenant_id
    union
    select queued.workflow_type from dispatcher.queued_types(p_tenant_id) as queued
    union
    select workflow_type from public.workflow_runs where tenant_id = p_tenant_id
        and status in ('dispatched', 'claimed', 'running')
  )
  select coalesce(jsonb_object_agg(estimate.workflow_type, to_jsonb(estimate) - 'workflow_type'), '{}')
         || jsonb_build_object('', (select jsonb_build_object('usd', usd, 'usd_reports', 0, 'tokens', tokens,
             'tokens_reports', 0) from dispatcher.configured_estimates(p_tenant_id)))
    from dispatcher.estimates_of_types(p_tenant_id, array(select workflow_type from types)) as estimate
$$;

COMMENT ON FUNCTION dispatcher.workflow_estimates(p_tenant_id uuid) IS 'What a run of each type is expected to cost: {type: {usd, usd_reports, tokens, tokens_reports}}, the median of so many reports, or what is configured (0 reports); under "" what is configured.';

CREATE FUNCTION dispatcher.workflow_period(p_period text, p_timezone text, p_now timestamp with time zone, OUT period_key text, OUT starts_at timestamp with time zone, OUT ends_at timestamp with time zone) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    AS $$
declare
  v_local constant timestamp := p_now at time zone p_timezone;
  v_start timestamp;
begin
  case p_period
    when 'daily' then
      v_start := date_trunc('day', v_local);
      period_key := to_char(v_start, 'YYYY-MM-DD');
      ends_at := dispatcher.earliest_instant(v_start + interval '1 day', p_timezone);
    when 'weekly' then
      v_start := date_trunc('week', v_local);
      period_key := to_char(v_start, 'IYYY"-W"IW');
      ends_at := dispatcher.earliest_instant(v_start + interval '7 days', p_timezone);
    when 'monthly' then
      v_start := date_trunc('month', v_local);
      period_key := to_char(v_start, 'YYYY-MM');
      ends_at := dispatcher.earliest_instant(v_start + interval '1 month', p_timezone);
    else
      raise exception 'unknown period %', p_period using errcode = 'OD011';
  end case;
  starts_at := least(dispatcher.earliest_instant(v_start, p_timezone), p_now);
end
$$;

COMMENT ON FUNCTION dispatcher.workflow_period(p_period text, p_timezone text, p_now timestamp with time zone, OUT period_key text, OUT starts_at timestamp with time zone, OUT ends_at timestamp with time zone) IS 'The period a moment falls into in a zone: its key (2026-11-30, 2026-W49, 2026-11), the earliest instants of its first local date and of the date after its last. It never starts after p_now. Raises for an unknown zone.';

CREATE FUNCTION dispatcher.workflow_run_json(p_run public.workflow_runs) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$ select dispatcher.shown_row(to_jsonb(p_run) - array['claim_token', 'reserved_usd', 'reserved_tokens',
    'assumed_usd', 'assumed_tokens', 'request_key']) $$;

COMMENT ON FUNCTION dispatcher.workflow_run_json(p_run public.workflow_runs) IS 'A run as it is shown: everything but its fence and what is internal to budgets.';

CREATE FUNCTION dispatcher.workflow_spend(p_tenant_id uuid, p_starts timestamp with time zone[]) RETURNS TABLE(starts_at timestamp with time zone, scope text, scope_id text, settled_usd numeric, settled_tokens numeric, reserved_usd numeric, reserved_tokens numeric)
    LANGUAGE sql STABLE
    SET search_path TO ''
    SET work_mem TO '32MB'
    AS $$
  -- The books are read once: each booking falls behind the last of the moments it is not before. With the usual
  -- work_mem they would be sorted on disk for that.
  with booked as (
    select width_bucket(booking.at, p_starts) as place, booking.agent_id, booking.workflow_type,
           sum(booking.cost_usd) as usd, sum(booking.tokens) as tokens
      from public.workflow_bookings as booking
     where booking.tenant_id = p_tenant_id and booking.at >= p_starts[1]
     group by 1, 2, 3
  ), spent as (
    select period.starts_at, booked.agent_id, booked.workflow_type, booked.usd as settled_usd,
           booked.tokens as settled_tokens, 0::numeric as reserved_usd, 0::numeric as reserved_tokens
      from unnest(p_starts) with ordinality as period (starts_at, place)
      join booked on booked.place >= period.place
    union all
    -- What an open run has not reported of its reservation belongs to every running period: it will be booked in it. A
    -- held run is open: what it reserves must be there when it goes on.
    select period.starts_at, open.agent_id, open.workflow_type, 0, 0, open.usd, open.tokens
      from unnest(p_starts) as period (starts_at)
      cross join (
        select run.owner_agent_id as agent_id, run.workflow_type,
               sum(greatest(coalesce(dispatcher.known_cost(run.reserved_usd), 0) - dispatcher.booked_usd(run),
                            0)) as usd,
               sum(greatest(coalesce(run.reserved_tokens, 0) - dispatcher.booked_tokens(run), 0)) as tokens
          from public.workflow_runs as run
         where run.tenant_id = p_tenant_id and (run.status in ('dispatched', 'claimed', 'running')
             or run.paused_from in ('dispatched', 'claimed', 'running'))
         group by run.owner_agent_id, run.workflow_type) as open
  )
  select spent.starts_at,
         case when grouping(spent.agent_id) = 0 then 'agent' when grouping(profile.department_id) = 0 then 'department'
              when grouping(spent.workflow_type) = 0 then 'project' else 'fleet' end,
         case when grouping(spent.agent_id) = 0 then spent.agent_id when grouping(profile.department_id) = 0
             then profile.department_id
              when grouping(spent.workflow_type) = 0 then spent.workflow_type end,
         sum(spent.settled_usd), sum(spent.settled_tokens), sum(spent.reserved_usd), sum(spent.reserved_tokens)
    from spent
    left join public.agent_profiles as profile on profile.tenant_id = p_tenant_id and profile.agent_id = spent.agent_id
   group by grouping sets ((spent.starts_at, spent.agent_id), (spent.starts_at, profile.department_id),
                           (spent.starts_at, spent.workflow_type), (spent.starts_at))
$$;

COMMENT ON FUNCTION dispatcher.workflow_spend(p_tenant_id uuid, p_starts timestamp with time zone[]) IS 'What is booked for every agent, department, project and the fleet since each of the given moments (each once, in their order), and what their open runs reserve beyond that: one pass over the books, whatever the number of budgets and periods.';

CREATE FUNCTION dispatcher.workflow_timeout_minutes(p_tenant_id uuid, p_workflow_type text) RETURNS integer
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $$
  select coalesce((select timeout_minutes from public.workflow_agent_routing
                    where tenant_id = p_tenant_id and workflow_type = p_workflow_type), 60)
$$;

COMMENT ON FUNCTION dispatcher.workflow_timeout_minutes(p_tenant_id uuid, p_workflow_type text) IS 'For how long a run of a type may be worked on: its route''s minutes, else 60.';

CREATE FUNCTION dispatcher.workflow_usage_values(p_usage jsonb) RETURNS jsonb
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO ''
    AS $$
declare
  v_values jsonb := '{}';
  v_field text;
  v_text text;
  v_number numeric;
begin
  foreach v_field in array array['cost_usd', 'input_tokens', 'output_tokens', 'cached_tokens'] loop
    v_text := p_usage ->> v_field;
    if v_text is null then
      continue;
    end if;
    begin
      v_number := v_text::numeric;
      if v_number >= 0 and v_number < 'Infinity' and v_number < (case v_field when 'cost_usd' then 1000000
          else 1e15 end) then
        v_values := v_values || jsonb_build_object(v_field, case v_field when 'cost_usd' then round(v_number, 6)
            else trunc(v_number) end);
      end if;
    exception when others then
      if dispatcher.must_abort(sqlstate) then raise; end if;
      continue;  -- not a number: unknown, as if it had not been said
    end;
  end loop;
  return v_values || case when btrim(p_usage ->> 'model') <> ''
      then jsonb_build_object('model', left(p_usage ->> 'model', 300))
                          else '{}'::jsonb end;
end
$$;

COMMENT ON FUNCTION dispatcher.workflow_usage_values(p_usage jsonb) IS 'What a report of usage {cost_usd, input_tokens, output_tokens, cached_tokens, model} really says: what is no number, negative, NaN or beyond belief is left out, so it stays unknown.';

CREATE FUNCTION dispatcher.write_budget(p_budget jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_budget public.budgets := jsonb_populate_record(null::public.budgets, p_budget);
begin
  insert into public.budgets as budget (
    id, tenant_id, name, scope, scope_id, period, timezone, cap_usd, cap_tokens, action_on_exceed, fail_closed)
  values (v_budget.id, v_budget.tenant_id, btrim(v_budget.name), v_budget.scope, v_budget.scope_id, v_budget.period,
          v_budget.timezone, v_budget.cap_usd, v_budget.cap_tokens, v_budget.action_on_exceed, v_budget.fail_closed)
  on conflict (id) do update
     set name = excluded.name, scope = excluded.scope, scope_id = excluded.scope_id, period = excluded.period,
         timezone = excluded.timezone, cap_usd = excluded.cap_usd, cap_tokens = excluded.cap_tokens,
         action_on_exceed = excluded.action_on_exceed, fail_closed = excluded.fail_closed, active = true
  returning * into v_budget;
  return to_jsonb(v_budget);
end
$$;

COMMENT ON FUNCTION dispatcher.write_budget(p_budget jsonb) IS 'Makes a budget, or makes it what is given.';

CREATE FUNCTION dispatcher.write_respawn(p_claimant dispatcher.claimant, p_run public.workflow_runs, p_agent_id uuid, p_request uuid) RETURNS public.agent_wakes
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
declare
  v_wake public.agent_wakes;
begin
  insert into public.agent_wakes (tenant_id, agent_id, gateway_id, instance_id, claim_request, path, workflow_run_id,
      deadline_at)
  values (p_claimant.tenant_id, p_agent_id, p_claimant.gateway_id, p_claimant.instance_id, p_request, 'workflow',
      p_run.id,
          -- of its run; the process ends 15 s before, the run 5 s before that
          least(greatest(p_run.deadline_at, now()), now() + interval '1 year') + interval '20 seconds')
  returning * into v_wake;
  update public.agent_wake_state set last_wake_id = v_wake.id, last_claimed_at = v_wake.claimed_at, updated_at = now()
   where agent_id = p_agent_id;
  insert into public.workflow_respawns (run_id, attempt, tenant_id, wake_id, session_id, previous_session_id)
  values (p_run.id, p_run.dispatch_attempts, p_run.tenant_id, v_wake.id, 'respawn-' || v_wake.id, p_run.session_id);
  return v_wake;
end
$$;

COMMENT ON FUNCTION dispatcher.write_respawn(p_claimant dispatcher.claimant, p_run public.workflow_runs, p_agent_id uuid, p_request uuid) IS 'Writes the wake of a granted respawn, and that this attempt has had its one.';

CREATE TABLE public.workflow_run_events (
    id bigint NOT NULL,
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    from_status text NOT NULL,
    to_status text NOT NULL,
    attempt integer NOT NULL,
    actor text,
    reason text,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

COMMENT ON TABLE public.workflow_run_events IS 'One row per transition of a run, written by trigger. Append-only.';

COMMENT ON COLUMN public.workflow_run_events.run_id IS 'The run. No foreign key: what happened to a run stays known when the run is deleted.';

CREATE FUNCTION dispatcher.write_run_events(p_events public.workflow_run_events[]) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    SET lock_timeout TO '100ms'
    AS $$
begin
  insert into public.workflow_run_events (tenant_id, run_id, from_status, to_status, attempt, actor, reason)
  select event.tenant_id, event.run_id, event.from_status, event.to_status, event.attempt, event.actor, event.reason
    from unnest(p_events) as event;
  perform dispatcher.settle_constraints('public.workflow_run_events');
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  if cardinality(p_events) > 1 then  -- one that cannot be written costs the others nothing
    perform dispatcher.write_run_events(array[event]) from unnest(p_events) as event;
  else
    perform dispatcher.note_fault(p_events[1].tenant_id, null, 'event of a run', format('%s (%s)', sqlerrm, sqlstate));
  end if;
end
$$;

COMMENT ON FUNCTION dispatcher.write_run_events(p_events public.workflow_run_events[]) IS 'Writes events of runs. A side write: one that cannot be written is a fault that is noted, and the transition stands.';

CREATE FUNCTION dispatcher.write_wake(p_claimant dispatcher.claimant, p_facts dispatcher.gate_facts, p_path text, p_request uuid) RETURNS public.agent_wakes
    LANGUAGE plpgsql
    SET search_path TO ''
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
declare
  v_items constant uuid[] := dispatcher.items_of_claim(p_facts);
  v_wake public.agent_wakes;
  v_states integer;
begin
  insert into public.agent_wakes (tenant_id, agent_id, gateway_id, instance_id, claim_request, path, item_ids,
      chain_depth, model_override,
                                  thinking_override, deadline_at)
  select p_facts.tenant_id, p_facts.agent_id, p_claimant.gateway_id, p_claimant.instance_id, p_request, p_path,
      v_items, p_facts.chain_depth,
         case when jsonb_typeof(item.context -> 'model_override') = 'string'
             then nullif(left(item.context ->> 'model_override', 500), '') end,
         case when jsonb_typeof(item.context -> 'thinking_override') = 'string'
             then nullif(left(item.context ->> 'thinking_override', 500), '') end,
         now() + make_interval(secs => (p_claimant.settings).agent_process_timeout + 15)
    from public.agent_inbox_items as item
   where item.id = v_items[1] and item.agent_id = p_facts.agent_id and item.tenant_id = p_facts.tenant_id
  returning * into v_wake;
  update public.agent_wake_state
     set last_wake_id = v_wake.id, last_claimed_at = v_wake.claimed_at, waitlisted_at = null, waitlist_path = null,
         waiting_since = null,
         consecutive_failures = p_facts.failures, updated_at = now(),
         stalled_at = case when p_facts.failures = 0 then null else stalled_at end
   where agent_id = p_facts.agent_id and v_wake.id is not null;
  get diagnostics v_states = row_count;
  if v_states = 0 and (v_wake.id is not null or exists (
      select from dispatcher.agent_inbox_items as item
       where item.id = v_items[1] and item.agent_id = p_facts.agent_id and item.tenant_id = p_facts.tenant_id)) then
    raise exception 'a trigger keeps the wake from being written';
  end if;
  return v_wake;
end
$$;

COMMENT ON FUNCTION dispatcher.write_wake(p_claimant dispatcher.claimant, p_facts dispatcher.gate_facts, p_path text, p_request uuid) IS 'Writes the wake of a granted claim (state starting) and what the gates remember: failures that new context has ended are forgotten here. All NULL, and nothing written, when the item it was for is gone by now; raises when a trigger drops one of the rows.';

CREATE FUNCTION public.adopt_wake(p_instance_id uuid, p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_wake public.agent_wakes;
begin
  if p_pid is null or p_host_id is null then
    return jsonb_build_object('applied', false, 'code', 'invalid');
  end if;
  update public.agent_wakes
     set instance_id = p_instance_id, claim_token = gen_random_uuid(), state = 'running', host_id = p_host_id,
         pid = p_pid,
         pid_started_at = p_pid_started_at, started_at = coalesce(started_at, now())
   where id = p_wake_id and claim_token = p_claim_token and state in ('starting', 'running')
     and gateway_id = (select instance.gateway_id from public.dispatcher_instances as instance
                        where instance.id = p_instance_id)
  returning * into v_wake;
  perform dispatcher.stamp_items(v_wake, v_wake.started_at);
  if v_wake.id is null then
    -- An adoption whose answer was lost is asked for again, with the token it has replaced.
    select * into v_wake from public.agent_wakes
     where id = p_wake_id and instance_id = p_instance_id and state = 'running' and host_id = p_host_id and pid = p_pid
       and pid_started_at is not distinct from p_pid_started_at;
  end if;
  if v_wake.id is null then
    return jsonb_build_object('applied', false, 'code', 'fence_lost');
  end if;
  return jsonb_build_object('applied', true, 'claim_token', v_wake.claim_token, 'agent_id', v_wake.agent_id,
                            'deadline_in', extract(epoch from v_wake.deadline_at - now()));
end
$$;

COMMENT ON FUNCTION public.adopt_wake(p_instance_id uuid, p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) IS 'Takes over a live wake: new owner, new claim token (the old one can change nothing any more). One adopter wins; its repeat gets the same answer.';

CREATE FUNCTION public.budget_ledger(p_tenant_id uuid, p_limit integer DEFAULT 50) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
  select jsonb_build_object('code', 'ok', 'events', coalesce(jsonb_agg(jsonb_build_object(
           'at', event.created_at, 'budget_id', event.budget_id, 'budget', budget.name, 'scope', budget.scope,
               'scope_id', budget.scope_id,
           'period_key', event.period_key, 'event_kind', event.event_kind, 'detail', event.detail)
               order by event.id desc), '[]'))
    from (select * from public.budget_events where tenant_id = p_tenant_id order by id desc
        limit least(greatest(p_limit, 1), 1000)) as event
    join public.budgets as budget on budget.id = event.budget_id
$$;

COMMENT ON FUNCTION public.budget_ledger(p_tenant_id uuid, p_limit integer) IS 'The latest budget events, newest first, with their budgets.';

CREATE FUNCTION public.cancel_workflow_run(p_tenant_id uuid, p_run_id uuid, p_actor text, p_reason text DEFAULT NULL::text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_before public.workflow_runs;
  v_run public.workflow_runs;
begin
  v_before := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  if v_before.id is null then
    return dispatcher.refuse_run(p_run_id, 'not_found');
  elsif v_before.status = 'cancelled' then
    return dispatcher.workflow_answer('already', v_before);
  elsif v_before.finished_at is not null then
    return dispatcher.workflow_answer('finished', v_before);
  end if;
  perform dispatcher.note_workflow_actor(p_actor, p_reason);
  v_run := dispatcher.stop_workflow_run(v_before, coalesce(nullif(btrim(left(p_reason, 4000)), ''),
                                                           format('Cancelled by %s',
                                                               coalesce(nullif(left(p_actor, 300), ''), 'unknown'))));
  perform dispatcher.audit_workflow_action(p_tenant_id, p_actor, 'cancel_run', 'run:' || p_run_id,
      jsonb_build_object('status', v_before.status),
                                           jsonb_build_object('status', v_run.status, 'reason', left(p_reason, 4000)));
  return dispatcher.workflow_answer('ok', v_run);
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;

COMMENT ON FUNCTION public.cancel_workflow_run(p_tenant_id uuid, p_run_id uuid, p_actor text, p_reason text) IS 'Cancels a run that is not finished; audited. Its process, where a daemon has one, is stopped. busy: another session holds the run, ask again.';

CREATE FUNCTION public.claim_wakes(p_instance_id uuid, p_claims jsonb, p_request uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_claimant dispatcher.claimant;
  v_answers jsonb := '[]';
  v_ends_at constant timestamptz := clock_timestamp() + interval '2 seconds';
begin
  if jsonb_typeof(p_claims) is distinct from 'array' then
    raise exception 'p_claims must be an array of {agent_id, path, item_ids}' using errcode = 'OD002';
  end if;
  begin
    v_claimant := dispatcher.lock_gateway(p_instance_id);
  exception when lock_not_available then
    return dispatcher.held_claims(p_claims, sqlerrm);
  end;
  -- From here on nothing should wait; what could (a whole table, say) is cut short, and not once for each claim.
  perform set_config('lock_timeout', '100ms', true);
  for v_number in 0 .. jsonb_array_length(p_claims) - 1 loop
    if clock_timestamp() > v_ends_at then
      return v_answers || dispatcher.held_claims((select jsonb_agg(claim.value order by claim.ordinality)
          from jsonb_array_elements(p_claims) with ordinality as claim where claim.ordinality > v_number),
          'a table that claims need: they waited for two seconds');
    end if;
    v_answers := v_answers || dispatcher.contained_claim(v_claimant, p_claims -> v_number, p_request);
  end loop;
  return v_answers;
end
$$;

COMMENT ON FUNCTION public.claim_wakes(p_instance_id uuid, p_claims jsonb, p_request uuid) IS 'Claims wakes for p_claims = [{agent_id, path, item_ids}]; answers one verdict per claim, in order. p_request makes a repeated call hand back the same grants. An agent whose rows another session holds is busy (held: what all need is, and who holds it); one whose data raises is an error of its own; neither stops the others.';

CREATE FUNCTION public.claim_workflow_notifications(p_instance_id uuid, p_limit integer, p_lease_seconds integer DEFAULT 60, p_known_agents text[] DEFAULT '{}'::text[]) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
  v_limit constant integer := least(greatest(p_limit, 0), 100);
  v_seconds constant integer := least(greatest(coalesce(p_lease_seconds, 60), 1), 3600);
  v_claimed jsonb;
begin
  perform dispatcher.drop_outdated_notifications(v_instance.tenant_id, 500);
  select jsonb_agg(jsonb_build_object(
           'id', taken.id, 'claim_token', taken.claim_token, 'run_id', taken.run_id, 'attempt', taken.attempt, 'tries',
               taken.tries,
           'agent_id', taken.agent_id, 'workflow_type', run.workflow_type,
           'workspace_slug', (select slug from public.workspace where tenant_id = taken.tenant_id limit 1))
               order by taken.next_try_at)
    into v_claimed
    from dispatcher.take_notifications(v_instance, v_limit, v_seconds, coalesce(p_known_agents, '{}')) as taken
    join public.workflow_runs as run on run.id = taken.run_id;
  return jsonb_build_object('notifications', coalesce(v_claimed, '[]'), 'next_in',
      dispatcher.next_notification(v_instance));
end
$$;

COMMENT ON FUNCTION public.claim_workflow_notifications(p_instance_id uuid, p_limit integer, p_lease_seconds integer, p_known_agents text[]) IS 'Takes notifications that are due for the agents of the instance''s gateway: {notifications, next_in}. Those whose run has moved on are dropped; one whose sender died is taken again after its lease.';

CREATE FUNCTION public.claim_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_agent text DEFAULT NULL::text, p_wake_id uuid DEFAULT NULL::uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_run public.workflow_runs;
  v_refusal text;
begin
  if coalesce(btrim(p_session), '') = '' or length(p_session) > 500 then
    return dispatcher.refuse_run(p_run_id, 'bad_session');
  end if;
  v_run := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  if v_run.id is null then
    return dispatcher.refuse_run(p_run_id, 'not_found');
  elsif v_run.status in ('claimed', 'running') and dispatcher.is_same_attempt(v_run, p_session, p_wake_id) then
    return dispatcher.claimed_answer('already', v_run);
  end if;
  v_refusal := dispatcher.refuse_claim(v_run, p_agent);
  if v_refusal is not null then
    return dispatcher.workflow_answer(v_refusal, v_run);
  end if;
  return dispatcher.claimed_answer('ok', dispatcher.take_run(v_run, p_session, p_agent, p_wake_id));
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;

COMMENT ON FUNCTION public.claim_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_agent text, p_wake_id uuid) IS 'Takes a dispatched run for a session: one wins. Answers the run, its claim_token and deadline_in (s); already for the session that holds it, unless it asks from an earlier wake than the one that holds it; else not_dispatched, claimed_by_another, not_yours, finished, held, not_found, bad_session, busy. p_wake_id: the wake the session runs in.';

CREATE FUNCTION public.close_inbox_item(p_item_id uuid, p_lease_token uuid, p_outcome text, p_reason text DEFAULT NULL::text, p_wake_id uuid DEFAULT NULL::uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_code text := 'invalid';
begin
  if p_outcome in ('done', 'failed', 'released') then
    v_code := dispatcher.lock_inbox_lease(p_item_id, p_lease_token,
                case when p_outcome = 'failed' then array['failed', 'dead_letter'] else array[p_outcome] end,
                    p_wake_id);
  end if;
  if v_code = 'ok' then
    perform dispatcher.close_leased_item(p_item_id, p_outcome, dispatcher.clean_inbox_reason(p_reason));
  end if;
  return dispatcher.inbox_close_verdict(p_item_id, v_code);
exception when lock_not_available then
  return dispatcher.inbox_close_verdict(p_item_id, 'busy');
end
$$;

COMMENT ON FUNCTION public.close_inbox_item(p_item_id uuid, p_lease_token uuid, p_outcome text, p_reason text, p_wake_id uuid) IS 'Closes a leased item as done, failed (dead_letter without attempts left, which is told) or released (pending again, attempt given back). Needs the live lease''s token and, where p_wake_id is given, the wake it was taken in: {applied, code: ok|already|lease_lost|not_found|invalid|busy, status, attempt, max_attempts}.';

CREATE FUNCTION public.complete_inbox_item(p_item_id uuid) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
        update public.agent_inbox_items
           set status = 'done', completed_at = now(), leased_until = null, updated_at = now()
         where id = p_item_id
      $$;

COMMENT ON FUNCTION public.complete_inbox_item(p_item_id uuid) IS 'Closes an item as done.';

CREATE FUNCTION public.complete_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_output jsonb DEFAULT NULL::jsonb, p_usage jsonb DEFAULT NULL::jsonb, p_claim_token uuid DEFAULT NULL::uuid) RETURNS jsonb
    LANGUAGE sql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$ select dispatcher.finish_workflow_run(p_tenant_id, p_run_id, p_session, p_claim_token, 'completed', p_output,
    null, p_usage) $$;

COMMENT ON FUNCTION public.complete_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_output jsonb, p_usage jsonb, p_claim_token uuid) IS 'The session that holds the run finished it, with its output and usage {cost_usd, input_tokens, output_tokens, cached_tokens, model}. A repeat is already; kept: the run is held, and this is its end when it goes on; busy: ask again. booked: what that added to the books, {cost_usd, tokens}.';

CREATE FUNCTION public.correct_workflow_usage(p_tenant_id uuid, p_run_id uuid, p_usage jsonb, p_actor text, p_reason text DEFAULT NULL::text, p_session text DEFAULT NULL::text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '2s'
    AS $$
declare
  v_run public.workflow_runs;
  v_usage constant jsonb := dispatcher.workflow_usage_values(coalesce(p_usage, '{}'));
  v_answer jsonb;
begin
  if not v_usage ?| array['cost_usd', 'input_tokens', 'output_tokens'] then
    return dispatcher.invalid(array['usage: neither a cost nor tokens, from 0 on']);
  end if;
  v_run := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  if v_run.id is null then
    return dispatcher.refuse_run(p_run_id, 'not_found');
  end if;
  perform set_config('dispatcher.booking_source', 'correction', true);
  v_answer := dispatcher.correct_run(v_run, p_session, v_usage);
  perform set_config('dispatcher.booking_source', '', true);
  if v_answer ->> 'code' = 'ok' then
    perform dispatcher.audit_workflow_action(p_tenant_id, p_actor, 'correct_usage', 'run:' || p_run_id,
      jsonb_build_object('cost_usd', v_run.cost_estimate, 'input_tokens', v_run.input_tokens,
                         'output_tokens', v_run.output_tokens),
      v_usage || jsonb_build_object('session', left(p_session, 500), 'reason', left(p_reason, 4000),
                                    'booked', v_answer -> 'booked'));
  end if;
  return v_answer;
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;

COMMENT ON FUNCTION public.correct_workflow_usage(p_tenant_id uuid, p_run_id uuid, p_usage jsonb, p_actor text, p_reason text, p_session text) IS 'An operator says what a run has really cost in all ({cost_usd, input_tokens, output_tokens}), also after its end; p_session: a session the run has lost. The difference is booked now; audited. Answers {applied, code: ok | nothing_booked (nobody has worked on it) | invalid | not_found | busy, booked {cost_usd, tokens}, run}.';

CREATE FUNCTION public.current_tenant_id() RETURNS uuid
    LANGUAGE sql STABLE
    SET search_path TO ''
    AS $_$
        -- YourHQ's claim. One at the top of a token is somebody else's. Without it: the all-zero tenant. One that is
        -- no id is no tenant's, and sees nothing.
        select case when claim.value is null then '00000000-0000-0000-0000-000000000000'::uuid
                    when claim.value ~ '^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$' then claim.value::uuid end
          from (select nullif(nullif(current_setting('request.jwt.claims', true), '')::jsonb
                                #>> '{app_metadata,tenant_id}', '') as value) as claim
      $_$;

COMMENT ON FUNCTION public.current_tenant_id() IS 'The tenant of the caller''s token, else the all-zero tenant.';

CREATE FUNCTION public.deactivate_budget(p_tenant_id uuid, p_budget text, p_actor text DEFAULT NULL::text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_named constant record := dispatcher.budgets_named(p_tenant_id, p_budget);
  v_is_ended boolean;
begin
  if jsonb_array_length(v_named.active) > 1 then
    return jsonb_build_object('applied', false, 'code', 'ambiguous', 'budget', p_budget, 'budgets', v_named.active);
  end if;
  update public.budgets set active = false, updated_at = now()
   where tenant_id = p_tenant_id and id = (v_named.active -> 0 ->> 'id')::uuid and active;
  v_is_ended := found;
  if v_is_ended then
    perform dispatcher.audit_workflow_action(p_tenant_id, p_actor, 'deactivate_budget',
        'budget:' || (v_named.active -> 0 ->> 'id'), v_named.active -> 0, '{"active": false}');
  end if;
  return jsonb_build_object('applied', v_named.is_known, 'budget', p_budget, 'budgets', v_named.active,
                            'code', case when v_is_ended then 'ok' when v_named.is_known then 'already'
                                else 'not_found' end);
exception when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy', 'budget', p_budget, 'budgets', jsonb_build_array());
end
$$;

COMMENT ON FUNCTION public.deactivate_budget(p_tenant_id uuid, p_budget text, p_actor text) IS 'Ends the one active budget of an id or name: what it held goes out with the next tick. Audited. Answers {applied, code: ok | already | ambiguous | not_found | busy, budget, budgets}; budgets: what was ended, or the several of that name.';

CREATE FUNCTION public.dispatch_workflows(p_instance_id uuid, p_phase text DEFAULT 'look'::text, p_facts jsonb DEFAULT NULL::jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_tick constant dispatcher.tick := dispatcher.tick_of(p_instance_id);
  v_started constant timestamptz := clock_timestamp();
  v_answer jsonb;
begin
  perform set_config('dispatcher.quiet', 'on', true);
  case p_phase
    when 'look' then v_answer := dispatcher.look_at_runs(v_tick);
    when 'note' then v_answer := dispatcher.note_tick(v_tick, p_facts);
    when 'stopped', 'dispatched', 'retried', 'timed_out', 'released', 'unrouted', 'pruned' then
      v_answer := dispatcher.run_phase(v_tick, p_phase);
    else raise exception 'unknown phase %', left(p_phase, 100) using errcode = 'OD002',
      hint = 'look, stopped, dispatched, retried, timed_out, released, unrouted, pruned or note';
  end case;
  return jsonb_build_object('phase', p_phase, 'busy', false, 'again', false, 'errors', jsonb_build_array()) || v_answer
         || jsonb_build_object('ms', round(extract(epoch from clock_timestamp() - v_started) * 1000));
end
$$;

COMMENT ON FUNCTION public.dispatch_workflows(p_instance_id uuid, p_phase text, p_facts jsonb) IS 'One phase of a tick for the tenant of an instance, at most 500 runs: {phase, busy, again, errors, ms} and its numbers. look: {due, stop_wakes}; stopped (hard stops): {stopped, budget_error}; dispatched: {dispatched, held, held_by, warned, locked, budget_error, budgets_open (runs went out without them)}; retried: {retried, failed, held, locked}; timed_out; released: {released, failed}; unrouted; pruned; note keeps p_facts as last_tick: {next_in, stop_wakes}. busy: another pass that counts slots and money is under way.';

CREATE FUNCTION public.dispatcher_gauges(p_instance_id uuid) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
begin
  return jsonb_build_object(
    'backlog', dispatcher.gateway_backlog(v_instance.gateway_id),
    'runs', (select coalesce(jsonb_object_agg(counted.status, counted.number), '{}')
               from (select status, count(*) as number from public.workflow_runs where tenant_id = v_instance.tenant_id
                   group by status) as counted),
    'held', (select coalesce((last_tick -> 'budget_enforcement' ->> 'held')::integer, 0)
        from public.dispatcher_instances
              where tenant_id = v_instance.tenant_id and last_tick is not null order by last_tick ->> 'at' desc
                  limit 1));
end
$$;

COMMENT ON FUNCTION public.dispatcher_gauges(p_instance_id uuid) IS 'For /metrics: backlog of the instance''s gateway by age, runs of its tenant by status, and how many runs budgets held at the tenant''s last tick.';

CREATE FUNCTION public.dispatcher_holders(p_tenant_id uuid, p_gateway text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '100ms'
    AS $$
declare
  v_gateway_id uuid;
begin
  begin
    v_gateway_id := dispatcher.find_gateway(p_tenant_id, p_gateway);
    if v_gateway_id is null then
      return dispatcher.unknown_gateway(p_tenant_id);
    end if;
  exception when lock_not_available then
    null;  -- the table itself is held, which is the answer
  end;
  return jsonb_build_object('code', 'ok', 'held', dispatcher.held_lasting(p_tenant_id, v_gateway_id));
end
$$;

COMMENT ON FUNCTION public.dispatcher_holders(p_tenant_id uuid, p_gateway text) IS 'Which rows that a gateway''s daemons share, and which whole tables, other sessions hold, and who: {code: ok, held: [{kind: row | table, table, text, sessions: [{pid, application, user, state, seconds}]}]}. state and seconds are NULL where the owner of our functions may not see them. Never waits longer than a second.';

CREATE FUNCTION public.dispatcher_schema() RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    SET lock_timeout TO '500ms'
    AS $$
declare
  v_drift jsonb := '[]';
begin
  begin
    select coalesce(jsonb_agg(drift.kind || ' ' || drift.name || ' ' || drift.problem), '[]') into v_drift
      from (select * from dispatcher.schema_drift() limit 20) as drift;
  exception when lock_not_available then
    null;  -- Which revision this is must be told all the same.
  end;
  return jsonb_build_object('revision', 62, 'fingerprint', '0a90bb0935af8f23c5114e5e135567d5bb1e223991a761acf821f1964d799d95', 'drift', v_drift);
end
$$;

COMMENT ON FUNCTION public.dispatcher_schema() IS 'This schema: {revision, fingerprint, drift: the first objects that differ from what the files make; empty while somebody holds a table of ours as a whole}.';

CREATE FUNCTION public.dispatcher_status(p_tenant_id uuid, p_gateway text, p_settings jsonb) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_gateway record;
  v_settings public.dispatcher_settings;
  v_is_full boolean;
begin
  select id, slug into v_gateway from public.gateways where id = dispatcher.find_gateway(p_tenant_id, p_gateway);
  if v_gateway.id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  v_settings := dispatcher.settings_of_gateway(v_gateway.id, p_settings);
  v_is_full := dispatcher.live_wakes_of_gateway(v_gateway.id) >= v_settings.max_concurrent_wakes;
  return jsonb_build_object(
    'code', 'ok', 'gateway', v_gateway.slug, 'now', now(),
    -- Of one that has gone the last word is no news: how it did then would read as how it does now.
    'instances', (select coalesce(jsonb_agg(jsonb_build_object('id', id, 'state', seen.state,
                    'hostname', hostname, 'pid', pid, 'version', version, 'started_at', started_at,
                        'last_heartbeat_at', last_heartbeat_at,
                    'last_sweep_at', last_sweep_at, 'last_sweep', last_sweep, 'realtime',
                        case when seen.state = 'running' then realtime else '{}' end,
                    'health', case when seen.state = 'running' then health else '{}' end) order by started_at desc),
                        '[]')
                    from public.dispatcher_instances as instance
                    cross join lateral (select case when instance.state = 'running'
                        and dispatcher.is_instance_silent(instance) then 'silent'
                            else instance.state end) as seen (state)
                   where gateway_id = v_gateway.id and (instance.state = 'running'
                     or last_heartbeat_at > now() - interval '1 hour')),
    'wakes', (select coalesce(jsonb_agg(jsonb_build_object('wake_id', wake.id, 'agent', agent.slug, 'state',
        wake.state, 'path', wake.path, 'pid', wake.pid,
                    'claimed_at', wake.claimed_at, 'seconds',
                        round(extract(epoch from now() - dispatcher.known_time(wake.claimed_at))))
                            order by wake.claimed_at), '[]')
                from public.agent_wakes as wake join dispatcher.agents as agent on agent.id = wake.agent_id
               where wake.gateway_id = v_gateway.id and wake.state in ('starting', 'running')),
    'waitlist', (select coalesce(jsonb_agg(jsonb_build_object('agent', agent.slug, 'since', state.waitlisted_at)
        order by state.waitlisted_at, state.waiting_since), '[]')
                   from public.agent_wake_state as state join dispatcher.agents as agent on agent.id = state.agent_id
                  where agent.gateway_id = v_gateway.id and state.waitlisted_at is not null),
    'backlog', dispatcher.gateway_backlog(v_gateway.id),
    'agents', (select coalesce(jsonb_agg(jsonb_build_object('agent', agent.slug, 'status', agent.status, 'items',
        work.items,
                    'blocked', to_jsonb(gates.blocked || case when v_is_full and cardinality(gates.blocked) = 0
                        then array['concurrency_limit'] else '{}' end),
                    'retry_in', round(dispatcher.seconds_until(gates.retry_at)::numeric),
                    'failures', facts.failures, 'stalled_at', case when facts.failures > 0 then state.stalled_at end,
                        'last_wake_at', state.last_claimed_at,
                    'last_end', state.last_end_state,
                    'budget', (select dispatcher.shown_row(jsonb_build_object('status', budget.status, 'limit_usd',
                        budget.monthly_limit_usd,
                                                                'spend_usd', budget.current_period_spend_usd))
                                 from dispatcher.agent_budgets as budget where budget.agent_id = agent.id))
                                     order by agent.slug), '[]')
                 from dispatcher.agents as agent
                 left join public.agent_wake_state as state on state.agent_id = agent.id
                 cross join lateral (select count(*) as items from dispatcher.inbox_due as due
                     where due.agent_id = agent.id and due.tenant_id = agent.tenant_id) as work
                 cross join lateral dispatcher.read_gate_facts(agent.id, v_settings) as facts
                 cross join lateral dispatcher.wake_gates(facts, v_settings, true) as gates
                where agent.gateway_id = v_gateway.id));
end
$$;

COMMENT ON FUNCTION public.dispatcher_status(p_tenant_id uuid, p_gateway text, p_settings jsonb) IS 'What an operator sees of one gateway: instances, live wakes, waitlist, backlog by age, and for each agent every gate that keeps it asleep.';

CREATE FUNCTION public.enqueue_workflow_run(p_tenant_id uuid, p_workflow_type text, p_input jsonb DEFAULT '{}'::jsonb, p_priority integer DEFAULT 0, p_initiator text DEFAULT NULL::text, p_task_id text DEFAULT NULL::text, p_agent text DEFAULT NULL::text, p_not_before timestamp with time zone DEFAULT NULL::timestamp with time zone, p_request_key text DEFAULT NULL::text, p_delay_seconds double precision DEFAULT NULL::double precision) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_faults constant text[] := dispatcher.faults_of_new_run(p_tenant_id, p_workflow_type, p_priority, p_initiator,
      p_task_id, p_agent, p_request_key)
                              || dispatcher.faults_of_delay(p_delay_seconds, p_not_before);
  v_run public.workflow_runs;
  v_differs text[];
begin
  if cardinality(v_faults) > 0 then
    return dispatcher.invalid(v_faults);
  end if;
  insert into public.workflow_runs as run (
    tenant_id, workflow_type, input_payload, priority, initiator, task_id, pinned_agent_id, request_key,
        next_attempt_at)
  values (p_tenant_id, btrim(p_workflow_type), coalesce(p_input, '{}'), coalesce(p_priority, 0), p_initiator, p_task_id,
          nullif(btrim(p_agent), ''), nullif(p_request_key, ''),
          greatest(p_not_before, case when p_delay_seconds > 0 then now() + make_interval(secs => p_delay_seconds) end))
  on conflict (tenant_id, request_key) where request_key is not null do nothing
  returning * into v_run;
  if v_run.id is not null then
    return dispatcher.workflow_answer('ok', v_run)
      || jsonb_build_object('routed', v_run.pinned_agent_id is not null
          or exists (select from public.workflow_agent_routing as route
           where route.tenant_id = p_tenant_id and route.workflow_type = v_run.workflow_type
             and route.max_concurrent > 0));
  end if;
  select * into v_run from public.workflow_runs where tenant_id = p_tenant_id and request_key = p_request_key;
  v_differs := dispatcher.differs_from_run(v_run, p_workflow_type, p_input, p_agent);
  if cardinality(v_differs) > 0 then
    return dispatcher.workflow_answer('key_taken', v_run) || jsonb_build_object('faults', jsonb_build_array(format(
      'request_key: run %s has it, with another %s', v_run.id, array_to_string(v_differs, ' and '))));
  end if;
  return dispatcher.workflow_answer('already', v_run);
exception when lock_not_available then
  return dispatcher.refuse_run(null, 'busy');
end
$$;

COMMENT ON FUNCTION public.enqueue_workflow_run(p_tenant_id uuid, p_workflow_type text, p_input jsonb, p_priority integer, p_initiator text, p_task_id text, p_agent text, p_not_before timestamp with time zone, p_request_key text, p_delay_seconds double precision) IS 'Puts a run into the queue. p_agent pins it to an agent, p_delay_seconds (by the database''s clock) or p_not_before keeps it back, p_request_key makes a repeat answer the same run (already), and something else under the same key is refused (key_taken). invalid and key_taken name every fault.';

CREATE FUNCTION public.escalate_inbox_item(p_item_id uuid, p_lease_token uuid, p_reason text, p_wake_id uuid DEFAULT NULL::uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_code text;
begin
  v_code := dispatcher.lock_inbox_lease(p_item_id, p_lease_token, array['escalated'], p_wake_id);
  if v_code = 'ok' then
    perform dispatcher.escalate_leased_item(p_item_id, dispatcher.clean_inbox_reason(p_reason));
  end if;
  return dispatcher.inbox_close_verdict(p_item_id, v_code);
exception when lock_not_available then
  return dispatcher.inbox_close_verdict(p_item_id, 'busy');
end
$$;

COMMENT ON FUNCTION public.escalate_inbox_item(p_item_id uuid, p_lease_token uuid, p_reason text, p_wake_id uuid) IS 'Hands a leased item to a human, in one transaction: its task becomes blocked, a notification is written, the item is closed as escalated. Answers like close_inbox_item; a repeat with the same token changes nothing.';

CREATE FUNCTION public.expire_inbox_items(p_tenant_id uuid, p_gateway text, p_item_ids uuid[], p_reason text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_gateway_id constant uuid := dispatcher.find_gateway(p_tenant_id, p_gateway);
  v_agents constant uuid[] := array(select dispatcher.agents_of_operator(p_tenant_id, v_gateway_id, null));
  v_found integer;
  v_ids uuid[];
begin
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  select count(*) into v_found from dispatcher.agent_inbox_items as item
   where item.id = any (p_item_ids) and item.agent_id = any (v_agents) and item.tenant_id = p_tenant_id
     and item.status in ('pending', 'failed');
  v_ids := dispatcher.expire_items(v_agents, p_item_ids, dispatcher.clean_inbox_reason(coalesce(p_reason,
      'expired by the operator')));
  return jsonb_build_object('code', 'ok', 'expired', cardinality(v_ids), 'item_ids', to_jsonb(v_ids),
                            'busy', greatest(least(v_found, 500) - cardinality(v_ids), 0), 'again', v_found > 500
                                and cardinality(v_ids) > 0);
exception when lock_not_available then
  return jsonb_build_object('code', 'ok', 'expired', 0, 'item_ids', '[]'::jsonb, 'busy', v_found, 'again', false);
end
$$;

COMMENT ON FUNCTION public.expire_inbox_items(p_tenant_id uuid, p_gateway text, p_item_ids uuid[], p_reason text) IS 'Ends open items by the operator''s hand, at most 500 a call (again: call once more): failed, attempts at the ceiling, reason recorded. busy: held by somebody, left alone.';

CREATE FUNCTION public.fail_inbox_item(p_item_id uuid, p_reason text DEFAULT NULL::text) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    AS $$
        update public.agent_inbox_items
           set status = case when attempt_count >= max_attempts then 'dead_letter'
               else 'failed' end::public.inbox_item_status,
               failed_at = now(), leased_until = null, updated_at = now(),
               context = context || jsonb_build_object('last_failure_reason', p_reason)
         where id = p_item_id
      $$;

COMMENT ON FUNCTION public.fail_inbox_item(p_item_id uuid, p_reason text) IS 'Fails an item; dead_letter once its attempts are spent. The reason goes to context.last_failure_reason.';

CREATE FUNCTION public.fail_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_error text, p_usage jsonb DEFAULT NULL::jsonb, p_claim_token uuid DEFAULT NULL::uuid) RETURNS jsonb
    LANGUAGE sql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$ select dispatcher.finish_workflow_run(p_tenant_id, p_run_id, p_session, p_claim_token, 'failed', null, p_error,
    p_usage) $$;

COMMENT ON FUNCTION public.fail_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_error text, p_usage jsonb, p_claim_token uuid) IS 'The session that holds the run gave it up, with the reason. A repeat is already; kept: the run is held, and this is its end when it goes on; busy: ask again.';

CREATE FUNCTION public.finish_workflow_notifications(p_instance_id uuid, p_results jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_count integer;
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
begin
  if jsonb_typeof(p_results) is distinct from 'array' then
    raise exception 'p_results must be an array of {id, claim_token, sent, error}' using errcode = 'OD002';
  end if;
  select coalesce(sum(dispatcher.finish_notification(result.value, v_instance.tenant_id)), 0) into v_count
      from jsonb_array_elements(p_results) as result;
  return jsonb_build_object('finished', v_count);
end
$$;

COMMENT ON FUNCTION public.finish_workflow_notifications(p_instance_id uuid, p_results jsonb) IS 'What became of claimed notifications: [{id, claim_token, sent, error}]. One that failed is due again after 5 s, doubled per try, at most 300 s; after 12 tries it is given up.';

CREATE FUNCTION public.heartbeat_dispatcher_instance(p_instance_id uuid, p_live_wake_ids uuid[], p_nonce uuid, p_facts jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_instance public.dispatcher_instances;
  v_renewed integer;
  v_fenced jsonb;
  v_unattended jsonb;
  v_live constant uuid[] := coalesce(p_live_wake_ids, '{}');
begin
  v_instance := dispatcher.running_instance(p_instance_id);
  update public.dispatcher_instances
     set last_heartbeat_at = now(), canary = p_nonce, realtime = coalesce(p_facts -> 'realtime', realtime),
         health = coalesce(p_facts -> 'health', health),
         state = case state when 'lost' then 'running' else state end
   where id = p_instance_id;
  perform dispatcher.send_gateway_hint(v_instance.gateway_id, 'canary',
      jsonb_build_object('instance_id', p_instance_id, 'nonce', p_nonce));
  v_renewed := dispatcher.renew_wake_leases(p_instance_id, v_live,
      (dispatcher.settings_of_instance(p_instance_id)).lease_seconds);
  select jsonb_agg(live.id) into v_fenced from unnest(v_live) as live (id)
   where not exists (select from public.agent_wakes as wake where wake.id = live.id and wake.instance_id = p_instance_id
     and wake.ended_at is null);
  -- Named, not closed: this call may be an old one that arrives late, and the instance alone knows whether a process
  -- runs.
  select jsonb_agg(dispatcher.open_wake_facts(wake) order by wake.claimed_at) into v_unattended
      from public.agent_wakes as wake
   where wake.instance_id = p_instance_id and wake.state in ('starting', 'running') and wake.id <> all (v_live);
  perform dispatcher.warm_backend();
  return jsonb_build_object('renewed', v_renewed, 'broadcast_available', dispatcher.broadcast_hints_available(),
                            'fenced', coalesce(v_fenced, '[]'), 'unattended', coalesce(v_unattended, '[]'),
                            'orphaned', dispatcher.wakes_without_owner(v_instance),
                            'faults', dispatcher.new_faults(v_instance, (p_facts ->> 'faults_after')::bigint), 'now',
                                now());
end
$$;

COMMENT ON FUNCTION public.heartbeat_dispatcher_instance(p_instance_id uuid, p_live_wake_ids uuid[], p_nonce uuid, p_facts jsonb) IS 'One heartbeat: the instance lives, its leases are renewed, its canary (p_nonce) is sent; named are wakes it no longer owns (fenced) and wakes it owns without knowing of them (unattended: the answer to a claim or an adoption was lost), wakes nobody watches (orphaned) and side writes that failed (faults, after p_facts.faults_after).';

CREATE FUNCTION public.heartbeat_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid DEFAULT NULL::uuid, p_usage jsonb DEFAULT NULL::jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_run public.workflow_runs;
  v_before public.workflow_runs;
  v_code text;
begin
  v_run := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  v_code := dispatcher.workflow_claim_state(v_run, p_session, p_claim_token);
  if v_code not in ('ok', 'held') then
    return dispatcher.refuse_workflow_caller(v_code, v_run, p_tenant_id, p_run_id, p_session, p_claim_token, p_usage);
  end if;
  perform dispatcher.note_workflow_actor(v_run.claimed_by, null);
  v_run := dispatcher.start_workflow_run(v_run);
  v_before := v_run;
  v_run := dispatcher.book_workflow_usage(v_run, p_usage);
  return dispatcher.workflow_answer('ok', v_run) || jsonb_build_object(
    'booked', dispatcher.booked_since(v_before, v_run),
    'deadline_in', dispatcher.seconds_until(dispatcher.put_off(v_run.deadline_at, v_run.paused_at)));
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;

COMMENT ON FUNCTION public.heartbeat_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid, p_usage jsonb) IS 'A sign of life from the session that holds the run: the first one makes it running. May carry usage so far. not_yours, finished, not_found: stop working on it; busy: ask again.';

CREATE FUNCTION public.inbox_overview(p_tenant_id uuid, p_agent_slug text) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_agent_id uuid := dispatcher.find_inbox_agent(p_tenant_id, p_agent_slug);
begin
  if v_agent_id is null then
    return jsonb_build_object('code', 'unknown_agent');
  end if;
  return jsonb_build_object(
    'agent', jsonb_build_object('id', v_agent_id, 'slug', p_agent_slug),
    'actionable_count', (select count(*) from dispatcher.inbox_due as due
                          where due.tenant_id = p_tenant_id and due.agent_id = v_agent_id
                            and due.due_at <= clock_timestamp()),
    'by_status', (select coalesce(jsonb_object_agg(counted.status, counted.amount), '{}'::jsonb)
                    from (select item.status, count(*) as amount from dispatcher.agent_inbox_items as item
                           where item.tenant_id = p_tenant_id and item.agent_id = v_agent_id
                             and item.status in ('pending', 'failed', 'leased')
                           group by item.status) as counted),
    'items', (select coalesce(jsonb_agg(listed.entry order by listed.created_at, listed.id), '[]'::jsonb)
                from (select item.created_at, item.id, jsonb_build_object(
                               'inbox_item_id', item.id, 'event_type', item.event_type, 'summary', item.summary,
                               'task_id', item.task_id, 'status', item.status, 'attempt', item.attempt_count,
                                   'max_attempts', item.max_attempts,
                               'due_at', dispatcher.finite_time(greatest(due.due_at, due.created_at)),
                               'leased_until', dispatcher.finite_time(item.leased_until),
                               'created_at', dispatcher.finite_time(item.created_at)) as entry
                        from dispatcher.agent_inbox_items as item
                        left join dispatcher.inbox_due as due on due.id = item.id
                       where item.tenant_id = p_tenant_id and item.agent_id = v_agent_id
                         and item.status in ('pending', 'failed', 'leased')
                       order by item.created_at, item.id
                       limit 50) as listed));
end
$$;

COMMENT ON FUNCTION public.inbox_overview(p_tenant_id uuid, p_agent_slug text) IS 'What waits for an agent, without leasing: {agent, actionable_count (due now), by_status (pending, failed, leased), items (the 50 oldest open; due_at: when it may be worked on, null without attempts left)}, or {code: unknown_agent}.';

CREATE FUNCTION public.lease_inbox_item(p_agent_id uuid, p_lease_seconds integer DEFAULT 120) RETURNS SETOF public.agent_inbox_items
    LANGUAGE sql
    SET search_path TO ''
    AS $$
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
      $$;

COMMENT ON FUNCTION public.lease_inbox_item(p_agent_id uuid, p_lease_seconds integer) IS 'Leases the oldest item of an agent that has attempts left; spends one attempt.';

CREATE FUNCTION public.lease_inbox_items(p_tenant_id uuid, p_agent_slug text, p_limit integer DEFAULT 1, p_lease_seconds integer DEFAULT 120, p_lease_token uuid DEFAULT NULL::uuid, p_wake_id uuid DEFAULT NULL::uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_agent_id uuid := dispatcher.find_inbox_agent(p_tenant_id, p_agent_slug);
  v_token uuid := coalesce(p_lease_token, gen_random_uuid());
  v_seconds integer := least(greatest(coalesce(p_lease_seconds, 120), 1), 86400);
  v_wanted integer := least(greatest(coalesce(p_limit, 1), 1), 100);
  v_wake record;
  v_items jsonb;
begin
  if v_agent_id is null then
    return jsonb_build_object('code', 'unknown_agent');
  end if;
  -- A repeat waits for the first call of the same token, then gets that call's items: no second attempt is spent.
  perform pg_advisory_xact_lock(hashtextextended('lease_inbox_items ' || v_token::text, 0));
  v_items := dispatcher.inbox_items_of_lease(v_agent_id, v_token);
  if jsonb_array_length(v_items) = 0 then
    v_wake := dispatcher.wake_to_lease_in(v_agent_id, p_wake_id);
    if v_wake.is_over then
      return jsonb_build_object('code', 'wake_over');
    end if;
    v_items := dispatcher.lease_due_items(p_tenant_id, v_agent_id, v_wanted, v_seconds, v_token, v_wake.wake_id);
  end if;
  if v_items is null then  -- there is work, and it cannot be had: not an empty inbox
    return jsonb_build_object('applied', false, 'code', 'busy');
  end if;
  return jsonb_build_object('agent', jsonb_build_object('id', v_agent_id, 'slug', p_agent_slug), 'items', v_items);
exception when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy');
end
$$;

COMMENT ON FUNCTION public.lease_inbox_items(p_tenant_id uuid, p_agent_slug text, p_limit integer, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) IS 'Leases up to p_limit (1-100) due items of an agent, oldest first, for p_lease_seconds (1-86400): {agent: {id, slug}, items: [...]}, or {code: unknown_agent | wake_over | busy}. The items of one call share p_lease_token; a repeat with the same token returns the same items. p_wake_id: the wake the caller belongs to; wake_over when the agent has another one by now.';

CREATE FUNCTION public.list_budgets(p_tenant_id uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
  select jsonb_build_object('code', 'ok', 'budgets', coalesce(jsonb_agg(
           dispatcher.shown_row(to_jsonb(budget) - 'tenant_id') || coalesce(dispatcher.shown_row(to_jsonb(evaluated))
              - array['id', 'name', 'scope', 'scope_id', 'period', 'action', 'fail_closed', 'cap_usd', 'cap_tokens',
                      'revision'],
                  '{}')
           || jsonb_build_object('events', (select coalesce(jsonb_agg(event.event_kind order by event.id), '[]')
                                              from public.budget_events as event
                                             where event.budget_id = budget.id
                                               and event.period_key = evaluated.period_key))
           order by budget.active desc, budget.scope, budget.scope_id, budget.period, budget.created_at), '[]'))
    from public.budgets as budget
    left join unnest(dispatcher.evaluate_budgets(p_tenant_id)) as evaluated
      on evaluated.id = budget.id
   where budget.tenant_id = p_tenant_id
$$;

COMMENT ON FUNCTION public.list_budgets(p_tenant_id uuid) IS 'All budgets; the active ones with period, settled and reserved spend, and this period''s events.';

CREATE FUNCTION public.list_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_status text, p_limit integer) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_gateway_id constant uuid := dispatcher.find_gateway(p_tenant_id, p_gateway);
  v_agents constant uuid[] := array(select dispatcher.agents_of_operator(p_tenant_id, v_gateway_id, p_agent));
begin
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  elsif p_agent is not null and cardinality(v_agents) = 0 then
    return dispatcher.unknown_agent(v_gateway_id);
  end if;
  return jsonb_build_object('code', 'ok', 'items', coalesce((
    select jsonb_agg(dispatcher.shown_row(to_jsonb(listed)) order by listed.created_at desc)
      from (select item.id, agent.slug as agent, item.event_type, item.status, item.attempt_count, item.max_attempts,
          item.created_at,
                   item.leased_until, left(item.summary, 200) as summary,
                       left(item.context ->> 'last_failure_reason', 500) as last_failure_reason
              from dispatcher.agent_inbox_items as item
              join dispatcher.agents as agent on agent.id = item.agent_id
             where item.tenant_id = p_tenant_id and item.agent_id = any (v_agents)
               and (p_status is null or item.status::text = p_status)
             order by item.created_at desc limit least(greatest(coalesce(p_limit, 50), 1), 1000)) as listed), '[]'));
end
$$;

COMMENT ON FUNCTION public.list_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_status text, p_limit integer) IS 'The newest items of a gateway''s agents, or of one of them, for an operator.';

CREATE FUNCTION public.list_wakes(p_tenant_id uuid, p_gateway text, p_agent text, p_limit integer) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_gateway_id uuid;
begin
  v_gateway_id := dispatcher.find_gateway(p_tenant_id, p_gateway);
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  if p_agent is not null and not exists (select from dispatcher.agents where gateway_id = v_gateway_id
      and (slug = p_agent or id::text = p_agent)) then
    return dispatcher.unknown_agent(v_gateway_id);
  end if;
  return jsonb_build_object('code', 'ok', 'wakes', coalesce((
    with listed as (
      select wake.*, agent.slug
        from public.agent_wakes as wake join dispatcher.agents as agent on agent.id = wake.agent_id
       where wake.gateway_id = v_gateway_id and (p_agent is null or agent.slug = p_agent or agent.id::text = p_agent)
       order by wake.ended_at is null desc, wake.claimed_at desc limit least(greatest(coalesce(p_limit, 50), 1), 1000)
    ), costs as (
      -- One join for all of them: usage has no index by agent, and must not be read once per wake.
      select listed.id, sum(usage.cost_total_usd) as cost_usd
        from listed join dispatcher.agent_usage as usage
          on usage.agent_id = listed.agent_id
              and usage.occurred_at between listed.started_at and coalesce(listed.ended_at, now())
       group by listed.id
    )
    select jsonb_agg(jsonb_build_object('wake_id', listed.id, 'agent', listed.slug, 'path', listed.path, 'state',
        listed.state,
                       'claimed_at', listed.claimed_at, 'started_at', listed.started_at, 'ended_at', listed.ended_at,
                       'seconds', round(extract(epoch from dispatcher.known_time(coalesce(listed.ended_at,
                           now())) - dispatcher.known_time(listed.started_at)), 1),
                       'exit_code', listed.exit_code, 'error', left(listed.error, 500), 'items',
                           cardinality(listed.item_ids),
                       'cost_usd', costs.cost_usd)
                     order by listed.ended_at is null desc, listed.claimed_at desc)
      from listed left join costs using (id)), '[]'));
end
$$;

COMMENT ON FUNCTION public.list_wakes(p_tenant_id uuid, p_gateway text, p_agent text, p_limit integer) IS 'The newest wakes of a gateway, or of one of its agents, live ones first, for an operator. cost_usd is what the agent''s rows in agent_usage say of the time between start and end: a run of the same agent outside the wake counts, too; NULL when there is none.';

CREATE FUNCTION public.list_workflow_runs(p_tenant_id uuid, p_status text DEFAULT NULL::text, p_workflow_type text DEFAULT NULL::text, p_agent text DEFAULT NULL::text, p_limit integer DEFAULT 50) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
  select jsonb_build_object('count', count(*), 'runs',
      coalesce(jsonb_agg(dispatcher.workflow_run_json(listed) - 'input_payload' - 'output_summary'
                              order by listed.created_at desc, listed.id), '[]'))
    from (select * from public.workflow_runs
           where tenant_id = p_tenant_id and (p_status is null or status = p_status)
             and (p_workflow_type is null or workflow_type = p_workflow_type)
             and (p_agent is null or owner_agent_id = p_agent or pinned_agent_id = p_agent)
           order by created_at desc, id limit least(greatest(p_limit, 1), 1000)) as listed
$$;

COMMENT ON FUNCTION public.list_workflow_runs(p_tenant_id uuid, p_status text, p_workflow_type text, p_agent text, p_limit integer) IS 'The newest runs, without their payloads: {count, runs}.';

CREATE FUNCTION public.monitor_workflows(p_instance_id uuid) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_tick constant dispatcher.tick := dispatcher.tick_of(p_instance_id);
begin
  return jsonb_build_object(
    'stop_wakes', dispatcher.wakes_to_stop(p_instance_id), 'orphan_after',
        dispatcher.orphan_after_seconds(v_tick.settings),
    'suspects', (
      select coalesce(jsonb_agg(jsonb_build_object(
               'run_id', run.id, 'attempt', run.dispatch_attempts, 'workflow_type', run.workflow_type, 'agent_id',
                   run.owner_agent_id,
               'session_id', run.session_id, 'claim_token', run.claim_token,
               'silent_for', -dispatcher.seconds_until(dispatcher.last_heartbeat(run)),
               'workspace_slug', (select slug from public.workspace where tenant_id = run.tenant_id limit 1))
               order by run.last_heartbeat_at), '[]')
        from public.workflow_runs as run
        join dispatcher.agents as agent on agent.tenant_id = run.tenant_id and agent.slug = run.owner_agent_id
         and agent.gateway_id = v_tick.gateway_id
       where run.tenant_id = v_tick.tenant_id and run.status = 'running'
         and dispatcher.is_suspect(run, v_tick.settings)));
end
$$;

COMMENT ON FUNCTION public.monitor_workflows(p_instance_id uuid) IS 'What the monitor of a gateway looks at: silent running runs of its agents that were not spawned again in this attempt (suspects), the silence that makes one (orphan_after), and wakes whose run was ended (stop_wakes).';

CREATE FUNCTION public.note_sweep(p_instance_id uuid, p_sweep jsonb) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
  update public.dispatcher_instances set last_sweep_at = now(), last_heartbeat_at = now(), last_sweep = p_sweep
      where id = p_instance_id
$$;

COMMENT ON FUNCTION public.note_sweep(p_instance_id uuid, p_sweep jsonb) IS 'Keeps what a sweep did, for status: counts by phase, errors, ms.';

CREATE FUNCTION public.poll_workflow_runs(p_tenant_id uuid, p_agent text, p_limit integer) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
  select jsonb_build_object('agent', p_agent, 'count', count(*), 'runs',
      coalesce(jsonb_agg(dispatcher.workflow_run_json(pending)
                              order by pending.priority desc, pending.dispatched_at, pending.id), '[]'))
    from (select * from public.workflow_runs
           where tenant_id = p_tenant_id and status = 'dispatched' and (p_agent is null or owner_agent_id = p_agent)
           order by priority desc, dispatched_at, id limit least(greatest(p_limit, 1), 100)) as pending
$$;

COMMENT ON FUNCTION public.poll_workflow_runs(p_tenant_id uuid, p_agent text, p_limit integer) IS 'The runs that wait to be claimed by an agent (or by any): {agent, count, runs}.';

CREATE FUNCTION public.post_inbox_item(p_tenant_id uuid, p_from_agent_slug text, p_to_agent_slug text, p_event_type text, p_summary text, p_context jsonb DEFAULT '{}'::jsonb, p_request_key text DEFAULT NULL::text, p_post_id uuid DEFAULT NULL::uuid, p_wake_id uuid DEFAULT NULL::uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_recipient_id uuid := dispatcher.find_inbox_agent(p_tenant_id, p_to_agent_slug);
  v_context jsonb := coalesce(p_context, '{}');
  v_summary text := left(p_summary, 2000);
  v_content text := concat_ws(chr(31), p_to_agent_slug, p_event_type, v_summary, v_context::text);
  v_now timestamptz := clock_timestamp();
  v_refusal record;
  v_wake public.agent_wakes;
  v_origin public.inbox_item_origins;
  v_known public.inbox_item_origins;
begin
  v_origin.tenant_id := p_tenant_id;
  v_origin.from_agent_id := dispatcher.find_inbox_agent(p_tenant_id, p_from_agent_slug);
  v_refusal := dispatcher.refuse_post(v_origin.from_agent_id, v_recipient_id, p_event_type, v_context, p_request_key);
  if v_refusal.code is null then
    v_refusal := dispatcher.refuse_post_content(p_tenant_id, p_summary, v_context);
  end if;
  if v_refusal.code is not null then
    return jsonb_build_object('applied', false, 'code', v_refusal.code, 'detail', v_refusal.detail);
  end if;
  perform pg_advisory_xact_lock(hashtextextended('post_inbox_item ' || v_origin.from_agent_id::text, 0));
  v_wake := dispatcher.find_sender_wake(v_origin.from_agent_id, p_wake_id);
  v_origin.wake_id := v_wake.id;
  v_origin.request_key := dispatcher.inbox_request_key(p_request_key, p_post_id);
  if coalesce(p_request_key, '') = '' then  -- a request with a name is known by that name alone
    v_origin.content_key := dispatcher.inbox_content_key(v_wake.id, v_content, v_now);
  end if;
  v_known := dispatcher.find_posted_item(p_tenant_id, v_origin.from_agent_id, v_origin.request_key, array[
    v_origin.content_key, case when v_origin.content_key is not null
        then dispatcher.inbox_content_key(v_wake.id, v_content, v_now - interval '10 minutes') end]);
  if v_known.item_id is not null then
    return jsonb_build_object('applied', true, 'code', 'already', 'inbox_item_id', v_known.item_id, 'chain_depth',
        v_known.chain_depth);
  end if;
  v_origin.chain_depth := dispatcher.depth_of_post(v_wake);
  return jsonb_build_object('applied', true, 'code', 'ok', 'chain_depth', v_origin.chain_depth, 'inbox_item_id',
      dispatcher.insert_post(
    v_origin, v_recipient_id, p_to_agent_slug, p_event_type, v_summary, v_context
        || jsonb_build_object('from_agent', p_from_agent_slug)));
exception when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy');
end
$$;

COMMENT ON FUNCTION public.post_inbox_item(p_tenant_id uuid, p_from_agent_slug text, p_to_agent_slug text, p_event_type text, p_summary text, p_context jsonb, p_request_key text, p_post_id uuid, p_wake_id uuid) IS 'An agent hands work to an agent: {applied, code: ok|already|unknown_agent|unknown_recipient|unknown_task|self_handoff_unmarked|invalid|busy, inbox_item_id, chain_depth}. unknown_task: context.task_id is the id of no task of the tenant. Records the sender and its wake (p_wake_id: the one the caller knows it runs in). already: p_request_key or p_post_id (one run of the caller''s script) has made that item before, or the same content from the same wake waits open. To itself only with context.self_handoff = true.';

CREATE FUNCTION public.register_dispatcher_instance(p_tenant_id uuid, p_gateway text, p_identity jsonb, p_settings jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_gateway_id constant uuid := dispatcher.find_gateway(p_tenant_id, p_gateway);
  v_id uuid := coalesce((p_identity ->> 'instance_id')::uuid, gen_random_uuid());
begin
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  if num_nonnulls(p_identity ->> 'hostname', p_identity ->> 'host_id', p_identity ->> 'pid',
      p_identity ->> 'version') < 4 then
    return jsonb_build_object('code', 'invalid', 'error', 'p_identity needs hostname, host_id, pid and version');
  end if;
  insert into public.dispatcher_gateways (gateway_id, tenant_id) values (v_gateway_id, p_tenant_id)
      on conflict do nothing;
  perform dispatcher.forget_old_instances(p_tenant_id, v_gateway_id);
  insert into public.dispatcher_instances as instance (id, tenant_id, gateway_id, hostname, host_id, pid,
      pid_started_at, version)
  values (v_id, p_tenant_id, v_gateway_id, p_identity ->> 'hostname', p_identity ->> 'host_id',
      (p_identity ->> 'pid')::integer,
          (p_identity ->> 'pid_started_at')::double precision, p_identity ->> 'version')
  on conflict (id) do update set state = 'running', stopped_at = null, last_heartbeat_at = now()
   where instance.gateway_id = excluded.gateway_id and instance.tenant_id = excluded.tenant_id
     and instance.pid = excluded.pid
     and instance.host_id = excluded.host_id
  returning id into v_id;
  if v_id is null then
    return jsonb_build_object('code', 'id_taken', 'instance_id', p_identity ->> 'instance_id',
                              'error', 'another process is registered under this instance id');
  end if;
  perform dispatcher.keep_settings(v_id, p_tenant_id, p_settings);
  return jsonb_build_object('code', 'ok', 'instance_id', v_id, 'gateway_id', v_gateway_id,
                            'gateway_slug', (select slug from public.gateways where id = v_gateway_id),
                            'topic', dispatcher.dispatcher_gateway_topic(v_gateway_id), 'broadcast_available',
                                dispatcher.broadcast_hints_available(),
                            'open_wakes', dispatcher.open_wakes_of_others(v_id), 'now', now());
end
$$;

COMMENT ON FUNCTION public.register_dispatcher_instance(p_tenant_id uuid, p_gateway text, p_identity jsonb, p_settings jsonb) IS 'Registers a daemon for a gateway (slug or id) under the id it chose (p_identity.instance_id); a repeat is the same row. Answers {code: ok, instance_id, gateway_id, topic, broadcast_available, open_wakes}, {code: unknown_gateway, known}, {code: id_taken, error} (the id is another process''s) or {code: invalid, error}.';

CREATE FUNCTION public.release_inbox_item(p_tenant_id uuid, p_gateway text, p_item_id uuid, p_reason text DEFAULT NULL::text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_gateway_id constant uuid := dispatcher.find_gateway(p_tenant_id, p_gateway);
  v_agents constant uuid[] := array(select dispatcher.agents_of_operator(p_tenant_id, v_gateway_id, null));
  v_item dispatcher.agent_inbox_items;
begin
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  select * into v_item from dispatcher.agent_inbox_items
   where id = p_item_id and tenant_id = p_tenant_id and agent_id = any (v_agents) for update skip locked;
  if v_item.id is null then
    return jsonb_build_object('applied', false, 'code', case when exists (
      select from dispatcher.agent_inbox_items where id = p_item_id and tenant_id = p_tenant_id
          and agent_id = any (v_agents)) then 'busy' else 'not_found' end);
  elsif v_item.status <> 'leased' then
    return jsonb_build_object('applied', false, 'code', 'not_leased', 'status', v_item.status);
  end if;
  return jsonb_build_object('applied', true, 'code', 'ok', 'status', 'pending', 'leased_until', v_item.leased_until,
    'wake_id', dispatcher.release_lease(v_item, dispatcher.clean_inbox_reason(coalesce(p_reason,
        'released by the operator'))));
exception when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy');
end
$$;

COMMENT ON FUNCTION public.release_inbox_item(p_tenant_id uuid, p_gateway text, p_item_id uuid, p_reason text) IS 'Ends the lease of an item, whoever holds it: pending again, the attempt given back, its token void (a late close is lease_lost), a notification. {applied, code: ok|not_leased|not_found|busy, status, leased_until, wake_id}.';

CREATE FUNCTION public.release_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid DEFAULT NULL::uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_run public.workflow_runs;
  v_code text;
begin
  v_run := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  v_code := dispatcher.workflow_claim_state(v_run, p_session, p_claim_token);
  if v_code = 'not_yours' and dispatcher.has_released(v_run, p_tenant_id, p_run_id, p_session, p_claim_token) then
    return dispatcher.workflow_answer('already', v_run);
  elsif v_code <> 'ok' then
    return dispatcher.refuse_workflow_caller(v_code, v_run, p_tenant_id, p_run_id, p_session, p_claim_token, null);
  end if;
  perform dispatcher.note_workflow_actor(v_run.claimed_by, 'released');
  return dispatcher.workflow_answer('ok', dispatcher.return_workflow_run(v_run, 'released'));
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;

COMMENT ON FUNCTION public.release_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid) IS 'The session that holds the run gives it back to the queue; the fourth time it fails. A repeat is already; busy: ask again.';

CREATE FUNCTION public.remove_workflow_route(p_tenant_id uuid, p_workflow_type text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
begin
  delete from public.workflow_agent_routing where tenant_id = p_tenant_id and workflow_type = p_workflow_type;
  return jsonb_build_object('applied', found, 'code', case when found then 'ok' else 'not_found' end, 'workflow_type',
      p_workflow_type);
exception when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy', 'workflow_type', p_workflow_type);
end
$$;

COMMENT ON FUNCTION public.remove_workflow_route(p_tenant_id uuid, p_workflow_type text) IS 'Takes a route away; queued runs of the type wait for another one. busy: another session holds the route, ask again.';

CREATE FUNCTION public.report_wakes(p_instance_id uuid, p_reports jsonb, p_claim_limit integer, p_request uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_report jsonb;
  v_answer jsonb;
  v_busy text[] := '{}';
  v_results jsonb := '[]';
  v_claims jsonb := '[]';
  v_claims_busy boolean := false;
  v_instance public.dispatcher_instances;
  v_held text;
  v_ends_at constant timestamptz := clock_timestamp() + interval '2 seconds';
begin
  if jsonb_typeof(p_reports) is distinct from 'array' then
    raise exception 'p_reports must be an array of {report, wake_id, claim_token}' using errcode = 'OD002';
  end if;
  v_instance := dispatcher.running_instance(p_instance_id);
  perform set_config('lock_timeout', '100ms', true);
  for v_report in select value from jsonb_array_elements(p_reports) loop
    -- The end of a wake does not overtake its start: what was busy once in this call stays so.
    if v_report ->> 'wake_id' = any (v_busy) or clock_timestamp() > v_ends_at then
      v_answer := jsonb_build_object('wake_id', v_report ->> 'wake_id', 'applied', false, 'code', 'busy');
    else
      v_answer := dispatcher.apply_report(v_report, v_instance.gateway_id);
    end if;
    if v_answer ->> 'code' = 'busy' then
      v_busy := v_busy || (v_report ->> 'wake_id');
    end if;
    v_results := v_results || (v_answer || jsonb_build_object('report', v_report ->> 'report'));
  end loop;
  -- The gateway's row is the last to be waited for, and whoever holds it waits for nobody: what is reported stands in
  -- any case.
  begin
    v_claims := dispatcher.claim_waiting_wakes(p_instance_id, p_claim_limit, p_request);
  exception when lock_not_available then
    v_claims_busy := true;
    v_held := left(sqlerrm, 1000);
  end;
  perform dispatcher.warm_backend();
  return jsonb_build_object('results', v_results, 'claims', v_claims, 'claims_busy', v_claims_busy, 'held', v_held);
end
$$;

COMMENT ON FUNCTION public.report_wakes(p_instance_id uuid, p_reports jsonb, p_claim_limit integer, p_request uuid) IS 'What happened to wakes since the last call, and the next claims off the waitlist, in one round trip: {results, claims, claims_busy, held}. p_reports: [{report: started|ended, wake_id, claim_token, …}]. A result whose code is busy is to be reported again; claims_busy: another session held the gateway (held: what, and who), look again soon.';

CREATE FUNCTION public.report_workflow_usage(p_tenant_id uuid, p_run_id uuid, p_session text, p_usage jsonb, p_claim_token uuid DEFAULT NULL::uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_before public.workflow_runs;
  v_run public.workflow_runs;
  v_code text;
begin
  v_before := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  v_code := dispatcher.workflow_claim_state(v_before, p_session, p_claim_token);
  if v_code not in ('ok', 'held', 'finished') then
    return dispatcher.refuse_workflow_caller(v_code, v_before, p_tenant_id, p_run_id, p_session, p_claim_token,
        p_usage);
  end if;
  v_run := dispatcher.book_workflow_usage(v_before, p_usage);
  return dispatcher.workflow_answer('ok', v_run) || jsonb_build_object(
    'usage_booked', dispatcher.workflow_usage_values(coalesce(p_usage, '{}')) <> '{}',
    'booked', dispatcher.booked_since(v_before, v_run));
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;

COMMENT ON FUNCTION public.report_workflow_usage(p_tenant_id uuid, p_run_id uuid, p_session text, p_usage jsonb, p_claim_token uuid) IS 'What the run has cost so far, in all. Also after its end (ok), and after a lost claim (not_yours, booked with that claim). usage_booked: whether anything could be kept; booked: what that added, {cost_usd, tokens}.';

CREATE FUNCTION public.request_wake(p_tenant_id uuid, p_gateway text, p_agent text, p_dry_run boolean, p_settings jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_gateway_id uuid;
  v_agent record;
  v_gates record;
  v_settings public.dispatcher_settings;
  v_dry_run constant boolean := coalesce(p_dry_run, true);
begin
  v_gateway_id := dispatcher.find_gateway(p_tenant_id, p_gateway);
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  end if;
  select id, slug into v_agent from dispatcher.agents where tenant_id = p_tenant_id and gateway_id = v_gateway_id
      and (slug = p_agent or id::text = p_agent);
  if v_agent is null then
    return jsonb_build_object('code', 'unknown_agent', 'known',
      coalesce((select jsonb_agg(slug order by slug) from dispatcher.agents where tenant_id = p_tenant_id
          and gateway_id = v_gateway_id), '[]'));
  end if;
  v_settings := dispatcher.settings_of_gateway(v_gateway_id, p_settings);
  v_gates := dispatcher.wake_gates(dispatcher.read_gate_facts(v_agent.id, v_settings), v_settings, v_dry_run);
  if dispatcher.live_wakes_of_gateway(v_gateway_id) >= v_settings.max_concurrent_wakes then
    v_gates.blocked := v_gates.blocked || 'concurrency_limit'::text;
  end if;
  if not v_dry_run and v_gates.blocked <@ array['concurrency_limit'] then
    if (dispatcher.lock_wake_state(v_agent.id, p_tenant_id)).agent_id is null then
      v_gates.blocked := array['busy'];
    else
      perform dispatcher.join_waitlist(v_agent.id, 'command', now(), now());
      perform dispatcher.send_gateway_hint(v_gateway_id, 'agent', jsonb_build_object('agent_id', v_agent.id));
    end if;
  end if;
  return jsonb_build_object('code', 'ok', 'agent', v_agent.slug, 'agent_id', v_agent.id, 'blocked',
      to_jsonb(v_gates.blocked),
                            'retry_in', dispatcher.seconds_until(v_gates.retry_at), 'requested', not v_dry_run
                                and v_gates.blocked <@ array['concurrency_limit'],
                            'daemons', (select count(*) from public.dispatcher_instances as instance
                                where gateway_id = v_gateway_id and state = 'running'
                                          and not dispatcher.is_instance_silent(instance)), 'now', clock_timestamp());
end
$$;

COMMENT ON FUNCTION public.request_wake(p_tenant_id uuid, p_gateway text, p_agent text, p_dry_run boolean, p_settings jsonb) IS 'Asks for one wake through the gates: puts the agent on the waitlist and hints its daemon, or names the gates that refuse (all of them when p_dry_run).';

CREATE FUNCTION public.requeue_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_item_ids uuid[], p_dead boolean DEFAULT false, p_since text DEFAULT NULL::text, p_dry_run boolean DEFAULT false) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_limit constant integer := 500;
  v_gateway_id constant uuid := dispatcher.find_gateway(p_tenant_id, p_gateway);
  v_agents constant uuid[] := array(select dispatcher.agents_of_operator(p_tenant_id, v_gateway_id, p_agent));
  v_since constant timestamptz := dispatcher.since(p_since);
  v_items uuid[];
  v_owners uuid[];
  v_done uuid[] := '{}';
begin
  if v_gateway_id is null then
    return dispatcher.unknown_gateway(p_tenant_id);
  elsif p_agent is not null and cardinality(v_agents) = 0 then
    return dispatcher.unknown_agent(v_gateway_id);
  end if;
  select array_agg(chosen.item_id), array_agg(chosen.agent_id) into v_items, v_owners
    from dispatcher.items_to_requeue(v_agents, p_agent is not null, p_item_ids, coalesce(p_dead, false), v_since,
                                     case when p_dry_run then 100000 else v_limit end) as chosen;
  if not coalesce(p_dry_run, false) then
    -- Named alone, an agent is freed of its stall also where it has nothing to bring back.
    v_done := dispatcher.requeue_chosen_items(case when p_agent is not null then v_agents
        else array(select distinct unnest(v_owners)) end, v_items, v_owners);
  end if;
  return jsonb_build_object(
    'code', 'ok', 'requeued', cardinality(v_done), 'item_ids', to_jsonb(v_done), 'dry_run', coalesce(p_dry_run, false),
    'found', coalesce(cardinality(v_items), 0), 'found_ids', to_jsonb(coalesce(v_items[1:100], '{}')),
    'busy', case when coalesce(p_dry_run, false) then 0 else coalesce(cardinality(v_items),
        0) - cardinality(v_done) end,
    'again', cardinality(v_done) > 0 and cardinality(v_items) >= v_limit,
    'dead_letters_left', (select count(*) from dispatcher.items_to_requeue(v_agents, false, null, true, null, 10000)));
end
$$;

COMMENT ON FUNCTION public.requeue_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_item_ids uuid[], p_dead boolean, p_since text, p_dry_run boolean) IS 'Brings items back to pending and clears their agents'' stall, at most 500 a call (again: call once more): the given failed or dead_letter ids; with p_dead what was given up, since p_since (a time, or an age such as 2h); else all that a stall set aside, of one agent also what a chain limit did. Spent attempts start anew. busy: held by somebody at this moment, left alone; dead_letters_left: given up and not asked for; p_dry_run only says what it found.';

CREATE FUNCTION public.respawn_workflow_run(p_instance_id uuid, p_run_id uuid, p_claim_token uuid, p_request uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_tick constant dispatcher.tick := dispatcher.tick_of(p_instance_id);
  v_claimant dispatcher.claimant;
  v_run public.workflow_runs;
  v_wake public.agent_wakes;
  v_fault text;
begin
  if p_request is null then
    return dispatcher.refuse_respawn(p_run_id, 'invalid');
  end if;
  select * into v_wake from public.agent_wakes where claim_request = p_request and state in ('starting', 'running')
      limit 1;
  if v_wake.id is not null then  -- asked before under the same request: the same grant
    select * into v_run from public.workflow_runs where id = v_wake.workflow_run_id;
    return dispatcher.respawn_grant(v_wake, v_run);
  end if;
  v_run := dispatcher.lock_workflow_run(v_tick.tenant_id, p_run_id);
  v_fault := dispatcher.fault_of_orphan(v_run, p_claim_token, v_tick.settings);
  if v_fault is not null then
    return dispatcher.refuse_respawn(p_run_id, v_fault);
  end if;
  v_claimant := dispatcher.lock_gateway(p_instance_id);
  perform set_config('lock_timeout', '100ms', true);
  return dispatcher.respawn_locked_run(v_claimant, v_run, p_request);
exception when lock_not_available then
  return dispatcher.refuse_respawn(p_run_id, 'busy');
end
$$;

COMMENT ON FUNCTION public.respawn_workflow_run(p_instance_id uuid, p_run_id uuid, p_claim_token uuid, p_request uuid) IS 'Grants the one new process an orphan may have in this attempt, as a wake of its agent (path workflow) under the same cap, in-flight rule and budgets; the run gets a new session and fence. Else the reason: not_an_orphan, already_respawned, not_local, busy (another session holds a row that is needed), invalid, or a gate.';

CREATE FUNCTION public.retry_workflow_run(p_tenant_id uuid, p_run_id uuid, p_actor text, p_reason text DEFAULT NULL::text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_before public.workflow_runs;
  v_run public.workflow_runs;
begin
  v_before := dispatcher.lock_workflow_run(p_tenant_id, p_run_id);
  if v_before.id is null then
    return dispatcher.refuse_run(p_run_id, 'not_found');
  elsif v_before.status not in ('failed', 'timed_out') then
    return dispatcher.workflow_answer('not_failed', v_before);
  end if;
  -- What the failed try cost stays spent.
  perform dispatcher.settle_workflow_claim(v_before, v_before.status);
  perform dispatcher.note_workflow_actor(p_actor, coalesce(p_reason, 'override_failure'));
  v_run := dispatcher.start_anew(v_before);
  perform dispatcher.audit_workflow_action(
    p_tenant_id, p_actor, 'override_failure', 'run:' || p_run_id,
    jsonb_build_object('status', v_before.status, 'last_error', v_before.last_error),
    jsonb_build_object('status', v_run.status, 'reason', left(p_reason, 4000)));
  return dispatcher.workflow_answer('ok', v_run);
exception when lock_not_available then
  return dispatcher.refuse_run(p_run_id, 'busy');
end
$$;

COMMENT ON FUNCTION public.retry_workflow_run(p_tenant_id uuid, p_run_id uuid, p_actor text, p_reason text) IS 'override_failure: a failed or timed out run starts anew, with all its attempts; audited. The only way out of a final state. busy: another session holds the run, ask again.';

CREATE FUNCTION public.seed_workflow_routes(p_tenant_id uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_faults constant text[] := dispatcher.faults_of_tenant(p_tenant_id);
begin
  return case when cardinality(v_faults) > 0 then dispatcher.invalid(v_faults)
      else dispatcher.add_reference_routes(p_tenant_id) end;
exception when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy', 'seeded', 0, 'routes', jsonb_build_array());
end
$$;

COMMENT ON FUNCTION public.seed_workflow_routes(p_tenant_id uuid) IS 'The reference routes, where a type has none yet. busy: ask again.';

CREATE FUNCTION public.set_budget(p_tenant_id uuid, p_name text, p_scope text DEFAULT NULL::text, p_scope_id text DEFAULT NULL::text, p_period text DEFAULT NULL::text, p_cap_usd numeric DEFAULT NULL::numeric, p_cap_tokens bigint DEFAULT NULL::bigint, p_action text DEFAULT NULL::text, p_timezone text DEFAULT NULL::text, p_fail_closed boolean DEFAULT NULL::boolean, p_budget_id uuid DEFAULT NULL::uuid, p_new_name text DEFAULT NULL::text, p_only_change boolean DEFAULT false, p_actor text DEFAULT NULL::text) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_found constant jsonb[] := dispatcher.budgets_to_set(p_tenant_id, p_budget_id, p_name, p_scope, p_scope_id,
      p_period);
  v_before constant jsonb := v_found[1];
  v_change constant jsonb := jsonb_strip_nulls(jsonb_build_object(
    'name', p_new_name, 'scope', p_scope, 'scope_id', nullif(p_scope_id, ''), 'period', p_period,
    'timezone', p_timezone, 'cap_usd', p_cap_usd, 'cap_tokens', p_cap_tokens, 'action_on_exceed', p_action,
    'fail_closed', p_fail_closed));
  v_budget jsonb := coalesce(v_before, jsonb_build_object(
    'id', gen_random_uuid(), 'tenant_id', p_tenant_id, 'name', p_name, 'scope', 'fleet', 'scope_id', null,
    'period', 'monthly', 'timezone', 'UTC', 'action_on_exceed', 'warn', 'fail_closed', false));
  v_changed jsonb := '{}';
  v_faults text[];
begin
  if cardinality(v_found) > 1 then
    return jsonb_build_object('applied', false, 'code', 'ambiguous', 'budget', p_name,
                              'budgets', (dispatcher.budgets_named(p_tenant_id, btrim(p_name))).active);
  elsif v_before is null and (p_budget_id is not null or p_only_change) then
    return jsonb_build_object('applied', false, 'code', 'not_found', 'budget_id', p_budget_id, 'budget', p_name);
  end if;
  v_budget := dispatcher.changed_budget(v_budget, v_change);
  v_faults := dispatcher.faults_of_budget(p_tenant_id, v_budget ->> 'name', v_budget ->> 'scope',
    v_budget ->> 'scope_id', v_budget ->> 'period', (v_budget ->> 'cap_usd')::numeric,
    (v_budget ->> 'cap_tokens')::bigint, v_budget ->> 'action_on_exceed', v_budget ->> 'timezone');
  if cardinality(v_faults) > 0 then
    return dispatcher.invalid(v_faults);
  end if;
  v_budget := dispatcher.write_budget(v_budget);
  if v_before is not null then
    v_changed := dispatcher.differences(v_before, v_budget);
  end if;
  if v_before is null or v_changed <> '{}' then
    perform dispatcher.audit_workflow_action(p_tenant_id, p_actor, 'set_budget', 'budget:' || (v_budget ->> 'id'),
        v_before - 'tenant_id', v_budget - 'tenant_id');
  end if;
  return jsonb_build_object('applied', true, 'code', 'ok', 'budget', v_budget - 'tenant_id',
                            'created', v_before is null, 'changed', v_changed);
exception when unique_violation then
  return jsonb_build_object('applied', false, 'code', 'exists', 'faults', jsonb_build_array(
    'another active budget has this scope and period: ' || (
      select format('%s (%s)', other.name, other.id) from public.budgets as other
       where other.tenant_id = p_tenant_id and other.active and other.scope = v_budget ->> 'scope'
         and coalesce(other.scope_id, '') = coalesce(v_budget ->> 'scope_id', '')
         and other.period = v_budget ->> 'period')));
when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy', 'budget_id', p_budget_id);
end
$$;

COMMENT ON FUNCTION public.set_budget(p_tenant_id uuid, p_name text, p_scope text, p_scope_id text, p_period text, p_cap_usd numeric, p_cap_tokens bigint, p_action text, p_timezone text, p_fail_closed boolean, p_budget_id uuid, p_new_name text, p_only_change boolean, p_actor text) IS 'Changes the active budget of a name (and scope and period, where they are given), or p_budget_id; what is not given is kept. Makes one where there is none (fleet, monthly, UTC, warn), unless p_only_change. Audited. Answers {applied, code: ok | invalid | ambiguous (several have the name) | exists | not_found | busy, budget, created, changed ({column: [before, after]}) | faults | budgets}; busy: another session holds the budget, ask again.';

CREATE FUNCTION public.set_workflow_route(p_tenant_id uuid, p_workflow_type text, p_agent text, p_priority integer DEFAULT NULL::integer, p_max_concurrent integer DEFAULT NULL::integer, p_timeout_minutes integer DEFAULT NULL::integer) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_faults constant text[] := dispatcher.faults_of_route(p_tenant_id, p_workflow_type, p_agent, p_priority,
      p_max_concurrent, p_timeout_minutes);
  v_route public.workflow_agent_routing;
begin
  if cardinality(v_faults) > 0 then
    return dispatcher.invalid(v_faults);
  end if;
  insert into public.workflow_agent_routing as route (tenant_id, workflow_type, agent_id, priority, max_concurrent,
      timeout_minutes)
  values (p_tenant_id, btrim(p_workflow_type), btrim(p_agent), coalesce(p_priority, 0), coalesce(p_max_concurrent, 1),
          coalesce(p_timeout_minutes, 60))
  on conflict (tenant_id, workflow_type) do update
     set agent_id = excluded.agent_id, priority = coalesce(p_priority, route.priority),
         max_concurrent = coalesce(p_max_concurrent, route.max_concurrent),
         timeout_minutes = coalesce(p_timeout_minutes, route.timeout_minutes)
  returning * into v_route;
  return jsonb_build_object('applied', true, 'code', 'ok', 'route', to_jsonb(v_route) - 'tenant_id');
exception when lock_not_available then
  return jsonb_build_object('applied', false, 'code', 'busy', 'workflow_type', p_workflow_type);
end
$$;

COMMENT ON FUNCTION public.set_workflow_route(p_tenant_id uuid, p_workflow_type text, p_agent text, p_priority integer, p_max_concurrent integer, p_timeout_minutes integer) IS 'Routes a workflow type to an agent; what is not given keeps its value (else 0, 1 and 60). max_concurrent 0 disables it. invalid names every fault; busy: another session holds the route, ask again.';

CREATE FUNCTION public.show_workflow_run(p_tenant_id uuid, p_run_id uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
  select case when run.id is null then jsonb_build_object('code', 'not_found', 'run_id', p_run_id) else
    jsonb_build_object('code', 'ok', 'run', dispatcher.workflow_run_json(run),
      'events', (select coalesce(jsonb_agg(jsonb_build_object('at', event.at, 'from', event.from_status, 'to',
          event.to_status, 'attempt', event.attempt,
                   'actor', event.actor, 'reason', event.reason) order by event.id), '[]')
                       from public.workflow_run_events as event where event.run_id = p_run_id),
      'claims', (select coalesce(jsonb_agg(to_jsonb(claim) - array['claim_token', 'tenant_id', 'run_id',
          'workflow_type'] order by claim.claimed_at), '[]')
                   from public.workflow_claims as claim where claim.run_id = p_run_id),
      'bookings', (select coalesce(jsonb_agg(to_jsonb(booking) - array['id', 'tenant_id', 'run_id', 'workflow_type']
          order by booking.id), '[]')
                     from public.workflow_bookings as booking where booking.run_id = p_run_id),
      'notifications', (select coalesce(jsonb_agg(to_jsonb(note) - array['claim_token', 'tenant_id', 'run_id']
          order by note.attempt), '[]')
                          from public.workflow_notifications as note where note.run_id = p_run_id),
      'approvals', (select coalesce(jsonb_agg(to_jsonb(approval) - array['tenant_id', 'run_id']
          order by approval.created_at), '[]')
                      from public.workflow_approvals as approval where approval.run_id = p_run_id)) end
    from (select 1) as one_row left join public.workflow_runs as run on run.id = p_run_id
        and run.tenant_id = p_tenant_id
$$;

COMMENT ON FUNCTION public.show_workflow_run(p_tenant_id uuid, p_run_id uuid) IS 'One run whole: record, events, claims, what is booked for it, notifications, approvals.';

CREATE FUNCTION public.stop_dispatcher_instance(p_instance_id uuid) RETURNS void
    LANGUAGE sql
    SET search_path TO ''
    SET lock_timeout TO '250ms'
    AS $$
  update public.dispatcher_instances set state = 'stopped', stopped_at = now(), last_heartbeat_at = now()
   where id = p_instance_id and state <> 'stopped'
$$;

COMMENT ON FUNCTION public.stop_dispatcher_instance(p_instance_id uuid) IS 'A daemon ended in good order.';

CREATE FUNCTION public.sweep_inbox(p_instance_id uuid, p_phase text DEFAULT 'look'::text, p_cursor jsonb DEFAULT NULL::jsonb, p_claim_limit integer DEFAULT 0, p_request uuid DEFAULT NULL::uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
declare
  v_sweeper constant dispatcher.claimant := dispatcher.sweeper(p_instance_id);
  v_limit constant integer := 500;
  v_started constant timestamptz := clock_timestamp();
  v_count integer;
  v_answer jsonb := '{}';
begin
  perform set_config('dispatcher.quiet', 'on', true);
  case p_phase
    when 'look' then v_answer := dispatcher.look_around(v_sweeper);
    when 'expired' then v_count := dispatcher.expire_stale_items(v_sweeper, v_limit);
    when 'dead' then v_count := dispatcher.give_up_spent_items(v_sweeper, v_limit);
    when 'chained' then v_count := dispatcher.stop_wake_chains(v_sweeper, v_limit);
    when 'stalled' then v_count := dispatcher.settle_stalled_agents(v_sweeper);
    when 'released' then v_count := dispatcher.release_forgotten_leases(v_sweeper, v_limit);
    when 'listed' then v_answer := dispatcher.fill_waitlist(v_sweeper, p_cursor, v_limit);
    when 'claims' then v_answer := dispatcher.claim_at_sweep(v_sweeper, p_claim_limit, p_request);
    when 'alerted' then v_count := dispatcher.tell_often_woken(v_sweeper, v_limit);
    when 'pruned' then v_count := dispatcher.prune_old_rows(v_sweeper, v_limit);
    else raise exception 'unknown phase %', left(p_phase, 100) using errcode = 'OD002',
      hint = 'look, expired, dead, chained, stalled, released, listed, claims, alerted or pruned';
  end case;
  return jsonb_build_object('phase', p_phase, 'count', v_count, 'again', coalesce(v_count >= v_limit, false))
      || v_answer
         || jsonb_build_object('ms', round(extract(epoch from clock_timestamp() - v_started) * 1000));
end
$$;

COMMENT ON FUNCTION public.sweep_inbox(p_instance_id uuid, p_phase text, p_cursor jsonb, p_claim_limit integer, p_request uuid) IS 'One phase of a sweep of the instance''s gateway, at most 500 rows: {phase, count, again, ms}. look: {agents (id, slug), open_wakes, broadcast_available, due}; listed: {skipped, cursor}, p_cursor is the one of the page before; claims: {claims, queued, waiting}, up to p_claim_limit wakes under p_request.';

CREATE FUNCTION public.workflow_stats(p_tenant_id uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO ''
    SET lock_timeout TO '1s'
    AS $$
  select jsonb_build_object(
    'code', 'ok', 'now', now(),
    'by_status', (select coalesce(jsonb_object_agg(counted.status, counted.number), '{}')
                    from (select status, count(*) as number from public.workflow_runs where tenant_id = p_tenant_id
                        group by status) as counted),
    'by_type', (select coalesce(jsonb_agg(jsonb_build_object(
                  'workflow_type', types.workflow_type, 'agent_id', route.agent_id, 'priority', route.priority,
                      'max_concurrent', route.max_concurrent,
                  'timeout_minutes', route.timeout_minutes, 'queued', coalesce(types.queued, 0), 'active',
                      coalesce(types.active, 0),
                  'held_by', case when types.queued > 0 then coalesce(tick.held_by -> types.workflow_type, '[]')
                      else '[]' end,
                  'blocker', case when types.queued > 0 then tick.blockers ->> types.workflow_type end,
                  'estimate', estimates.of_types -> types.workflow_type,
                  'oldest_queued_seconds', round(-dispatcher.seconds_until(types.oldest)))
                      order by types.workflow_type), '[]')
                  from (select coalesce(open.workflow_type, routed.workflow_type) as workflow_type, open.queued,
                      open.active, open.oldest
                          from (select workflow_type, count(*) filter (where status = 'queued') as queued,
                                       count(*) filter (where status <> 'queued') as active,
                                       min(queued_at) filter (where status = 'queued' and isfinite(queued_at)) as oldest
                                  from public.workflow_runs where tenant_id = p_tenant_id
                                   and (status in ('queued', 'dispatched', 'claimed', 'running')
                                        or paused_from in ('dispatched', 'claimed', 'running'))
                                 group by workflow_type) as open
                          full join (select workflow_type from public.workflow_agent_routing
                              where tenant_id = p_tenant_id) as routed
                               using (workflow_type)) as types
                  left join public.workflow_agent_routing as route
                    on route.tenant_id = p_tenant_id and route.workflow_type = types.workflow_type
                  cross join (select dispatcher.workflow_estimates(p_tenant_id) as of_types) as estimates
                  left join (select last_tick -> 'held_by' as held_by, last_tick -> 'blockers' as blockers
                               from public.dispatcher_instances
                              where tenant_id = p_tenant_id and last_tick is not null order by last_tick ->> 'at' desc
                                  limit 1) as tick on true),
    'no_route', (select count(*) from public.workflow_runs as run where run.tenant_id = p_tenant_id
        and run.status = 'queued' and run.pinned_agent_id is null
                    and not exists (select from public.workflow_agent_routing as route
                        where route.tenant_id = p_tenant_id and route.workflow_type = run.workflow_type)),
    'finished_last_24h', (select coalesce(jsonb_object_agg(recent.status, recent.number), '{}')
                            from (select status, count(*) as number from public.workflow_runs
                                   where tenant_id = p_tenant_id and finished_at > now() - interval '24 hours'
                                       group by status) as recent),
    'cost_last_24h_usd', (select coalesce(sum(booking.cost_usd), 0) from public.workflow_bookings as booking
                           where booking.tenant_id = p_tenant_id and booking.at > now() - interval '24 hours'),
    'tokens_last_24h', (select coalesce(sum(booking.tokens), 0) from public.workflow_bookings as booking
                         where booking.tenant_id = p_tenant_id and booking.at > now() - interval '24 hours'),
    'notifications', (select coalesce(jsonb_object_agg(noted.state, noted.number), '{}')
                        from (select state, count(*) as number from public.workflow_notifications
                            where tenant_id = p_tenant_id group by state) as noted),
    'last_tick', (select last_tick from public.dispatcher_instances where tenant_id = p_tenant_id
        and last_tick is not null order by last_tick ->> 'at' desc limit 1))
$$;

COMMENT ON FUNCTION public.workflow_stats(p_tenant_id uuid) IS 'Runs by status and by type with their routes, the budgets that held them at the last tick and what a run is estimated to cost; runs without a route, the last day (its cost as the books have it), notifications, the last tick.';

CREATE TABLE public.agent_budgets (
    agent_id uuid NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    monthly_limit_usd numeric(12,2),
    soft_threshold_pct integer DEFAULT 80 NOT NULL,
    hard_cutoff boolean DEFAULT true NOT NULL,
    period_anchor_tz text DEFAULT 'UTC'::text NOT NULL,
    current_period_start date DEFAULT (date_trunc('month'::text, now()))::date NOT NULL,
    current_period_spend_usd numeric(12,6) DEFAULT 0 NOT NULL,
    current_period_tokens bigint DEFAULT 0 NOT NULL,
    current_period_metered_calls integer DEFAULT 0 NOT NULL,
    current_period_unmetered_calls integer DEFAULT 0 NOT NULL,
    status public.budget_status DEFAULT 'ok'::public.budget_status NOT NULL,
    warned_at timestamp with time zone,
    exceeded_at timestamp with time zone,
    last_usage_at timestamp with time zone,
    meta jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.agent_budgets IS 'What an agent may spend in a month, what it has spent, and whether that ends its wakes.';

CREATE VIEW dispatcher.agent_budgets WITH (security_invoker='true') AS
 SELECT agent_id,
    tenant_id,
    status,
    hard_cutoff,
    monthly_limit_usd,
    period_anchor_tz,
    current_period_start,
    current_period_spend_usd
   FROM public.agent_budgets budget
  WHERE (EXISTS ( SELECT
           FROM public.agents agent
          WHERE ((agent.id = budget.agent_id) AND (agent.tenant_id = budget.tenant_id))));

COMMENT ON VIEW dispatcher.agent_budgets IS 'Budgets whose agent is of their own tenant.';

CREATE TABLE public.agent_usage (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    agent_id uuid,
    gateway_id uuid,
    session_id text,
    run_id text NOT NULL,
    provider text NOT NULL,
    model text NOT NULL,
    input_tokens bigint DEFAULT 0 NOT NULL,
    output_tokens bigint DEFAULT 0 NOT NULL,
    cache_read_tokens bigint DEFAULT 0 NOT NULL,
    cache_write_tokens bigint DEFAULT 0 NOT NULL,
    cost_input_usd numeric(12,6),
    cost_output_usd numeric(12,6),
    cost_total_usd numeric(12,6),
    occurred_at timestamp with time zone NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.agent_usage IS 'What each run of an agent has used, as the gateway reports it.';

CREATE VIEW dispatcher.agent_usage WITH (security_invoker='true') AS
 SELECT agent_id,
    tenant_id,
    occurred_at,
    cost_total_usd
   FROM public.agent_usage usage
  WHERE (EXISTS ( SELECT
           FROM public.agents agent
          WHERE ((agent.id = usage.agent_id) AND (agent.tenant_id = usage.tenant_id))));

COMMENT ON VIEW dispatcher.agent_usage IS 'Usage whose agent is of its own tenant.';

CREATE TABLE public.gateways (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    slug text NOT NULL,
    label text NOT NULL,
    status public.gateway_status DEFAULT 'ready'::public.gateway_status NOT NULL,
    last_seen_at timestamp with time zone,
    last_heartbeat_at timestamp with time zone,
    meta jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.gateways IS 'OpenClaw gateways: the machines on which agents run. A daemon serves one of them.';

CREATE VIEW dispatcher.agents WITH (security_invoker='true') AS
 SELECT id,
    tenant_id,
    gateway_id,
    slug,
    name,
    status
   FROM public.agents agent
  WHERE ((gateway_id IS NULL) OR (EXISTS ( SELECT
           FROM public.gateways gateway
          WHERE ((gateway.id = agent.gateway_id) AND (gateway.tenant_id = agent.tenant_id)))));

COMMENT ON VIEW dispatcher.agents IS 'Agents, but none that stands on a gateway of another tenant.';

CREATE VIEW dispatcher.inbox_due_of_pair WITH (security_invoker='true') AS
 SELECT item.id,
    item.tenant_id,
    item.agent_id,
    item.created_at,
    item.status,
    item.event_type,
    item.summary,
    item.context,
    item.task_id,
    item.attempt_count,
    item.max_attempts,
    COALESCE(origin.chain_depth, 0) AS chain_depth,
        CASE item.status
            WHEN 'pending'::public.inbox_item_status THEN '-infinity'::timestamp with time zone
            WHEN 'leased'::public.inbox_item_status THEN
            CASE
                WHEN (item.leased_until < (now() + '7 days'::interval)) THEN item.leased_until
                ELSE '-infinity'::timestamp with time zone
            END
            ELSE
            CASE
                WHEN ((COALESCE(item.failed_at, item.updated_at) > now()) OR dispatcher.is_set_aside_by_stall(item.id, item.failed_at)) THEN '-infinity'::timestamp with time zone
                ELSE (COALESCE(item.failed_at, item.updated_at) + dispatcher.inbox_retry_delay(item.attempt_count))
            END
        END AS due_at
   FROM (public.agent_inbox_items item
     LEFT JOIN public.inbox_item_origins origin ON ((origin.item_id = item.id)))
  WHERE ((item.status = ANY (ARRAY['pending'::public.inbox_item_status, 'failed'::public.inbox_item_status, 'leased'::public.inbox_item_status])) AND (item.attempt_count < item.max_attempts));

COMMENT ON VIEW dispatcher.inbox_due_of_pair IS 'inbox_due before anybody looked whose agent an item names: for the hot path alone, which reads it by the agent and the tenant of one row of agents.';

CREATE VIEW dispatcher.inbox_due WITH (security_invoker='true') AS
 SELECT id,
    tenant_id,
    agent_id,
    created_at,
    status,
    event_type,
    summary,
    context,
    task_id,
    attempt_count,
    max_attempts,
    chain_depth,
    due_at
   FROM dispatcher.inbox_due_of_pair due
  WHERE (EXISTS ( SELECT
           FROM public.agents agent
          WHERE ((agent.id = due.agent_id) AND (agent.tenant_id = due.tenant_id))));

COMMENT ON VIEW dispatcher.inbox_due IS 'Open items with attempts left and when each may be worked on (due_at): pending at once, failed after its retry delay, leased when its lease ends.';

CREATE TABLE dispatcher.made_objects (
    kind text NOT NULL,
    name text NOT NULL,
    recorded_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT made_objects_kind_check CHECK ((kind = ANY (ARRAY['function'::text, 'view'::text])))
);

COMMENT ON TABLE dispatcher.made_objects IS 'Every function and view of schema public that a version of the dispatcher made here: only these are dropped when a later version has them no more.';

CREATE TABLE dispatcher.migrations (
    name text NOT NULL,
    checksum text NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE dispatcher.migrations IS 'What `dispatcher migrate` has applied: the name of each file and the SHA-256 of its content. Plain psql leaves no row here.';

CREATE TABLE dispatcher.owned_objects (
    kind text NOT NULL,
    name text NOT NULL,
    recorded_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT owned_objects_kind_check CHECK ((kind = ANY (ARRAY['table'::text, 'function'::text, 'view'::text])))
);

COMMENT ON TABLE dispatcher.owned_objects IS 'What we made under names of YourHQ''s because nothing had them. Only these get rights, policies and repairs from us. Written in the transaction that creates them.';

CREATE TABLE dispatcher.recorded_objects (
    kind text NOT NULL,
    name text NOT NULL,
    definition text NOT NULL
);

COMMENT ON TABLE dispatcher.recorded_objects IS 'How this PostgreSQL writes the definitions of our objects (dispatcher.object_definitions), as the files made them. Kind record: the fingerprint they belong to, kept, or open while plain psql applies files. Empty it and migrate: what stands here then is what is right.';

CREATE TABLE public.workflow_claims (
    claim_token uuid NOT NULL,
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    workflow_type text NOT NULL,
    agent_id text,
    session_id text NOT NULL,
    attempt integer NOT NULL,
    claimed_at timestamp with time zone DEFAULT now() NOT NULL,
    ended_at timestamp with time zone,
    ended_as text,
    wake_id uuid,
    worked_at timestamp with time zone,
    cost_usd numeric(12,6),
    tokens bigint,
    CONSTRAINT workflow_claims_ended_as_something CHECK (((ended_at IS NULL) = (ended_as IS NULL)))
);

COMMENT ON TABLE public.workflow_claims IS 'Every claim of a run: which session held which attempt and how that ended. cost_usd and tokens: what is booked for a claim that its run has left behind.';

COMMENT ON COLUMN public.workflow_claims.wake_id IS 'The wake it was made in. No foreign key, as for workflow_runs.wake_id: its check would wait for whoever holds the wake.';

CREATE VIEW dispatcher.taken_wakes WITH (security_invoker='true') AS
 SELECT wake.id AS wake_id,
    wake.tenant_id,
    wake.gateway_id,
    wake.instance_id,
    format('run %s is %s'::text, run.id,
        CASE claim.ended_as
            WHEN 'no heartbeat'::text THEN 'released'::text
            WHEN 'orphaned'::text THEN 'given to another'::text
            ELSE COALESCE(claim.ended_as,
            CASE
                WHEN (run.finished_at IS NOT NULL) THEN run.status
                ELSE 'taken away'::text
            END)
        END) AS cause
   FROM ((public.agent_wakes wake
     JOIN public.workflow_claims claim ON ((claim.wake_id = wake.id)))
     JOIN public.workflow_runs run ON ((run.id = claim.run_id)))
  WHERE ((wake.state = ANY (ARRAY['starting'::text, 'running'::text])) AND ((claim.ended_as = ANY (ARRAY['cancelled'::text, 'timed_out'::text, 'no heartbeat'::text, 'orphaned'::text])) OR ((claim.ended_at IS NULL) AND ((run.status = ANY (ARRAY['cancelled'::text, 'timed_out'::text])) OR (run.claim_token IS DISTINCT FROM claim.claim_token)))));

COMMENT ON VIEW dispatcher.taken_wakes IS 'Live wakes whose run was ended or taken away from outside: their processes are to be stopped. A run that its own agent ended is none.';

CREATE TABLE public.agent_profiles (
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    agent_id text NOT NULL,
    department_id text,
    display_name text,
    role text,
    capabilities text[] DEFAULT '{}'::text[] NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT agent_profiles_agent_id_check CHECK ((agent_id <> ''::text))
);

COMMENT ON TABLE public.agent_profiles IS 'What an agent (by slug) is in the organisation: department, role, capabilities. A department without a row in departments is a name of its own.';

CREATE TABLE public.agent_resumptions (
    agent_id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    resumed_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.agent_resumptions IS 'When an agent was last taken out of pause or hibernation: its waiting items grow stale from then on. Written by whoever changes the agent.';

CREATE TABLE public.workflow_audit_log (
    id bigint NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    class text,
    severity text,
    target text,
    before jsonb,
    after jsonb,
    allowed boolean DEFAULT true NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.workflow_audit_log IS 'Who did, or was denied, what to which run. Denials are audited too.';

CREATE VIEW public.audit_log WITH (security_invoker='true') AS
 SELECT id,
    tenant_id,
    actor,
    action,
    class,
    severity,
    target,
    before,
    after,
    allowed,
    at
   FROM public.workflow_audit_log;

COMMENT ON VIEW public.audit_log IS 'workflow_audit_log under its short name, where no other table has it.';

CREATE TABLE public.budget_events (
    id bigint NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    budget_id uuid NOT NULL,
    period_key text NOT NULL,
    event_kind text NOT NULL,
    detail jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    revision integer DEFAULT 1 NOT NULL,
    CONSTRAINT budget_events_event_kind_check CHECK ((event_kind = ANY (ARRAY['warned'::text, 'paused'::text, 'hard_stopped'::text, 'recovered'::text])))
);

COMMENT ON TABLE public.budget_events IS 'Breaches of budgets and their ends: each kind once per budget, period and revision of the budget.';

ALTER TABLE public.budget_events ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.budget_events_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE public.budgets (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    name text NOT NULL,
    scope text NOT NULL,
    scope_id text,
    period text NOT NULL,
    timezone text DEFAULT 'UTC'::text NOT NULL,
    cap_usd numeric(14,6),
    cap_tokens bigint,
    action_on_exceed text DEFAULT 'warn'::text NOT NULL,
    active boolean DEFAULT true NOT NULL,
    fail_closed boolean DEFAULT false NOT NULL,
    revision integer DEFAULT 1 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT budgets_action_on_exceed_check CHECK ((action_on_exceed = ANY (ARRAY['warn'::text, 'pause_new_runs'::text, 'hard_stop'::text]))),
    CONSTRAINT budgets_cap_tokens_check CHECK ((cap_tokens >= 0)),
    CONSTRAINT budgets_cap_usd_check CHECK (((cap_usd >= (0)::numeric) AND (cap_usd <> 'NaN'::numeric))),
    CONSTRAINT budgets_fleet_has_no_scope_id CHECK (((scope = 'fleet'::text) = (scope_id IS NULL))),
    CONSTRAINT budgets_name_check CHECK ((name <> ''::text)),
    CONSTRAINT budgets_one_cap CHECK ((num_nonnulls(cap_usd, cap_tokens) = 1)),
    CONSTRAINT budgets_period_check CHECK ((period = ANY (ARRAY['daily'::text, 'weekly'::text, 'monthly'::text]))),
    CONSTRAINT budgets_scope_check CHECK ((scope = ANY (ARRAY['agent'::text, 'department'::text, 'project'::text, 'fleet'::text]))),
    CONSTRAINT budgets_scope_id_check CHECK ((scope_id <> ''::text))
);

COMMENT ON TABLE public.budgets IS 'What may be spent per period of its zone by an agent, a department, a project (a workflow type) or the whole fleet. fail_closed: holds runs when it cannot be evaluated.';

COMMENT ON COLUMN public.budgets.revision IS 'One more with every change of cap or action: what happens after it is told anew.';

CREATE TABLE public.departments (
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    id text DEFAULT (gen_random_uuid())::text NOT NULL,
    name text NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT departments_id_check CHECK ((id <> ''::text))
);

COMMENT ON TABLE public.departments IS 'Departments agents belong to, for budgets.';

CREATE TABLE public.dispatcher_faults (
    id bigint NOT NULL,
    tenant_id uuid NOT NULL,
    gateway_id uuid,
    side_write text NOT NULL,
    error text NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

COMMENT ON TABLE public.dispatcher_faults IS 'Side writes that failed (a notification, an event, a hint) while what they tell about was done. The daemons log them and show them in health.';

COMMENT ON COLUMN public.dispatcher_faults.gateway_id IS 'Whose daemon tells it; NULL: any daemon of the tenant.';

ALTER TABLE public.dispatcher_faults ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.dispatcher_faults_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE public.dispatcher_gateways (
    gateway_id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.dispatcher_gateways IS 'One row per gateway that a dispatcher serves. Claims lock it, which is what makes the cap of live wakes exact.';

CREATE TABLE public.inbox_item_leases (
    item_id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    agent_id uuid NOT NULL,
    wake_id uuid,
    lease_token uuid DEFAULT gen_random_uuid() NOT NULL,
    attempt integer NOT NULL,
    leased_at timestamp with time zone DEFAULT now() NOT NULL,
    leased_until timestamp with time zone NOT NULL,
    closed_at timestamp with time zone,
    outcome text,
    CONSTRAINT inbox_item_leases_closed_has_outcome CHECK (((closed_at IS NULL) = (outcome IS NULL))),
    CONSTRAINT inbox_item_leases_outcome_check CHECK ((outcome = ANY (ARRAY['done'::text, 'failed'::text, 'dead_letter'::text, 'escalated'::text, 'released'::text, 'lost'::text])))
);

COMMENT ON TABLE public.inbox_item_leases IS 'The latest lease of an item: its fencing token, the wake it was taken in, and how it ended.';

CREATE TABLE public.inbox_item_marks (
    item_id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    reopened_at timestamp with time zone,
    set_aside_at timestamp with time zone,
    set_aside_as text,
    closed_by_user_at timestamp with time zone,
    CONSTRAINT inbox_item_marks_set_aside_as_check CHECK ((set_aside_as = ANY (ARRAY['agent_stalled'::text, 'wake_chain_limit'::text, 'operator'::text]))),
    CONSTRAINT inbox_item_marks_set_aside_has_both CHECK (((set_aside_at IS NULL) = (set_aside_as IS NULL)))
);

COMMENT ON TABLE public.inbox_item_marks IS 'What the dispatcher knows of an item beside its row.';

COMMENT ON COLUMN public.inbox_item_marks.reopened_at IS 'When somebody set a finished item back to pending: it grows stale from then on, not from its creation.';

COMMENT ON COLUMN public.inbox_item_marks.set_aside_at IS 'When the dispatcher set the item aside; it still is while the item failed at that very time.';

COMMENT ON COLUMN public.inbox_item_marks.closed_by_user_at IS 'When a signed-in user closed the item: that is no work of the agent that runs at that time.';

CREATE TABLE public.notifications (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    type text NOT NULL,
    title text NOT NULL,
    body text,
    entity_type text,
    entity_id uuid,
    actor_type public.actor_type DEFAULT 'system'::public.actor_type,
    actor_agent_id uuid,
    read_at timestamp with time zone,
    dismissed_at timestamp with time zone,
    meta jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.notifications IS 'What an operator should know: stalled agents, chains of wakes, escalations.';

CREATE TABLE public.task_relations (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    source_task_id uuid NOT NULL,
    target_task_id uuid NOT NULL,
    relation_type public.task_relation_type NOT NULL,
    created_by_type public.actor_type DEFAULT 'human'::public.actor_type NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.task_relations IS 'How tasks depend on one another; blocked_by is what the note in a wake''s message is made of.';

CREATE TABLE public.tasks (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    title text NOT NULL,
    description text,
    status public.task_status DEFAULT 'todo'::public.task_status NOT NULL,
    priority public.task_priority,
    parent_id uuid,
    assignee_type public.actor_type,
    assignee_agent_id uuid,
    model_override text,
    thinking_override text,
    due_date timestamp with time zone,
    completed_at timestamp with time zone,
    archived_at timestamp with time zone,
    tags text[] DEFAULT '{}'::text[] NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.tasks IS 'What people and agents want done. Items speak of tasks; the dispatcher reads their titles.';

CREATE TABLE public.tenants (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    name text NOT NULL,
    slug text NOT NULL,
    status text DEFAULT 'active'::text NOT NULL,
    meta jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.tenants IS 'Who a row belongs to. Every look-up is scoped by one of these.';

CREATE TABLE public.workflow_agent_routing (
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    workflow_type text NOT NULL,
    agent_id text NOT NULL,
    priority integer DEFAULT 0 NOT NULL,
    max_concurrent integer DEFAULT 1 NOT NULL,
    timeout_minutes integer DEFAULT 60 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT workflow_agent_routing_agent_id_check CHECK ((agent_id <> ''::text)),
    CONSTRAINT workflow_agent_routing_max_concurrent_check CHECK ((max_concurrent >= 0)),
    CONSTRAINT workflow_agent_routing_priority_check CHECK (((priority >= '-1000000'::integer) AND (priority <= 1000000))),
    CONSTRAINT workflow_agent_routing_timeout_minutes_check CHECK ((timeout_minutes > 0)),
    CONSTRAINT workflow_agent_routing_workflow_type_check CHECK ((workflow_type <> ''::text))
);

COMMENT ON TABLE public.workflow_agent_routing IS 'Which agent (slug) runs a workflow type, how many at once (0: none), and for how long.';

CREATE TABLE public.workflow_approvals (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    run_id uuid NOT NULL,
    step_name text NOT NULL,
    approver_id text,
    status text DEFAULT 'pending'::text NOT NULL,
    note text,
    requested_by text,
    decided_by text,
    decided_at timestamp with time zone,
    due_at timestamp with time zone,
    expires_at timestamp with time zone,
    escalated_to text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT workflow_approvals_status_check CHECK ((status = ANY (ARRAY['pending'::text, 'approved'::text, 'rejected'::text, 'cancelled'::text, 'expired'::text])))
);

COMMENT ON TABLE public.workflow_approvals IS 'Approvals a run waits for.';

ALTER TABLE public.workflow_audit_log ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.workflow_audit_log_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE public.workflow_bookings (
    id bigint NOT NULL,
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    attempt integer NOT NULL,
    agent_id text,
    workflow_type text NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL,
    cost_usd numeric(14,6) NOT NULL,
    tokens bigint NOT NULL,
    source text NOT NULL,
    CONSTRAINT workflow_bookings_book_something CHECK (((cost_usd <> (0)::numeric) OR (tokens <> 0))),
    CONSTRAINT workflow_bookings_cost_usd_check CHECK ((cost_usd <> 'NaN'::numeric)),
    CONSTRAINT workflow_bookings_source_check CHECK ((source = ANY (ARRAY['report'::text, 'assumed'::text, 'correction'::text])))
);

COMMENT ON TABLE public.workflow_bookings IS 'The books of workflow runs: what each report, end without a report or correction added to what was booked before (or took from it), in the moment it arrived. Budgets, stats and reports are sums of it. Append-only.';

COMMENT ON COLUMN public.workflow_bookings.run_id IS 'The run. No foreign key: what was spent stays spent when the row of its run is deleted.';

COMMENT ON COLUMN public.workflow_bookings.agent_id IS 'Slug of the agent it was spent by.';

COMMENT ON COLUMN public.workflow_bookings.source IS 'report: of the agent. assumed: an end without a report. correction: of an operator.';

ALTER TABLE public.workflow_bookings ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.workflow_bookings_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE public.workflow_respawns (
    run_id uuid NOT NULL,
    attempt integer NOT NULL,
    tenant_id uuid NOT NULL,
    wake_id uuid,
    session_id text NOT NULL,
    previous_session_id text,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.workflow_respawns IS 'Orphans that were spawned again: at most one row per attempt of a run, whatever restarts in between.';

ALTER TABLE public.workflow_run_events ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.workflow_run_events_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE public.workflow_run_transitions (
    from_status text NOT NULL,
    to_status text NOT NULL,
    meaning text NOT NULL,
    needs_override boolean DEFAULT false NOT NULL
);

COMMENT ON TABLE public.workflow_run_transitions IS 'The whole state table of a run: what is not in it is refused. needs_override: only override_failure, which is audited, may do it.';

CREATE TABLE public.workspace (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    tenant_id uuid DEFAULT '00000000-0000-0000-0000-000000000000'::uuid NOT NULL,
    name text DEFAULT 'HQ'::text NOT NULL,
    slug text,
    description text,
    initialized boolean DEFAULT false NOT NULL,
    owner_name text,
    owner_email text,
    settings jsonb DEFAULT '{}'::jsonb NOT NULL,
    default_agent_budget_usd numeric(12,2),
    default_soft_threshold_pct integer DEFAULT 80 NOT NULL,
    default_hard_cutoff boolean DEFAULT true NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE public.workspace IS 'One per tenant: its name, the slug that stands before the agents'' ids, and the default budget.';

ALTER TABLE ONLY dispatcher.made_objects
    ADD CONSTRAINT made_objects_pkey PRIMARY KEY (kind, name);

ALTER TABLE ONLY dispatcher.migrations
    ADD CONSTRAINT migrations_pkey PRIMARY KEY (name);

ALTER TABLE ONLY dispatcher.owned_objects
    ADD CONSTRAINT owned_objects_pkey PRIMARY KEY (kind, name);

ALTER TABLE ONLY dispatcher.recorded_objects
    ADD CONSTRAINT recorded_objects_pkey PRIMARY KEY (kind, name);

ALTER TABLE ONLY public.agent_budgets
    ADD CONSTRAINT agent_budgets_pkey PRIMARY KEY (agent_id);

ALTER TABLE ONLY public.agent_inbox_items
    ADD CONSTRAINT agent_inbox_items_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.agent_profiles
    ADD CONSTRAINT agent_profiles_pkey PRIMARY KEY (tenant_id, agent_id);

ALTER TABLE ONLY public.agent_resumptions
    ADD CONSTRAINT agent_resumptions_pkey PRIMARY KEY (agent_id);

ALTER TABLE ONLY public.agent_usage
    ADD CONSTRAINT agent_usage_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.agent_usage
    ADD CONSTRAINT agent_usage_run_id_provider_model_occurred_at_key UNIQUE (run_id, provider, model, occurred_at);

ALTER TABLE ONLY public.agent_wake_state
    ADD CONSTRAINT agent_wake_state_pkey PRIMARY KEY (agent_id);

ALTER TABLE ONLY public.agent_wakes
    ADD CONSTRAINT agent_wakes_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT agents_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT agents_tenant_id_slug_key UNIQUE (tenant_id, slug);

ALTER TABLE ONLY public.budget_events
    ADD CONSTRAINT budget_events_once UNIQUE (budget_id, period_key, event_kind, revision);

ALTER TABLE ONLY public.budget_events
    ADD CONSTRAINT budget_events_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.budgets
    ADD CONSTRAINT budgets_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.departments
    ADD CONSTRAINT departments_pkey PRIMARY KEY (tenant_id, id);

ALTER TABLE ONLY public.dispatcher_faults
    ADD CONSTRAINT dispatcher_faults_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.dispatcher_gateways
    ADD CONSTRAINT dispatcher_gateways_pkey PRIMARY KEY (gateway_id);

ALTER TABLE ONLY public.dispatcher_instances
    ADD CONSTRAINT dispatcher_instances_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.dispatcher_settings
    ADD CONSTRAINT dispatcher_settings_pkey PRIMARY KEY (instance_id);

ALTER TABLE ONLY public.gateways
    ADD CONSTRAINT gateways_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.gateways
    ADD CONSTRAINT gateways_tenant_id_slug_key UNIQUE (tenant_id, slug);

ALTER TABLE ONLY public.inbox_item_leases
    ADD CONSTRAINT inbox_item_leases_pkey PRIMARY KEY (item_id);

ALTER TABLE ONLY public.inbox_item_marks
    ADD CONSTRAINT inbox_item_marks_pkey PRIMARY KEY (item_id);

ALTER TABLE ONLY public.inbox_item_origins
    ADD CONSTRAINT inbox_item_origins_pkey PRIMARY KEY (item_id);

ALTER TABLE ONLY public.notifications
    ADD CONSTRAINT notifications_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.task_relations
    ADD CONSTRAINT task_relations_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.tasks
    ADD CONSTRAINT tasks_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT tenants_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT tenants_slug_key UNIQUE (slug);

ALTER TABLE ONLY public.agent_inbox_items
    ADD CONSTRAINT uq_inbox_dedup UNIQUE (tenant_id, dedup_key);

ALTER TABLE ONLY public.workflow_agent_routing
    ADD CONSTRAINT workflow_agent_routing_pkey PRIMARY KEY (tenant_id, workflow_type);

ALTER TABLE ONLY public.workflow_approvals
    ADD CONSTRAINT workflow_approvals_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workflow_audit_log
    ADD CONSTRAINT workflow_audit_log_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workflow_bookings
    ADD CONSTRAINT workflow_bookings_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workflow_claims
    ADD CONSTRAINT workflow_claims_pkey PRIMARY KEY (claim_token);

ALTER TABLE ONLY public.workflow_notifications
    ADD CONSTRAINT workflow_notifications_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workflow_notifications
    ADD CONSTRAINT workflow_notifications_run_id_attempt_key UNIQUE (run_id, attempt);

ALTER TABLE ONLY public.workflow_respawns
    ADD CONSTRAINT workflow_respawns_pkey PRIMARY KEY (run_id, attempt);

ALTER TABLE ONLY public.workflow_run_events
    ADD CONSTRAINT workflow_run_events_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workflow_run_transitions
    ADD CONSTRAINT workflow_run_transitions_pkey PRIMARY KEY (from_status, to_status);

ALTER TABLE ONLY public.workflow_runs
    ADD CONSTRAINT workflow_runs_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workspace
    ADD CONSTRAINT workspace_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workspace
    ADD CONSTRAINT workspace_tenant_id_key UNIQUE (tenant_id);

CREATE INDEX agent_inbox_items_done_of ON public.agent_inbox_items USING btree (agent_id, tenant_id, completed_at) WHERE (completed_at IS NOT NULL);

CREATE INDEX agent_inbox_items_failed_of ON public.agent_inbox_items USING btree (agent_id, tenant_id, failed_at) WHERE (status = ANY (ARRAY['failed'::public.inbox_item_status, 'dead_letter'::public.inbox_item_status]));

CREATE INDEX agent_inbox_items_leased_of ON public.agent_inbox_items USING btree (agent_id, tenant_id, leased_until) WHERE (status = 'leased'::public.inbox_item_status);

CREATE INDEX agent_inbox_items_open_of ON public.agent_inbox_items USING btree (agent_id, tenant_id, created_at) WHERE ((status = ANY (ARRAY['pending'::public.inbox_item_status, 'failed'::public.inbox_item_status, 'leased'::public.inbox_item_status])) AND (attempt_count < max_attempts));

CREATE INDEX agent_inbox_items_spent_of ON public.agent_inbox_items USING btree (agent_id, tenant_id) WHERE ((status = ANY (ARRAY['pending'::public.inbox_item_status, 'leased'::public.inbox_item_status])) AND (attempt_count >= max_attempts));

CREATE INDEX agent_profiles_by_department ON public.agent_profiles USING btree (tenant_id, department_id) WHERE (department_id IS NOT NULL);

CREATE INDEX agent_wake_state_waitlist_order ON public.agent_wake_state USING btree (waitlisted_at, COALESCE(waiting_since, 'infinity'::timestamp with time zone), agent_id) WHERE (waitlisted_at IS NOT NULL);

CREATE INDEX agent_wakes_by_agent ON public.agent_wakes USING btree (agent_id, claimed_at DESC);

CREATE INDEX agent_wakes_by_instance ON public.agent_wakes USING btree (instance_id);

CREATE INDEX agent_wakes_by_request ON public.agent_wakes USING btree (claim_request) WHERE (claim_request IS NOT NULL);

CREATE INDEX agent_wakes_by_workflow_run ON public.agent_wakes USING btree (workflow_run_id) WHERE (workflow_run_id IS NOT NULL);

CREATE INDEX agent_wakes_ended ON public.agent_wakes USING btree (ended_at) WHERE (ended_at IS NOT NULL);

CREATE INDEX agent_wakes_live_by_gateway ON public.agent_wakes USING btree (gateway_id) WHERE (state = ANY (ARRAY['starting'::text, 'running'::text]));

CREATE UNIQUE INDEX agent_wakes_one_live_per_agent ON public.agent_wakes USING btree (agent_id) WHERE (state = ANY (ARRAY['starting'::text, 'running'::text]));

CREATE UNIQUE INDEX budgets_one_active ON public.budgets USING btree (tenant_id, scope, COALESCE(scope_id, ''::text), period) WHERE active;

CREATE INDEX dispatcher_faults_by_tenant ON public.dispatcher_faults USING btree (tenant_id, side_write, at DESC);

CREATE INDEX dispatcher_instances_by_gateway ON public.dispatcher_instances USING btree (gateway_id, last_heartbeat_at);

CREATE INDEX inbox_item_leases_by_open_token ON public.inbox_item_leases USING btree (lease_token) WHERE (closed_at IS NULL);

CREATE INDEX inbox_item_leases_by_wake ON public.inbox_item_leases USING btree (wake_id) WHERE (wake_id IS NOT NULL);

CREATE INDEX inbox_item_leases_open_by_wake ON public.inbox_item_leases USING btree (wake_id) WHERE ((closed_at IS NULL) AND (wake_id IS NOT NULL));

CREATE INDEX inbox_item_origins_by_content ON public.inbox_item_origins USING btree (from_agent_id, content_key) WHERE (content_key IS NOT NULL);

CREATE INDEX inbox_item_origins_by_depth ON public.inbox_item_origins USING btree (tenant_id, chain_depth);

CREATE INDEX inbox_item_origins_by_wake ON public.inbox_item_origins USING btree (wake_id) WHERE (wake_id IS NOT NULL);

CREATE UNIQUE INDEX inbox_item_origins_once ON public.inbox_item_origins USING btree (tenant_id, from_agent_id, request_key) WHERE (request_key IS NOT NULL);

CREATE INDEX task_relations_by_source ON public.task_relations USING btree (source_task_id, relation_type);

CREATE INDEX workflow_approvals_by_run ON public.workflow_approvals USING btree (run_id, status);

CREATE INDEX workflow_approvals_expiring ON public.workflow_approvals USING btree (tenant_id, expires_at) WHERE ((status = 'pending'::text) AND (expires_at IS NOT NULL));

CREATE INDEX workflow_audit_log_by_time ON public.workflow_audit_log USING btree (tenant_id, at DESC);

CREATE INDEX workflow_bookings_by_run ON public.workflow_bookings USING btree (run_id);

CREATE INDEX workflow_bookings_of_period ON public.workflow_bookings USING btree (tenant_id, at) INCLUDE (agent_id, workflow_type, cost_usd, tokens);

CREATE INDEX workflow_claims_by_run ON public.workflow_claims USING btree (run_id, claimed_at);

CREATE INDEX workflow_claims_by_wake ON public.workflow_claims USING btree (wake_id) WHERE (wake_id IS NOT NULL);

CREATE INDEX workflow_notifications_by_age ON public.workflow_notifications USING btree (tenant_id, created_at);

CREATE INDEX workflow_notifications_due ON public.workflow_notifications USING btree (tenant_id, next_try_at) WHERE (state = ANY (ARRAY['pending'::text, 'sending'::text]));

CREATE INDEX workflow_respawns_by_wake ON public.workflow_respawns USING btree (wake_id) WHERE (wake_id IS NOT NULL);

CREATE INDEX workflow_run_events_by_run ON public.workflow_run_events USING btree (run_id, id);

CREATE INDEX workflow_runs_active ON public.workflow_runs USING btree (tenant_id, workflow_type, status) WHERE (status = ANY (ARRAY['dispatched'::text, 'claimed'::text, 'running'::text]));

CREATE INDEX workflow_runs_by_wake ON public.workflow_runs USING btree (wake_id) WHERE (wake_id IS NOT NULL);

CREATE INDEX workflow_runs_dispatched_to ON public.workflow_runs USING btree (tenant_id, owner_agent_id, dispatched_at) WHERE (status = 'dispatched'::text);

CREATE INDEX workflow_runs_finished ON public.workflow_runs USING btree (tenant_id, finished_at) WHERE (finished_at IS NOT NULL);

CREATE INDEX workflow_runs_held_active ON public.workflow_runs USING btree (tenant_id, workflow_type) WHERE (paused_from = ANY (ARRAY['dispatched'::text, 'claimed'::text, 'running'::text]));

CREATE INDEX workflow_runs_newest ON public.workflow_runs USING btree (tenant_id, created_at DESC);

CREATE INDEX workflow_runs_no_route ON public.workflow_runs USING btree (tenant_id, workflow_type) WHERE ((status = 'queued'::text) AND (blocker_type = 'no_route'::text));

CREATE UNIQUE INDEX workflow_runs_once ON public.workflow_runs USING btree (tenant_id, request_key) WHERE (request_key IS NOT NULL);

CREATE INDEX workflow_runs_queued ON public.workflow_runs USING btree (tenant_id, workflow_type, priority, queued_at) WHERE (status = 'queued'::text);

CREATE INDEX workflow_runs_reported_cost ON public.workflow_runs USING btree (tenant_id, workflow_type, reported_at DESC) INCLUDE (cost_estimate) WHERE ((reported_at IS NOT NULL) AND (finished_at IS NOT NULL) AND (cost_estimate > (0)::numeric) AND (cost_estimate < 'Infinity'::numeric));

CREATE INDEX workflow_runs_reported_tokens ON public.workflow_runs USING btree (tenant_id, workflow_type, reported_at DESC) INCLUDE (input_tokens, output_tokens) WHERE ((reported_at IS NOT NULL) AND (finished_at IS NOT NULL) AND (GREATEST(input_tokens, output_tokens) > 0));

CREATE TRIGGER budgets_hint AFTER UPDATE ON public.budgets REFERENCING NEW TABLE AS new_rules FOR EACH STATEMENT EXECUTE FUNCTION dispatcher.hint_workflow_rules();

CREATE TRIGGER budgets_revise BEFORE UPDATE ON public.budgets FOR EACH ROW EXECUTE FUNCTION dispatcher.revise_budget();

CREATE TRIGGER dispatcher_agent_hint AFTER UPDATE OF status, gateway_id ON public.agents FOR EACH ROW WHEN (((old.status IS DISTINCT FROM new.status) OR (old.gateway_id IS DISTINCT FROM new.gateway_id))) EXECUTE FUNCTION dispatcher.hint_agent_change();

CREATE TRIGGER dispatcher_budget_hint AFTER UPDATE OF status, monthly_limit_usd, hard_cutoff ON public.agent_budgets FOR EACH ROW WHEN (((old.status IS DISTINCT FROM new.status) OR (old.monthly_limit_usd IS DISTINCT FROM new.monthly_limit_usd) OR (old.hard_cutoff IS DISTINCT FROM new.hard_cutoff))) EXECUTE FUNCTION dispatcher.hint_budget_change();

CREATE TRIGGER dispatcher_inbox_insert_hint AFTER INSERT ON public.agent_inbox_items REFERENCING NEW TABLE AS new_items FOR EACH STATEMENT EXECUTE FUNCTION dispatcher.hint_inbox_insert();

CREATE TRIGGER dispatcher_inbox_update_hint AFTER UPDATE ON public.agent_inbox_items REFERENCING OLD TABLE AS old_items NEW TABLE AS new_items FOR EACH STATEMENT EXECUTE FUNCTION dispatcher.hint_inbox_update();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, agent_id ON public.agent_budgets FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_agent_budgets();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, agent_id, task_id ON public.agent_inbox_items FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_agent_inbox_items();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, agent_id ON public.agent_resumptions FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_agent_resumptions();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, agent_id, gateway_id ON public.agent_usage FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_agent_usage();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, agent_id ON public.agent_wake_state FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_agent_wake_state();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, agent_id, gateway_id, instance_id, workflow_run_id ON public.agent_wakes FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_agent_wakes();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, gateway_id, reports_to_id ON public.agents FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_agents();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, budget_id ON public.budget_events FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_budget_events();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, gateway_id ON public.dispatcher_faults FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_dispatcher_faults();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, gateway_id ON public.dispatcher_gateways FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_dispatcher_gateways();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, gateway_id ON public.dispatcher_instances FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_dispatcher_instances();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, instance_id ON public.dispatcher_settings FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_dispatcher_settings();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, item_id, agent_id, wake_id ON public.inbox_item_leases FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_inbox_item_leases();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, item_id ON public.inbox_item_marks FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_inbox_item_marks();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, item_id, wake_id, from_agent_id ON public.inbox_item_origins FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_inbox_item_origins();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, actor_agent_id ON public.notifications FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_notifications();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, source_task_id, target_task_id ON public.task_relations FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_task_relations();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, parent_id, assignee_agent_id ON public.tasks FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_tasks();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, run_id ON public.workflow_approvals FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_workflow_approvals();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, run_id, wake_id ON public.workflow_claims FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_workflow_claims();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, run_id, gateway_id ON public.workflow_notifications FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_workflow_notifications();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, run_id, wake_id ON public.workflow_respawns FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_workflow_respawns();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, run_id ON public.workflow_run_events FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_workflow_run_events();

CREATE TRIGGER dispatcher_tenant AFTER INSERT OR UPDATE OF tenant_id, wake_id ON public.workflow_runs FOR EACH ROW EXECUTE FUNCTION dispatcher.tenant_of_workflow_runs();

CREATE TRIGGER workflow_agent_routing_insert_hint AFTER INSERT ON public.workflow_agent_routing REFERENCING NEW TABLE AS new_rules FOR EACH STATEMENT EXECUTE FUNCTION dispatcher.hint_workflow_rules();

CREATE TRIGGER workflow_agent_routing_update_hint AFTER UPDATE ON public.workflow_agent_routing REFERENCING NEW TABLE AS new_rules FOR EACH STATEMENT EXECUTE FUNCTION dispatcher.hint_workflow_rules();

CREATE TRIGGER workflow_bookings_append_only BEFORE UPDATE ON public.workflow_bookings FOR EACH ROW EXECUTE FUNCTION dispatcher.refuse_workflow_event_change();

CREATE TRIGGER workflow_run_events_append_only BEFORE UPDATE ON public.workflow_run_events FOR EACH ROW EXECUTE FUNCTION dispatcher.refuse_workflow_event_change();

CREATE TRIGGER workflow_runs_book_changed AFTER UPDATE ON public.workflow_runs REFERENCING OLD TABLE AS old_runs NEW TABLE AS new_runs FOR EACH STATEMENT EXECUTE FUNCTION dispatcher.book_changed_runs();

CREATE TRIGGER workflow_runs_book_new AFTER INSERT ON public.workflow_runs REFERENCING NEW TABLE AS new_runs FOR EACH STATEMENT EXECUTE FUNCTION dispatcher.book_new_runs();

CREATE TRIGGER workflow_runs_guard BEFORE UPDATE ON public.workflow_runs FOR EACH ROW EXECUTE FUNCTION dispatcher.guard_workflow_transition();

CREATE TRIGGER workflow_runs_insert_hint AFTER INSERT ON public.workflow_runs REFERENCING NEW TABLE AS new_runs FOR EACH STATEMENT EXECUTE FUNCTION dispatcher.hint_workflow_insert();

CREATE TRIGGER workflow_runs_prepare BEFORE INSERT ON public.workflow_runs FOR EACH ROW EXECUTE FUNCTION dispatcher.prepare_workflow_run();

CREATE TRIGGER workflow_runs_record AFTER UPDATE ON public.workflow_runs REFERENCING OLD TABLE AS old_runs NEW TABLE AS new_runs FOR EACH STATEMENT EXECUTE FUNCTION dispatcher.record_workflow_transition();

CREATE TRIGGER workflow_runs_then_end AFTER UPDATE ON public.workflow_runs REFERENCING NEW TABLE AS new_runs FOR EACH STATEMENT EXECUTE FUNCTION dispatcher.apply_kept_ends();

CREATE TRIGGER workflow_runs_update_hint AFTER UPDATE ON public.workflow_runs REFERENCING OLD TABLE AS old_runs NEW TABLE AS new_runs FOR EACH STATEMENT EXECUTE FUNCTION dispatcher.hint_workflow_update();

ALTER TABLE ONLY public.agent_budgets
    ADD CONSTRAINT agent_budgets_agent_id_fkey FOREIGN KEY (agent_id) REFERENCES public.agents(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_budgets
    ADD CONSTRAINT agent_budgets_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_inbox_items
    ADD CONSTRAINT agent_inbox_items_agent_id_fkey FOREIGN KEY (agent_id) REFERENCES public.agents(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_inbox_items
    ADD CONSTRAINT agent_inbox_items_task_id_fkey FOREIGN KEY (task_id) REFERENCES public.tasks(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_inbox_items
    ADD CONSTRAINT agent_inbox_items_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_profiles
    ADD CONSTRAINT agent_profiles_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_resumptions
    ADD CONSTRAINT agent_resumptions_agent_id_fkey FOREIGN KEY (agent_id) REFERENCES public.agents(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_resumptions
    ADD CONSTRAINT agent_resumptions_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_usage
    ADD CONSTRAINT agent_usage_agent_id_fkey FOREIGN KEY (agent_id) REFERENCES public.agents(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_usage
    ADD CONSTRAINT agent_usage_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES public.gateways(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.agent_usage
    ADD CONSTRAINT agent_usage_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_wake_state
    ADD CONSTRAINT agent_wake_state_agent_id_fkey FOREIGN KEY (agent_id) REFERENCES public.agents(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_wake_state
    ADD CONSTRAINT agent_wake_state_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_wakes
    ADD CONSTRAINT agent_wakes_agent_id_fkey FOREIGN KEY (agent_id) REFERENCES public.agents(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_wakes
    ADD CONSTRAINT agent_wakes_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES public.gateways(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_wakes
    ADD CONSTRAINT agent_wakes_instance_id_fkey FOREIGN KEY (instance_id) REFERENCES public.dispatcher_instances(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.agent_wakes
    ADD CONSTRAINT agent_wakes_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.agent_wakes
    ADD CONSTRAINT agent_wakes_workflow_run_id_fkey FOREIGN KEY (workflow_run_id) REFERENCES public.workflow_runs(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT agents_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES public.gateways(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT agents_reports_to_id_fkey FOREIGN KEY (reports_to_id) REFERENCES public.agents(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT agents_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.budget_events
    ADD CONSTRAINT budget_events_budget_id_fkey FOREIGN KEY (budget_id) REFERENCES public.budgets(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.budget_events
    ADD CONSTRAINT budget_events_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.budgets
    ADD CONSTRAINT budgets_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.departments
    ADD CONSTRAINT departments_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.dispatcher_faults
    ADD CONSTRAINT dispatcher_faults_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES public.gateways(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.dispatcher_faults
    ADD CONSTRAINT dispatcher_faults_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.dispatcher_gateways
    ADD CONSTRAINT dispatcher_gateways_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES public.gateways(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.dispatcher_gateways
    ADD CONSTRAINT dispatcher_gateways_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.dispatcher_instances
    ADD CONSTRAINT dispatcher_instances_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES public.gateways(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.dispatcher_instances
    ADD CONSTRAINT dispatcher_instances_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.dispatcher_settings
    ADD CONSTRAINT dispatcher_settings_instance_id_fkey FOREIGN KEY (instance_id) REFERENCES public.dispatcher_instances(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.dispatcher_settings
    ADD CONSTRAINT dispatcher_settings_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.gateways
    ADD CONSTRAINT gateways_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_leases
    ADD CONSTRAINT inbox_item_leases_agent_id_fkey FOREIGN KEY (agent_id) REFERENCES public.agents(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_leases
    ADD CONSTRAINT inbox_item_leases_item_id_fkey FOREIGN KEY (item_id) REFERENCES public.agent_inbox_items(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_leases
    ADD CONSTRAINT inbox_item_leases_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_leases
    ADD CONSTRAINT inbox_item_leases_wake_id_fkey FOREIGN KEY (wake_id) REFERENCES public.agent_wakes(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.inbox_item_marks
    ADD CONSTRAINT inbox_item_marks_item_id_fkey FOREIGN KEY (item_id) REFERENCES public.agent_inbox_items(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_marks
    ADD CONSTRAINT inbox_item_marks_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_origins
    ADD CONSTRAINT inbox_item_origins_from_agent_id_fkey FOREIGN KEY (from_agent_id) REFERENCES public.agents(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.inbox_item_origins
    ADD CONSTRAINT inbox_item_origins_item_id_fkey FOREIGN KEY (item_id) REFERENCES public.agent_inbox_items(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_origins
    ADD CONSTRAINT inbox_item_origins_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.inbox_item_origins
    ADD CONSTRAINT inbox_item_origins_wake_id_fkey FOREIGN KEY (wake_id) REFERENCES public.agent_wakes(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.notifications
    ADD CONSTRAINT notifications_actor_agent_id_fkey FOREIGN KEY (actor_agent_id) REFERENCES public.agents(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.notifications
    ADD CONSTRAINT notifications_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.task_relations
    ADD CONSTRAINT task_relations_source_task_id_fkey FOREIGN KEY (source_task_id) REFERENCES public.tasks(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.task_relations
    ADD CONSTRAINT task_relations_target_task_id_fkey FOREIGN KEY (target_task_id) REFERENCES public.tasks(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.task_relations
    ADD CONSTRAINT task_relations_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.tasks
    ADD CONSTRAINT tasks_assignee_agent_id_fkey FOREIGN KEY (assignee_agent_id) REFERENCES public.agents(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.tasks
    ADD CONSTRAINT tasks_parent_id_fkey FOREIGN KEY (parent_id) REFERENCES public.tasks(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.tasks
    ADD CONSTRAINT tasks_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_agent_routing
    ADD CONSTRAINT workflow_agent_routing_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_approvals
    ADD CONSTRAINT workflow_approvals_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.workflow_runs(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_approvals
    ADD CONSTRAINT workflow_approvals_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_audit_log
    ADD CONSTRAINT workflow_audit_log_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_bookings
    ADD CONSTRAINT workflow_bookings_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_claims
    ADD CONSTRAINT workflow_claims_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.workflow_runs(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_claims
    ADD CONSTRAINT workflow_claims_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_notifications
    ADD CONSTRAINT workflow_notifications_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES public.gateways(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_notifications
    ADD CONSTRAINT workflow_notifications_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.workflow_runs(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_notifications
    ADD CONSTRAINT workflow_notifications_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_respawns
    ADD CONSTRAINT workflow_respawns_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.workflow_runs(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_respawns
    ADD CONSTRAINT workflow_respawns_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_respawns
    ADD CONSTRAINT workflow_respawns_wake_id_fkey FOREIGN KEY (wake_id) REFERENCES public.agent_wakes(id) ON DELETE SET NULL;

ALTER TABLE ONLY public.workflow_run_events
    ADD CONSTRAINT workflow_run_events_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_runs
    ADD CONSTRAINT workflow_runs_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workspace
    ADD CONSTRAINT workspace_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;

ALTER TABLE dispatcher.made_objects ENABLE ROW LEVEL SECURITY;

ALTER TABLE dispatcher.migrations ENABLE ROW LEVEL SECURITY;

ALTER TABLE dispatcher.owned_objects ENABLE ROW LEVEL SECURITY;

ALTER TABLE dispatcher.recorded_objects ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.agent_budgets ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.agent_inbox_items ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.agent_profiles ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.agent_resumptions ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.agent_usage ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.agent_wake_state ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.agent_wakes ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.agents ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.budget_events ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.budgets ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.departments ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.dispatcher_faults ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.dispatcher_gateways ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.dispatcher_instances ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.dispatcher_settings ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.gateways ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.inbox_item_leases ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.inbox_item_marks ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.inbox_item_origins ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.notifications ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.task_relations ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.tasks ENABLE ROW LEVEL SECURITY;

CREATE POLICY tenant_isolation ON public.agent_budgets TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.agent_inbox_items TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.agent_usage TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.agents TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.gateways TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.notifications TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.task_relations TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.tasks TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.tenants TO authenticated USING ((id = public.current_tenant_id())) WITH CHECK ((id = public.current_tenant_id()));

CREATE POLICY tenant_isolation ON public.workspace TO authenticated USING ((tenant_id = public.current_tenant_id())) WITH CHECK ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.agent_profiles FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.agent_wake_state FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.agent_wakes FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.budget_events FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.budgets FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.departments FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.dispatcher_instances FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.inbox_item_origins FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.workflow_agent_routing FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.workflow_approvals FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.workflow_audit_log FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.workflow_bookings FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.workflow_run_events FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

CREATE POLICY tenant_reads ON public.workflow_run_transitions FOR SELECT TO authenticated USING (true);

CREATE POLICY tenant_reads ON public.workflow_runs FOR SELECT TO authenticated USING ((tenant_id = public.current_tenant_id()));

ALTER TABLE public.tenants ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.workflow_agent_routing ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.workflow_approvals ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.workflow_audit_log ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.workflow_bookings ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.workflow_claims ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.workflow_notifications ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.workflow_respawns ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.workflow_run_events ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.workflow_run_transitions ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.workflow_runs ENABLE ROW LEVEL SECURITY;

ALTER TABLE public.workspace ENABLE ROW LEVEL SECURITY;

GRANT USAGE ON SCHEMA dispatcher TO service_role;

GRANT USAGE ON SCHEMA public TO anon;
GRANT USAGE ON SCHEMA public TO authenticated;
GRANT USAGE ON SCHEMA public TO service_role;

GRANT ALL ON TABLE public.dispatcher_settings TO service_role;

REVOKE ALL ON FUNCTION dispatcher.active_runs(p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.active_runs(p_tenant_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.add_reference_routes(p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.add_reference_routes(p_tenant_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.add_stopped_runs(p_budget dispatcher.evaluated_budget, p_run_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.add_stopped_runs(p_budget dispatcher.evaluated_budget, p_run_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.agents_of_operator(p_tenant_id uuid, p_gateway_id uuid, p_agent text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.agents_of_operator(p_tenant_id uuid, p_gateway_id uuid, p_agent text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.agents_to_settle(p_sweeper dispatcher.claimant, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.agents_to_settle(p_sweeper dispatcher.claimant, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.agents_with_work(p_sweeper dispatcher.claimant, p_after uuid, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.agents_with_work(p_sweeper dispatcher.claimant, p_after uuid, p_limit integer) TO service_role;

GRANT ALL ON TABLE public.workflow_runs TO service_role;

GRANT SELECT(id) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(tenant_id) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(workflow_type) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(status) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(priority) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(initiator) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(task_id) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(owner_agent_id) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(pinned_agent_id) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(dispatch_attempts) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(release_count) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(queued_at) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(dispatched_at) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(claimed_at) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(claimed_by) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(started_at) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(finished_at) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(deadline_at) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(last_heartbeat_at) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(next_attempt_at) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(wake_id) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(paused_from) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(paused_at) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(blocker_type) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(blocker_description) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(escalated_to) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(last_error) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(last_error_at) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(input_payload) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(output_summary) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(input_tokens) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(output_tokens) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(cached_tokens) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(model_id) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(cost_estimate) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(currency) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(reserved_usd) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(reserved_tokens) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(assumed_usd) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(assumed_tokens) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(reported_at) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(kept_status) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(kept_error) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(created_at) ON TABLE public.workflow_runs TO authenticated;

GRANT SELECT(updated_at) ON TABLE public.workflow_runs TO authenticated;

REVOKE ALL ON FUNCTION dispatcher.apply_kept_end(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.apply_kept_end(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.apply_kept_ends() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.apply_kept_ends() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.apply_report(p_report jsonb, p_gateway_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.apply_report(p_report jsonb, p_gateway_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.audit_workflow_action(p_tenant_id uuid, p_actor text, p_action text, p_target text, p_before jsonb, p_after jsonb, p_allowed boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.audit_workflow_action(p_tenant_id uuid, p_actor text, p_action text, p_target text, p_before jsonb, p_after jsonb, p_allowed boolean) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.base_objects() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.base_objects() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.block_task_of_item(p_item_id uuid, p_at timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.block_task_of_item(p_item_id uuid, p_at timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.blockers_of(p_groups dispatcher.waiting_group[], p_closed jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.blockers_of(p_groups dispatcher.waiting_group[], p_closed jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.book(p_run public.workflow_runs, p_attempt integer, p_agent text, p_usd numeric, p_tokens bigint, p_source text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.book(p_run public.workflow_runs, p_attempt integer, p_agent text, p_usd numeric, p_tokens bigint, p_source text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.book_changed_runs() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.book_changed_runs() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.book_lost_claim(p_run public.workflow_runs, p_session text, p_claim_token uuid, p_usage jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.book_lost_claim(p_run public.workflow_runs, p_session text, p_claim_token uuid, p_usage jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.book_new_runs() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.book_new_runs() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.book_workflow_usage(p_run public.workflow_runs, p_usage jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.book_workflow_usage(p_run public.workflow_runs, p_usage jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.booked_since(p_before public.workflow_runs, p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.booked_since(p_before public.workflow_runs, p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.booked_tokens(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.booked_tokens(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.booked_usd(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.booked_usd(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.bounded_context(p_context jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.bounded_context(p_context jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.bounded_value(p_value jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.bounded_value(p_value jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.broadcast_budget_event(p_tenant_id uuid, p_frame jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.broadcast_budget_event(p_tenant_id uuid, p_frame jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.broadcast_hints_available() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.broadcast_hints_available() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.broken_budgets(p_budgets dispatcher.evaluated_budget[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.broken_budgets(p_budgets dispatcher.evaluated_budget[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.budget_blocks(p_agent_id uuid, p_now timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.budget_blocks(p_agent_id uuid, p_now timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.budget_frame(p_budget dispatcher.evaluated_budget, p_kind text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.budget_frame(p_budget dispatcher.evaluated_budget, p_kind text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.budget_periods(p_tenant_id uuid, p_now timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.budget_periods(p_tenant_id uuid, p_now timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.budget_verdict(p_budgets dispatcher.evaluated_budget[], p_agent_id text, p_department_id text, p_workflow_type text, p_usd numeric, p_tokens numeric, OUT verdict text, OUT holders uuid[], OUT warned integer, OUT reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.budget_verdict(p_budgets dispatcher.evaluated_budget[], p_agent_id text, p_department_id text, p_workflow_type text, p_usd numeric, p_tokens numeric, OUT verdict text, OUT holders uuid[], OUT warned integer, OUT reason text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.budgets_named(p_tenant_id uuid, p_budget text, OUT active jsonb, OUT is_known boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.budgets_named(p_tenant_id uuid, p_budget text, OUT active jsonb, OUT is_known boolean) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.budgets_to_set(p_tenant_id uuid, p_budget_id uuid, p_name text, p_scope text, p_scope_id text, p_period text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.budgets_to_set(p_tenant_id uuid, p_budget_id uuid, p_name text, p_scope text, p_scope_id text, p_period text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.busy_agent(p_agent_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.busy_agent(p_agent_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.cap_of(p_budget dispatcher.evaluated_budget) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.cap_of(p_budget dispatcher.evaluated_budget) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.chained_items(p_sweeper dispatcher.claimant, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.chained_items(p_sweeper dispatcher.claimant, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.changed_budget(p_budget jsonb, p_change jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.changed_budget(p_budget jsonb, p_change jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.claim_at_sweep(p_sweeper dispatcher.claimant, p_claim_limit integer, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.claim_at_sweep(p_sweeper dispatcher.claimant, p_claim_limit integer, p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.claim_one_wake(p_claimant dispatcher.claimant, p_agent_id uuid, p_path text, p_item_ids uuid[], p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.claim_one_wake(p_claimant dispatcher.claimant, p_agent_id uuid, p_path text, p_item_ids uuid[], p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.claim_waiting_wakes(p_instance_id uuid, p_limit integer, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.claim_waiting_wakes(p_instance_id uuid, p_limit integer, p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.claimed_answer(p_code text, p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.claimed_answer(p_code text, p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.clean_inbox_reason(p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.clean_inbox_reason(p_reason text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.close_leased_item(p_item_id uuid, p_outcome text, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.close_leased_item(p_item_id uuid, p_outcome text, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.close_leases(p_tenant_id uuid, p_gateway_id uuid, p_item_ids uuid[], p_outcome text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.close_leases(p_tenant_id uuid, p_gateway_id uuid, p_item_ids uuid[], p_outcome text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.column_remedy(p_name text, p_present text, p_expected text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.column_remedy(p_name text, p_present text, p_expected text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.complete_workflow_row(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.complete_workflow_row(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.configured_estimates(p_tenant_id uuid, OUT usd numeric, OUT tokens bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.configured_estimates(p_tenant_id uuid, OUT usd numeric, OUT tokens bigint) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.contained_claim(p_claimant dispatcher.claimant, p_claim jsonb, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.contained_claim(p_claimant dispatcher.claimant, p_claim jsonb, p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.correct_run(p_run public.workflow_runs, p_session text, p_usage jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.correct_run(p_run public.workflow_runs, p_session text, p_usage jsonb) TO service_role;

GRANT ALL ON TABLE public.agent_wakes TO service_role;

GRANT SELECT(id) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(tenant_id) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(agent_id) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(gateway_id) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(instance_id) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(state) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(path) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(item_ids) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(chain_depth) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(model_override) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(thinking_override) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(pid) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(claimed_at) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(started_at) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(deadline_at) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(ended_at) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(exit_code) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(error) ON TABLE public.agent_wakes TO authenticated;

GRANT SELECT(workflow_run_id) ON TABLE public.agent_wakes TO authenticated;

REVOKE ALL ON FUNCTION dispatcher.dead_letters_of_wake(p_wake public.agent_wakes, p_known uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.dead_letters_of_wake(p_wake public.agent_wakes, p_known uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.deadline_of_run(p_claimed_at timestamp with time zone, p_minutes integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.deadline_of_run(p_claimed_at timestamp with time zone, p_minutes integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.definition_remedy(p_kind text, p_name text, p_definition text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.definition_remedy(p_kind text, p_name text, p_definition text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.depth_of_post(p_wake public.agent_wakes) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.depth_of_post(p_wake public.agent_wakes) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.differences(p_before jsonb, p_after jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.differences(p_before jsonb, p_after jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.differs_from_run(p_run public.workflow_runs, p_workflow_type text, p_input jsonb, p_agent text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.differs_from_run(p_run public.workflow_runs, p_workflow_type text, p_input jsonb, p_agent text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.dispatch_queued_runs(p_tick dispatcher.tick) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.dispatch_queued_runs(p_tick dispatcher.tick) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.dispatch_runs(p_runs dispatcher.run_choice[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.dispatch_runs(p_runs dispatcher.run_choice[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.dispatcher_gateway_topic(p_gateway_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.dispatcher_gateway_topic(p_gateway_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.drop_notifications(p_run_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.drop_notifications(p_run_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.drop_outdated_notifications(p_tenant_id uuid, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.drop_outdated_notifications(p_tenant_id uuid, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.drop_retired_objects() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.drop_retired_objects() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.due_queue(p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.due_queue(p_tenant_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.earliest_instant(p_local timestamp without time zone, p_timezone text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.earliest_instant(p_local timestamp without time zone, p_timezone text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.end_wake(p_wake_id uuid, p_claim_token uuid, p_ending text, p_exit_code integer, p_error text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.end_wake(p_wake_id uuid, p_claim_token uuid, p_ending text, p_exit_code integer, p_error text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.end_workflow_claim(p_run public.workflow_runs, p_as text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.end_workflow_claim(p_run public.workflow_runs, p_as text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.ensure_type(p_name text, p_attributes text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.ensure_type(p_name text, p_attributes text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.escalate_leased_item(p_item_id uuid, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.escalate_leased_item(p_item_id uuid, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.estimate_of_type(p_tenant_id uuid, p_workflow_type text, OUT usd numeric, OUT tokens bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.estimate_of_type(p_tenant_id uuid, p_workflow_type text, OUT usd numeric, OUT tokens bigint) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.estimates_of_types(p_tenant_id uuid, p_types text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.estimates_of_types(p_tenant_id uuid, p_types text[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.evaluate_budgets(p_tenant_id uuid, p_action text, p_now timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.evaluate_budgets(p_tenant_id uuid, p_action text, p_now timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.expected_objects() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.expected_objects() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.expire_items(p_agent_ids uuid[], p_item_ids uuid[], p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.expire_items(p_agent_ids uuid[], p_item_ids uuid[], p_reason text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.expire_picked(p_sweeper dispatcher.claimant, p_item_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.expire_picked(p_sweeper dispatcher.claimant, p_item_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.expire_stale_items(p_sweeper dispatcher.claimant, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.expire_stale_items(p_sweeper dispatcher.claimant, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.failures_after(p_before integer, p_state text, p_ending text, p_has_progress boolean, p_max integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.failures_after(p_before integer, p_state text, p_ending text, p_has_progress boolean, p_max integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.fallback_estimates(p_settings public.dispatcher_settings) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.fallback_estimates(p_settings public.dispatcher_settings) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.fault_of_orphan(p_run public.workflow_runs, p_claim_token uuid, p_settings public.dispatcher_settings) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.fault_of_orphan(p_run public.workflow_runs, p_claim_token uuid, p_settings public.dispatcher_settings) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.faults_of_budget(p_tenant_id uuid, p_name text, p_scope text, p_scope_id text, p_period text, p_cap_usd numeric, p_cap_tokens bigint, p_action text, p_timezone text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.faults_of_budget(p_tenant_id uuid, p_name text, p_scope text, p_scope_id text, p_period text, p_cap_usd numeric, p_cap_tokens bigint, p_action text, p_timezone text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.faults_of_delay(p_seconds double precision, p_not_before timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.faults_of_delay(p_seconds double precision, p_not_before timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.faults_of_new_run(p_tenant_id uuid, p_workflow_type text, p_priority integer, p_initiator text, p_task_id text, p_agent text, p_request_key text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.faults_of_new_run(p_tenant_id uuid, p_workflow_type text, p_priority integer, p_initiator text, p_task_id text, p_agent text, p_request_key text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.faults_of_route(p_tenant_id uuid, p_workflow_type text, p_agent text, p_priority integer, p_max_concurrent integer, p_timeout_minutes integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.faults_of_route(p_tenant_id uuid, p_workflow_type text, p_agent text, p_priority integer, p_max_concurrent integer, p_timeout_minutes integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.faults_of_tenant(p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.faults_of_tenant(p_tenant_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.faults_of_text(p_name text, p_value text, p_longest integer, p_is_needed boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.faults_of_text(p_name text, p_value text, p_longest integer, p_is_needed boolean) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.fill_waitlist(p_sweeper dispatcher.claimant, p_cursor jsonb, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.fill_waitlist(p_sweeper dispatcher.claimant, p_cursor jsonb, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.find_gateway(p_tenant_id uuid, p_gateway text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.find_gateway(p_tenant_id uuid, p_gateway text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.find_inbox_agent(p_tenant_id uuid, p_agent_slug text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.find_inbox_agent(p_tenant_id uuid, p_agent_slug text) TO service_role;

GRANT ALL ON TABLE public.inbox_item_origins TO service_role;

GRANT SELECT(item_id) ON TABLE public.inbox_item_origins TO authenticated;

GRANT SELECT(tenant_id) ON TABLE public.inbox_item_origins TO authenticated;

GRANT SELECT(wake_id) ON TABLE public.inbox_item_origins TO authenticated;

GRANT SELECT(from_agent_id) ON TABLE public.inbox_item_origins TO authenticated;

GRANT SELECT(chain_depth) ON TABLE public.inbox_item_origins TO authenticated;

GRANT SELECT(content_key) ON TABLE public.inbox_item_origins TO authenticated;

GRANT SELECT(created_at) ON TABLE public.inbox_item_origins TO authenticated;

REVOKE ALL ON FUNCTION dispatcher.find_posted_item(p_tenant_id uuid, p_sender_id uuid, p_request_key text, p_content_keys text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.find_posted_item(p_tenant_id uuid, p_sender_id uuid, p_request_key text, p_content_keys text[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.find_sender_wake(p_agent_id uuid, p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.find_sender_wake(p_agent_id uuid, p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.finish_notification(p_result jsonb, p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.finish_notification(p_result jsonb, p_tenant_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.finish_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid, p_status text, p_output jsonb, p_error text, p_usage jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.finish_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid, p_status text, p_output jsonb, p_error text, p_usage jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.finite_time(p_at timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.finite_time(p_at timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.forget_old_instances(p_tenant_id uuid, p_gateway_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.forget_old_instances(p_tenant_id uuid, p_gateway_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.forgotten_leases(p_sweeper dispatcher.claimant, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.forgotten_leases(p_sweeper dispatcher.claimant, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.gate_of_respawn(p_claimant dispatcher.claimant, p_agent_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.gate_of_respawn(p_claimant dispatcher.claimant, p_agent_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.gateway_backlog(p_gateway_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.gateway_backlog(p_gateway_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.gateway_of_workflow_agent(p_tenant_id uuid, p_agent_id text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.gateway_of_workflow_agent(p_tenant_id uuid, p_agent_id text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.give_to_respawn(p_run public.workflow_runs, p_wake public.agent_wakes, p_usd numeric, p_tokens numeric) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.give_to_respawn(p_run public.workflow_runs, p_wake public.agent_wakes, p_usd numeric, p_tokens numeric) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.give_up_dispatch(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.give_up_dispatch(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.give_up_items(p_item_ids uuid[], p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.give_up_items(p_item_ids uuid[], p_reason text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.give_up_spent(p_sweeper dispatcher.claimant, p_item_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.give_up_spent(p_sweeper dispatcher.claimant, p_item_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.give_up_spent_items(p_sweeper dispatcher.claimant, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.give_up_spent_items(p_sweeper dispatcher.claimant, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.granted_rights() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.granted_rights() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.guard_tenant(p_table text, p_is_ours boolean, VARIADIC p_references text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.guard_tenant(p_table text, p_is_ours boolean, VARIADIC p_references text[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.guard_workflow_transition() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.guard_workflow_transition() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.hand_out(p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_budgets dispatcher.evaluated_budget[], p_batch integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.hand_out(p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_budgets dispatcher.evaluated_budget[], p_batch integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.hand_out_runs(p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_budgets dispatcher.evaluated_budget[], p_batch integer, p_one_by_one boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.hand_out_runs(p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_budgets dispatcher.evaluated_budget[], p_batch integer, p_one_by_one boolean) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.has_released(p_run public.workflow_runs, p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.has_released(p_run public.workflow_runs, p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.has_the_pass(p_tick dispatcher.tick) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.has_the_pass(p_tick dispatcher.tick) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.held_by(p_groups dispatcher.waiting_group[], p_closed jsonb, p_budgets dispatcher.evaluated_budget[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.held_by(p_groups dispatcher.waiting_group[], p_closed jsonb, p_budgets dispatcher.evaluated_budget[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.held_claims(p_claims jsonb, p_held text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.held_claims(p_claims jsonb, p_held text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.held_gateways(p_tick dispatcher.tick) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.held_gateways(p_tick dispatcher.tick) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.held_lasting(p_tenant_id uuid, p_gateway_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.held_lasting(p_tenant_id uuid, p_gateway_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.held_rows(p_tenant_id uuid, p_gateway_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.held_rows(p_tenant_id uuid, p_gateway_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.held_tables() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.held_tables() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.held_thing(p_kind text, p_table text, p_pids integer[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.held_thing(p_kind text, p_table text, p_pids integer[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.hint_agent_change() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.hint_agent_change() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.hint_budget_change() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.hint_budget_change() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.hint_inbox_insert() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.hint_inbox_insert() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.hint_inbox_update() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.hint_inbox_update() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.hint_other_gateways(p_tick dispatcher.tick) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.hint_other_gateways(p_tick dispatcher.tick) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.hint_workflow_daemons(p_tenant_id uuid, p_run_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.hint_workflow_daemons(p_tenant_id uuid, p_run_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.hint_workflow_insert() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.hint_workflow_insert() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.hint_workflow_rules() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.hint_workflow_rules() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.hint_workflow_update() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.hint_workflow_update() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.hinted_ids(p_claim jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.hinted_ids(p_claim jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.holds_of(p_groups dispatcher.waiting_group[], p_closed jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.holds_of(p_groups dispatcher.waiting_group[], p_closed jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.in_parts(p_sweeper dispatcher.claimant, p_step text, p_what text, p_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.in_parts(p_sweeper dispatcher.claimant, p_step text, p_what text, p_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.inbox_close_verdict(p_item_id uuid, p_code text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.inbox_close_verdict(p_item_id uuid, p_code text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.inbox_content_key(p_wake_id uuid, p_content text, p_at timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.inbox_content_key(p_wake_id uuid, p_content text, p_at timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.inbox_items_of_lease(p_agent_id uuid, p_lease_token uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.inbox_items_of_lease(p_agent_id uuid, p_lease_token uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.inbox_request_key(p_request_key text, p_post_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.inbox_request_key(p_request_key text, p_post_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.inbox_retry_delay(p_attempt integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.inbox_retry_delay(p_attempt integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.insert_post(p_origin public.inbox_item_origins, p_recipient_id uuid, p_recipient_slug text, p_event_type text, p_summary text, p_context jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.insert_post(p_origin public.inbox_item_origins, p_recipient_id uuid, p_recipient_slug text, p_event_type text, p_summary text, p_context jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.invalid(p_faults text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.invalid(p_faults text[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.is_in_budget_scope(p_scope text, p_scope_id text, p_agent_id text, p_department_id text, p_workflow_type text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.is_in_budget_scope(p_scope text, p_scope_id text, p_agent_id text, p_department_id text, p_workflow_type text) TO service_role;

GRANT ALL ON TABLE public.dispatcher_instances TO service_role;

GRANT SELECT(id) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(tenant_id) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(gateway_id) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(state) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(hostname) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(pid) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(version) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(started_at) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(last_heartbeat_at) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(stopped_at) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(last_sweep_at) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(last_sweep) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(last_tick) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(realtime) ON TABLE public.dispatcher_instances TO authenticated;

GRANT SELECT(health) ON TABLE public.dispatcher_instances TO authenticated;

REVOKE ALL ON FUNCTION dispatcher.is_instance_silent(p_instance public.dispatcher_instances) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.is_instance_silent(p_instance public.dispatcher_instances) TO service_role;

GRANT ALL ON TABLE public.workflow_notifications TO service_role;

REVOKE ALL ON FUNCTION dispatcher.is_notification_due(p_note public.workflow_notifications) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.is_notification_due(p_note public.workflow_notifications) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.is_phase_due(p_tick dispatcher.tick, p_phase text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.is_phase_due(p_tick dispatcher.tick, p_phase text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.is_quiet() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.is_quiet() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.is_same_attempt(p_run public.workflow_runs, p_session text, p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.is_same_attempt(p_run public.workflow_runs, p_session text, p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.is_secret(p_column text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.is_secret(p_column text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.is_set_aside_by_stall(p_item_id uuid, p_failed_at timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.is_set_aside_by_stall(p_item_id uuid, p_failed_at timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.is_signed_in_user() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.is_signed_in_user() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.is_stale_dispatch(p_run public.workflow_runs, p_settings public.dispatcher_settings) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.is_stale_dispatch(p_run public.workflow_runs, p_settings public.dispatcher_settings) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.is_suspect(p_run public.workflow_runs, p_settings public.dispatcher_settings) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.is_suspect(p_run public.workflow_runs, p_settings public.dispatcher_settings) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.is_timezone(p_timezone text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.is_timezone(p_timezone text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.items_of_claim(p_facts dispatcher.gate_facts) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.items_of_claim(p_facts dispatcher.gate_facts) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.items_to_requeue(p_agent_ids uuid[], p_is_one_agent boolean, p_item_ids uuid[], p_dead boolean, p_since timestamp with time zone, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.items_to_requeue(p_agent_ids uuid[], p_is_one_agent boolean, p_item_ids uuid[], p_dead boolean, p_since timestamp with time zone, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.join_waitlist(p_agent_id uuid, p_path text, p_since timestamp with time zone, p_oldest timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.join_waitlist(p_agent_id uuid, p_path text, p_since timestamp with time zone, p_oldest timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.keep_end(p_run public.workflow_runs, p_status text, p_output jsonb, p_error text, p_usage jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.keep_end(p_run public.workflow_runs, p_status text, p_output jsonb, p_error text, p_usage jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.keep_settings(p_instance_id uuid, p_tenant_id uuid, p_settings jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.keep_settings(p_instance_id uuid, p_tenant_id uuid, p_settings jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.known_cost(p_cost numeric) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.known_cost(p_cost numeric) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.known_time(p_at timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.known_time(p_at timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.known_tokens(p_input bigint, p_output bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.known_tokens(p_input bigint, p_output bigint) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.last_heartbeat(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.last_heartbeat(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.lease_busy_inbox_item(p_tenant_id uuid, p_agent_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.lease_busy_inbox_item(p_tenant_id uuid, p_agent_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.lease_due_items(p_tenant_id uuid, p_agent_id uuid, p_wanted integer, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.lease_due_items(p_tenant_id uuid, p_agent_id uuid, p_wanted integer, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.lease_one_inbox_item(p_item_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.lease_one_inbox_item(p_item_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.leave_waitlist(p_agent_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.leave_waitlist(p_agent_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.let_users_read(p_table text, p_rows text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.let_users_read(p_table text, p_rows text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.list_agents(p_sweeper dispatcher.claimant, p_agent_ids uuid[], p_oldest timestamp with time zone[], p_since timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.list_agents(p_sweeper dispatcher.claimant, p_agent_ids uuid[], p_oldest timestamp with time zone[], p_since timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.live_wakes_of_gateway(p_gateway_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.live_wakes_of_gateway(p_gateway_id uuid) TO service_role;

GRANT ALL ON TABLE public.agent_wake_state TO service_role;

GRANT SELECT(agent_id) ON TABLE public.agent_wake_state TO authenticated;

GRANT SELECT(tenant_id) ON TABLE public.agent_wake_state TO authenticated;

GRANT SELECT(consecutive_failures) ON TABLE public.agent_wake_state TO authenticated;

GRANT SELECT(stalled_at) ON TABLE public.agent_wake_state TO authenticated;

GRANT SELECT(last_wake_id) ON TABLE public.agent_wake_state TO authenticated;

GRANT SELECT(last_claimed_at) ON TABLE public.agent_wake_state TO authenticated;

GRANT SELECT(last_ended_at) ON TABLE public.agent_wake_state TO authenticated;

GRANT SELECT(last_end_state) ON TABLE public.agent_wake_state TO authenticated;

GRANT SELECT(waitlisted_at) ON TABLE public.agent_wake_state TO authenticated;

GRANT SELECT(waitlist_path) ON TABLE public.agent_wake_state TO authenticated;

GRANT SELECT(waiting_since) ON TABLE public.agent_wake_state TO authenticated;

GRANT SELECT(chain_notified_at) ON TABLE public.agent_wake_state TO authenticated;

GRANT SELECT(often_notified_at) ON TABLE public.agent_wake_state TO authenticated;

GRANT SELECT(updated_at) ON TABLE public.agent_wake_state TO authenticated;

REVOKE ALL ON FUNCTION dispatcher.lock_agent(p_claimant dispatcher.claimant, p_agent_id uuid, OUT slug text, OUT state public.agent_wake_state, OUT verdict text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.lock_agent(p_claimant dispatcher.claimant, p_agent_id uuid, OUT slug text, OUT state public.agent_wake_state, OUT verdict text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.lock_gateway(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.lock_gateway(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.lock_inbox_lease(p_item_id uuid, p_lease_token uuid, p_outcomes text[], p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.lock_inbox_lease(p_item_id uuid, p_lease_token uuid, p_outcomes text[], p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.lock_routes(p_tick dispatcher.tick) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.lock_routes(p_tick dispatcher.tick) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.lock_tables(VARIADIC p_tables text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.lock_tables(VARIADIC p_tables text[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.lock_wake(p_wake_id uuid, OUT wake public.agent_wakes, OUT verdict text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.lock_wake(p_wake_id uuid, OUT wake public.agent_wakes, OUT verdict text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.lock_wake_state(p_agent_id uuid, p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.lock_wake_state(p_agent_id uuid, p_tenant_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.lock_workflow_run(p_tenant_id uuid, p_run_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.lock_workflow_run(p_tenant_id uuid, p_run_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.look_around(p_sweeper dispatcher.claimant) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.look_around(p_sweeper dispatcher.claimant) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.look_at_runs(p_tick dispatcher.tick) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.look_at_runs(p_tick dispatcher.tick) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.mark_agent_stalled(p_agent_id uuid, p_cause text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.mark_agent_stalled(p_agent_id uuid, p_cause text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.mark_as_set_aside(p_item_ids uuid[], p_as text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.mark_as_set_aside(p_item_ids uuid[], p_as text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.mark_item_changes(p_reopened uuid[], p_closed_by_user uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.mark_item_changes(p_reopened uuid[], p_closed_by_user uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.mark_runs(p_run_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.mark_runs(p_run_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.mark_unrouted_runs(p_tick dispatcher.tick, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.mark_unrouted_runs(p_tick dispatcher.tick, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.mend_rights() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.mend_rights() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.merge_inbox_context(p_context jsonb, p_changes jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.merge_inbox_context(p_context jsonb, p_changes jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.missing_rights() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.missing_rights() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.must_abort(p_sqlstate text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.must_abort(p_sqlstate text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.must_be_written(p_found boolean, p_what text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.must_be_written(p_found boolean, p_what text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.named_task(p_context jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.named_task(p_context jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.new_faults(p_instance public.dispatcher_instances, p_after bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.new_faults(p_instance public.dispatcher_instances, p_after bigint) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.next_notification(p_instance public.dispatcher_instances) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.next_notification(p_instance public.dispatcher_instances) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.next_workflow_moment(p_tick dispatcher.tick) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.next_workflow_moment(p_tick dispatcher.tick) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.note_fault(p_tenant_id uuid, p_gateway_id uuid, p_side_write text, p_error text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.note_fault(p_tenant_id uuid, p_gateway_id uuid, p_side_write text, p_error text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.note_report(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.note_report(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.note_tick(p_tick dispatcher.tick, p_facts jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.note_tick(p_tick dispatcher.tick, p_facts jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.note_work_on_claim(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.note_work_on_claim(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.note_workflow_actor(p_actor text, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.note_workflow_actor(p_actor text, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.notify_operator(p_tenant_id uuid, p_type text, p_title text, p_body text, p_agent_id uuid, p_meta jsonb, p_entity_type text, p_entity_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.notify_operator(p_tenant_id uuid, p_type text, p_title text, p_body text, p_agent_id uuid, p_meta jsonb, p_entity_type text, p_entity_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.object_definitions() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.object_definitions() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.object_of_right(p_kind text, p_name text, p_column text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.object_of_right(p_kind text, p_name text, p_column text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.often_woken_agents(p_sweeper dispatcher.claimant, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.often_woken_agents(p_sweeper dispatcher.claimant, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.old_notifications(p_tenant_id uuid, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.old_notifications(p_tenant_id uuid, p_limit integer) TO service_role;

GRANT ALL ON TABLE public.agent_inbox_items TO service_role;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.agent_inbox_items TO authenticated;

GRANT ALL ON TABLE public.agents TO service_role;
GRANT SELECT ON TABLE public.agents TO authenticated;

GRANT SELECT,UPDATE ON TABLE dispatcher.agent_inbox_items TO service_role;

REVOKE ALL ON FUNCTION dispatcher.open_items_of_gateway(p_claimant dispatcher.claimant) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.open_items_of_gateway(p_claimant dispatcher.claimant) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.open_neighbours() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.open_neighbours() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.open_wake_facts(p_wake public.agent_wakes) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.open_wake_facts(p_wake public.agent_wakes) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.open_wakes_of_others(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.open_wakes_of_others(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.orphan_after_seconds(p_settings public.dispatcher_settings) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.orphan_after_seconds(p_settings public.dispatcher_settings) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.owe_notifications(p_runs dispatcher.run_choice[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.owe_notifications(p_runs dispatcher.run_choice[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.owns(p_name text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.owns(p_name text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.phases_due(p_sweeper dispatcher.claimant) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.phases_due(p_sweeper dispatcher.claimant) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.pids_of_rows(p_xmax xid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.pids_of_rows(p_xmax xid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.prepare_workflow_run() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.prepare_workflow_run() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.present_objects() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.present_objects() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.prune_old_rows(p_sweeper dispatcher.claimant, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.prune_old_rows(p_sweeper dispatcher.claimant, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.prune_wakes(p_sweeper dispatcher.claimant, p_wake_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.prune_wakes(p_sweeper dispatcher.claimant, p_wake_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.prune_workflow_rows(p_tick dispatcher.tick, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.prune_workflow_rows(p_tick dispatcher.tick, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.publish_table(p_table text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.publish_table(p_table text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.put_off(p_deadline timestamp with time zone, p_held_since timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.put_off(p_deadline timestamp with time zone, p_held_since timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.queue_agents(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.queue_agents(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.queued_types(p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.queued_types(p_tenant_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.read_estimates(p_tick dispatcher.tick, OUT estimates jsonb, OUT error text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.read_estimates(p_tick dispatcher.tick, OUT estimates jsonb, OUT error text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.read_gate_facts(p_agent_id uuid, p_settings public.dispatcher_settings, p_hinted uuid[], p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.read_gate_facts(p_agent_id uuid, p_settings public.dispatcher_settings, p_hinted uuid[], p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.read_money(p_tick dispatcher.tick, p_action text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.read_money(p_tick dispatcher.tick, p_action text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.record_budget_event(p_tenant_id uuid, p_budget dispatcher.evaluated_budget, p_kind text, p_run_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.record_budget_event(p_tenant_id uuid, p_budget dispatcher.evaluated_budget, p_kind text, p_run_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.record_definitions(p_fingerprint text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.record_definitions(p_fingerprint text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.record_workflow_transition() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.record_workflow_transition() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.refusal(p_agent_id uuid, p_agent_slug text, p_reason text, p_retry_in double precision, p_failures integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.refusal(p_agent_id uuid, p_agent_slug text, p_reason text, p_retry_in double precision, p_failures integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.refusal_at_sweep(p_sweeper dispatcher.claimant, p_agent_id uuid, p_agent_slug text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.refusal_at_sweep(p_sweeper dispatcher.claimant, p_agent_id uuid, p_agent_slug text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.refuse_claim(p_run public.workflow_runs, p_agent text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.refuse_claim(p_run public.workflow_runs, p_agent text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.refuse_post(p_sender_id uuid, p_recipient_id uuid, p_event_type text, p_context jsonb, p_request_key text, OUT code text, OUT detail text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.refuse_post(p_sender_id uuid, p_recipient_id uuid, p_event_type text, p_context jsonb, p_request_key text, OUT code text, OUT detail text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.refuse_post_content(p_tenant_id uuid, p_summary text, p_context jsonb, OUT code text, OUT detail text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.refuse_post_content(p_tenant_id uuid, p_summary text, p_context jsonb, OUT code text, OUT detail text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.refuse_respawn(p_run_id uuid, p_reason text, p_agent_id uuid, p_agent_slug text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.refuse_respawn(p_run_id uuid, p_reason text, p_agent_id uuid, p_agent_slug text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.refuse_run(p_run_id uuid, p_code text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.refuse_run(p_run_id uuid, p_code text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.refuse_workflow_caller(p_code text, p_run public.workflow_runs, p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid, p_usage jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.refuse_workflow_caller(p_code text, p_run public.workflow_runs, p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid, p_usage jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.refuse_workflow_event_change() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.refuse_workflow_event_change() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.release_forgotten(p_sweeper dispatcher.claimant, p_wake_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.release_forgotten(p_sweeper dispatcher.claimant, p_wake_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.release_forgotten_leases(p_sweeper dispatcher.claimant, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.release_forgotten_leases(p_sweeper dispatcher.claimant, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.release_lease(p_item dispatcher.agent_inbox_items, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.release_lease(p_item dispatcher.agent_inbox_items, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.release_stale_claims(p_tick dispatcher.tick, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.release_stale_claims(p_tick dispatcher.tick, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.release_wake_leases(p_wake public.agent_wakes, p_give_back boolean, p_reason text, OUT released integer, OUT dead uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.release_wake_leases(p_wake public.agent_wakes, p_give_back boolean, p_reason text, OUT released integer, OUT dead uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.renew_wake_leases(p_instance_id uuid, p_wake_ids uuid[], p_lease_seconds integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.renew_wake_leases(p_instance_id uuid, p_wake_ids uuid[], p_lease_seconds integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.repeat_end(p_run public.workflow_runs, p_usage jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.repeat_end(p_run public.workflow_runs, p_usage jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.requeue_chosen_items(p_agent_ids uuid[], p_items uuid[], p_owners uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.requeue_chosen_items(p_agent_ids uuid[], p_items uuid[], p_owners uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.requeue_items_of_agent(p_agent_id uuid, p_item_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.requeue_items_of_agent(p_agent_id uuid, p_item_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.reserve_in_budgets(p_budgets dispatcher.evaluated_budget[], p_agent_id text, p_department_id text, p_workflow_type text, p_usd numeric, p_tokens numeric) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.reserve_in_budgets(p_budgets dispatcher.evaluated_budget[], p_agent_id text, p_department_id text, p_workflow_type text, p_usd numeric, p_tokens numeric) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.respawn_grant(p_wake public.agent_wakes, p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.respawn_grant(p_wake public.agent_wakes, p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.respawn_locked_run(p_claimant dispatcher.claimant, p_run public.workflow_runs, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.respawn_locked_run(p_claimant dispatcher.claimant, p_run public.workflow_runs, p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.restrict_functions(p_names text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.restrict_functions(p_names text[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.retry_stale_dispatches(p_tick dispatcher.tick, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.retry_stale_dispatches(p_tick dispatcher.tick, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.retry_stale_run(p_run public.workflow_runs, p_money dispatcher.money, p_gateways uuid[], OUT outcome text, OUT budgets dispatcher.evaluated_budget[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.retry_stale_run(p_run public.workflow_runs, p_money dispatcher.money, p_gateways uuid[], OUT outcome text, OUT budgets dispatcher.evaluated_budget[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.return_workflow_run(p_run public.workflow_runs, p_how text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.return_workflow_run(p_run public.workflow_runs, p_how text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.revise_budget() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.revise_budget() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.row_error(p_phase text, p_run_id uuid, p_error text, p_code text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.row_error(p_phase text, p_run_id uuid, p_error text, p_code text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.run_candidates(p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_batch integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.run_candidates(p_tenant_id uuid, p_groups dispatcher.waiting_group[], p_batch integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.run_phase(p_tick dispatcher.tick, p_phase text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.run_phase(p_tick dispatcher.tick, p_phase text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.running_instance(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.running_instance(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.runs_of_budget(p_tick dispatcher.tick, p_budget dispatcher.evaluated_budget, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.runs_of_budget(p_tick dispatcher.tick, p_budget dispatcher.evaluated_budget, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.runs_over_deadline(p_tick dispatcher.tick, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.runs_over_deadline(p_tick dispatcher.tick, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.runs_to_mark(p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.runs_to_mark(p_tenant_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.schema_drift() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.schema_drift() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.schema_exposure() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.schema_exposure() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.seconds_until(p_at timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.seconds_until(p_at timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.send_gateway_hint(p_gateway_id uuid, p_event text, p_payload jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.send_gateway_hint(p_gateway_id uuid, p_event text, p_payload jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.sessions_of(p_pids integer[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.sessions_of(p_pids integer[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.set_items_aside(p_item_ids uuid[], p_as text, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.set_items_aside(p_item_ids uuid[], p_as text, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.set_off_waitlist(p_agent_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.set_off_waitlist(p_agent_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.setting(p_settings jsonb, p_name text, p_default double precision, p_lowest double precision, p_highest double precision) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.setting(p_settings jsonb, p_name text, p_default double precision, p_lowest double precision, p_highest double precision) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.settings_of_gateway(p_gateway_id uuid, p_otherwise jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.settings_of_gateway(p_gateway_id uuid, p_otherwise jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.settings_of_instance(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.settings_of_instance(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.settle_constraints(p_table regclass) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.settle_constraints(p_table regclass) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.settle_items_of_wake(p_wake public.agent_wakes, p_state text, p_ending text, p_error text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.settle_items_of_wake(p_wake public.agent_wakes, p_state text, p_ending text, p_error text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.settle_stalled(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.settle_stalled(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.settle_stalled_agents(p_sweeper dispatcher.claimant) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.settle_stalled_agents(p_sweeper dispatcher.claimant) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.settle_workflow_claim(p_run public.workflow_runs, p_as text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.settle_workflow_claim(p_run public.workflow_runs, p_as text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.shown(p_text text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.shown(p_text text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.shown_row(p_row jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.shown_row(p_row jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.silent_runs(p_tick dispatcher.tick, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.silent_runs(p_tick dispatcher.tick, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.silent_since(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.silent_since(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.since(p_since text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.since(p_since text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.source_of_booking(p_run public.workflow_runs, p_usd numeric) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.source_of_booking(p_run public.workflow_runs, p_usd numeric) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.spend_attempt_of_lost_wake(p_wake public.agent_wakes) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.spend_attempt_of_lost_wake(p_wake public.agent_wakes) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.spent_items(p_sweeper dispatcher.claimant, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.spent_items(p_sweeper dispatcher.claimant, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.spent_of(p_budget dispatcher.evaluated_budget, p_with_reserved boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.spent_of(p_budget dispatcher.evaluated_budget, p_with_reserved boolean) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.stale_dispatches(p_tick dispatcher.tick, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.stale_dispatches(p_tick dispatcher.tick, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.stale_item_ids(p_sweeper dispatcher.claimant, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.stale_item_ids(p_sweeper dispatcher.claimant, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.stall_at_end(p_wake public.agent_wakes, p_cause text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.stall_at_end(p_wake public.agent_wakes, p_cause text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.stamp_items(p_wake public.agent_wakes, p_started_at timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.stamp_items(p_wake public.agent_wakes, p_started_at timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.start_anew(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.start_anew(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.start_of_today() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.start_of_today() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.start_wake(p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.start_wake(p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.start_workflow_run(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.start_workflow_run(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.stop_all(p_runs public.workflow_runs[], p_error text, OUT ids uuid[], OUT errors jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.stop_all(p_runs public.workflow_runs[], p_error text, OUT ids uuid[], OUT errors jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.stop_chains(p_sweeper dispatcher.claimant, p_item_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.stop_chains(p_sweeper dispatcher.claimant, p_item_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.stop_overspent_runs(p_tick dispatcher.tick, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.stop_overspent_runs(p_tick dispatcher.tick, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.stop_runs(p_runs public.workflow_runs[], p_error text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.stop_runs(p_runs public.workflow_runs[], p_error text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.stop_wake_chains(p_sweeper dispatcher.claimant, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.stop_wake_chains(p_sweeper dispatcher.claimant, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.stop_workflow_run(p_run public.workflow_runs, p_error text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.stop_workflow_run(p_run public.workflow_runs, p_error text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.sweeper(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.sweeper(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.take_notifications(p_instance public.dispatcher_instances, p_limit integer, p_lease_seconds integer, p_known_agents text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.take_notifications(p_instance public.dispatcher_instances, p_limit integer, p_lease_seconds integer, p_known_agents text[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.take_run(p_run public.workflow_runs, p_session text, p_agent text, p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.take_run(p_run public.workflow_runs, p_session text, p_agent text, p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.target_of(p_run public.workflow_runs, OUT agent_id text, OUT department_id text, OUT gateway_id uuid, OUT is_open boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.target_of(p_run public.workflow_runs, OUT agent_id text, OUT department_id text, OUT gateway_id uuid, OUT is_open boolean) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tell_budget_event(p_tenant_id uuid, p_budget dispatcher.evaluated_budget, p_kind text, p_run_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tell_budget_event(p_tenant_id uuid, p_budget dispatcher.evaluated_budget, p_kind text, p_run_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tell_budget_recoveries(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tell_budget_recoveries(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tell_chain(p_sweeper dispatcher.claimant, p_agent_id uuid, p_depth integer, p_item_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tell_chain(p_sweeper dispatcher.claimant, p_agent_id uuid, p_depth integer, p_item_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tell_dead_letters(p_agent_id uuid, p_item_ids uuid[], p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tell_dead_letters(p_agent_id uuid, p_item_ids uuid[], p_reason text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tell_escalation(p_item_id uuid, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tell_escalation(p_item_id uuid, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tell_full_budgets(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[], p_holders uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tell_full_budgets(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[], p_holders uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tell_of_money(p_tick dispatcher.tick, p_money dispatcher.money, p_holders uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tell_of_money(p_tick dispatcher.tick, p_money dispatcher.money, p_holders uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tell_often(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tell_often(p_sweeper dispatcher.claimant, p_agent_ids uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tell_often_woken(p_sweeper dispatcher.claimant, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tell_often_woken(p_sweeper dispatcher.claimant, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_agent_budgets() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_agent_budgets() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_agent_inbox_items() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_agent_inbox_items() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_agent_resumptions() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_agent_resumptions() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_agent_usage() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_agent_usage() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_agent_wake_state() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_agent_wake_state() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_agent_wakes() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_agent_wakes() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_agents() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_agents() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_budget_events() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_budget_events() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_dispatcher_faults() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_dispatcher_faults() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_dispatcher_gateways() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_dispatcher_gateways() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_dispatcher_instances() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_dispatcher_instances() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_dispatcher_settings() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_dispatcher_settings() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_inbox_item_leases() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_inbox_item_leases() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_inbox_item_marks() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_inbox_item_marks() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_inbox_item_origins() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_inbox_item_origins() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_notifications() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_notifications() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_task_relations() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_task_relations() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_tasks() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_tasks() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_workflow_approvals() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_workflow_approvals() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_workflow_claims() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_workflow_claims() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_workflow_notifications() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_workflow_notifications() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_workflow_respawns() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_workflow_respawns() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_workflow_run_events() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_workflow_run_events() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tenant_of_workflow_runs() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tenant_of_workflow_runs() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tick_of(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tick_of(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.tight_budgets(p_budgets dispatcher.evaluated_budget[], p_estimates jsonb, p_runs integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.tight_budgets(p_budgets dispatcher.evaluated_budget[], p_estimates jsonb, p_runs integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.time_out_run(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.time_out_run(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.time_out_runs(p_tick dispatcher.tick, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.time_out_runs(p_tick dispatcher.tick, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.try_dispatch(p_run dispatcher.run_choice) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.try_dispatch(p_run dispatcher.run_choice) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.try_to_stop(p_run public.workflow_runs, p_error text, OUT ids uuid[], OUT errors jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.try_to_stop(p_run public.workflow_runs, p_error text, OUT ids uuid[], OUT errors jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.typed_settings(p_settings jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.typed_settings(p_settings jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.unheld_groups(p_groups dispatcher.waiting_group[], p_tenant_id uuid, p_types text[], p_gateways uuid[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.unheld_groups(p_groups dispatcher.waiting_group[], p_tenant_id uuid, p_types text[], p_gateways uuid[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.unknown_agent(p_gateway_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.unknown_agent(p_gateway_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.unknown_gateway(p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.unknown_gateway(p_tenant_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.unlocked_runs(p_runs public.workflow_runs[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.unlocked_runs(p_runs public.workflow_runs[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.unrouted_types(p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.unrouted_types(p_tenant_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.unspent_budgets(p_tenant_id uuid, p_action text, p_now timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.unspent_budgets(p_tenant_id uuid, p_action text, p_now timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wait_after_end(p_wake public.agent_wakes, p_since timestamp with time zone, p_oldest timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wait_after_end(p_wake public.agent_wakes, p_since timestamp with time zone, p_oldest timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wait_for_gateway(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wait_for_gateway(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wait_for_next_wake(p_wake public.agent_wakes, p_settings public.dispatcher_settings, p_state text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wait_for_next_wake(p_wake public.agent_wakes, p_settings public.dispatcher_settings, p_state text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.waiting_groups(p_tenant_id uuid, p_estimates jsonb, p_budgets dispatcher.evaluated_budget[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.waiting_groups(p_tenant_id uuid, p_estimates jsonb, p_budgets dispatcher.evaluated_budget[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wake_blockers(p_item_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wake_blockers(p_item_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wake_chain_limit(p_settings public.dispatcher_settings) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wake_chain_limit(p_settings public.dispatcher_settings) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wake_cooldown(p_failures integer, p_settings public.dispatcher_settings) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wake_cooldown(p_failures integer, p_settings public.dispatcher_settings) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wake_end_state(p_wake public.agent_wakes, p_ending text, p_exit_code integer) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wake_end_state(p_wake public.agent_wakes, p_ending text, p_exit_code integer) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wake_gates(p_facts dispatcher.gate_facts, p_settings public.dispatcher_settings, p_all boolean, OUT blocked text[], OUT retry_at timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wake_gates(p_facts dispatcher.gate_facts, p_settings public.dispatcher_settings, p_all boolean, OUT blocked text[], OUT retry_at timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wake_grant(p_wake public.agent_wakes) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wake_grant(p_wake public.agent_wakes) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wake_has_progress(p_wake public.agent_wakes) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wake_has_progress(p_wake public.agent_wakes) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wake_to_lease_in(p_agent_id uuid, p_wake_id uuid, OUT wake_id uuid, OUT is_over boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wake_to_lease_in(p_agent_id uuid, p_wake_id uuid, OUT wake_id uuid, OUT is_over boolean) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wake_worked_on_a_run(p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wake_worked_on_a_run(p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wakes_to_stop(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wakes_to_stop(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.wakes_without_owner(p_instance public.dispatcher_instances) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.wakes_without_owner(p_instance public.dispatcher_instances) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.warm_backend() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.warm_backend() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.warm_insert() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.warm_insert() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.with_error(p_budgets dispatcher.evaluated_budget[], p_error text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.with_error(p_budgets dispatcher.evaluated_budget[], p_error text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.with_estimates(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.with_estimates(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.with_spend(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.with_spend(p_tenant_id uuid, p_budgets dispatcher.evaluated_budget[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.workflow_actor() FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.workflow_actor() TO service_role;

REVOKE ALL ON FUNCTION dispatcher.workflow_age_points(p_queued_at timestamp with time zone, p_now timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.workflow_age_points(p_queued_at timestamp with time zone, p_now timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.workflow_answer(p_code text, p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.workflow_answer(p_code text, p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.workflow_claim_state(p_run public.workflow_runs, p_session text, p_claim_token uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.workflow_claim_state(p_run public.workflow_runs, p_session text, p_claim_token uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.workflow_estimate(p_estimates jsonb, p_workflow_type text, p_what text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.workflow_estimate(p_estimates jsonb, p_workflow_type text, p_what text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.workflow_estimates(p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.workflow_estimates(p_tenant_id uuid) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.workflow_period(p_period text, p_timezone text, p_now timestamp with time zone, OUT period_key text, OUT starts_at timestamp with time zone, OUT ends_at timestamp with time zone) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.workflow_period(p_period text, p_timezone text, p_now timestamp with time zone, OUT period_key text, OUT starts_at timestamp with time zone, OUT ends_at timestamp with time zone) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.workflow_run_json(p_run public.workflow_runs) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.workflow_run_json(p_run public.workflow_runs) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.workflow_spend(p_tenant_id uuid, p_starts timestamp with time zone[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.workflow_spend(p_tenant_id uuid, p_starts timestamp with time zone[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.workflow_timeout_minutes(p_tenant_id uuid, p_workflow_type text) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.workflow_timeout_minutes(p_tenant_id uuid, p_workflow_type text) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.workflow_usage_values(p_usage jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.workflow_usage_values(p_usage jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.write_budget(p_budget jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.write_budget(p_budget jsonb) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.write_respawn(p_claimant dispatcher.claimant, p_run public.workflow_runs, p_agent_id uuid, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.write_respawn(p_claimant dispatcher.claimant, p_run public.workflow_runs, p_agent_id uuid, p_request uuid) TO service_role;

GRANT SELECT,REFERENCES,TRIGGER,MAINTAIN ON TABLE public.workflow_run_events TO service_role;

GRANT SELECT(id) ON TABLE public.workflow_run_events TO authenticated;

GRANT SELECT(tenant_id) ON TABLE public.workflow_run_events TO authenticated;

GRANT SELECT(run_id) ON TABLE public.workflow_run_events TO authenticated;

GRANT SELECT(from_status) ON TABLE public.workflow_run_events TO authenticated;

GRANT SELECT(to_status) ON TABLE public.workflow_run_events TO authenticated;

GRANT SELECT(attempt) ON TABLE public.workflow_run_events TO authenticated;

GRANT SELECT(actor) ON TABLE public.workflow_run_events TO authenticated;

GRANT SELECT(reason) ON TABLE public.workflow_run_events TO authenticated;

GRANT SELECT(at) ON TABLE public.workflow_run_events TO authenticated;

REVOKE ALL ON FUNCTION dispatcher.write_run_events(p_events public.workflow_run_events[]) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.write_run_events(p_events public.workflow_run_events[]) TO service_role;

REVOKE ALL ON FUNCTION dispatcher.write_wake(p_claimant dispatcher.claimant, p_facts dispatcher.gate_facts, p_path text, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION dispatcher.write_wake(p_claimant dispatcher.claimant, p_facts dispatcher.gate_facts, p_path text, p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION public.adopt_wake(p_instance_id uuid, p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) FROM PUBLIC;
GRANT ALL ON FUNCTION public.adopt_wake(p_instance_id uuid, p_wake_id uuid, p_claim_token uuid, p_host_id text, p_pid integer, p_pid_started_at double precision) TO service_role;

REVOKE ALL ON FUNCTION public.budget_ledger(p_tenant_id uuid, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION public.budget_ledger(p_tenant_id uuid, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION public.cancel_workflow_run(p_tenant_id uuid, p_run_id uuid, p_actor text, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.cancel_workflow_run(p_tenant_id uuid, p_run_id uuid, p_actor text, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION public.claim_wakes(p_instance_id uuid, p_claims jsonb, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.claim_wakes(p_instance_id uuid, p_claims jsonb, p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION public.claim_workflow_notifications(p_instance_id uuid, p_limit integer, p_lease_seconds integer, p_known_agents text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION public.claim_workflow_notifications(p_instance_id uuid, p_limit integer, p_lease_seconds integer, p_known_agents text[]) TO service_role;

REVOKE ALL ON FUNCTION public.claim_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_agent text, p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.claim_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_agent text, p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.close_inbox_item(p_item_id uuid, p_lease_token uuid, p_outcome text, p_reason text, p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.close_inbox_item(p_item_id uuid, p_lease_token uuid, p_outcome text, p_reason text, p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.complete_inbox_item(p_item_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.complete_inbox_item(p_item_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.complete_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_output jsonb, p_usage jsonb, p_claim_token uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.complete_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_output jsonb, p_usage jsonb, p_claim_token uuid) TO service_role;

REVOKE ALL ON FUNCTION public.correct_workflow_usage(p_tenant_id uuid, p_run_id uuid, p_usage jsonb, p_actor text, p_reason text, p_session text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.correct_workflow_usage(p_tenant_id uuid, p_run_id uuid, p_usage jsonb, p_actor text, p_reason text, p_session text) TO service_role;

REVOKE ALL ON FUNCTION public.current_tenant_id() FROM PUBLIC;
GRANT ALL ON FUNCTION public.current_tenant_id() TO authenticated;
GRANT ALL ON FUNCTION public.current_tenant_id() TO service_role;

REVOKE ALL ON FUNCTION public.deactivate_budget(p_tenant_id uuid, p_budget text, p_actor text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.deactivate_budget(p_tenant_id uuid, p_budget text, p_actor text) TO service_role;

REVOKE ALL ON FUNCTION public.dispatch_workflows(p_instance_id uuid, p_phase text, p_facts jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.dispatch_workflows(p_instance_id uuid, p_phase text, p_facts jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.dispatcher_gauges(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.dispatcher_gauges(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.dispatcher_holders(p_tenant_id uuid, p_gateway text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.dispatcher_holders(p_tenant_id uuid, p_gateway text) TO service_role;

REVOKE ALL ON FUNCTION public.dispatcher_schema() FROM PUBLIC;
GRANT ALL ON FUNCTION public.dispatcher_schema() TO service_role;

REVOKE ALL ON FUNCTION public.dispatcher_status(p_tenant_id uuid, p_gateway text, p_settings jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.dispatcher_status(p_tenant_id uuid, p_gateway text, p_settings jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.enqueue_workflow_run(p_tenant_id uuid, p_workflow_type text, p_input jsonb, p_priority integer, p_initiator text, p_task_id text, p_agent text, p_not_before timestamp with time zone, p_request_key text, p_delay_seconds double precision) FROM PUBLIC;
GRANT ALL ON FUNCTION public.enqueue_workflow_run(p_tenant_id uuid, p_workflow_type text, p_input jsonb, p_priority integer, p_initiator text, p_task_id text, p_agent text, p_not_before timestamp with time zone, p_request_key text, p_delay_seconds double precision) TO service_role;

REVOKE ALL ON FUNCTION public.escalate_inbox_item(p_item_id uuid, p_lease_token uuid, p_reason text, p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.escalate_inbox_item(p_item_id uuid, p_lease_token uuid, p_reason text, p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.expire_inbox_items(p_tenant_id uuid, p_gateway text, p_item_ids uuid[], p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.expire_inbox_items(p_tenant_id uuid, p_gateway text, p_item_ids uuid[], p_reason text) TO service_role;

REVOKE ALL ON FUNCTION public.fail_inbox_item(p_item_id uuid, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.fail_inbox_item(p_item_id uuid, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION public.fail_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_error text, p_usage jsonb, p_claim_token uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.fail_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_error text, p_usage jsonb, p_claim_token uuid) TO service_role;

REVOKE ALL ON FUNCTION public.finish_workflow_notifications(p_instance_id uuid, p_results jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.finish_workflow_notifications(p_instance_id uuid, p_results jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.heartbeat_dispatcher_instance(p_instance_id uuid, p_live_wake_ids uuid[], p_nonce uuid, p_facts jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.heartbeat_dispatcher_instance(p_instance_id uuid, p_live_wake_ids uuid[], p_nonce uuid, p_facts jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.heartbeat_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid, p_usage jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.heartbeat_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid, p_usage jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.inbox_overview(p_tenant_id uuid, p_agent_slug text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.inbox_overview(p_tenant_id uuid, p_agent_slug text) TO service_role;

REVOKE ALL ON FUNCTION public.lease_inbox_item(p_agent_id uuid, p_lease_seconds integer) FROM PUBLIC;
GRANT ALL ON FUNCTION public.lease_inbox_item(p_agent_id uuid, p_lease_seconds integer) TO service_role;

REVOKE ALL ON FUNCTION public.lease_inbox_items(p_tenant_id uuid, p_agent_slug text, p_limit integer, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.lease_inbox_items(p_tenant_id uuid, p_agent_slug text, p_limit integer, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.list_budgets(p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.list_budgets(p_tenant_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.list_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_status text, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION public.list_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_status text, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION public.list_wakes(p_tenant_id uuid, p_gateway text, p_agent text, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION public.list_wakes(p_tenant_id uuid, p_gateway text, p_agent text, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION public.list_workflow_runs(p_tenant_id uuid, p_status text, p_workflow_type text, p_agent text, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION public.list_workflow_runs(p_tenant_id uuid, p_status text, p_workflow_type text, p_agent text, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION public.monitor_workflows(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.monitor_workflows(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.note_sweep(p_instance_id uuid, p_sweep jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.note_sweep(p_instance_id uuid, p_sweep jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.poll_workflow_runs(p_tenant_id uuid, p_agent text, p_limit integer) FROM PUBLIC;
GRANT ALL ON FUNCTION public.poll_workflow_runs(p_tenant_id uuid, p_agent text, p_limit integer) TO service_role;

REVOKE ALL ON FUNCTION public.post_inbox_item(p_tenant_id uuid, p_from_agent_slug text, p_to_agent_slug text, p_event_type text, p_summary text, p_context jsonb, p_request_key text, p_post_id uuid, p_wake_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.post_inbox_item(p_tenant_id uuid, p_from_agent_slug text, p_to_agent_slug text, p_event_type text, p_summary text, p_context jsonb, p_request_key text, p_post_id uuid, p_wake_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.register_dispatcher_instance(p_tenant_id uuid, p_gateway text, p_identity jsonb, p_settings jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.register_dispatcher_instance(p_tenant_id uuid, p_gateway text, p_identity jsonb, p_settings jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.release_inbox_item(p_tenant_id uuid, p_gateway text, p_item_id uuid, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.release_inbox_item(p_tenant_id uuid, p_gateway text, p_item_id uuid, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION public.release_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.release_workflow_run(p_tenant_id uuid, p_run_id uuid, p_session text, p_claim_token uuid) TO service_role;

REVOKE ALL ON FUNCTION public.remove_workflow_route(p_tenant_id uuid, p_workflow_type text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.remove_workflow_route(p_tenant_id uuid, p_workflow_type text) TO service_role;

REVOKE ALL ON FUNCTION public.report_wakes(p_instance_id uuid, p_reports jsonb, p_claim_limit integer, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.report_wakes(p_instance_id uuid, p_reports jsonb, p_claim_limit integer, p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION public.report_workflow_usage(p_tenant_id uuid, p_run_id uuid, p_session text, p_usage jsonb, p_claim_token uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.report_workflow_usage(p_tenant_id uuid, p_run_id uuid, p_session text, p_usage jsonb, p_claim_token uuid) TO service_role;

REVOKE ALL ON FUNCTION public.request_wake(p_tenant_id uuid, p_gateway text, p_agent text, p_dry_run boolean, p_settings jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.request_wake(p_tenant_id uuid, p_gateway text, p_agent text, p_dry_run boolean, p_settings jsonb) TO service_role;

REVOKE ALL ON FUNCTION public.requeue_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_item_ids uuid[], p_dead boolean, p_since text, p_dry_run boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION public.requeue_inbox_items(p_tenant_id uuid, p_gateway text, p_agent text, p_item_ids uuid[], p_dead boolean, p_since text, p_dry_run boolean) TO service_role;

REVOKE ALL ON FUNCTION public.respawn_workflow_run(p_instance_id uuid, p_run_id uuid, p_claim_token uuid, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.respawn_workflow_run(p_instance_id uuid, p_run_id uuid, p_claim_token uuid, p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION public.retry_workflow_run(p_tenant_id uuid, p_run_id uuid, p_actor text, p_reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.retry_workflow_run(p_tenant_id uuid, p_run_id uuid, p_actor text, p_reason text) TO service_role;

REVOKE ALL ON FUNCTION public.seed_workflow_routes(p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.seed_workflow_routes(p_tenant_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.set_budget(p_tenant_id uuid, p_name text, p_scope text, p_scope_id text, p_period text, p_cap_usd numeric, p_cap_tokens bigint, p_action text, p_timezone text, p_fail_closed boolean, p_budget_id uuid, p_new_name text, p_only_change boolean, p_actor text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.set_budget(p_tenant_id uuid, p_name text, p_scope text, p_scope_id text, p_period text, p_cap_usd numeric, p_cap_tokens bigint, p_action text, p_timezone text, p_fail_closed boolean, p_budget_id uuid, p_new_name text, p_only_change boolean, p_actor text) TO service_role;

REVOKE ALL ON FUNCTION public.set_workflow_route(p_tenant_id uuid, p_workflow_type text, p_agent text, p_priority integer, p_max_concurrent integer, p_timeout_minutes integer) FROM PUBLIC;
GRANT ALL ON FUNCTION public.set_workflow_route(p_tenant_id uuid, p_workflow_type text, p_agent text, p_priority integer, p_max_concurrent integer, p_timeout_minutes integer) TO service_role;

REVOKE ALL ON FUNCTION public.show_workflow_run(p_tenant_id uuid, p_run_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.show_workflow_run(p_tenant_id uuid, p_run_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.stop_dispatcher_instance(p_instance_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.stop_dispatcher_instance(p_instance_id uuid) TO service_role;

REVOKE ALL ON FUNCTION public.sweep_inbox(p_instance_id uuid, p_phase text, p_cursor jsonb, p_claim_limit integer, p_request uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.sweep_inbox(p_instance_id uuid, p_phase text, p_cursor jsonb, p_claim_limit integer, p_request uuid) TO service_role;

REVOKE ALL ON FUNCTION public.workflow_stats(p_tenant_id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.workflow_stats(p_tenant_id uuid) TO service_role;

GRANT ALL ON TABLE public.agent_budgets TO service_role;
GRANT SELECT ON TABLE public.agent_budgets TO authenticated;

GRANT SELECT,UPDATE ON TABLE dispatcher.agent_budgets TO service_role;

GRANT ALL ON TABLE public.agent_usage TO service_role;
GRANT SELECT ON TABLE public.agent_usage TO authenticated;

GRANT SELECT,UPDATE ON TABLE dispatcher.agent_usage TO service_role;

GRANT ALL ON TABLE public.gateways TO service_role;
GRANT SELECT ON TABLE public.gateways TO authenticated;

GRANT SELECT,UPDATE ON TABLE dispatcher.agents TO service_role;

GRANT SELECT ON TABLE dispatcher.inbox_due_of_pair TO service_role;

GRANT SELECT ON TABLE dispatcher.inbox_due TO service_role;

GRANT SELECT ON TABLE dispatcher.made_objects TO service_role;

GRANT SELECT ON TABLE dispatcher.migrations TO service_role;

GRANT SELECT ON TABLE dispatcher.owned_objects TO service_role;

GRANT SELECT ON TABLE dispatcher.recorded_objects TO service_role;

GRANT ALL ON TABLE public.workflow_claims TO service_role;

GRANT SELECT ON TABLE dispatcher.taken_wakes TO service_role;

GRANT ALL ON TABLE public.agent_profiles TO service_role;

GRANT SELECT(tenant_id) ON TABLE public.agent_profiles TO authenticated;

GRANT SELECT(agent_id) ON TABLE public.agent_profiles TO authenticated;

GRANT SELECT(department_id) ON TABLE public.agent_profiles TO authenticated;

GRANT SELECT(display_name) ON TABLE public.agent_profiles TO authenticated;

GRANT SELECT(role) ON TABLE public.agent_profiles TO authenticated;

GRANT SELECT(capabilities) ON TABLE public.agent_profiles TO authenticated;

GRANT SELECT(created_at) ON TABLE public.agent_profiles TO authenticated;

GRANT SELECT(updated_at) ON TABLE public.agent_profiles TO authenticated;

GRANT ALL ON TABLE public.agent_resumptions TO service_role;

GRANT SELECT,REFERENCES,TRIGGER,MAINTAIN ON TABLE public.workflow_audit_log TO service_role;

GRANT SELECT(id) ON TABLE public.workflow_audit_log TO authenticated;

GRANT SELECT(tenant_id) ON TABLE public.workflow_audit_log TO authenticated;

GRANT SELECT(actor) ON TABLE public.workflow_audit_log TO authenticated;

GRANT SELECT(action) ON TABLE public.workflow_audit_log TO authenticated;

GRANT SELECT(class) ON TABLE public.workflow_audit_log TO authenticated;

GRANT SELECT(severity) ON TABLE public.workflow_audit_log TO authenticated;

GRANT SELECT(target) ON TABLE public.workflow_audit_log TO authenticated;

GRANT SELECT(before) ON TABLE public.workflow_audit_log TO authenticated;

GRANT SELECT(after) ON TABLE public.workflow_audit_log TO authenticated;

GRANT SELECT(allowed) ON TABLE public.workflow_audit_log TO authenticated;

GRANT SELECT(at) ON TABLE public.workflow_audit_log TO authenticated;

GRANT SELECT ON TABLE public.audit_log TO service_role;
GRANT SELECT ON TABLE public.audit_log TO authenticated;

GRANT ALL ON TABLE public.budget_events TO service_role;

GRANT SELECT(id) ON TABLE public.budget_events TO authenticated;

GRANT SELECT(tenant_id) ON TABLE public.budget_events TO authenticated;

GRANT SELECT(budget_id) ON TABLE public.budget_events TO authenticated;

GRANT SELECT(period_key) ON TABLE public.budget_events TO authenticated;

GRANT SELECT(event_kind) ON TABLE public.budget_events TO authenticated;

GRANT SELECT(detail) ON TABLE public.budget_events TO authenticated;

GRANT SELECT(created_at) ON TABLE public.budget_events TO authenticated;

GRANT SELECT(revision) ON TABLE public.budget_events TO authenticated;

GRANT ALL ON SEQUENCE public.budget_events_id_seq TO service_role;

GRANT ALL ON TABLE public.budgets TO service_role;

GRANT SELECT(id) ON TABLE public.budgets TO authenticated;

GRANT SELECT(tenant_id) ON TABLE public.budgets TO authenticated;

GRANT SELECT(name) ON TABLE public.budgets TO authenticated;

GRANT SELECT(scope) ON TABLE public.budgets TO authenticated;

GRANT SELECT(scope_id) ON TABLE public.budgets TO authenticated;

GRANT SELECT(period) ON TABLE public.budgets TO authenticated;

GRANT SELECT(timezone) ON TABLE public.budgets TO authenticated;

GRANT SELECT(cap_usd) ON TABLE public.budgets TO authenticated;

GRANT SELECT(cap_tokens) ON TABLE public.budgets TO authenticated;

GRANT SELECT(action_on_exceed) ON TABLE public.budgets TO authenticated;

GRANT SELECT(active) ON TABLE public.budgets TO authenticated;

GRANT SELECT(fail_closed) ON TABLE public.budgets TO authenticated;

GRANT SELECT(revision) ON TABLE public.budgets TO authenticated;

GRANT SELECT(created_at) ON TABLE public.budgets TO authenticated;

GRANT SELECT(updated_at) ON TABLE public.budgets TO authenticated;

GRANT ALL ON TABLE public.departments TO service_role;

GRANT SELECT(tenant_id) ON TABLE public.departments TO authenticated;

GRANT SELECT(id) ON TABLE public.departments TO authenticated;

GRANT SELECT(name) ON TABLE public.departments TO authenticated;

GRANT SELECT(created_at) ON TABLE public.departments TO authenticated;

GRANT ALL ON TABLE public.dispatcher_faults TO service_role;

GRANT ALL ON SEQUENCE public.dispatcher_faults_id_seq TO service_role;

GRANT ALL ON TABLE public.dispatcher_gateways TO service_role;

GRANT ALL ON TABLE public.inbox_item_leases TO service_role;

GRANT ALL ON TABLE public.inbox_item_marks TO service_role;

GRANT ALL ON TABLE public.notifications TO service_role;
GRANT SELECT ON TABLE public.notifications TO authenticated;

GRANT ALL ON TABLE public.task_relations TO service_role;
GRANT SELECT ON TABLE public.task_relations TO authenticated;

GRANT ALL ON TABLE public.tasks TO service_role;
GRANT SELECT ON TABLE public.tasks TO authenticated;

GRANT ALL ON TABLE public.tenants TO service_role;
GRANT SELECT ON TABLE public.tenants TO authenticated;

GRANT ALL ON TABLE public.workflow_agent_routing TO service_role;

GRANT SELECT(tenant_id) ON TABLE public.workflow_agent_routing TO authenticated;

GRANT SELECT(workflow_type) ON TABLE public.workflow_agent_routing TO authenticated;

GRANT SELECT(agent_id) ON TABLE public.workflow_agent_routing TO authenticated;

GRANT SELECT(priority) ON TABLE public.workflow_agent_routing TO authenticated;

GRANT SELECT(max_concurrent) ON TABLE public.workflow_agent_routing TO authenticated;

GRANT SELECT(timeout_minutes) ON TABLE public.workflow_agent_routing TO authenticated;

GRANT SELECT(created_at) ON TABLE public.workflow_agent_routing TO authenticated;

GRANT ALL ON TABLE public.workflow_approvals TO service_role;

GRANT SELECT(id) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(tenant_id) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(run_id) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(step_name) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(approver_id) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(status) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(note) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(requested_by) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(decided_by) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(decided_at) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(due_at) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(expires_at) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(escalated_to) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(created_at) ON TABLE public.workflow_approvals TO authenticated;

GRANT SELECT(updated_at) ON TABLE public.workflow_approvals TO authenticated;

GRANT ALL ON SEQUENCE public.workflow_audit_log_id_seq TO service_role;

GRANT SELECT,REFERENCES,TRIGGER,MAINTAIN ON TABLE public.workflow_bookings TO service_role;

GRANT SELECT(id) ON TABLE public.workflow_bookings TO authenticated;

GRANT SELECT(tenant_id) ON TABLE public.workflow_bookings TO authenticated;

GRANT SELECT(run_id) ON TABLE public.workflow_bookings TO authenticated;

GRANT SELECT(attempt) ON TABLE public.workflow_bookings TO authenticated;

GRANT SELECT(agent_id) ON TABLE public.workflow_bookings TO authenticated;

GRANT SELECT(workflow_type) ON TABLE public.workflow_bookings TO authenticated;

GRANT SELECT(at) ON TABLE public.workflow_bookings TO authenticated;

GRANT SELECT(cost_usd) ON TABLE public.workflow_bookings TO authenticated;

GRANT SELECT(tokens) ON TABLE public.workflow_bookings TO authenticated;

GRANT SELECT(source) ON TABLE public.workflow_bookings TO authenticated;

GRANT ALL ON SEQUENCE public.workflow_bookings_id_seq TO service_role;

GRANT ALL ON TABLE public.workflow_respawns TO service_role;

GRANT ALL ON SEQUENCE public.workflow_run_events_id_seq TO service_role;

GRANT ALL ON TABLE public.workflow_run_transitions TO service_role;

GRANT SELECT(from_status) ON TABLE public.workflow_run_transitions TO authenticated;

GRANT SELECT(to_status) ON TABLE public.workflow_run_transitions TO authenticated;

GRANT SELECT(meaning) ON TABLE public.workflow_run_transitions TO authenticated;

GRANT SELECT(needs_override) ON TABLE public.workflow_run_transitions TO authenticated;

GRANT ALL ON TABLE public.workspace TO service_role;
GRANT SELECT ON TABLE public.workspace TO authenticated;

ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON SEQUENCES TO anon;
ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON SEQUENCES TO authenticated;
ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON SEQUENCES TO service_role;

ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON SEQUENCES TO anon;
ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON SEQUENCES TO authenticated;
ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON SEQUENCES TO service_role;

ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON FUNCTIONS TO anon;
ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON FUNCTIONS TO authenticated;
ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON FUNCTIONS TO service_role;

ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON FUNCTIONS TO anon;
ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON FUNCTIONS TO authenticated;
ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON FUNCTIONS TO service_role;

ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON TABLES TO anon;
ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON TABLES TO authenticated;
ALTER DEFAULT PRIVILEGES FOR ROLE postgres IN SCHEMA public GRANT ALL ON TABLES TO service_role;

ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON TABLES TO anon;
ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON TABLES TO authenticated;
ALTER DEFAULT PRIVILEGES FOR ROLE supabase_admin IN SCHEMA public GRANT ALL ON TABLES TO service_role;
