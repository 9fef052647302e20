-- The one place where tenants meet. YourHQ lets every signed-in user write rows of the own tenant, and nothing there
-- looks whose agent, task or gateway such a row names. So a row that names another tenant's never counts: each table
-- of YourHQ's has a view here under its own name that leaves such rows out, and every function of ours reads and
-- writes the view. A test looks for functions that do not.
-- The views list their columns: a column that is not listed stays YourHQ's to change. What they look up stands in a
-- condition and not in a join, so that `for update` locks the row itself alone, and updates reach it.
begin;
set local lock_timeout = '3s';

create or replace view dispatcher.agents with (security_invoker = true) as
select agent.id, agent.tenant_id, agent.gateway_id, agent.slug, agent.name, agent.status
  from public.agents as agent
 where agent.gateway_id is null
    or exists (select from public.gateways as gateway
                where gateway.id = agent.gateway_id and gateway.tenant_id = agent.tenant_id);
comment on view dispatcher.agents is 'Agents, but none that stands on a gateway of another tenant.';

create or replace view dispatcher.agent_inbox_items with (security_invoker = true) as
select item.id, item.tenant_id, item.agent_id, item.event_type, item.task_id, item.comment_id, item.contact_id,
       item.status, item.leased_at, item.leased_until, item.completed_at, item.failed_at, item.attempt_count,
       item.max_attempts, item.summary, item.context, item.last_wake_attempt_at, item.last_wake_success_at,
       item.created_at, item.updated_at, item.agent_slug
  from public.agent_inbox_items as item
 where exists (select from public.agents as agent where agent.id = item.agent_id and agent.tenant_id = item.tenant_id);
comment on view dispatcher.agent_inbox_items is 'Items whose agent is of their own tenant.';

create or replace view dispatcher.agent_budgets with (security_invoker = true) as
select budget.agent_id, budget.tenant_id, budget.status, budget.hard_cutoff, budget.monthly_limit_usd,
       budget.period_anchor_tz, budget.current_period_start, budget.current_period_spend_usd
  from public.agent_budgets as budget
 where exists (select from public.agents as agent
                where agent.id = budget.agent_id and agent.tenant_id = budget.tenant_id);
comment on view dispatcher.agent_budgets is 'Budgets whose agent is of their own tenant.';

create or replace view dispatcher.agent_usage with (security_invoker = true) as
select usage.agent_id, usage.tenant_id, usage.occurred_at, usage.cost_total_usd
  from public.agent_usage as usage
 where exists (select from public.agents as agent
                where agent.id = usage.agent_id and agent.tenant_id = usage.tenant_id);
comment on view dispatcher.agent_usage is 'Usage whose agent is of its own tenant.';

do $$
declare
  v_view text;
begin
  foreach v_view in array array['agents', 'agent_inbox_items', 'agent_budgets', 'agent_usage'] loop
    execute format('revoke all on dispatcher.%I from public, anon, authenticated', v_view);
    execute format('grant select, update on dispatcher.%I to service_role', v_view);
  end loop;
end
$$;

notify pgrst, 'reload schema';
commit;
