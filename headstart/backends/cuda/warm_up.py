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

from headstart.backends.cuda.attending import GROUP_ROWS
from headstart.backends.cuda.compiling import compiled_together, thinned
from headstart.backends.cuda.drafting import run_drafts
from headstart.backends.cuda.packed import (
    MOST_GROUPS,
    captured_rows,
    captured_sizes,
    first_sizes,
)
from headstart.backends.cuda.recurrent_prompts import many_requests
from headstart.backends.cuda.rounds import run_choice, run_round, run_trunk
from headstart.backends.cuda.sampling import SamplingNeeds, choose_rows
from headstart.backends.cuda.shapes import RoundShape, TrunkShape
from headstart.backends.rounds import RoundRequest
from headstart.backends.rows import HeadRows, StateRows, TrunkRows, blank_tokens
from headstart.sampling.params import Row, SamplingParams

if TYPE_CHECKING:
    from headstart.backends.cuda.device_rounds import CapturedRounds

_COMPILED_ROWS = 64  # of a prompt that only compiles
# Tokens of blank prompts: libraries load another kernel for every few hundred rows.
_LONG_PROMPTS = (2560, 3072, 4096, 6144, 8192)
_ROUNDS = 4  # as it is, captured, replayed twice
_GROUPS = (4, 8, 16, 32, 64)  # of rows that join; fewer are put together by the same kernels
_BEGUN_GROUPS = 4  # more than rows need, since every request begins one, of a pass at the start
_AUTO_DRAFTS = 3  # of most rounds with `auto`
_SAMPLED = SamplingNeeds(processes=True, processes_drafts=True)
_TOLD = SamplingNeeds(has_logprobs=True)
_MASKED = SamplingNeeds(processes=True, has_masks=True)
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


def compile_all(
    rounds: CapturedRounds, shapes: Sequence[RoundShape], copying: Sequence[RoundShape] = ()
) -> None:
    """All kernels of a pass over prompts and of these rounds, side by side.

    `copying`: rounds that are compiled for plain requests alone.
    """
    model, batch = thinned(rounds.graphs.model), rounds.batch
    with compiled_together():
        read_blank(rounds, _COMPILED_ROWS)
        delta = rounds.backend.config.delta
        if delta is not None and not rounds.backend.reads_states_plainly:
            read_blank(rounds, 1, requests=many_requests(delta))
        blank = torch.zeros(1, rounds.vocab, device=batch.lengths.device)
        choose_rows(blank, [Row(_KINDS[1], 1, 1)], with_logprobs=True)
        for shape in shapes:
            run_round(model, batch, shape)
            sampled = replace(shape, needs=_SAMPLED)
            run_drafts(model, batch, sampled.drafts)
            run_choice(model, batch, sampled.choice)
            run_choice(model, batch, replace(shape, needs=_TOLD).choice)
        for shape in copying:
            run_round(model, batch, shape)
        for shape in (shapes[0], shapes[-1]):  # logits of many rows come in another type
            run_round(model, batch, replace(shape, needs=_ALL))
            run_choice(model, batch, replace(shape, needs=_MASKED).choice)
        if rounds.joins(()):
            rows = _usual_rows(rounds)
            for count in rounds.graphs.counts()[1:]:
                for groups in _GROUPS if count == batch.count else _GROUPS[:1]:
                    part = TrunkShape(count, rows - 1, groups, count * rows)
                    run_trunk(model, batch, part)


def _usual_rows(rounds: CapturedRounds) -> int:
    """Of a request in a round, with the drafts that most rounds have."""
    usual = _AUTO_DRAFTS if rounds.menu else rounds.sizes.num_drafts
    return min(usual, rounds.sizes.max_drafts) + 1


def capture_packed(rounds: CapturedRounds) -> None:
    """Passes over prompts alone, and some that prompts join.

    Libraries have loaded what so many rows need. The largest come first: their scratch memory
    serves the others.
    """
    rows, device = _usual_rows(rounds), rounds.batch.lengths.device
    for fewer, count in reversed(list(pairwise(rounds.graphs.counts()))):
        own = (fewer + 1) * rows  # of the fewest requests that such a pass is for
        most = captured_rows(count * rows + rounds.sizes.max_rows, device)
        for size in reversed([size for size in first_sizes(device) if own < size <= most]):
            groups = -(-(size - own) // GROUP_ROWS) + _BEGUN_GROUPS
            rounds.graphs.prepare(_packed_part(count, rows - 1, size, min(MOST_GROUPS, groups)))
    for size in reversed(captured_sizes(device)):
        part = _packed_part(0, 0, size, -(-size // GROUP_ROWS))
        if rounds.graphs.has_run(part):
            rounds.graphs.prepare(part)


def _packed_part(count: int, drafts: int, rows: int, groups: int) -> TrunkShape:
    return TrunkShape(count, drafts, 1 << (groups - 1).bit_length(), rows)


def time_passes(rounds: CapturedRounds) -> None:
    """What captured passes over prompts alone take the device, by their rows."""
    for size in captured_sizes(rounds.batch.lengths.device):
        part = _packed_part(0, 0, size, -(-size // GROUP_ROWS))
        if rounds.graphs.has_run(part):
            read_blank(rounds, size, is_alone=True)  # the pass that follows has its rows
            rounds.pass_seconds[size] = _seconds(rounds, part)


def _seconds(rounds: CapturedRounds, part: TrunkShape) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    rounds.graphs.run_part(part)
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def rehearse(rounds: CapturedRounds) -> None:
    """Blank requests from prompt to answer, while K/V memory is scratch."""
    for count in (*captured_sizes(rounds.batch.lengths.device), *_LONG_PROMPTS):
        read_blank(rounds, min(count, rounds.sizes.max_rows), is_alone=True)
    if rounds.joins(()) and rounds.backend.device.type == "cuda":
        capture_packed(rounds)
        time_passes(rounds)
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


def read_blank(
    rounds: CapturedRounds, count: int, *, is_alone: bool = False, requests: int = 1
) -> None:
    """Blank prompts of so many tokens, or what there is memory for, by trunk and head.

    `is_alone`: as one that comes while no request decodes, in a captured pass if it is short.
    """
    sizes, backend = rounds.cache, rounds.backend
    room = min(sizes.num_blocks * sizes.block_size, rounds.sizes.max_tokens)
    count = max(1, min(count, room // 2))
    blocks, tokens = range(-(-count // sizes.block_size)), blank_tokens(count, rounds.vocab)
    kept = StateRows(None, ((count, 0),)) if sizes.num_states else None  # slots are scratch, too
    asked = [TrunkRows(tokens, 0, blocks, 1, True, kept)] * requests
    read = rounds.read if is_alone and rounds.joins(asked) else backend.trunk_pass
    states = read(asked)[0][0]
    for module in range(min(backend.num_modules, count - 1)):
        rows = HeadRows(tokens[module + 1 :], module + 1, blocks, states[: -module - 1])
        backend.head_pass(module, [rows])
        backend.fill_head(module, [rows])
