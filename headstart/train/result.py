"""The trained head as it will be served: in the dtypes in which its source was stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from headstart.checkpoint.reader import torch_dtype
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes
from headstart.heads.export import plan_export
from headstart.models.head_parts import parameter_parts, split_parameters
from headstart.train.averaging import AVERAGE
from headstart.train.frozen_model import FrozenModel
from headstart.train.learner import Learner

_MASTER = "master."


def write_head(
    frozen: FrozenModel, tensors: Mapping[str, Tensor], out: Path, details: Mapping[str, Any]
) -> None:
    """Write the masters of a checkpoint, or their mean where it has one, as a head that every
    command takes."""
    masters = {
        name.removeprefix(_MASTER): tensors.get(f"{AVERAGE}{name.removeprefix(_MASTER)}", value)
        for name, value in tensors.items()
        if name.startswith(_MASTER)
    }
    source = frozen.source
    tuned = {
        name: _tensor_source(value, source.tensors[name].dtype)
        for name, value in split_parameters(masters, frozen.head_config, source.tensors).items()
    }
    # Copies of trunk tensors that some heads carry are frozen: they stay as they are stored.
    head = source.changed({**source.tensors, **tuned}, f"{len(tuned)} tensors were trained")
    operation = plan_export(head, "headstart", name="train")
    details = {**operation.details, "training": dict(details)}
    replace(operation, details=details).write(out, overwrite=True)


@contextmanager
def as_written(frozen: FrozenModel, learner: Learner) -> Iterator[None]:
    """Inside, the head has the weights that `write_head` would write; afterwards its masters.

    Sharded masters are not rounded: there passes compute with copies in the computing dtype.
    """
    stored = frozen.source.tensors
    masters = {name: parameter.detach() for name, parameter in learner.parameters.items()}
    parts = {} if learner.is_sharded else parameter_parts(masters, frozen.head_config, stored)
    dtypes = {name: torch_dtype(stored[name].dtype) for name in parts}
    is_rounded = any(part.dtype != dtypes[name] for name, part in parts.items())
    if learner.average is None and not is_rounded:
        yield
        return
    kept = {name: master.clone() for name, master in masters.items()}
    if learner.average is not None:
        for name, mean in learner.average.values.items():
            masters[name].copy_(mean)
    for name, part in parts.items():
        part.copy_(part.to(dtypes[name]))
    try:
        yield
    finally:
        for name, master in masters.items():
            master.copy_(kept[name])


def _tensor_source(value: Tensor, dtype: str) -> TensorSource:
    def pieces() -> Iterator[memoryview]:
        yield as_bytes(value.to(torch_dtype(dtype)))

    return TensorSource(dtype, tuple(value.shape), pieces, is_copy=False)
