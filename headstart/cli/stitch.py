"""`headstart stitch HEAD MODEL --out DIR`: a head put into a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from headstart.cli.options import (
    Dequantize,
    DraftVocab,
    HeadType,
    Link,
    MlxLayout,
    Model,
    ModelType,
    Writing,
)


def run(
    *,
    head: Annotated[
        str, typer.Argument(metavar="HEAD", help="A head in any format, or a model that has one.")
    ],
    model: Model,
    writing: Writing,
    model_type: ModelType = None,
    dequantize: Dequantize = False,
    head_type: HeadType = None,
    mlx_layout: MlxLayout = None,
    draft_vocab: DraftVocab = None,
    link: Link = False,
) -> None:
    from headstart.checkpoint.hub import local_folder
    from headstart.cli.writing import carry_out
    from headstart.heads.formats import open_head, open_target
    from headstart.heads.formats.gguf.reduced import refuse_in_models
    from headstart.heads.stitch import plan_stitch

    refuse_in_models(draft_vocab)
    operation = plan_stitch(
        open_head(local_folder(head), model_type),
        open_target(local_folder(model)),
        dequantized=dequantize,
        model_type=model_type,
        head_type=head_type,
        mlx_layout=mlx_layout,
    )
    carry_out(operation, writing, link=link)
