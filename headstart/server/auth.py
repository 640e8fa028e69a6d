"""Who may ask: keys are compared in constant time and never shown; web pages only of one origin."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

from headstart.server.refusals import Refusal

_LOOPBACK = re.compile(r"127(\.\d{1,3}){3}")


class Keys:
    """The keys of a server; without any, everybody may ask."""

    def __init__(self, keys: Sequence[str]):
        self._digests = [_digest(key) for key in keys]

    def check(self, authorization: str | None) -> None:
        """Refusal unless the header holds one of the keys."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise _refused("this server wants an API key: `Authorization: Bearer KEY`.")
        # All are compared, and digests of equal length: time says nothing about any of them.
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise _refused("the API key is not one of this server's.")


def check_site(headers: Mapping[str, str], allowed: Sequence[str]) -> None:
    """Refusal for a web page of another origin, which browsers say.

    CORS keeps such a page from reading the answer; this keeps it from making the model work.
    """
    origin = headers.get("origin")
    is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    if origin is not None:
        is_foreign |= origin.partition("://")[2].lower() != headers.get("host", "").lower()
    if is_foreign and "*" not in allowed and origin not in allowed:
        raise Refusal(
            403, f"pages of {(origin or 'another origin')[:80]} may not ask this server; "
            "--cors-origin allows one.", code="foreign_origin",
        )  # fmt: skip


def check_host(host: str, own: str) -> None:
    """Refusal unless a server for this machine is asked under a name of this machine.

    A page of any name can let that name lead to this machine, and is of the server's own origin
    then.
    """
    name = host.lower() if host.endswith("]") else host.lower().rpartition(":")[0] or host.lower()
    is_own = name in ("", "localhost", "[::1]", own.lower(), f"[{own.lower()}]")
    if not is_own and not _LOOPBACK.fullmatch(name):
        raise Refusal(
            403, f"the Host is {host[:80]!r} and this server is for this machine; ask localhost, "
            "start it with another --host, or with --api-key.", code="foreign_host",
        )  # fmt: skip


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _refused(message: str) -> Refusal:
    return Refusal(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
