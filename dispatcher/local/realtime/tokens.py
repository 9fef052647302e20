"""Checks of JSON web tokens, with the real server's words for each fault."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt

_MALFORMED = "The token provided is not a valid JWT"
_INCOMPLETE = "Fields `role` and `exp` are required in JWT"


@dataclass(frozen=True, slots=True)
class Token:
    """A token that was accepted."""

    text: str
    claims: Mapping[str, Any]

    @property
    def role(self) -> str:
        """The database role it asks for. Whether that role exists is the database's business."""
        return str(self.claims["role"])

    def seconds_left(self) -> float:
        """Until it expires; negative afterwards."""
        return float(self.claims["exp"]) - time.time()


class TokenRefused(Exception):  # noqa: N818 - named for what happened, as in dispatcher.errors
    """Says why, in the three wordings of the protocol: at connect, in a join, in an access_token push."""

    def __init__(self, at_connect: str, in_join: str, in_push: str) -> None:
        super().__init__(at_connect)
        self.at_connect = at_connect
        self.in_join = in_join
        self.in_push = in_push


def own_token(value: object) -> str | None:
    """The token, or None when it is to be ignored in favour of the key that the client connected with."""
    return value if isinstance(value, str) and not value.startswith("sb_") else None


def verify(text: str, secret: str) -> Token:
    """The token, checked for signature (HS256), claims and expiry. Raises `TokenRefused`."""
    claims = _verified_claims(text, secret)
    if not isinstance(claims.get("role"), str) or not isinstance(claims.get("exp"), int | float):
        raise TokenRefused(_INCOMPLETE, f"InvalidJWTToken: {_INCOMPLETE}", _INCOMPLETE)
    token = Token(text, claims)
    if token.seconds_left() <= 0:
        raise expired(token)
    return token


def expired(token: Token) -> TokenRefused:
    """The refusal of a token whose time is over."""
    words = f"Token has expired {int(max(0.0, -token.seconds_left()))} seconds ago"
    return TokenRefused("Token has expired", f"InvalidJWTToken: {words}", words)


def _verified_claims(text: str, secret: str) -> dict[str, Any]:
    try:
        algorithm = jwt.get_unverified_header(text).get("alg")
        jwt.decode(text, options={"verify_signature": False})
    except jwt.InvalidTokenError:
        raise TokenRefused(_MALFORMED, f"MalformedJWT: {_MALFORMED}", _MALFORMED) from None
    if algorithm != "HS256":
        words = "Failed to generate JWT signer, check your JWT secret or JWKS configuration"
        raise TokenRefused(words, f"JwtSignerError: {words}", words)
    try:
        return dict(jwt.decode(text, secret, algorithms=["HS256"], options=_SIGNATURE_ONLY))
    except jwt.InvalidTokenError:
        words = "Failed to validate JWT signature"
        raise TokenRefused(words, f"JwtSignatureError: {words}", ":signature_error") from None


# The claims are checked here, in the real server's order; an audience is none of Realtime's business.
_SIGNATURE_ONLY: Any = {
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
    "verify_aud": False,
    "verify_iss": False,
    "verify_sub": False,
    "verify_jti": False,
}
