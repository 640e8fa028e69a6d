"""The other side of `worker.py`: starts an engine's process, sends it jobs, reads its replies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from versus.engines import VLLM_ENVIRONMENT

_SCRIPT = Path(__file__).with_name("worker.py")
_ROOT = Path(__file__).parents[2]
_LOG_TAIL = 3000
_NOISE = ("nanobind:", "- leaked ", "- ... skipped", "See https://nanobind")  # after an error
_numbers = count(1)  # every worker has files of its own: replies of an earlier one are not its


class Failed(Exception):
    """A worker reported an error, or ended."""


class Worker:
    """One engine in its own process; `name` says which, and how it was started."""

    def __init__(self, name: str, settings: dict[str, Any], folder: Path):
        self.name, self.settings = name, settings
        stem = f"{next(_numbers)}-{name}-k{settings['drafts']}"
        self._reply, self._log_path = folder / f"{stem}.jsonl", folder / f"{stem}.log"
        self._reply.write_text("")
        self._num_read = self._num_asked = 0
        self.waited = 0.0  # seconds of its start during which it was paused
        told = {n: v for n, v in settings.items() if n not in ("python", "environment")}
        told["reply"] = str(self._reply)
        environment = {**os.environ, **settings["environment"]}
        if settings["engine"] == "headstart":  # a checkout need not be installed
            path = [str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(path)
        self._began = time.time()
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                [settings["python"], str(_SCRIPT), json.dumps(told)], stdin=subprocess.PIPE,
                stdout=log, stderr=subprocess.STDOUT, text=True, env=environment, cwd=folder,
                start_new_session=True,
            )  # fmt: skip

    def started(self) -> dict[str, Any]:
        """Wait for the first token; times are from the start of the process."""
        ready = self._read(since=self._began)
        made, first = ready.pop("made_at"), ready.pop("ready_at")
        return {
            "start_seconds": first - self._began,
            "until_made_seconds": made - self._began,
            **ready,
        }

    def ask(self, kind: str, **job: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._num_asked += 1
        try:
            line = json.dumps({"kind": kind, "number": self._num_asked, **job})
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._ended()) from None
        return self._read(since=time.time())

    def _read(self, since: float) -> dict[str, Any]:
        patience = self.settings.get("patience")
        while True:
            lines = self._reply.read_text().split("\n")
            if len(lines) - 1 > self._num_read:  # what follows the last newline is incomplete
                self._num_read += 1
                found: dict[str, Any] = json.loads(lines[self._num_read - 1])
                if "error" in found:
                    raise Failed(found["error"])
                # A figure of another job would look as good as the right one.
                assert found.pop("number") == self._num_asked, "a reply to another job"
                return found
            if self._process.poll() is not None:
                raise Failed(self._ended())
            if patience and time.time() - since > patience:
                self.stop()
                raise Failed(f"{self.name} said nothing for {patience:.0f} s:\n{self._log_tail()}")
            time.sleep(0.005)

    @property
    def has_settled(self) -> bool:
        """Whether `started` would return, or raise, at once."""
        return "\n" in self._reply.read_text() or not self.is_running

    @property
    def is_overdue(self) -> bool:
        """Whether its start has taken longer than it may."""
        patience = self.settings.get("patience") or float("inf")
        return time.time() - self._began - self.waited > float(patience)

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def pause(self) -> None:
        """Stop its processes for a while, so that others can be timed."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self.is_running:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _ended(self) -> str:
        self._process.wait()
        return f"{self.name} ended with {self._process.returncode}:\n{self._log_tail()}"

    def _log_tail(self) -> str:
        lines = self.log.splitlines(keepends=True)
        return "".join(own for own in lines if not own.lstrip().startswith(_NOISE))[-_LOG_TAIL:]

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process and what it started; nothing of it is needed but its memory."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # a job that was not read
                self._process.stdin.close()


def settings_of(engine: str, python: str | None, environment: dict[str, str]) -> dict[str, Any]:
    """How an engine's process is started, whatever the engine is told."""
    own = VLLM_ENVIRONMENT if engine == "vllm" else {}
    return {
        "engine": engine,
        "python": os.path.abspath(python) if python else sys.executable,
        "environment": {**own, **environment},
    }
