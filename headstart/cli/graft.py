"""`headstart graft MODEL --out DIR`: a fresh head for a model that has none."""

from __future__ import annotations

from headstart.cli.options import DryRun, Json, Link, Model, Out, Overwrite


def run(
    *,
    model: Model,
    out: Out = None,
    link: Link = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    from headstart.checkpoint.hub import local_folder
    from headstart.cli.writing import carry_out
    from headstart.heads.formats import open_model
    from headstart.heads.graft import plan_graft

    operation = plan_graft(open_model(local_folder(model)))
    carry_out(operation, out, overwrite=overwrite, dry_run=dry_run, as_json=json_output, link=link)
