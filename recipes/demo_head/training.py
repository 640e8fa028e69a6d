"""One call of `headstart train`, with as many steps as fit into a given time."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from settings import Settings

from headstart.checkpoint.hub import local_folder
from headstart.train.job import Job
from headstart.train.options import TrainOptions, changed, resolve
from headstart.train.trainer import Outcome, train

_PROBE_STEPS = 6
_MANY_EPOCHS = 1000  # max_steps ends a run


def base_options(settings: Settings, **changes: Any) -> TrainOptions:
    """What all trainings share; a step sees the same answers whatever is trained."""
    options = TrainOptions(
        epochs=_MANY_EPOCHS, batch_sequences=settings.batch_sequences, long_records="cut",
        pack_tokens=settings.pack_tokens, max_len=settings.max_len, eval_limit=settings.eval_limit,
        device=settings.device, draft_vocab=str(settings.vocab), weight_decay=0.0,
    )  # fmt: skip
    return changed(options, changes)


def trained(
    settings: Settings,
    out: Path,
    variants: Mapping[str, TrainOptions],
    *,
    seconds: float | None = None,
    steps: int | None = None,
    head: Path | None = None,
) -> dict[str, Outcome]:
    """Heads by name, in `out`; a run that is there and finished is taken as it is."""
    note = steps_file(out)
    if note.is_file():  # an earlier start has chosen: the same command goes on
        steps = int(note.read_text())
    if steps is None:
        assert seconds is not None
        steps = _paced(settings, out, variants, seconds, head)
    note.write_text(str(steps))
    started = time.monotonic()
    outcomes = _train(settings, out, variants, steps, head)
    spent = time.monotonic() - started
    print(f"training: {out.name}, {len(variants)} heads, {steps} steps, {spent:.0f} s", flush=True)
    return {outcome.name: outcome for outcome in outcomes}


def steps_file(out: Path) -> Path:
    """Beside a run, whose folder holds nothing but what `headstart train` writes."""
    return out.with_name(f"{out.name}-steps.txt")


def _train(
    settings: Settings,
    out: Path,
    variants: Mapping[str, TrainOptions],
    steps: int,
    head: Path | None,
) -> list[Outcome]:
    options = {
        # Validated at the start and at the end only: every validation costs every head.
        name: resolve(replace(own, max_steps=steps, eval_every=own.eval_every or steps))
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
    return train(job)


def _finished(name: str, folder: Path, steps: int) -> Outcome:
    """The outcome of a run that an earlier start has ended."""
    lines = _metrics(folder)
    found = {line["step"]: line["validation"] for line in lines if "validation" in line}
    best = max(found, key=lambda step: float(found[step]["acceptance_length"]))
    return Outcome(name, str(folder), True, steps, steps, best, found.get(0), found[best])


def _metrics(folder: Path) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _paced(
    settings: Settings,
    out: Path,
    variants: Mapping[str, TrainOptions],
    seconds: float,
    head: Path | None,
) -> int:
    """Steps that fit: a few are timed first, with everything that comes before and after them."""
    probe = out.with_name(f"{out.name}-probe")
    shutil.rmtree(probe, ignore_errors=True)
    started = time.monotonic()
    _train(settings, probe, variants, _PROBE_STEPS, head)
    spent = time.monotonic() - started
    first = next(iter(variants))
    lines = [line for line in _metrics(probe / first if first else probe) if "seconds" in line]
    step = statistics.median(float(line["seconds"]) for line in lines[1:])
    shutil.rmtree(probe)
    left = seconds - spent - (spent - _PROBE_STEPS * step)
    steps = max(_PROBE_STEPS, int(left / step))
    print(
        f"pace: {out.name}, {len(variants)} heads, {step:.3f} s a step: {steps} steps", flush=True
    )
    return steps
