"""Server-sent events out of bytes, as they come: lines may be cut anywhere."""

from __future__ import annotations

DONE = b"[DONE]"


class EventReader:
    """Cuts a stream into the data of its events; comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """The data of every event that is complete now."""
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data.clear()
        return found
