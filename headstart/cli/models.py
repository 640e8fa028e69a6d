"""A look at a MODEL and a head before what runs them is imported: torch takes seconds, headers do
not."""

from __future__ import annotations

from pathlib import Path


def check_model(model: str) -> None:
    """Refuse what holds no model.

    A name is left to the engine: what it stands for may have to be fetched or unpacked first.
    """
    from headstart.checkpoint.hub import is_path, local_folder
    from headstart.heads.formats import open_target

    if is_path(model):
        open_target(local_folder(model), "Give its model, and this folder with --head.")


def check_head(head: Path | None) -> None:
    """Refuse what was given as a head and holds none."""
    from headstart.heads.formats import open_head

    if head is not None:
        open_head(head, to_run=True)
