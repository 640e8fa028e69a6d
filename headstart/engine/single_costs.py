"""What rounds of one request cost, as an engine would run them here, or from sizes and bandwidth.

An engine holds weights as its kernels want them, which is not how texts are scored. So costs are
taken first, from a model of their own that is given up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from headstart.assembly.build import Built, build
from headstart.checkpoint.reader import Checkpoint
from headstart.engine.options import MAX_DRAFTS, EngineOptions
from headstart.engine.parts import make_parts
from headstart.engine.speculation import Speculation
from headstart.simulate.cost import Costs, from_bandwidth
from headstart.vocab.draft_vocab import DraftVocab

# Costs by size of the draft vocabulary (None: all tokens) and whether requests are greedy.
SingleCosts = Callable[[int | None, bool], Costs]


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of a round of one request, by drafts."""

    seconds: tuple[float, ...]

    def round_seconds(self, batch: int, drafts: int) -> float:
        assert batch == 1
        return self.seconds[drafts]


def engine_costs(
    checkpoint: Checkpoint, head: Path | None, sizes: Iterable[int | None], *, device: str,
    dtype: str,
) -> SingleCosts:  # fmt: skip
    """Rounds of the engine timed on this device, for draft vocabularies of these sizes.

    Time does not depend on which tokens they hold. The number of CPU threads is measured, too.
    """
    built = build(
        checkpoint, head, device=device, dtype=dtype, measure_threads=True, packs_floats=True
    )
    times = {}
    for size in sizes:
        for is_greedy, found in _timed(built, size).items():
            times[size, is_greedy] = found
    if built.device.type == "cuda":
        del built
        torch.cuda.empty_cache()  # for the model that is loaded next
    return lambda size, is_greedy: times[size, is_greedy]


def bandwidth_costs(built: Built, bandwidth: float) -> SingleCosts:
    """From bytes that are read, at so many GB/s."""
    assert built.head is not None
    own = built.head.config

    def costs(size: int | None, is_greedy: bool) -> Costs:
        return from_bandwidth(
            built.config, bytes_per_weight=built.dtype.itemsize, bandwidth=bandwidth * 1e9,
            draft_tokens=size, head=own,
        )  # fmt: skip

    return costs


def _timed(built: Built, size: int | None) -> dict[bool, RoundTimes]:
    options = EngineOptions(speculate="auto", max_running_requests=1, prefix_caching=False)
    vocabs = {} if size is None else {"timed": DraftVocab(ids=tuple(range(size)), name="timed")}
    speculation = make_parts(built, options.resolved(built.device.type), vocabs).speculation
    assert speculation is not None
    return {is_greedy: _times(speculation, is_greedy) for is_greedy in (False, True)}


def _times(speculation: Speculation, is_greedy: bool) -> RoundTimes:
    """Numbers only: nothing that would keep the engine's memory."""
    seconds = [
        speculation.round_seconds(1, drafts, is_greedy=is_greedy)
        for drafts in range(MAX_DRAFTS + 1)
    ]
    return RoundTimes(tuple(number for number in seconds if number is not None))
