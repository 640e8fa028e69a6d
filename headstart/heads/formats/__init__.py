"""The standalone formats of heads, and how to tell which one a folder has.

A format is a module with `plan(head) -> Export` and `read(checkpoint) -> Head`, plus `recognises`.
FILE is the tensor file's name where no other format and no model has it, else None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from headstart.checkpoint.provenance import model_of
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.writer import FolderPlan
from headstart.errors import BadConfig, CheckpointError, ConfigError, MissingTensor, some
from headstart.families.base import Family
from headstart.heads.detection import lacking
from headstart.heads.head import Head, config_fields, head_of

FORMATS = ("xllm", "sglang", "speculators", "headstart")  # folders of safetensors
OTHERS = ("trtllm", "mlx", "vllm")  # such folders too, for what they are made for
WRITTEN = (*FORMATS, *OTHERS, "gguf")  # everything that a head can be written as
READ_ONLY = ("mtp_folder",)


@dataclass(frozen=True)
class Export:
    """What a format makes of a head."""

    plan: FolderPlan
    changes: tuple[str, ...]  # what the format could not carry as it was, in words
    details: Mapping[str, Any] = field(default_factory=dict)  # for the way back


class Reader(Protocol):
    """A format that heads are read from."""

    def read(self, checkpoint: Checkpoint) -> Head: ...
    def recognises(self, checkpoint: Checkpoint) -> bool: ...


class Format(Reader, Protocol):
    """A format that heads are written in, too."""

    FILE: str | None
    LOSES: str  # what does not come back with every bit, in words; empty: nothing

    def why_not(self, owner: Family) -> str: ...  # empty: it carries heads of the family

    def plan(self, head: Head) -> Export: ...


def format_named(name: str) -> Format:
    if name not in WRITTEN:
        raise ConfigError(f"no format is called {name!r}; expected one of {', '.join(WRITTEN)}.")
    return cast(Format, import_module(f"headstart.heads.formats.{name}"))


def formats_of(owner: Family) -> dict[str, str]:
    """Every format, with why it does not carry heads of the family; empty where it does."""
    return {name: format_named(name).why_not(owner) for name in WRITTEN}


def reader_of(name: str) -> Reader:
    return cast(Reader, import_module(f"headstart.heads.formats.{name}"))


def format_of(checkpoint: Checkpoint) -> str | None:
    """The format of a standalone head, or None for a full checkpoint."""
    from headstart.heads.formats import gguf

    if isinstance(checkpoint, gguf.GgufModel):
        return "gguf" if gguf.recognises(checkpoint) else None
    # The file's name first: a config may still bear the marks of the format it was made from.
    by_file = (n for n in FORMATS if format_named(n).FILE in checkpoint.index.metadata)
    # MLX before TensorRT-LLM: a model type says more than names that begin with `mtp.`.
    order = (*READ_ONLY, *reversed(OTHERS), *FORMATS)
    by_config = (n for n in order if reader_of(n).recognises(checkpoint))
    return next(by_file, None) or next(by_config, None)


def open_model(folder: str | Path, advice: str = "Give the model it belongs to.") -> Checkpoint:
    """A whole model; CheckpointError for a standalone head, which resembles one."""
    checkpoint = Checkpoint.open(folder)
    name = format_of(checkpoint)
    if name is not None:
        raise CheckpointError(
            f"{checkpoint.folder} is a standalone {name} head, not a model. {advice}"
        )
    return checkpoint


def open_any(path: str | Path) -> Checkpoint:
    """A folder of safetensors, or a GGUF file."""
    from headstart.heads.formats.gguf import is_gguf_path, open_gguf

    return open_gguf(Path(path)) if is_gguf_path(Path(path)) else Checkpoint.open(path)


def open_target(path: str | Path, advice: str = "Give the model it belongs to.") -> Checkpoint:
    """A whole model as a folder of safetensors or as GGUF, to take a head from or put one in."""
    from headstart.heads.formats.gguf import is_gguf_path, open_gguf

    return open_gguf(Path(path)) if is_gguf_path(Path(path)) else open_model(path, advice)


def open_runnable(path: str | Path, advice: str = "Give the model it belongs to.") -> Checkpoint:
    """A whole model of any format that the engine runs, seen as it was published."""
    return published(open_target(path, advice))


def published(model: Checkpoint) -> Checkpoint:
    """A model of GGUF or MLX as the checkpoint that it was made of; others are as they are."""
    from headstart.heads.formats.gguf import GgufModel
    from headstart.heads.formats.gguf.published import as_published
    from headstart.heads.formats.mlx_model import is_mlx_model
    from headstart.heads.formats.mlx_published import mlx_as_published

    if isinstance(model, GgufModel):
        return as_published(model)
    return mlx_as_published(model) if is_mlx_model(model) else model


def open_head(folder: str | Path, model_type: str | None = None, *, to_run: bool = False) -> Head:
    """A head from any of the formats, or from inside a full checkpoint or GGUF file.

    `to_run`: with the types that a GGUF file stores it in, which cannot be written elsewhere.
    """
    from headstart.heads.formats.gguf import GgufModel, read

    checkpoint = open_any(folder)
    if isinstance(checkpoint, GgufModel):
        return read(checkpoint, as_stored=to_run)
    name = format_of(checkpoint)
    if name is None:
        return head_in(checkpoint, model_type)
    head = reader_of(name).read(checkpoint)
    if head.root not in ("", *head.family.keys.roots):
        raise BadConfig(
            f"{checkpoint.folder}: root is {head.root[:60]!r}; expected one of "
            f"{', '.join(map(repr, head.family.keys.roots))}. Export the head again."
        )
    lost = lacking(head.family, config_fields(head.config), max(head.num_modules, 1), head.tensors)
    if lost:
        raise MissingTensor(
            f"{checkpoint.folder} ({name}) lacks {some(lost)}; a {head.family.name} head has them. "
            "Export the head again."
        )
    return replace(head, model=model_of(checkpoint.folder) or head.model)


def head_in(model: Checkpoint, model_type: str | None = None) -> Head:
    """The head inside a whole model, a folder of safetensors or a GGUF file."""
    from headstart.heads.formats.gguf import GgufModel, read
    from headstart.heads.formats.mlx_model import is_mlx_model, read_mlx_model

    if isinstance(model, GgufModel):
        return read(model)
    return (read_mlx_model if is_mlx_model(model) else head_of)(model, model_type)


def count_modules(tensors: Iterable[str]) -> int:
    """Modules that hold a fusion tensor; one of another kind is no module."""
    return len({n.split(".")[1] for n in tensors if n.split(".")[2].startswith("fuse")})
