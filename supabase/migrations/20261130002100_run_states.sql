-- The state table of workflow runs, kept by triggers, and the hints that follow from changes.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.workflow_timeout_minutes(p_tenant_id uuid, p_workflow_type text) returns integer
language sql stable set search_path = ''
as $$
  select coalesce((select timeout_minutes from public.workflow_agent_routing
                    where tenant_id = p_tenant_id and workflow_type = p_workflow_type), 60)
$$;
comment on function dispatcher.workflow_timeout_minutes(uuid, text) is 'For how long a run of a type may be worked on: its route''s minutes, else 60.';

create or replace function dispatcher.guard_workflow_transition() returns trigger
language plpgsql volatile set search_path = ''
as $$
declare
  v_side constant text[] := array['waiting_for_approval', 'blocked'];
  v_transition record;
begin
  if new.status = old.status and new.dispatch_attempts = old.dispatch_attempts then
    new.updated_at := now();
    return new;
  end if;
  select needs_override into v_transition from public.workflow_run_transitions
   where from_status = old.status and to_status = new.status;
  if not found
     or (v_transition.needs_override and coalesce(current_setting('dispatcher.override_run', true), '') <> old.id::text)
     or (old.status = any (v_side) and new.status <> all (v_side || array['cancelled']) and new.status is distinct from old.paused_from) then
    raise exception 'a run may not go from % to %', old.status, new.status using errcode = 'OD010',
      detail = format('run %s%s', old.id, case when old.paused_from is not null then ', held since it was ' || old.paused_from else '' end),
      hint = 'The state table is workflow_run_transitions.';
  end if;
  new.paused_from := case when new.status = any (v_side) then coalesce(old.paused_from, old.status) end;
  new.paused_at := case when new.status = any (v_side) then coalesce(old.paused_at, now()) end;
  if old.status = any (v_side) then
    -- It was held, not silent: whoever has it, or should take it, gets the usual time anew, and for its work what was left of it.
    new.last_heartbeat_at := case when new.status in ('claimed', 'running') then now() else new.last_heartbeat_at end;
    new.deadline_at := case when new.status in ('claimed', 'running') then new.deadline_at + (now() - old.paused_at) else new.deadline_at end;
    new.dispatched_at := case when new.status = 'dispatched' then now() else new.dispatched_at end;
  end if;
  new.updated_at := now();
  return dispatcher.complete_workflow_row(new);
end
$$;
comment on function dispatcher.guard_workflow_transition() is
  'Before an update of a run: refuses (OD010) what workflow_run_transitions does not list, and a return from a side state to anywhere but where it came from.';

create or replace function dispatcher.complete_workflow_row(p_run public.workflow_runs) returns public.workflow_runs
language plpgsql stable set search_path = ''
as $$
begin
  -- What a state implies, for whoever changes a row by hand as for our own functions.
  if p_run.status in ('waiting_for_approval', 'blocked') then
    p_run.paused_from := coalesce(p_run.paused_from, 'queued');
    p_run.paused_at := coalesce(p_run.paused_at, now());
  end if;
  if p_run.status = 'dispatched' then
    p_run.dispatched_at := coalesce(p_run.dispatched_at, now());
    p_run.owner_agent_id := coalesce(p_run.owner_agent_id, p_run.pinned_agent_id,
      (select agent_id from public.workflow_agent_routing where tenant_id = p_run.tenant_id and workflow_type = p_run.workflow_type));
  end if;
  if p_run.status in ('claimed', 'running') then
    p_run.claimed_at := coalesce(p_run.claimed_at, p_run.started_at, now());
    p_run.claim_token := coalesce(p_run.claim_token, gen_random_uuid());
    p_run.last_heartbeat_at := coalesce(p_run.last_heartbeat_at, now());
    p_run.deadline_at := coalesce(p_run.deadline_at, p_run.claimed_at
      + make_interval(mins => dispatcher.workflow_timeout_minutes(p_run.tenant_id, p_run.workflow_type)));
  end if;
  if p_run.status in ('running', 'completed') then
    p_run.started_at := coalesce(p_run.started_at, p_run.claimed_at, p_run.finished_at, now());
  end if;
  if p_run.status in ('completed', 'failed', 'timed_out', 'cancelled') then
    p_run.finished_at := coalesce(p_run.finished_at, now());
    -- Work was done, so there is something to pay for, known or not.
    if p_run.claimed_at is not null then
      p_run.accounted_at := coalesce(p_run.accounted_at, p_run.reported_at, p_run.finished_at);
    end if;
  else
    p_run.finished_at := null;
  end if;
  return p_run;
end
$$;
comment on function dispatcher.complete_workflow_row(public.workflow_runs) is 'The row with the times and keys its state implies.';

create or replace function dispatcher.prepare_workflow_run() returns trigger
language plpgsql volatile set search_path = ''
as $$
begin
  -- A row that arrives finished was worked on, unless it says otherwise: what it cost counts.
  if new.status in ('completed', 'failed', 'timed_out') then
    new.claimed_at := coalesce(new.claimed_at, new.started_at, new.finished_at, now());
  end if;
  -- A cost given before anybody worked on it is a guess of whoever queued it, not a report.
  if new.cost_estimate >= 0 and new.cost_estimate <> 'NaN' and new.status not in ('queued', 'dispatched') then
    new.reported_at := coalesce(new.reported_at, new.finished_at, now());
    new.accounted_at := coalesce(new.accounted_at, new.reported_at);
  end if;
  return dispatcher.complete_workflow_row(new);
end
$$;
comment on function dispatcher.prepare_workflow_run() is 'Before an insert of a run: the times and keys its state implies.';

create or replace function dispatcher.record_workflow_transition() returns trigger
language plpgsql volatile set search_path = ''
as $$
declare
  v_actor constant text := coalesce(nullif(current_setting('dispatcher.actor', true), ''),
                                    nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub', current_user);
begin
  insert into public.workflow_run_events (tenant_id, run_id, from_status, to_status, attempt, actor, reason)
  values (new.tenant_id, new.id, old.status, new.status, new.dispatch_attempts, v_actor, nullif(current_setting('dispatcher.reason', true), ''));
  -- Taken away from whoever works on it: the process it has at one of our daemons must end.
  if old.wake_id is not null and old.status <> new.status
     and (new.status in ('cancelled', 'timed_out') or (new.status in ('queued', 'failed') and v_actor = 'dispatcher')) then
    update public.agent_wakes set stop_cause = format('run %s is %s', new.id, new.status)
     where id = old.wake_id and state in ('starting', 'running') and stop_cause is null;
  end if;
  return null;
end
$$;
comment on function dispatcher.record_workflow_transition() is
  'After a transition: its event, and where the run was taken away from outside, the request to stop the process that works on it.';

create or replace function dispatcher.refuse_workflow_event_change() returns trigger
language plpgsql set search_path = ''
as $$
begin
  raise exception 'events of runs are append-only' using errcode = 'OD012';
end
$$;
comment on function dispatcher.refuse_workflow_event_change() is 'Events of runs are append-only: an update is refused with OD012.';

create or replace trigger workflow_runs_prepare before insert on public.workflow_runs for each row execute function dispatcher.prepare_workflow_run();

create or replace trigger workflow_runs_guard before update on public.workflow_runs for each row execute function dispatcher.guard_workflow_transition();

create or replace trigger workflow_runs_record after update on public.workflow_runs
  for each row when (old.status is distinct from new.status or old.dispatch_attempts is distinct from new.dispatch_attempts)
  execute function dispatcher.record_workflow_transition();

create or replace trigger workflow_run_events_append_only before update on public.workflow_run_events
  for each row execute function dispatcher.refuse_workflow_event_change();

create or replace function dispatcher.note_workflow_actor(p_actor text, p_reason text) returns void
language sql volatile set search_path = ''
as $$
  select set_config('dispatcher.actor', coalesce(p_actor, ''), true), set_config('dispatcher.reason', coalesce(left(p_reason, 1000), ''), true)
$$;
comment on function dispatcher.note_workflow_actor(text, text) is 'Who acts, and why: what the next transitions of this transaction record.';

create or replace function dispatcher.hint_workflow_daemons(p_tenant_id uuid, p_run_id uuid) returns void
language plpgsql volatile security definer set search_path = ''
as $$
begin
  perform dispatcher.send_gateway_hint(live.gateway_id, 'run', jsonb_build_object('run_id', p_run_id))
     from (select distinct instance.gateway_id from public.dispatcher_instances as instance
            where instance.tenant_id = p_tenant_id and instance.state = 'running' and not dispatcher.is_instance_silent(instance)
            limit 20) as live;
exception when others then
  -- A hint is worth less than the row it speaks of; the next tick finds the row.
  null;
end
$$;
comment on function dispatcher.hint_workflow_daemons(uuid, uuid) is 'Hints the tenant''s living daemons that runs are to be looked at. Never fails.';

create or replace function dispatcher.hint_workflow_insert() returns trigger
language plpgsql volatile security definer set search_path = ''
as $$
declare
  v_tenant record;
begin
  for v_tenant in select tenant_id, (array_agg(id))[1] as run_id from new_runs where status = 'queued' group by tenant_id loop
    perform dispatcher.hint_workflow_daemons(v_tenant.tenant_id, v_tenant.run_id);
  end loop;
  return null;
exception when others then
  return null;
end
$$;
comment on function dispatcher.hint_workflow_insert() is 'After an insert of queued runs: one hint to each living daemon of the tenant. Never fails the insert.';

create or replace function dispatcher.hint_workflow_update() returns trigger
language plpgsql volatile security definer set search_path = ''
as $$
begin
  -- The daemon's own tick looks again by itself.
  if coalesce(current_setting('dispatcher.quiet', true), '') = 'on' then
    return null;
  end if;
  if new.status = 'queued'
     or (coalesce(old.paused_from, old.status) in ('dispatched', 'claimed', 'running')
         and exists (select from public.workflow_runs where tenant_id = new.tenant_id and workflow_type = new.workflow_type and status = 'queued'))
     or old.wake_id is not null then
    perform dispatcher.hint_workflow_daemons(new.tenant_id, new.id);
  end if;
  return null;
exception when others then
  return null;
end
$$;
comment on function dispatcher.hint_workflow_update() is
  'After a run came back to the queue, or gave up its slot while others of its type wait: a hint to the tenant''s living daemons. Never fails the update.';

create or replace function dispatcher.hint_workflow_rules() returns trigger
language plpgsql volatile security definer set search_path = ''
as $$
begin
  perform dispatcher.hint_workflow_daemons(new.tenant_id, null);
  return null;
exception when others then
  return null;
end
$$;
comment on function dispatcher.hint_workflow_rules() is 'After a route or a budget changed: waiting runs may go out now. Never fails the change.';

create or replace trigger workflow_runs_insert_hint after insert on public.workflow_runs
  referencing new table as new_runs for each statement execute function dispatcher.hint_workflow_insert();

create or replace trigger workflow_runs_update_hint after update of status on public.workflow_runs
  for each row when (old.status is distinct from new.status
                     and new.status in ('queued', 'completed', 'failed', 'timed_out', 'cancelled'))
  execute function dispatcher.hint_workflow_update();

create or replace trigger workflow_agent_routing_hint after insert or update on public.workflow_agent_routing
  for each row execute function dispatcher.hint_workflow_rules();

create or replace trigger budgets_hint after update on public.budgets
  for each row when (old.cap_usd is distinct from new.cap_usd or old.cap_tokens is distinct from new.cap_tokens or old.active is distinct from new.active
                     or old.action_on_exceed is distinct from new.action_on_exceed)
  execute function dispatcher.hint_workflow_rules();

select dispatcher.restrict_functions();

notify pgrst, 'reload schema';
commit;
