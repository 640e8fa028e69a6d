"""Models with experts, and with latent attention, in the engine: the text of transformers for every
K, whatever memory and batches do to the rows that experts see together."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import (
    VOCAB,
    GreedyTexts,
    assert_head_is_alive,
    checkpoint,
    greedy,
    ids_of,
    make_prompts,
    published_model,
    run,
    seeded,
    soft,
    start,
)
from support.head_edits import edited, published
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.errors import ConfigError
from headstart.families.experts import fused_slot

# Why the kernels of the GPU path do not take some of the families below.
REFUSED = {"exaone4_5": "the model norms what attention and MLPs give"}
FAMILIES = (
    "glm4_moe", "ernie4_5_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "mimo_v2", "step3p5",
    "exaone_moe", "mellum", "bailing_moe_v2", "qwen3_moe", *REFUSED,
)  # fmt: skip
# Most of what is tried below does not depend on how a layer attends.
closely = pytest.mark.parametrize(
    "family", ["glm4_moe", "deepseek_v3"], indirect=True, scope="module"
)
Texts = list[list[int]]
Expected = Callable[[Texts, Texts], Texts]  # texts, prompts -> what the texts have to be
PROMPTS, TOKENS = make_prompts(), 14
# K, block size, rows per step, slots of memory
SHAPES: dict[str, tuple[int, int, int, int]] = {
    "K=0, little memory": (0, 4, 24, 72),
    "K=1, blocks of one": (1, 1, 40, 100),
    "K=2, chunks of five rows": (2, 3, 5, 75),
    "K=3, all at once": (3, 4, 512, 2000),
    "K=4, little memory": (4, 3, 16, 75),
}


SHORT = ("K=1, blocks of one", "K=4, little memory")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# What the scheduler does to rows is the same for every family; one is enough where it is varied.


@pytest.fixture
def folder(family: str, tiny: Tiny) -> Path:
    return checkpoint(tiny, family)


@pytest.fixture(scope="module")
def said() -> Callable[[str, Path], Expected]:
    return cache(_plain_text)


def _plain_text(family: str, folder: Path) -> Expected:
    if family not in ("step3p5", "exaone4_5", "bailing_moe_v2"):
        greedy_texts = GreedyTexts(published_model(folder))
        return lambda texts, prompts: greedy_texts.like(texts, prompts, TOKENS)
    # transformers reads the first two with pictures only and has no class for the third; their
    # trunks are compared in unit tests
    plain = start(folder, speculate=0, prefix_caching=False, slots=4000)
    own = {tuple(prompt): ids_of(run(plain, [prompt], greedy(TOKENS)))[0] for prompt in PROMPTS}
    assert {len(text) for text in own.values()} == {TOKENS}
    return lambda texts, prompts: [own[tuple(prompt)] for prompt in prompts]


@pytest.fixture
def expected(family: str, folder: Path, said: Callable[[str, Path], Expected]) -> Expected:
    return said(family, folder)


def shaped(folder: Path, shape: str, **settings: Any) -> Engine:
    k, size, rows, slots = SHAPES[shape]
    return start(
        folder, speculate=k, block_size=size, max_batched_tokens=rows, slots=slots, **settings
    )


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *product(("glm4_moe",), unless_long(SHORT, SHAPES)),
        *product(("deepseek_v3",), unless_long(SHORT, SHAPES)),
        ("ernie4_5_moe", "K=4, little memory"),
        *product(FAMILIES[3:], unless_long(SHORT[1:], SHAPES)),
    ],
    indirect=["family"],
    scope="module",
)
def test_greedy_text_is_that_of_transformers(shape: str, folder: Path, expected: Expected) -> None:
    engine = shaped(folder, shape)
    results = run(engine, PROMPTS, greedy(TOKENS))
    assert ids_of(results) == expected(ids_of(results), PROMPTS)
    if "all at once" not in shape:
        assert engine.stats.cached_tokens > 0, "no prefix was reused"
    if "all at once" not in shape and "five rows" not in shape:  # few rows begin few requests
        assert engine.stats.preemptions > 0, "memory was not tight"
    if not shape.startswith("K=0"):
        assert_head_is_alive(results)


@pytest.mark.parametrize(
    "family",
    unless_long(["glm4_moe", "deepseek_v32", "step3p5"], FAMILIES),
    indirect=True,
    scope="module",
)
def test_sampled_text_depends_on_the_seed_and_not_on_k(family: str, tiny: Tiny) -> None:
    model, prompts = soft(tiny, family), PROMPTS[:5]
    params = [seeded(seed=i, temperature=(0.6, 1.0, 1.3)[i % 3], max_tokens=16) for i in range(5)]
    plain = start(model, speculate=0)
    alone = [ids_of(run(plain, [p], own))[0] for p, own in zip(prompts, params, strict=True)]
    for shape in ("K=2, chunks of five rows", "K=4, little memory"):
        assert ids_of(run(shaped(model, shape), prompts, params)) == alone, shape


@pytest.mark.parametrize(
    "family", unless_long(["glm4_moe", "deepseek_v3"], FAMILIES), indirect=True, scope="module"
)
def test_aborted_neighbours_change_nothing(folder: Path, expected: Expected) -> None:
    engine = shaped(folder, "K=4, little memory")
    ids = [engine.add(prompt, greedy(TOKENS)) for prompt in PROMPTS]
    dropped = set(ids[1::3])
    for step in range(1000):
        if not engine.has_work:
            break
        if step in (2, 4, 6) and dropped:
            engine.abort(dropped.pop())
        engine.step()
        engine.scheduler.check()
    assert engine.pool.num_used == 0
    kept = [i for i, name in enumerate(ids) if i % 3 != 1]
    found = [engine.collect(ids[i]).outputs[0].token_ids for i in kept]
    assert found == expected(found, [PROMPTS[i] for i in kept])


@pytest.mark.parametrize(
    "family",
    unless_long(
        ["mimo_v2", "mellum"],
        [*FAMILIES, "nemotron_h", "bailing_moe_v3"],
    ),
    indirect=True,
    scope="module",
)
def test_the_head_agrees_now_and_then_and_not_with_its_halves_swapped(
    folder: Path, tmp_path: Path
) -> None:
    def swap(own: dict[str, torch.Tensor]) -> None:
        name = published(folder, "fuse.weight")
        own[name] = own[name].roll(own[name].shape[0], dims=1).contiguous()

    prompts = [[a, b, a + b, 2 * a % VOCAB] for a in range(2, 26, 2) for b in (3, 17)]
    rates = []
    for model in (folder, edited(folder, tmp_path / "swapped", change=swap)):
        engine = start(model, speculate=3, slots=4000)
        run(engine, prompts, greedy(16))
        rates.append(engine.stats.acceptance.conditional)
    assert all(0.2 <= rate <= 0.9 for rate in rates[0]), rates[0]
    assert rates[1][0] < rates[0][0] / 2


@pytest.mark.parametrize(
    "family", ["glm4_moe", "ernie4_5_moe", "deepseek_v32", "mimo_v2"], indirect=True, scope="module"
)
def test_exact_gives_the_same_bits_in_every_batch(folder: Path) -> None:
    """Experts get another number of rows in every step, and log-probabilities show every bit."""
    params, found = greedy(12, logprobs=1), []
    for k, rows in ((0, 512), (3, 40)):
        engine = start(folder, speculate=k, dtype="float32", exact=True, max_batched_tokens=rows)
        results = run(engine, PROMPTS[:5], params)
        found.append([output.logprobs for result in results for output in result.outputs])
    assert found[0] == found[1] and found[0][0]


@closely
def test_experts_run_in_int8(folder: Path, expected: Expected) -> None:
    engine = start(folder, speculate=3, dtype="float32", weights="int8")
    assert not [n for n, p in engine.model.trunk.named_parameters() if p.dim() == 3]
    found = ids_of(run(engine, PROMPTS, greedy(TOKENS)))
    assert found == expected(found, PROMPTS)


@pytest.mark.parametrize("family", list(REFUSED), indirect=True, scope="module")
def test_kernels_refuse_them_by_name(family: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=REFUSED[family]):
        start(folder, kernels="on", dtype="float32")


def test_fused_experts_give_the_same_text_and_drafts(tiny: Tiny, tmp_path: Path) -> None:
    folder = checkpoint(tiny, "glm4_moe")

    def fuse(own: dict[str, torch.Tensor]) -> None:
        parts: dict[str, list[torch.Tensor]] = {}
        for name in [n for n in own if ".experts." in n]:  # by expert, gate before up
            slot = fused_slot(name)
            assert slot is not None
            parts.setdefault(slot.name, []).append(own.pop(name))
        for name, found in parts.items():
            own[name] = torch.cat(found).view(4, -1, found[0].shape[1])

    answers = []
    for model in (folder, edited(folder, tmp_path / "fused", change=fuse)):
        engine = start(model, speculate=3)
        answers.append(
            (ids_of(run(engine, PROMPTS, greedy(TOKENS))), engine.stats.acceptance.accepted)
        )
    assert answers[0] == answers[1]


def test_the_head_of_ernie_turns_halves_where_vllm_is_to_be_reproduced(tiny: Tiny) -> None:
    folder = checkpoint(tiny, "ernie4_5_moe")
    answers, counters = [], []
    for layout, turns_neighbours in (("own", True), ("vllm", False)):
        engine = start(folder, speculate=3, layout=layout)
        assert engine.model.head is not None
        table = engine.model.head.module(1).rotary or engine.model.trunk.rotary
        assert table.is_interleaved is turns_neighbours
        answers.append(ids_of(run(engine, PROMPTS, greedy(TOKENS))))
        counters.append(engine.stats.acceptance.accepted)
    assert answers[0] == answers[1] and counters[0] != counters[1]


def test_each_draft_of_mimo_v2_has_a_module_of_its_own_but_not_in_vllm(tiny: Tiny) -> None:
    folder = checkpoint(tiny, "mimo_v2")
    counted = {}
    for layout, modules in (("own", 3), ("vllm", 1)):
        for k in (1, 3):
            engine = start(folder, speculate=k, layout=layout)
            assert engine.model.head is not None and engine.model.head.num_modules == modules
            text = ids_of(run(engine, PROMPTS, greedy()))
            counted[layout, k] = (text, engine.stats.acceptance.accepted)
    assert counted["own", 1] == counted["vllm", 1], "the first module is the same"
    assert counted["own", 3][0] == counted["vllm", 3][0]
    assert counted["own", 3][1] != counted["vllm", 3][1]


def test_modules_of_step_draft_with_lm_heads_of_their_own(tiny: Tiny, tmp_path: Path) -> None:
    """With another one in its place, only the drafts of that module suffer."""
    folder = checkpoint(tiny, "step3p5")

    def shuffle(own: dict[str, torch.Tensor]) -> None:
        (name,) = [n for n in own if n.endswith("layers.3.transformer.shared_head.output.weight")]
        own[name] = own[name].roll(1, dims=0).contiguous()

    rates = []
    for model in (folder, edited(folder, tmp_path / "shuffled", change=shuffle)):
        for vocab in (None, list(range(VOCAB))):
            engine = start(model, speculate=3, slots=4000, draft_vocab=vocab)
            run(engine, PROMPTS, greedy())
            rates.append(engine.stats.acceptance.conditional)
    assert rates[0] == rates[1] and rates[2] == rates[3], "a draft vocabulary has its rows of each"
    assert rates[0][0] > 0.4 and rates[2][0] > 0.4
    assert rates[0][1] > 0.4 and rates[2][1] < 0.1
