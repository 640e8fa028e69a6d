"""What rounds of one request cost: measured on this device, or from sizes and bandwidth."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headstart.assembly.build import Built
from headstart.engine.cost import measure
from headstart.engine.drafter import Drafter
from headstart.engine.runner import Runner
from headstart.simulate.cost import Costs, from_bandwidth
from headstart.vocab.draft_vocab import DraftVocab

_BLOCK_SIZE, _NUM_BLOCKS, _MAX_ROWS = 16, 8, 32  # of the K/V memory that rounds are timed with


def single_costs(
    built: Built, vocabs: Iterable[DraftVocab] = (), bandwidth: float | None = None
) -> Costs:
    """Drafts come from the largest of `vocabs`, or from all tokens; bandwidth in GB/s."""
    vocabs = list(vocabs)
    assert built.head is not None
    if bandwidth is not None:
        return from_bandwidth(
            built.config, bytes_per_weight=built.dtype.itemsize, bandwidth=bandwidth * 1e9,
            draft_tokens=max((len(vocab.ids) for vocab in vocabs), default=None),
            head=built.head.config,
        )  # fmt: skip
    with torch.inference_mode():
        runner = Runner(
            built.trunk, built.head, num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE,
            dtype=built.dtype,
        )  # fmt: skip
        for vocab in vocabs:
            runner.add_draft_vocab(vocab.name, vocab.ids)
        return measure(
            runner, Drafter(runner), num_blocks=_NUM_BLOCKS, max_batch=1, max_rows=_MAX_ROWS
        )
