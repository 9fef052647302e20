"""A stand-in for `openclaw`: does what the file beside it says and logs what it saw. `stub.py` makes one.

Its start is part of measured wake latency, so it runs as `python -S -I`, imports next to nothing and writes
its first log line before it reads its orders. Beside the executable E lie `E.orders.json` and `E.log.jsonl`.

Orders, all optional. `agents` overrides them for single agent ids: {"agents": {"hq/ada": {"mode": "hang"}}}.

    mode       ok      leases the agent's items through `rest` and closes them, if there is one (default)
               hang    never ends by itself
               fork    starts a grandchild that ignores SIGTERM and never ends, then does as `parent` says
               chatty  writes `bytes` bytes to stdout and to stderr
               read    reads stdin to its end
               exit    only ends
    seconds    how long it takes before it ends, in every mode but hang (0)
    exit_code  what it ends with (0)
    says       a text it prints before it ends
    outcome    done, failed, released, or leased to leave the items as they are (done)
    limit      how many items it takes at most (100)
    parent     of a grandchild: hang or exit (hang)
    escape     true puts the grandchild in a session of its own
    deaf       true ignores SIGTERM
    bytes      for chatty (1000000)
    sessions   what `sessions --all-agents --json` prints ([])
    rest       {"url": base URL, "key": service key, "tenant_id": uuid}
"""

# `json` and `socket` are made of the first two; importing them whole would double the time to start.
import _json
import _socket
import os
import sys
import time

Orders = dict[str, object]


class _AsJsonDoes:
    """How the scanner is to read, in the terms of `json.JSONDecoder`."""

    strict = False
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: dict[str, str] = {}  # noqa: RUF012 - the scanner's own scratch space


_scan = _json.make_scanner(_AsJsonDoes())  # type: ignore[arg-type]  # typeshed knows no decoder-like argument


def parse(text: str) -> object:
    """The value of a JSON text."""
    value: object = _scan(text.strip(), 0)[0]
    return value


def render(value: object) -> str:
    """JSON text of what this program logs and sends: texts, numbers, lists, dicts."""
    if isinstance(value, str):
        return _json.encode_basestring_ascii(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{render(key)}:{render(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(render, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def append(path: str, **facts: object) -> None:
    """Write one line at once, so that lines of several agents never mix."""
    line = render({"at": time.time(), "pid": os.getpid(), **facts}) + "\n"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(log, line.encode())
    os.close(log)


def option(argv: list[str], name: str) -> str:
    """The value after an option, "" without one."""
    return argv[argv.index(name) + 1] if name in argv[:-1] else ""


def orders_for(path: str, agent: str) -> Orders:
    """The orders in a file, those for this agent laid over those for all."""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - pathlib costs more than all the rest
            orders = parse(file.read())
    except FileNotFoundError:
        return {}
    assert isinstance(orders, dict)
    own = orders.get("agents", {}).get(agent, {})
    return {**orders, **own}


def number(orders: Orders, name: str, default: float = 0) -> float:
    """An order that is a number."""
    value = orders.get(name, default)
    assert isinstance(value, (int, float))
    return value


class Rest:
    """Calls SQL functions through the gateway. HTTP/1.0: one answer per connection, never in chunks."""

    def __init__(self, rest: Orders) -> None:
        host = str(rest["url"]).removeprefix("http://").rstrip("/")
        name, _, port = host.partition(":")
        self._address = (name, int(port or 80))
        self._head = f"Host: {host}\r\napikey: {rest['key']}\r\nContent-Type: application/json\r\n"

    def call(self, function: str, arguments: Orders) -> object:
        """The function's result; raises RuntimeError with the answer when it is refused."""
        body = render(arguments)
        request = f"POST /rest/v1/rpc/{function} HTTP/1.0\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        head, _, answer = self._exchange((request + body).encode()).decode().partition("\r\n\r\n")
        if head.split(" ")[1][0] != "2":
            raise RuntimeError(f"{function}: {head.splitlines()[0]} {answer}")
        return parse(answer) if answer.strip() else None

    def _exchange(self, request: bytes) -> bytes:
        connection = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        try:
            connection.connect(self._address)
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(65536), b""))
        finally:
            connection.close()


def handle_items(orders: Orders, agent: str, log: str) -> None:
    """Lease the agent's items and close each as ordered."""
    rest = orders.get("rest")
    if not isinstance(rest, dict):
        return
    service = Rest(rest)
    tenant = {"p_tenant_id": rest.get("tenant_id", "00000000-0000-0000-0000-000000000000")}
    wanted = {"p_agent_slug": agent.rsplit("/", 1)[-1], "p_limit": int(number(orders, "limit", 100))}
    leased = service.call("lease_inbox_items", tenant | wanted)
    assert isinstance(leased, dict), leased
    for item in leased.get("items", []):
        close_item(service, item, str(orders.get("outcome", "done")), log)


def close_item(service: Rest, item: dict[str, object], outcome: str, log: str) -> None:
    """Close one item, or leave it leased, and log which."""
    verdict: object = None
    if outcome != "leased":
        key = {"p_item_id": item["inbox_item_id"], "p_lease_token": item["lease_token"]}
        reason = "the stub was told so" if outcome == "failed" else None
        verdict = service.call("close_inbox_item", {**key, "p_outcome": outcome, "p_reason": reason})
    append(log, event="item", item_id=item["inbox_item_id"], outcome=outcome, verdict=verdict)


def start_grandchild(orders: Orders, log: str) -> None:
    """A process that no SIGTERM ends, in this group or in a session of its own."""
    if os.fork():
        return
    ignore_sigterm()
    if orders.get("escape"):
        os.setsid()
    append(log, event="grandchild", pgid=os.getpgrp())
    sleep_for_ever()


def ignore_sigterm() -> None:
    """Leave only SIGKILL."""
    import signal  # noqa: PLC0415 - rarely needed, and slow to load

    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def sleep_for_ever() -> None:
    """Never return."""
    while True:
        time.sleep(3600)


def write_much(orders: Orders) -> None:
    """Fill both output streams."""
    block = b"chatter " * 1024
    for stream in (1, 2):
        left = int(number(orders, "bytes", 1_000_000))
        while left > 0:
            left -= os.write(stream, block[:left])


def read_everything(log: str) -> None:
    """Read stdin to its end and log how much there was."""
    total = 0
    while block := os.read(0, 65536):
        total += len(block)
    append(log, event="stdin", bytes=total)


def carry_out(orders: Orders, agent: str, log: str) -> None:
    """What the mode says, then the wait."""
    mode = orders.get("mode", "ok")
    if mode == "ok":
        handle_items(orders, agent, log)
    elif mode == "fork":
        start_grandchild(orders, log)
    elif mode == "chatty":
        write_much(orders)
    elif mode == "read":
        read_everything(log)
    elif mode not in {"hang", "exit"}:
        raise ValueError(f"unknown mode {mode!r}")
    if mode == "hang" or (mode == "fork" and orders.get("parent", "hang") == "hang"):
        sleep_for_ever()
    time.sleep(number(orders, "seconds"))


def stdin_target() -> str:
    """What stdin is connected to, where the system tells."""
    try:
        return os.readlink("/proc/self/fd/0")  # noqa: PTH115 - pathlib costs more than all the rest
    except OSError:
        return ""


def main(executable: str) -> int:
    """Log the call, carry out the orders, log the end."""
    log = f"{executable}.log.jsonl"
    arguments = sys.argv[1:]
    group = {"ppid": os.getppid(), "pgid": os.getpgrp(), "sid": os.getsid(0)}
    append(log, event="start", argv=arguments, **group, stdin=stdin_target(), env=dict(os.environ))
    agent = option(arguments, "--agent")
    orders = orders_for(f"{executable}.orders.json", agent)
    if orders.get("deaf"):
        ignore_sigterm()
    if arguments[:1] == ["sessions"]:
        os.write(1, render(orders.get("sessions", [])).encode() + b"\n")
    else:
        carry_out(orders, agent, log)
    os.write(1, str(orders.get("says", "")).encode())
    code = int(number(orders, "exit_code"))
    append(log, event="end", exit_code=code)
    return code
