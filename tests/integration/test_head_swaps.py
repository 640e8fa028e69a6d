"""A head that is swapped while requests run changes which drafts are accepted, and nothing else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engine_records import records
from support.engine_runs import checkpoint, greedy, make_prompts, run, seeded, start
from support.head_edits import export
from support.long_runs import unless_long
from support.swapped_heads import (
    acceptance,
    answered,
    bits_of,
    is_plain,
    two_heads,
    two_soft_heads,
)
from support.tiny_fixture import Tiny

from headstart.backends.numba.support import why_missing
from headstart.engine.engine import Engine
from headstart.errors import ConfigError, HeadstartError
from headstart.sampling.acceptance import Acceptance
from headstart.sampling.params import SamplingParams
from headstart.simulate.plan import make_plan
from headstart.simulate.rates import Rates
from headstart.simulate.scoring import WHOLE, score
from headstart.vocab.draft_vocab import DraftVocab

PROMPTS = make_prompts()
needs_numba = pytest.mark.skipif(why_missing() is not None, reason="no numba here")
PLAIN: dict[str, Any] = {}
NUMBA: dict[str, Any] = {"dtype": "float32"}
INT8: dict[str, Any] = {"dtype": "float32", "weights": "int8"}
WAYS = {
    "plain": PLAIN,
    "compiled": pytest.param(NUMBA, marks=needs_numba),
    "compiled, int8": pytest.param(INT8, marks=needs_numba),
}


def mixed(count: int = 20) -> list[SamplingParams]:
    """Greedy and seeded, in turns."""
    own = [greedy(count), *(seeded(seed=n, max_tokens=count) for n in range(3))]
    return [own[n % len(own)] for n in range(len(PROMPTS))]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("speculate", unless_long([0, 3], [0, 1, 2, 3, 4, "auto"]))
def test_texts_stay_through_swaps_preemptions_and_prefix_hits(
    tiny: Tiny, way: dict[str, Any], speculate: Any
) -> None:
    """Memory is short and prefixes are shared; requests that do not draft fill the head, too."""
    heads = two_soft_heads(tiny)
    wanted = answered(start(heads.model, speculate=0, **way), PROMPTS, mixed())
    engine = start(
        heads.weak_model, speculate=speculate or 3, slots=72, max_batched_tokens=32, **way
    )
    assert is_plain(engine) == (not way)
    params = [replace(own, speculate=0) if speculate == 0 else own for own in mixed()]
    swaps = [heads.good, heads.weak, heads.good]
    assert answered(engine, PROMPTS, params, swaps) == wanted
    assert engine.head_version == 3
    assert engine.stats.preemptions > 0 and engine.stats.cached_tokens > 0
    if speculate:
        assert sum(engine.stats.acceptance.accepted) > 0


def test_a_request_that_is_aborted_around_a_swap_leaves_the_others_alone(tiny: Tiny) -> None:
    heads = two_soft_heads(tiny)
    wanted = answered(start(heads.model, speculate=0), PROMPTS[:4], mixed()[:4])
    engine = start(heads.weak_model, speculate=3)
    names = [engine.add(p, own) for p, own in zip(PROMPTS[:4], mixed()[:4], strict=True)]
    engine.step()
    engine.abort(names[1])
    engine.swap_head(heads.good)
    engine.step()
    engine.abort(names[2])
    while engine.has_work:
        engine.step()
    engine.scheduler.check()
    for number in (0, 3):
        assert engine.collect(names[number]).outputs[0].token_ids == wanted[number]


# Of each family what its head has and others have not: several modules, LM heads of their own,
# experts, latents, norms around one, gates; each in the ways that run it.
FAMILIES = [
    ("mimo", INT8), ("step3p5", NUMBA), ("qwen3_next", INT8), ("deepseek_v3", NUMBA),
    ("mimo_v2", PLAIN),
]  # fmt: skip
MORE = [
    ("qwen4_exp", PLAIN),
    *(
        (family, way)
        for family in ("mimo", "step3p5", "qwen3_next", "deepseek_v3", "mimo_v2", "glm4_moe")
        for way in (PLAIN, NUMBA, INT8, {**NUMBA, "weights": "int4"}, {**INT8, "kernels": "off"})
    ),
]


@needs_numba
@pytest.mark.parametrize(("family", "way"), unless_long(FAMILIES, [*FAMILIES, *MORE]), ids=str)
def test_drafts_after_a_swap_are_those_of_an_engine_that_began_with_the_head(
    tiny: Tiny, family: str, way: dict[str, Any]
) -> None:
    heads = two_heads(tiny, family)
    settings: dict[str, Any] = {"speculate": 3, "draft_vocab": list(range(0, 64, 2)), **way}
    fresh, engine = start(heads.model, **settings), start(heads.weak_model, **settings)
    params = [greedy(16, draft_vocab=name) for name in ("none", "default")] * 4
    prompts = PROMPTS[:8]
    good, weak = (acceptance(own, prompts, params) for own in (fresh, engine))
    assert good != weak, "both heads draft alike: a swap would not show"
    before = bits_of(engine)
    engine.swap_head(heads.good)
    assert acceptance(engine, prompts, params) == good
    assert bits_of(engine) == bits_of(fresh)
    engine.swap_head(heads.weak)
    assert acceptance(engine, prompts, params) == weak
    assert bits_of(engine) == before, "there and back leaves every bit as it was"


EVEN, ODD = (DraftVocab.of(range(first, 64, 2), vocab_size=64) for first in (0, 1))


@needs_numba
@pytest.mark.parametrize(("family", "way"), unless_long(FAMILIES, [*FAMILIES, *MORE]), ids=str)
def test_a_draft_vocabulary_comes_with_a_head(tiny: Tiny, family: str, way: dict[str, Any]) -> None:
    """Drafts are then those of an engine that began with both."""
    heads = two_heads(tiny, family)
    fresh = start(heads.model, speculate=3, draft_vocab=[ODD], **way)
    engine = start(heads.weak_model, speculate=3, draft_vocab=[EVEN], **way)
    params, prompts = [greedy(16)] * 8, PROMPTS[:8]
    good, weak = (acceptance(own, prompts, params) for own in (fresh, engine))
    before = bits_of(engine)
    engine.swap_head(engine.prepare_head(heads.good, ODD))
    assert acceptance(engine, prompts, params) == good != weak
    assert bits_of(engine) == bits_of(fresh)
    (found,) = engine.draft_vocabs.by_name.values()
    assert found.ids == ODD.ids
    engine.swap_head(heads.good)
    assert acceptance(engine, prompts, params) == good, "a head alone leaves the list"
    engine.swap_head(engine.prepare_head(heads.weak, EVEN))
    assert acceptance(engine, prompts, params) == weak
    assert bits_of(engine) == before


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_texts_stay_while_draft_vocabularies_are_swapped(tiny: Tiny, way: dict[str, Any]) -> None:
    """With preemptions and prefix hits, greedy and seeded."""
    heads = two_soft_heads(tiny)
    wanted = answered(start(heads.model, speculate=0, **way), PROMPTS, mixed())
    engine = start(
        heads.weak_model, speculate=3, slots=72, max_batched_tokens=32, draft_vocab=[EVEN], **way
    )
    swaps = [
        engine.prepare_head(head, vocab)
        for head, vocab in ((heads.good, ODD), (heads.weak, EVEN), (heads.good, ODD))
    ]
    assert answered(engine, PROMPTS, mixed(), swaps) == wanted
    assert engine.head_version == 3 and engine.stats.preemptions > 0
    assert sum(engine.stats.acceptance.accepted) > 0


def test_a_draft_vocabulary_that_does_not_fit_is_refused(tiny: Tiny) -> None:
    heads = two_heads(tiny)
    engine = start(heads.weak_model, speculate=3, draft_vocab=[EVEN])
    own = start(heads.weak_model, speculate=3, draft_vocab=[EVEN], draft_vocab_own=4)
    whole = start(heads.weak_model, speculate=3)
    fewer = DraftVocab.of(range(8), vocab_size=64)
    outside = DraftVocab.of(range(40, 72))
    for wrong, vocab, words in (
        (engine, fewer, "it has 8 tokens, the running one 32"),
        (engine, outside, "it holds token 71, the model has 0 to 63"),
        (own, ODD, "requests draft tokens of their own beside the running one"),
        (whole, ODD, "0 draft vocabularies run, and one can be replaced"),
    ):
        before = bits_of(wrong)
        with pytest.raises(ConfigError, match=words):
            wrong.prepare_head(heads.good, vocab)
        assert bits_of(wrong) == before and wrong.head_version == 0


def predicted(engine: Engine, params: SamplingParams) -> list[Acceptance]:
    """What the simulator says of the head that runs, at K = 3, from answers without drafts."""
    plain = run(engine, PROMPTS[:5], replace(params, speculate=0))
    known = records(plain, params)
    found = score(
        engine.model, known, make_plan(known, None, "match"), max_drafts=3,
        end_ids=engine.prompts.end_ids, vocabs={WHOLE: lambda record: None},
    )  # fmt: skip
    rates = [part.found for part in found[WHOLE].parts.values()]
    return [own.walked[3] for own in rates if isinstance(own, Rates)]


def test_a_better_head_is_accepted_as_often_as_the_simulator_predicts(tiny: Tiny) -> None:
    heads, params = two_heads(tiny), greedy(26)
    engine = start(heads.weak_model, speculate=3, slots=4000)
    asked = [params] * 5
    weak, good = predicted(engine, params), predicted(start(heads.model, slots=4000), params)
    assert acceptance(engine, PROMPTS[:5], asked) == weak
    engine.swap_head(heads.good)
    assert acceptance(engine, PROMPTS[:5], asked) == good == predicted(engine, params)
    totals = [sum(sum(own.accepted) for own in each) for each in (weak, good)]
    assert totals[1] > 1.2 * totals[0], totals
    control = start(heads.weak_model, speculate=3, slots=4000)
    for _ in range(2):
        assert acceptance(control, PROMPTS[:5], asked) == weak


def test_what_auto_learnt_of_the_old_head_is_forgotten(tiny: Tiny) -> None:
    heads = two_heads(tiny)
    engine = start(heads.weak_model, speculate="auto")
    run(engine, PROMPTS, greedy())
    assert engine.policy is not None and sum(engine.policy.rates.overall.tried) > 0
    engine.swap_head(heads.good)
    assert engine.policy.rates.overall.tried == []


def test_a_head_is_prepared_beside_the_running_one_and_swapped_later(tiny: Tiny) -> None:
    heads = two_heads(tiny)
    engine = start(heads.weak_model, speculate=3)
    before = bits_of(engine)
    prepared = engine.prepare_head(heads.good)
    assert bits_of(engine) == before and engine.head_version == 0
    engine.swap_head(prepared)
    assert bits_of(engine) == bits_of(start(heads.model, speculate=3))


def other_head(tiny: Tiny, out: Path, family: str = "mimo", **changes: Any) -> Path:
    return export(checkpoint(tiny, family, **changes), "headstart", out)


REFUSED: dict[str, Any] = {
    "another vocabulary": ({"vocab_size": 96}, "the head is for hidden 128 and 96 tokens"),
    "another width": ({"hidden_size": 64}, "the head is for hidden 64 and 64 tokens"),
    "another MLP": ({"intermediate_size": 32}, r"modules_.0.block.mlp.gate_up has weight \(64,"),
    "fewer K/V heads": ({"num_key_value_heads": 1}, "attention has kv_heads 1, of the running one"),
    "another norm": ({"rms_norm_eps": 1e-3}, "has eps 0.001, of the running one"),
    "more modules": ({"num_nextn_predict_layers": 2}, "it has 2 modules, the running one 1"),
    "another rotation": ({"rope_theta": 5e5}, "rotates positions by"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_head_that_does_not_fit_is_refused_and_nothing_changes(
    why: str, tiny: Tiny, tmp_path: Path
) -> None:
    fields, words = REFUSED[why]
    heads = two_heads(tiny)
    engine = start(heads.weak_model, speculate=3)
    before = bits_of(engine)
    with pytest.raises(HeadstartError, match=words) as caught:
        engine.swap_head(other_head(tiny, tmp_path / "head", **fields))
    assert "\n" not in str(caught.value)
    assert bits_of(engine) == before and engine.head_version == 0


def test_heads_of_other_families_formats_and_files_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    heads = two_heads(tiny)
    engine = start(heads.weak_model, speculate=3, dtype="float32")
    before = bits_of(engine)
    cut = Path(shutil.copytree(heads.good, tmp_path / "cut"))
    file = next(cut.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    given = {
        "holds a glm4_moe head": other_head(tiny, tmp_path / "glm", "glm4_moe"),
        "safetensors": cut,
        "no checkpoint|does not exist|no such": tmp_path / "nowhere",
    }
    for words, folder in given.items():
        with pytest.raises(HeadstartError, match=words):
            engine.swap_head(folder)
        assert bits_of(engine) == before and engine.head_version == 0


def test_without_a_head_there_is_nothing_to_swap(tiny: Tiny) -> None:
    heads = two_heads(tiny)
    with pytest.raises(ConfigError, match="runs without a head"):
        start(heads.model, speculate=0).swap_head(heads.good)
