-- What wakes did and cost, for `dispatcher wakes`.

create or replace function public.list_wakes(p_tenant_id uuid, p_gateway text, p_agent text, p_limit integer) returns jsonb
language plpgsql stable set search_path = ''
as $$
declare
  v_gateway_id uuid;
begin
  select id into v_gateway_id from public.gateways where tenant_id = p_tenant_id and (slug = p_gateway or id::text = p_gateway);
  if v_gateway_id is null then
    return jsonb_build_object('code', 'unknown_gateway', 'known',
      coalesce((select jsonb_agg(slug order by slug) from public.gateways where tenant_id = p_tenant_id), '[]'));
  end if;
  if p_agent is not null and not exists (select from public.agents where gateway_id = v_gateway_id and (slug = p_agent or id::text = p_agent)) then
    return jsonb_build_object('code', 'unknown_agent', 'known',
      coalesce((select jsonb_agg(slug order by slug) from public.agents where gateway_id = v_gateway_id), '[]'));
  end if;
  return jsonb_build_object('code', 'ok', 'wakes', coalesce((
    with listed as (
      select wake.*, agent.slug
        from public.agent_wakes as wake join public.agents as agent on agent.id = wake.agent_id
       where wake.gateway_id = v_gateway_id and (p_agent is null or agent.slug = p_agent or agent.id::text = p_agent)
       order by wake.ended_at is null desc, wake.claimed_at desc limit p_limit
    ), costs as (
      -- One join for all of them: usage has no index by agent, and must not be read once per wake.
      select listed.id, sum(usage.cost_total_usd) as cost_usd
        from listed join public.agent_usage as usage
          on usage.agent_id = listed.agent_id and usage.occurred_at between listed.started_at and coalesce(listed.ended_at, now())
       group by listed.id
    )
    select jsonb_agg(jsonb_build_object('wake_id', listed.id, 'agent', listed.slug, 'path', listed.path, 'state', listed.state,
                       'claimed_at', listed.claimed_at, 'started_at', listed.started_at, 'ended_at', listed.ended_at,
                       'seconds', round(extract(epoch from coalesce(listed.ended_at, now()) - listed.started_at), 1),
                       'exit_code', listed.exit_code, 'error', left(listed.error, 500), 'items', cardinality(listed.item_ids),
                       'cost_usd', costs.cost_usd)
                     order by listed.ended_at is null desc, listed.claimed_at desc)
      from listed left join costs using (id)), '[]'));
end
$$;
comment on function public.list_wakes(uuid, text, text, integer) is
  'The newest wakes of a gateway, or of one of its agents, live ones first, for an operator. cost_usd is what the agent''s rows in agent_usage say of the time between start and end: a run of the same agent outside the wake counts, too; NULL when there is none.';

revoke execute on function public.list_wakes(uuid, text, text, integer) from public, anon, authenticated;
grant execute on function public.list_wakes(uuid, text, text, integer) to service_role;

notify pgrst, 'reload schema';
