"""`headstart convert HEAD --to FORMAT --out DIR`: a standalone head in another format."""

from __future__ import annotations

from typing import Annotated

import typer

from headstart.cli.options import Dequantize, DraftVocab, HeadType, ModelType, Trunk, Writing
from headstart.heads.formats import WRITTEN


def run(
    *,
    head: Annotated[str, typer.Argument(metavar="HEAD", help="A head in any of our formats.")],
    to: Annotated[
        str,
        typer.Option(
            "--to", help=f"One of {', '.join(WRITTEN)}.", autocompletion=lambda: list(WRITTEN)
        ),
    ],
    writing: Writing,
    model: Annotated[
        str | None,
        typer.Option("--model", help="The head's model, if the format carries trunk tensors."),
    ] = None,
    model_type: ModelType = None,
    dequantize: Dequantize = False,
    trunk: Trunk = None,
    head_type: HeadType = None,
    draft_vocab: DraftVocab = None,
) -> None:
    from headstart.checkpoint.hub import local_folder
    from headstart.cli.writing import carry_out, check_name
    from headstart.heads.export import plan_convert
    from headstart.heads.formats import open_head, open_model, open_target

    check_name(to, writing.out)
    lender = open_model(local_folder(model)) if model else None
    source = open_head(local_folder(head), model_type)
    operation = plan_convert(
        source, to, model=lender, dequantized=dequantize,
        trunk=open_target(trunk) if trunk is not None else None, head_type=head_type,
        draft_vocab=draft_vocab,
    )  # fmt: skip
    carry_out(operation, writing)
