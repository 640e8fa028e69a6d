"""Our server and vLLM's under the same loads over HTTP: one machine, one run, in turns.

PYTHONPATH=. python3 benchmarks/gpu_http.py MODEL --out http.json [--together] [--kinds greedy,json]

MODEL is a calibrated checkpoint (`headstart calibrate`; grammars and tools need its --tokenizer).
Closed loops of 1, 8, 32 and 128 streams ask requests of mixed lengths, kind after kind: greedy;
top_p and temperature (without top-k); frequency and repetition penalties; logprobs (of the chosen
token) and logprobs5; json (a schema); tools (tool_choice required); regex (a grammar that permits
all that the trunk writes); mixture (all of these); prefix (much of the prompt shared); long
(prompts of 24,000 tokens, for --max-len 25000); turns (of a chat); arrivals (at random, --rates per
second). `--kinds greedy,long:1/8` gives a kind streams of its own. Sampled kinds have a low
temperature, so that drafts are accepted as in greedy ones.

Without --together one server is in memory at a time and answers all rows, then the other; with it
both are there and take turns row by row. Tokens per second are those of the stretch in which all
streams are busy. Results are written after every row, as JSON and as a table beside it. --self-test
says what the client itself can take. --server NAME=PORT measures a server that runs already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from over_http.client import closed_loop
from over_http.load import COMPLETIONS, KINDS, Job, Sizes, Workload
from over_http.report import line, markdown, write
from over_http.rows import Limits, Row, first_requests, measured, rows
from over_http.servers import Failed, Server, Settings

_STUB = Path(__file__).parent / "over_http" / "stub.py"


class Bench:
    """One run; `document` is what is written after every row."""

    def __init__(self, given: argparse.Namespace, workload: Workload, folder: Path):
        self._given, self._workload, self._folder = given, workload, folder
        self._began = time.perf_counter()
        self._limits = Limits(given.row_seconds, given.warm, given.repeats, given.requests)
        self._settings = Settings(
            model=given.model.resolve(), drafts=given.drafts, max_requests=given.max_requests,
            max_len=given.max_len, is_together=given.together, kv_gib=given.kv_gib,
            memory=given.memory or (0.45 if given.together else 0.9),
            vllm_python=given.vllm_python, patience=given.patience,
            flags={"ours": shlex.split(given.ours_flags), "vllm": shlex.split(given.vllm_flags)},
        )  # fmt: skip
        self.failures: list[str] = []
        self._rows: dict[Row, dict[str, Any]] = {}
        self.document: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python3", *sys.argv]), "device": device(),
            "checkpoint": checkpoint(given.model), "k": given.drafts,
            "is_together": given.together, "engines": {name: {} for name in given.engines},
            "rows": [], "failures": self.failures,
        }  # fmt: skip

    def run(self, wanted: Sequence[Row]) -> None:
        groups = [self._given.engines] if self._given.together else [
            [name] for name in self._given.engines
        ]  # fmt: skip
        for names in groups:
            servers: list[Server] = []
            try:
                for name in names:
                    servers += self._started(name)
                for row in wanted:
                    self._measure(row, servers)
            finally:
                for server in servers:
                    server.stop()

    def _started(self, name: str) -> list[Server]:
        port = self._given.server.get(name)
        log = self._folder / f"{name}.log"
        if port is not None:
            server = Server(name, port, None, log)
        else:
            server = Server.start(name, self._settings, self._folder)
        own = self.document["engines"][name]
        try:
            server.wait_ready()
            if self._given.first_requests:  # before anything else is asked
                own["first_requests"] = first_requests(server, self._workload)
        except Failed as failure:
            self._fail(str(failure))
            server.stop()
            return []
        own |= {"command": server.command, "start_seconds": server.start_seconds}
        self._say(f"{name} is ready" + (f": {own['first_requests']}" if len(own) > 2 else ""))
        self._write()
        return [server]

    def _measure(self, row: Row, servers: Sequence[Server]) -> None:
        servers = [server for server in servers if server.is_running]
        if not servers:
            return
        late = time.perf_counter() - self._began > self._given.time_limit
        names = ", ".join(server.name for server in servers)
        if late:
            self._fail(f"{row.kind} at {row.load}, {names}: the time limit was over")
            return
        try:
            found = measured(row, servers, self._workload, self._limits)
        except (OSError, TimeoutError) as error:
            self._fail(f"{row.kind} at {row.load}, {names}: {type(error).__name__} {error}")
            return
        entry = self._rows.setdefault(row, {"kind": row.kind, "load": row.load, "engines": {}})
        entry["engines"] |= found
        if entry not in self.document["rows"]:
            self.document["rows"].append(entry)
        for name, figures in found.items():
            if figures["failed"]:
                self._fail(f"{row.kind} at {row.load}, {name}: {figures['error']}")
        self._say(line(entry, self._given.engines, self.document["rows"]))
        self._write()

    def _fail(self, what: str) -> None:
        self.failures.append(what)
        self._say(f"FAILED {what}")
        self._write()

    def _write(self) -> None:
        self.document["elapsed_seconds"] = time.perf_counter() - self._began
        write(self.document, self._given.out)

    def _say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f} s] {text}", flush=True)


def checkpoint(model: Path) -> dict[str, Any]:
    from headstart.checkpoint.provenance import read_provenance

    facts = read_provenance(model)
    return {name: facts[name] for name in ("shape", "rate", "seed", "active")}


def device() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "CPU"


def make_workload(model: Path, sizes: Sizes, temperature: float) -> Workload:
    from tokenizers import Tokenizer

    from headstart.calibrate.calibrated import active_ids
    from headstart.calibrate.given_tokenizer import ANY_TEXT
    from headstart.checkpoint.provenance import read_provenance

    decode: Callable[[list[int]], str] = Tokenizer.from_file(str(model / "tokenizer.json")).decode
    tokens = active_ids(read_provenance(model))
    return Workload(tokens, decode, sizes, temperature=temperature, any_text=ANY_TEXT)


def self_test(streams: int, tokens: int) -> dict[str, float]:
    """Events per second that the client takes from a server that only streams."""
    command = [sys.executable, str(_STUB)]
    jobs = [Job(COMPLETIONS, {"max_tokens": tokens, "prompt": []})] * (4 * streams)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stub:
        try:
            assert stub.stdout is not None
            port = int(stub.stdout.readline())
            used, began = time.process_time(), time.perf_counter()
            answers, _ = asyncio.run(closed_loop(port, jobs, streams, 60))
            used, seconds = time.process_time() - used, time.perf_counter() - began
        finally:
            stub.kill()
    events = sum(answer.tokens for answer in answers)
    assert events == tokens * len(jobs), [a.error for a in answers if a.error][:1]
    return {
        "streams": streams, "events_per_second": events / seconds,
        "client_us_per_event": 1e6 * used / events, "most_events_per_second": events / used,
    }  # fmt: skip


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, nargs="?")
    add("--kinds", default=",".join(KINDS), help="default: %(default)s")
    add("--streams", default="1,8,32,128")
    add("--rates", default="8", help="arrivals per second")
    add("--engines", default="ours,vllm", help="ours and vllm; ours,ours compares with itself")
    add("--server", action="append", default=[], metavar="NAME=PORT", help="one that runs already")
    add("--together", action="store_true", help="both in memory at once")
    add("--drafts", type=int, default=3, metavar="K")
    add("--temperature", type=float, default=0.5, help="of sampled kinds")
    add("--repeats", type=int, default=1, help="of every row; the median is shown")
    add("--requests", type=int, help="of a row; default: by streams")
    add("--warm", type=int, default=4, help="requests before a row that are not counted")
    add("--row-seconds", type=float, default=25, help="after which no request of a row begins")
    add("--time-limit", type=float, default=1e9, help="seconds after which no row begins")
    add("--patience", type=float, default=400, help="seconds that a start may take")
    add("--max-requests", type=int, default=128, help="at once, in each server")
    add("--max-len", type=int, default=8192)
    add("--kv-gib", type=float, default=40, help="K/V memory of ours, with --together")
    add("--memory", type=float, help="of the GPU, for vLLM; default: 0.9, 0.45 with --together")
    for name, value in vars(Sizes()).items():
        add(f"--{name.replace('_', '-')}-tokens", type=int, default=value, dest=name)
    add("--ours-flags", default="", help="more flags of our server, in one string")
    add("--vllm-flags", default="")
    add("--vllm-python", help="interpreter of vLLM's environment")
    add("--first-requests", action="store_true", help="first tokens right after a start")
    add("--self-test", action="store_true", help="what the client itself can take")
    add("--work", type=Path, help="folder for logs; default: a temporary one")
    add("--out", type=Path, help="JSON; a table is written beside it")
    given = parser.parse_args()
    if given.model is None and not given.self_test:
        parser.error("give a MODEL, or --self-test")
    kinds = [kind for kind in given.kinds.split(",") if kind]
    if unknown := {kind.partition(":")[0] for kind in kinds} - set(KINDS):
        parser.error(f"--kinds: {', '.join(unknown)} is unknown; known are {', '.join(KINDS)}")
    streams = [int(number) for number in given.streams.split(",")]
    given.rows = rows(kinds, streams, [float(rate) for rate in given.rates.split(",")])
    given.engines = unique_names(given.engines.split(","))
    if unknown := {name.partition("-")[0] for name in given.engines} - {"ours", "vllm"}:
        parser.error(f"--engines: {', '.join(unknown)} is unknown; known are ours and vllm")
    given.server = {name: int(port) for name, _, port in (s.partition("=") for s in given.server)}
    return given


def unique_names(names: Sequence[str]) -> list[str]:
    """The second `ours` is `ours-2`."""
    return [
        name if name not in names[:i] else f"{name}-{names[: i + 1].count(name)}"
        for i, name in enumerate(names)
    ]


def main() -> int:
    given = options()
    if given.self_test:
        for streams in (1, 32, 128):
            print(json.dumps(self_test(streams, 400)), flush=True)
        if given.model is None:
            return 0
    sizes = Sizes(**{name: getattr(given, name) for name in vars(Sizes())})
    work = given.work or Path(tempfile.mkdtemp(prefix="http-"))
    work.mkdir(parents=True, exist_ok=True)
    print(f"logs of the servers: {work}")
    bench = Bench(given, make_workload(given.model, sizes, given.temperature), work.resolve())
    bench.run(given.rows)
    print("\n" + markdown(bench.document))
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
