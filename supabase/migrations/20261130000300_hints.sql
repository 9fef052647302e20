-- Hints: what tells a daemon where to look. Triggers here never make the statement that fired them fail, and lock no
-- row but those that belong to a row which the statement itself has changed.
begin;
set local lock_timeout = '3s';
select dispatcher.lock_tables('agent_inbox_items', 'agents', 'agent_budgets');

create or replace function dispatcher.dispatcher_gateway_topic(p_gateway_id uuid) returns text
language sql immutable set search_path = ''
as $$ select 'gateway:' || p_gateway_id::text $$;
comment on function dispatcher.dispatcher_gateway_topic(uuid) is 'The private Realtime topic of a gateway.';

create or replace function dispatcher.send_gateway_hint(p_gateway_id uuid, p_event text, p_payload jsonb) returns void
language plpgsql volatile security definer set search_path = ''
as $$
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
$$;
comment on function dispatcher.send_gateway_hint(uuid, text, jsonb) is
  'Broadcasts a hint to the private topic of a gateway once the transaction commits. Never fails; without '
  'realtime.send it does nothing.';

create or replace function dispatcher.is_quiet() returns boolean
language sql stable set search_path = ''
as $$ select coalesce(current_setting('dispatcher.quiet', true), '') = 'on' $$;
comment on function dispatcher.is_quiet() is
  'Whether this transaction is one of ours that looks again by itself: its changes need no hint, and it tells what it '
  'gives up.';

create or replace function dispatcher.hint_inbox_insert() returns trigger
language plpgsql volatile security definer set search_path = ''
as $$
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
comment on function dispatcher.hint_inbox_insert() is
  'After an insert of items: one hint per agent to its gateway ({agent_id, item_id, item_ids}). Locks nothing, never '
  'fails the insert.';

create or replace function dispatcher.is_signed_in_user() returns boolean
language sql stable set search_path = ''
as $$ select coalesce(nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'role' = 'authenticated',
    false) $$;
comment on function dispatcher.is_signed_in_user() is 'Whether this request comes with the token of a person.';

create or replace function dispatcher.mark_item_changes(p_reopened uuid[], p_closed_by_user uuid[]) returns void
language plpgsql volatile set search_path = ''
as $$
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
comment on function dispatcher.mark_item_changes(uuid[], uuid[]) is
  'Keeps when items were reopened, and when a person closed them. The caller''s statement holds these items.';

create or replace function dispatcher.hint_inbox_update() returns trigger
language plpgsql volatile security definer set search_path = ''
as $$
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
comment on function dispatcher.hint_inbox_update() is
  'After an update of items: one hint per agent and statement for what is back to pending or failed, one notification '
  'for what was given up, and when a finished item was reopened. Never fails the update.';

create or replace function dispatcher.hint_agent_change() returns trigger
language plpgsql volatile security definer set search_path = ''
as $$
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
comment on function dispatcher.hint_agent_change() is
  'After an agent''s status or gateway changed: a hint to its gateway, and to the one it left; the end of a pause is '
  'kept. Never fails the update.';

create or replace function dispatcher.hint_budget_change() returns trigger
language plpgsql volatile security definer set search_path = ''
as $$
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
comment on function dispatcher.hint_budget_change() is
  'After an agent''s budget changed its status, limit or cutoff: a hint to its gateway. Never fails the update.';

create or replace function dispatcher.broadcast_hints_available() returns boolean
language sql stable set search_path = ''
as $$
  select to_regprocedure('realtime.send(jsonb,text,text,boolean)') is not null
     and exists (select from pg_catalog.pg_trigger where tgrelid = 'public.agent_inbox_items'::regclass
                  and tgname = 'dispatcher_inbox_insert_hint' and tgenabled <> 'D')
$$;
comment on function dispatcher.broadcast_hints_available() is
  'Whether an insert is broadcast here: realtime.send exists and the insert trigger is in place and enabled.';

-- No list of columns and no condition on one: whoever owns these tables may change their columns' types.
create or replace trigger dispatcher_inbox_insert_hint after insert on public.agent_inbox_items
  referencing new table as new_items for each statement execute function dispatcher.hint_inbox_insert();

create or replace trigger dispatcher_inbox_update_hint after update on public.agent_inbox_items
  referencing old table as old_items new table as new_items for each statement
      execute function dispatcher.hint_inbox_update();

create or replace trigger dispatcher_agent_hint after update of status, gateway_id on public.agents
  for each row when (old.status is distinct from new.status or old.gateway_id is distinct from new.gateway_id)
  execute function dispatcher.hint_agent_change();

create or replace trigger dispatcher_budget_hint after update of status, monthly_limit_usd,
    hard_cutoff on public.agent_budgets
  for each row when (old.status is distinct from new.status
      or old.monthly_limit_usd is distinct from new.monthly_limit_usd
                     or old.hard_cutoff is distinct from new.hard_cutoff)
  execute function dispatcher.hint_budget_change();

select dispatcher.publish_table(name) from unnest(array['agent_inbox_items', 'agents', 'agent_budgets',
    'dispatcher_instances']) as name;

select dispatcher.restrict_functions();

notify pgrst, 'reload schema';
commit;
