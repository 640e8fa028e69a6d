"""Every family that the engine runs, from end to end: answers are served and scored, the head is
trained on them, exported, stitched back, and the engine counts what the simulator predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine_records import records
from support.engine_runs import VOCAB, assert_head_is_alive, checkpoint, greedy, ids_of, run, start
from support.head_edits import differing, export, stitch, tensors
from support.long_runs import unless_long
from support.server_runs import HTTP
from support.server_threads import serving
from support.tiny_fixture import Tiny
from support.training_data import write_data

from headstart.checkpoint.reader import Checkpoint
from headstart.engine.output import Result
from headstart.heads.detection import find_head
from headstart.sampling.acceptance import Acceptance
from headstart.simulate.plan import make_plan
from headstart.simulate.rates import Rates
from headstart.simulate.scoring import WHOLE, score
from headstart.train.job import Job
from headstart.train.options import TrainOptions, resolve
from headstart.train.trainer import Outcome, train

# and the formats besides our own that can hold its head
FAMILIES = {
    "glm4_moe": ("xllm", "sglang", "speculators"),
    "ernie4_5_moe": ("sglang",),
    "qwen3_next": ("sglang", "speculators"),
    "qwen3_5": ("xllm", "sglang", "speculators"),
    "qwen3_5_moe_text": ("xllm", "sglang", "speculators"),
    "deepseek_v3": ("xllm", "sglang"),
    "deepseek_v32": ("xllm", "sglang"),
    "glm4_moe_lite": ("sglang",),
    "glm_moe_dsa": ("xllm",),
    "mimo_v2": (),
    "step3p5": (),
    "nemotron_h": (),
    "bailing_moe_v3": ("sglang", "speculators"),
    "bailing_moe_v2": ("sglang", "speculators"),
    "exaone_moe": ("sglang", "speculators"),
    "exaone4_5": ("speculators",),
    "mellum": ("speculators",),
    "qwen3_moe": ("vllm", "speculators"),
    "hy_v4": ("sglang",),
    "glm5_next": ("sglang",),
    "qwen4_exp": ("sglang",),
    "deepseek_v4": ("xllm", "sglang"),
}
PARAMS = greedy(16)
PROMPTS = [[a, (3 * a) % VOCAB, a + 1] for a in range(2, 34)]
DRAFTS = 3
QUICK: dict[str, Any] = {
    "epochs": 2, "batch_tokens": 200, "pack_tokens": 100, "learning_rate": 3e-3, "num_depths": 3,
    "eval_every": 1000,
}  # fmt: skip


def answers(folder: Path, **options: Any) -> list[Result]:
    """What the engine says, and counts."""
    return run(start(folder, speculate=DRAFTS, slots=6000, **options), PROMPTS[:4], PARAMS)


def served(folder: Path) -> tuple[list[list[int]], Acceptance]:
    """The same from the server."""
    fields = {"temperature": 0, "max_tokens": PARAMS.max_tokens, "ignore_eos": True}
    asked = {"model": "small", "prompt": PROMPTS[:4], "return_token_ids": True, **fields}
    engine = start(folder, speculate=DRAFTS, slots=6000)
    with serving(engine) as server:
        answer = HTTP.post(f"{server.url}/v1/completions", json=asked).json()
    return [choice["token_ids"] for choice in answer["choices"]], engine.stats.acceptance


def counted(results: list[Result]) -> Acceptance:
    total = Acceptance()
    for result in results:
        total.add(result.stats.acceptance)
    return total


def predicted(folder: Path, results: list[Result]) -> Acceptance:
    """What the simulator says that the engine counts at K = 3."""
    engine = start(folder, speculate=DRAFTS)
    known = records(results, PARAMS)
    found = score(
        engine.model, known, make_plan(known, None, "match"), max_drafts=DRAFTS,
        end_ids=engine.prompts.end_ids, vocabs={WHOLE: lambda record: None},
    )  # fmt: skip
    total = Acceptance()
    for part in found[WHOLE].parts.values():
        assert isinstance(part.found, Rates)
        total.add(part.found.walked[DRAFTS])
    return total


def trained(model: Path, folder: Path) -> Outcome:
    """The head tuned on the model's own answers; `folder/run/head` is the result."""
    plain = run(start(model, speculate=0, slots=6000), PROMPTS, PARAMS)
    known = records(plain, PARAMS)
    data = write_data(model, folder / "data", known[8:], known[:8])
    options = {"": resolve(TrainOptions(**QUICK))}
    (outcome,) = train(Job(model=model, data=data, out=folder / "run", options=options))
    return outcome


# The others are siblings of these, and take their turn in long runs.
SOME = [
    "glm4_moe",  # experts
    "qwen3_5",  # dense, with recurrent layers
]


@pytest.mark.parametrize("family", unless_long(SOME, list(FAMILIES)))
def test_a_head_is_served_scored_trained_exported_and_stitched(
    family: str, tiny: Tiny, tmp_path: Path
) -> None:
    model = checkpoint(tiny, family)
    stock = answers(model)
    assert_head_is_alive(stock)
    assert served(model) == (ids_of(stock), counted(stock))
    assert predicted(model, stock) == counted(stock)

    outcome = trained(model, tmp_path)
    assert outcome.before is not None and outcome.after is not None
    before, after = (part["acceptance_length"] for part in (outcome.before, outcome.after))
    assert after > before + 0.2, "training taught the head nothing"

    head = tmp_path / "run" / "head"
    beside = answers(model, head=head)
    assert ids_of(beside) == ids_of(stock), "a head changes speed and nothing else"
    assert counted(beside).length > counted(stock).length

    whole = stitch(head, model, tmp_path / "whole")
    assert counted(answers(whole)) == counted(beside)
    assert predicted(whole, beside) == counted(beside)
    own = set(find_head(Checkpoint.open(model)).tensors.values())
    assert differing(tensors(whole), tensors(model)) <= own, "the trunk was touched"

    for name in ("headstart", *FAMILIES[family]):
        assert counted(answers(model, head=export(model, name, tmp_path / name))) == counted(stock)
    back = stitch(tmp_path / "headstart", whole, tmp_path / "back")
    assert not differing(tensors(back), tensors(model))
