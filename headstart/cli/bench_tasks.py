"""`headstart bench tasks [MODEL] --question-file F`: files of questions, with and without MTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headstart.bench.arrivals import LoadOptions
from headstart.cli.bench_targets import TargetOptions, make_targets
from headstart.cli.options import DryRun, Head, Json, Out, Overwrite
from headstart.errors import ConfigError, WriteFailed


def run(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Checkpoint folder, Hugging Face name or `demo`.",
            show_default=False,
        ),
    ] = None,
    question_file: Annotated[
        list[Path],
        typer.Option("--question-file", metavar="F", help="A task; may be repeated."),
    ],
    num_questions: Annotated[
        int | None, typer.Option("--num-questions", help="Of each file; default: all.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0: greedy.")] = 0.0,
    max_gen_length: Annotated[
        int, typer.Option("--max-gen-length", help="Longest answer, in tokens.")
    ] = 1024,
    answer_file: Annotated[
        Path | None, typer.Option("--answer-file", metavar="A", help="Answers go here, as JSONL.")
    ] = None,
    result_file: Annotated[
        Path | None, typer.Option("--result-file", metavar="R", help="The document goes here.")
    ] = None,
    target: TargetOptions,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Answers at once.")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", help="Runs of each variant, in turn.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Of sampled answers.")] = 0,
    head: Head = None,
    out: Out = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    least = {
        "--num-questions": num_questions, "--max-gen-length": max_gen_length,
        "--concurrency": concurrency, "--repeats": repeats,
    }  # fmt: skip
    for name, value in least.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; give at least 1.")
    _check_files([answer_file, result_file], overwrite=overwrite)
    targets = make_targets(model, target, head=head)
    from headstart.bench.cells import Point
    from headstart.bench.document import Measured, make_document
    from headstart.bench.folder import check_out
    from headstart.bench.study import measure_study
    from headstart.bench.tasks import answer_lines, task_workloads
    from headstart.cli.bench_view import finish, tell_plans, watching

    check_out(out, overwrite=overwrite)
    facts = targets.facts(is_offline=dry_run)
    workloads = task_workloads(
        question_file, num_questions=num_questions, max_tokens=max_gen_length,
        temperature=temperature, seed=seed, facts=facts,
    )  # fmt: skip
    studies = {
        task: targets.study(
            [Point(concurrency=concurrency)], workload, LoadOptions(), facts=facts,
            repeats=repeats, seed=seed,
        )
        for task, workload in workloads.items()
    }  # fmt: skip
    if dry_run:
        servers = targets.servers(concurrency)
        tell_plans(studies, targets.base, servers=servers, json_output=json_output)
        return
    measured = []
    with targets.served(concurrency) as variants:
        for task, study in studies.items():
            with watching(study, title=task) as watch:
                outcome = measure_study(study.on(variants), watch)
            if outcome.records:
                measured.append(Measured(study.on(variants), outcome.records, task))
            if outcome.stopped_by is not None:
                break
    if not measured:
        outcome.raise_if_stopped()
    files = [str(file) for file in question_file]
    document = make_document(
        measured, targets.base, model=model, notes=(*targets.notes(concurrency), *outcome.notes),
        workload={
            "kind": "tasks", "tasks": files, "num_questions": num_questions,
            "output_tokens": str(max_gen_length),
        },
    )  # fmt: skip
    if answer_file is not None:
        lines = [line for one in measured for line in answer_lines(one.task or "", one.records)]
        _write(answer_file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    if result_file is not None:
        _write(result_file, json.dumps(document, indent=1, allow_nan=False) + "\n")
    finish(document, out, overwrite=overwrite, json_output=json_output)
    outcome.raise_if_stopped()


def _check_files(files: list[Path | None], *, overwrite: bool) -> None:
    for file in (file for file in files if file is not None):
        if file.exists() and not overwrite:
            raise ConfigError(f"{file} exists. Choose another file, or add --overwrite.")
        if not file.parent.is_dir():
            raise ConfigError(f"{file.parent} is no folder; make it before anything is measured.")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise WriteFailed(f"cannot write {file}: {error.strerror}. Choose another file.") from error
