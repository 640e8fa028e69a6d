"""What rounds cost as they will be served, for predictions of speed by `score` and `vocab`.

They are whole steps of an engine on this device, with the same backend, weights, draft vocabulary,
sampling and number of requests, over prompts that will be answered; or they come from sizes and
bandwidth. All numbers of drafts are timed in turns, a few rounds each and on the same prompts, so
that a machine that is slow for a while, or a long prompt, makes all of them slow.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from headstart.backends.base import Backend, Weights
from headstart.checkpoint.quantized.rounding import INT4_GROUP
from headstart.data.prompt_reader import PromptReader
from headstart.engine.auto.context_times import LONGEST
from headstart.engine.auto.costs import RoundCosts
from headstart.engine.auto.host_times import ENGINES, HostTimes, time_rounds
from headstart.engine.auto.timed_rounds import Serving
from headstart.engine.core import EngineCore
from headstart.engine.memory import MemoryNeeds, enough_bytes
from headstart.engine.options import VERIFIED, EngineOptions, Speculate
from headstart.models.build import LoadedModel
from headstart.simulate.cost import Costs, from_bandwidth
from headstart.vocab.draft_vocab import DraftVocab

_VOCAB = "timed {}"


class ServedCosts(Protocol):
    """Costs by size of the draft vocabulary."""

    @property
    def origin(self) -> str:
        """Where they come from, in words."""
        ...

    def of(self, model: LoadedModel, size: int | None) -> Costs:
        """Of a model with a draft vocabulary of so many tokens; None: with all of them."""
        ...


@dataclass(frozen=True)
class CapturedCosts:
    """What `auto` timed of captured rounds, and how large they are for the requests at once."""

    table: RoundCosts
    size: int


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of a round of so many requests, by drafts; without any by an engine without a head.

    And what `auto` and copied drafts cost: `host` where the host drives rounds, `captured` where
    the device does.
    """

    seconds: tuple[float, ...]
    requests: int = 1
    host: HostTimes | None = None
    captured: CapturedCosts | None = None

    def round_seconds(self, batch: int, drafts: int) -> float:
        assert batch == self.requests
        return self.seconds[drafts]

    def at(self, context: float | None) -> RoundTimes:
        """The same with so many tokens of context of each request, where that is known."""
        if self.host is None or context is None:
            return self
        tokens = self.requests * context
        seconds = (own + self.host.added(k, tokens) for k, own in enumerate(self.seconds))
        return replace(self, seconds=tuple(seconds))


@dataclass(frozen=True)
class EngineCosts:
    """Rounds of the engine, timed on this device, for the sizes that were asked for."""

    times: Mapping[int | None, RoundTimes]
    origin: str

    def of(self, model: LoadedModel, size: int | None) -> Costs:
        return self.times[size]


_INT4_BYTES = 0.5 + 2 / INT4_GROUP  # of a weight, with its share of the group's scale


@dataclass(frozen=True)
class BandwidthCosts:
    """Bytes that are read, at so many GB/s."""

    bandwidth: float
    weights: Weights = "as-dtype"

    @property
    def origin(self) -> str:
        return f"from bytes read at {self.bandwidth:g} GB/s"

    def of(self, model: LoadedModel, size: int | None) -> Costs:
        assert model.head is not None
        plain = model.dtype.itemsize
        each = {"as-dtype": plain, "int8": 1, "fp8": 1, "int4": _INT4_BYTES}[self.weights]
        return from_bandwidth(
            model.config, bytes_per_weight=each, bandwidth=self.bandwidth * 1e9,
            # `backends/weights.py`, and `round_to_fp8`, which leaves the LM head as it is; what
            # drafts is rounded to 8 bits in all of them.
            lm_head_bytes=plain if self.weights in ("as-dtype", "fp8") else 1,
            draft_bytes=plain if self.weights == "as-dtype" else 1,
            draft_tokens=size, head=model.head.config,
        )  # fmt: skip


def timed_costs(
    backend: Backend, prompts: PromptReader, lists: Mapping[int | None, Sequence[int]],
    serving: Serving, *, progress: Callable[[int], None] = lambda rounds: None,
) -> EngineCosts:  # fmt: skip
    """Rounds of an engine that is made of the backend and given up again.

    `lists`: draft vocabularies by their size; None: the whole vocabulary. Their tokens matter: the
    head reads what was accepted, so rounds in which drafts are right take longer.
    """
    is_captured = backend.has_rounds and backend.device.type == "cuda"
    speculate: Speculate = "auto" if is_captured else serving.max_drafts
    options = EngineOptions(
        speculate=speculate if backend.head is not None else "context",
        max_running_requests=serving.requests if is_captured else ENGINES * serving.requests,
        prefix_caching=False, weights=backend.options.weights, threads=backend.options.threads,
        max_model_len=backend.model.max_len,
    ).resolved(backend.device.type)  # fmt: skip
    vocabs = {
        _VOCAB.format(size): DraftVocab(ids=tuple(ids), name=_VOCAB.format(size))
        for size, ids in lists.items()
        if size is not None
    }
    if is_captured:
        found = _device_times(backend, options, vocabs, lists, serving)
    else:
        found = _host_times(backend, prompts, options, vocabs, lists, serving, progress)
    gc.collect()  # a core may hold itself,
    if backend.device.type == "cuda":
        torch.cuda.empty_cache()  # and memory that is only cached would count as taken
    kind = "greedy" if is_captured or serving.params.is_greedy else "sampled"
    how = "captured and timed with empty contexts" if is_captured else "timed in turns here"
    weights = backend.options.weights
    origin = (
        f"rounds of this engine, {how}: backend {backend.name}, "
        f"{str(backend.dtype).removeprefix('torch.') if weights == 'as-dtype' else weights}, "
        f"{kind}, requests at once: {serving.requests}"
    )
    hosts = [own.host for own in found.values()]
    if any(host is not None and not host.per_token for host in hosts):
        origin += "; what context adds is not counted (little memory, or short texts only)"
    return EngineCosts(found, origin)


def _host_times(
    backend: Backend, prompts: PromptReader, options: EngineOptions,
    vocabs: Mapping[str, DraftVocab], sizes: Collection[int | None], serving: Serving,
    progress: Callable[[int], None],
) -> dict[int | None, RoundTimes]:  # fmt: skip
    if backend.device.type == "cpu":
        options = replace(options, kv_bytes=_kv_bytes(backend, options, serving))
    core = EngineCore.create(backend, options, vocabs)
    names = {size: None if size is None else _VOCAB.format(size) for size in sizes}
    found, host = time_rounds(core, prompts, serving, [*names.values()], progress)
    return {size: RoundTimes(found[name], serving.requests, host) for size, name in names.items()}


def _kv_bytes(backend: Backend, options: EngineOptions, serving: Serving) -> int:
    """For the requests of all engines that are timed in turns, and for blank ones, which come
    before them and have contexts of half of the memory at most."""
    needs, each = MemoryNeeds.of(backend, options), serving.requests
    return max(
        enough_bytes(
            needs, options, requests=requests, tokens=min(tokens + VERIFIED[-1] + 2, needs.max_len)
        )
        for requests, tokens in ((ENGINES * each, serving.num_tokens), (max(2, each), LONGEST))
    )


def _device_times(
    backend: Backend, options: EngineOptions, vocabs: Mapping[str, DraftVocab],
    sizes: Collection[int | None], serving: Serving,
) -> dict[int | None, RoundTimes]:  # fmt: skip
    """As `auto` times captured rounds; a device's clock has little noise."""
    found = {}
    for size in sizes:
        own = {} if size is None else {_VOCAB.format(size): vocabs[_VOCAB.format(size)]}
        policy = EngineCore.create(backend, options, own).policy
        assert policy is not None and policy.uniform_costs is not None
        seconds = [
            policy.round_seconds(serving.requests, drafts)
            for drafts in range(serving.max_drafts + 1)
        ]
        known = tuple(number for number in seconds if number is not None)
        assert len(known) == len(seconds), "`auto` times every number of drafts"
        costs = policy.uniform_costs
        captured = CapturedCosts(
            replace(costs.table, context=()), costs.captured_size(serving.requests)
        )
        found[size] = RoundTimes(known, serving.requests, captured=captured)
        del policy, costs
        gc.collect()
        torch.cuda.empty_cache()
    return found
