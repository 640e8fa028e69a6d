"""From what a user calls a model to a folder: a path, a name of ours, or a name on the hub.

Names of ours are put into `named_models` where they are defined (`headstart/__init__.py`); a folder
of the same name here and now comes first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from headstart.errors import CheckpointError

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # not ./x or ../x
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py", "LICENSE*")
named_models: dict[str, Callable[[], Path]] = {}  # name -> what makes sure that its folder is there


def is_path(model: str | Path) -> bool:
    """Whether it is a path, of what is there or not, and no name."""
    is_name = str(model) in named_models or _HUB_NAME.fullmatch(str(model))
    return os.path.lexists(model) or not is_name


def local_folder(model: str | Path) -> Path:
    """The folder of a checkpoint, downloaded if `model` is a hub name and the hub answers."""
    if is_path(model):
        return Path(model)
    if str(model) in named_models:
        return named_models[str(model)]()
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(model), allow_patterns=list(_WANTED)))
    except Exception as error:  # the hub client raises many unrelated types
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{model} is not a folder here and could not be fetched from the hub ({reason}). "
            "Give the path of a downloaded checkpoint."
        ) from error
