"""`headstart export MODEL --out DIR --format F`: the head as a standalone draft checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from headstart.cli.options import Dequantize, DraftVocab, HeadType, ModelType, Trunk, Writing
from headstart.heads.formats import WRITTEN

T = TypeVar("T")


def run(
    *,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Checkpoint folder, GGUF file or hub name."),
    ] = None,
    writing: Writing,
    format_name: Annotated[
        str,
        typer.Option(
            "--format", help=f"One of {', '.join(WRITTEN)}.", autocompletion=lambda: list(WRITTEN)
        ),
    ] = "headstart",
    model_type: ModelType = None,
    dequantize: Dequantize = False,
    trunk: Trunk = None,
    head_type: HeadType = None,
    draft_vocab: DraftVocab = None,
    input_dir: Annotated[
        str | None, typer.Option("--input-dir", help="As xLLM spells MODEL.")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", help="As xLLM spells --out.")
    ] = None,
) -> None:
    from headstart.checkpoint.hub import local_folder
    from headstart.cli.writing import carry_out, check_name
    from headstart.heads.export import plan_export
    from headstart.heads.formats import head_in, open_target

    folder = _one("MODEL", model, "--input-dir", input_dir)
    if folder is None:
        raise typer.BadParameter("give the checkpoint (MODEL or --input-dir)")
    out = _one("--out", writing.out, "--output-dir", output_dir)
    check_name(format_name, out)
    advice = "To change its format use `headstart convert`."
    head = head_in(open_target(local_folder(folder), advice), model_type)
    lender = open_target(trunk) if trunk is not None else None
    operation = plan_export(
        head,
        format_name,
        dequantized=dequantize,
        trunk=lender,
        head_type=head_type,
        draft_vocab=draft_vocab,
    )
    carry_out(operation, replace(writing, out=out))


def _one(name: str, value: T | None, alias: str, other: T | None) -> T | None:
    if value is not None and other is not None:
        raise typer.BadParameter(f"{name} and {alias} mean the same; give one of them")
    return value if value is not None else other
