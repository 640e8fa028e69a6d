"""`headstart vocab MODEL --data DATA --out FILE`: the tokens a head may propose, by language."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.options import (
    Bandwidth,
    Device,
    DryRun,
    Dtype,
    Json,
    Model,
    Overwrite,
    TimedWeights,
)
from headstart.cli.spinning import limit_spinning
from headstart.cli.vocab_prediction import predictor_of
from headstart.cli.vocab_view import facts, table
from headstart.errors import ConfigError, DataError, some

if TYPE_CHECKING:
    from headstart.checkpoint.reader import Checkpoint
    from headstart.vocab import making
    from headstart.vocab.draft_vocab import DraftVocab
    from headstart.vocab.making import Made, Simulate

_BY = ("language", "category", "none")


def run(
    *,
    model: Model,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DATA", help="Answers of the model to count.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Result: .json, .pt, .safetensors or .npy."),
    ] = None,
    size: Annotated[
        int | None, typer.Option("--size", help="Tokens in it; default: by predicted speed.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option("--sizes", help="Sizes to try: 8000,16000,32000.")
    ] = None,
    by: Annotated[
        str, typer.Option("--by", help="One map per language or category; none: one for all.")
    ] = "language",
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="Also count this text file. Repeatable.")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", help="Write this map alone, by its name.")
    ] = None,
    min_tokens: Annotated[
        int, typer.Option("--min-tokens", help="Answer tokens that a map of its own needs.")
    ] = 1000,
    source: Annotated[
        Path | None, typer.Option("--from", help="Convert this file instead of counting.")
    ] = None,
    head: Annotated[
        Path | None,
        typer.Option("--head", "--draft-model", help="A head to try sizes with; else the model's."),
    ] = None,
    bandwidth: Bandwidth = None,
    weights: TimedWeights = "as-dtype",
    device: Device = "auto",
    dtype: Dtype = "auto",
    format: Annotated[
        str | None,
        typer.Option("--format", help="headstart, sglang, d2t or t2d; default: by the file name."),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    limit_spinning()
    from headstart.checkpoint.hub import local_folder
    from headstart.checkpoint.reader import Checkpoint
    from headstart.data.dataset import Dataset
    from headstart.vocab.files import check_file_target, format_of, write

    if out is None and not dry_run:
        raise ConfigError("no --out given; say where the result goes, or add --dry-run.")
    if out is not None:  # before the counting, which may be long
        format_of(out, format)
        check_file_target(out, overwrite=overwrite)
    if by not in _BY:
        raise ConfigError(f"--by is {by!r}; expected one of {', '.join(_BY)}.")
    checkpoint = Checkpoint.open(local_folder(model))
    made: list[Made] = []
    notes: list[str] = []
    if source is not None:
        if data is not None or text or size is not None or sizes is not None:
            raise ConfigError("--from converts a file as it is; leave --data, --text, --size out.")
        vocabs = _converted(source, checkpoint)
    else:
        if data is None and not text:
            raise ConfigError("nothing to count; give --data, --text or both.")
        if data is not None:
            Dataset.open(data)  # before a tokenizer is loaded
        wanted = _sizes(size, sizes)
        predict = partial(predictor_of, checkpoint, head, device, dtype, bandwidth, weights)
        made, notes = _made(checkpoint, data, text or [], by, wanted, min_tokens, only, predict)
        vocabs = [each.vocab for each in made]
    vocabs = [vocab for vocab in vocabs if only in (None, vocab.name)] or _absent(only, vocabs)
    if out is not None and not dry_run:
        write(vocabs, out, format=format, overwrite=overwrite)
    if json_output:
        done = {"out": None if out is None else str(out), "dry_run": dry_run, "notes": notes}
        print(json.dumps({"maps": [facts(vocab, made) for vocab in vocabs], **done}))
        return
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print("\n".join(table(made) if made else [f"{v.name}: {len(v.ids)} tokens" for v in vocabs]))
    if dry_run:
        print("dry run: nothing was written", file=sys.stderr)
    else:
        print(f"wrote {out}")


def _made(
    checkpoint: Checkpoint,
    data: Path | None,
    texts: list[Path],
    by: str,
    sizes: tuple[int, ...],
    min_tokens: int,
    only: str | None,
    predictor: Callable[[Sequence[int]], Simulate | None],
) -> tuple[list[Made], list[str]]:
    from headstart.data.fingerprints import tokenizer_sha
    from headstart.data.prompt_reader import PromptReader
    from headstart.vocab import making, ranking
    from headstart.vocab.draft_vocab import ALL
    from headstart.vocab.forced import forced_ids
    from headstart.vocab.languages import language_of
    from headstart.vocab.sizes import candidate_sizes, check_sizes

    prompts = PromptReader(checkpoint)
    tokenizer = prompts.tokenizer
    if tokenizer is None:
        raise DataError(f"{checkpoint.folder} has no tokenizer, which a draft vocabulary needs.")
    vocab_size = int(checkpoint.config.get("vocab_size", 0))
    forced = frozenset(i for i in forced_ids(tokenizer, prompts.end_ids) if i < vocab_size)
    trait = making.Model(
        vocab_size=vocab_size, tokenizer_sha=tokenizer_sha(checkpoint), forced=forced,
        languages=by == "language",
    )  # fmt: skip
    sizes = sizes or candidate_sizes(vocab_size, len(forced))
    check_sizes(sizes, vocab_size, len(forced))
    group_of = {
        "language": ranking.by_language(lambda ids: str(tokenizer.decode(ids))),
        "category": ranking.by_category,
        "none": ranking.together,
    }[by]
    train, heldout = _answers(data, trait)

    def encoded(piece: str) -> list[int]:
        return list(tokenizer.encode(piece, add_special_tokens=False))

    counts = [ranking.count(_shown(train), group_of)]
    for path in texts:
        label = path.stem if by == "category" else ALL
        group = language_of if by == "language" else label
        counts.append(ranking.count_text(_text(path), encoded, group))
    groups, notes = making.grouped(
        ranking.merged(*counts), heldout, group_of, min_tokens=min_tokens
    )
    chosen = [group for group in groups if only in (None, group.name)]
    if not chosen:
        _absent(only, groups)
    simulate = predictor(sizes) if heldout else None
    made, more = _sized_groups(chosen, groups, trait, sizes, simulate)
    return made, [*notes, *more, *(each.note for each in made if each.note is not None)]


def _sized_groups(
    chosen: list[making.Group],
    groups: list[making.Group],
    trait: making.Model,
    sizes: tuple[int, ...],
    simulate: Simulate | None,
) -> tuple[list[Made], list[str]]:
    """Groups without held-out answers take the size that is best for all answers together."""
    from headstart.vocab import making
    from headstart.vocab.draft_vocab import ALL

    blind = {group.name for group in chosen if not group.heldout and len(sizes) > 1}
    everything = next((group for group in groups if group.name == ALL), None)
    if not blind or everything is None or not everything.heldout:
        return [making.make(group, trait, sizes, simulate) for group in chosen], []
    made = {ALL: making.make(everything, trait, sizes, simulate)}
    shared = len(made[ALL].vocab.ids)
    for group in (group for group in chosen if group.name != ALL):
        own = (shared,) if group.name in blind else sizes
        made[group.name] = making.make(group, trait, own, simulate)
    notes = [
        f"{name}: no held-out answer is in it, so its size is that of {ALL}, {shared}; "
        "distill more prompts of this kind, or give --size"
        for name in sorted(blind)
    ]
    return [made[group.name] for group in chosen], notes


def _answers(data: Path | None, model: making.Model) -> tuple[list[Any], list[Any]]:
    if data is None:
        return [], []
    from headstart.data.dataset import Dataset

    dataset = Dataset.open(data)
    dataset.header.check(tokenizer_sha=model.tokenizer_sha or "", vocab_size=model.vocab_size)
    return list(dataset.records("train")), list(dataset.records("heldout"))


def _shown(records: list[Any]) -> Any:
    """The records, with a bar while they are counted if somebody is looking."""
    from rich.console import Console
    from rich.progress import track

    return track(
        records, "counting", console=Console(stderr=True), transient=True,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text ({error}).") from error


def _converted(source: Path, checkpoint: Checkpoint) -> list[DraftVocab]:
    """The maps of a file, with what its format does not say filled in from the model."""
    from dataclasses import replace

    from headstart.data.fingerprints import ABSENT, tokenizer_sha
    from headstart.vocab.files import read

    sha = tokenizer_sha(checkpoint)
    known: dict[str, Any] = {
        "vocab_size": int(checkpoint.config.get("vocab_size", 0)),
        "tokenizer_sha": None if sha == ABSENT else sha,
    }
    vocabs = read(source)
    for vocab in vocabs:
        vocab.check(**known, where=str(source))
    return [replace(vocab, **known) for vocab in vocabs]


def _sizes(size: int | None, sizes: str | None) -> tuple[int, ...]:
    if size is not None and sizes is not None:
        raise ConfigError("give --size or --sizes, not both.")
    words = [] if sizes is None else sizes.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--sizes is {sizes!r}; expected numbers such as 8000,16000,32000.")
    found = (size,) if size is not None else tuple(dict.fromkeys(int(word) for word in words))
    if any(number < 1 for number in found):
        raise ConfigError(f"a size is {min(found)}; give at least 1.")
    return found


def _absent(only: str | None, there: list[Any]) -> list[Any]:
    raise ConfigError(f"--only is {only!r}; there are {some((v.name for v in there), 8)}.")
