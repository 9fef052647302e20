"""The secrets of one embedded Supabase, kept in its directory: made once, so that keys outlive a restart."""

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jwt

_TEN_YEARS = 10 * 365 * 24 * 3600


@dataclass(frozen=True)
class Keys:
    """What the parts share. Only the gateway knows the new-style `publishable_key` and `secret_key`."""

    jwt_secret: str
    database_password: str
    publishable_key: str
    secret_key: str
    issued_at: int

    @classmethod
    def generate(cls) -> "Keys":
        """Fresh random secrets."""
        return cls(
            jwt_secret=secrets.token_hex(32),
            database_password=secrets.token_hex(24),
            publishable_key=f"sb_publishable_{secrets.token_urlsafe(24)}",
            secret_key=f"sb_secret_{secrets.token_urlsafe(24)}",
            issued_at=int(time.time()),
        )

    @property
    def anon_key(self) -> str:
        """The JWT of a visitor."""
        return self._api_key("anon")

    @property
    def service_role_key(self) -> str:
        """The JWT that may do everything."""
        return self._api_key("service_role")

    def token(self, role: str, *, seconds: int = 3600, **claims: object) -> str:
        """A JWT of any role and claims that ends `seconds` from now; a negative number: has ended."""
        now = int(time.time())
        return self._encode({"role": role, "iat": now, "exp": now + seconds, **claims})

    def _api_key(self, role: str) -> str:
        claims = {"iss": "supabase", "ref": "local", "role": role}
        return self._encode(claims | {"iat": self.issued_at, "exp": self.issued_at + _TEN_YEARS})

    def _encode(self, claims: dict[str, object]) -> str:
        return jwt.encode(claims, self.jwt_secret, algorithm="HS256")


def load_keys(directory: Path) -> Keys:
    """The keys of a directory, made on first use. Nobody else on the machine can read the file."""
    path = directory / "keys.json"
    if not path.exists():
        write_private(path, asdict(Keys.generate()))
    return Keys(**json.loads(path.read_text()))


def write_private(path: Path, content: dict[str, object]) -> None:
    """Replace a JSON file as a whole; only the owner may read it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
    draft.replace(path)
