"""How much memory an engine takes for K/V and recurrent states.

As given; on a GPU what its share of the device leaves beside weights and what computing will take;
on a CPU enough for its requests within what is free. Numbers only: what a block or a state needs is
the backend's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from headstart.backends.base import (
    Backend,
    CacheSizes,
    DeviceBytes,
    RoundSizes,
    WorkingBytes,
    WorkSizes,
)
from headstart.engine.options import MAX_DRAFTS, MENU, EngineOptions
from headstart.errors import EngineError

_GPU_SHARE = 0.9
# Requests of a GPU, where no number is given: as many as there is memory for with so many tokens,
# up to the largest number that rounds are captured for in any case.
_REQUEST_TOKENS = 1024
MOST_REQUESTS = 256
# On a CPU memory is shared with everything else: enough for requests of usual length, and not more
# than this unless one request of full length needs it or the user asks.
_USUAL_TOKENS = 2048
_CPU_BYTES = 1 << 30
_MOST_OF_FREE = 0.8
# Of memory that recurrent states share with K/V; those that are not needed are snapshots.
_STATE_SHARE = 0.5
# One request of so many is expected to decode outside device rounds, with slots for its drafts.
_HOST_PART = 4


@dataclass(frozen=True)
class MemoryNeeds:
    """What a model needs on a backend, in bytes, and how much is free."""

    block_bytes: int  # K/V of a block in trunk and head
    state_bytes: int  # of one request's recurrent states; 0 where a model has none
    round_bytes: int  # of one request in device rounds, beside its states
    working: WorkingBytes  # that computing will take beside all this
    device: DeviceBytes
    max_len: int  # tokens of one request
    is_cpu: bool
    has_head: bool
    has_rounds: bool

    @classmethod
    def of(cls, backend: Backend, options: EngineOptions, *, vocab_tokens: int = 0) -> MemoryNeeds:
        """vocab_tokens: of all draft vocabularies together."""
        rounds = round_sizes(backend, options, max_tokens=backend.model.max_len)
        # A prompt that is not cut may have more rows than a pass has otherwise.
        longest = 0 if options.chunked_prefill else backend.model.max_len
        work = WorkSizes(
            rounds=rounds, block_size=options.block_size, vocab_tokens=vocab_tokens,
            max_rows=max(options.num_rows, longest),
        )  # fmt: skip
        return cls(
            block_bytes=backend.block_bytes(options.block_size),
            state_bytes=backend.state_bytes(),
            round_bytes=backend.round_bytes(rounds),
            working=backend.working_bytes(work),
            device=backend.device_bytes(),
            max_len=backend.model.max_len,
            is_cpu=backend.device.type == "cpu",
            has_head=backend.head is not None,
            has_rounds=backend.has_rounds,
        )

    def without(self, num_bytes: int) -> MemoryNeeds:
        """The same with so much less of free memory: another process will take it."""
        free = max(0, self.device.free - num_bytes)
        return replace(self, device=replace(self.device, free=free))


@dataclass(frozen=True)
class Memory:
    """What an engine's requests share."""

    cache: CacheSizes
    needs: MemoryNeeds
    device_note: str = ""  # where the rest of a GPU's memory goes

    @property
    def notes(self) -> list[str]:
        cache, needs = self.cache, self.needs
        size = cache.num_blocks * needs.block_bytes
        states = f"{cache.num_states} recurrent states of {needs.state_bytes / 1e6:.1f} MB"
        newest = f"{needs.round_bytes / 1e6:.1f} MB for the newest rows of each request in rounds"
        return [
            *([self.device_note] if self.device_note else []),
            f"{cache.num_blocks} K/V blocks of {cache.block_size} tokens ({size / 1e6:.0f} MB)",
            *([states] if cache.num_states else []),
            *([newest] if needs.round_bytes else []),
        ]


def round_sizes(
    backend: Backend, options: EngineOptions, *, max_tokens: int = 0, draft_vocab: str | None = None
) -> RoundSizes:
    """What device rounds are made for, where the backend has them.

    Without recurrent layers there is room for as many drafts as a request may ask for. What those
    layers keep of newest rows grows with that number, so it is made for what the engine drafts and
    copies by itself; a request that asks for more gets so many.
    """
    count, copies = options.num_requests, options.speculate == "context"
    if backend.head is None and not copies:
        return RoundSizes(
            max_requests=count, max_drafts=0, num_drafts=0, max_tokens=max_tokens,
            max_rows=options.num_rows,
        )  # fmt: skip
    most = MAX_DRAFTS if backend.config.recurrent is None else options.max_copied
    return RoundSizes(
        max_requests=count, max_drafts=most, max_tokens=max_tokens, max_rows=options.num_rows,
        num_drafts=MENU[-1] if options.is_automatic else options.max_drafts,
        draft_vocab=draft_vocab, own=0 if copies else options.draft_vocab_own,
        menu=MENU if options.speculate == "auto" else (),
        # Where K is fixed nothing is copied: rounds of all requests would pay for the few that ask.
        copied=options.max_copied if options.is_automatic else 0,
    )  # fmt: skip


def resolved_requests(needs: MemoryNeeds, options: EngineOptions) -> EngineOptions:
    """The same with `max_running_requests`, where no number is given: on a GPU by its memory."""
    if options.max_running_requests is not None or needs.is_cpu:
        return replace(options, max_running_requests=options.num_requests)
    tokens = min(_REQUEST_TOKENS, needs.max_len + 1)
    # With a snapshot beside a request's own state, as states are planned.
    each = -(-tokens // options.block_size) * needs.block_bytes + needs.round_bytes
    each += 2 * needs.state_bytes
    if options.kv_bytes is not None:
        room = options.kv_bytes
    else:
        room, each = _gpu_room(needs, options, requests=0), each + needs.working.per_request
    count = min(max(1, room // max(1, each)), MOST_REQUESTS)
    return replace(options, max_running_requests=count)


def plan_memory(needs: MemoryNeeds, options: EngineOptions) -> Memory:
    """How many K/V blocks and states there is memory for, with what rounds need taken off."""
    note = "" if needs.is_cpu else _device_note(needs, options)
    if needs.state_bytes == 0:
        return Memory(CacheSizes(num_blocks(needs, options), options.block_size), needs, note)
    given = _given(needs, options)
    whole = int(needs.device.free * _MOST_OF_FREE) if given is None else given
    newest_row_bytes = options.num_requests * needs.round_bytes
    if newest_row_bytes >= whole:
        what = f"the newest rows of {options.num_requests} requests need {newest_row_bytes:,} bytes"
        raise _too_little(what, whole, needs, options, "max_running_requests or speculate")
    left = whole - newest_row_bytes
    room = left * _STATE_SHARE
    if given is None:
        room = min(max(_CPU_BYTES, 2 * needs.state_bytes), left / 2)
    states = min(int(room // needs.state_bytes), _most_states(needs, options))
    if states < 1:
        what = f"the state of one request needs {needs.state_bytes:,} bytes"
        raise _too_little(what, int(room), needs, options)
    taken = states * needs.state_bytes + newest_row_bytes
    blocks = num_blocks(needs, options, taken=taken)
    return Memory(CacheSizes(blocks, options.block_size, states), needs, note)


def enough_bytes(
    needs: MemoryNeeds, options: EngineOptions, *, requests: int, tokens: int
) -> int:  # fmt: skip
    """`kv_bytes` for so many requests of so many tokens each, as far as memory is free."""
    rows = options.num_requests * needs.round_bytes
    states = _most_states(needs, options) * needs.state_bytes
    blocks = requests * -(-tokens // options.block_size) * needs.block_bytes
    wanted = rows + max(math.ceil(states / _STATE_SHARE), states + blocks)
    return max(1, min(wanted, int(needs.device.free * _MOST_OF_FREE)))


def _most_states(needs: MemoryNeeds, options: EngineOptions) -> int:
    """One for each running request, for a prefix each, and for every draft that may be rejected.

    Requests in device rounds need none for drafts: they go back by the rows that rounds keep.
    """
    running = options.num_requests
    drafts = options.usual_drafts if needs.has_head or options.speculate == "context" else 0
    return 2 * running + drafts * (-(-running // _HOST_PART) if needs.has_rounds else running)


def num_blocks(needs: MemoryNeeds, options: EngineOptions, *, taken: int = 0) -> int:
    """How many K/V blocks there is memory for; `taken` bytes are used otherwise."""
    block = needs.block_bytes
    # A request keeps a slot for the token that its last row gives. More than all requests at full
    # length could ever hold is of no use.
    full = -(-(needs.max_len + 1) // options.block_size)
    most = options.num_requests * full
    budget = _budget(needs, options, full, taken)
    # Nothing attends in a trunk of recurrent layers without a head: blocks are mere numbers there.
    count = min(budget // block if block else most, most)
    if count < 1:
        what = f"one K/V block needs {block:,} bytes"
        raise _too_little(what, budget, needs, options, "block_size")
    return int(count)


def _given(needs: MemoryNeeds, options: EngineOptions) -> int | None:
    """Bytes for everything that requests keep, if that is decided; None if it goes by use."""
    if options.kv_bytes is not None:
        return options.kv_bytes
    if not needs.is_cpu:
        return max(0, _gpu_room(needs, options, requests=options.num_requests))
    share = options.memory_fraction
    return None if share is None else int(needs.device.free * share)


def _gpu_room(needs: MemoryNeeds, options: EngineOptions, *, requests: int) -> int:
    """What the share of a GPU leaves; below 0 where there is not enough for computing."""
    device = needs.device
    in_use = device.total - device.free
    return int(device.total * _share(options)) - in_use - needs.working.of(requests)


def _share(options: EngineOptions) -> float:
    return _GPU_SHARE if options.memory_fraction is None else options.memory_fraction


def _budget(needs: MemoryNeeds, options: EngineOptions, full: int, taken: int) -> int:
    given = _given(needs, options)
    if given is not None:
        return given - taken
    usual = min(full, -(-_USUAL_TOKENS // options.block_size)) * options.num_requests
    wanted = max(min(usual * needs.block_bytes, _CPU_BYTES), full * needs.block_bytes)
    return min(wanted, int((needs.device.free - taken) * _MOST_OF_FREE))


def _device_note(needs: MemoryNeeds, options: EngineOptions) -> str:
    """Where the memory of a GPU goes."""
    device, requests = needs.device, options.num_requests
    if options.kv_bytes is not None:
        room = f"{options.kv_bytes / 1e9:.1f} GB for K/V (kv_bytes)"
    else:
        left = max(0, _gpu_room(needs, options, requests=requests))
        room = f"up to {left / 1e9:.1f} GB for K/V (memory_fraction {_share(options)})"
    return (
        f"{device.total / 1e9:.1f} GB on the GPU: {(device.total - device.free) / 1e9:.1f} GB in "
        f"use (weights, other processes), {needs.working.of(requests) / 1e9:.1f} GB to come for "
        f"rounds and passes (max_running_requests {requests}), {room}"
    )


def _too_little(
    what: str, room: int, needs: MemoryNeeds, options: EngineOptions, lower: str = ""
) -> EngineError:
    """What something needs, what there is, and what can be done."""
    if needs.is_cpu or options.kv_bytes is not None:
        advice = f", or lower {lower}" if lower else ""
        return EngineError(
            f"{what} and there are {room:,}. Raise kv_bytes or memory_fraction{advice}."
        )
    return EngineError(
        f"{what} and there are {room:,}: {_device_note(needs, options)}. Raise memory_fraction, "
        "lower max_running_requests, max_batched_tokens or max_model_len, or give kv_bytes."
    )
