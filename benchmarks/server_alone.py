"""How many tokens per second the server passes on, alone: an engine that computes nothing.

PYTHONPATH=. python3 benchmarks/server_alone.py MODEL [--streams 1,32,128] [--round-ms 0,4]
                                                [--logprobs none,0,5] [--chat]

The server runs as it is, with the model's tokenizer; only the engine's step is replaced: every
request gets --per-round tokens of its own at once, turned into text as always, with made-up
log-probabilities that come as a GPU's round gives them where they are asked for. With --round-ms 0
rounds follow each other as fast as they can: what comes through is the most that event loop and
engine thread manage together. With more, the engine's thread sleeps in between, as one does that
waits for a GPU: `event_loop_share` is then what the loop takes of its core at that speed. MODEL
should be small: nothing of it is computed. The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from over_http.client import closed_loop
from over_http.load import CHAT, COMPLETIONS, MODEL, Job
from over_http.summary import summary
from server_process import ServerProcess, serving

_SETTINGS = "HEADSTART_BENCHMARK_ROUNDS"  # for the server's process
_PROMPT_TOKENS, _FIRST, _LAST = 32, 100, 5000  # ids below may be special


def serve_without_computing() -> None:
    """`headstart serve` whose engine gives every request tokens that nothing was computed for."""
    import torch

    from headstart.backends.cuda.launched import LaunchedRound
    from headstart.cli.main import main
    from headstart.engine.loop import Loop
    from headstart.engine.output import Update, emit, update_since
    from headstart.engine.request import origins
    from headstart.engine.verifier import Verdict

    settings = json.loads(os.environ[_SETTINGS])
    seconds, count, width = settings["seconds"], settings["per_round"], settings["width"]

    draw = torch.Generator().manual_seed(0)
    values = -10 * torch.rand(1 << 12, 21, generator=draw)
    ids = torch.randint(_FIRST, _FIRST + width, (1 << 12, 20), generator=draw)

    def step(loop: Loop) -> list[Update]:
        time.sleep(seconds)
        updates, requests = [], list(loop.scheduler.waiting)  # none is ever admitted
        # Tokens of its own: which they are does not matter, that texts differ does.
        starts = [request.arrival * 7 + request.num_output for request in requests]
        made = [[count, *(_FIRST + (at + i) % width for i in range(count))] for at in starts]
        tops = [request.params.logprobs for request in requests]
        rows, told = count * len(requests), any(top is not None for top in tops)
        given = (values[:rows], ids[:rows]) if told else None
        launched = LaunchedRound(tops=tops, emitted=torch.tensor(made), logprobs=given)
        for request, emitted in zip(requests, launched.collect(), strict=True):
            before = request.num_output
            came_from = list(origins(count - 1, count - 1))
            verdict = Verdict(emitted.tokens, came_from, count - 1, count - 1, emitted.logprobs)
            emit(request, verdict)
            updates.append(update_since(request, before))
            if request.finish_reason is not None:
                loop.scheduler.remove(request)
        return updates

    patch.object(Loop, "step", step).start()
    sys.argv = ["headstart", *sys.argv[2:]]
    main()


def jobs(count: int, told: int | None, given: argparse.Namespace) -> list[Job]:
    draw = random.Random(0)
    fields = {
        "model": MODEL, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0, "ignore_eos": True, "max_tokens": given.tokens,
    }  # fmt: skip
    if given.chat:
        message = {"role": "user", "content": "Hello"}
        more = {} if told is None else {"logprobs": True, "top_logprobs": told}
        return [Job(CHAT, {**fields, **more, "messages": [message]}) for _ in range(count)]
    among = range(_FIRST, _FIRST + given.width)
    prompts = [draw.choices(among, k=_PROMPT_TOKENS) for _ in range(count)]
    return [Job(COMPLETIONS, {**fields, "logprobs": told, "prompt": ids}) for ids in prompts]


def measure(
    server: ServerProcess, streams: int, told: int | None, given: argparse.Namespace
) -> dict[str, Any]:
    asked = jobs(given.answers * streams, told, given)
    asyncio.run(closed_loop(server.port, asked[:streams], streams, 60))  # warms up
    loop, used, mine = server.loop_seconds[0], server.processor_seconds, time.process_time()
    began = time.perf_counter()
    answers, last = asyncio.run(closed_loop(server.port, asked, streams, 120))
    seconds = time.perf_counter() - began
    found = summary(answers, streams, last)
    assert not found["failed"], found["error"]
    tokens = found["tokens"]
    return {
        "streams": streams,
        "logprobs": told,
        "tokens_per_second": round(found["tokens_per_second"]),
        "event_loop_us_per_token": round(1e6 * (server.loop_seconds[0] - loop) / tokens, 1),
        "event_loop_share": round((server.loop_seconds[0] - loop) / seconds, 3),
        "server_us_per_token": round(1e6 * (server.processor_seconds - used) / tokens, 1),
        "client_share": round((time.process_time() - mine) / seconds, 3),
        "token_ms_p50": round(1e3 * found["token_seconds"]["p50"], 3),
        "token_ms_p99": round(1e3 * found["token_seconds"]["p99"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", default="1,32,128")
    parser.add_argument("--round-ms", default="0,4", help="between two rounds of the engine")
    parser.add_argument("--per-round", type=int, default=3, help="tokens of a request in a round")
    parser.add_argument("--tokens", type=int, default=300, help="of an answer")
    parser.add_argument("--answers", type=int, default=4, help="of every stream")
    parser.add_argument("--logprobs", default="none", help="alternatives: none, 0, 5, or several")
    parser.add_argument("--chat", action="store_true", help="chats instead of completions")
    given = parser.parse_args()
    vocab = json.loads((given.model / "config.json").read_text())["vocab_size"]
    given.width = min(vocab, _LAST) - _FIRST
    found = []
    for milliseconds in given.round_ms.split(","):
        os.environ[_SETTINGS] = json.dumps({
            "seconds": float(milliseconds) / 1e3, "per_round": given.per_round,
            "width": given.width,
        })  # fmt: skip
        with serving(
            given.model, "--max-queue=4096", "--kv-bytes=16777216", "--device=cpu",
            script=(__file__, "--serve"),
        ) as server:  # fmt: skip
            for streams in map(int, given.streams.split(",")):
                for name in given.logprobs.split(","):
                    told = None if name == "none" else int(name)
                    row = {
                        "round_ms": float(milliseconds),
                        **measure(server, streams, told, given),
                    }
                    print(json.dumps(row), flush=True)
                    found.append(row)
    print(json.dumps({"per_round": given.per_round, "cores": os.cpu_count(), "rows": found}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_without_computing()
    main()
