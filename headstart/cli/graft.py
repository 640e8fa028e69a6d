"""`headstart graft MODEL --out DIR`: a fresh head for a model that has none."""

from __future__ import annotations

from headstart.cli.options import Link, Model, Writing


def run(
    *,
    model: Model,
    writing: Writing,
    link: Link = False,
) -> None:
    from headstart.checkpoint.hub import local_folder
    from headstart.cli.writing import carry_out
    from headstart.heads.formats import open_model
    from headstart.heads.graft import plan_graft

    operation = plan_graft(open_model(local_folder(model)))
    carry_out(operation, writing, link=link)
