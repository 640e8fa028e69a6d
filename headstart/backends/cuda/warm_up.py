"""What a start does before the first request: compile, capture, and go the whole way once.

Libraries load kernels, plan and take memory when they are first asked; a request should not wait
for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from headstart.backends.cuda.compiling import compiled_together, thinned
from headstart.backends.cuda.drafting import run_drafts
from headstart.backends.cuda.forward import GROUP_ROWS
from headstart.backends.cuda.packed import MOST_GROUPS, captured_sizes, first_sizes
from headstart.backends.cuda.rounds import run_choice, run_round, run_trunk
from headstart.backends.cuda.sampling import SamplingNeeds, choose_rows
from headstart.backends.cuda.shapes import RoundShape, TrunkShape
from headstart.backends.rounds import RoundRequest
from headstart.backends.rows import HeadRows, TrunkRows
from headstart.sampling.params import Row, SamplingParams

if TYPE_CHECKING:
    from headstart.backends.cuda.device_rounds import CapturedRounds

_COMPILED_ROWS = 64  # of a prompt that only compiles
# Tokens of blank prompts: libraries load another kernel for every few hundred rows.
_LONG_PROMPTS = (2560, 3072, 4096, 6144, 8192)
_ROUNDS = 4  # as it is, captured, replayed twice
_GROUPS = (4, 8, 16, 32, 64)  # of rows that join; fewer are put together by the same kernels
_PREPARED = 4  # requests whose prompts may begin in one pass that is captured at the start
_SAMPLED = SamplingNeeds(processes=True, processes_drafts=True)
_ALL = SamplingNeeds(
    processes=True, processes_drafts=True, has_logprobs=True, has_masks=True, rejects=True
)
_KINDS = (
    SamplingParams(temperature=0),
    SamplingParams(
        temperature=0.5, top_k=20, top_p=0.9, logprobs=1, frequency_penalty=0.1,
        logit_bias={0: 1.0}, min_tokens=1,
    ),
)  # fmt: skip


def compile_all(rounds: CapturedRounds, shapes: Sequence[RoundShape]) -> None:
    """All kernels of a pass over prompts and of these rounds, side by side."""
    model, batch = thinned(rounds.graphs.model), rounds.batch
    with compiled_together():
        read_blank(rounds, _COMPILED_ROWS)
        blank = torch.zeros(1, rounds.vocab, device=batch.lengths.device)
        choose_rows(blank, [Row(_KINDS[1], 1, 1)], with_logprobs=True)
        for shape in shapes:
            run_round(model, batch, shape)
            sampled = replace(shape, needs=_SAMPLED)
            run_drafts(model, batch, sampled.drafts)
            run_choice(model, batch, sampled.choice)
        for shape in shapes[:1]:
            run_round(model, batch, replace(shape, needs=_ALL))
            for groups in _GROUPS if rounds.joins(()) else ():
                rows = shape.count * (shape.num_drafts + 1)
                run_trunk(model, batch, replace(shape.trunk, groups=groups, rows=rows))


def capture_packed(rounds: CapturedRounds) -> None:
    """Passes that prompts join, of some sizes: libraries have loaded what so many rows need."""
    rows = min(rounds.sizes.num_drafts, rounds.sizes.max_drafts) + 1
    counts = rounds.graphs.counts()
    for fewer, count in pairwise(counts):
        own = (fewer + 1) * rows  # of the fewest requests that such a pass is for
        for size in first_sizes(rounds.batch.lengths.device):
            if size > own:
                groups = min(MOST_GROUPS, -(-(size - own) // GROUP_ROWS) + _PREPARED)
                part = TrunkShape(count, rows - 1, 1 << (groups - 1).bit_length(), size)
                rounds.graphs.prepare(part)


def time_pass(rounds: CapturedRounds, size: int) -> None:
    """Keep what the pass that was captured last takes the device, if it has so many rows."""
    part = TrunkShape(0, 0, 1 << (-(-size // GROUP_ROWS) - 1).bit_length(), size)
    if not rounds.graphs.has_graph(part):
        return
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    rounds.graphs.run_part(part)
    ended.record()
    ended.synchronize()
    rounds.pass_seconds[size] = began.elapsed_time(ended) / 1e3


def rehearse(rounds: CapturedRounds) -> None:
    """Blank requests from prompt to answer, while K/V memory is scratch."""
    for count in (*captured_sizes(rounds.batch.lengths.device), *_LONG_PROMPTS):
        for _ in range(2):  # as it is; then captured
            read_blank(rounds, min(count, rounds.sizes.max_rows), is_alone=True)
        time_pass(rounds, count)
    if rounds.joins(()) and rounds.backend.device.type == "cuda":
        capture_packed(rounds)
    blank = torch.zeros(1, rounds.vocab, device=rounds.batch.lengths.device)
    for params in _KINDS:
        (newest,), _ = rounds.choose_first(blank, [Row(params, 1, 1, [0], [], 0)])
        for request in _blank_requests(rounds, newest, params):
            rounds.admit(request)
            drafts = [min(rounds.sizes.num_drafts, rounds.sizes.max_drafts)]
            for _ in range(_ROUNDS):
                rounds.launch(drafts).collect()
            joining = [TrunkRows([0], 0, request.blocks, 1, feeds_head=True)]
            for _ in range(2 if rounds.joins(joining) else 0):
                rounds.launch(drafts, joining).collect()
            rounds.remove(0)


def _blank_requests(
    rounds: CapturedRounds, newest: torch.Tensor, params: SamplingParams
) -> Iterator[RoundRequest]:
    """One, where there is memory for it."""
    sizes, tokens = rounds.cache, 4 + (_ROUNDS + 2) * (rounds.sizes.max_drafts + 1)
    num_blocks = -(-tokens // sizes.block_size)
    fits = num_blocks <= sizes.num_blocks and tokens <= rounds.sizes.max_tokens
    if fits and not sizes.num_states:
        batch = rounds.batch
        states = batch.states.new_zeros(batch.carried.shape[1] + 1, batch.states.shape[-1])
        yield RoundRequest(
            num_tokens=3, remaining=tokens, newest=newest, row=Row(params, 1, 3, [0], [], 1),
            states=states if rounds.graphs.has_head else None, blocks=range(num_blocks),
        )  # fmt: skip


def read_blank(rounds: CapturedRounds, count: int, *, is_alone: bool = False) -> None:
    """A blank prompt of so many tokens, or what there is memory for, by trunk and head.

    `is_alone`: as one that comes while no request decodes, in a captured pass if it is short.
    """
    sizes, backend = rounds.cache, rounds.backend
    room = min(sizes.num_blocks * sizes.block_size, rounds.sizes.max_tokens)
    count = max(1, min(count, room // 2))
    blocks, tokens = range(-(-count // sizes.block_size)), [0] * count
    asked = [TrunkRows(tokens, 0, blocks, 1, True)]
    read = rounds.read if is_alone and rounds.joins(asked) else backend.trunk_pass
    (states,), _ = read(asked)
    for module in range(min(backend.num_modules, count - 1)):
        rows = HeadRows(tokens[module + 1 :], module + 1, blocks, states[: -module - 1])
        backend.head_pass(module, [rows])
        backend.fill_head(module, [rows])
