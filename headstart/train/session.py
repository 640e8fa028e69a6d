"""Everything a run needs, loaded before the first step.

The run's folder is made last: a run that cannot begin leaves nothing.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from headstart.data.records import Record
from headstart.errors import DataError, some
from headstart.train.checkpoints import Progress
from headstart.train.folders import begin, common_step
from headstart.train.frozen_model import FrozenModel, load_frozen_model
from headstart.train.head_run import HeadRun
from headstart.train.job import Job
from headstart.train.learner import Learner
from headstart.train.losses.lm_head import LmHead
from headstart.train.options import FROM_VLLM, TrainOptions
from headstart.train.parallel import World
from headstart.train.plan import Plan, plan
from headstart.train.states.elsewhere import Elsewhere, missing
from headstart.train.states.extraction import extract
from headstart.train.states.source import InProcess, StateSource, cached
from headstart.train.tensorboard import TensorBoard
from headstart.train.watching import Watch
from headstart.vocab.draft_vocab import DraftVocab


@dataclass(frozen=True)
class Session:
    """A run that can begin."""

    job: Job
    world: World
    watch: Watch
    frozen: FrozenModel
    source: StateSource
    records: list[Record]
    heldout: list[Record]
    runs: list[HeadRun]
    num_steps: int
    steps_per_epoch: int


def open_session(job: Job, world: World, device: str, watch: Watch, locks: ExitStack) -> Session:
    """Check everything that can be wrong, then load, then make the folders.

    Other runs are kept out of these until `locks` ends.
    """
    planned = plan(job, watch)
    if world.is_main:
        for folder in planned.folders.values():
            if folder.path.is_dir():  # else no run works there yet
                folder.lock(locks)
        planned.job.check()  # again: the lock's last holder may have finished
    job, options = planned.job, planned.job.shared
    if options.states_from is not None and world.is_main:
        _prepare_states(planned, watch)
    frozen = load_frozen_model(
        planned.checkpoint, job.head, device=device, dtype=options.dtype,
        with_layers=options.states_from is None,
    )  # fmt: skip
    for note in frozen.built.notes:
        watch.say(note)
    runs = [
        HeadRun(
            _learner(name, own, frozen, world, planned.vocabs[name]), planned.folders[name],
            Progress(),
        )
        for name, own in job.options.items()
    ]  # fmt: skip
    source = _states(planned, frozen, world, watch)
    world.wait()  # until every process has checked its folders
    if world.is_main:
        begin([run.folder for run in runs], locks, overwrite=job.overwrite)
    world.wait()
    return Session(
        job, world, watch, frozen, source, planned.records,
        planned.validated, runs, planned.num_steps, planned.steps_per_epoch,
    )  # fmt: skip


def restore(session: Session) -> int | None:
    """Bring all heads to the newest step that all of them have; None for a fresh run."""
    runs = session.runs
    step = common_step(run.folder for run in runs)
    if step is not None:
        for run in runs:
            run.restore(step)
    session.world.wait()  # until every process has listed the checkpoints
    if session.world.is_main:
        for run in runs:
            run.folder.go_back(step)
            run.tensorboard = TensorBoard(run.folder.tensorboard, run.folder.metrics.lines())
        if not any(run.tensorboard.is_there for run in runs if run.tensorboard is not None):
            session.watch.say("TensorBoard is not installed: curves are in metrics.jsonl only")
        if step is not None:
            session.watch.say(f"going on from step {step} of {session.num_steps}")
    return step


def _learner(
    name: str, options: TrainOptions, frozen: FrozenModel, world: World, vocab: DraftVocab | None
) -> Learner:
    ids = None if vocab is None else torch.tensor(vocab.ids)
    weight, head = frozen.trunk.lm_head.matrix, frozen.built.head
    assert head is not None
    own = [lm_head.matrix for lm_head in head.own_lm_heads]
    return Learner(
        name or "head", options, frozen.master(), LmHead.of(weight, ids), dtype=frozen.dtype,
        world=world, own_lm_heads=tuple(LmHead.of(weight, ids, part) for part in own),
    )  # fmt: skip


def _prepare_states(planned: Plan, watch: Watch) -> None:
    """States that are not computed here are there for every record, or are asked for now."""
    records, folder = planned.records + planned.tested, _states_folder(planned.job)
    trunk = planned.identity["trunk"]
    if planned.job.shared.states_from == FROM_VLLM:
        extract(planned.checkpoint.folder, trunk, records, folder, watch.say)
    lacking = [record.id for record in missing(folder, records, trunk)]
    if lacking:
        raise DataError(
            f"{folder} lacks the states of {len(lacking)} of {len(records)} records, such as "
            f"{some(lacking)}. Give the folder that the dataset was made of, or --states-from "
            f"{FROM_VLLM}."
        )


def _states_folder(job: Job) -> Path:
    """What vLLM extracts stays beside the run, for the next one."""
    given = job.shared.states_from
    assert given is not None
    if given != FROM_VLLM:
        return Path(given)
    assert job.out is not None
    return job.out.with_name(f"{job.out.name}-states")


def _states(planned: Plan, frozen: FrozenModel, world: World, watch: Watch) -> StateSource:
    options = planned.job.shared
    if options.states_from is not None:
        return Elsewhere(_states_folder(planned.job), frozen, planned.identity["trunk"])
    if options.cache is None or planned.cache is None:
        return InProcess(frozen)
    watch.heeds_stops()
    return cached(
        Path(options.cache), planned.cache, frozen, planned.records + planned.tested,
        pack_tokens=options.pack_tokens, world=world, say=watch.say, is_stopped=watch.is_stopped,
    )  # fmt: skip
