"""Options that cannot work are refused; the listener is what the event loop needs."""

from __future__ import annotations

import socket

import pytest

from headstart.errors import ConfigError
from headstart.server.options import ServerOptions, listen


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
        ServerOptions(**options)  # type: ignore[arg-type]


def test_a_server_is_for_this_machine_only_unless_told() -> None:
    assert not ServerOptions().is_public
    assert ServerOptions(host="0.0.0.0").is_public


def test_the_listener_is_one_that_asyncio_knows_as_tcp() -> None:
    # Without it every streamed event waited 40 ms for the client's acknowledgement.
    with listen(ServerOptions(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP
