#!/usr/bin/env python3
"""What an agent does with workflow runs: poll, claim, heartbeat, complete, fail, release, usage; and stats.

    agent_workflow_client.py poll [--limit 3] [--agent A | --all]
    agent_workflow_client.py claim RUN --session S [--agent A]   (says with which --claim to go on)
    agent_workflow_client.py heartbeat RUN --session S       (every 5 minutes; the first one starts the run)
    agent_workflow_client.py complete RUN --session S [--output JSON] [--cost-usd N --input-tokens N --output-tokens N]
    agent_workflow_client.py fail RUN --session S --error TEXT
    agent_workflow_client.py release RUN --session S
    agent_workflow_client.py usage RUN --session S [--cost-usd N --input-tokens N --output-tokens N]   (also later)
    agent_workflow_client.py stats

Cost and tokens are what the run has used so far, in all: a later figure replaces an earlier one, and the answer says
what that booked. `usage` corrects them at any time, also when the run is over or the claim is lost. A run that is
paused keeps its `complete` or `fail`: it ends that way when it goes on.

One session name may serve several attempts. --claim, as `claim` prints it, says for which of them a command is;
a command for one that is over changes nothing (exit 3). Without it a command is for the claim of its own wake, or for
the only claim its session has left open.

Text for people, one JSON document with --json. Exit 0 done (or done before) · 1 the service failed · 2 wrong usage,
missing settings or a refused key (on stderr) · 3 not yours: for another agent, claimed by another, or the claim is
lost: stop working on it · 4 no such run.

Settings as for the other commands here, and like them poll and claim speak for the agent of the workspace they lie in
(AGENT_SLUG and --agent come first); outside of one they speak for any. With DASHBOARD_API_BASE set the HTTP API under
it is asked instead of PostgREST (with DASHBOARD_API_TOKEN, else SUPABASE_SERVICE_ROLE_KEY). Standard library only,
Python 3.9+.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import hq_client
import hq_command
from hq_client import HqClient, KeyRefusedError, ServiceError
from hq_command import FAILED, OK, USAGE
from hq_lease_book import LeaseBook
from hq_network import Request, UnreachableError, exchange
from hq_settings import Settings, UsageError, is_uuid, load_settings, own_workspace

NOT_YOURS, NO_SUCH_RUN = 3, 4
Document = dict[str, Any]
REFUSALS: Mapping[str, str] = {
    "not_yours": "this run is not yours: it is held by another session, or your claim was lost. Stop working on it.",
    "claimed_by_another": "another session has claimed this run.",
    "finished": "this run is over. Stop working on it.",
    "held": "this run is paused or waits for an approval. Leave it; it is still yours when it goes on.",
    "not_dispatched": "this run waits in the queue and is nobody's to claim yet.",
    "not_found": "there is no such run.",
    "bad_session": "--session must be 1 to 500 characters.",
    "unknown_claim": "this claim is not known here: it was made elsewhere or long ago. Stop working on it.",
    "shared_claim": "this session has claimed the run more than once: say with --claim which claim this is for.",
    "busy": "another session holds this run at the moment. Nothing was changed; try again.",
}
ENDING = frozenset({"complete", "fail", "release"})
# A call that met a held run has waited two seconds in the database already.
BUSY_ATTEMPTS = 3

NOTHING_WAITS = "No run waits to be claimed."
# What the database keeps: numeric(12, 6) of a cost, and tokens below 10^15. More than that it would leave out unsaid.
MOST_USD, MOST_TOKENS = 1_000_000, 10**15 - 1
# So many digits of a claim's token name it: enough among the claims of one run, and no secret.
CLAIM_LENGTH = 8
USAGE_FIELDS = ("cost_usd", "input_tokens", "output_tokens", "cached_tokens", "model")


# ------------------------------------------------------------------------------------------------ the service


class DatabaseService:
    """The functions of the database, over PostgREST."""

    def __init__(self, settings: Settings) -> None:
        self._client = HqClient(settings)
        self._tenant = settings.tenant_id

    def poll(self, agent: str | None, limit: int) -> Document:
        return self._call("poll_workflow_runs", p_agent=agent, p_limit=limit)

    def stats(self) -> Document:
        return self._call("workflow_stats")

    def act(self, verb: str, run_id: str, facts: Document) -> Document:
        """One of claim, heartbeat, complete, fail, release, with what is said about it."""
        arguments = {f"p_{name}": value for name, value in facts.items() if value is not None}
        function = "report_workflow_usage" if verb == "usage" else f"{verb}_workflow_run"
        return self._call(function, p_run_id=run_id, **arguments)

    def _call(self, function: str, **arguments: Any) -> Document:
        answer: Document = self._client.call(function, {"p_tenant_id": self._tenant, **arguments})
        return answer


class HttpService:
    """The HTTP API of the project: thin functions in front of the same ones in the database."""

    def __init__(self, settings: Settings, base: str) -> None:
        self._settings = settings
        self._base = base.rstrip("/")
        target = urlsplit(self._base)
        if target.scheme not in ("http", "https") or not target.hostname:
            raise UsageError("DASHBOARD_API_BASE must begin with http:// or https:// and name a host")

    def poll(self, agent: str | None, limit: int) -> Document:
        query = urlencode({"limit": limit, **({"agent": agent} if agent else {})})
        return self._repeated("GET", f"/workflow-runs/pending?{query}", None)

    def stats(self) -> Document:
        return self._repeated("GET", "/workflow-runs/dispatcher/stats", None)

    def act(self, verb: str, run_id: str, facts: Document) -> Document:
        """One of claim, heartbeat, complete, fail, release, usage, with what is said about it."""
        body = {name: value for name, value in facts.items() if value is not None}
        return self._repeated("POST", f"/workflow-runs/{quote(run_id)}/{verb}", body)

    def _repeated(self, method: str, path: str, body: Document | None) -> Document:
        """Every call here is safe to repeat: a session's second claim or end is answered `already`."""
        for attempt in range(1, hq_client.ATTEMPTS + 1):
            try:
                return self._once(method, path, body)
            except ServiceError as fault:
                if attempt == hq_client.ATTEMPTS or not fault.retryable:
                    raise
                time.sleep(random.uniform(0.5, 1.0) * 0.25 * 2**attempt)  # noqa: S311 - spreads load, keeps no secret
        raise AssertionError("the last attempt returns or raises")

    def _once(self, method: str, path: str, body: Document | None) -> Document:
        content = None if body is None else json.dumps(hq_client.clean(body), allow_nan=False).encode("ascii")
        try:
            status, answer = exchange(self._settings, Request(self._base, method, path, content, self._headers()))
        except UnreachableError as error:
            text = f"the API did not answer: {error}".replace(self._settings.key, "***")
            raise ServiceError(text, "unreachable", retryable=error.retryable) from None
        return self._document(status, answer)

    def _headers(self) -> dict[str, str]:
        key = self._settings.key
        headers = {"apikey": key, "Content-Type": "application/json", "Accept": "application/json"}
        return headers if key.startswith("sb_") else {**headers, "Authorization": f"Bearer {key}"}

    def _document(self, status: int, answer: bytes) -> Document:
        document: Document = hq_client.parsed(answer) if answer.startswith(b"{") else {}
        if status in (200, 201):
            return document
        if status == http.client.NOT_FOUND:
            return {**document, "applied": False, "code": "not_found"}
        if status == http.client.CONFLICT:
            return {**document, "applied": False, "code": document.get("code") or "not_yours"}
        if status == http.client.UNAUTHORIZED:
            said = document.get("message") or document.get("error") or "HTTP 401"
            raise KeyRefusedError(f"the API refused the token: {said}".replace(self._settings.key, "***"))
        said = document.get("message") or document.get("error") or "the API refused the call"
        retryable = status in hq_client.RETRYABLE_STATUS
        raise ServiceError(f"{said} (HTTP {status})".replace(self._settings.key, "***"), retryable=retryable)


# ------------------------------------------------------------------------------------------------ the commands


class Client:
    """The commands, each an exit code."""

    def __init__(self, settings: Settings, arguments: argparse.Namespace) -> None:
        base = os.environ.get("DASHBOARD_API_BASE", "").strip()
        self._service = HttpService(settings, base) if base else DatabaseService(settings)
        self._arguments = arguments
        self._agent = arguments.agent or known_agent(settings)
        self._wake = settings.wake_id if is_uuid(settings.wake_id or "") else None
        book = f"runs-{self._agent or 'any'}"
        self._book = LeaseBook(settings.state_folders, book, self._wake)
        self._anywhere = LeaseBook(settings.state_folders, book)
        self._claims = LeaseBook(settings.state_folders, f"claims-{self._agent or 'any'}")

    def poll(self) -> int:
        if self._arguments.all and self._arguments.agent:
            raise UsageError("--all shows the runs of every agent: leave --agent out")
        agent = None if self._arguments.all else self._agent
        answer = self._service.poll(agent, self._arguments.limit)
        return self._say(answer, poll_text(answer, agent))

    def stats(self) -> int:
        answer = self._service.stats()
        return self._say(answer, stats_text(answer))

    def claim(self) -> int:
        facts = {"session": self._arguments.session, "agent": self._agent, "wake_id": self._wake}
        answer = self._ask("claim", facts)
        if answer.get("applied") and is_uuid(str(answer.get("claim_token"))):
            self._keep(str(answer["claim_token"]))
            answer["claim"] = str(answer["claim_token"])[:CLAIM_LENGTH]
        return self._end(answer, claim_text, self._of_another_agent(answer))

    def _keep(self, token: str) -> None:
        """Note the claim for the commands that follow, in the book of its wake and under its own name."""
        # Best effort: without the note the session alone is the fence.
        with contextlib.suppress(OSError):
            self._book.remember({self._name(): token})
            self._claims.remember({self._name(token): token})

    def heartbeat(self) -> int:
        return self._act("heartbeat", heartbeat_text, usage=usage_of(self._arguments))

    def complete(self) -> int:
        usage = usage_of(self._arguments)
        return self._act("complete", end_text, output=self._arguments.output, usage=usage)

    def fail(self) -> int:
        return self._act("fail", end_text, error=self._arguments.error, usage=usage_of(self._arguments))

    def release(self) -> int:
        return self._act("release", end_text)

    def usage(self) -> int:
        said = usage_of(self._arguments)
        if not any(name in (said or {}) for name in ("cost_usd", "input_tokens", "output_tokens")):
            raise UsageError("say what it has used: --cost-usd, --input-tokens or --output-tokens")
        return self._act("usage", usage_text, usage=said)

    def _of_another_agent(self, answer: Document) -> str | None:
        """Why a claim was refused, where the run is for another agent than we are."""
        owner = (answer.get("run") or {}).get("owner_agent_id")
        if answer.get("code") != "not_yours" or not self._agent or not owner or owner == self._agent:
            return None
        return f"this run is for the agent {owner}, and you are {self._agent}. Leave it."

    def _name(self, token: str = "") -> str:
        """Under which claims of this session stand in the book; with a token, or its first digits, that one claim."""
        return f"{self._arguments.run_id}:{self._arguments.session}:{token[:CLAIM_LENGTH].lower()}"

    def _token(self) -> str | None:
        """The fence of the attempt this command is for; None where nothing is noted or several may be meant."""
        if self._arguments.claim is not None:
            return self._claims.token(self._name(self._arguments.claim))
        return self._book.token(self._name()) or self._anywhere.token(self._name())

    def _act(self, verb: str, text: Callable[[Document], str], **facts: Any) -> int:
        token = self._token()
        if token is None and (self._arguments.claim is not None or self._anywhere.is_shared(self._name())):
            code = "shared_claim" if self._arguments.claim is None else "unknown_claim"
            return self._end({"applied": False, "code": code, "run_id": self._arguments.run_id}, text)
        answer = self._ask(verb, {**facts, "session": self._arguments.session, "claim_token": token})
        if token is not None and answer.get("applied") and verb in ENDING:
            with contextlib.suppress(OSError):
                self._book.close(token)
        return self._end(answer, text)

    def _ask(self, verb: str, facts: Document) -> Document:
        """The answer; asked again while another session holds the run."""
        for attempt in range(1, BUSY_ATTEMPTS + 1):
            answer: Document = self._service.act(verb, self._arguments.run_id, facts)
            if answer.get("code") != "busy" or attempt == BUSY_ATTEMPTS:
                return answer
        raise AssertionError("the last attempt returns")

    def _end(self, answer: Document, text: Callable[[Document], str], refusal: str | None = None) -> int:
        shown = {name: value for name, value in answer.items() if name != "claim_token"}
        if answer.get("applied") or (self._arguments.command == "usage" and answer.get("usage_booked")):
            return self._say({**shown, "repeated": answer.get("code") == "already"}, text(answer))
        code = str(answer.get("code") or "not_yours")
        words = refusal or REFUSALS.get(code, f"refused: {code}")
        self._say({**shown, "error": words}, f"{words} (run {self._arguments.run_id}, {state_of(answer)})")
        return {"not_found": NO_SUCH_RUN, "bad_session": USAGE, "busy": FAILED}.get(code, NOT_YOURS)

    def _say(self, document: Document, text: str) -> int:
        if self._arguments.json:
            hq_command.emit(document)
        else:
            print_text(text)
        return OK


def known_agent(settings: Settings) -> str | None:
    """Who we are, where something says so: AGENT_SLUG, or the workspace we lie in. The working folder says nothing."""
    told = os.environ.get("AGENT_SLUG", "").strip() or own_workspace() is not None
    return settings.agent if told else None


def claim_name(text: str) -> str:
    """An argparse type: the first digits of a claim's token, or all of it."""
    if not re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F-]{27})?", text):
        raise argparse.ArgumentTypeError(f"must be the 8 digits that `claim` printed: {text!r}")
    return text


def usage_of(arguments: argparse.Namespace) -> Document | None:
    """What was said of cost and tokens; None when nothing was."""
    said = {name: getattr(arguments, name) for name in USAGE_FIELDS}
    return {name: value for name, value in said.items() if value is not None} or None


# ------------------------------------------------------------------------------------------------ texts


def print_text(text: str) -> None:
    """Text in UTF-8 whatever the locale."""
    hq_command.require_output()
    try:
        sys.stdout.buffer.write((hq_command.steerless(text) + "\n").encode("utf-8"))
        sys.stdout.buffer.flush()
    except (OSError, ValueError) as error:
        hq_command.silence_stdout()
        raise hq_command.OutputClosedError(f"stdout cannot be written: {error}") from None


def state_of(answer: Document) -> str:
    """The state the answer shows."""
    return str(answer.get("status") or "unknown")


def poll_text(answer: Document, agent: str | None) -> str:
    """One line per run."""
    lines = [
        f"{run['id']}  {run['workflow_type']}  for {run['owner_agent_id']}, attempt {run['dispatch_attempts']}"
        for run in answer["runs"]
    ]
    # The slug may be that of a folder with another name than the agent: then this is where it shows.
    nothing = f"No run waits to be claimed by {agent}; --all shows those of every agent." if agent else NOTHING_WAITS
    return "\n".join(lines) or nothing


def claim_text(answer: Document) -> str:
    """The run with its input, and what to do now."""
    run = answer["run"]
    seconds = answer.get("deadline_in")
    how_long = "" if seconds is None else f", for {max(0, round(float(seconds) / 60))} minutes"
    return (
        f"Run {run['id']} ({run['workflow_type']}) is yours{how_long}.\n"
        f"Input: {hq_command.json_text(run['input_payload'])}\n"
        f"Send a heartbeat now and every 5 minutes, with --session {run['session_id']}"
        f"{' --claim ' + answer['claim'] if answer.get('claim') else ''}; then complete or fail it."
    )


def heartbeat_text(answer: Document) -> str:
    """The state, and the input for who takes over."""
    run = answer["run"]
    return f"Run {run['id']} is {run['status']}.\nInput: {hq_command.json_text(run['input_payload'])}"


def end_text(answer: Document) -> str:
    """How it stands after the command."""
    if answer.get("code") == "kept":
        return f"Run {answer['run_id']} is {answer['status']}: its end is kept, and applied when it goes on."
    again = " (already)" if answer.get("code") == "already" else ""
    ignored = " Another cost is booked for it: correct that with `usage`." if answer.get("usage_ignored") else ""
    return f"Run {answer['run_id']} is {answer['status']}{again}.{ignored}"


def usage_text(answer: Document) -> str:
    """What the report added to the books, or took from them."""
    booked = answer.get("booked") or {}
    cost, tokens = float(booked.get("cost_usd") or 0), int(booked.get("tokens") or 0)
    return f"Run {answer['run_id']}: booked {cost:+.6g} USD and {tokens:+d} tokens."


def stats_text(answer: Document) -> str:
    """Runs by status and by type."""
    counts = ", ".join(f"{number} {status}" for status, number in sorted(answer["by_status"].items()))
    lines = [f"Runs: {counts or 'none'}"]
    for row in answer["by_type"]:
        route = f"{row['agent_id']}, at most {row['max_concurrent']}" if row["agent_id"] else "no route"
        lines.append(f"  {row['workflow_type']} ({route}): {row['queued']} queued, {row['active']} active")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ arguments


def json_value(text: str) -> Any:
    """An argparse type: a JSON value that reaches the database as it is."""
    try:
        value = json.loads(text, parse_constant=json_number, parse_float=json_number)
        nul = holds_nul(value)
    except ValueError:
        raise argparse.ArgumentTypeError("not JSON") from None
    except RecursionError:
        raise argparse.ArgumentTypeError("nested too deeply") from None
    if nul:
        raise argparse.ArgumentTypeError("holds the character \\u0000, which no database keeps")
    return value


def json_number(text: str) -> float:
    """A number of a JSON text; NaN and Infinity are none, and would be kept as null."""
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is no number JSON knows, or too large")
    return number


def holds_nul(value: Any) -> bool:
    """Whether a text anywhere in a JSON value holds NUL."""
    if isinstance(value, str):
        return "\x00" in value
    if isinstance(value, dict):
        return any(holds_nul(part) for part in (*value.keys(), *value.values()))
    return isinstance(value, list) and any(map(holds_nul, value))


def cost(text: str) -> float:
    """An argparse type: what the database can keep as a cost."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a number: {text!r}") from None
    # Rounded as the database rounds it, so that 999999.9999999 is too much here and not an error there.
    if not math.isfinite(number) or number < 0 or round(number, 6) >= MOST_USD:
        raise argparse.ArgumentTypeError(f"must be 0 or more and below {MOST_USD}: {text!r}")
    return number


def session_name(text: str) -> str:
    """An argparse type: a session's name, on one line."""
    if not 1 <= len(text.strip()) <= 500 or re.search(r"[\x00-\x1f\x7f]", text):
        raise argparse.ArgumentTypeError("must be 1 to 500 characters on one line")
    return text


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="one JSON document instead of text")
    shared.add_argument(
        "--agent", type=hq_command.some_text, help="the agent's slug; default: AGENT_SLUG, else that of the workspace"
    )
    run = argparse.ArgumentParser(add_help=False, parents=[shared])
    run.add_argument("run_id", type=hq_command.item_id, help="id of the run")
    run.add_argument("--session", required=True, type=session_name, help="the session that works on it")
    held = argparse.ArgumentParser(add_help=False, parents=[run])
    held.add_argument(
        "--claim", type=claim_name, help="the claim it is for, as `claim` printed it; default: the latest"
    )
    usage = argparse.ArgumentParser(add_help=False, parents=[held])
    usage.add_argument("--cost-usd", type=cost, help="what it has cost so far, in all")
    for kind in ("input", "output", "cached"):
        usage.add_argument(
            f"--{kind}-tokens", type=hq_command.whole_number(0, MOST_TOKENS), help="tokens so far, in all"
        )
    usage.add_argument("--model", type=hq_command.some_text, help="the model that was used")

    main_parser = argparse.ArgumentParser(description="What an agent does with workflow runs.")
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    poll = commands.add_parser("poll", parents=[shared], help="runs that wait to be claimed")
    poll.add_argument("--limit", type=hq_command.whole_number(1, 100), default=3)
    poll.add_argument("--all", action="store_true", help="those of every agent, whoever you are")
    commands.add_parser("claim", parents=[run], help="take a run")
    commands.add_parser("heartbeat", parents=[usage], help="say that it is being worked on; every 5 minutes")
    complete = commands.add_parser("complete", parents=[usage], help="it is done")
    complete.add_argument("--output", type=json_value, help="what came of it, as JSON")
    fail = commands.add_parser("fail", parents=[usage], help="it cannot be done")
    fail.add_argument("--error", required=True, type=hq_command.some_text, help="why")
    commands.add_parser("release", parents=[held], help="give it back to the queue")
    commands.add_parser("usage", parents=[usage], help="what it has used in all; also when it is over")
    commands.add_parser("stats", parents=[shared], help="the queue as a whole")
    return main_parser


def environment() -> dict[str, str]:
    """The settings to look in: with an HTTP API, its address and token stand for those of the database."""
    found = dict(os.environ)
    if found.get("DASHBOARD_API_BASE", "").strip():
        found.setdefault("SUPABASE_URL", found["DASHBOARD_API_BASE"])
        if found.get("DASHBOARD_API_TOKEN", "").strip():
            found["SUPABASE_SERVICE_ROLE_KEY"] = found["DASHBOARD_API_TOKEN"]
    return found


def main() -> int:
    """Run one command; its exit code. Every expected fault is said in words instead of a traceback."""
    signal.signal(signal.SIGTERM, hq_command.stop)
    arguments = parser().parse_args()
    try:
        client = Client(load_settings(environment()), arguments)
        return int(getattr(client, arguments.command)())
    except (UsageError, KeyRefusedError) as fault:
        return hq_command.complain(str(fault), USAGE)
    except ServiceError as fault:
        return service_failed(fault, arguments.json)
    except hq_command.OutputClosedError as closed:
        return hq_command.complain(str(closed), FAILED)
    except (KeyboardInterrupt, hq_command.Stopped):
        return hq_command.complain("stopped", 128 + signal.SIGTERM)


def service_failed(fault: ServiceError, as_json: bool) -> int:
    """Say that the service failed, where the caller looks for it."""
    if as_json:
        return hq_command.say_failure({"error": str(fault), "code": fault.code})
    return hq_command.complain(str(fault), FAILED)


if __name__ == "__main__":
    sys.exit(main())
