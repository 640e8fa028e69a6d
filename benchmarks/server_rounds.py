"""Rounds of a server under load, on a device that is a clock: how much longer they take than it.

PYTHONPATH=. python3 benchmarks/server_rounds.py MODEL [--loads greedy:32,regex:32,logprobs:128]
    [--device-ms 32=12.4,128=31.3] [--seconds 4]

MODEL is a small calibrated checkpoint with a tokenizer (`headstart calibrate --tokenizer demo`).
The server runs as it is, with the engine's part of device rounds, masks, texts and counters; only
the device is a clock (`host_rounds.py` has the rest of it): a tenth of a round drafts, the choice
takes a twentieth and waits for masks. A step takes as long as the device does where the host is
hidden behind it. `engine_ms` and `loop_ms` are what the engine's thread and the event loop take of
a processor in a step, `engine_waits` how often the former waited, for Python's lock among others.
All streams begin together, and what is measured lies within their answers. The last line is one
JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from over_http.client import closed_loop
from over_http.load import COMPLETIONS, MODEL, SCHEMA, Job
from server_process import ServerProcess, get, serving

_SETTINGS = "HEADSTART_BENCHMARK_ROUNDS"  # for the server's process
_PER_ROUND = 4  # tokens of a request, where all drafts are right
_WARM_SECONDS = 2.0
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": 0},
    "logprobs5": {"logprobs": 5},
    "regex": {"structured_outputs": {"regex": r"(.|\n)*"}},
    "json_any": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "list", "schema": SCHEMA, "strict": True},
        }
    },
}


def serve_on_a_clock() -> None:
    """`headstart serve` whose rounds are those of a clock."""
    import torch
    from host_rounds import DRAFTS, QuickRounds, text_for

    from headstart.backends.base import Emitted, Launched, RoundMasks, TrunkRows
    from headstart.backends.cuda.launched import LaunchedRound
    from headstart.cli.main import main
    from headstart.engine import core
    from headstart.engine.engine import Engine
    from headstart.engine.rounds import Rounds

    settings = json.loads(os.environ[_SETTINGS])
    kind, seconds = settings["kind"], settings["seconds"]

    def wait(until: float) -> None:
        if (left := until - time.perf_counter()) > 0:
            time.sleep(left)

    @dataclass
    class Timed(LaunchedRound):
        ends: float = 0.0

        def collect(self) -> list[Emitted]:
            wait(self.ends)
            return super().collect()

    class ClockRounds(QuickRounds):
        """A device that works on one thing after another."""

        launched = Timed
        free = drafted_at = 0.0  # when it is done with what it has

        def launch(self, drafts: Sequence[int], rows: Sequence[TrunkRows] = ()) -> Launched:
            self.drafted_at = max(time.perf_counter(), self.free) + 0.1 * seconds
            self.free = self.drafted_at + 0.85 * seconds
            return super().launch(drafts, rows)

        def is_drafting(self) -> bool:
            return self._waiting is not None and time.perf_counter() < self.drafted_at

        def drafted(self) -> list[list[int]] | None:
            if self._waiting is not None:
                wait(self.drafted_at)
            return super().drafted()

        def choose(self, masks: RoundMasks) -> None:
            self.free = max(self.free, time.perf_counter())
            super().choose(masks)

        def _end(self) -> None:
            self.free += 0.05 * seconds
            assert self._waiting is not None
            self._waiting[0].ends = self.free  # type: ignore[attr-defined]
            super()._end()

    made = Engine.__init__

    def make(engine: Engine, *arguments: Any, **options: Any) -> None:
        made(engine, *arguments, **options)
        device = ClockRounds(
            settings["streams"], engine.model.config.vocab, text_for(engine, kind),
            is_any=kind.endswith("_any"),
        )  # fmt: skip
        engine.loop.rounds = Rounds(device, engine.pool)
        core._keep_pauses_short(engine.loop)  # as on a GPU

    assert DRAFTS + 1 == _PER_ROUND
    Engine.__init__ = make  # type: ignore[method-assign, assignment]
    torch.set_num_threads(1)
    sys.argv = ["headstart", *sys.argv[2:]]
    main()


@dataclass
class Reading:
    """What a server has done so far."""

    at: float
    steps: float
    loop: float
    threads: dict[str, tuple[float, int]]  # of a processor, and how often each waited

    @classmethod
    async def of(cls, server: ServerProcess) -> Reading:
        page = (await get(server.port, "/metrics")).decode()
        steps = re.search(r"step_duration_seconds_count(?:{.*})? (\S+)", page)
        assert steps is not None
        threads = {}
        for task in Path(f"/proc/{server.process.pid}/task").iterdir():
            ran = int((task / "schedstat").read_text().split()[0]) / 1e9
            status = (task / "status").read_text()
            waited = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.M)
            threads[task.name] = ran, int(waited[1]) if waited else 0
        return cls(time.perf_counter(), float(steps[1]), server.loop_seconds[0], threads)


async def measure(server: ServerProcess, kind: str, streams: int, given: argparse.Namespace,
                  device: float) -> dict[str, Any]:  # fmt: skip
    rounds = int((given.seconds + 2 * _WARM_SECONDS) / device)
    fields = {
        "model": MODEL, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0, "ignore_eos": True, "max_tokens": _PER_ROUND * rounds, **FIELDS[kind],
    }  # fmt: skip
    draw = random.Random(0)
    jobs = [
        Job(COMPLETIONS, {**fields, "prompt": [draw.randrange(1000, 9000)]}) for _ in range(streams)
    ]
    load = asyncio.create_task(closed_loop(server.port, jobs, streams, 60))
    await asyncio.sleep(_WARM_SECONDS)
    before = await Reading.of(server)
    await asyncio.sleep(given.seconds)
    after = await Reading.of(server)
    answers, _ = await load
    assert not any(answer.error for answer in answers), answers[0].error
    steps = after.steps - before.steps
    took = {
        name: (ran - before.threads[name][0], waits - before.threads[name][1])
        for name, (ran, waits) in after.threads.items()
        if name in before.threads and name != str(server.process.pid)
    }
    engine, waits = max(took.values())
    step = (after.at - before.at) / steps
    return {
        "kind": kind,
        "streams": streams,
        "device_ms": round(1e3 * device, 2),
        "step_ms": round(1e3 * step, 2),
        "of_device": round(step / device, 3),
        "engine_ms": round(1e3 * engine / steps, 3),
        "loop_ms": round(1e3 * (after.loop - before.loop) / steps, 3),
        "engine_waits": round(waits / steps, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--loads", default="greedy:32,regex:32,greedy:128,logprobs:128")
    parser.add_argument("--device-ms", default="8=6.8,32=12.4,128=31.3", help="by streams")
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    times = dict(pair.split("=") for pair in given.device_ms.split(","))
    found = []
    for load in given.loads.split(","):
        kind, streams = load.split(":")
        seconds = float(times[streams]) / 1e3
        os.environ[_SETTINGS] = json.dumps(
            {"kind": kind, "streams": int(streams), "seconds": seconds}
        )
        with serving(
            given.model, "--max-queue=4096", "--kv-bytes=1000000000", "--device=cpu",
            "--speculate=0", f"--max-running-requests={streams}",
            script=(__file__, "--serve"),
        ) as server:  # fmt: skip
            found.append(asyncio.run(measure(server, kind, int(streams), given, seconds)))
        print(json.dumps(found[-1]), flush=True)
    print(json.dumps({"cores": os.cpu_count(), "rows": found}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_on_a_clock()
    else:
        main()
