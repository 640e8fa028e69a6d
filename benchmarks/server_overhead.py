"""What HTTP costs: throughput through the server against offline, and server work per token.

python benchmarks/server_overhead.py MODEL [--requests 32] [--tokens 64] [--repeats 5]
                                     [--speculate 3] [--threads 1]

A server process and an engine in this process, both with the same model and options, answer the
same prompts in turn, so that a busy moment of the machine hits both. Throughput is all tokens of
all requests by the time from the first request to the last token. Server work is processor time
of the event loop's thread, and of what the engine's thread does for the server between two steps.
server_alone.py says how many tokens per second the server passes on where no engine limits it.
The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from server_process import DONE, ServerProcess, asked, get, serving

_PROMPT_TOKENS = 32
_REPORT = "server work in the engine's thread: "


def serve_counted() -> None:
    """`headstart serve` that counts what the engine's thread does outside of the engine."""
    from headstart.cli.main import main
    from headstart.server.metrics.exposition import MetricsPage
    from headstart.server.recording import ServerMetrics
    from headstart.server.worker import Worker

    spent = 0.0

    def counted(kind: type, name: str) -> None:
        inner = getattr(kind, name)

        def outer(*args: Any, **options: Any) -> Any:
            nonlocal spent
            started = time.thread_time()
            try:
                return inner(*args, **options)
            finally:
                spent += time.thread_time() - started

        setattr(kind, name, outer)

    counted(Worker, "_hand_out")
    counted(ServerMetrics, "observe_step")
    # Seen by the other side without a route of its own: /metrics of this program has one more line.
    render = MetricsPage.render

    def reporting(page: MetricsPage) -> tuple[bytes, str]:
        text, kind = render(page)
        return text + f"# {_REPORT}{spent}\n".encode(), kind

    patch.object(MetricsPage, "render", reporting).start()
    sys.argv = ["headstart", *sys.argv[2:]]
    main()


@dataclass(frozen=True)
class Turn:
    """One batch: how long it took, and processor seconds of various kinds."""

    seconds: float
    used: list[float]


def prompts(count: int, vocab: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(100, vocab) for _ in range(_PROMPT_TOKENS)] for _ in range(count)]


def through_http(port: int, given: list[list[int]], tokens: int) -> None:
    """Ask all at once; every answer is counted and must be complete."""

    async def one(prompt: list[int]) -> None:
        fields = {
            "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with asked(port, fields) as answer:
            parts = [part async for part in answer.parts()]
        last = b"".join(parts[-2:]).split(b"data: ")
        assert answer.status == 200 and parts[-1].rstrip().endswith(DONE), parts[-1]
        assert json.loads(last[-2])["usage"]["completion_tokens"] == tokens

    async def all_of_them() -> None:
        await asyncio.gather(*map(one, given))

    asyncio.run(all_of_them())


def between_steps(server: ServerProcess) -> float:
    text = asyncio.run(get(server.port, "/metrics")).decode()
    return float(text.rsplit(_REPORT, 1)[1])


def measure(given: argparse.Namespace) -> dict[str, Any]:
    from headstart.cli.spinning import limit_spinning

    limit_spinning()
    from headstart.engine.engine import Engine
    from headstart.sampling.params import SamplingParams

    settings = {
        "speculate": given.speculate, "threads": given.threads, "kv_bytes": 1 << 28,
        "max_model_len": 1024,
    }  # fmt: skip
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    engine = Engine(given.model, **settings, prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)
    vocab = min(engine.model.config.vocab, 8000)
    offline, online, loads = list[Turn](), list[Turn](), list[float]()
    with serving(
        given.model, *flags, "--no-prefix-caching", script=(__file__, "--serve")
    ) as server:
        for repeat in range(-1, given.repeats):  # the first one warms up
            batch = prompts(given.requests, vocab, repeat)
            alone = timed(partial(engine.generate, batch, params), lambda: (time.process_time(),))
            served = timed(
                partial(through_http, server.port, batch, given.tokens),
                lambda: (server.processor_seconds, *server.loop_seconds, between_steps(server)),
            )
            if repeat >= 0:
                offline.append(alone)
                online.append(served)
                loads.append(round(os.getloadavg()[0], 1))
    return report(given, offline, online) | {"load_average": loads}


def timed(work: Callable[[], Any], read: Callable[[], tuple[float, ...]]) -> Turn:
    before, started = read(), time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    return Turn(seconds, [b - a for a, b in zip(before, read(), strict=True)])


def report(given: argparse.Namespace, offline: list[Turn], online: list[Turn]) -> dict[str, Any]:
    tokens: int = given.requests * given.tokens
    ratios = [alone.seconds / served.seconds for alone, served in zip(offline, online, strict=True)]

    def each(turns: list[Turn], number: int) -> float:
        """Microseconds of processor time per token."""
        return 1e6 * statistics.fmean(turn.used[number] for turn in turns) / tokens

    def speed(turns: list[Turn]) -> float:
        return round(tokens / statistics.median(turn.seconds for turn in turns), 1)

    return {
        "requests": given.requests, "tokens_each": given.tokens, "repeats": given.repeats,
        "speculate": given.speculate, "threads": given.threads,
        "offline_tokens_per_second": speed(offline),
        "http_tokens_per_second": speed(online),
        "http_of_offline": [round(ratio, 3) for ratio in ratios],
        "http_of_offline_median": round(statistics.median(ratios), 3),
        "processor_us_per_token": {
            "offline": round(each(offline, 0)), "server": round(each(online, 0)),
            "event_loop": round(each(online, 1), 1), "between_steps": round(each(online, 3), 1),
        },
        "server_work_share": round((each(online, 1) + each(online, 3)) / each(online, 0), 4),
        "loop_waited_for_a_processor_us_per_token": round(each(online, 2), 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--speculate", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_counted()
    main()
