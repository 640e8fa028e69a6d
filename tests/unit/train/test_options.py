"""Options, recipes, variants, the learning rate."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from headstart.engine.options import MAX_DRAFTS
from headstart.errors import ConfigError
from headstart.train.losses.combine import step_weights
from headstart.train.losses.kinds import KINDS
from headstart.train.optimizers import learning_rate
from headstart.train.options import RECIPES, TrainOptions, resolve, sized
from headstart.train.variants import read_variants


def test_a_recipe_fills_every_option_that_was_not_given() -> None:
    for recipe in RECIPES:
        whole = resolve(TrainOptions(recipe=recipe))
        open_ = {f.name for f in fields(whole) if getattr(whole, f.name) is None}
        assert open_ == {"draft_vocab", "cache", "states_from"}
    assert resolve(TrainOptions(loss="tv", beta=0.9)).loss == "tv"


def test_help_says_what_each_recipe_sets() -> None:
    texts = {field.name: field.metadata["help"] for field in fields(TrainOptions)}
    assert texts["learning_rate"].endswith("(recipe default: 0.001, recipe fastmtp: 5e-05)")
    assert texts["beta"].endswith("(recipes: 0.6)")
    for name in RECIPES["default"]:
        assert "(recipe" in texts[name], name


def test_the_learning_rate_goes_with_the_optimiser() -> None:
    assert resolve(TrainOptions()).learning_rate == RECIPES["default"]["learning_rate"]
    adamw = resolve(TrainOptions(optimizer="adamw")).learning_rate
    sharded = resolve(TrainOptions(shard=True))  # Muon needs whole matrices
    assert sharded.optimizer == "adamw" and sharded.learning_rate == adamw == 2e-4
    assert resolve(TrainOptions(optimizer="adamw", learning_rate=0.5)).learning_rate == 0.5
    assert resolve(TrainOptions(recipe="fastmtp")).learning_rate == 5e-5


def test_little_data_gets_smaller_steps_unless_a_size_was_given() -> None:
    options = resolve(TrainOptions())
    assert sized(options, 10**9) == options
    small = sized(options, 9000).batch_tokens
    assert small is not None and 9000 // small * 3 >= 50
    assert sized(resolve(TrainOptions(batch_tokens=4000)), 9000).batch_tokens == 4000
    assert sized(resolve(TrainOptions(batch_sequences=8)), 9000).batch_sequences == 8
    fastmtp = resolve(TrainOptions(recipe="fastmtp"))
    assert sized(fastmtp, 9000) == fastmtp


def test_the_fastmtp_recipe_is_the_papers() -> None:
    found = resolve(TrainOptions(recipe="fastmtp"))
    assert (found.context, found.loss, found.beta, found.num_depths) == ("sequence", "ce", 0.6, 3)
    assert (found.learning_rate, found.schedule, found.warmup) == (5e-5, "cosine", 0.05)
    assert (found.batch_sequences, found.epochs, found.max_len) == (64, 3, 4096)
    assert (found.adam_beta1, found.adam_beta2, found.weight_decay) == (0.9, 0.95, 0.1)
    rounded = [round(weight, 2) for weight in step_weights(0.6, 3)]
    assert rounded == [0.51, 0.31, 0.18]


def test_every_loss_can_be_asked_for() -> None:
    for loss in KINDS:
        assert TrainOptions(loss=loss).loss == loss


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_depths": 0}, "num_depths is 0"),
        ({"loss": "mse"}, "loss is 'mse'"),
        ({"recipe": "best"}, "recipe is 'best'; expected 'default', 'fastmtp'"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"warmup": 1.0}, "warmup is 1.0"),
        ({"max_len": 2}, "max_len is 2"),
        ({"batch_tokens": 0, "batch_sequences": 0}, "both 0"),
        ({"context": "all"}, "context is 'all'"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_options_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainOptions(**given)


def test_both_sizes_of_a_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="filled by one of them"):
        resolve(TrainOptions(batch_tokens=10, batch_sequences=10))


def rates(num_steps: int = 40, **given: Any) -> list[float]:
    options = resolve(TrainOptions(**{"learning_rate": 2.0, "warmup": 0.1, **given}))
    return [learning_rate(step, num_steps, options) for step in range(num_steps)]


def test_the_learning_rate_rises_and_falls() -> None:
    found = rates()
    assert max(found) == found[4] == 2.0
    assert found[:5] == sorted(found[:5]) and found[4:] == sorted(found[4:], reverse=True)
    assert 0 < found[-1] < 0.01
    linear = rates(schedule="linear")
    assert (linear[4], linear[22]) == (2.0, 1.0)
    assert rates(warmup=0.0, schedule="constant")[-1] == 2.0


def test_a_rate_may_stay_and_fall_late_and_end_above_nothing() -> None:
    found = rates(schedule="wsd", decay=0.25)
    assert found[4:31] == [2.0] * 27  # 36 steps after warm-up, of which nine go down
    assert found[31:] == pytest.approx([2 * (40 - step) / 9 for step in range(31, 40)])
    ended = rates(schedule="wsd", decay=0.25, final_rate=0.1)
    assert ended[31:] == pytest.approx([0.2 + 0.9 * rate for rate in found[31:]])
    assert rates(final_rate=0.5)[4] == 2.0 and rates(final_rate=0.5)[-1] > 1.0


def variants_file(folder: Path, entries: object) -> Path:
    path = folder / "variants.json"
    path.write_text(json.dumps(entries))
    return path


def test_variants_are_the_base_with_some_options_replaced(tmp_path: Path) -> None:
    entries = [{"name": "a"}, {"name": "b", "overrides": {"loss": "kl", "learning_rate": 1e-3}}]
    found = read_variants(variants_file(tmp_path, entries), TrainOptions(beta=0.7))
    assert found["a"] == resolve(TrainOptions(beta=0.7))
    assert found["b"] == resolve(TrainOptions(beta=0.7, loss="kl", learning_rate=1e-3))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "holds no list with a variant"),
        ([{"name": "a"}, {"name": "a"}], "two variants are called 'a'"),
        ([{"name": "../x"}], "is no variant"),
        ([{"name": "a", "loss": "kl"}], "is no variant"),
        ([{"name": "a", "overrides": {"los": "kl"}}], "'los' is no option"),
        ([{"name": "a"}, {"name": "b", "overrides": {"seed": 3}}], "seed is 0 in a and 3 in b"),
        ([{"name": "a"}, {"name": "b", "overrides": {"recipe": "fastmtp"}}], "batch_tokens is"),
        ([{"name": "a", "overrides": {"epochs": "3"}}], "epochs is '3'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_variants_are_refused(tmp_path: Path, entries: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_variants(variants_file(tmp_path, entries), TrainOptions())


def test_as_many_depths_can_be_trained_as_the_engine_drafts() -> None:
    TrainOptions(num_depths=MAX_DRAFTS)
    with pytest.raises(ConfigError, match=f"num_depths is 17; give at most {MAX_DRAFTS}"):
        TrainOptions(num_depths=MAX_DRAFTS + 1)
    with pytest.raises(ConfigError, match="learning_rate is inf"):
        TrainOptions(learning_rate=float("inf"))
