"""Everything behind an engine's requests: memory, scheduler, drafter, policy, rounds, loop."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from headstart.backends.base import Backend
from headstart.engine.auto.blank_passes import BlankPasses
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.auto.profile import profile_device_rounds, profile_host_rounds
from headstart.engine.copies import ContextDrafter
from headstart.engine.draft_sources import DraftSources
from headstart.engine.drafter import Drafter
from headstart.engine.kv_cache import BlockPool
from headstart.engine.loop import Loop
from headstart.engine.memory import (
    Memory,
    MemoryNeeds,
    plan_memory,
    resolved_requests,
    round_sizes,
)
from headstart.engine.options import EngineOptions, Speculate
from headstart.engine.rounds import Rounds
from headstart.engine.scheduler import Scheduler
from headstart.engine.state_cache import StatePlan, StatePool
from headstart.vocab.draft_vocab import DraftVocab

_NEW_OBJECTS = 10_000  # that are left over, after which the collector looks at them; usually 700
_USUAL: list[tuple[int, int, int]] = []  # thresholds that engines found: the first is the usual


@dataclass(frozen=True)
class EngineCore:
    """What runs requests; `drafter` where there is a head, `policy` where anything drafts."""

    backend: Backend
    options: EngineOptions  # with all that was open decided
    memory: Memory
    scheduler: Scheduler
    drafter: Drafter | None
    policy: DraftPolicy | None
    loop: Loop

    @classmethod
    def create(
        cls, backend: Backend, options: EngineOptions, vocabs: Mapping[str, DraftVocab], *,
        promised_bytes: int = 0,
    ) -> EngineCore:  # fmt: skip
        """Memory first, then what decides; all is warm and timed at the end."""
        vocab_tokens = sum(len(vocab.ids) for vocab in vocabs.values())
        needs = MemoryNeeds.of(backend, options, vocab_tokens=vocab_tokens)
        needs = needs.without(promised_bytes)
        options = resolved_requests(needs, options)
        memory = plan_memory(needs, options)
        backend.allocate(memory.cache)
        scheduler = _scheduler(options, memory)
        for name, vocab in vocabs.items() if backend.head is not None else ():
            backend.add_draft_vocab(name, vocab.ids)
        sources = _sources(backend, scheduler, options)
        policy = None if sources is None else sources.policy
        rounds = None
        if backend.has_rounds:
            rounds = _rounds(backend, options, policy, scheduler.pool, vocabs)
        loop = Loop(options, scheduler, backend, sources, rounds)
        if rounds is not None and backend.device.type == "cuda":
            _keep_pauses_short(loop)
        return cls(backend, options, memory, scheduler, loop.drafter, policy, loop)

    def beside(self, speculate: Speculate) -> EngineCore:
        """What serves other requests from the same memory, its host driving rounds, as an engine
        that was made for so many drafts does; before the first request."""
        options = replace(self.options, speculate=speculate)
        scheduler = Scheduler(self.scheduler.pool, options, self.scheduler.states)
        sources = _sources(self.backend, scheduler, options) if speculate != 0 else None
        loop = Loop(options, scheduler, self.backend, sources)
        return replace(
            self, options=options, scheduler=scheduler, drafter=loop.drafter, policy=loop.policy,
            loop=loop,
        )  # fmt: skip


def _scheduler(options: EngineOptions, memory: Memory) -> Scheduler:
    caching, size = options.prefix_caching, options.block_size
    pool = BlockPool(memory.cache.num_blocks, size, prefix_caching=caching)
    states = None
    if memory.cache.num_states:
        states = StatePlan(StatePool(memory.cache.num_states), size, prefix_caching=caching)
    return Scheduler(pool, options, states)


def _sources(backend: Backend, scheduler: Scheduler, options: EngineOptions) -> DraftSources | None:
    """What drafts: the head where there is one, copies beside it or alone."""
    has_head = backend.head is not None and options.speculate != "context"
    if not has_head and options.speculate != "context":
        return None
    drafter = Drafter(backend) if has_head else None
    policy = _policy(backend, drafter, options)
    copies = ContextDrafter(options)
    return DraftSources(backend, scheduler, policy, copies, drafter, options.max_drafts)


def _policy(backend: Backend, drafter: Drafter | None, options: EngineOptions) -> DraftPolicy:
    max_len = backend.model.max_len
    if not options.is_automatic:
        return DraftPolicy(options, max_len)
    passes = BlankPasses(backend, drafter, max_rows=options.num_rows)
    with torch.inference_mode():  # before the first request: K/V memory is still scratch
        sampled, greedy = profile_host_rounds(passes, max_batch=options.num_requests)
    return DraftPolicy(options, max_len, sampled, greedy)


def _rounds(
    backend: Backend, options: EngineOptions, policy: DraftPolicy | None, pool: BlockPool,
    vocabs: Mapping[str, DraftVocab],
) -> Rounds:  # fmt: skip
    """Rounds on the device, compiled and captured; `auto` times them."""
    draft_vocab = next(iter(vocabs)) if len(vocabs) == 1 and backend.head is not None else None
    sizes = round_sizes(
        backend, options, max_tokens=min(backend.model.max_len, pool.num_slots),
        draft_vocab=draft_vocab,
    )  # fmt: skip
    device = backend.make_rounds(sizes)
    if backend.device.type == "cuda":  # an interpreter compiles nothing
        device.warm_up()
        if policy is not None and options.speculate == "auto":
            policy.use_rounds(profile_device_rounds(device), device.bucket)
    return Rounds(device, pool)


def _keep_pauses_short(owner: Loop) -> None:
    """Leave what is alive now out of garbage collections, for as long as the loop lives.

    Python's collector goes through everything alive now and then, while the device waits. With
    torch and what it brings loaded that takes 0.2 s, as long as twenty rounds of 80 requests. What
    comes and goes with requests holds no cycles, so it looks at that more rarely, too.
    """
    gc.collect()
    gc.freeze()
    usual = gc.get_threshold()
    _USUAL.append(usual)
    gc.set_threshold(max(_NEW_OBJECTS, usual[0]) if usual[0] else 0, *usual[1:])  # 0: never
    weakref.finalize(owner, _collect_as_before)


def _collect_as_before() -> None:
    gc.unfreeze()
    first = _USUAL[0]
    _USUAL.pop()
    if not _USUAL:  # no other engine is left
        gc.set_threshold(*first)
