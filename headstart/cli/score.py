"""`headstart score MODEL --data DATA`: acceptance and speed, predicted on held-out answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headstart.cli.demo_defaults import shipped_vocab_of
from headstart.cli.models import check_head
from headstart.cli.options import (
    Bandwidth,
    Device,
    Dtype,
    Json,
    Model,
    OwnTokens,
    TimedWeights,
    head_option,
)
from headstart.cli.spinning import limit_spinning
from headstart.report.terminal import say

if TYPE_CHECKING:
    from headstart.predict.context_speed import ContextPrediction
    from headstart.predict.head_speed import HeadPrediction


def run(
    *,
    model: Model,
    data: Annotated[
        Path, typer.Option("--data", metavar="DATA", help="Answers that `distill` wrote.")
    ],
    head: Annotated[Path | None, head_option("A head to score instead of the model's own.")] = None,
    split: Annotated[str, typer.Option("--split", help="heldout or train.")] = "heldout",
    vocab: Annotated[
        Path | None, typer.Option("--vocab", metavar="FILE", help="Also with a draft vocabulary.")
    ] = None,
    draft_vocab_own: OwnTokens = 0,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Default: that of the answers.")
    ] = None,
    rule: Annotated[
        Literal["match", "rejection"], typer.Option("--rule", help="match or rejection.")
    ] = "match",
    max_drafts: Annotated[int, typer.Option("--max-drafts", help="Largest K.")] = 8,
    draft_from_answers: Annotated[
        int,
        typer.Option("--draft-from-answers", help="Copy from so many answers before, too."),
    ] = 0,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Score this many answers at most.")
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", help="Requests that will be served at once.")
    ] = 1,
    bandwidth: Bandwidth = None,
    bench: Annotated[
        Path | None,
        typer.Option("--bench", metavar="FILE", help="Costs from a report of `bench run`."),
    ] = None,
    weights: TimedWeights = "as-dtype",
    device: Device = "auto",
    dtype: Dtype = "auto",
    json_output: Json = False,
) -> None:
    limit_spinning()
    from headstart.bench.document import read_document
    from headstart.checkpoint.hub import local_folder
    from headstart.heads.formats import open_runnable
    from headstart.predict.options import PredictionOptions
    from headstart.simulate.source import open_records

    options = PredictionOptions(
        head=head, vocab=vocab or shipped_vocab_of(model, head),  # as the engine would draft
        own=draft_vocab_own, temperature=temperature, rule=rule, max_drafts=max_drafts,
        requests=requests, draft_from_answers=draft_from_answers,
        bandwidth=bandwidth, bench=None if bench is None else read_document(bench),
        bench_name="" if bench is None else str(bench), weights=weights, device=device,
        dtype=dtype,
    )  # fmt: skip
    checkpoint = open_runnable(local_folder(model))
    check_head(head)
    records = open_records(data, split, checkpoint, limit)  # before torch is imported

    from headstart.cli.progress import counted_progress
    from headstart.cli.score_view import show
    from headstart.engine.auto.host_times import num_turns
    from headstart.heads.predicted import keep_score
    from headstart.models.build import has_head
    from headstart.predict.context_speed import open_context_prediction
    from headstart.predict.head_speed import open_prediction

    with counted_progress("rounds timed, turns", num_turns() if options.is_timed else 0) as turn:
        prediction: HeadPrediction | ContextPrediction
        if options.vocab is None and not has_head(checkpoint, head):
            prediction = open_context_prediction(checkpoint, records, options, timing=turn)
        else:
            prediction = open_prediction(checkpoint, records, options, timing=turn)
    for note in prediction.notes:
        say(f"note: {note}", file=sys.stderr)
    with counted_progress("tokens", sum(len(record.ids) for record in records)) as advance:
        found = prediction.run(advance)
    document: dict[str, Any] = {
        "model": str(checkpoint.folder), "head": None if head is None else str(head),
        "data": str(data), "split": split, **found,
    }  # fmt: skip
    try:
        keep_score(document, checkpoint.folder, head)
    except OSError as error:
        say(f"note: inspect and launch will not know this result: {error}", file=sys.stderr)
    if json_output:
        say(json.dumps(document))
    else:
        show(document)
