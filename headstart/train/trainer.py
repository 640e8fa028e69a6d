"""Training of heads on a frozen trunk: the main flow.

A step sees a planned set of records (`packing.py`). The trunk's states come from a source
(`states/`), each head drafts from them and adds its gradients (`step.py`), every head is updated
once. Validation is the exact simulator; the best checkpoint is the one with the highest
acceptance length.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from headstart.errors import TrainError
from headstart.models.unroll import teacher_states
from headstart.train.head_run import HeadRun, NotFinite, not_finite
from headstart.train.job import HEAD, Job
from headstart.train.packing import Row, plan_epoch
from headstart.train.parallel import joined
from headstart.train.report import write_comparison, write_report
from headstart.train.result import as_written, write_head
from headstart.train.run_folder import REPORT
from headstart.train.session import Session, open_session, restore
from headstart.train.step import Batch, Sums, learn
from headstart.train.targets import count
from headstart.train.validation import validate
from headstart.train.watching import Watch


@dataclass(frozen=True)
class Outcome:
    """How a head came out of a run."""

    name: str
    folder: str
    is_finished: bool
    step: int
    num_steps: int
    best_step: int
    before: dict[str, Any] | None  # validations; None without held-out records
    after: dict[str, Any] | None
    failure: str | None = None  # why the head was dropped while others went on


def train(job: Job, watch: Watch | None = None) -> list[Outcome]:
    """Train as `job` says, or go on with what an earlier call began."""
    with joined(job.shared.device) as (world, device), ExitStack() as locks:
        heard = watch if watch is not None and world.is_main else Watch()
        with _disk_advice(job):
            session = open_session(job, world, device, heard, locks)
            return Trainer(session, watch or Watch()).run()


class Trainer:
    """A session from its first or next step to its last."""

    def __init__(self, session: Session, stopper: Watch) -> None:
        self.session, self._stopper = session, stopper
        self.world, self.runs, self.watch = session.world, session.runs, session.watch
        self.num_steps, self.step = session.num_steps, 0
        self.dropped: list[Outcome] = []
        options = session.job.shared
        self.eval_every = options.eval_every or -(-self.num_steps // 10)
        self.save_every = options.save_every or self.eval_every
        self._epoch = lru_cache(1)(lambda epoch: plan_epoch(session.records, options, epoch))

    def run(self) -> list[Outcome]:
        """All steps that are left; ends early, with everything saved, when asked to stop."""
        try:
            return self._run()
        finally:
            for run in self.runs:
                run.close()

    def _run(self) -> list[Outcome]:
        reached = restore(self.session)
        self.step = reached or 0
        self._stopper.heeds_stops()
        self.watch.started(self.step, self.num_steps)
        if reached is None:
            self.begin()
        if self.world.is_main:
            for run in self.runs:
                run.folder.replaced.drop()
        while self.step < self.num_steps:
            if self.is_stopped():
                self.save()
                return self.outcomes(is_finished=False)
            self.advance()
            if self.is_due(self.eval_every):
                self.validate()
            if self.is_due(self.eval_every) or self.is_due(self.save_every):
                self.save()
        self.finish()
        return self.outcomes(is_finished=True)

    def begin(self) -> None:
        """What the head is worth before. A run that fails here leaves the one it was to replace."""
        try:
            self.validate()
            self.save()
        except BaseException:
            if self.world.is_main:
                for run in self.runs:
                    run.close()  # before the folder goes
                    run.folder.replaced.put_back()
            raise

    def advance(self) -> None:
        """One optimiser step of every head, on one pass of the trunk."""
        started = time.monotonic()
        rows = self.rows_of(self.step)
        depths = {run.learner.options.num_depths for run in self.runs}
        counts = {num_depths: count(rows, num_depths) for num_depths in depths}
        parts: list[list[Sums]] = [[] for _ in self.runs]
        mine = list(self.share(rows))
        failures: dict[str, TrainError] = {}
        with memory_advice():
            for row, is_filler in mine:
                batch = self.prepare(row)
                for run, sums in zip(self.runs, parts, strict=True):
                    wanted = counts[run.learner.options.num_depths]
                    sums.append(learn(run.learner, batch, wanted, is_filler=is_filler))
            for run, sums in zip(self.runs, parts, strict=True):
                num_depths = run.learner.options.num_depths
                zero = Sums.zero(num_depths, self.session.frozen.device)
                try:
                    line = run.update(self.step, self.num_steps, sum(sums, zero))
                except NotFinite:
                    names = [row.names for row, _ in mine]
                    records = self.blame(names, sums)
                    failures[run.name] = not_finite(run, self.step, records)
                    continue
                line["epoch"] = self.step / self.session.steps_per_epoch
                line["tokens"] = sum(row.documents.num_rows for row in rows)
                line["seconds"] = time.monotonic() - started
                run.write(line)
                if run.name == next(n.name for n in self.runs if n.name not in failures):
                    self.watch.stepped(self.step + 1, line)
        if len(failures) == len(self.runs):
            raise next(iter(failures.values()))
        for run in [run for run in self.runs if run.name in failures]:
            self.drop(run, str(failures[run.name]))
        self.step += 1

    def drop(self, run: HeadRun, error: str) -> None:
        """Go on without a head that has diverged; the others are worth their time."""
        self.watch.say(f"{error} The other heads go on without it.")
        self.dropped.append(replace(self._outcome(run, is_finished=False), failure=error))
        self.runs.remove(run)
        if self.world.is_main:
            run.folder.fail(self.step, error)
            run.close()

    def validate(self) -> None:
        """Walk the held-out answers with every head as it would be written now."""
        if not self.session.heldout:
            return
        learners, frozen = [run.learner for run in self.runs], self.session.frozen
        with memory_advice(), ExitStack() as rounded:
            for learner in learners:
                rounded.enter_context(as_written(frozen, learner))
            found = validate(
                learners, self.session.heldout, self.prepare,
                pack_tokens=self.session.job.shared.pack_tokens,
                max_len=frozen.built.max_len, world=self.world,
            )  # fmt: skip
        for run, validation in zip(self.runs, found, strict=True):
            run.judge(validation)
            found_here = validation.as_json()
            run.write({"step": self.step, "validation": found_here})
            self.watch.validated(run.name, self.step, found_here)

    def save(self) -> None:
        """Checkpoints of all heads, by the one process that writes.

        Older ones are removed when all heads have the new one: there is always one in common.
        """
        for run in self.runs:
            if not self.session.heldout:
                run.progress = replace(run.progress, best_step=self.step)
            tensors = run.learner.tensors()
            if self.world.is_main:
                run.folder.metrics.sync()
                run.folder.checkpoints.write(tensors, run.progress)
        if self.world.is_main:
            for run in self.runs:
                run.folder.checkpoints.prune()
        self.world.wait()

    def finish(self) -> None:
        """The best head of each run and its report; the head last, for it marks the end."""
        if not self.world.is_main:
            return
        out = self.session.job.out
        if "" not in self.session.job.options and out is not None:
            write_comparison(out / REPORT, self.runs, self.session)
        for run in self.runs:
            folder = run.folder
            write_report(folder.path / REPORT, run, self.session)
            tensors, _ = folder.checkpoints.read(run.progress.best_step)
            details = {
                "step": run.progress.best_step, "of": self.num_steps,
                "num_depths": run.learner.options.num_depths,
            }  # fmt: skip
            write_head(self.session.frozen, tensors, folder.path / HEAD, details)

    def rows_of(self, step: int) -> list[Row]:
        """The packed rows of a step: a function of options and data alone."""
        epoch, place = divmod(step, self.session.steps_per_epoch)
        return self._epoch(epoch)[place]

    def share(self, rows: list[Row]) -> Iterator[tuple[Row, bool]]:
        """This process's rows; with fillers where processes must run equally many."""
        mine = rows[self.world.rank :: self.world.size]
        yield from ((row, False) for row in mine)
        if any(run.learner.is_sharded for run in self.runs):
            most = -(-len(rows) // self.world.size)
            yield from ((rows[-1], True) for _ in range(most - len(mine)))

    def prepare(self, row: Row) -> Batch:
        """What the frozen trunk says of a packed row."""
        frozen = self.session.frozen
        ids = row.ids.to(frozen.device)
        states = self.session.source.states(row)
        return Batch(
            row.names, ids, row.mask, row.documents, frozen.trunk.embed[ids], states,
            teacher_states(frozen.trunk, states, frozen.kind), frozen.trunk.rotary,
        )  # fmt: skip

    def blame(self, names: list[list[str]], sums: list[Sums]) -> list[str]:
        """Records of the packed rows whose loss is not finite; all, if only gradients are not."""
        pairs = list(zip(names, sums, strict=True))
        bad = [n for n, s in pairs if not bool(torch.isfinite(s.values).all())]
        gathered = self.world.gather((bad, names))
        chosen = [n for part, _ in gathered for n in part] or [n for _, a in gathered for n in a]
        return [name for group in chosen for name in group]

    def is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.num_steps

    def is_stopped(self) -> bool:
        return self.world.any(self._stopper.is_stopped(), self.session.frozen.device)

    def outcomes(self, *, is_finished: bool) -> list[Outcome]:
        return [*(self._outcome(run, is_finished) for run in self.runs), *self.dropped]

    def _outcome(self, run: HeadRun, is_finished: bool) -> Outcome:
        lines = run.folder.metrics.lines() if self.world.is_main else []
        found = {line["step"]: line["validation"] for line in lines if "validation" in line}
        best = run.progress.best_step
        return Outcome(
            run.name, str(run.folder.path), is_finished, self.step, self.num_steps, best,
            found.get(0), found.get(best),
        )  # fmt: skip


@contextmanager
def _disk_advice(job: Job) -> Iterator[None]:
    """Where there is no space, in place of what the system says of it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = error.filename or f"{job.out} or --cache"
        raise TrainError(
            f"no space left on the disk of {where}. Checkpoints are whole: make room and run the "
            "same command again, it goes on."
        ) from error


@contextmanager
def memory_advice() -> Iterator[None]:
    """One line in place of an allocator's trace."""
    try:
        yield
    except RuntimeError as error:
        is_full = isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)
        if not is_full:
            raise
        raise TrainError(
            f"out of memory ({str(error).splitlines()[0]}). Checkpoints are whole. Lower "
            "--pack-tokens or --max-len, cache the states (--cache), or --shard over processes."
        ) from error
