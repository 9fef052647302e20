"""One URL laid out like a Supabase project's: /rest/v1, /realtime/v1, /functions/v1; and fault switches."""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from dispatcher.local.fast_rest import FastRest, Pool
from dispatcher.local.keys import Keys
from dispatcher.local.realtime.faults import Faults
from dispatcher.local.realtime.server import RealtimeServer
from dispatcher.local.rest_faults import RestFaults

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REST = "/rest/v1"
# What one hop says to the next; the rest belongs to the two ends.
_HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host"}
)
_WHOLE_BODY_LIMIT = 1 << 20
_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost"})
_NO_KEY = {
    "message": "No API key found in request",
    "hint": "No `apikey` request header or url param was found.",
}
_BAD_KEY = {
    "message": "Invalid API key",
    "hint": "Double check your Supabase `anon` or `service_role` API key.",
}
_BAD_UPSTREAM = {"message": "An invalid response was received from the upstream server"}


class KeyRing:
    """Which keys open the project, and the JWT each stands for behind the gateway."""

    def __init__(self, keys: Keys) -> None:
        self._service_jwt = keys.service_role_key
        self._jwt_of = {
            keys.anon_key: keys.anon_key,
            keys.service_role_key: keys.service_role_key,
            keys.publishable_key: keys.anon_key,
            keys.secret_key: keys.service_role_key,
        }

    def jwt_for(self, key: str) -> str | None:
        """The JWT behind a key of this project, None for any other."""
        for known, token in self._jwt_of.items():
            if hmac.compare_digest(known.encode(), key.encode()):
                return token
        return None

    def is_service_key(self, key: str | None) -> bool:
        """Whether this key, of either style, may do everything."""
        return key is not None and self.jwt_for(key) == self._service_jwt

    def authorization_for(self, api_key: str | None, authorization: str | None) -> str | None:
        """The Authorization header to pass on; None means refuse.

        A key alone speaks for itself, a bearer token of the caller's own goes on as it is (PostgREST judges
        it), and a new-style key in its place is swapped.
        """
        if api_key is None:
            return self._swapped(authorization)
        token = self.jwt_for(api_key)
        if token is None:
            return None
        return self._swapped(authorization) or f"Bearer {token}"

    def _swapped(self, authorization: str | None) -> str | None:
        if not authorization:
            return None
        scheme, _, bearer = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return authorization
        known = self.jwt_for(bearer)
        if known is None and bearer.startswith("sb_"):
            return None
        return f"Bearer {known or bearer}"


class Gateway:
    """The HTTP front. Lives in one asyncio loop; `start` and `close` are called in it."""

    def __init__(
        self,
        keys: Keys,
        rest_url: str,
        realtime: RealtimeServer,
        *,
        realtime_faults: Faults,
        rest_faults: RestFaults,
        status: Callable[[], Mapping[str, object]],
    ) -> None:
        self._ring = KeyRing(keys)
        self._rest_url = URL(rest_url)
        self._realtime = realtime
        self._realtime_faults = realtime_faults
        self._rest_faults = rest_faults
        self._status = status
        self._pool = Pool(self._rest_url.host or "127.0.0.1", self._rest_url.port or 80)
        self._clients: set[FastRest] = set()
        self._listener: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self, port: int) -> int:
        """Listen on 127.0.0.1; the port, which the system chose for 0. Raises OSError when it is taken."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )
        self._runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connection, "127.0.0.1", port, reuse_address=True)
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and cut what is under way."""
        if self._listener is not None:
            self._listener.close()
        self._pool.close()
        for client in list(self._clients):
            client.break_off()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    def _connection(self) -> FastRest:
        """A client's connection begins on the fast way and goes on to aiohttp when it wants more."""
        assert self._runner is not None
        assert self._runner.server is not None
        return FastRest(
            self._pool,
            self._ring.authorization_for,
            lambda: self._rest_faults.idle,
            self._runner.server,
            self._clients,
        )

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", REST + "/{path:.*}", self._rest)
        application.router.add_get("/realtime/v1/websocket", self._websocket)
        application.router.add_get("/socket/websocket", self._websocket)
        application.router.add_route("*", "/functions/v1/{path:.*}", _functions_not_started)
        application.router.add_post("/__local/faults", _for_programs_here(self._set_faults))
        application.router.add_get("/__local/faults", _for_programs_here(self._get_faults))
        application.router.add_get("/__local/status", _for_programs_here(self._get_status))
        return application

    async def _rest(self, request: web.Request) -> web.StreamResponse:
        fault = self._rest_faults.take(request.path)
        if fault.delay:
            await asyncio.sleep(fault.delay)
        if fault.cut:
            return _cut(request)
        if fault.answer:
            text = fault.answer.raw or json.dumps(fault.answer.body)
            return web.Response(text=text, status=fault.answer.status, content_type="application/json")
        response = await self._authorised(request)
        if fault.lose_reply and isinstance(response, aiohttp.ClientResponse):
            response.close()
            return _cut(request)
        return await _deliver(request, response)

    async def _authorised(self, request: web.Request) -> "web.Response | aiohttp.ClientResponse":
        headers = _passed_on(request.headers)
        query_key = request.query.get("apikey") if "apikey" in request.query_string else None
        api_key = request.headers.get("apikey") or query_key
        authorization = request.headers.get("Authorization")
        if request.method != "OPTIONS":
            bearer = self._ring.authorization_for(api_key, authorization)
            if bearer is None:
                refusal = _BAD_KEY if api_key or authorization else _NO_KEY
                return web.json_response(refusal, status=HTTPStatus.UNAUTHORIZED)
            headers["Authorization"] = bearer
        return await self._forward(request, headers)

    async def _forward(
        self, request: web.Request, headers: CIMultiDict[str]
    ) -> "web.Response | aiohttp.ClientResponse":
        assert self._session is not None
        body: bytes | aiohttp.StreamReader | None = None
        if request.body_exists:
            small = (request.content_length or _WHOLE_BODY_LIMIT + 1) <= _WHOLE_BODY_LIMIT
            body = await request.read() if small else request.content
        try:
            return await self._session.request(
                request.method, self._upstream(request), headers=headers, data=body, allow_redirects=False
            )
        except aiohttp.ClientError:
            return web.json_response(_BAD_UPSTREAM, status=HTTPStatus.BAD_GATEWAY)

    def _upstream(self, request: web.Request) -> URL:
        path = request.raw_path[len(REST) :]
        return URL(f"{self._rest_url}{path if path.startswith('/') else '/' + path}", encoded=True)

    async def _websocket(self, request: web.Request) -> web.StreamResponse:
        """New-style keys are known here only: the Realtime server sees the JWT they stand for."""
        key = request.query.get("apikey", "")
        token = self._ring.jwt_for(key) if key.startswith("sb_") else None
        if token:
            request = request.clone(rel_url=request.rel_url.update_query(apikey=token))
        return await self._realtime.handle(request)

    async def _set_faults(self, request: web.Request) -> web.Response:
        """JSON like {"realtime": {"silence": true}, "rest": {"down_for": 5}}; answers how all stand."""
        if request.content_type != "application/json" or not self._ring.is_service_key(request.headers.get("apikey")):
            return web.json_response({"message": "JSON, and the service key as apikey"}, status=HTTPStatus.FORBIDDEN)
        try:
            self._apply_faults(await request.json())
        except (ValueError, AttributeError, TypeError) as error:
            return web.json_response({"message": str(error)}, status=HTTPStatus.BAD_REQUEST)
        return await self._get_faults(request)

    def _apply_faults(self, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        switches: dict[str, Faults | RestFaults] = {
            "realtime": self._realtime_faults,
            "rest": self._rest_faults,
        }
        unknown = wanted.keys() - switches.keys()
        if unknown:
            raise ValueError(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(switches)}")
        for part, changes in wanted.items():
            switches[part].update(changes)

    async def _get_faults(self, _: web.Request) -> web.Response:
        state = {"realtime": self._realtime_faults.as_dict(), "rest": self._rest_faults.as_dict()}
        return web.json_response(state)

    async def _get_status(self, _: web.Request) -> web.Response:
        status = await asyncio.to_thread(self._status)
        return web.json_response(status, dumps=lambda value: json.dumps(value, default=str))


def _for_programs_here(handler: Handler) -> Handler:
    """Not for web pages: those of another origin name it, those behind a name that leads here name that as host."""

    async def handle(request: web.Request) -> web.StreamResponse:
        is_ours = request.remote == "127.0.0.1" and (request.url.host or "") in _LOOPBACK_HOSTS
        if not is_ours or "Origin" in request.headers:
            return web.json_response({"message": "for programs of this machine only"}, status=HTTPStatus.FORBIDDEN)
        return await handler(request)

    return handle


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP_HEADERS)


def _cut(request: web.Request) -> web.Response:
    """Break the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def _deliver(request: web.Request, upstream: "web.Response | aiohttp.ClientResponse") -> web.StreamResponse:
    if isinstance(upstream, web.Response):
        return upstream
    async with upstream:
        headers = _passed_on(upstream.headers)
        if (upstream.content_length or 0) <= _WHOLE_BODY_LIMIT and request.method != "HEAD":
            headers.popall("Content-Length", None)
            return web.Response(status=upstream.status, headers=headers, body=await upstream.read())
        return await _stream(request, upstream, headers)


async def _stream(
    request: web.Request, upstream: aiohttp.ClientResponse, headers: CIMultiDict[str]
) -> web.StreamResponse:
    response = web.StreamResponse(status=upstream.status, headers=headers)
    await response.prepare(request)
    async for chunk in upstream.content.iter_any():
        await response.write(chunk)
    await response.write_eof()
    return response


async def _functions_not_started(_: web.Request) -> web.Response:
    answer = {"code": "BOOT_ERROR", "message": "not started"}
    return web.json_response(answer, status=HTTPStatus.SERVICE_UNAVAILABLE)
