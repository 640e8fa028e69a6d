"""vLLM's kernels for FP8 in blocks, compiled by a process of their own while engines start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from versus.process import settings_of


class VllmCompiling:
    """`vllm_kernels.py` for the checkpoints among `models` whose weights are FP8 in blocks."""

    def __init__(
        self, models: list[Path], log: Path, python: str | None, environment: dict[str, str]
    ):
        folders = sorted({str(folder) for folder in models if folder.name.endswith("fp8-block")})
        program = Path(__file__).with_name("vllm_kernels.py")
        own = settings_of("vllm", None, environment)["environment"]
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [python or sys.executable, str(program), *folders], stdout=file,
                stderr=subprocess.STDOUT, env={**os.environ, **own}, start_new_session=True,
            )  # fmt: skip

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def lines(self) -> list[str]:
        """What it said so far."""
        return self._log.read_text(errors="replace").splitlines()

    def stop(self) -> None:
        if self.is_running:
            os.killpg(self._process.pid, signal.SIGKILL)
