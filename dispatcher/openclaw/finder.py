"""Finds the Gateway anew from `openclaw.json`, its `.env` and the environment, as they are at the moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

from dotenv import dotenv_values

from dispatcher.config_sources import MAX_ENV_FILE_BYTES, given
from dispatcher.errors import GatewayBarred
from dispatcher.files import read_regular_file
from dispatcher.openclaw.config_file import Signature, read_config, signature_of
from dispatcher.openclaw.endpoint import Endpoint, find_endpoint


class EndpointFinder:
    """`find` reads the files each time it is asked; `signature` tells cheaply whether they may say something else.

    `is_off`: the operator wants no link.
    """

    def __init__(self, candidates: Sequence[Path], environ: Mapping[str, str], *, is_off: bool = False) -> None:
        self._candidates = tuple(candidates)
        self._environ = environ
        self._is_off = is_off

    def find(self) -> Endpoint | None:
        """Where the Gateway is; None when there is none, or no link is wanted. Raises GatewayBarred."""
        if self._is_off:
            return None
        signature = self.signature()
        path = None if signature is None else Path(signature[0])
        return find_endpoint(_read(path), {**_beside(path), **self._environ})

    def signature(self) -> Signature:
        """Another one after each change of `openclaw.json`."""
        return signature_of(self._candidates)


def _read(path: Path | None) -> object:
    try:
        return None if path is None else read_config(path)
    except (OSError, ValueError, RecursionError) as error:
        raise GatewayBarred(f"openclaw.json cannot be read ({type(error).__name__}), which says where it is") from None


def _beside(path: Path | None) -> dict[str, str]:
    """What OpenClaw takes from `.env` in its state directory, beside `openclaw.json`."""
    if path is None:
        return {}
    try:
        content, _ = read_regular_file(path.with_name(".env"), MAX_ENV_FILE_BYTES)
        return given(dotenv_values(stream=StringIO(content.decode("utf-8-sig")), interpolate=False))
    except (OSError, UnicodeError):
        return {}
