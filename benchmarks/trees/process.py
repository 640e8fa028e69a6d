"""The other side of `worker.py`: work trees, their processes, jobs sent and replies read."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("worker.py")
_LOG_TAIL = 3000
_numbers = count(1)  # every worker has a log of its own


class Failed(Exception):
    """A process of one work tree reported an error, ended, or took too long."""


@dataclass(frozen=True)
class Tree:
    """One version of the package: `name` is old or new."""

    name: str
    path: Path
    work: Path  # logs, and what was compiled

    @property
    def environment(self) -> dict[str, str]:
        """Compiled code of the two trees lies apart: neither finds what the other left.

        Nothing is written into the tree. Threads that wait spin as briefly as they do under
        `headstart`'s command line, or the idle process of one tree would slow the other's.
        """
        compiled = self.work / f"compiled-{self.name}"
        path = [str(self.path), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONPYCACHEPREFIX": str(compiled / "python"),
            "TRITON_CACHE_DIR": str(compiled / "triton"),
            "NUMBA_CACHE_DIR": str(compiled / "numba"), "GOMP_SPINCOUNT": "1000",
        }  # fmt: skip
        return {**os.environ, **own}

    def facts(self) -> dict[str, str]:
        """Which version this is: its commit where git knows it, and a digest of its source."""
        state = hashlib.sha256()
        for path in sorted((self.path / "headstart").rglob("*.py")):
            state.update(f"{path.relative_to(self.path)}\n".encode() + path.read_bytes())
        facts = {"folder": self.path.name, "source_sha256": state.hexdigest()}
        with suppress(OSError):
            shown = subprocess.run(
                ["git", "-C", str(self.path), "rev-parse", "--show-toplevel", "HEAD"],
                capture_output=True, text=True,
            )  # fmt: skip
            top, *rest = shown.stdout.split() or [""]
            changed = subprocess.run(
                ["git", "-C", str(self.path), "status", "--porcelain", "headstart"],
                capture_output=True, text=True,
            ).stdout  # fmt: skip
            # Neither the repository around a copy of the files, nor files that were changed since.
            if top == str(self.path) and not changed:
                facts["commit"] = rest[0]
        return facts


class Worker:
    """One engine of one tree, alive until it is stopped."""

    def __init__(self, tree: Tree, settings: dict[str, Any], patience: float):
        self.tree, self._patience = tree, patience
        number = next(_numbers)
        self._log = tree.work / f"{number}-{tree.name}-k{settings['drafts']}.log"
        told = {**settings, "tree": str(tree.path), "since": time.time()}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(_SCRIPT), json.dumps(told)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True, env=tree.environment,
                cwd=tree.work, start_new_session=True,
            )  # fmt: skip
        try:
            self.facts = self._read()
        except BaseException:
            self.stop()
            raise

    def answer(self, prompts: list[Any], tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the end of its log says why
            self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with killed_after(self._process, self._patience) as timer:
            line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            code = self._process.returncode
            why = f"said nothing for {self._patience:.0f} s" if timer.fired else f"ended ({code})"
            log = self._log.read_text(errors="replace")[-_LOG_TAIL:]
            raise Failed(f"{self.tree.name} {why}:\n{log}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise Failed(f"{self.tree.name}: {found['error']}")
        return found

    def stop(self) -> None:
        end(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class _Timer:
    fired = False


@contextmanager
def killed_after(process: subprocess.Popen[str], seconds: float) -> Iterator[_Timer]:
    """End the process if the block takes longer; the object says whether that happened."""
    timer = _Timer()

    def fire() -> None:
        timer.fired = True
        end(process)

    clock = threading.Timer(seconds, fire)
    clock.start()
    try:
        yield timer
    finally:
        clock.cancel()


def end(process: subprocess.Popen[str]) -> None:
    """The process and what it started; nothing of it is needed but its memory."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_program(tree: Tree, program: str, arguments: list[str], patience: float) -> dict[str, Any]:
    """The tree's own copy of a benchmark; its last line is one JSON document."""
    log = tree.work / f"{next(_numbers)}-{tree.name}-{Path(program).stem}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(tree.path / program), *arguments], stdout=subprocess.PIPE,
            stderr=errors, text=True, env=tree.environment, cwd=tree.work, start_new_session=True,
        )  # fmt: skip
        with killed_after(process, patience):
            said, _ = process.communicate()
    if process.returncode != 0:
        tail = log.read_text(errors="replace")[-_LOG_TAIL:]
        raise Failed(f"{tree.name}: {program} ended ({process.returncode}):\n{tail}")
    document: dict[str, Any] = json.loads(said.splitlines()[-1])
    return document
