"""How much memory an engine takes for K/V and recurrent states: as told, or enough for its requests
within what is free. Numbers only: what a block or a state needs is the backend's."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.backends.base import Backend, CacheSizes, RoundSizes
from headstart.engine.options import MAX_DRAFTS, MENU, EngineOptions
from headstart.errors import EngineError

_GPU_SHARE = 0.5
# On a CPU memory is shared with everything else: enough for requests of usual length, and not more
# than this unless one request of full length needs it or the user asks.
_USUAL_TOKENS = 2048
_CPU_BYTES = 1 << 30
_MOST_OF_FREE = 0.8
# Of memory that recurrent states share with K/V; those that are not needed are snapshots.
_STATE_SHARE = 0.5
_USUAL_DRAFTS = 4
# One request of so many is expected to decode outside device rounds, with slots for its drafts.
_HOST_PART = 4


@dataclass(frozen=True)
class MemoryNeeds:
    """What a model needs on a backend, in bytes, and how much is free."""

    block_bytes: int  # K/V of a block in trunk and head
    state_bytes: int  # of one request's recurrent states; 0 where a model has none
    round_bytes: int  # of all requests in device rounds, beside their states
    prompt_bytes: int  # that a long prompt may take while it is read
    free_bytes: int
    max_len: int  # tokens of one request
    is_cpu: bool
    has_head: bool
    has_rounds: bool

    @classmethod
    def of(cls, backend: Backend, options: EngineOptions) -> MemoryNeeds:
        return cls(
            block_bytes=backend.block_bytes(options.block_size),
            state_bytes=backend.state_bytes(),
            round_bytes=backend.round_bytes(round_sizes(backend, options)),
            prompt_bytes=backend.prompt_bytes(),
            free_bytes=backend.free_bytes(),
            max_len=backend.model.max_len,
            is_cpu=backend.device.type == "cpu",
            has_head=backend.head is not None,
            has_rounds=backend.has_rounds,
        )


@dataclass(frozen=True)
class Memory:
    """What an engine's requests share."""

    cache: CacheSizes
    needs: MemoryNeeds

    @property
    def notes(self) -> list[str]:
        cache, needs = self.cache, self.needs
        size = cache.num_blocks * needs.block_bytes
        states = f"{cache.num_states} recurrent states of {needs.state_bytes / 1e6:.1f} MB"
        rings = f"{needs.round_bytes / 1e6:.0f} MB for the newest rows of requests in rounds"
        return [
            f"{cache.num_blocks} K/V blocks of {cache.block_size} tokens ({size / 1e6:.0f} MB)",
            *([states] if cache.num_states else []),
            *([rings] if needs.round_bytes else []),
        ]


def round_sizes(
    backend: Backend, options: EngineOptions, *, max_tokens: int = 0, draft_vocab: str | None = None
) -> RoundSizes:
    """What device rounds are made for, where the backend has them.

    Without recurrent layers there is room for as many drafts as a request may ask for. What those
    layers keep of newest rows grows with that number, so it is made for what the engine drafts by
    itself; a request that asks for more is decided by the host.
    """
    if backend.head is None:
        return RoundSizes(
            max_requests=options.max_running_requests, max_drafts=0, num_drafts=0,
            max_tokens=max_tokens, max_rows=options.num_rows,
        )  # fmt: skip
    most = MAX_DRAFTS if backend.config.delta is None else options.max_drafts
    return RoundSizes(
        max_requests=options.max_running_requests, max_drafts=most, num_drafts=options.max_drafts,
        max_tokens=max_tokens, max_rows=options.num_rows, draft_vocab=draft_vocab,
        menu=MENU if options.speculate == "auto" else (),
    )  # fmt: skip


def plan_memory(needs: MemoryNeeds, options: EngineOptions) -> Memory:
    """How many K/V blocks and states there is memory for, with what rounds need taken off."""
    if needs.state_bytes == 0:
        return Memory(CacheSizes(num_blocks(needs, options), options.block_size), needs)
    given = _given(needs, options)
    whole = int(needs.free_bytes * _MOST_OF_FREE) if given is None else given
    if needs.round_bytes >= whole:
        raise EngineError(
            f"the newest rows of {options.max_running_requests} requests need "
            f"{needs.round_bytes:,} bytes and there are {whole:,}. Lower max_running_requests or "
            "speculate, or raise kv_bytes or memory_fraction."
        )
    left = whole - needs.round_bytes
    room = left * _STATE_SHARE
    if given is None:
        room = min(max(_CPU_BYTES, 2 * needs.state_bytes), left / 2)
    states = min(int(room // needs.state_bytes), _most_states(needs, options))
    if states < 1:
        raise EngineError(
            f"the state of one request needs {needs.state_bytes:,} bytes and there are "
            f"{int(room):,}. Raise kv_bytes or memory_fraction."
        )
    taken = states * needs.state_bytes + needs.round_bytes
    blocks = num_blocks(needs, options, taken=taken)
    return Memory(CacheSizes(blocks, options.block_size, states), needs)


def _most_states(needs: MemoryNeeds, options: EngineOptions) -> int:
    """One for each running request, for a prefix each, and for every draft that may be rejected.

    Requests in device rounds need none for drafts: they go back by the rows that rounds keep.
    """
    running = options.max_running_requests
    drafts = 0
    if needs.has_head:
        drafts = _USUAL_DRAFTS if options.speculate == "auto" else int(options.speculate)
    return 2 * running + drafts * (-(-running // _HOST_PART) if needs.has_rounds else running)


def num_blocks(needs: MemoryNeeds, options: EngineOptions, *, taken: int = 0) -> int:
    """How many K/V blocks there is memory for; `taken` bytes are used otherwise."""
    block = needs.block_bytes
    # A request keeps a slot for the token that its last row gives. More than all requests at full
    # length could ever hold is of no use.
    full = -(-(needs.max_len + 1) // options.block_size)
    most = options.max_running_requests * full
    budget = _budget(needs, options, full, taken)
    # Nothing attends in a trunk of recurrent layers without a head: blocks are mere numbers there.
    count = min(budget // block if block else most, most)
    if count < 1:
        raise EngineError(
            f"one K/V block needs {block:,} bytes and there are {budget:,}. Raise kv_bytes or "
            "memory_fraction, or lower block_size."
        )
    return int(count)


def _given(needs: MemoryNeeds, options: EngineOptions) -> int | None:
    """Bytes for everything that requests need, if that is decided; None if it goes by use."""
    if options.kv_bytes is not None:
        return options.kv_bytes
    share = options.memory_fraction
    if share is None and not needs.is_cpu:
        share = _GPU_SHARE
    if share is None:
        return None
    return int(max(0, needs.free_bytes - needs.prompt_bytes) * share)


def _budget(needs: MemoryNeeds, options: EngineOptions, full: int, taken: int) -> int:
    given = _given(needs, options)
    if given is not None:
        return given - taken
    usual = min(full, -(-_USUAL_TOKENS // options.block_size)) * options.max_running_requests
    wanted = max(min(usual * needs.block_bytes, _CPU_BYTES), full * needs.block_bytes)
    return min(wanted, int((needs.free_bytes - taken) * _MOST_OF_FREE))
