-- The state table of workflow runs, kept by trigger; the trail of its transitions; and the hints that follow from
-- changes.
-- Triggers here lock no row but those their statement has changed. What tells of a transition never undoes it.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.workflow_timeout_minutes(p_tenant_id uuid, p_workflow_type text) returns integer
language sql stable set search_path = ''
as $$
  select coalesce((select timeout_minutes from public.workflow_agent_routing
                    where tenant_id = p_tenant_id and workflow_type = p_workflow_type), 60)
$$;
comment on function dispatcher.workflow_timeout_minutes(uuid, text) is
  'For how long a run of a type may be worked on: its route''s minutes, else 60.';

create or replace function dispatcher.deadline_of_run(p_claimed_at timestamptz, p_minutes integer) returns timestamptz
language sql stable set search_path = ''
as $$ select least(p_claimed_at, now() + interval '1 year') + make_interval(mins => p_minutes) $$;
comment on function dispatcher.deadline_of_run(timestamptz, integer) is
  'When a claim runs out. A claim from beyond any clock counts from a year ahead, so that no sum overflows.';

create or replace function dispatcher.put_off(p_deadline timestamptz, p_held_since timestamptz) returns timestamptz
language sql stable set search_path = ''
as $$
  select case when isfinite(p_deadline) and p_deadline < now() + interval '5000 years'
      and p_held_since between '1970-01-01Z' and now()
              then p_deadline + (now() - p_held_since) else p_deadline end
$$;
comment on function dispatcher.put_off(timestamptz, timestamptz) is
  'A deadline, later by the time a run was held; unchanged where one of the two is no known time.';

create or replace function dispatcher.guard_workflow_transition() returns trigger
language plpgsql volatile set search_path = ''
as $$
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
comment on function dispatcher.guard_workflow_transition() is
  'Before an update of a run: refuses (OD010) what workflow_run_transitions does not list, and a return from a side '
  'state to anywhere but where it came from.';

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
comment on function dispatcher.complete_workflow_row(public.workflow_runs) is
  'The row with the times, keys and estimates its state implies.';

create or replace function dispatcher.prepare_workflow_run() returns trigger
language plpgsql volatile set search_path = ''
as $$
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
comment on function dispatcher.prepare_workflow_run() is
  'Before an insert of a run: the times and keys its state implies.';

create or replace function dispatcher.known_tokens(p_input bigint, p_output bigint) returns bigint
language sql immutable parallel safe set search_path = ''
as $$
  select case when num_nonnulls(p_input, p_output) > 0 and least(p_input, p_output) >= 0
              then least(coalesce(p_input, 0)::numeric + coalesce(p_output, 0), 1e18)::bigint end
$$;
comment on function dispatcher.known_tokens(bigint, bigint) is
  'The tokens that a row tells of; NULL when it tells of none, or of fewer than none.';

create or replace function dispatcher.known_cost(p_cost numeric) returns numeric
language sql immutable parallel safe set search_path = ''
as $$ select case when p_cost >= 0 and p_cost < 'Infinity' then p_cost end $$;
comment on function dispatcher.known_cost(numeric) is
  'A cost of a row; NULL when it is none: not told, negative, NaN, infinite.';

create or replace function dispatcher.note_report(p_run public.workflow_runs) returns public.workflow_runs
language plpgsql stable set search_path = ''
as $$
begin
  if num_nonnulls(dispatcher.known_cost(p_run.cost_estimate),
                  dispatcher.known_tokens(p_run.input_tokens, p_run.output_tokens)) > 0 then
    p_run.reported_at := coalesce(p_run.finished_at, now());
  end if;
  return p_run;
end
$$;
comment on function dispatcher.note_report(public.workflow_runs) is
  'The row with the time of its report, where it tells of a cost or of tokens.';

create or replace function dispatcher.configured_estimates(p_tenant_id uuid, out usd numeric, out tokens bigint)
language sql stable set search_path = ''
as $$
  select coalesce(latest.workflow_cost_estimate_usd, 0.10), coalesce(latest.workflow_token_estimate, 20000)
    from (select 1) as one_row
    left join lateral (
      select settings.workflow_cost_estimate_usd, settings.workflow_token_estimate
        from public.dispatcher_instances as instance
        join public.dispatcher_settings as settings on settings.instance_id = instance.id
       where instance.tenant_id = p_tenant_id
       order by instance.state = 'running' desc, instance.last_heartbeat_at desc limit 1) as latest on true
$$;
comment on function dispatcher.configured_estimates(uuid) is
  'What a run is taken to cost of which nothing is known: the settings of the tenant''s latest daemon, else 0.10 USD '
  'and 20,000 tokens.';

create or replace function dispatcher.with_estimates(p_run public.workflow_runs) returns public.workflow_runs
language plpgsql stable set search_path = ''
as $$
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
comment on function dispatcher.with_estimates(public.workflow_runs) is
  'The row with what is reserved for it while it is open, and what counts for it where it ended without a report: what '
  'was reserved, at least the configured estimate.';

create or replace function dispatcher.booked_usd(p_run public.workflow_runs) returns numeric
language sql immutable set search_path = ''
as $$
  select case when coalesce(p_run.paused_from, p_run.status) in ('queued', 'dispatched')
                or (p_run.reported_at is null and (p_run.finished_at is null or p_run.claimed_at is null)) then 0
              else coalesce(dispatcher.known_cost(p_run.cost_estimate),
                            case when p_run.finished_at is not null then dispatcher.known_cost(p_run.assumed_usd) end,
                            0) end
$$;
comment on function dispatcher.booked_usd(public.workflow_runs) is
  'What the books hold for the present claim of a run: what was reported; after its end without a report what is '
  'assumed; nothing for one that nobody has worked on.';

create or replace function dispatcher.booked_tokens(p_run public.workflow_runs) returns bigint
language sql immutable set search_path = ''
as $$
  select case when coalesce(p_run.paused_from, p_run.status) in ('queued', 'dispatched')
                or (p_run.reported_at is null and (p_run.finished_at is null or p_run.claimed_at is null)) then 0
              else coalesce(dispatcher.known_tokens(p_run.input_tokens, p_run.output_tokens),
                            case when p_run.finished_at is not null then greatest(p_run.assumed_tokens, 0) end, 0) end
$$;
comment on function dispatcher.booked_tokens(public.workflow_runs) is 'booked_usd in tokens.';

create or replace function dispatcher.source_of_booking(p_run public.workflow_runs, p_usd numeric) returns text
language sql stable set search_path = ''
as $$
  select case when nullif(current_setting('dispatcher.booking_source', true), '') is not null
              then current_setting('dispatcher.booking_source')
              when p_usd <> 0 and dispatcher.known_cost(p_run.cost_estimate) is null
                or p_usd = 0 and dispatcher.known_tokens(p_run.input_tokens, p_run.output_tokens) is null
              then 'assumed' else 'report' end
$$;
comment on function dispatcher.source_of_booking(public.workflow_runs, numeric) is
  'Where a booking comes from: what the transaction says (correction), else whether the run tells of it.';

create or replace function dispatcher.book_new_runs() returns trigger
language plpgsql volatile security definer set search_path = ''
as $$
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
comment on function dispatcher.book_new_runs() is
  'After an insert of runs: books what those cost that arrive with a cost, or finished.';

create or replace function dispatcher.book_changed_runs() returns trigger
language plpgsql volatile security definer set search_path = ''
as $$
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
comment on function dispatcher.book_changed_runs() is
  'After an update of runs: books what was added to the cost of each (or taken from it) since its row was last '
  'changed, in this moment. A run that returns to the queue keeps what it has cost.';

create or replace function dispatcher.apply_kept_ends() returns trigger
language plpgsql volatile set search_path = ''
as $$
begin
  perform dispatcher.apply_kept_end(run) from new_runs as run
   where run.kept_status is not null and run.status in ('claimed', 'running');
  return null;
end
$$;
comment on function dispatcher.apply_kept_ends() is
  'After held runs went on: ends those whose session had ended them meanwhile.';

create or replace function dispatcher.workflow_actor() returns text
language plpgsql stable set search_path = ''
as $$
begin
  return coalesce(nullif(current_setting('dispatcher.actor', true), ''),
                  nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub',
                  nullif(current_setting('role'), 'none'), session_user);
exception when others then
  if dispatcher.must_abort(sqlstate) then raise; end if;
  return session_user;
end
$$;
comment on function dispatcher.workflow_actor() is
  'Who acts in this transaction: what note_workflow_actor said, else the subject of the token, else the role.';

create or replace function dispatcher.write_run_events(p_events public.workflow_run_events[]) returns void
language plpgsql volatile security definer set search_path = '' set lock_timeout = '100ms'
as $$
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
comment on function dispatcher.write_run_events(public.workflow_run_events[]) is
  'Writes events of runs. A side write: one that cannot be written is a fault that is noted, and the transition '
  'stands.';

create or replace function dispatcher.record_workflow_transition() returns trigger
language plpgsql volatile set search_path = ''
as $$
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
comment on function dispatcher.record_workflow_transition() is 'After an update of runs: one event per transition.';

create or replace function dispatcher.refuse_workflow_event_change() returns trigger
language plpgsql set search_path = ''
as $$
begin
  raise exception '% is append-only', tg_table_name using errcode = 'OD012';
end
$$;
comment on function dispatcher.refuse_workflow_event_change() is
  'Events and bookings of runs are append-only: an update is refused with OD012.';

create or replace trigger workflow_runs_prepare before insert on public.workflow_runs for each row
    execute function dispatcher.prepare_workflow_run();

create or replace trigger workflow_runs_guard before update on public.workflow_runs for each row
    execute function dispatcher.guard_workflow_transition();

create or replace trigger workflow_runs_record after update on public.workflow_runs
  referencing old table as old_runs new table as new_runs for each statement
      execute function dispatcher.record_workflow_transition();

create or replace trigger workflow_runs_book_new after insert on public.workflow_runs
  referencing new table as new_runs for each statement execute function dispatcher.book_new_runs();

create or replace trigger workflow_runs_book_changed after update on public.workflow_runs
  referencing old table as old_runs new table as new_runs for each statement
      execute function dispatcher.book_changed_runs();

-- After workflow_runs_record: triggers fire by name, and the return comes before the end.
create or replace trigger workflow_runs_then_end after update on public.workflow_runs
  referencing new table as new_runs for each statement execute function dispatcher.apply_kept_ends();

create or replace trigger workflow_run_events_append_only before update on public.workflow_run_events
  for each row execute function dispatcher.refuse_workflow_event_change();

create or replace trigger workflow_bookings_append_only before update on public.workflow_bookings
  for each row execute function dispatcher.refuse_workflow_event_change();

create or replace function dispatcher.note_workflow_actor(p_actor text, p_reason text) returns void
language sql volatile set search_path = ''
as $$
  select set_config('dispatcher.actor', coalesce(left(p_actor, 300), ''), true),
         set_config('dispatcher.reason', coalesce(left(p_reason, 1000), ''), true)
$$;
comment on function dispatcher.note_workflow_actor(text, text) is
  'Who acts, and why: what the next transitions of this transaction record.';

create or replace function dispatcher.hint_workflow_daemons(p_tenant_id uuid, p_run_id uuid) returns void
language plpgsql volatile security definer set search_path = ''
as $$
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
comment on function dispatcher.hint_workflow_daemons(uuid, uuid) is
  'Hints the tenant''s living daemons that runs are to be looked at. Never fails.';

create or replace function dispatcher.hint_workflow_insert() returns trigger
language plpgsql volatile security definer set search_path = ''
as $$
begin
  perform dispatcher.hint_workflow_daemons(hint.tenant_id, hint.run_id)
     from (select tenant_id, (array_agg(id))[1] as run_id from new_runs where status = 'queued'
         group by tenant_id) as hint;
  return null;
exception when others then
  return null;
end
$$;
comment on function dispatcher.hint_workflow_insert() is
  'After an insert of queued runs: one hint to each living daemon of the tenant. Never fails the insert.';

create or replace function dispatcher.hint_workflow_update() returns trigger
language plpgsql volatile security definer set search_path = ''
as $$
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
comment on function dispatcher.hint_workflow_update() is
  'After runs came back to the queue, or gave up their slots while others of their type wait: one hint per statement '
  'to the tenant''s living daemons. Never fails the update.';

create or replace function dispatcher.hint_workflow_rules() returns trigger
language plpgsql volatile security definer set search_path = ''
as $$
begin
  perform dispatcher.hint_workflow_daemons(changed.tenant_id, null)
      from (select distinct tenant_id from new_rules) as changed;
  return null;
exception when others then
  return null;
end
$$;
comment on function dispatcher.hint_workflow_rules() is
  'After routes or budgets changed: waiting runs may go out now. One hint per statement. Never fails the change.';

create or replace trigger workflow_runs_insert_hint after insert on public.workflow_runs
  referencing new table as new_runs for each statement execute function dispatcher.hint_workflow_insert();

create or replace trigger workflow_runs_update_hint after update on public.workflow_runs
  referencing old table as old_runs new table as new_runs for each statement
      execute function dispatcher.hint_workflow_update();

drop trigger if exists workflow_agent_routing_hint on public.workflow_agent_routing;
create or replace trigger workflow_agent_routing_insert_hint after insert on public.workflow_agent_routing
  referencing new table as new_rules for each statement execute function dispatcher.hint_workflow_rules();
create or replace trigger workflow_agent_routing_update_hint after update on public.workflow_agent_routing
  referencing new table as new_rules for each statement execute function dispatcher.hint_workflow_rules();

create or replace function dispatcher.revise_budget() returns trigger
language plpgsql volatile set search_path = ''
as $$
begin
  if (new.cap_usd, new.cap_tokens, new.action_on_exceed) is distinct from
     (old.cap_usd, old.cap_tokens, old.action_on_exceed) then
    new.revision := old.revision + 1;
  end if;
  new.updated_at := now();
  return new;
end
$$;
comment on function dispatcher.revise_budget() is
  'Before an update of a budget: another cap or action is another revision, whose breaches are told anew.';

create or replace trigger budgets_revise before update on public.budgets
  for each row execute function dispatcher.revise_budget();
create or replace trigger budgets_hint after update on public.budgets
  referencing new table as new_rules for each statement execute function dispatcher.hint_workflow_rules();

select dispatcher.restrict_functions();

notify pgrst, 'reload schema';
commit;
