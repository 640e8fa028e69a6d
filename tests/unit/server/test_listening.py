"""Options that cannot work are refused; the listener is what the event loop needs."""

from __future__ import annotations

import socket

import pytest

from headstart.engine.engine import Engine
from headstart.errors import ConfigError
from headstart.server.lifecycle import Serving
from headstart.server.options import ServerOptions, is_public, listen


def no_engine() -> Engine:
    raise AssertionError("nothing is loaded in these tests")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"port": 70000}, "--port is 70000"),
        ({"max_n": 0}, "--max-n is 0"),
        ({"drain_seconds": -1.0}, "--drain-seconds is -1"),
        ({"max_queue": -1}, "--max-queue"),
        ({"log_format": "xml"}, "--log-format is 'xml'"),
        ({"served_model_name": ["a", " "]}, "--served-model-name is empty"),
        ({"api_key": [""]}, "--api-key is empty"),
        ({"api_key": ["one "]}, "--api-key begins or ends with a blank"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerOptions(**options)


def test_a_server_is_for_this_machine_only_unless_told() -> None:
    with listen(ServerOptions(port=0)) as listener:
        assert not is_public(listener)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.1", False), ("LOCALHOST", False), ("0x7f.1", False), ("0.0.0.0", True), ("", True)],
)
def test_who_can_reach_a_server_goes_by_its_real_address(host: str, expected: bool) -> None:
    """Regression: `--host LOCALHOST` was taken for public, and a request for any Host answered."""
    options = ServerOptions(host=host, port=0)
    with listen(options) as listener:
        assert is_public(listener) is expected
        assert Serving("model", options, no_engine, listener).state.is_public is expected


@pytest.mark.parametrize("address", ["::1", "::ffff:127.0.0.1", "0:0:0:0:0:0:0:1"])
def test_addresses_of_ipv6_are_known_in_every_spelling(address: str) -> None:
    class Listener:
        def getsockname(self) -> tuple[str, int, int, int]:
            return address, 8000, 0, 0

    assert not is_public(Listener())


def test_the_listener_is_one_that_asyncio_knows_as_tcp() -> None:
    # Without it every streamed event waited 40 ms for the client's acknowledgement.
    with listen(ServerOptions(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP
