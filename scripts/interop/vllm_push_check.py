"""`headstart push` into the real vLLM's server on the CPU, between answers and while it answers.

vLLM starts with the control's head (the fusion's halves swapped) and our worker extension, answers
the usual prompts, is given the right head over HTTP, and answers them again: the text must stay,
the counters must become our engine's. Then the control's head is pushed while the prompts are being
answered: the text must stay once more, and the counters must leave our engine's. Another family's
head must be refused in one line, as must any head by a server without the extension and by one
whose head is quantised; each must go on as before.

Prints a table, writes JSON with --json, exits 1 on any failure.
"""

from __future__ import annotations

import json
import shutil
import sys
import urllib.request
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import vllm_counters as workload
from checking import interop_parser
from checkpoints import CommandFailed, headstart, swap_fusion_halves, with_changed_head
from engine_check import FAMILIES, make_model
from plugin_runs import Result, check_each, ours, vocab_size, with_plugin
from vllm_engine import Engine as Vllm
from vllm_engine import Served
from vllm_server import vllm_server

from headstart.bench.metrics_scrape import Counters, read_counters, speculation_between
from headstart.calibrate.folder import write_made
from headstart.calibrate.tiny import write_tiny
from headstart.checkpoint.reader import Checkpoint
from headstart.heads.quantized_copy import quantized_copy
from headstart.vllm_plugin.swap import EXTENSION

DEPTH = 3
_SECONDS = 300
_FOREIGN = "glm4_moe"  # a family that the server's draft is not of
_WEIGHTS = "fp8-row"  # vLLM's CPU build runs heads in this format, too


def answers(url: str, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of all prompts, asked for in one request."""
    asked = {
        "model": "tiny", "prompt": prompts, "max_tokens": workload.NUM_TOKENS, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        choices = json.load(answer)["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda one: one["index"])]


class Asked:
    """One server; every call gives what it served since the last one."""

    def __init__(self, url: str, prompts: list[list[int]]):
        self._url, self._prompts = url, prompts
        self._before = self._counters()

    def __call__(self) -> Served:
        tokens = answers(self._url, self._prompts)
        before, self._before = self._before, self._counters()
        found = speculation_between(before, self._before)
        if found is None or found.rounds is None:
            raise CommandFailed("vLLM counted no drafts")
        return Served(tokens, found.rounds, found.accepted_per_depth)

    def _counters(self) -> Counters:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=_SECONDS) as answer:
            return read_counters(answer.read().decode())


def push(head: Path, url: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(headstart("push", head, "--server", url, "--json"))
    return said


def expect_refused(result: Result, head: Path, url: str, words: str) -> None:
    try:
        push(head, url)
    except CommandFailed as refused:
        result.expect(words in str(refused), f"it is refused by {refused}")
    else:
        result.expect(False, f"the head of {head.name} was taken")


def quantized(model: Path, out: Path) -> Path:
    """The same model with its projections in eight bits, those of the head among them."""
    opened = Checkpoint.open(model)
    sources = {name: opened.source(name) for name in opened.tensors}
    write_made(*quantized_copy(opened.config.raw, sources, _WEIGHTS), out, facts={})
    for file in model.glob("*.py"):
        shutil.copy(file, out)
    return out


def check(
    family: str,
    python: Path,
    site: Path,
    work: Path,
    versions: dict[str, str],
    _: Namespace,
) -> Result:
    result = Result(family, FAMILIES[family]["dtype"])
    model = make_model(family, work / "model")
    other = with_changed_head(model, work / "other", swap_fusion_halves)
    prompts = workload.prompts(vocab_size(model))
    foreign = write_tiny(_FOREIGN, work / _FOREIGN, dtype="F32")
    small = quantized(model, work / "quantized")
    own, rounded = ours(model, DEPTH), ours(small, DEPTH)
    with Vllm(python, work / "versions.log", work) as vllm:
        versions.update(vllm.versions)
    variables = {**with_plugin(site), "VLLM_SERVER_DEV_MODE": "1"}
    words = ("--worker-extension-cls", EXTENSION)
    with vllm_server(python, other, DEPTH, work, words=words, variables=variables) as url:
        ask = Asked(url, prompts)
        result.add("control: as it starts", DEPTH, ask(), own.tokens, like=own, is_control=True)
        said = push(model, url)
        result.expect(said["head_version"] == 1, f"push says {said}")
        result.add("pushed", DEPTH, ask(), own.tokens, like=own)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask)
            said = push(other, url)
            result.expect(said["head_version"] == 2, f"push says {said}")
            found = running.result()
        result.expect(found.tokens == own.tokens, "the text changed while a head was pushed")
        result.add("control: pushed back", DEPTH, ask(), own.tokens, like=own, is_control=True)
        push(model, url)
        expect_refused(result, foreign, url, f"the head is a {_FOREIGN} head, and vLLM drafts")
        result.add("another family's: refused", DEPTH, ask(), own.tokens, like=own)
    with vllm_server(python, model, DEPTH, work, variables=with_plugin(site)) as url:
        ask = Asked(url, prompts)
        expect_refused(result, other, url, "--worker-extension-cls")
        result.add("no extension: refused", DEPTH, ask(), own.tokens, like=own)
    with vllm_server(python, small, DEPTH, work, words=words, variables=variables) as url:
        ask = Asked(url, prompts)
        before = ask()
        result.expect(before.accepted[0] > 0, "no draft of the quantised head was accepted")
        print(f"{family:17} quantised: ours {rounded.counters}, vLLM {before.counters}", flush=True)
        expect_refused(result, model, url, "vLLM runs its head quantised")
        result.add("quantised: refused", DEPTH, ask(), before.tokens, like=before)
    return result


def main() -> int:
    return check_each(interop_parser(__doc__, FAMILIES), ["mimo"], check, folder="push")


if __name__ == "__main__":
    sys.exit(main())
