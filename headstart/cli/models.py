"""A look at a MODEL before what runs it is imported: torch takes seconds, its headers do not."""

from __future__ import annotations

from pathlib import Path


def check_model(model: str, head: Path | None) -> None:
    """Refuse folders and files that hold no model, or no head, as the engine would seconds later.

    A name is left to the engine: what it stands for may have to be fetched or unpacked first.
    """
    from headstart.checkpoint.hub import is_path, local_folder
    from headstart.heads.formats import open_head, open_runnable

    if is_path(model):
        open_runnable(local_folder(model), "Give its model, and this folder with --head.")
    if head is not None:
        open_head(head, to_run=True)
