"""The options of training, in one frozen dataclass that is also its command-line flags.

Fields that are None are the recipe's to fill: `resolve` returns a complete new object, which is
what a run stores and what a re-run is compared with. Recipes are data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headstart.errors import ConfigError, some
from headstart.vocab.own_tokens import check_beside, check_limit

# What each recipe sets. `default`: the context of serving and Muon, both ahead in the study of
# a small model (docs/lab-log.md), and a loss that learns well from fresh and from tuned heads. Its
# learning rate is a tenth of the best one there, with larger models in mind: not measured.
# `fastmtp`: arXiv 2509.18362.
RECIPES: dict[str, dict[str, Any]] = {
    "default": {
        "context": "prefix", "loss": "lk", "beta": 0.6, "optimizer": "muon",
        "learning_rate": 1e-3, "batch_tokens": 65536, "batch_sequences": 0, "min_steps": 50,
        "long_records": "cut",
        "adam_beta2": 0.95, "weight_decay": 0.0, "warmup": 0.05, "epochs": 3,
    },
    "fastmtp": {
        "context": "sequence", "loss": "ce", "beta": 0.6, "optimizer": "adamw",
        "learning_rate": 5e-5, "batch_tokens": 0, "batch_sequences": 64, "min_steps": 0,
        "long_records": "drop",
        "adam_beta2": 0.95, "weight_decay": 0.1, "warmup": 0.05, "epochs": 3,
    },
}  # fmt: skip
# Of the default recipe with AdamW, whose best rates in the study were two to five times lower.
_ADAMW_RATE = 2e-4
# What decides which records a step sees; heads trained side by side must agree on these.
ORDER_FIELDS = (
    "epochs", "max_steps", "batch_tokens", "batch_sequences", "min_steps", "pack_tokens", "max_len",
    "long_records", "seed",
)  # fmt: skip


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _by_recipe(name: str, text: str) -> Any:
    """An option that the recipe fills; its help says with what."""
    shown = {recipe: _shown(values[name]) for recipe, values in RECIPES.items()}
    if len(set(shown.values())) == 1:
        said = f"recipes: {shown['default']}"
    else:
        said = ", ".join(f"recipe {recipe}: {value}" for recipe, value in shown.items())
    return _option(None, f"{text} ({said})")


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How a head is trained. None: as the recipe says."""

    recipe: Literal["default", "fastmtp"] = _option("default", "what sets the options not given")
    num_depths: int = _option(3, "K: how many tokens ahead the head is trained to draft")
    context: Literal["prefix", "sequence"] | None = _by_recipe(
        "context", "what deeper drafts attend to: prefix as in serving, sequence as FastMTP"
    )
    loss: Literal["ce", "kl", "lk", "tv", "e2e-tv"] | None = _by_recipe(
        "loss", "ce on the text; kl, lk, tv, e2e-tv against the trunk's distribution"
    )
    beta: float | None = _by_recipe("beta", "weight of depth k is beta^(k-1) over their sum")
    lk_decay: float = _option(3.0, "loss lk: how soon it turns from kl to tv")
    teacher_temperature: float = _option(1.0, "temperature of both distributions in soft losses")
    draft_vocab: str | None = _option(None, "file of the draft vocabulary to train for")
    draft_vocab_own: int = _option(
        0, "own tokens of a text that serving drafts beside draft_vocab: train for them, too"
    )
    optimizer: Literal["adamw", "muon"] | None = _by_recipe(
        "optimizer", "muon: for matrices, with AdamW for vectors and stacked experts"
    )
    learning_rate: float | None = _by_recipe("learning_rate", "at its peak")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = _option(
        "cosine",
        "of the learning rate; wsd: it stays at its peak and goes down linearly at the end",
    )
    decay: float = _option(0.3, "schedule wsd: share of the steps after warm-up that go down")
    final_rate: float = _option(0.0, "share of the peak that cosine, linear and wsd end at")
    warmup: float | None = _by_recipe("warmup", "share of all steps")
    epochs: int | None = _by_recipe("epochs", "passes over the data")
    max_steps: int = _option(0, "end after so many steps; 0: all that the epochs give")
    min_steps: int | None = _by_recipe(
        "min_steps", "lower batch_tokens until the epochs give so many; 0 if a batch size is given"
    )
    batch_tokens: int | None = _by_recipe(
        "batch_tokens", "tokens in one optimiser step, about; if given, batch_sequences is 0"
    )
    batch_sequences: int | None = _by_recipe(
        "batch_sequences", "records in one optimiser step; if given, batch_tokens is 0"
    )
    pack_tokens: int = _option(8192, "tokens in one packed row, the unit of memory")
    max_len: int = _option(4096, "longest record in tokens")
    long_records: Literal["cut", "drop"] | None = _by_recipe(
        "long_records", "what is done with longer ones"
    )
    adam_beta1: float = _option(0.9, "AdamW's first moment")
    adam_beta2: float | None = _by_recipe("adam_beta2", "AdamW's second moment")
    weight_decay: float | None = _by_recipe("weight_decay", "on matrices only")
    clip: float = _option(1.0, "largest norm of a step's gradient; 0: any")
    average: float = _option(
        0.0,
        "validate and write a running mean of the weights, of which each step leaves this share; "
        "0: the weights themselves",
    )
    seed: int = _option(0, "of the order of the data")
    device: str = _option("auto", "cpu, cuda, or auto")
    dtype: str = _option("auto", "of computing: float32, bfloat16, float64, or auto by device")
    cache: str | None = _option(None, "folder of cached trunk states, filled on first use")
    states_from: str | None = _option(
        None, "`vllm`, or a folder that vLLM filled: the trunk's states are not computed here"
    )
    cache_dtype: Literal["bf16", "fp32", "fp8"] = _option("bf16", "how cached states are stored")
    eval_every: int = _option(0, "steps between validations; 0: ten in the run")
    eval_limit: int = _option(128, "held-out records that are validated on")
    save_every: int = _option(0, "steps between checkpoints; 0: with every validation")
    keep: int = _option(2, "newest checkpoints kept, beside the best")
    shard: bool = _option(False, "under torchrun: split weights and moments over the processes")

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(TrainOptions).items():
            _check_type(name, hint, getattr(self, name))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigError(f"{name} is {value}; give at least {least}.")
        if self.draft_vocab_own != 0:
            check_limit(self.draft_vocab_own)
        for name in ("learning_rate", "beta", "teacher_temperature"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; give a value above 0.")
        if self.num_depths > _MAX_DEPTHS:
            raise ConfigError(f"num_depths is {self.num_depths}; give at most {_MAX_DEPTHS}.")
        if self.warmup is not None and not 0 <= self.warmup < 1:
            raise ConfigError(f"warmup is {self.warmup}; give a share from 0 to below 1.")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay is {self.decay}; give a share above 0, up to 1.")
        if not 0 <= self.final_rate <= 1:
            raise ConfigError(f"final_rate is {self.final_rate}; give a share from 0 to 1.")
        if not 0 <= self.average < 1:
            raise ConfigError(f"average is {self.average}; give a share from 0 to below 1.")
        if self.batch_tokens == 0 and self.batch_sequences == 0:
            raise ConfigError("batch_tokens and batch_sequences are both 0; give one of them.")
        if self.states_from is not None and self.cache is not None:
            raise ConfigError(
                "cache and states_from are both given; states that are not computed here are kept "
                "in files already. Drop one."
            )

    def document(self) -> dict[str, Any]:
        return asdict(self)


FROM_VLLM = "vllm"  # as `states_from`: vLLM computes them now
_MAX_DEPTHS = 16  # what the engine drafts at most, so what can be scored and served
_LEAST: Mapping[str, float] = {
    "num_depths": 1, "epochs": 1, "batch_tokens": 0, "batch_sequences": 0, "pack_tokens": 1,
    "max_len": 3, "clip": 0, "eval_every": 0, "eval_limit": 0, "save_every": 0, "keep": 1,
    "max_steps": 0, "min_steps": 0,
    "weight_decay": 0, "lk_decay": 0, "adam_beta1": 0, "adam_beta2": 0,
}  # fmt: skip


def _check_type(name: str, hint: Any, value: Any) -> None:
    """Files of variants hold any JSON, and the command line is not the only caller."""
    parts = (hint,) if get_origin(hint) in (None, Literal) else get_args(hint)
    choices = [choice for part in parts for choice in get_args(part)]
    kinds = tuple(part for part in parts if isinstance(part, type))
    if float in kinds:
        kinds = (*kinds, int)
    is_kind = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
    if value in choices or is_kind:
        return
    expected = [repr(choice) for choice in choices]
    expected += [kind.__name__ for kind in kinds if kind is not NoneType]
    raise ConfigError(f"{name} is {value!r}; expected {some(expected, 9)}.")


def resolve(options: TrainOptions) -> TrainOptions:
    """The options with everything that the recipe sets filled in."""
    recipe = dict(RECIPES[options.recipe])
    if options.shard and options.optimizer is None:
        recipe["optimizer"] = "adamw"  # Muon works on whole matrices
    if options.recipe == "default" and "adamw" in (options.optimizer, recipe["optimizer"]):
        recipe["learning_rate"] = _ADAMW_RATE
    # One size of a batch that is given replaces the recipe's other limits.
    if options.batch_tokens:
        recipe.update(batch_sequences=0, min_steps=0)
    elif options.batch_sequences:
        recipe.update(batch_tokens=0, min_steps=0)
    missing = {name: value for name, value in recipe.items() if getattr(options, name) is None}
    result = replace(options, **missing)
    if result.batch_tokens and result.batch_sequences:
        raise ConfigError(
            f"batch_tokens is {result.batch_tokens} and batch_sequences {result.batch_sequences}; "
            "a step is filled by one of them. Set the other to 0."
        )
    check_beside(result.draft_vocab_own if result.draft_vocab is None else 0, "--draft-vocab")
    if result.optimizer == "muon" and result.shard:
        raise ConfigError(
            "optimizer muon works on whole matrices, and shard splits them over processes. Give "
            "--optimizer adamw, or train without --shard."
        )
    return result


def sized(options: TrainOptions, num_tokens: int) -> TrainOptions:
    """Resolved options with `batch_tokens` lowered where few tokens would give too few steps."""
    assert options.epochs and options.min_steps is not None and options.batch_tokens is not None
    if not options.min_steps or not options.batch_tokens:
        return options
    steps_per_epoch = -(-options.min_steps // options.epochs)
    enough = max(1, num_tokens // steps_per_epoch)
    return replace(options, batch_tokens=min(options.batch_tokens, enough))


def changed(options: TrainOptions, overrides: Mapping[str, Any]) -> TrainOptions:
    """`options` with some fields replaced; ConfigError names one that does not exist."""
    known = {item.name for item in fields(TrainOptions)}
    for name in overrides:
        if name not in known:
            raise ConfigError(f"{name!r} is no option of training; see `headstart train --help`.")
    return replace(options, **overrides)
