"""One variable holds the keys of a server and of its clients."""

from __future__ import annotations

import pytest

from headstart.bench.target import Target
from headstart.data.api_keys import API_KEY_VARIABLE, key_from_environment, keys_from_environment
from headstart.distill.options import DistillOptions
from headstart.server.options import ServerOptions


@pytest.mark.parametrize(
    ("value", "keys"),
    [("", ()), (" , ", ()), ("one", ("one",)), ("one, two", ("one", "two")), (",two", ("two",))],
)
def test_a_server_takes_all_and_clients_send_the_first(
    value: str, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `distill` sent all of them as one."""
    monkeypatch.setenv(API_KEY_VARIABLE, value)
    first = keys[0] if keys else None
    assert (keys_from_environment(), key_from_environment()) == (keys, first)
    assert ServerOptions().api_keys == keys
    assert Target(url="http://here").key == DistillOptions(server="http://here").key == first
    assert DistillOptions(server="http://here", api_key="own").key == "own"
