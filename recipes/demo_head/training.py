"""One call of `headstart train`, with as many steps as fit into a given time."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from parallel import Recipe, side_by_side

from headstart.checkpoint.hub import local_folder
from headstart.train.job import Job
from headstart.train.options import TrainOptions, changed, resolve
from headstart.train.states.cache import StateCache
from headstart.train.trainer import Outcome, train
from headstart.train.watching import Watch

_PROBE_STEPS = 6
_MANY_EPOCHS = 1000  # max_steps ends a run


class Trained(Recipe, Protocol):
    """What training needs of the settings of a recipe."""

    @property
    def answers(self) -> Path: ...
    @property
    def vocab(self) -> Path: ...
    @property
    def batch_sequences(self) -> int: ...
    @property
    def pack_tokens(self) -> int: ...
    @property
    def max_len(self) -> int: ...
    @property
    def eval_limit(self) -> int: ...


def base_options(settings: Trained, **changes: Any) -> TrainOptions:
    """What all trainings share; a step sees the same answers whatever is trained."""
    options = TrainOptions(
        epochs=_MANY_EPOCHS, batch_sequences=settings.batch_sequences, long_records="cut",
        pack_tokens=settings.pack_tokens, max_len=settings.max_len, eval_limit=settings.eval_limit,
        device=settings.device, draft_vocab=str(settings.vocab), weight_decay=0.0,
        cache=str(states_of(settings)),
    )  # fmt: skip
    return changed(options, changes)


def states_of(settings: Trained) -> Path:
    """The trunk's states, computed once for all trainings."""
    return settings.work / "states"


def trained(
    settings: Trained,
    out: Path,
    variants: Mapping[str, TrainOptions],
    *,
    seconds: float | None = None,
    steps: int | None = None,
    head: Path | None = None,
    validations: int = 1,
    least: int = _PROBE_STEPS,
    deadline: float = float("inf"),
) -> dict[str, Outcome]:
    """Heads by name, in `out`; a run that is there and finished is taken as it is.

    `seconds` give a number of steps, `least` of them in any case: where kernels are compiled by the
    steps that are timed, these seem to leave no time.

    Validated at the start and at the end only, if nothing else is said: it costs every head. At
    the deadline (of time.monotonic) a run stops, to be gone on with another time.
    """
    parts = _dealt(settings, out, variants)
    note = steps_file(out)
    if note.is_file():  # an earlier start has chosen: the same command goes on
        steps = int(note.read_text())
    if steps is None:
        assert seconds is not None
        steps = max(least, _paced(settings, parts, seconds, head))
    note.write_text(str(steps))
    started = time.monotonic()
    train_part = partial(_train, settings, steps, head, validations, deadline=deadline)
    outcomes = [one for part in side_by_side(train_part, parts, len(parts)) for one in part]
    spent = time.monotonic() - started
    print(f"training: {out.name}, {len(variants)} heads, {steps} steps, {spent:.0f} s", flush=True)
    return {outcome.name: outcome for outcome in outcomes}


def steps_file(out: Path) -> Path:
    """Beside a run, whose folder holds nothing but what `headstart train` writes."""
    return out.with_name(f"{out.name}-steps.txt")


Part = tuple[Path, Mapping[str, TrainOptions]]  # a folder, and the heads of one process


def _dealt(settings: Trained, out: Path, variants: Mapping[str, TrainOptions]) -> list[Part]:
    """Heads dealt out to processes; all see the same records in the same order."""
    count = min(settings.processes, len(variants))
    if count == 1:
        return [(out, variants)]
    names = list(variants)
    return [
        (out / f"part-{i}", {name: variants[name] for name in names[i::count]})
        for i in range(count)
    ]


class _Until(Watch):
    """Asks a run to stop when its time is up."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def say(self, text: str) -> None:
        print(f"training: {text}", flush=True)

    def is_stopped(self) -> bool:
        return time.monotonic() > self._deadline


def _train(
    settings: Trained, steps: int, head: Path | None, validations: int, part: Part,
    deadline: float = float("inf"),
) -> list[Outcome]:  # fmt: skip
    out, variants = part
    every = -(-steps // validations)
    options = {
        name: resolve(replace(own, max_steps=steps, eval_every=every))
        for name, own in variants.items()
    }
    job = Job(
        model=local_folder(settings.model), data=settings.answers, out=out, options=options,
        head=head,
    )  # fmt: skip
    finished = [
        job.folder(name)
        for name in options
        if (job.folder(name) / "head" / "config.json").is_file()
    ]
    if len(finished) == len(options):
        return [_finished(name, job.folder(name), steps) for name in options]
    return train(job, None if deadline == float("inf") else _Until(deadline))


def _finished(name: str, folder: Path, steps: int) -> Outcome:
    """The outcome of a run that an earlier start has ended."""
    lines = _metrics(folder)
    found = {line["step"]: line["validation"] for line in lines if "validation" in line}
    best = max(found, key=lambda step: float(found[step]["acceptance_length"]))
    return Outcome(name, str(folder), True, steps, steps, best, found.get(0), found[best])


def _metrics(folder: Path) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _paced(settings: Trained, parts: list[Part], seconds: float, head: Path | None) -> int:
    """Steps that fit: a few are timed first, with everything that comes before and after them."""
    is_cached = any(own.cache for _, variants in parts for own in variants.values())
    if is_cached and not StateCache.is_finished(states_of(settings)):
        _probe(settings, head, parts[0])  # fills it, which is done once and not by several
    started = time.monotonic()
    step = max(side_by_side(partial(_probe, settings, head), parts, len(parts)))
    spent = time.monotonic() - started
    left = seconds - spent - (spent - _PROBE_STEPS * step)
    steps = int(max(0.0, left) / step)
    names = sum(len(variants) for _, variants in parts)
    print(f"pace: {names} heads, {step:.3f} s a step: time for {steps} steps", flush=True)
    return steps


def _probe(settings: Trained, head: Path | None, part: Part) -> float:
    """Seconds of a step."""
    out, variants = part
    probe = out.with_name(f"{out.name}-probe")
    shutil.rmtree(probe, ignore_errors=True)
    _train(settings, _PROBE_STEPS, head, 1, (probe, variants))
    first = next(iter(variants))
    lines = [line for line in _metrics(probe / first if first else probe) if "seconds" in line]
    shutil.rmtree(probe)
    return statistics.median(float(line["seconds"]) for line in lines[1:])
