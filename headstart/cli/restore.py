"""`headstart restore MODEL --from ORIGINAL --out DIR`: a lost head given back."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from headstart.cli.options import Dequantize, HeadType, Link, MlxLayout, Model, ModelType, Writing
from headstart.errors import ConfigError


def run(
    *,
    model: Model,
    original: Annotated[
        str, typer.Option("--from", metavar="ORIGINAL", help="The model that still has the head.")
    ],
    writing: Writing,
    model_type: ModelType = None,
    dequantize: Dequantize = False,
    head_type: HeadType = None,
    mlx_layout: MlxLayout = None,
    link: Link = False,
) -> None:
    from headstart.checkpoint.hub import local_folder
    from headstart.cli.writing import carry_out
    from headstart.heads.formats import open_head, open_target
    from headstart.heads.stitch import plan_restore

    target, source = open_target(local_folder(model)), local_folder(original)
    if os.path.realpath(source) == os.path.realpath(target.folder):
        raise ConfigError(
            f"--from is {original}, the model itself; give the original, which has the head that "
            "was lost."
        )
    head = open_head(source, model_type)
    operation = plan_restore(
        target, head.origin, head, dequantized=dequantize, model_type=model_type,
        head_type=head_type,
        mlx_layout=mlx_layout,
    )  # fmt: skip
    carry_out(operation, writing, link=link)
