-- Items: when one may be worked on, and how what happened to it is written into it.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.inbox_retry_delay(p_attempt integer) returns interval
language sql immutable parallel safe set search_path = ''
as $$
  select make_interval(secs => least(900, 30 * power(2, least(greatest(p_attempt, 1), 12) - 1)))
$$;
comment on function dispatcher.inbox_retry_delay(integer) is
  'How long a failed item rests after its n-th attempt: 30 s, doubled per attempt, at most 900 s.';

create or replace function dispatcher.is_set_aside_by_stall(p_item_id uuid, p_failed_at timestamptz) returns boolean
language sql stable set search_path = ''
as $$
  select exists (select from public.inbox_item_marks as mark
                  where mark.item_id = p_item_id and mark.set_aside_as = 'agent_stalled'
                    and mark.set_aside_at = p_failed_at)
$$;
comment on function dispatcher.is_set_aside_by_stall(uuid, timestamptz) is
  'Whether an item failed because its agent stalled, and not by a try of its own: then it needs no rest.';

-- The one home of "may this item be worked on, and when": everything that asks reads due_at.
create or replace view dispatcher.inbox_due_of_pair with (security_invoker = true) as
select item.id, item.tenant_id, item.agent_id, item.created_at, item.status, item.event_type, item.summary,
    item.context, item.task_id,
       item.attempt_count, item.max_attempts,
       coalesce(origin.chain_depth, 0) as chain_depth,
       case item.status
         when 'pending' then '-infinity'::timestamptz
         -- Whoever may insert a row may write any time into it: a lease of more than a week, or a failure to come, is
         -- none.
         when 'leased' then case when item.leased_until < now() + interval '7 days' then item.leased_until
             else '-infinity' end
         else case when coalesce(item.failed_at, item.updated_at) > now()
             or dispatcher.is_set_aside_by_stall(item.id, item.failed_at) then '-infinity'
                   else coalesce(item.failed_at, item.updated_at) + dispatcher.inbox_retry_delay(item.attempt_count) end
       end as due_at
from public.agent_inbox_items as item
left join public.inbox_item_origins as origin on origin.item_id = item.id
where item.status in ('pending', 'failed', 'leased') and item.attempt_count < item.max_attempts;
comment on view dispatcher.inbox_due_of_pair is
  'inbox_due before anybody looked whose agent an item names: for the hot path alone, which reads it by the agent and '
  'the tenant of one row of agents.';
create or replace view dispatcher.inbox_due with (security_invoker = true) as
select due.* from dispatcher.inbox_due_of_pair as due
 where exists (select from public.agents as agent where agent.id = due.agent_id and agent.tenant_id = due.tenant_id);
comment on view dispatcher.inbox_due is
  'Open items with attempts left and when each may be worked on (due_at): pending at once, failed after its retry '
  'delay, leased when its lease ends.';

revoke all on dispatcher.inbox_due, dispatcher.inbox_due_of_pair from public, anon, authenticated;
grant select on dispatcher.inbox_due, dispatcher.inbox_due_of_pair to service_role;

create or replace function dispatcher.merge_inbox_context(p_context jsonb, p_changes jsonb) returns jsonb
language sql immutable parallel safe security invoker set search_path = ''
as $$
  select case
    when p_context is null then p_changes
    when jsonb_typeof(p_context) = 'object' then p_context || p_changes
    else jsonb_build_object('original_context', p_context) || p_changes
  end
$$;
comment on function dispatcher.merge_inbox_context(jsonb, jsonb) is
  'An item''s context with changes laid over it. A context that is no object is kept under original_context.';

create or replace function dispatcher.clean_inbox_reason(p_reason text) returns text
language sql immutable parallel safe security invoker set search_path = ''
as $$
  select coalesce(nullif(btrim(left(p_reason, 4000)), ''), 'no reason given')
$$;
comment on function dispatcher.clean_inbox_reason(text) is
  'A reason as it is stored: trimmed, at most 4,000 characters, never empty.';

create or replace function dispatcher.find_inbox_agent(p_tenant_id uuid, p_agent_slug text) returns uuid
language sql stable security invoker set search_path = ''
as $$
  select agent.id from dispatcher.agents as agent where agent.tenant_id = p_tenant_id and agent.slug = p_agent_slug
$$;
comment on function dispatcher.find_inbox_agent(uuid, text) is
  'The id of a tenant''s agent by its present slug; null when there is none.';

select dispatcher.restrict_functions();

notify pgrst, 'reload schema';
commit;
