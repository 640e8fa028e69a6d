"""`headstart bench tasks [MODEL] --question-file F`: files of questions, with and without MTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headstart.bench.arrivals import LoadOptions
from headstart.cli.bench_targets import TargetOptions, make_targets
from headstart.cli.options import DryRun, Head, Json, Out, Overwrite


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
    from headstart.bench.task_run import TaskFiles, TaskOptions, measure_tasks

    options = TaskOptions(
        question_files=question_file, num_questions=num_questions, temperature=temperature,
        max_tokens=max_gen_length, concurrency=concurrency, repeats=repeats, seed=seed,
    )  # fmt: skip
    files = TaskFiles(answer_file, result_file)
    files.check(overwrite=overwrite)
    targets = make_targets(model, target, head=head)
    from headstart.bench.cells import Point
    from headstart.bench.folder import check_out
    from headstart.bench.tasks import task_workloads
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
    with targets.served(concurrency) as variants:
        found = measure_tasks(studies, variants, watching)
    notes = targets.notes(concurrency)
    document = found.document(targets.base, options, model=model, notes=notes)
    files.write(document, found.measured)
    finish(document, out, overwrite=overwrite, json_output=json_output)
    found.outcome.raise_if_stopped()
