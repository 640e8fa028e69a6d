"""A run of task suites: one study after the other, its document, and the files that it writes.

What was measured before a server failed is kept: the document then says that parts are missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.bench.document import Measured, make_document
from headstart.bench.study import Outcome, Study, Watch, measure_study
from headstart.bench.tasks import answer_lines
from headstart.bench.variants import Variant
from headstart.errors import ConfigError, WriteFailed

# Shows the progress of one task, by its name, while the context lasts.
Watching = Callable[[Study, str], AbstractContextManager[Watch]]


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Questions, their answers, and how they are asked."""

    question_files: Sequence[Path]
    num_questions: int | None = None  # of each file; None: all
    temperature: float = 0.0
    max_tokens: int = 1024
    concurrency: int = 1
    repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        least = {
            "--num-questions": self.num_questions, "--max-gen-length": self.max_tokens,
            "--concurrency": self.concurrency, "--repeats": self.repeats,
        }  # fmt: skip
        for name, value in least.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; give at least 1.")


@dataclass(frozen=True)
class TaskFiles:
    """Where answers (JSONL) and the document go; None: nowhere."""

    answers: Path | None
    result: Path | None

    def check(self, *, overwrite: bool) -> None:
        """Before anything is measured."""
        for file in (file for file in (self.answers, self.result) if file is not None):
            if file.exists() and not overwrite:
                raise ConfigError(f"{file} exists. Choose another file, or add --overwrite.")
            if not file.parent.is_dir():
                raise ConfigError(
                    f"{file.parent} is no folder; make it before anything is measured."
                )

    def write(self, document: dict[str, Any], measured: Sequence[Measured]) -> None:
        if self.answers is not None:
            lines = [line for one in measured for line in answer_lines(one.task or "", one.records)]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            _write(self.answers, text)
        if self.result is not None:
            _write(self.result, json.dumps(document, indent=1, allow_nan=False) + "\n")


@dataclass(frozen=True)
class TaskRun:
    """What was measured of every task, up to where the run ended."""

    measured: Sequence[Measured]
    outcome: Outcome  # of the last task

    def document(
        self, base: Variant, options: TaskOptions, *, model: str | None, notes: Sequence[str]
    ) -> dict[str, Any]:
        return make_document(
            self.measured, base, model=model, notes=(*notes, *self.outcome.notes),
            workload={
                "kind": "tasks", "tasks": [str(file) for file in options.question_files],
                "num_questions": options.num_questions, "output_tokens": str(options.max_tokens),
            },
        )  # fmt: skip


def measure_tasks(
    studies: Mapping[str, Study], variants: Sequence[Variant], watching: Watching
) -> TaskRun:
    """All studies, or those before a failure; raises it where nothing at all was measured."""
    measured = []
    for task, study in studies.items():
        with watching(study, task) as watch:
            outcome = measure_study(study.on(variants), watch)
        if outcome.records:
            measured.append(Measured(study.on(variants), outcome.records, task))
        if outcome.stopped_by is not None:
            break
    if not measured:
        outcome.raise_if_stopped()
    return TaskRun(measured, outcome)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise WriteFailed(f"cannot write {file}: {error.strerror}. Choose another file.") from error
