"""A head as it is sent to a server: one stream of bytes, in which no file has a name.

Eight bytes say how long config.json is (a little-endian number), then comes config.json in our own
format, then a safetensors file to the end. Whatever format the head has, it is sent so; bytes of
tensors go from their files to the connection piece by piece.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from headstart.checkpoint.source import FileSlice, TensorSource
from headstart.checkpoint.writer import Shard, header_bytes
from headstart.heads.formats import format_named
from headstart.heads.head import Head

LENGTH_BYTES = 8
MOST_CONFIG_BYTES = 4 << 20
CONTENT_TYPE = "application/vnd.headstart.head"
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class SentHead:
    """What a server gets, in order."""

    config: bytes
    tensors: bytes  # the header of the safetensors file
    sources: tuple[TensorSource, ...]  # in the order of their places

    @classmethod
    def of(cls, head: Head) -> SentHead:
        """Its own tensors; copies of trunk tensors that a format carries along stay here."""
        plan = format_named("headstart").plan(head).plan
        config = json.dumps(plan.documents["config.json"]).encode()
        own = {
            name: source
            for shard in plan.shards.values()
            for name, source in shard.tensors.items()
            if not name.startswith("trunk.")
        }
        header, order = header_bytes(Shard(own))
        return cls(config, header, tuple(own[name] for name in order))

    @property
    def num_bytes(self) -> int:
        tensors = sum(source.num_bytes for source in self.sources)
        return LENGTH_BYTES + len(self.config) + len(self.tensors) + tensors

    @property
    def digest(self) -> str:
        """Of all bytes, for a server that is given the head in another way."""
        state = hashlib.sha256()
        for part in self.parts():
            state.update(part)
        return digest_of(state)

    def parts(self) -> Iterator[bytes]:
        yield len(self.config).to_bytes(LENGTH_BYTES, "little")
        yield self.config
        yield self.tensors
        for source in self.sources:
            for piece in source.pieces():
                if isinstance(piece, FileSlice):
                    yield from _read(piece)
                else:
                    yield bytes(piece)


def _read(piece: FileSlice) -> Iterator[bytes]:
    with open(piece.file, "rb") as file:
        file.seek(piece.start)
        left = piece.num_bytes
        while left:
            data = file.read(min(left, _AT_ONCE))
            if not data:
                raise piece.cut_off()
            left -= len(data)
            yield data


def digest_of(state: hashlib._Hash) -> str:
    """Of all bytes that were sent, as both sides write it."""
    return f"sha256:{state.hexdigest()}"
