"""`headstart score MODEL --data DATA`: acceptance and speed, predicted on held-out answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.demo_defaults import shipped_vocab_of
from headstart.cli.options import Bandwidth, Device, Dtype, Json, Model, TimedWeights
from headstart.cli.spinning import limit_spinning
from headstart.errors import ConfigError, HeadNotFound

if TYPE_CHECKING:
    from headstart.data.records import Record
    from headstart.engine.draft_vocabs import DraftVocabs
    from headstart.simulate.scoring import VocabOf


def run(
    *,
    model: Model,
    data: Annotated[
        Path, typer.Option("--data", metavar="DATA", help="Answers that `distill` wrote.")
    ],
    head: Annotated[
        Path | None,
        typer.Option("--head", "--draft-model", help="A head to score instead of the model's own."),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="heldout or train.")] = "heldout",
    vocab: Annotated[
        Path | None, typer.Option("--vocab", metavar="FILE", help="Also with a draft vocabulary.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Default: that of the answers.")
    ] = None,
    rule: Annotated[str, typer.Option("--rule", help="match or rejection.")] = "match",
    max_drafts: Annotated[int, typer.Option("--max-drafts", help="Largest K.")] = 8,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Score this many answers at most.")
    ] = None,
    bandwidth: Bandwidth = None,
    weights: TimedWeights = "as-dtype",
    device: Device = "auto",
    dtype: Dtype = "auto",
    json_output: Json = False,
) -> None:
    limit_spinning()
    from headstart.checkpoint.hub import local_folder
    from headstart.checkpoint.reader import Checkpoint
    from headstart.engine.options import MAX_DRAFTS
    from headstart.simulate.source import open_records

    if not 1 <= max_drafts <= MAX_DRAFTS:
        raise ConfigError(f"--max-drafts is {max_drafts}; give a number from 1 to {MAX_DRAFTS}.")
    checkpoint = Checkpoint.open(local_folder(model))
    vocab = vocab or shipped_vocab_of(model, head)  # as the engine would draft
    records = open_records(data, split, checkpoint, limit)  # before torch is imported

    from headstart.assembly.build import build, has_head
    from headstart.cli.progress import counted_progress
    from headstart.cli.score_view import show
    from headstart.data.prompt_reader import PromptReader
    from headstart.engine.auto.single_request import single_request_costs
    from headstart.engine.draft_vocabs import DraftVocabs
    from headstart.simulate.cost import best, predict
    from headstart.simulate.plan import make_plan
    from headstart.simulate.scoring import WHOLE, score

    plan = make_plan(records, temperature, rule)
    maps = DraftVocabs.open(vocab, checkpoint)
    largest = max((len(each.ids) for each in maps.by_name.values()), default=None)
    if not has_head(checkpoint, head):
        raise HeadNotFound(
            f"{checkpoint.folder} has no head to score. Give one with --head, or make one with "
            "`headstart graft`."
        )
    # Before the model is loaded as scoring wants it: an engine holds it otherwise.
    costs = single_request_costs(
        checkpoint, head, dict.fromkeys((None, largest)), device=device, dtype=dtype,
        bandwidth=bandwidth, weights=weights,
    )  # fmt: skip
    built = build(checkpoint, head, device=device, dtype=dtype, measure_threads=bandwidth is None)
    for note in dict.fromkeys((*costs.notes, *built.notes)):
        print(f"note: {note}", file=sys.stderr)
    prompts = PromptReader(checkpoint)
    ways: dict[str, VocabOf] = {WHOLE: lambda record: None}
    if vocab is not None:
        ways[vocab.name] = _chosen(maps, prompts.tokenizer)
    with counted_progress("tokens", sum(len(record.ids) for record in records)) as advance:
        found = score(
            built, records, plan, max_drafts=max_drafts, vocabs=ways, end_ids=prompts.end_ids,
            progress=advance,
        )  # fmt: skip
    document: dict[str, Any] = {
        "model": str(checkpoint.folder), "head": None if head is None else str(head),
        "data": str(data), "split": split, "method": plan.method, "rule": plan.rule,
        "temperature": plan.params.temperature, "explanation": plan.reason,
        "device": str(built.device), "dtype": str(built.dtype).removeprefix("torch."),
        "costs": "measured here" if bandwidth is None else f"from {bandwidth:g} GB/s",
        "weights": weights,
    }  # fmt: skip
    if plan.method == "formula":
        document["formula"] = plan.formula
    results = []
    is_greedy = plan.params.is_greedy and plan.rule == "match"
    for way, scores in found.items():
        own = maps if way != WHOLE else None
        size = None if own is None else largest
        speeds = predict(
            scores.overall.lengths, costs.of(built, size, is_greedy=is_greedy),
            intervals=scores.overall.intervals,
        )  # fmt: skip
        result = {"vocabulary": way, **scores.as_json()}
        if own is not None:
            result["coverage"] = _coverage(records, ways[way])
        result["speed"] = [speed.as_json() for speed in speeds]
        results.append({**result, "best_drafts": best(speeds).drafts})
    document["results"] = results
    if json_output:
        print(json.dumps(document))
    else:
        show(document)


def _chosen(maps: DraftVocabs, tokenizer: Any) -> VocabOf:
    """The map that the engine would take for a record's prompt."""

    def choose(record: Record) -> Any:
        ids = record.ids[: record.num_prompt].tolist()
        name = maps.choose(None, ids, ids, tokenizer)
        return None if name is None else maps.by_name[name]

    return choose


def _coverage(records: list[Record], vocab_of: VocabOf) -> float:
    """Share of answer tokens that drafts can be at all."""
    inside = total = 0
    for record in records:
        vocab, answer = vocab_of(record), record.ids[record.mask].tolist()
        total += len(answer)
        inside += len(answer)
        if vocab is not None:
            known = set(vocab.ids)
            inside -= sum(token not in known for token in answer)
    return inside / max(1, total)
