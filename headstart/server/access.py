"""Which clients may use a server: by key, by the origin of a page, by the name that is asked."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import Header, Request
from fastapi.routing import APIRoute
from starlette.routing import Match

from headstart.server.options import ServerOptions
from headstart.server.refusals import Refusal

_LOOPBACK = re.compile(r"127(\.\d{1,3}){3}")


class Access:
    """The check that routes depend on."""

    def __init__(
        self, options: ServerOptions, *, is_public: bool, keys: Sequence[str] | None = None
    ):
        """is_public: other machines can reach the server; keys: those of clients, or of others."""
        keys = options.api_keys if keys is None else keys
        self._keys, self._options = Keys(keys), options
        # With keys any name is accepted: no page has a key.
        self._is_for_this_machine = not is_public and not keys

    async def check(
        self,
        request: Request,
        authorization: Annotated[str | None, Header()] = None,
        x_api_key: Annotated[str | None, Header()] = None,
    ) -> None:
        """Refusal for a client that may not; the routes depend on it."""
        if self._is_for_this_machine:
            check_host(request.headers.get("host", ""), self._options.host)
        check_site(request.headers, self._options.cors_origin or ())
        self._keys.check(key_in(request.headers))


def is_guarded(request: Request, path: str) -> bool:
    """Whether what has this path, under another method, depends on a check; so is all of /v1."""
    routes = (route for route in request.app.routes if isinstance(route, APIRoute))
    found = (r for r in routes if r.matches(request.scope)[0] is not Match.NONE)
    return path.startswith("/v1/") or any(route.dependencies for route in found)


class Keys:
    """The keys of a server; without any, all clients may ask."""

    def __init__(self, keys: Sequence[str]):
        self._digests = [_digest(key) for key in keys]

    def check(self, key: str | None) -> None:
        """Refusal unless it is one of the keys."""
        if not self._digests:
            return
        if key is None:
            raise _refused("this server wants an API key: `Authorization: Bearer KEY`.")
        # All are compared, as digests of equal length: the time taken depends on none of them.
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise _refused("the API key is not one of this server's.")


def salt_of_key(key: str | None, asked: str | None) -> str:
    """A request's own salt behind a digest of its key: keys then share no cached prefix."""
    return f"{_digest(key or '').hex()}:{asked or ''}"


def key_in(headers: Mapping[str, str]) -> str | None:
    """The key that a request brings, as OpenAI's clients send it or as Anthropic's do."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip()
    return headers.get("x-api-key", "").strip() or None


def check_site(headers: Mapping[str, str], allowed: Sequence[str]) -> None:
    """Refusal for a web page of another origin, by the headers that browsers send.

    CORS keeps such a page from reading the answer; this check keeps the model from answering it.
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

    Any domain can be made to resolve to this machine (DNS rebinding); for browsers its pages are
    then of the server's own origin.
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
