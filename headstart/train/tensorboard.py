"""Curves for TensorBoard, where it is installed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    """Curves of one run; without TensorBoard nothing happens."""

    def __init__(self, folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        """`lines` of metrics that count: they are drawn again, and what came after them is gone."""
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        # Files of an earlier start may hold steps that are done again, which TensorBoard would
        # complain about; one that is running forgets what it has read.
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder), purge_step=0)
        for line in lines:
            self.add(line)

    @property
    def is_there(self) -> bool:
        return self._writer is not None

    def add(self, line: Mapping[str, Any]) -> None:
        """Every number of a line of metrics."""
        if self._writer is not None:
            for tag, number in scalars(line):
                self._writer.add_scalar(tag, number, line["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def scalars(line: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, float]]:
    """Tags and numbers of a line: parts in folders, lists by depth, no spaces.

    {"loss_by_depth": [2.5]} gives loss/depth_1, {"validation": {"rounds": 7}} validation/rounds.
    """
    for name, value in line.items():
        tag = under + re.sub(r"[^\w.-]", "_", name)
        if isinstance(value, Mapping):
            yield from scalars(value, f"{tag}/")
        elif isinstance(value, list):
            for depth, number in enumerate(value, 1):
                yield f"{tag.removesuffix('_by_depth')}/depth_{depth}", number
        elif tag != "step":
            yield tag, value
