-- What /metrics shows of the tables, in one call: asked twice a minute, and only by a daemon that serves metrics.

create or replace function public.gateway_backlog(p_gateway_id uuid) returns jsonb
language sql stable set search_path = ''
as $$
  select jsonb_build_object('items', count(*), 'under_1m', count(*) filter (where age < interval '1 minute'),
                            'under_1h', count(*) filter (where age >= interval '1 minute' and age < interval '1 hour'),
                            'over_1h', count(*) filter (where age >= interval '1 hour'), 'oldest_seconds', round(extract(epoch from max(age))))
    from (select now() - due.created_at as age from public.agent_inbox_due as due join public.agents as agent on agent.id = due.agent_id
           where agent.gateway_id = p_gateway_id) as ages
$$;
comment on function public.gateway_backlog(uuid) is 'Open items of a gateway''s agents by age: items, under_1m, under_1h, over_1h, oldest_seconds (NULL when there are none).';

create or replace function public.dispatcher_gauges(p_instance_id uuid) returns jsonb
language plpgsql stable set search_path = ''
as $$
declare
  v_instance constant public.dispatcher_instances := public.running_instance(p_instance_id);
begin
  return jsonb_build_object(
    'backlog', public.gateway_backlog(v_instance.gateway_id),
    'runs', (select coalesce(jsonb_object_agg(counted.status, counted.number), '{}')
               from (select status, count(*) as number from public.workflow_runs where tenant_id = v_instance.tenant_id group by status) as counted),
    'held', (select coalesce((last_tick -> 'budget_enforcement' ->> 'held')::integer, 0) from public.dispatcher_instances
              where tenant_id = v_instance.tenant_id and last_tick is not null order by last_tick ->> 'at' desc limit 1));
end
$$;
comment on function public.dispatcher_gauges(uuid) is
  'For /metrics: backlog of the instance''s gateway by age, runs of its tenant by status, and how many runs budgets held at the tenant''s last tick.';

do $$
declare
  v_function text;
begin
  foreach v_function in array array['public.gateway_backlog(uuid)', 'public.dispatcher_gauges(uuid)'] loop
    execute format('revoke execute on function %s from public, anon, authenticated', v_function);
    execute format('grant execute on function %s to service_role', v_function);
  end loop;
end
$$;

notify pgrst, 'reload schema';
