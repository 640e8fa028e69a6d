"""Everything a run needs, loaded before the first step.

The run's folder is made last: a run that cannot begin leaves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from headstart.data.records import Record
from headstart.train.board import Board
from headstart.train.checkpoints import Progress
from headstart.train.folders import begin, common_step
from headstart.train.job import Job
from headstart.train.lane import Lane
from headstart.train.learner import Learner
from headstart.train.losses.lm_head import LmHead
from headstart.train.options import TrainOptions
from headstart.train.parallel import World
from headstart.train.plan import Plan, plan
from headstart.train.states.source import InProcess, StateSource, cached
from headstart.train.subject import Subject, load_subject
from headstart.train.watching import Watch
from headstart.vocab.draft_vocab import DraftVocab


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


def open_session(job: Job, world: World, device: str, watch: Watch) -> Session:
    """Check everything that can be wrong, then load, then make the folders."""
    planned = plan(job, watch)
    job, options = planned.job, planned.job.shared
    subject = load_subject(planned.checkpoint, job.head, device=device, dtype=options.dtype)
    for note in subject.built.notes:
        watch.say(note)
    lanes = [
        Lane(
            _learner(name, own, subject, world, planned.vocabs[name]), planned.folders[name],
            Progress(),
        )
        for name, own in job.options.items()
    ]  # fmt: skip
    source = _states(planned, subject, world, watch)
    world.wait()  # until every process has checked its folders
    if world.is_main:
        begin([lane.folder for lane in lanes], overwrite=job.overwrite)
    world.wait()
    return Session(
        job, world, watch, subject, source, planned.records,
        planned.validated, lanes, planned.num_steps, planned.steps_per_epoch,
    )  # fmt: skip


def restore(session: Session) -> int | None:
    """Bring all heads to the newest step that all of them have; None for a fresh run."""
    lanes = session.lanes
    step = common_step(lane.folder for lane in lanes)
    if step is not None:
        for lane in lanes:
            lane.restore(step)
    session.world.wait()  # until every process has listed the checkpoints
    if session.world.is_main:
        for lane in lanes:
            lane.folder.go_back(step)
            lane.board = Board(lane.folder.board, lane.folder.metrics.lines())
        if not any(lane.board.is_there for lane in lanes if lane.board is not None):
            session.watch.say("TensorBoard is not installed: curves are in metrics.jsonl only")
        if step is not None:
            session.watch.say(f"going on from step {step} of {session.num_steps}")
    return step


def _learner(
    name: str, options: TrainOptions, subject: Subject, world: World, vocab: DraftVocab | None
) -> Learner:
    ids = None if vocab is None else torch.tensor(vocab.ids)
    weight, head = subject.trunk.lm_head.weight, subject.built.head
    assert head is not None
    own = [lm_head.weight for lm_head in head.own_lm_heads]
    return Learner(
        name or "head", options, subject.master(), LmHead.of(weight, ids), dtype=subject.dtype,
        world=world, own_lm_heads=tuple(LmHead.of(weight, ids, part) for part in own),
    )  # fmt: skip


def _states(planned: Plan, subject: Subject, world: World, watch: Watch) -> StateSource:
    options = planned.job.shared
    if options.cache is None or planned.cache is None:
        return InProcess(subject)
    watch.heeds_stops()
    return cached(
        Path(options.cache), planned.cache, subject, planned.records + planned.tested,
        pack_tokens=options.pack_tokens, world=world, say=watch.say, is_stopped=watch.is_stopped,
    )  # fmt: skip
