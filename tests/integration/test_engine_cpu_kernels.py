"""A CPU's compiled kernels, in all formats: a text depends on its tokens alone, to the bit."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import (
    VOCAB,
    assert_head_is_alive,
    checkpoint,
    greedy,
    make_prompts,
    run,
    seeded,
    soft,
    start,
)
from support.head_edits import edited
from support.long_runs import unless_long
from support.quantized_models import quantized_model
from support.tiny_fixture import Tiny

from headstart.backends.numba import compiler, support, thread_pool
from headstart.backends.weights import SplitStack
from headstart.engine import drafter
from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams

PROMPTS = make_prompts()
INT8: dict[str, Any] = {"weights": "int8", "dtype": "float32"}
INT4: dict[str, Any] = {"weights": "int4", "dtype": "float32"}
FLOAT: dict[str, Any] = {"weights": "as-dtype", "dtype": "float32"}

USUAL = [("qwen3_5_moe", INT8), ("deepseek_v3", FLOAT)]
MORE = [
    ("mimo", INT8), ("llama", INT4),
    ("qwen2", FLOAT), ("qwen3", INT8), ("glm4_moe", INT4), ("glm4_moe_lite", INT8),
    ("mimo_v2", INT8), ("qwen3_next", INT4), ("step3p5", FLOAT), ("ernie4_5_moe", FLOAT),
]  # fmt: skip

needs_numba = pytest.mark.skipif(support.why_missing() is not None, reason="no numba here")


def answers(
    engine: Engine, params: SamplingParams | None = None
) -> list[tuple[list[int], list[float]]]:
    """Texts, greedy where nothing else is asked for, and the log-probability of each token."""
    results = run(engine, PROMPTS, params or greedy(30, logprobs=1))
    if isinstance(engine.options.speculate, int) and engine.options.speculate:
        assert_head_is_alive(results)
    outputs = [result.outputs[0] for result in results]
    return [(o.token_ids, [entry.logprob for entry in o.logprobs or ()]) for o in outputs]


def compiled(folder: Path, **settings: Any) -> Engine:
    engine = start(folder, **{**INT8, **settings})
    assert engine.backend.name == "numba", engine.notes
    assert any("compiled kernels: ready" in note for note in engine.notes)
    return engine


@needs_numba
@pytest.mark.parametrize(("family", "kind"), unless_long(USUAL, [*USUAL, *MORE]))
def test_drafts_memory_chunks_and_batches_change_no_bit(
    tiny: Tiny, family: str, kind: dict[str, Any]
) -> None:
    folder = soft(tiny, family)
    plain = answers(compiled(folder, speculate=0, **kind))
    assert answers(compiled(folder, speculate=3, **kind)) == plain
    assert answers(compiled(folder, speculate="auto", **kind)) == plain
    assert answers(compiled(folder, speculate=16, block_size=16, slots=2400, **kind)) == plain
    tight: dict[str, Any] = {"slots": 60, "max_batched_tokens": 20, "prefix_caching": False}
    small = compiled(folder, speculate=3, **tight, **kind)
    assert answers(small) == plain
    assert small.stats.preemptions > 0
    cached = compiled(folder, speculate=2, max_running_requests=2, block_size=1, **kind)
    assert answers(cached) == plain
    assert cached.stats.cached_tokens > 0


@needs_numba
@pytest.mark.parametrize("vocab", [None, list(range(0, 64, 2))], ids=["all tokens", "half"])
def test_a_chain_of_drafts_is_what_one_by_one_gives(tiny: Tiny, vocab: list[int] | None) -> None:
    """Requests of different K and settings in one batch; a chain is as deep as the K of each."""
    found = []
    for is_chained in (True, False):
        engine = compiled(soft(tiny), speculate=3, draft_vocab=vocab)
        assert engine.loop.drafter is not None and engine.backend.drafts_chains
        if not is_chained:
            engine.backend.drafts_chains = False
        proposed: list[dict[str, list[int]]] = []
        propose = engine.loop.drafter.propose

        def note(drafting: Any, propose: Any = propose, proposed: Any = proposed) -> None:
            propose(drafting)
            proposed.append({request.id: request.drafts for request in drafting})

        engine.loop.drafter.propose = note
        params = [greedy(20, speculate=k) for k in (1, 3, 5)] + [
            seeded(max_tokens=20),
            seeded(max_tokens=20, speculate=5, top_p=0.9, logit_bias={7: 2.0}, min_tokens=9),
            seeded(max_tokens=20, top_k=20, presence_penalty=1.0, acceptance="rejection"),
            seeded(max_tokens=20, min_p=0.02, banned_token_ids=(3, 4), repetition_penalty=1.3),
        ]  # fmt: skip
        run(engine, [*PROMPTS, *PROMPTS][: len(params)], params)
        found.append([[*each.values()] for each in proposed])
    assert found[0] == found[1]
    assert len(found[0]) > 4
    assert {len(drafts) for each in found[0] for drafts in each} >= {1, 3, 5}


class TwoOfThree:
    """A grammar that allows other tokens at every place."""

    def __init__(self, place: int = 0):
        self._place = place

    def allowed(self) -> torch.Tensor:
        return (torch.arange(VOCAB) + self._place) % 3 > 0

    def accept(self, token: int) -> bool:
        fits = bool(self.allowed()[token])
        self._place += 1
        return fits

    def fork(self) -> TwoOfThree:
        return TwoOfThree(self._place)


@needs_numba
def test_drafts_under_a_grammar_are_those_of_its_masks_in_fewer_calls(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call per draft is what it was before; the texts and the drafts are the same."""
    found = []
    for is_each_alone in (False, True):
        if is_each_alone:
            monkeypatch.setattr(drafter, "_needs_masks", lambda request: True)
        engine = compiled(soft(tiny), speculate=3)
        calls, proposed = [0], []
        draft_chain, propose = engine.backend.draft_chain, engine.loop.drafter.propose

        def count(*given: Any, own: Any = draft_chain, calls: Any = calls) -> Any:
            calls[0] += 1
            return own(*given)

        def note(drafting: Any, own: Any = propose, proposed: Any = proposed) -> None:
            own(drafting)
            proposed.append([list(request.drafts) for request in drafting])

        monkeypatch.setattr(engine.backend, "draft_chain", count)
        monkeypatch.setattr(engine.loop.drafter, "propose", note)
        results = run(engine, PROMPTS[:1], greedy(30), grammar=TwoOfThree())
        assert_head_is_alive(results)
        found.append((results[0].outputs[0].token_ids, proposed, calls[0]))
    (text, drafts, calls), (plain_text, plain_drafts, more_calls) = found
    assert text == plain_text and drafts == plain_drafts
    assert len(drafts) < calls < more_calls, "some guesses fitted, some did not"


@needs_numba
@pytest.mark.parametrize(("kind", "drafts"), [(INT8, [3]), (INT4, [1, 2, 3, 4])])
def test_samples_with_and_without_drafts_are_equal(
    tiny: Tiny, kind: dict[str, Any], drafts: list[int]
) -> None:
    folder = soft(tiny)
    plain, *drafted = (
        [
            result.outputs[0].token_ids
            for result in run(compiled(folder, speculate=k, **kind), PROMPTS, seeded())
        ]
        for k in (0, *drafts)
    )
    assert drafted == [plain] * len(drafts)


@needs_numba
@pytest.mark.parametrize("family", ["mimo", "llama", "qwen2"])
def test_states_and_drafts_are_those_of_the_plain_modules(tiny: Tiny, family: str) -> None:
    folder = checkpoint(tiny, family)
    found = []
    for settings in ({}, {"kernels": "off"}, {"weights": "as-dtype"}):
        engine = start(folder, speculate=3, **{**INT8, **settings})
        (result,) = run(engine, PROMPTS[:1], greedy(12, logprobs=1, logprobs_mode="raw"))
        values = torch.tensor([entry.logprob for entry in result.outputs[0].logprobs or ()])
        found.append((result.outputs[0].token_ids, values, result.stats.acceptance.length))
    (tokens, values, length), (_, by_torch, _), (exact_tokens, exact, exact_length) = found
    assert tokens == exact_tokens and length == pytest.approx(exact_length, abs=0.5)
    # nearer to fp32 than torch's int8 products, whose inputs are bf16
    assert (values - exact).abs().max() <= (by_torch - exact).abs().max() + 1e-3


@needs_numba
@pytest.mark.parametrize("family", ["mimo", "llama", "glm4_moe", "qwen3_5", "glm4_moe_lite"])
def test_float32_is_what_the_plain_modules_compute(tiny: Tiny, family: str) -> None:
    folder, found = soft(tiny, family), []
    for settings in ({}, {"kernels": "off"}):
        engine = start(folder, speculate=3, **{**FLOAT, **settings})
        (result,) = run(engine, PROMPTS[:1], greedy(12, logprobs=1, logprobs_mode="raw"))
        values = torch.tensor([entry.logprob for entry in result.outputs[0].logprobs or ()])
        found.append((result.outputs[0].token_ids, values, engine.backend.name))
    (tokens, values, name), (plain_tokens, plain, plain_name) = found
    assert (name, plain_name) == ("numba", "torch")
    assert tokens == plain_tokens
    torch.testing.assert_close(values, plain, rtol=1e-4, atol=1e-5)


@needs_numba
@pytest.mark.parametrize(
    "family", unless_long(["qwen3_5_moe", "glm4_moe_lite"], ["glm4_moe", "deepseek_v3", "step3p5"])
)
def test_threads_change_no_bit(tiny: Tiny, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than cores: some are late, and find that others have gone on."""
    folder = soft(tiny, family)
    alone = answers(compiled(folder, speculate=3))
    monkeypatch.setattr(thread_pool, "_MIN_WORK", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert answers(compiled(folder, speculate=3)) == alone


REFUSED = {
    "indexers": (("deepseek_v32", {}), "an indexer"),
    "norms behind": (("exaone4_5", {}), "norms what attention and MLPs give"),
    "mamba": (("nemotron_h", {}), "layers with mamba|layers of their own"),
    "streams": (("hy_v4", {}), "several residual streams"),
}


@needs_numba
@pytest.mark.parametrize("case", REFUSED)
def test_what_kernels_cannot_run_is_said_and_runs_plainly(tiny: Tiny, case: str) -> None:
    (family, changes), reason = REFUSED[case]
    engine = start(checkpoint(tiny, family, **changes), speculate=2, **INT8)
    assert engine.backend.name == "torch"
    notes = [note for note in engine.notes if "compute no whole layers here" in note]
    assert len(notes) == 1
    assert re.search(reason, notes[0])
    assert len(run(engine, PROMPTS[:1], greedy(4))[0].outputs[0].token_ids) == 4


def test_a_long_compilation_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("numba")
    from headstart.backends.numba import backend

    with backend._notice_if_it_takes_long():
        pass
    monkeypatch.setattr(backend, "_SILENT_SECONDS", 0.0)
    with pytest.raises(ValueError, match="wrong"), backend._notice_if_it_takes_long():
        deadline = time.monotonic() + 20
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        raise ValueError("wrong")
    monkeypatch.setattr(backend, "_SILENT_SECONDS", 0.2)
    with pytest.raises(ValueError, match="wrong"), backend._notice_if_it_takes_long():
        raise ValueError("wrong")
    time.sleep(0.4)
    assert [record.message for record in caplog.records] == [backend._COMPILING]


def test_without_numba_torch_computes(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    engine = start(checkpoint(tiny), speculate=3, **INT8)
    assert engine.backend.name == "torch"
    assert "int8 kernels compute no whole layers here: numba is not installed" in engine.notes
    assert_head_is_alive(run(engine, PROMPTS, greedy(20)))


@needs_numba
def test_a_numba_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("numpy is too new")

    monkeypatch.setattr(compiler, "import_module", fail)
    assert support.why_missing() == "numba does not load (numpy is too new)"


@needs_numba
def test_kernels_off_and_other_number_formats_run_plainly(tiny: Tiny) -> None:
    folder = checkpoint(tiny)
    assert start(folder, kernels="off", **INT8).backend.name == "torch"
    double = start(folder, weights="int8", dtype="float64")
    assert double.backend.name == "torch"
    assert any("numbers are torch.float64" in note for note in double.notes)


# By how the layers' matrices are held. Parts of merged matrices end with blocks at larger sizes.
STORED = {
    "PackedGroups": ["awq", "gptq-sorted", "gptq", "compressed-tensors", "auto-round"],
    "PackedLinear": ["int8-row"],
    "PackedEightBits": [
        "fp8-row",
        "fp8-block",
        "fp8-tensor",
        "int8-group-plain",
        "int8-asymmetric",
    ],
}
RARE = ("gptq", "auto-round", "int8-asymmetric")
SIZES: dict[str, dict[str, int]] = {"fp8-block": {"head_dim": 64, "intermediate_size": 128}}


def soft_quantized(tiny: Tiny, form: str, out: Path) -> Path:
    folder = quantized_model(tiny, form, **SIZES.get(form, {}))
    return edited(folder, out, change=lambda own: own["lm_head.weight"].mul_(0.4))


@needs_numba
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (kind, form) for kind, forms in STORED.items()
        for form in unless_long([form for form in forms if form not in RARE], forms)
    ],
)  # fmt: skip
def test_quantised_checkpoints_run_as_they_are_stored(
    tiny: Tiny, tmp_path: Path, kind: str, form: str
) -> None:
    """All matrices of the layers, zero points included; the LM head is in float32."""
    folder = soft_quantized(tiny, form, tmp_path / "model")
    engine = compiled(folder, speculate=0, **FLOAT)
    trunk = engine.backend.trunk
    held = {type(m).__name__ for layer in trunk.layers for m in layer.modules() if is_packed(m)}
    assert held == {kind}
    assert type(trunk.lm_head).__name__ == "PackedFloat"
    assert any(note.startswith("14 weights stay as stored") for note in engine.notes)
    assert not any("dequantised" in note for note in engine.notes)
    texts, sampling = answers(engine), seeded(max_tokens=30, logprobs=1)
    samples = answers(engine, sampling)
    for drafts in (1, 2, 3, 4):
        drafted = compiled(folder, speculate=drafts, **FLOAT)
        assert answers(drafted) == texts
        assert answers(drafted, sampling) == samples
    reference = answers(start(folder, speculate=0, kernels="off", **FLOAT))
    # Rows are rounded beside integers, to 8 bits beside those of 4.
    near, share = {"PackedGroups": (0.05, 0.8), "PackedLinear": (0.01, 0.95)}.get(kind, (1e-4, 1))
    close = [
        abs(one - other) < near
        for (_, own), (_, others) in zip(texts, reference, strict=True)
        for one, other in zip(own[:4], others[:4], strict=True)
    ]
    assert sum(close) >= share * len(close)


def is_packed(module: torch.nn.Module) -> bool:
    return type(module).__name__.startswith("Packed")


@needs_numba
def test_4_bits_are_not_rounded_again(tiny: Tiny) -> None:
    engine = compiled(quantized_model(tiny, "awq"), speculate=0, **INT4)
    assert engine.backend.trunk.layers[0].mlp.down.has_zeros


@needs_numba
@pytest.mark.parametrize("form", unless_long(["awq"], ["awq", "fp8-block", "int8-row"]))
def test_quantised_experts_run_as_they_are_stored(tiny: Tiny, form: str) -> None:
    folder = quantized_model(tiny, form, "glm4_moe", moe_intermediate_size=128)
    plain = compiled(folder, speculate=0, **FLOAT)
    experts = [m for m in plain.backend.trunk.modules() if isinstance(m, SplitStack)]
    kinds = {type(part).__name__ for stack in experts for part in stack.parts}
    assert len(experts) == 2
    assert kinds == {kind for kind, forms in STORED.items() if form in forms}
    assert not any("dequantised" in note and "expert" in note for note in plain.notes)
    assert answers(compiled(folder, speculate=3, **FLOAT)) == answers(plain)


@needs_numba
def test_stored_weights_of_models_that_run_plainly_go_through_compiled_products(tiny: Tiny) -> None:
    folder = quantized_model(tiny, "fp8-row", "deepseek_v32")
    engine, plain = (
        start(folder, speculate=2, kernels=kernels, **FLOAT) for kernels in ("auto", "off")
    )
    assert engine.backend.name == "torch"
    assert any(note.startswith("8-bit and 4-bit kernels compute no wh") for note in engine.notes)
    kinds = [{type(m).__name__ for m in e.model.trunk.modules()} for e in (engine, plain)]
    assert "PackedEightBits" in kinds[0] - kinds[1] and "Fp8Linear" in kinds[1] - kinds[0]
    params = greedy(8)
    texts = [[r.outputs[0].token_ids for r in run(e, PROMPTS[:3], params)] for e in (engine, plain)]
    assert texts[0] == texts[1]
