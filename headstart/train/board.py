"""TensorBoard, where it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Board:
    """Curves of one run; without TensorBoard nothing happens."""

    def __init__(self, folder: Path, step: int) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        # What a stopped run drew after its last checkpoint is drawn again.
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    @property
    def is_there(self) -> bool:
        return self._writer is not None

    def add(self, line: Mapping[str, Any]) -> None:
        """Every number of a line of metrics; lists by depth."""
        if self._writer is None:
            return
        for name, value in line.items():
            if isinstance(value, list):
                for depth, number in enumerate(value, 1):
                    self._writer.add_scalar(f"{name}/depth {depth}", number, line["step"])
            elif isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
