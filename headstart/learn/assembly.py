"""A learning loop, put together from what a task names: model, head, options, base, store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headstart.checkpoint.hub import local_folder
from headstart.data.dataset import Dataset
from headstart.data.fingerprints import tokenizer_sha
from headstart.data.records import spread
from headstart.errors import ConfigError
from headstart.heads.formats import open_runnable
from headstart.learn.faults import training_class
from headstart.learn.folder import START, Folder
from headstart.learn.heads import LearnedHeads
from headstart.learn.known import KnownWalks
from headstart.learn.loop import NUM_BASE, Base, LearningLoop, Tell
from headstart.learn.memory import state_bytes
from headstart.learn.state_files import BASE, StateWriter, remove_bases
from headstart.learn.store import Store
from headstart.learn.vocabs import running_vocab, vocab_beside
from headstart.models.build import resolve_device
from headstart.train.options import TrainOptions, changed, resolve
from headstart.train.states.source import fingerprint

if TYPE_CHECKING:
    from headstart.checkpoint.reader import Checkpoint
    from headstart.learn.process import Task

# What learning from few texts sets otherwise than a training run (docs/learning.md has what was
# measured). Muon's iterations take most of a step on a CPU; 1e-3 is the rate of both recipes there.
DEFAULTS: dict[str, Any] = {
    "loss": "tv", "learning_rate": 1e-3, "batch_tokens": 768, "max_len": 2048, "pack_tokens": 2048,
}  # fmt: skip
_OPTIMIZERS = {"cpu": "adamw", "cuda": "muon"}
# Options of a training run that has an end, a dataset and a folder; learning has none of these, and
# a mean, a rate, an order of texts and a draft vocabulary of its own.
NOT_LEARNING = (
    "average", "schedule", "decay", "final_rate", "warmup", "epochs", "max_steps", "min_steps",
    "batch_sequences", "seed", "draft_vocab", "cache", "cache_dtype", "states_from", "eval_every",
    "eval_limit", "save_every", "keep", "shard",
)  # fmt: skip


def learning_options(overrides: Mapping[str, Any], *, device: str, dtype: str) -> TrainOptions:
    """Options of `train` for a head that learns while it serves; ConfigError for unused ones."""
    for name in NOT_LEARNING:
        if name in overrides:
            raise ConfigError(
                f"option {name!r} of `train` is not used by learning while serving. Leave it out "
                "(docs/learning.md has those that are)."
            )
    on = resolve_device(device).type
    if dtype == "auto" and on == "cpu":
        dtype = "bfloat16" if _multiplies_bf16() else "float32"
    given = {**DEFAULTS, "optimizer": _OPTIMIZERS.get(on, "adamw"), **overrides}
    return resolve(changed(TrainOptions(device=device, dtype=dtype), given))


def _multiplies_bf16() -> bool:
    """Whether this CPU has instructions for products of bf16; without them fp32 is faster."""
    found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def make_loop(task: Task, tell: Tell, *, waits: bool = True) -> LearningLoop:
    """Load everything; errors say what is wrong with what was given.

    waits: texts may come later, and states of the base are computed meanwhile.
    """
    folder = Folder(Path(task.folder))
    checkpoint = open_runnable(local_folder(task.model), "Give its model, not a head.")
    options = learning_options(task.overrides, device=task.device, dtype=task.dtype)
    base = read_base(Path(task.base) if task.base else None, checkpoint)
    head = Path(task.head) if task.head else None
    make = training_class(task.fault)
    vocab = running_vocab(Path(task.vocab) if task.vocab else None, head, renews=task.renews_vocab)
    # Renewed lists are held against what was drafted from the one that the server was given.
    first = None if vocab is None else vocab_beside(folder.heads / START) or vocab
    training = make(
        checkpoint, head, options, state_bytes=state_bytes(resolve_device(options.device)),
        draft_vocab=None if vocab is None else vocab.ids, warm_up=task.warm_up,
    )  # fmt: skip
    name = base_name(base)
    remove_bases(folder, name)
    writer = StateWriter(folder, name, task.max_bytes) if name is not None else None
    training.use_states(folder, writer)
    store = Store(folder.texts, task.max_bytes)
    assert options.batch_tokens is not None
    return LearningLoop(
        store, training, base, lambda: folder.heads / LearnedHeads(folder).next_name(), tell,
        batch_tokens=options.batch_tokens, least_seconds=task.least_seconds,
        vocab=vocab, renews_vocab=task.renews_vocab,
        known=KnownWalks(folder.known, None if first is None else first.ids),
        ahead=[*base.heldout, *base.train] if waits else (),
    )  # fmt: skip


def base_name(base: Base) -> str | None:
    """Of files of its states: another one where a text is another. None where there is no base."""
    records = [*base.train, *base.heldout]
    if not records:
        return None
    return f"{BASE}-{hashlib.sha256(fingerprint(records).encode()).hexdigest()[:12]}"


def read_base(path: Path | None, checkpoint: Checkpoint) -> Base:
    """The dataset of the first tuning; DataError where it is another tokenizer's."""
    if path is None:
        return Base()
    dataset = open_base(path, checkpoint)
    heldout = spread(dataset.records("heldout"), NUM_BASE)
    return Base(dataset.records("train"), heldout)


def open_base(path: Path, checkpoint: Checkpoint) -> Dataset:
    """The same, of which nothing but the header is read."""
    dataset = Dataset.open(path)
    vocab_size = int(checkpoint.config.get("vocab_size", 0))
    dataset.header.check(tokenizer_sha=tokenizer_sha(checkpoint), vocab_size=vocab_size)
    return dataset
