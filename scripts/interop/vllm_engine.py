"""Our side of `vllm_counters.py`: starts it, sends it jobs, reads what it served."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_SCRIPT = Path(__file__).with_name("vllm_counters.py")
_MAX_SECONDS = 1800  # of a start and six answers, on shared cores
_DTYPES = {"F32": "float32", "BF16": "bfloat16"}


class EngineFailed(Exception):
    """vLLM reported an error, went away, or took too long."""


@dataclass(frozen=True)
class Served:
    """What one run produced; `accepted` counts drafts accepted at depth 1, 2, ... (cumulative)."""

    tokens: list[list[int]]
    drafts: int = 0
    accepted: tuple[int, ...] = ()
    after: Any = None  # what a worker's method returned, for each worker

    @property
    def counters(self) -> tuple[int, ...]:
        return (self.drafts, *self.accepted)

    @property
    def rates(self) -> list[float]:
        """Cumulative acceptance per depth."""
        return [round(accepted / self.drafts, 3) for accepted in self.accepted]


class Engine:
    """One vLLM process, used as a context; its log goes to a file."""

    def __init__(
        self, python: Path, log: Path, work: Path, variables: Mapping[str, str] | None = None
    ):
        self._log_path = log
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [str(python), str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=work,  # not the repository: vLLM must not import what lies there
            env={**os.environ, **(variables or {})},
            text=True,
            bufsize=1,
        )
        self.versions: dict[str, str] = self._answer()

    def serve(
        self,
        model: Path,
        depth: int,
        dtype: str,
        prompts: list[list[int]] | None = None,
        *,
        speculative: Mapping[str, Any] | None = None,
        swapped: Path | None = None,
        after: str | None = None,
        **engine: Any,
    ) -> Served:
        """Greedy tokens with K = `depth` drafts (0: without speculation); the usual prompts, if
        none are given. Further keys are for vLLM's speculative config, and for its LLM; `swapped`
        is a head that takes the place of the one that vLLM started with, `after` a method of its
        workers that is called at the end."""
        assert self._process.stdin is not None
        job = {
            "model": str(model.resolve()),
            "depth": depth,
            "dtype": _DTYPES[dtype],
            "given": prompts,
            "speculative": dict(speculative or {}),
            "engine": engine,
            "swapped": None if swapped is None else str(swapped.resolve()),
            "after": after,
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        answer = self._answer()
        if "error" in answer:
            raise EngineFailed(answer["error"].splitlines()[0])
        return Served(
            answer["tokens"], answer.get("drafts", 0), tuple(answer.get("accepted", ())),
            answer.get("after"),
        )  # fmt: skip

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _MAX_SECONDS)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            why = "exited" if ready else f"did not answer within {_MAX_SECONDS} s"
            raise EngineFailed(f"vLLM {why}; see {self._log_path.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
