"""Kernels in which a row's bits do not depend on the other rows; on the CPU interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.interpreted_bf16 import repair_bf16
from support.tiny_fixture import Tiny
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda import exact
from headstart.backends.cuda.attending import EVERYTHING
from headstart.backends.cuda.exact import ExactKernels, exact_shape, filled
from headstart.backends.cuda.forward import Kernels, Rows
from headstart.backends.cuda.prompts import exact_rows, ragged_rows
from headstart.backends.cuda.sampling import choose_rows
from headstart.checkpoint.reader import Checkpoint
from headstart.models.attention import LayerCache, Span, attend_span
from headstart.models.build import build
from headstart.sampling.params import Row, SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = DEVICE == "cpu"
PAGE, POSITIONS = 4, 64
TOKENS = [3, 4, 5, 60, 7, 8, 9, 10, 11]
OTHERS = [(7 * i) % 64 for i in range(12)]
BLOCKS = ([5, 1, 3, 9], [0, 2, 7, 4])  # of one request, and of the one beside it
SIZES: dict[str, Any] = {
    "hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 64,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETED:
        repair_bf16(monkeypatch)


class Rig:
    """A tiny trunk with K/V memory for two requests."""

    def __init__(self, tiny: Tiny, dtype: str, kernels: Kernels):
        folder = tiny("qwen3", rate=0.9, seed=1, dtype="F32", **SIZES)
        built = build(Checkpoint.open(folder), device=DEVICE, dtype=dtype, with_head=False)
        self.trunk, self.kernels = built.trunk, kernels
        shape = (10 * PAGE, built.config.num_kv_heads, built.config.head_dim)
        self.caches = [
            LayerCache(*(torch.zeros(shape, dtype=built.dtype, device=DEVICE) for _ in range(2)))
        ]

    @torch.inference_mode()
    def run(self, *parts: tuple[int, int, int]) -> Tensor:
        """Rows [start, stop) of the requests in one pass; logits of the first part's rows."""
        spans: list[Span] = []
        ids: list[int] = []
        positions: list[int] = []
        for request, start, stop in parts:
            slots = [BLOCKS[request][t // PAGE] * PAGE + t % PAGE for t in range(stop)]
            kv_slots = torch.tensor(slots, device=DEVICE)
            first = len(ids)
            ids += (TOKENS, OTHERS)[request][start:stop]
            positions += range(start, stop)
            spans.append(Span(first, len(ids), kv_slots[start:], kv_slots))
        at = torch.tensor(positions, device=DEVICE)
        if isinstance(self.kernels, ExactKernels):
            rows = exact_rows(spans, at, self.kernels, PAGE)
        else:
            rows = ragged_rows(spans, at)
        return self._logits(ids, rows)[: parts[0][2] - parts[0][1]]

    @torch.inference_mode()
    def verify(self, requests: Sequence[int], start: int, count: int) -> Tensor:
        """The same as a round does it: `count` rows of each request from slot `start`."""
        tables = torch.tensor([BLOCKS[i] for i in requests], dtype=torch.int32, device=DEVICE)
        slots = torch.arange(start, start + count, device=DEVICE).repeat(len(requests))
        each = tables.repeat_interleave(count, 0).gather(1, (slots // PAGE)[:, None]).squeeze(1)
        seen = torch.full((len(requests),), start, dtype=torch.int32, device=DEVICE)
        attend = self.kernels.paged(
            tables, seen, count, block_size=PAGE, max_context=POSITIONS, first_slot=0
        )
        ids = [t for i in requests for t in (TOKENS, OTHERS)[i][start : start + count]]
        rows = Rows(slots, (each * PAGE + slots % PAGE).int(), attend)
        return self._logits(ids, rows)[:count]

    def _logits(self, ids: list[int], rows: Rows) -> Tensor:
        tokens = torch.tensor(ids, device=DEVICE)
        normed = self.kernels.trunk(self.trunk, tokens, rows, self.caches)[1]
        return self.kernels.whole(normed, self.trunk.lm_head)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_however_it_is_run(
    dtype: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once; in chunks beside another prompt, in two tiles; and as rows of a round."""
    if IS_INTERPRETED:
        monkeypatch.setattr(exact, "TILE", 4)  # fewer rows to fill up, which take their time
    whole = Rig(tiny, dtype, ExactKernels(POSITIONS)).run((0, 0, 9))
    rig = Rig(tiny, dtype, ExactKernels(POSITIONS))
    first, second = rig.run((0, 0, 5), (1, 0, 12)), rig.run((0, 5, 6))
    assert torch.equal(torch.cat([first, second]), whole[:6])
    assert torch.equal(rig.verify((0, 1), 6, 3), whole[6:9])


def test_without_exact_the_bits_depend_on_the_number_of_rows(tiny: Tiny) -> None:
    """The control: more than 16 rows go to the library, which adds in another order."""
    alone = Rig(tiny, "float32", Kernels()).run((0, 0, 5))
    beside = Rig(tiny, "float32", Kernels()).run((0, 0, 5), (1, 0, 12))
    assert not torch.equal(alone, beside)
    torch.testing.assert_close(alone, beside, rtol=1e-3, atol=1e-3)


def test_contexts_of_several_cuts_are_attended_to_in_whole() -> None:
    kernels, context = ExactKernels(600), 300
    shape = (context, 2, 16)
    cache = LayerCache(*(torch.randn(shape, device=DEVICE) for _ in range(2)))
    q = torch.randn(2, 4, 16, device=DEVICE)
    blocks = torch.randperm(context // PAGE)
    slots = torch.tensor([context - 1, 257])
    attend = kernels.by_row(blocks.int().repeat(2, 1).to(DEVICE), slots.int().to(DEVICE), PAGE)
    found = attend(filled(q), cache, EVERYTHING)[:2]
    kv_slots = (blocks[:, None] * PAGE + torch.arange(PAGE)).flatten().to(DEVICE)
    for row, slot in enumerate(slots.tolist()):
        span = Span(0, 1, kv_slots[slot : slot + 1], kv_slots[: slot + 1])
        wanted = attend_span(q[row : row + 1], cache, span)
        torch.testing.assert_close(found[row : row + 1], wanted, rtol=1e-4, atol=1e-5)


def launches(monkeypatch: pytest.MonkeyPatch, tiny: Tiny, kernels: Kernels, count: int) -> set[Any]:
    """Everything a compiler could take into account, of every launch; nothing is run.

    Of a round of `count` rows and of a prompt's pass with as many.
    """
    from triton.runtime import interpreter

    def known(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        return (value == 1, value % 16 == 0) if isinstance(value, int) else value

    found: set[Any] = set()
    of = "round"

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        unknown = self.kwargs.get("do_not_specialize") or ()
        given = [
            "any" if name in unknown else known(value)
            for name, value in zip(self.arg_names, args, strict=False)
        ]
        found.add((self.fn.__name__, of, *given, *sorted(settings.items())))

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", run)
    rig = Rig(tiny, "float32", kernels)
    rig.verify([0] * count, 6, 1)
    of = "prompt"
    whole, rest = divmod(count, len(OTHERS))
    rig.run(*[(1, 0, len(OTHERS))] * whole, *[(1, 0, rest)] * bool(rest))
    of = "choice"
    normed = torch.zeros(count, SIZES["hidden_size"])
    logits = kernels.logits(normed, rig.trunk.lm_head)[0].zero_()
    choose_rows(logits, [Row(SamplingParams(top_p=0.5), 1, 1)] * count, with_logprobs=True)
    return found


@pytest.mark.skipif(not IS_INTERPRETED, reason="only interpreted launches can be watched")
def test_launches_are_the_same_for_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    whole, counted = (
        [launches(monkeypatch, tiny, ExactKernels(positions), n) for n in (1, 2, 5, 16, 17, 40, 64)]
        for positions in (POSITIONS, 5 * POSITIONS)  # one piece of every context, and several
    )
    assert all(found == whole[0] for found in whole)
    assert all(found == counted[0] for found in counted)
    names, of_whole = ({name for name, *_ in found[0]} for found in (counted, whole))
    assert {"_linear", "_gated", "_place_qkv", "_attend", "combine", "_finish"} <= names
    assert of_whole == names - {"combine"}
    plain = [launches(monkeypatch, tiny, Kernels(), count) for count in (1, 40)]
    assert plain[0] != plain[1], "the control: usually they are chosen by the number of rows"
    for part in ("round", "prompt"):
        assert {"_linear", "_attend"} <= {name for name, of, *_ in counted[0] if of == part}


def test_cuts_depend_on_the_model_alone() -> None:
    assert exact_shape(4096, 4096).splits > exact_shape(151680, 4096).splits == 1
    short, long = ExactKernels(1000), ExactKernels(40_000)
    assert short._cut.tokens < long._cut.tokens
    for kernels in (short, long):
        assert kernels._max_context <= 32 * kernels._cut.tokens
