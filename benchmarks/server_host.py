"""Where the time of the engine's thread goes in a server under load, step by step.

PYTHONPATH=. python3 benchmarks/server_host.py FILE -- serve MODEL --port 8123 [options of serve]

Runs `headstart serve` in this process with clocks around the parts of a step; load comes from
another process (`benchmarks/gpu_http.py --server ours=8123`). When a file FILE.end appears it is
removed, and what it holds (a name, say) becomes a line of JSON in FILE with, for every part, the
milliseconds of a step by the wall clock and by the thread's own clock and the calls, parts within
parts left out; then all starts anew. What a part has more of the former than of the latter it
waited: for the device in `collect` and `drafted`, for Python's lock elsewhere.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any


class Clocks:
    """Seconds by part, of one thread."""

    def __init__(self) -> None:
        self._open: list[list[float]] = []  # what parts within took: wall, thread
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.calls: dict[str, int] = defaultdict(int)
        self.wall: dict[str, float] = defaultdict(float)
        self.own: dict[str, float] = defaultdict(float)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread().name != "engine":
                return function(*arguments, **named)
            inside = [0.0, 0.0]
            self._open.append(inside)
            wall, own = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                took = time.perf_counter() - wall, time.thread_time() - own
                self._open.pop()
                if self._open:
                    self._open[-1][0] += took[0]
                    self._open[-1][1] += took[1]
                self.calls[name] += 1
                self.wall[name] += took[0] - inside[0]
                self.own[name] += took[1] - inside[1]

        return timed

    def summary(self) -> dict[str, Any]:
        steps = max(1, self.calls["step"])
        rows = sorted(self.wall, key=lambda name: -self.wall[name])
        return {
            "steps": steps,
            "ms_per_step": {
                name: [
                    round(1e3 * self.wall[name] / steps, 3), round(1e3 * self.own[name] / steps, 3),
                    round(self.calls[name] / steps, 2),
                ]
                for name in rows
            },
        }  # fmt: skip


def install(clocks: Clocks) -> None:
    """Put clocks around what a step does; only these names are changed."""
    from headstart.backends.cuda.backend import CudaBackend
    from headstart.backends.cuda.decode_batch import DecodeBatch
    from headstart.backends.cuda.device_rounds import CapturedRounds
    from headstart.backends.cuda.graphs import Graphs
    from headstart.backends.cuda.launched import LaunchedRound
    from headstart.backends.cuda.mask_copies import MaskCopies
    from headstart.backends.cuda.packed import PackedRows
    from headstart.engine import loop, output, round_steps
    from headstart.engine.drafter import Drafter
    from headstart.engine.engine import Engine
    from headstart.engine.round_grammars import RoundGrammars
    from headstart.engine.rounds import Rounds
    from headstart.engine.scheduler import Scheduler
    from headstart.server.channels import Inbox
    from headstart.server.worker import Worker

    parts: dict[Any, dict[str, str]] = {
        Inbox: {"take": "calls"},
        Worker: {"_hand_out": "hand out"},
        Engine: {"step": "step"},
        Scheduler: {"plan": "plan", "register": "register"},
        Rounds: {"_extend": "extend", "advance": "advance", "complete": "complete"},
        CapturedRounds: {
            "launch": "launch", "drafted": "drafted", "choose": "choose", "admit": "admit",
            "remove": "remove", "choose_first": "first tokens", "_run_packed": "packed",
            "_end": "copy out",
        },
        DecodeBatch: {"admit": "admit batch", "extend": "extend batch", "limit": "limit"},
        Graphs: {"run_part": "replay"},
        PackedRows: {"fill": "fill"},
        LaunchedRound: {"collect": "collect"},
        MaskCopies: {"copy": "mask copies"},
        RoundGrammars: {"accept": "accept", "begin": "first masks", "masks": "masks"},
        CudaBackend: {"trunk_pass": "trunk pass", "logits": "logits"},
        Drafter: {"catch_up": "head reads", "feed": "feed", "newest_states": "newest states"},
        loop.Loop: {
            "_commit": "commit", "_decide": "decide", "_retire": "retire",
            "_enter_rounds": "enter",
        },
        round_steps.RoundSteps: {"_take": "take", "_choose_drafts": "choose K"},
        output: {"emit": "emit", "update_since": "update"},
    }  # fmt: skip
    for owner, names in parts.items():
        for attribute, name in names.items():
            setattr(owner, attribute, clocks.around(name, getattr(owner, attribute)))


def write_at_ends(clocks: Clocks, out: Path) -> None:
    """A line whenever the file that asks for one is there."""
    end, began = Path(f"{out}.end"), time.perf_counter()
    while True:
        time.sleep(0.05)
        if not end.exists():
            continue
        line = {"name": end.read_text().strip(), "seconds": round(time.perf_counter() - began, 2)}
        with out.open("a") as file:
            file.write(json.dumps(line | clocks.summary()) + "\n")
        clocks.reset()
        began = time.perf_counter()
        end.unlink()


def main() -> None:
    where, _, *command = sys.argv[1:]
    out, clocks = Path(where), Clocks()
    install(clocks)
    threading.Thread(target=write_at_ends, args=(clocks, out), daemon=True).start()
    from headstart.cli.main import main as run

    sys.argv = ["headstart", *command]
    run()


if __name__ == "__main__":
    main()
