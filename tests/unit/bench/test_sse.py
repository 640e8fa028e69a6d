"""Events come out whole, wherever the network cuts them."""

from __future__ import annotations

import pytest

from headstart.bench.sse import EventReader

STREAM = b': ping\n\ndata: {"a": 1}\n\nevent: x\ndata:two\r\ndata: lines\r\n\r\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_whole_however_the_bytes_are_cut(size: int) -> None:
    reader = EventReader()
    found = []
    for start in range(0, len(STREAM), size):
        found += reader.feed(STREAM[start : start + size])
    assert found == EVENTS


def test_an_event_without_its_blank_line_is_not_given() -> None:
    reader = EventReader()
    assert reader.feed(b"data: half\n") == []
    assert reader.feed(b"\n") == [b"half"]
