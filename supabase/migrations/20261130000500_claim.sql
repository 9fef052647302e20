-- Claims: one wake for one agent, granted under the lock of its gateway.

create or replace function dispatcher.wake_blockers(p_item_id uuid) returns jsonb
language plpgsql stable set search_path = ''
as $$
begin
  return (
    select jsonb_agg(target.title order by relation.created_at, target.title)
      from public.agent_inbox_items as item
      join public.task_relations as relation on relation.source_task_id = item.task_id and relation.relation_type = 'blocked_by'
      join public.tasks as target on target.id = relation.target_task_id
     where item.id = p_item_id and item.event_type = 'task_assignment'
       and target.status not in ('done', 'cancelled') and target.archived_at is null);
end
$$;
comment on function dispatcher.wake_blockers(uuid) is 'Titles of the unresolved tasks that block the task of a task_assignment item; NULL when there are none.';

create or replace function dispatcher.wake_grant(p_wake public.agent_wakes) returns jsonb
language plpgsql stable set search_path = ''
as $$
declare
  v_item record;
  v_blockers jsonb;
  v_blockers_error text;
begin
  select item.id, item.event_type, item.summary, item.context into v_item
    from public.agent_inbox_items as item where item.id = p_wake.item_ids[1];
  begin
    v_blockers := dispatcher.wake_blockers(v_item.id);
  exception when others then
    v_blockers_error := sqlerrm;
  end;
  return (
    select jsonb_build_object(
      'granted', true, 'wake_id', p_wake.id, 'claim_token', p_wake.claim_token, 'agent_id', agent.id, 'agent_slug', agent.slug,
      'workspace_slug', (select workspace.slug from public.workspace where workspace.tenant_id = agent.tenant_id limit 1),
      'path', p_wake.path, 'item_ids', to_jsonb(p_wake.item_ids), 'chain_depth', p_wake.chain_depth,
      'event_type', v_item.event_type, 'summary', left(v_item.summary, 2000), 'item_created_at',
      (select item.created_at from public.agent_inbox_items as item where item.id = p_wake.item_ids[1]),
      'model_override', v_item.context -> 'model_override', 'thinking_override', v_item.context -> 'thinking_override',
      'blockers', coalesce(v_blockers, '[]'), 'blockers_error', v_blockers_error)
      from public.agents as agent where agent.id = p_wake.agent_id);
end
$$;
comment on function dispatcher.wake_grant(public.agent_wakes) is 'Everything a spawn needs, as the answer to a granted claim.';

create or replace function dispatcher.claim_one_wake(
  p_instance public.dispatcher_instances, p_agent_id uuid, p_path text, p_item_ids uuid[], p_request uuid
) returns jsonb
language plpgsql volatile set search_path = ''
as $$
declare
  v_agent record;
  v_gates record;
  v_live integer;
  v_items uuid[];
  v_heads uuid[];
  v_wake public.agent_wakes;
  v_path text;
  v_depth integer;
  v_max_chain constant integer := dispatcher.wake_chain_limit(p_instance.settings);
begin
  select id, slug, tenant_id into v_agent from public.agents
   where id = p_agent_id and gateway_id = p_instance.gateway_id and tenant_id = p_instance.tenant_id;
  if v_agent is null then
    return jsonb_build_object('granted', false, 'agent_id', p_agent_id, 'skip_reason', 'not_local');
  end if;
  perform from public.dispatcher_gateways where gateway_id = p_instance.gateway_id for update;
  -- Asked before under the same request: the same grant.
  select * into v_wake from public.agent_wakes as wake
   where wake.claim_request = p_request and wake.agent_id = p_agent_id and wake.state in ('starting', 'running');
  if v_wake.id is not null then
    return dispatcher.wake_grant(v_wake);
  end if;
  insert into public.agent_wake_state (agent_id, tenant_id) values (p_agent_id, v_agent.tenant_id) on conflict do nothing;
  select coalesce(max(waitlist_path) filter (where waitlist_path = 'command'), p_path) into v_path
    from (select waitlist_path from public.agent_wake_state where agent_id = p_agent_id for update) as locked;

  -- The insert trigger resets an agent at once, unless its row was locked or the database lacks the trigger: then the items do.
  if exists (select from public.agent_wake_state as state
              join public.agent_inbox_items as item on item.agent_id = state.agent_id
             where state.agent_id = p_agent_id and state.consecutive_failures > 0 and item.tenant_id = v_agent.tenant_id
               and item.status in ('pending', 'failed') and item.attempt_count < item.max_attempts
               and item.created_at > state.last_ended_at and item.created_at <= now()
               and not exists (select from public.inbox_item_origins as origin where origin.item_id = item.id and origin.from_agent_id = p_agent_id)) then
    perform dispatcher.reset_wake_failures(p_agent_id);
  end if;

  select * into v_gates from dispatcher.wake_gates(p_agent_id, p_instance.settings);
  if cardinality(v_gates.blocked) = 0 then
    select count(*) into v_live from public.agent_wakes where gateway_id = p_instance.gateway_id and state in ('starting', 'running');
    if v_live >= (p_instance.settings ->> 'max_concurrent_wakes')::integer then
      v_gates.blocked := array['concurrency_limit'];
      update public.agent_wake_state
         set waitlist_path = coalesce(waitlist_path, 'waitlist'), waitlisted_at = coalesce(waitlisted_at, now()),
             waiting_since = coalesce(waiting_since, (select created_at from public.agent_inbox_items where id = v_gates.due_item_id)), updated_at = now()
       where agent_id = p_agent_id;
    end if;
  end if;
  if cardinality(v_gates.blocked) > 0 then
    if v_gates.blocked[1] <> 'concurrency_limit' then
      update public.agent_wake_state set waitlisted_at = null, waitlist_path = null, waiting_since = null
       where agent_id = p_agent_id and waitlisted_at is not null;
    end if;
    return jsonb_build_object('granted', false, 'agent_id', p_agent_id, 'agent_slug', v_agent.slug, 'skip_reason', v_gates.blocked[1],
                              'retry_in', extract(epoch from v_gates.retry_at - now()), 'failures', v_gates.failures);
  end if;

  -- item_ids: those that hints named (at most 100), else the oldest; then the ones the agent will lease first.
  select array_agg(due.id order by due.created_at), max(due.chain_depth) into v_heads, v_depth
    from (select * from dispatcher.inbox_due as due
           where due.agent_id = p_agent_id and due.tenant_id = v_agent.tenant_id and due.due_at <= now() and due.chain_depth < v_max_chain
           order by due.created_at limit 100) as due;
  v_items := array(select due.id from dispatcher.inbox_due as due
                    where due.agent_id = p_agent_id and due.tenant_id = v_agent.tenant_id and due.id = any (p_item_ids)
                      and due.due_at <= now() and due.chain_depth < v_max_chain
                    order by due.created_at limit 100);
  if cardinality(v_items) = 0 then
    v_items := v_heads[1:1];
  end if;
  v_items := v_items || array(select head.id from unnest(v_heads[1:3]) with ordinality as head (id, place)
                               where head.id <> all (v_items) order by head.place);
  insert into public.agent_wakes (tenant_id, agent_id, gateway_id, instance_id, claim_request, path, item_ids, chain_depth, model_override,
                                  thinking_override, deadline_at)
  select v_agent.tenant_id, p_agent_id, p_instance.gateway_id, p_instance.id, p_request, v_path, v_items, coalesce(v_depth, 0),
         case when jsonb_typeof(item.context -> 'model_override') = 'string' then nullif(item.context ->> 'model_override', '') end,
         case when jsonb_typeof(item.context -> 'thinking_override') = 'string' then nullif(item.context ->> 'thinking_override', '') end,
         now() + make_interval(secs => (p_instance.settings ->> 'agent_process_timeout')::double precision + 15)
    from public.agent_inbox_items as item where item.id = v_items[1]
  returning * into v_wake;
  update public.agent_wake_state
     set last_wake_id = v_wake.id, last_claimed_at = v_wake.claimed_at, waitlisted_at = null, waitlist_path = null, waiting_since = null, updated_at = now()
   where agent_id = p_agent_id;
  -- A stamp is not worth a wait: a row that somebody holds goes without it.
  update public.agent_inbox_items set last_wake_attempt_at = now()
   where id in (select item.id from public.agent_inbox_items as item where item.id = any (v_items) for update skip locked);
  return dispatcher.wake_grant(v_wake);
end
$$;
comment on function dispatcher.claim_one_wake(public.dispatcher_instances, uuid, text, uuid[], uuid) is
  'Evaluates every gate of one agent under the gateway''s lock and, when all are open, writes the wake (state starting). Answers {granted, …}.';

create or replace function dispatcher.running_instance(p_instance_id uuid) returns public.dispatcher_instances
language plpgsql stable set search_path = ''
as $$
declare
  v_instance public.dispatcher_instances;
begin
  select * into v_instance from public.dispatcher_instances where id = p_instance_id;
  if v_instance.id is null then
    raise exception 'no dispatcher instance %', p_instance_id using errcode = 'OD001', hint = 'Register the instance again.';
  end if;
  return v_instance;
end
$$;
comment on function dispatcher.running_instance(uuid) is 'The row of an instance; raises OD001 when it is not registered.';

create or replace function public.claim_wakes(p_instance_id uuid, p_claims jsonb, p_request uuid) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '3s'
as $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
  v_claim jsonb;
  v_answer jsonb;
  v_answers jsonb := '[]';
begin
  -- Before anything else: an earlier try of this request may be under way still.
  perform from public.dispatcher_gateways where gateway_id = v_instance.gateway_id for update;
  for v_claim in select value from jsonb_array_elements(p_claims) loop
    begin
      v_answer := dispatcher.claim_one_wake(
        v_instance, (v_claim ->> 'agent_id')::uuid, v_claim ->> 'path',
        array(select jsonb_array_elements_text(coalesce(v_claim -> 'item_ids', '[]'))::uuid), p_request);
    exception when query_canceled or deadlock_detected or serialization_failure then
      raise;
    when lock_not_available then
      v_answer := jsonb_build_object('granted', false, 'agent_id', v_claim ->> 'agent_id', 'skip_reason', 'busy', 'retry_in', 5,
                                     'agent_slug', (select slug from public.agents where id = (v_claim ->> 'agent_id')::uuid));
    when others then
      v_answer := jsonb_build_object('granted', false, 'agent_id', v_claim ->> 'agent_id', 'skip_reason', 'error', 'error', sqlerrm, 'error_code', sqlstate);
    end;
    v_answers := v_answers || v_answer;
  end loop;
  return v_answers;
end
$$;
comment on function public.claim_wakes(uuid, jsonb, uuid) is
  'Claims wakes for p_claims = [{agent_id, path, item_ids}]; answers one verdict per claim, in order. p_request makes a repeated call hand back the same grants. One agent whose data raises does not stop the others.';

create or replace function dispatcher.claim_waiting_wakes(p_instance_id uuid, p_limit integer, p_request uuid) returns jsonb
language plpgsql volatile set search_path = '' set lock_timeout = '3s'
as $$
declare
  v_instance constant public.dispatcher_instances := dispatcher.running_instance(p_instance_id);
  v_waiting record;
  v_answer jsonb;
  v_answers jsonb := '[]';
  v_granted integer := 0;
  v_page constant integer := 100;
  v_seen integer;
begin
  select jsonb_agg(dispatcher.wake_grant(wake)) into v_answer from public.agent_wakes as wake
   where wake.claim_request = p_request and wake.state in ('starting', 'running');
  if v_answer is not null then
    return v_answer;
  end if;
  if p_limit <= 0 then
    return v_answers;
  end if;
  -- In pages: the plan then walks the index of the waitlist instead of sorting all of it for one free slot.
  loop
    v_seen := 0;
    for v_waiting in
      select state.agent_id, state.waitlist_path from public.agent_wake_state as state
        join public.agents as agent on agent.id = state.agent_id
       where state.waitlisted_at is not null and agent.gateway_id = v_instance.gateway_id and agent.tenant_id = v_instance.tenant_id
       order by state.waitlisted_at, state.waiting_since, state.agent_id limit v_page
    loop
      v_seen := v_seen + 1;
      begin
        v_answer := dispatcher.claim_one_wake(v_instance, v_waiting.agent_id, v_waiting.waitlist_path, '{}', p_request);
      exception when query_canceled or deadlock_detected or serialization_failure then
        raise;
      when lock_not_available then
        v_answer := jsonb_build_object('granted', false, 'agent_id', v_waiting.agent_id, 'skip_reason', 'busy', 'retry_in', 5,
                                       'agent_slug', (select slug from public.agents where id = v_waiting.agent_id));
      when others then
        -- Off the list with it, or it would stand at its head for ever; the sweep lists it again.
        update public.agent_wake_state set waitlisted_at = null, waitlist_path = null, waiting_since = null where agent_id = v_waiting.agent_id;
        v_answer := jsonb_build_object('granted', false, 'agent_id', v_waiting.agent_id, 'skip_reason', 'error', 'error', sqlerrm, 'error_code', sqlstate);
      end;
      if v_answer ->> 'skip_reason' = 'concurrency_limit' then
        return v_answers;
      end if;
      v_answers := v_answers || v_answer;
      v_granted := v_granted + (v_answer ->> 'granted')::boolean::integer;
      if v_granted >= p_limit then
        return v_answers;
      end if;
    end loop;
    exit when v_seen < v_page or v_answers @? '$[*] ? (@.skip_reason == "busy")';
  end loop;
  return v_answers;
end
$$;
comment on function dispatcher.claim_waiting_wakes(uuid, integer, uuid) is
  'Claims up to p_limit wakes from the waitlist of the instance''s gateway, longest waiting first; an agent that may no longer be woken leaves the list and hides nobody.';

select dispatcher.restrict_functions(array[
  'claim_wakes'
]);

notify pgrst, 'reload schema';
