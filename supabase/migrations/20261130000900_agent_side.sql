-- The agent's side of the inbox: lease items, close them, escalate them, look, and hand work to another agent.
-- The woken agent's scripts call these. A lease is a token: only its holder may close the item, only while it lives,
-- and only from the wake it was taken in. Locks are taken in the order of the daemon's functions: the agent's live
-- wake, the item, its lease.
-- A call waits for rows of its own item alone, two seconds at most; then its answer is `busy` and nothing was changed.
-- Safe to apply twice.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.lock_inbox_lease(
  p_item_id uuid, p_lease_token uuid, p_outcomes text[], p_wake_id uuid
) returns text
language plpgsql volatile set search_path = ''
as $$
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
comment on function dispatcher.lock_inbox_lease(uuid, uuid, text[], uuid) is
  'Locks an item and its lease and says whether the token, in the wake p_wake_id (NULL: whichever), still owns it: '
  'ok, already (closed by this token with one of the outcomes), lease_lost, not_found.';

create or replace function dispatcher.inbox_close_verdict(p_item_id uuid, p_code text) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object('applied', p_code in ('ok', 'already'), 'code', p_code,
                            'status', item.status, 'attempt', item.attempt_count, 'max_attempts', item.max_attempts)
  from (select 1) as one_row left join dispatcher.agent_inbox_items as item on item.id = p_item_id
$$;
comment on function dispatcher.inbox_close_verdict(uuid, text) is
  'The answer of the closing functions: {applied, code, status, attempt, max_attempts}; the last three are null when '
  'the item is unknown.';

create or replace function dispatcher.lease_one_inbox_item(
  p_item_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid
) returns boolean
language plpgsql volatile set search_path = ''
as $$
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
comment on function dispatcher.lease_one_inbox_item(uuid, integer, uuid, uuid) is
  'Leases one item if it is free and due; false when another session has it, NULL when it raises, which is noted and '
  'costs no other item. The lease names the wake it is taken in, which keeps it alive.';
create index if not exists inbox_item_leases_by_open_token on public.inbox_item_leases (lease_token) where closed_at
    is null;

create or replace function dispatcher.bounded_context(p_context jsonb) returns jsonb
language sql immutable parallel safe set search_path = ''
as $$
  select case when octet_length(p_context::text) > 1048576
              then jsonb_build_object('context_too_large', octet_length(p_context::text)) else p_context end
$$;
comment on function dispatcher.bounded_context(jsonb) is
  'The context of an item as it is handed on: one of more than 1 MiB is replaced by its size, {context_too_large}.';

create or replace function dispatcher.inbox_items_of_lease(p_agent_id uuid, p_lease_token uuid) returns jsonb
language sql stable set search_path = ''
as $$
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
comment on function dispatcher.inbox_items_of_lease(uuid, uuid) is
  'The items an agent holds under one lease token, oldest first, as the agent''s script prints them; an item''s task '
  'is laid into its context.';

create or replace function dispatcher.lease_busy_inbox_item(
  p_tenant_id uuid, p_agent_id uuid, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid
) returns void
language plpgsql volatile set search_path = ''
as $$
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
comment on function dispatcher.lease_busy_inbox_item(uuid, uuid, integer, uuid, uuid) is
  'Leases the agent''s oldest due item although another session has it locked, if that session lets go of it within a '
  'second.';

create or replace function dispatcher.wake_to_lease_in(p_agent_id uuid, p_wake_id uuid, out wake_id uuid,
    out is_over boolean)
language plpgsql volatile set search_path = ''
as $$
begin
  -- Held until the lease is written: a wake that ends now ends before or after it, and then gives the items back.
  select wake.id into wake_id from public.agent_wakes as wake
   where wake.agent_id = p_agent_id and wake.state in ('starting', 'running')
     for key share;
  is_over := coalesce(wake_id <> p_wake_id, false);
end
$$;
comment on function dispatcher.wake_to_lease_in(uuid, uuid) is
  'The agent''s live wake, locked, in which it leases (NULL: outside a wake). is_over: the caller belongs to '
  'p_wake_id, and another wake lives by now.';

create or replace function dispatcher.lease_due_items(
  p_tenant_id uuid, p_agent_id uuid, p_wanted integer, p_lease_seconds integer, p_lease_token uuid, p_wake_id uuid
) returns jsonb
language plpgsql volatile set search_path = ''
as $$
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
comment on function dispatcher.lease_due_items(uuid, uuid, integer, integer, uuid, uuid) is
  'Leases up to p_wanted due items of an agent, oldest first, in the wake p_wake_id; answers what the token holds '
  'then; NULL when it holds nothing because what is due raises.';

create or replace function public.lease_inbox_items(
  p_tenant_id uuid,
  p_agent_slug text,
  p_limit integer default 1,
  p_lease_seconds integer default 120,
  p_lease_token uuid default null,
  p_wake_id uuid default null
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
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
comment on function public.lease_inbox_items(uuid, text, integer, integer, uuid, uuid) is
  'Leases up to p_limit (1-100) due items of an agent, oldest first, for p_lease_seconds (1-86400): {agent: {id, '
  'slug}, items: [...]}, or {code: unknown_agent | wake_over | busy}. The items of one call share p_lease_token; a '
  'repeat with the same token returns the same items. p_wake_id: the wake the caller belongs to; wake_over when the '
  'agent has another one by now.';

create or replace function dispatcher.close_leased_item(p_item_id uuid, p_outcome text, p_reason text) returns void
language plpgsql volatile set search_path = ''
as $$
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
comment on function dispatcher.close_leased_item(uuid, text, text) is
  'Writes how an item ends that the caller holds under its lease; the trigger of the table tells one that is given up.';

create or replace function public.close_inbox_item(
  p_item_id uuid,
  p_lease_token uuid,
  p_outcome text,
  p_reason text default null,
  p_wake_id uuid default null
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
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
comment on function public.close_inbox_item(uuid, uuid, text, text, uuid) is
  'Closes a leased item as done, failed (dead_letter without attempts left, which is told) or released (pending '
  'again, attempt given back). Needs the live lease''s token and, where p_wake_id is given, the wake it was taken in: '
  '{applied, code: ok|already|lease_lost|not_found|invalid|busy, status, attempt, max_attempts}.';

create or replace function dispatcher.block_task_of_item(p_item_id uuid, p_at timestamptz) returns void
language sql volatile set search_path = ''
as $$
  -- A task that has ended stays ended: an escalation that comes late must not open it again.
  update public.tasks as task
     set status = 'blocked', updated_at = p_at
    from dispatcher.agent_inbox_items as item
   where item.id = p_item_id and task.id = item.task_id and task.tenant_id = item.tenant_id
     and task.status not in ('blocked', 'done', 'cancelled')
$$;
comment on function dispatcher.block_task_of_item(uuid, timestamptz) is
  'The task of an item becomes blocked, unless it has ended.';

create or replace function dispatcher.tell_escalation(p_item_id uuid, p_reason text) returns void
language sql volatile set search_path = ''
as $$
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
comment on function dispatcher.tell_escalation(uuid, text) is 'The notification of an escalation; a side write.';

create or replace function dispatcher.escalate_leased_item(p_item_id uuid, p_reason text) returns void
language plpgsql volatile set search_path = ''
as $$
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
comment on function dispatcher.escalate_leased_item(uuid, text) is
  'Writes that an item, which the caller holds under its lease, is a human''s now.';

create or replace function public.escalate_inbox_item(
  p_item_id uuid, p_lease_token uuid, p_reason text, p_wake_id uuid default null
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
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
comment on function public.escalate_inbox_item(uuid, uuid, text, uuid) is
  'Hands a leased item to a human, in one transaction: its task becomes blocked, a notification is written, the item '
  'is closed as escalated. Answers like close_inbox_item; a repeat with the same token changes nothing.';

create or replace function public.inbox_overview(p_tenant_id uuid, p_agent_slug text) returns jsonb
language plpgsql stable set search_path = '' set lock_timeout = '1s'
as $$
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
comment on function public.inbox_overview(uuid, text) is
  'What waits for an agent, without leasing: {agent, actionable_count (due now), by_status (pending, failed, leased), '
  'items (the 50 oldest open; due_at: when it may be worked on, null without attempts left)}, or {code: '
  'unknown_agent}.';

create or replace function dispatcher.find_sender_wake(p_agent_id uuid, p_wake_id uuid) returns public.agent_wakes
language sql stable set search_path = ''
as $$
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
comment on function dispatcher.find_sender_wake(uuid, uuid) is
  'The wake an agent acts in: p_wake_id, which its script knows, until 24 h after its end; else its latest if that '
  'lives or ended within 10 minutes (a turn can outlive its process); null when it acts outside a wake.';

create or replace function dispatcher.inbox_request_key(p_request_key text, p_post_id uuid) returns text
language sql immutable parallel safe set search_path = ''
as $$ select coalesce('key:' || nullif(p_request_key, ''), 'call:' || p_post_id::text) $$;
comment on function dispatcher.inbox_request_key(text, uuid) is
  'What makes two posts of a sender one request: the name the caller gave it, else the id of one run of its script; '
  'null without either.';

create or replace function dispatcher.inbox_content_key(p_wake_id uuid, p_content text, p_at timestamptz) returns text
language sql immutable parallel safe set search_path = ''
as $$
  select encode(sha256(convert_to(coalesce(p_wake_id::text, floor(extract(epoch from p_at) / 600)::text) || chr(31)
      || p_content, 'UTF8')), 'hex')
$$;
comment on function dispatcher.inbox_content_key(uuid, text, timestamptz) is
  'What makes two posts of a sender the same work: the same content within the same wake, outside a wake within the '
  'same ten minutes.';

create or replace function dispatcher.find_posted_item(
  p_tenant_id uuid, p_sender_id uuid, p_request_key text, p_content_keys text[]
) returns public.inbox_item_origins
language sql stable set search_path = ''
as $$
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
comment on function dispatcher.find_posted_item(uuid, uuid, text, text[]) is
  'The item a post has made before: of the same request whatever became of it, else an open one of the same content; '
  'null when there is none.';

create or replace function dispatcher.refuse_post(
  p_sender_id uuid, p_recipient_id uuid, p_event_type text, p_context jsonb, p_request_key text, out code text,
      out detail text
)
language plpgsql stable set search_path = ''
as $$
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
comment on function dispatcher.refuse_post(uuid, uuid, text, jsonb, text) is
  'Why a post is refused; code NULL when it is not.';

create or replace function dispatcher.named_task(p_context jsonb) returns uuid
language sql immutable set search_path = ''
as $$
  select substring(p_context ->> 'task_id' from '^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$')::uuid
$$;
comment on function dispatcher.named_task(jsonb) is
  'The task that the context of a post names; NULL where it names none by an id.';

create or replace function dispatcher.refuse_post_content(
  p_tenant_id uuid, p_summary text, p_context jsonb, out code text, out detail text
)
language plpgsql stable set search_path = ''
as $$
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
comment on function dispatcher.refuse_post_content(uuid, text, jsonb) is
  'Why what a post says is refused; code NULL when it is not.';

create or replace function dispatcher.depth_of_post(p_wake public.agent_wakes) returns integer
language sql stable set search_path = ''
as $$
  -- Also deeper than what this wake has leased since its claim: agents that run side by side can pass work to and fro
  -- as well.
  select coalesce(greatest(p_wake.chain_depth, (select max(origin.chain_depth) from public.inbox_item_leases as lease
                                                  join public.inbox_item_origins as origin
                                                    on origin.item_id = lease.item_id
                                                 where lease.wake_id = p_wake.id)) + 1, 0)
$$;
comment on function dispatcher.depth_of_post(public.agent_wakes) is
  'How long the chain of wakes behind a post is; 0 outside a wake.';

create or replace function dispatcher.insert_post(
  p_origin public.inbox_item_origins, p_recipient_id uuid, p_recipient_slug text, p_event_type text, p_summary text,
      p_context jsonb
) returns uuid
language plpgsql volatile set search_path = ''
as $$
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
comment on function dispatcher.insert_post(public.inbox_item_origins, uuid, text, text, text, jsonb) is
  'Writes the item of a post with its origin; answers its id.';

create or replace function public.post_inbox_item(
  p_tenant_id uuid,
  p_from_agent_slug text,
  p_to_agent_slug text,
  p_event_type text,
  p_summary text,
  p_context jsonb default '{}',
  p_request_key text default null,
  p_post_id uuid default null,
  p_wake_id uuid default null
) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '1s'
as $$
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
comment on function public.post_inbox_item(uuid, text, text, text, text, jsonb, text, uuid, uuid) is
  'An agent hands work to an agent: {applied, code: '
  'ok|already|unknown_agent|unknown_recipient|unknown_task|self_handoff_unmarked|invalid|busy, inbox_item_id, '
  'chain_depth}. unknown_task: context.task_id is the id of no task of the tenant. '
  'Records the sender and its wake (p_wake_id: the one the caller knows it runs in). already: p_request_key or '
  'p_post_id (one run of the caller''s script) has made that item before, or the same content from the same wake '
  'waits open. To itself only with context.self_handoff = true.';

select dispatcher.restrict_functions(array[
  'lease_inbox_items', 'close_inbox_item', 'escalate_inbox_item', 'inbox_overview', 'post_inbox_item'
]);

notify pgrst, 'reload schema';
commit;
