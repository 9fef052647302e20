"""The settings: where they come from, what they may be, and every fault at once.

Sources, first one wins: the environment, `.env` in the working directory, `$OPENCLAW_HOME/secrets/gateway.env`; which
of them may set what, `config_sources.py` decides. An empty value counts as unset. Name, unit, range and meaning of each
setting stand in its field, from which `settings_table()` builds the reference page.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import SplitResult, unquote, urlsplit
from uuid import UUID

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from dispatcher.config_sources import DEFAULT_OPENCLAW_HOME, expand_home, gather
from dispatcher.errors import ConfigurationPending, SettingsError
from dispatcher.files import read_regular_file

MAX_SHOWN_VALUE: Final = 80
MAX_AUTHORITIES_BYTES: Final = 8 * 1024 * 1024

_DECIMAL = re.compile(r"[+-]?\d+(\.\d+)?\Z", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+\Z", re.ASCII)
_KEY_LIKE = re.compile(r"eyJ[\w-]{8}|sb_secret_")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)
_BOOLEANS: Final = {
    "true": True, "1": True, "yes": True, "on": True,
    "false": False, "0": False, "no": False, "off": False,
}  # fmt: skip
_BOOLEAN_RANGE: Final = "true or false"
_KEY_RANGE: Final = "a service_role JWT or an sb_secret_… key"


def _setting(
    default: Any = ...,
    *,
    unit: str = "",
    allowed: str,
    meaning: str,
    secret: bool = False,
    from_folder: bool = True,
    **limits: Any,
) -> Any:
    """A field that carries its documentation; `allowed` is also what a fault says.

    `from_folder=False`: it says where secrets go, what is executed or where is written, and is therefore not taken
    from the `.env` of the working directory.
    """
    extra: Any = {"unit": unit, "allowed": allowed, "secret": secret, "from_folder": from_folder}
    return Field(default, description=meaning, json_schema_extra=extra, **limits)


def _seconds(default: float, low: float, high: float, meaning: str) -> Any:
    """A time the daemon itself waits; fractions allowed."""
    return _setting(default, unit="s", allowed=f"{low:g} to {high:g}", meaning=meaning, ge=low, le=high)


def _whole(default: int, low: int, high: int, meaning: str, unit: str = "") -> Any:
    """A number that SQL functions take as an integer."""
    return _setting(default, unit=unit, allowed=f"{low} to {high}, whole", meaning=meaning, ge=low, le=high)


def _plain_decimal(value: object) -> object:
    if isinstance(value, str) and not _DECIMAL.match(value):
        raise ValueError("not a number")
    return value


def _plain_whole(value: object) -> object:
    if isinstance(value, str) and not _WHOLE.match(value):
        raise ValueError("not a whole number")
    return value


def _strict_boolean(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.lower() not in _BOOLEANS:
        raise ValueError("neither true nor false")
    return _BOOLEANS[value.lower()]


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _absolute(path: Path) -> Path:
    try:
        expanded = path.expanduser()
    except RuntimeError as error:
        raise ValueError("its home directory cannot be found") from error
    return Path(os.path.abspath(expanded))  # noqa: PTH100 - resolve() would follow links the operator means to keep


def _comma_list(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _environment_names(names: tuple[str, ...]) -> tuple[str, ...]:
    wrong = [name for name in names if not _NAME.match(name)]
    if wrong:
        raise ValueError(f"not names of environment variables: {', '.join(wrong)}")
    return names


def _one_line(value: str) -> str:
    if not value.isprintable():
        raise ValueError("has control characters")
    if _KEY_LIKE.search(value):
        raise ValueError("this is a key, which nothing should show")
    return value


def _split_url(value: str) -> SplitResult:
    """The parts of a URL; what urllib says of a bad one is not passed on, it may quote a password."""
    fault = ValueError("not a URL with a host")
    try:
        parts = urlsplit(value)
        is_whole = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        raise fault from None
    if not is_whole or any(character.isspace() for character in value):
        raise fault
    return parts


def _project_url(value: str) -> str:
    parts = _split_url(value)
    if parts.scheme not in {"http", "https"}:
        raise ValueError("not http or https")
    if parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("more than scheme and host: give the project's URL without a path, query or user")
    return f"{parts.scheme}://{parts.netloc}"


def _proxy_url(value: str) -> str:
    if _split_url(value).scheme not in {"http", "https", "socks5", "socks5h"}:
        raise ValueError("not an http, https or socks5 URL")
    return value


def _plain_proxy_url(value: str) -> str:
    if _split_url(value).scheme != "http":
        raise ValueError("not an http URL")
    return value


def _authorities(file: Path) -> Path:
    """Read once here, so that a bad one is a fault of the settings and not of the first call."""
    try:
        read_regular_file(file, MAX_AUTHORITIES_BYTES)
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError:
        raise ValueError("no certificate in PEM format is in it") from None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    return file


def jwt_claims(token: str) -> dict[str, object] | None:
    """The payload of a JWT, its signature unchecked; None when `token` is not one."""
    parts = token.split(".")
    if len(parts) != 3 or not all(parts):
        return None
    try:
        payload = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        claims = json.loads(payload)
    except (ValueError, binascii.Error, RecursionError):
        return None
    return claims if isinstance(claims, dict) else None


def _service_key(secret: SecretStr) -> SecretStr:
    key = secret.get_secret_value()
    if key.startswith("sb_publishable_"):
        raise ValueError("this is a publishable key")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("has characters no key has")
    if re.fullmatch(r"sb_secret_\S{8,}", key):
        return secret
    claims = jwt_claims(key)
    if claims is None:
        raise ValueError("neither a JWT nor an sb_secret_… key")
    if claims.get("role") != "service_role":
        raise ValueError(_wrong_role(claims.get("role")))
    return secret


def _wrong_role(role: object) -> str:
    if role == "anon":
        return "this is the anon key"
    shown = role if isinstance(role, str) and _NAME.match(role) else "no known role"
    return f"this JWT is for {shown}, not for service_role"


Seconds = Annotated[float, BeforeValidator(_plain_decimal)]
Whole = Annotated[int, BeforeValidator(_plain_whole)]
Boolean = Annotated[bool, BeforeValidator(_strict_boolean)]
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
OneLine = Annotated[str, AfterValidator(_one_line)]


class Settings(BaseSettings):
    """Everything an operator may set; attributes are the names in lower case. Built by `load_settings`."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    _warnings: tuple[str, ...] = PrivateAttr(())

    # -- whom we work for
    supabase_url: Annotated[str, AfterValidator(_project_url)] = _setting(
        allowed="http(s)://host[:port], no path", meaning="URL of the Supabase project"
    )
    supabase_service_role_key: Annotated[SecretStr, AfterValidator(_service_key)] = _setting(
        allowed=_KEY_RANGE, secret=True, meaning="service key of the project"
    )
    supabase_ca_file: Annotated[AbsolutePath, AfterValidator(_authorities)] | None = _setting(
        None,
        allowed="path of a readable file",
        meaning="certificates of authorities to believe, in PEM format, beside those of the system",
        from_folder=False,
    )
    supabase_proxy: Annotated[str, AfterValidator(_plain_proxy_url)] | None = _setting(
        None,
        allowed="http://[user:password@]host:port",
        secret=True,
        meaning="proxy on the way to the project; the environment's proxies are never used",
        from_folder=False,
    )
    tenant_id: UUID = _setting(
        UUID(int=0),
        allowed="a UUID",
        meaning="tenant whose rows are looked at; every look-up is scoped by it",
    )
    gateway_id: OneLine = _setting(
        allowed="a slug of `gateways`, 1 to 200 characters",
        meaning="gateway this daemon serves; unset or `default`: taken from secrets/gateway.env where that names one",
        min_length=1,
        max_length=200,
    )
    wait_for_config: Boolean = _setting(
        default=False,
        allowed=_BOOLEAN_RANGE,
        meaning="wait for URL, key and gateway to be set, and for the gateway's row, instead of ending with 78",
    )

    # -- openclaw
    openclaw_bin: OneLine = _setting(
        "openclaw",
        allowed="a name on PATH or a path",
        meaning="executable that wakes agents",
        min_length=1,
        from_folder=False,
    )
    openclaw_home: AbsolutePath = _setting(
        DEFAULT_OPENCLAW_HOME,
        allowed="a path",
        meaning="OpenClaw's home; it or its .openclaw folder holds openclaw.json and secrets/",
        validate_default=True,
        from_folder=False,
    )
    openclaw_state_dir: AbsolutePath | None = _setting(
        None,
        allowed="a path",
        meaning="OpenClaw's state directory where it is not under OPENCLAW_HOME",
        from_folder=False,
    )
    openclaw_config_path: AbsolutePath | None = _setting(
        None, allowed="a path", meaning="exact path of openclaw.json", from_folder=False
    )
    gateway_link: Annotated[Literal["auto", "off"], BeforeValidator(_lower)] = _setting(
        "auto",
        allowed="auto or off",
        meaning="hold a connection to OpenClaw's Gateway on this host open; off: its command line is asked, slowly",
    )
    agent_output_dir: AbsolutePath | None = _setting(
        None, allowed="a path", meaning="keep each wake's output there, bounded; unset: discarded", from_folder=False
    )
    agent_env_passthrough: Annotated[
        tuple[str, ...], BeforeValidator(_comma_list), AfterValidator(_environment_names)
    ] = _setting(
        (),
        allowed="names, comma separated",
        meaning="variables handed to agents beyond the allow-list",
        from_folder=False,
    )

    # -- inbox
    reconcile_interval: Seconds = _seconds(120, 0.5, 86_400, "time between sweeps, jittered")
    degraded_reconcile_interval: Seconds = _seconds(
        10, 0.5, 3_600, "time between sweeps while Realtime is not known to be well"
    )
    wake_cooldown: Whole = _whole(
        30, 0, 86_400, "least time between two wakes of one agent; doubles per failure", unit="s"
    )
    max_wake_cooldown: Whole = _whole(900, 0, 604_800, "ceiling of the doubled cooldown", unit="s")
    max_consecutive_failures: Whole = _whole(5, 1, 1_000, "failures in a row after which an agent is stalled")
    max_concurrent_wakes: Whole = _whole(2, 1, 1_000, "live wakes on this gateway")
    agent_process_timeout: Whole = _whole(300, 1, 86_400, "time a woken agent may run", unit="s")
    stale_item_age_hours: Whole = _whole(24, 0, 87_600, "age at which pending items expire; 0: never", unit="h")
    max_wake_chain: Whole = _whole(6, 0, 1_000, "how many agents may wake one another in a row; 0: no limit")
    max_wakes_per_day: Whole = _whole(0, 0, 100_000, "wakes of one agent per day; 0: no limit")
    alert_wakes_per_hour: Whole = _whole(
        60, 0, 100_000, "wakes of one agent in an hour beyond which the operator is told; 0: never"
    )
    lease_seconds: Whole = _whole(120, 30, 3_600, "length of an item's lease and of each renewal", unit="s")

    # -- the daemon itself
    heartbeat_interval: Seconds = _seconds(10, 0.5, 300, "time between heartbeats of this instance")
    instance_timeout: Whole = _whole(45, 2, 3_600, "silence after which an instance counts as gone", unit="s")
    shutdown_grace: Seconds = _seconds(20, 0, 3_600, "time live wakes get to end by themselves at a stop")
    rest_timeout: Seconds = _seconds(10, 0.5, 300, "longest wait for one answer of the database API")
    realtime_mode: Annotated[Literal["auto", "broadcast", "postgres_changes"], BeforeValidator(_lower)] = _setting(
        "auto", allowed="auto, broadcast or postgres_changes", meaning="how new items are heard of"
    )
    realtime_proxy: Annotated[str, AfterValidator(_proxy_url)] | None = _setting(
        None,
        allowed="an http, https or socks5 URL",
        secret=True,
        meaning="proxy for Realtime where it is another than SUPABASE_PROXY",
        from_folder=False,
    )
    heartbeat_file: AbsolutePath | None = _setting(
        None,
        allowed="a path",
        meaning="file the health check reads; unset: `/tmp/openclaw-dispatcher-UID/GATEWAY.PID.json`, private",
        from_folder=False,
    )
    metrics_port: Whole | None = _setting(
        None,
        allowed="1 to 65535",
        meaning="port of /metrics, /livez, /healthz, /readyz; unset: none",
        ge=1,
        le=65_535,
    )
    metrics_host: OneLine = _setting(
        "127.0.0.1",
        allowed="an address",
        meaning="address the metrics port listens on",
        min_length=1,
        from_folder=False,
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = _setting(
        "info", allowed="debug, info, warning or error", meaning="least level that is logged"
    )

    # -- workflows
    workflow_poll_interval: Seconds = _seconds(30, 0.5, 3_600, "time between dispatch passes")
    workflow_batch_size: Whole = _whole(10, 1, 1_000, "runs dispatched per pass")
    stale_dispatch_seconds: Whole = _whole(300, 1, 86_400, "time a dispatched run may stay unclaimed", unit="s")
    max_dispatch_retries: Whole = _whole(3, 0, 100, "further dispatches of an unclaimed run before it fails")
    stale_claim_seconds: Whole = _whole(600, 1, 86_400, "silence after which a claimed run is released", unit="s")
    workflow_cost_estimate_usd: Seconds = _setting(
        0.10,
        unit="USD",
        allowed="0 to 100000",
        meaning="cost of a run whose type has no report yet, and at least that of one that ends without a report",
        ge=0,
        le=100_000,
    )
    workflow_token_estimate: Whole = _whole(20_000, 0, 1_000_000_000, "the same in tokens")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature is pydantic's
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`load_settings` has merged the sources already; nothing else is read."""
        return (init_settings,)

    def with_warnings(self, warnings: Sequence[str]) -> Self:
        """The same settings, which tell of these."""
        self._warnings = tuple(warnings)
        return self

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but deserves a word: a file with the key that other users may read."""
        return self._warnings

    def secret_values(self) -> tuple[str, ...]:
        """The values that must never be printed; for `configure_logging`."""
        passwords = [*_passwords_of(self.supabase_proxy), *_passwords_of(self.realtime_proxy)]
        return (self.supabase_service_role_key.get_secret_value(), *passwords)


def _passwords_of(url: str | None) -> tuple[str, ...]:
    """The password as it stands in the URL and as it is meant."""
    password = urlsplit(url).password if url else None
    return (password, unquote(password)) if password else ()


@dataclass(frozen=True)
class SettingRow:
    """One line of the settings reference; `default` is empty for a required setting."""

    name: str
    default: str
    unit: str
    allowed: str
    meaning: str
    required: bool
    secret: bool


def settings_table() -> list[SettingRow]:
    """Every setting in the order of the class, for the reference page and `dispatcher check`."""
    return [_row(name, field) for name, field in Settings.model_fields.items()]


def not_from_folder() -> frozenset[str]:
    """Names of the settings that the `.env` of the working directory may not set."""
    return frozenset(name.upper() for name, field in Settings.model_fields.items() if not _extra(field)["from_folder"])


def _row(name: str, field: FieldInfo) -> SettingRow:
    extra = _extra(field)
    return SettingRow(
        name=name.upper(),
        default="" if field.is_required() else _printed(field.default),
        unit=str(extra["unit"]),
        allowed=str(extra["allowed"]),
        meaning=field.description or "",
        required=field.is_required(),
        secret=bool(extra["secret"]),
    )


def _printed(default: object) -> str:
    if default is None or default == ():
        return "unset"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


# ---------------------------------------------------------------------------------------------- loading


def load_settings(environ: Mapping[str, str] = os.environ, cwd: Path | None = None) -> Settings:
    """The settings of this process.

    Raises:
        SettingsError: naming every fault with its name, value (never a secret's) and allowed range.
        ConfigurationPending: when nothing is wrong but that URL, key or gateway are missing, and
            `WAIT_FOR_CONFIG` is true.
    """
    found = gather(environ, cwd if cwd is not None else Path.cwd(), not_from_folder())
    values = _known(found.values, environ)
    settings, missing, more = _validate(values)
    faults = [*missing, *found.faults, *more]
    if not faults and settings is not None:
        return settings.with_warnings(found.warnings)
    if len(faults) == len(missing) and _wants_to_wait(values):
        raise ConfigurationPending(faults)
    raise SettingsError(faults)


def _known(values: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The values of our settings by attribute name, `~` expanded."""
    known = {name: values[name.upper()] for name in Settings.model_fields if name.upper() in values}
    return {
        name: str(expand_home(value, environ)) if value.startswith("~") and name != "gateway_id" else value
        for name, value in known.items()
    }


# ---------------------------------------------------------------------------------------------- faults


def _validate(values: Mapping[str, str]) -> tuple[Settings | None, list[str], list[str]]:
    """The settings or None, the required ones that are missing, and every other fault."""
    try:
        settings = Settings(**dict(values))  # type: ignore[arg-type]  # strings in, validated into their types
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
    else:
        return settings, [], _cross_faults(settings)
    names = [(str(problem["loc"][0]), problem["type"], problem["msg"]) for problem in problems]
    missing = [_missing_fault(name) for name, kind, _ in names if kind == "missing"]
    wrong = dict.fromkeys(_fault(name, values, text) for name, kind, text in names if kind != "missing")
    return None, missing, list(wrong)


def _missing_fault(name: str) -> str:
    return f"{name.upper()}: not set; allowed: {_extra(Settings.model_fields[name])['allowed']}"


def _fault(name: str, values: Mapping[str, str], text: str) -> str:
    extra = _extra(Settings.model_fields[name])
    reason = _printable(text.removeprefix("Value error, "))
    shown = "(hidden)" if extra["secret"] else _shown(values[name])
    return f"{name.upper()}={shown}: {_lower_first(reason)}; allowed: {extra['allowed']}"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _shown(value: str) -> str:
    """A value fit for one line; a URL with a user or a query may carry a secret."""
    if "://" in value and ("@" in value or "?" in value):
        return "(hidden)"
    if _KEY_LIKE.search(value):
        return "(hidden)"
    cut = value if len(value) <= MAX_SHOWN_VALUE else value[:MAX_SHOWN_VALUE] + "…"
    return _printable(cut)


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def _cross_faults(settings: Settings) -> list[str]:
    """Values that are each allowed but do not work together."""
    beat = settings.heartbeat_interval
    checks: Iterable[tuple[str, float]] = (
        ("INSTANCE_TIMEOUT", settings.instance_timeout),
        ("LEASE_SECONDS", settings.lease_seconds),
    )
    return [
        f"{name}={value:g}: below twice HEARTBEAT_INTERVAL={beat:g}, so one late beat would lose it; "
        f"allowed: at least {2 * beat:g}"
        for name, value in checks
        if value < 2 * beat
    ]


def _wants_to_wait(values: Mapping[str, str]) -> bool:
    return _BOOLEANS.get(values.get("wait_for_config", "").lower(), False)
