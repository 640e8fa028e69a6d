"""`headstart vocab MODEL --data DATA --out FILE`: the tokens a head may propose, by language."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.models import check_head
from headstart.cli.options import (
    Bandwidth,
    Device,
    DryRun,
    Dtype,
    Json,
    Model,
    Overwrite,
    OwnTokens,
    TimedWeights,
    head_option,
)
from headstart.cli.spinning import limit_spinning
from headstart.cli.vocab_view import tell
from headstart.errors import ConfigError

if TYPE_CHECKING:
    from headstart.data.records import Record
    from headstart.vocab.making import Made


def run(
    *,
    model: Model,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DATA", help="Answers of the model to count.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Result: .json, .pt, .safetensors, .npy or .gguf."
        ),
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
    draft_vocab_own: OwnTokens = 0,
    head: Annotated[Path | None, head_option("A head to try sizes with; else the model's.")] = None,
    bandwidth: Bandwidth = None,
    weights: TimedWeights = "as-dtype",
    device: Device = "auto",
    dtype: Dtype = "auto",
    format: Annotated[
        str | None,
        typer.Option(
            "--format", help="headstart, sglang, d2t, t2d or gguf; default: by the file name."
        ),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    limit_spinning()
    from headstart.checkpoint.hub import local_folder
    from headstart.heads.formats import open_runnable
    from headstart.predict.vocab_choice import (
        VocabOptions,
        check_by,
        converted,
        make_maps,
        only_named,
    )
    from headstart.vocab.files import check_file_target, format_of, write
    from headstart.vocab.sizes import parse_sizes

    if out is None and not dry_run:
        raise ConfigError("no --out given; say where the result goes, or add --dry-run.")
    if out is not None:  # before the counting, which may be long
        format_of(out, format)
        check_file_target(out, overwrite=overwrite)
    check_by(by)
    checkpoint = open_runnable(local_folder(model))
    check_head(head)
    made: list[Made] = []
    notes: list[str] = []
    if source is not None:
        if data is not None or text or size is not None or sizes is not None:
            raise ConfigError("--from converts a file as it is; leave --data, --text, --size out.")
        vocabs = converted(source, checkpoint)
    else:
        options = VocabOptions(
            data=data, texts=text or (), by=by, sizes=parse_sizes(size, sizes),
            min_tokens=min_tokens, only=only, head=head, bandwidth=bandwidth, weights=weights,
            device=device, dtype=dtype, own=draft_vocab_own,
        )  # fmt: skip
        made, notes = make_maps(checkpoint, options, shown=_shown)
        vocabs = [each.vocab for each in made]
    vocabs = only_named(vocabs, only)
    if out is not None and not dry_run:
        write(vocabs, out, format=format, overwrite=overwrite)
    tell(vocabs, made, notes, out, dry_run=dry_run, json_output=json_output)


def _shown(records: Sequence[Record]) -> Iterable[Record]:
    """The records, with a bar on a terminal while they are counted."""
    from rich.progress import track

    from headstart.report.terminal import Console

    return track(
        records, "counting", console=Console(stderr=True), transient=True,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip
