"""Which field of a request an error is about, under the name that the request has for it.

An error names its field where it is raised, if that is known there. A schema does not know whose it
is, and the engine calls some fields otherwise: what is missing is said by whoever calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headstart.errors import ConfigError, RequestError


@contextmanager
def about(field: str | None) -> Iterator[None]:
    """What fails inside is about this field, unless it names one itself."""
    try:
        yield
    except (RequestError, ConfigError) as error:
        error.field = error.field or field
        raise


@contextmanager
def called(names: Mapping[str, str]) -> Iterator[None]:
    """What fails inside names the engine's fields as the request does: `{"prompt": "messages"}`."""
    try:
        yield
    except (RequestError, ConfigError) as error:
        if error.field is not None:
            error.field = names.get(error.field, error.field)
        raise
