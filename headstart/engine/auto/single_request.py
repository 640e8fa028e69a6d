"""Costs of rounds of a single request, for predictions of speed by `score` and `vocab`.

They are timed as an engine would run such rounds here, or derived from sizes and bandwidth. An
engine holds weights as its kernels want them, which is not how texts are scored. So costs are
taken first, from a model of their own that is dropped again.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from headstart.backends.base import Backend, BackendOptions, Weights
from headstart.backends.select import check_formats, create_backend, held_as_stored
from headstart.checkpoint.reader import Checkpoint
from headstart.engine.core import EngineCore
from headstart.engine.options import MAX_DRAFTS, EngineOptions
from headstart.models.build import LoadedModel, build, resolve_device, resolve_dtype
from headstart.simulate.cost import Costs, from_bandwidth
from headstart.vocab.draft_vocab import DraftVocab

_MAX_LEN = 2048  # tokens that there is K/V memory for while rounds are timed
# How often sizes are timed in turn; the quickest counts, since noise only adds. A GPU's own clock
# has little of it, and its rounds would be captured anew.
_PASSES = {"cpu": 3, "cuda": 1}


class SingleRequestCosts(Protocol):
    """Costs by size of the draft vocabulary."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided on the way, to be shown to the user."""
        ...

    def of(self, model: LoadedModel, size: int | None, *, is_greedy: bool) -> Costs:
        """Of a model with a draft vocabulary of so many tokens; None: with all of them."""
        ...


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of a round of one request, by drafts."""

    seconds: tuple[float, ...]

    def best_of(self, other: RoundTimes | None) -> RoundTimes:
        if other is None:
            return self
        return RoundTimes(tuple(map(min, self.seconds, other.seconds)))

    def round_seconds(self, batch: int, drafts: int) -> float:
        assert batch == 1
        return self.seconds[drafts]


@dataclass(frozen=True)
class EngineCosts:
    """Rounds of the engine, timed on this device, for the sizes that were asked for."""

    times: dict[tuple[int | None, bool], RoundTimes]
    notes: tuple[str, ...]

    def of(self, model: LoadedModel, size: int | None, *, is_greedy: bool) -> Costs:
        return self.times[size, is_greedy]


@dataclass(frozen=True)
class BandwidthCosts:
    """Bytes that are read, at so many GB/s."""

    bandwidth: float
    weights: Weights = "as-dtype"
    notes: tuple[str, ...] = ()

    def of(self, model: LoadedModel, size: int | None, *, is_greedy: bool) -> Costs:
        assert model.head is not None
        each = model.dtype.itemsize if self.weights == "as-dtype" else 1
        return from_bandwidth(
            model.config, bytes_per_weight=each, bandwidth=self.bandwidth * 1e9,
            draft_tokens=size, head=model.head.config,
        )  # fmt: skip


def single_request_costs(
    checkpoint: Checkpoint, head: Path | None, sizes: Collection[int | None], *, device: str,
    dtype: str, bandwidth: float | None, weights: Weights = "as-dtype",
) -> SingleRequestCosts:  # fmt: skip
    """Timed here, for draft vocabularies of these sizes, unless a bandwidth is given.

    Time does not depend on which tokens a vocabulary holds.
    """
    if bandwidth is not None:
        return BandwidthCosts(bandwidth, weights)
    threads = torch.get_num_threads()
    place = resolve_device(device)
    check_formats(place, resolve_dtype(dtype, place), BackendOptions(weights=weights))
    options = EngineOptions(
        speculate="auto", max_running_requests=1, prefix_caching=False, weights=weights
    ).resolved(place.type)
    holds = partial(held_as_stored, options=options.backend)
    model = build(checkpoint, head, device=device, dtype=dtype, holds=holds)
    is_gpu = place.type == "cuda"
    short = replace(model, max_len=min(model.max_len, _MAX_LEN))
    backend = create_backend(short, options.backend)
    notes = (*model.notes, *backend.notes)
    times: dict[tuple[int | None, bool], RoundTimes] = {}
    for size in [*sizes] * _PASSES[model.device.type]:
        for is_greedy, found in _timed(backend, options, size).items():
            times[size, is_greedy] = found.best_of(times.get((size, is_greedy)))
        _free_memory(is_gpu)
    del model, short, backend
    _free_memory(is_gpu)
    torch.set_num_threads(threads)  # what scores texts computes otherwise
    return EngineCosts(times, notes)


def _timed(backend: Backend, options: EngineOptions, size: int | None) -> dict[bool, RoundTimes]:
    """Round times of a new engine, by whether requests are greedy.

    Numbers only: nothing that would keep the engine's memory.
    """
    vocabs = {} if size is None else {"timed": DraftVocab(ids=tuple(range(size)), name="timed")}
    policy = EngineCore.create(backend, options, vocabs).policy
    assert policy is not None
    times = {}
    for is_greedy in (False, True):
        seconds = [
            policy.round_seconds(1, drafts, is_greedy=is_greedy) for drafts in range(MAX_DRAFTS + 1)
        ]
        known = tuple(number for number in seconds if number is not None)
        assert len(known) == len(seconds), "`auto` times every number of drafts"
        times[is_greedy] = RoundTimes(known)
    return times


def _free_memory(is_gpu: bool) -> None:
    """A core may hold itself; and memory that is only cached would count as taken."""
    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()
