"""Learning is real: a trunk trained here on text with structure, and heads tuned on its answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.long_runs import long_only
from support.markov_model import write_answers, write_model

from headstart.checkpoint.reader import Checkpoint
from headstart.heads.graft import plan_graft
from headstart.train.job import Job
from headstart.train.options import TrainOptions, resolve
from headstart.train.trainer import Outcome, train
from headstart.train.variants import read_variants

# A toy sees a thousandth of the data that recipes are made for: only the rate and sizes differ.
TOY: dict[str, Any] = {"learning_rate": 3e-3, "batch_sequences": 32, "eval_every": 26}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained Llama with a grafted head, and what it answers greedily."""
    folder = tmp_path_factory.mktemp("markov")
    trunk = write_model(folder / "llama")
    plan_graft(Checkpoint.open(folder / "llama")).write(folder / "model")
    write_answers(trunk, folder / "model", folder / "data", count=360)
    return folder


def tuned(inputs: Path, out: Path, **options: Any) -> Outcome:
    given = {"": resolve(TrainOptions(**{**TOY, **options}))}
    (outcome,) = train(Job(model=inputs / "model", data=inputs / "data", out=out, options=given))
    return outcome


@long_only  # that a head learns is also shown where it does so while serving
def test_a_grafted_head_learns_all_there_is_to_learn(inputs: Path, tmp_path: Path) -> None:
    outcome = tuned(inputs, tmp_path / "run", epochs=4, learning_rate=6e-3)
    assert outcome.before is not None and outcome.after is not None
    # Greedy answers follow from the last two tokens, so a perfect head is right at every depth.
    best = 1 + 3
    assert outcome.before["acceptance_length"] < 1.5
    assert outcome.after["acceptance_length"] > 0.95 * best


@long_only
def test_both_recipes_improve_a_stock_head_at_depths_2_and_3(inputs: Path, tmp_path: Path) -> None:
    """A stock head was trained for one guess, and is worse at each further one."""
    tuned(inputs, tmp_path / "stock", num_depths=1, loss="ce", epochs=1, learning_rate=5e-4)
    file = tmp_path / "variants.json"
    recipes = ("default", "fastmtp")
    file.write_text(json.dumps([{"name": n, "overrides": {"recipe": n}} for n in recipes]))
    base = TrainOptions(**{**TOY, "learning_rate": 1e-3}, epochs=3, long_records="cut")
    job = Job(
        model=inputs / "model", data=inputs / "data", out=tmp_path / "runs",
        head=tmp_path / "stock" / "head", options=read_variants(file, base),
    )  # fmt: skip
    assert job.options["fastmtp"] == replace(
        resolve(TrainOptions(recipe="fastmtp")), learning_rate=1e-3, long_records="cut",
        batch_sequences=32, eval_every=26,
    )  # fmt: skip
    for outcome in train(job):
        assert outcome.before is not None and outcome.after is not None
        before, after = (part["cumulative_acceptance"] for part in (outcome.before, outcome.after))
        assert before[0] > before[1] > before[2]
        assert after[1] > before[1] + 0.05 and after[2] > before[2] + 0.05
        assert after[0] > before[0] - 0.02, "and depth 1 did not pay for it"
    heads = [tmp_path / "runs" / name / "head" / "head.safetensors" for name in recipes]
    assert heads[0].read_bytes() != heads[1].read_bytes()
