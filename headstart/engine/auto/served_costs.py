"""What rounds cost as they will be served, for predictions of speed by `score` and `vocab`.

They are whole steps of an engine on this device, with the same backend, weights, draft vocabulary,
sampling and number of requests, over prompts that will be answered; or they come from sizes and
bandwidth. All numbers of drafts are timed in turns, a few rounds each, so that a machine that is
slow for a while is slow for all of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from headstart.backends.base import Backend, Weights
from headstart.checkpoint.quantized.rounding import INT4_GROUP
from headstart.data.prompt_reader import PromptReader
from headstart.engine.auto.blank_passes import BlankPasses
from headstart.engine.auto.costs import Curve, RoundCosts, level
from headstart.engine.auto.timed_rounds import Cell, HostTimer, Serving
from headstart.engine.core import EngineCore
from headstart.engine.options import VERIFIED, EngineOptions, Speculate
from headstart.models.build import LoadedModel
from headstart.simulate.cost import Costs, from_bandwidth
from headstart.vocab.draft_vocab import DraftVocab

_SECONDS = 8.0  # that rounds of one draft vocabulary are timed for,
_TURNS = (5, 40)  # in at least and at most so many turns
_EXTREME = 0.1  # share of the quickest and of the slowest rounds that does not count
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

    And what copied drafts cost. `verify`: rounds whose drafts cost nothing, by drafts, where the
    host drives them; `captured`: where the device does.
    """

    seconds: tuple[float, ...]
    requests: int = 1
    verify: Curve = ()
    captured: CapturedCosts | None = None

    def round_seconds(self, batch: int, drafts: int) -> float:
        assert batch == self.requests
        return self.seconds[drafts]


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
        max_running_requests=serving.requests if is_captured else 2 * serving.requests,
        prefix_caching=False, weights=backend.options.weights, threads=backend.options.threads,
        max_model_len=backend.model.max_len,
    ).resolved(backend.device.type)  # fmt: skip
    vocabs = {
        _VOCAB.format(size): DraftVocab(ids=tuple(ids), name=_VOCAB.format(size))
        for size, ids in lists.items()
        if size is not None
    }
    times = _device_times if is_captured else _host_times
    found = times(backend, prompts, options, vocabs, lists, serving, progress)
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
    return EngineCosts(found, origin)


def _device_times(
    backend: Backend, prompts: PromptReader, options: EngineOptions,
    vocabs: Mapping[str, DraftVocab], sizes: Collection[int | None], serving: Serving,
    progress: Callable[[int], None],
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


def _host_times(
    backend: Backend, prompts: PromptReader, options: EngineOptions,
    vocabs: Mapping[str, DraftVocab], sizes: Collection[int | None], serving: Serving,
    progress: Callable[[int], None],
) -> dict[int | None, RoundTimes]:  # fmt: skip
    core = EngineCore.create(backend, options, vocabs)
    timers = {
        has_head: HostTimer(engine, prompts, serving)
        for has_head, engine in ((True, core), (False, core.without_drafts()))
    }
    names = {size: None if size is None else _VOCAB.format(size) for size in sizes}
    without_head, without_drafts = Cell(0, has_head=False), Cell(0)
    cells = [without_head, without_drafts]
    cells += [Cell(k, name) for name in names.values() for k in range(1, serving.max_drafts + 1)]
    copied = [Cell(count, is_copied=True) for count in _copied_counts(core, serving)]
    cells += copied
    seconds: dict[Cell, list[float]] = {cell: [] for cell in cells}
    started, (least, most) = time.perf_counter(), _TURNS
    for turn in range(most):
        if turn >= least and time.perf_counter() - started > _SECONDS * len(names):
            break
        for cell in cells if turn % 2 else reversed(cells):  # neighbours in time both ways
            seconds[cell] += timers[cell.has_head].rounds(cell)
        progress(1)
    middle = {cell: _usual(own) for cell, own in seconds.items()}
    every_k = range(1, serving.max_drafts + 1)
    verify = level([(cell.drafts, middle[cell]) for cell in (without_drafts, *copied)])
    return {
        size: RoundTimes(
            (middle[without_head], *(middle[Cell(k, name)] for k in every_k)), serving.requests,
            verify,
        )
        for size, name in names.items()
    }  # fmt: skip


def _usual(seconds: Sequence[float]) -> float:
    """The mean without extremes: rounds differ by what was accepted, and all of them count."""
    cut = int(_EXTREME * len(seconds))
    return statistics.fmean(sorted(seconds)[cut : len(seconds) - cut])


def _copied_counts(core: EngineCore, serving: Serving) -> list[int]:
    """Numbers of copied drafts whose rounds are timed: as many as there is room for."""
    passes = BlankPasses(core.backend, core.drafter, max_rows=core.options.num_rows)
    # Recurrent layers have slots for as many drafts as the engine was made for.
    most = core.options.max_drafts if core.backend.sizes.num_states else VERIFIED[-1]
    counts = [count for count in VERIFIED if 0 < count <= most]
    return [count for count in counts if passes.has_room(serving.requests, count)]


def num_turns() -> int:
    """How often `progress` is called at most."""
    return _TURNS[1]
