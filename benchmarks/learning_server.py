"""A server that learns, as benchmarks ask it: started, asked with K = 3, stopped."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from learning_kinds import Asked

from headstart.learn.certainty import Walked, compare
from headstart.processes import python_command

_AT_ONCE = 16
_HTTP = httpx.Client(timeout=600)


@dataclass
class Answered:
    """One measured answer."""

    kind: str
    prompt: list[int]
    answer: list[int]
    rounds: int
    accepted: int
    finish_reason: str
    text: str


class Server:
    """`headstart serve`, with `--learn` where a folder is given, in a process of its own."""

    def __init__(
        self, model: Path, folder: Path | None, base: Path, log: Path, flags: Sequence[str]
    ):
        self._log = log.open("a", encoding="utf-8")
        learn = [] if folder is None else ["--learn", str(folder), "--learn-base", str(base)]
        command = python_command(
            "headstart", "serve", str(model), "--port", "0", *learn, "--speculate", "3",
            "--max-running-requests", "16", "--max-model-len", "2048", "--no-prefix-caching",
            *flags,
        )  # fmt: skip
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = self._wait()

    def _wait(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._note(line)
            if "ready at " in line:
                threading.Thread(target=self._follow, daemon=True).start()
                return line.split("ready at ")[1].split(",")[0].strip()
        raise SystemExit("the server ended before it was ready")

    def _follow(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._note(line)

    def _note(self, line: str) -> None:
        self._log.write(line)
        self._log.flush()
        if "learning:" in line:
            print(line.rstrip(), flush=True)

    def ask(self, asked: Asked, max_tokens: int, *, is_kept: bool) -> Answered:
        """With three drafts a round where acceptance is counted; to learn from, texts are enough,
        and with many requests at once drafts cost a CPU more than they bring."""
        body = {
            "model": "default", "messages": [{"role": "user", "content": asked.text}],
            "temperature": 0, "max_tokens": max_tokens, "return_token_ids": True,
            "headstart": {"learn": is_kept, "statistics": True, "speculate": 0 if is_kept else 3},
        }  # fmt: skip
        found = _HTTP.post(f"{self.url}/v1/chat/completions", json=body).raise_for_status().json()
        choice, stats = found["choices"][0], found["headstart"]["statistics"]
        return Answered(
            asked.kind, found["prompt_token_ids"], choice["token_ids"], stats["rounds"],
            stats["accepted_tokens"], choice["finish_reason"], choice["message"]["content"],
        )  # fmt: skip

    def ask_all(self, asked: Sequence[Asked], tokens: int, *, is_kept: bool) -> list[Answered]:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda one: self.ask(one, tokens, is_kept=is_kept), asked))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def lengths(answers: Sequence[Answered]) -> dict[str, float]:
    """Acceptance length of each kind, as the server counted."""
    result = {}
    for kind in dict.fromkeys(answer.kind for answer in answers):
        own = [answer for answer in answers if answer.kind == kind]
        rounds = sum(answer.rounds for answer in own)
        result[kind] = 1 + sum(answer.accepted for answer in own) / rounds
    return result


def gains(before: Sequence[Answered], after: Sequence[Answered]) -> dict[str, Any]:
    """Of each kind, with the lowest and highest to expect (90 %), answers being paired."""
    result = {}
    for kind in dict.fromkeys(answer.kind for answer in before):
        parts = [
            [Walked(kind, a.rounds, a.rounds + a.accepted) for a in part if a.kind == kind]
            for part in (before, after)
        ]
        found = compare(*parts)
        rounds = sum(each.rounds for each in parts[0])
        result[kind] = {
            "gain": found.value, "low": found.low, "high": found.high,
            "answers": found.answers, "rounds_before": rounds,
        }  # fmt: skip
    return result


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
