"""A head unrolled over whole documents against decoding step by step."""

from __future__ import annotations

import pytest
import torch
from support.engine_runs import checkpoint
from support.tiny_fixture import Tiny
from test_head_logits import LAYOUTS, models
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from headstart.checkpoint.reader import Checkpoint
from headstart.families.base import HeadLayout
from headstart.models import ragged, stacked_attention
from headstart.models.attention import LayerCache, PagedContext, Span
from headstart.models.build import build
from headstart.models.dense_attention import one_document
from headstart.models.documents import Documents, Passage
from headstart.models.mtp import MTPHead
from headstart.models.ragged import causal_attention, chained_attention
from headstart.models.row_attention import attend_rows
from headstart.models.trunk import Trunk
from headstart.models.unroll import teacher_states, trunk_states, unroll

DEPTHS = 5
DOCUMENTS = Documents((9, 1, 2, 12))


def attend_by(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the ways, whatever the numbers' precision; "stacked" in parts of few scores."""
    monkeypatch.setattr(ragged, "_is_fused", lambda q: way == "fused")
    monkeypatch.setattr(ragged, "_is_stacked", lambda q: way == "stacked")
    monkeypatch.setattr(stacked_attention, "_MOST_SCORES", 200)


def random_ids(trunk: Trunk) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(trunk.config.vocab, (DOCUMENTS.num_rows,), generator=generator)


def unrolled(
    trunk: Trunk, head: MTPHead, ids: Tensor, documents: Documents, context: str
) -> Tensor:
    states = trunk_states(trunk, ids, documents, head.layout.trunk_hidden)
    results = unroll(
        head, trunk.embed[ids], trunk.rotary, states, documents,
        num_depths=DEPTHS, context=context,
    )  # fmt: skip
    return torch.stack(results)


def decoded(trunk: Trunk, head: MTPHead, ids: Tensor, row: int) -> list[Tensor]:
    """The outputs of depths 1 to DEPTHS from one row of one document, through a K/V cache.

    Entries of earlier rows are made from trunk states first; then the chain goes on token by
    token, each depth writing the next slot, as serving does.
    """
    states = trunk_states(trunk, ids, Documents((len(ids),)), head.layout.trunk_hidden)
    config, count, results = trunk.config, head.num_modules, []
    shape = (len(ids) + 1, config.num_kv_heads, config.head_dim)
    feed, hidden = states[: row + 1], states[:0]
    for depth in range(1, min(DEPTHS, len(ids) - row - 1) + 1):
        if depth <= count:
            cache = LayerCache(*(torch.zeros(shape, dtype=states.dtype) for _ in range(2)))
            inputs = states[: row + 1] if head.layout.topology == "parallel" else feed
            tokens, start = ids[depth : depth + row + 1], 0
        else:
            inputs, tokens, start = hidden, ids[row + depth : row + depth + 1], row + depth - count
        stop = start + len(tokens)
        span = Span(0, len(tokens), slice(start, stop), slice(0, stop))
        normed, feed = head.module(depth)(
            trunk.embed[tokens], inputs, torch.arange(start, stop), trunk.rotary,
            PagedContext(cache, [span]),
        )  # fmt: skip
        hidden = feed[-1:]
        results.append(normed[-1])
    return results


@pytest.mark.parametrize("name", LAYOUTS)
def test_prefix_equality(name: str) -> None:
    trunk, head = models("qwen3", *LAYOUTS[name])
    ids = random_ids(trunk)
    found = unrolled(trunk, head, ids, DOCUMENTS, "prefix")
    for start, length in zip(DOCUMENTS.starts, DOCUMENTS.lengths, strict=True):
        for row in range(length):
            wanted = decoded(trunk, head, ids[start : start + length], row)
            for depth, vector in enumerate(wanted):
                torch.testing.assert_close(found[depth, start + row], vector, rtol=0, atol=1e-9)


def test_sequence_equality() -> None:
    """Depth k is an independent causal pass over the states that depth k - 1 gave."""
    trunk, head = models("qwen2", HeadLayout(fuse_order="hidden_first"), 1)
    ids = random_ids(trunk)
    found = unrolled(trunk, head, ids, DOCUMENTS, "sequence")
    hidden = trunk_states(trunk, ids, DOCUMENTS, "after_final_norm")
    positions = DOCUMENTS.positions(ids.device)
    for depth in range(1, DEPTHS + 1):
        hidden, _ = head.module(1)(
            trunk.embed[DOCUMENTS.ahead(ids, depth)]
            * (DOCUMENTS.tokens_left(ids.device) >= depth)[:, None],
            hidden, positions + 7, trunk.rotary, Passage(DOCUMENTS),  # rotary is relative
        )  # fmt: skip
        valid = DOCUMENTS.tokens_left(ids.device) >= depth
        torch.testing.assert_close(found[depth - 1][valid], hidden[valid], rtol=0, atol=1e-9)


def test_the_two_contexts_differ_from_depth_2_on() -> None:
    trunk, head = models("qwen3", HeadLayout(), 1)
    ids = random_ids(trunk)
    prefix, sequence = (unrolled(trunk, head, ids, DOCUMENTS, c) for c in ("prefix", "sequence"))
    torch.testing.assert_close(prefix[0], sequence[0])
    assert (prefix[1] - sequence[1]).abs().max() > 1e-3


def test_documents_do_not_see_each_other() -> None:
    trunk, head = models("qwen2", HeadLayout(), 1)
    ids = random_ids(trunk)
    whole = unrolled(trunk, head, ids, DOCUMENTS, "prefix")
    changed = ids.clone()
    changed[: DOCUMENTS.starts[3]] = (changed[: DOCUMENTS.starts[3]] + 1) % trunk.config.vocab
    other = unrolled(trunk, head, changed, DOCUMENTS, "prefix")
    torch.testing.assert_close(whole[:, DOCUMENTS.starts[3] :], other[:, DOCUMENTS.starts[3] :])
    assert (whole[:, :9] - other[:, :9]).abs().max() > 1e-3
    moved = DOCUMENTS.ahead(torch.arange(1, 25), 2).tolist()
    assert moved == [3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0, 0, *range(15, 25), 0, 0]


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("way", ["fused", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_merged_attention_and_its_gradients_equal_the_dense_ones(
    own: int, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_fused = ragged._is_fused
    attend_by(way, monkeypatch)
    torch.manual_seed(own)
    lengths = (5, 1, 17)
    q = torch.randn(23, 6, 8, dtype=dtype)
    k, v = torch.randn(2, 23, 2, 8, dtype=dtype)
    own_k, own_v = torch.randn(2, own, 23, 2, 8, dtype=dtype)
    goal = torch.randn_like(q)
    results = []
    for function in (chained_attention, _dense):
        inputs = [t.clone().requires_grad_() for t in (q, k, v, own_k, own_v)]
        out = function(*inputs, lengths)
        out.backward(goal)
        results.append([out, *[t.grad if own or i < 3 else None for i, t in enumerate(inputs)]])
    for mine, wanted in zip(*results, strict=True):
        if mine is not None:
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    if own == 0:
        torch.testing.assert_close(causal_attention(q, k, v, lengths), results[0][0])
        windowed = causal_attention(q, k, v, lengths, window=1)
        torch.testing.assert_close(windowed, v.repeat_interleave(3, 1))
    assert is_fused(q)


@pytest.mark.parametrize(
    ("size", "dtype", "is_taken"),
    [(192, torch.bfloat16, True), (28, torch.bfloat16, False), (264, torch.float16, False),
     (192, torch.float32, False)],
)  # fmt: skip
def test_a_gpu_kernel_gets_no_sizes_that_it_does_not_take(
    size: int, dtype: torch.dtype, is_taken: bool
) -> None:
    with FakeTensorMode():
        q = torch.empty(3, 4, size, dtype=dtype, device="cuda")
    assert ragged._is_fused(q) is is_taken


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("window", [None, 2, 5])
def test_windows_and_sinks_of_a_chain_are_those_of_the_text_it_makes(
    own: int, window: int | None
) -> None:
    torch.manual_seed(own)
    lengths, sinks = (5, 1, 17), torch.randn(6)
    q, k, v = torch.randn(23, 6, 8), torch.randn(23, 2, 8), torch.randn(23, 2, 5)
    own_k, own_v = torch.randn(own, 23, 2, 8), torch.randn(own, 23, 2, 5)
    if own:
        found = chained_attention(q, k, v, own_k, own_v, lengths, window, sinks)
    else:
        found = causal_attention(q, k, v, lengths, window, sinks)
    for start, row in ((0, 0), (0, 4), (5, 5), (6, 6), (6, 19)):
        keys = torch.cat([k[start : row + 1], own_k[:, row]])
        values = torch.cat([v[start : row + 1], own_v[:, row]])
        wanted = attend_rows(q[row : row + 1], keys, values, window, sinks)
        torch.testing.assert_close(found[row], wanted[0])


def _dense(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    parts = [t.split(lengths) for t in (q, k, v)] + [t.split(lengths, 1) for t in (own_k, own_v)]
    return torch.cat([one_document(*part) for part in zip(*parts, strict=True)])


def test_freezing_only_the_head_gets_gradients() -> None:
    trunk, head = models("qwen3", HeadLayout(trunk_hidden="before_final_norm"), 1)
    head.requires_grad_(True)
    ids = random_ids(trunk)
    states = trunk_states(trunk, ids, DOCUMENTS, "before_final_norm")
    assert not states.requires_grad
    normed = teacher_states(trunk, states, "before_final_norm")
    torch.testing.assert_close(normed, trunk.final_norm(states))
    unrolled(trunk, head, ids, DOCUMENTS, "prefix").sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert all(p.grad is None for p in trunk.parameters())


@pytest.mark.parametrize("way", ["dense", "fused", "stacked"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_that_are_wanted_alone_are_what_they_are_among_all(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend_by(way, monkeypatch)
    trunk, head = models("qwen3", *LAYOUTS[name])
    head.requires_grad_(True)
    ids, wanted = random_ids(trunk), torch.tensor([3, 4, 5, 11, 12, 20, 21])
    states = trunk_states(trunk, ids, DOCUMENTS, head.layout.trunk_hidden)
    found, slopes = [], []
    for rows in (None, wanted):
        depths = torch.stack(
            unroll(head, trunk.embed[ids], trunk.rotary, states, DOCUMENTS, num_depths=DEPTHS,
                   rows=rows)
        )  # fmt: skip
        found.append(depths.detach())
        (depths[:, wanted] ** 2).sum().backward()
        slopes.append(
            torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])
        )
        head.zero_grad(set_to_none=True)
    torch.testing.assert_close(found[1][:, wanted], found[0][:, wanted])
    torch.testing.assert_close(slopes[1], slopes[0])
    first = head.num_modules - 1  # from which on a depth has no rows but these
    assert found[0][first, 0].any() and not found[1][first:, 0].any(), "others are not computed"


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("most_scores", [1 << 24, 400], ids=["whole", "in parts"])
def test_half_precision_on_a_cpu_is_near_the_exact_result(
    own: int, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows alone, whose gradients come back through the stacked products."""
    monkeypatch.setattr(stacked_attention, "_MOST_SCORES", most_scores)
    torch.manual_seed(own)
    lengths, rows = (40, 3, 17), torch.tensor([2, 30, 39, 41, 50, 59])
    parts = [torch.randn(shape) for shape in ((60, 6, 16), (60, 2, 16), (60, 2, 16))]
    parts += [torch.randn(own, 6, 2, 16) for _ in range(2)]
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        q, k, v, own_k, own_v = (part.bfloat16().to(dtype).requires_grad_() for part in parts)
        if own:
            found = chained_attention(q[rows], k, v, own_k, own_v, lengths, rows=rows)
        else:
            found = causal_attention(q, k, v, lengths, rows=rows)
        (found * torch.linspace(-1, 1, 16, dtype=dtype)).sum().backward()
        results.append([found, q.grad, k.grad, v.grad, *([own_k.grad, own_v.grad] if own else [])])
    for wanted, given in zip(*results, strict=True):
        error = (given.double() - wanted).norm() / wanted.norm()
        assert 1e-6 < error < 0.01


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("way", ["dense", "dense, many scores", "fused", "stacked"])
def test_attention_for_some_rows_is_that_for_all(
    own: int, window: int | None, has_sinks: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend_by(way, monkeypatch)
    if way == "dense, many scores":
        monkeypatch.setattr(ragged, "_MOST_SCORES", 0)
    torch.manual_seed(own)
    lengths, rows = (5, 1, 17, 3), torch.tensor([1, 4, 5, 9, 10, 22])  # the last has none
    sinks = torch.randn(6) if has_sinks else None
    q, k, v = torch.randn(26, 6, 8), torch.randn(26, 2, 8), torch.randn(26, 2, 8)
    own_k, own_v = torch.randn(2, own, 26, 2, 8)
    if own:
        among = (q, k, v, own_k, own_v)
        alone = (q[rows], k, v, own_k[:, rows], own_v[:, rows])
        wanted = chained_attention(*among, lengths, window, sinks)[rows]
        found = chained_attention(*alone, lengths, window, sinks, rows=rows)
    else:
        wanted = causal_attention(q, k, v, lengths, window, sinks)[rows]
        found = causal_attention(q, k, v, lengths, window, sinks, rows=rows)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("family", ["qwen4_exp", "hy_v4", "deepseek_v4", "exaone4_5", "mellum"])
def test_rows_that_are_wanted_alone_whatever_the_head_attends_with(family: str, tiny: Tiny) -> None:
    """Regression: attention that chooses what it sees is a kind of the plain one."""
    model = build(Checkpoint.open(checkpoint(tiny, family)), device="cpu", dtype="float64")
    trunk, head = model.trunk, model.head
    assert head is not None
    ids, wanted = random_ids(trunk), torch.tensor([3, 4, 11, 20])
    with torch.no_grad():
        states = trunk_states(trunk, ids, DOCUMENTS, head.layout.trunk_hidden)
        found = [
            torch.stack(
                unroll(head, trunk.embed[ids], trunk.rotary, states, DOCUMENTS, num_depths=3,
                       rows=rows)
            )
            for rows in (None, wanted)
        ]  # fmt: skip
    torch.testing.assert_close(found[1][:, wanted], found[0][:, wanted])
