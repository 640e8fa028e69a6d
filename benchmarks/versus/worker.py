"""A process with one engine: reads jobs from stdin, appends what they took to its reply file.

Started by `process.py` with one JSON argument. Standard output belongs to the engine's own log.
Every token is checked against the cycle that the calibrated trunk walks, outside of the timing.
"""

from __future__ import annotations

import ctypes
import json
import platform
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from versus.engines import DRIVERS, Driver, Vllm
from versus.gaps import Arrivals

_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
_SETTLED, _QUIET = 32, 96  # tokens after which decoding is steady, and until which it is timed


class Wrong(Exception):
    """The engine's text is not the one that the trunk must write."""


class Desk:
    """Answers jobs with one engine."""

    def __init__(self, driver: Driver, settings: dict[str, Any]):
        self.driver, self._settings = driver, settings
        self._following: list[int] = json.loads(Path(settings["cycle"]).read_text())
        self._num_asked = 0

    def do(self, job: dict[str, Any]) -> dict[str, Any]:
        jobs = {
            "answer": self._answer, "first": self._first, "long": self._long, "swap": self._swap,
            "call": self._call,
        }  # fmt: skip
        return jobs[job["kind"]](job, random.Random(job.get("seed", 0)))

    def _prompt(self, draw: random.Random, length: int) -> list[int]:
        return draw.choices(range(2, self._settings["active"] + 2), k=length)

    def _answer(self, job: dict[str, Any], draw: random.Random) -> dict[str, Any]:
        """Seconds to answer all prompts, which come at once."""
        prompts = [self._prompt(draw, job["prompt"]) for _ in range(job["requests"])]
        began = time.perf_counter()
        texts, acceptance = self.driver.answer(prompts, job["tokens"], is_off=job["is_off"])
        seconds = time.perf_counter() - began
        for prompt, text in zip(prompts, texts, strict=True):
            self._check(prompt, text)
            if len(text) != job["tokens"]:
                raise Wrong(f"an answer has {len(text)} tokens; {job['tokens']} were asked for")
        return {"seconds": seconds, "acceptance": acceptance}

    def _first(self, job: dict[str, Any], draw: random.Random) -> dict[str, Any]:
        """Seconds to the first token of one prompt at an idle engine, and tokens per step."""
        prompt = self._prompt(draw, job["prompt"])
        seen = Arrivals()
        name = self._add(prompt, job["tokens"])
        while seen.count(name) < job["tokens"]:
            seen.note(self.driver.step())
        self.driver.abort([name])
        self._check(prompt, seen.tokens(name))
        chunks = seen.chunks[name]
        steps = [len(tokens) for _, tokens in chunks[1:-1]] or [len(chunks[-1][1])]
        return {
            "first_token_seconds": chunks[0][0] - seen.began,
            "tokens_per_step": sum(steps) / len(steps),
        }

    def _long(self, job: dict[str, Any], draw: random.Random) -> dict[str, Any]:
        """Gaps of requests that decode while a long prompt is read."""
        room = self._settings["max_model_len"] - job["prompt"] - 8
        prompts = {}
        seen = Arrivals()
        for _ in range(job["decoding"]):
            prompt = self._prompt(draw, job["prompt"])
            prompts[self._add(prompt, room)] = prompt
        decoding = list(prompts)
        settled = seen.began
        while any(seen.count(name) < _QUIET for name in decoding):
            seen.note(self.driver.step())
            if settled == seen.began and all(seen.count(n) >= _SETTLED for n in decoding):
                settled = seen.last
        prompt = self._prompt(draw, job["long"])
        arrived = time.perf_counter()
        long = self._add(prompt, 8)
        prompts[long] = prompt
        while not seen.count(long):
            seen.note(self.driver.step())
        first = seen.last
        while any(seen.chunks[name][-1][0] < first for name in decoding):
            seen.note(self.driver.step())
        self.driver.abort(list(prompts))
        for name, prompt in prompts.items():
            self._check(prompt, seen.tokens(name))
        return {
            "long_first_token_seconds": first - arrived,
            "quiet": seen.gaps(decoding, settled, arrived),
            "during": seen.gaps(decoding, arrived, first),
        }

    def _call(self, job: dict[str, Any], draw: random.Random) -> dict[str, Any]:
        """A method of vLLM's workers."""
        return {"found": self._workers().call(job["method"])}

    def _workers(self) -> Vllm:
        assert isinstance(self.driver, Vllm), "only vLLM has workers to call"
        return self.driver

    def _swap(self, job: dict[str, Any], draw: random.Random) -> dict[str, Any]:
        """Another head while requests decode, read beforehand: gaps, and tokens of a round."""
        call = self._workers().call
        prompts = {}
        seen = Arrivals()
        for _ in range(job["requests"]):
            prompt = self._prompt(draw, job["prompt"])
            prompts[self._add(prompt, job["tokens"])] = prompt
        names = list(prompts)

        def run(until: int) -> tuple[float, float]:
            """Steps until every answer has so many tokens, or as many as were asked for."""
            began = time.perf_counter()
            while any(seen.count(name) < min(until, job["tokens"]) for name in names):
                seen.note(self.driver.step())
            return began, time.perf_counter()

        run(_SETTLED)
        third = job["tokens"] // 3
        before = run(third)
        prepared = time.perf_counter()
        call("headstart_prepare", job["head"])
        while not all(one["is"] for one in call("headstart_is_prepared", job["head"])):
            seen.note(self.driver.step())
        swapped = time.perf_counter()
        said = call("headstart_swap", job["head"])
        done = time.perf_counter()
        after = run(max(seen.count(name) for name in names) + third)
        run(job["tokens"])
        self.driver.abort(names)
        for name, prompt in prompts.items():
            self._check(prompt, seen.tokens(name))
        return {
            "said": said, "swap_seconds": done - swapped, "prepare_seconds": swapped - prepared,
            "quiet": seen.gaps(names, *before), "preparing": seen.gaps(names, prepared, swapped),
            "during": seen.gaps(names, swapped, after[1]),
            "after": seen.gaps(names, done, after[1]),
        }  # fmt: skip

    def _add(self, prompt: list[int], tokens: int) -> str:
        self._num_asked += 1
        name = f"asked-{self._num_asked}"
        self.driver.add(name, prompt, tokens)
        return name

    def _check(self, prompt: list[int], text: list[int]) -> None:
        token = prompt[-1]
        for place, chosen in enumerate(text):
            token = self._following[token]
            if chosen != token:
                raise Wrong(f"token {place} of an answer is {chosen}; the cycle says {token}")


def main() -> None:
    # An engine that outlives a benchmark that was killed would keep the GPU's memory.
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    settings = json.loads(sys.argv[1])
    reply = Path(settings["reply"])

    def tell(found: dict[str, Any]) -> None:
        with reply.open("a") as file:
            file.write(json.dumps(found) + "\n")

    driver: Driver = DRIVERS[settings["engine"]](settings)
    made = time.time()
    driver.answer([[2, 3, 4]], 1, is_off=False)
    ready = {"made_at": made, "ready_at": time.time()}
    tell({"number": 0, **ready, **_machine(), **driver.facts()})
    desk = Desk(driver, settings)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            tell({"number": job["number"], **desk.do(job)})
        except Exception as error:
            traceback.print_exc()
            tell({"error": f"{type(error).__name__}: {error}"})
            if not isinstance(error, Wrong):
                raise  # the engine may be in any state


def _machine() -> dict[str, Any]:
    import torch

    has_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if has_gpu else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
