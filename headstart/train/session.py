"""Everything a run needs, checked and loaded before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.checkpoint.atomic import check_target
from headstart.checkpoint.provenance import digest
from headstart.checkpoint.reader import Checkpoint
from headstart.data.dataset import Dataset
from headstart.data.fingerprints import tokenizer_sha
from headstart.data.records import Record
from headstart.errors import ConfigError, TrainError, some
from headstart.heads.digest import trunk_digest
from headstart.models.config import model_config
from headstart.train.board import Board
from headstart.train.checkpoints import Progress
from headstart.train.lane import Lane
from headstart.train.learner import Learner
from headstart.train.losses.lm_head import LmHead
from headstart.train.options import TrainOptions
from headstart.train.packing import fit, plan_epoch
from headstart.train.parallel import World
from headstart.train.run_folder import HEAD, RunFolder
from headstart.train.states.header import CacheHeader
from headstart.train.states.source import InProcess, StateSource, cached, fingerprint
from headstart.train.subject import Subject, load_subject
from headstart.train.watching import Watch
from headstart.vocab.files import read as read_vocabs


@dataclass(frozen=True, kw_only=True)
class Job:
    """What was asked for; `options` are resolved, by the name of each head ("" for one alone)."""

    model: Path
    data: Path
    out: Path
    options: Mapping[str, TrainOptions]
    head: Path | None = None
    overwrite: bool = False

    @property
    def shared(self) -> TrainOptions:
        """Options of which all heads have the same."""
        return next(iter(self.options.values()))

    def folder(self, name: str) -> Path:
        return self.out / name if name else self.out


@dataclass(frozen=True)
class Session:
    """A run that can begin."""

    job: Job
    world: World
    watch: Watch
    subject: Subject
    source: StateSource
    records: list[Record]
    heldout: list[Record]
    lanes: list[Lane]
    num_steps: int
    steps_per_epoch: int


@dataclass(frozen=True)
class Plan:
    """What can be known without loading a model."""

    checkpoint: Checkpoint
    identity: dict[str, Any]  # what a run is known by, beside its options
    records: list[Record]
    tested: list[Record]  # held out, all of them
    steps_per_epoch: int


def plan(job: Job, watch: Watch) -> Plan:
    """Check model, data and options against each other, and say what will be done."""
    options = job.shared
    checkpoint, data = Checkpoint.open(job.model), Dataset.open(job.data)
    identity = _check_data(checkpoint, data, watch)
    head = Checkpoint.open(job.head) if job.head is not None else checkpoint
    longest = min(options.max_len, model_config(checkpoint.config.fields).max_positions)
    kept = fit(data.records("train"), longest, options.long_records or "cut")
    tested = fit(data.records("heldout"), longest, "cut")
    epoch = plan_epoch(kept.records, options, 0)
    watch.say(f"train: {kept.describe()}; {len(epoch)} steps in each of {options.epochs} epochs")
    if tested.records and options.eval_limit:
        count = min(options.eval_limit, len(tested.records))
        watch.say(f"held out: {count} of {len(tested.records)} records are validated on")
    else:
        watch.say("no held-out records: nothing is validated, the last weights are the result")
    return Plan(
        checkpoint, {**identity, "head": digest(head)}, kept.records, tested.records, len(epoch)
    )


def open_session(job: Job, world: World, device: str, watch: Watch) -> Session:
    """Check everything that can be wrong, cheap things first, then load."""
    options = job.shared
    planned = plan(job, watch)
    folders = _open_folders(job, planned.identity, world)
    subject = load_subject(planned.checkpoint, job.head, device=device, dtype=options.dtype)
    for note in subject.built.notes:
        watch.say(note)
    lanes = [
        Lane(_learner(name, own, subject, world, planned.identity), folders[name], Progress())
        for name, own in job.options.items()
    ]
    source = _states(job, subject, planned, world, watch)
    assert options.epochs is not None
    return Session(
        job, world, watch, subject, source, planned.records,
        planned.tested[: options.eval_limit], lanes,
        planned.steps_per_epoch * options.epochs, planned.steps_per_epoch,
    )  # fmt: skip


def restore(session: Session) -> int | None:
    """Bring all heads to the newest step that all of them have; None for a fresh run."""
    lanes = session.lanes
    common = set.intersection(*(set(lane.folder.checkpoints.steps()) for lane in lanes))
    step = max(common, default=None)
    if step is not None:
        for lane in lanes:
            lane.restore(step)
    if session.world.is_main:
        for lane in lanes:
            lane.folder.metrics.go_back(-1 if step is None else step)
            lane.board = Board(lane.folder.path / "tensorboard", step or 0)
        if not any(lane.board.is_there for lane in lanes if lane.board is not None):
            session.watch.say("TensorBoard is not installed: curves are in metrics.jsonl only")
        if step is not None:
            session.watch.say(f"going on from step {step} of {session.num_steps}")
    return step


def _check_data(checkpoint: Checkpoint, data: Dataset, watch: Watch) -> dict[str, Any]:
    """DataError for another tokenizer; what a run is known by."""
    trunk, tokenizer = trunk_digest(checkpoint), tokenizer_sha(checkpoint)
    vocab_size = int(checkpoint.config.fields["vocab_size"])
    warnings = data.header.check(tokenizer_sha=tokenizer, vocab_size=vocab_size, trunk_digest=trunk)
    for warning in warnings:
        watch.say(f"warning: {warning}")
    return {"trunk": trunk, "tokenizer": tokenizer, "data": data.header.stamp}


def _open_folders(job: Job, identity: dict[str, Any], world: World) -> dict[str, RunFolder]:
    """The runs' folders, checked all before one is touched."""
    folders = {name: RunFolder(job.folder(name), own.keep) for name, own in job.options.items()}
    inputs = tuple(path for path in (job.model, job.head, job.data) if path is not None)
    if world.is_main:
        known = {name: {"options": own.document(), **identity} for name, own in job.options.items()}
        for name, folder in folders.items():
            folder.check(known[name], overwrite=job.overwrite)
            check_target(folder.path / HEAD, overwrite=True, inputs=inputs)
        if not job.overwrite and all(folder.is_finished for folder in folders.values()):
            raise TrainError(
                f"{job.out} holds a finished run; its head is in {job.out / HEAD}. Choose another "
                "--out, or add --overwrite to train again."
            )
        for name, folder in folders.items():
            folder.start(known[name], overwrite=job.overwrite)
    world.wait()
    return folders


def _learner(
    name: str, options: TrainOptions, subject: Subject, world: World, identity: dict[str, Any]
) -> Learner:
    ids = None
    if options.draft_vocab is not None:
        found = read_vocabs(Path(options.draft_vocab))
        if len(found) != 1:
            names = some(vocab.name for vocab in found)
            raise ConfigError(
                f"{options.draft_vocab} holds {len(found)} draft vocabularies ({names}); a head is "
                "trained for one. Give a file with one."
            )
        found[0].check(
            vocab_size=subject.built.config.vocab, tokenizer_sha=identity["tokenizer"],
            where=options.draft_vocab,
        )  # fmt: skip
        ids = torch.tensor(found[0].ids)
    lm_head = LmHead.of(subject.trunk.lm_head.weight, ids)
    return Learner(
        name or "head", options, subject.master(), lm_head, dtype=subject.dtype, world=world
    )


def _states(job: Job, subject: Subject, planned: Plan, world: World, watch: Watch) -> StateSource:
    options = job.shared
    if options.cache is None:
        return InProcess(subject)
    records = planned.records + planned.tested
    header = CacheHeader(
        trunk_digest=planned.identity["trunk"], tokenizer_sha=planned.identity["tokenizer"],
        dataset_fingerprint=fingerprint(records), hidden_kind=subject.kind,
        dtype=options.cache_dtype, hidden_size=subject.built.config.hidden,
    )  # fmt: skip
    return cached(
        Path(options.cache), header, subject, records, pack_tokens=options.pack_tokens,
        world=world, say=watch.say,
    )  # fmt: skip
