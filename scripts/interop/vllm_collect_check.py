"""What our worker collects in the real vLLM on the CPU: text and target states as ours are.

vLLM serves a tiny model with drafts from half of the tokens while our worker collects, and, once
more, with a head whose fusion has its halves swapped, which is replaced before the prompts. Text
and counters must be as without; every collected answer must be the beginning of one that was
given, with the states that our trunk has for it, and a dataset of them must train as it does with
our trunk's states. Control: states of the answer beside it. Where vLLM's class of the trunk gives
its states away, they also come from vLLM itself (`train --states-from vllm`); its CPU build has no
memory for that, which is mended when it starts (changed_vllm.py).

Prints a table, writes JSON with --json, exits 1 on any failure.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from changed_vllm import STATES_CONNECTOR, WITHOUT_GPU, changing
from checking import interop_parser
from checkpoints import headstart, swap_fusion_halves, with_changed_head
from engine_check import FAMILIES, make_model
from plugin_runs import CHOOSING, Result, asking, check_each, halves, ours, vocab_size, with_plugin
from vllm_engine import Engine as Vllm
from vllm_engine import Served
from vllm_server import OFFLINE

from headstart.checkpoint.reader import Checkpoint
from headstart.models.build import build
from headstart.models.documents import Documents
from headstart.models.unroll import trunk_states
from headstart.train.states.extraction import ARGUMENTS, PYTHON
from headstart.vllm_plugin.collected import Collected, files, read
from headstart.vocab.files import write

DEPTH = 3
WORKER = "headstart.vllm_plugin.collect.Worker"
# Trunks that give their states away in vLLM 0.32; MiMo's class claims to, and fails.
EXTRACTED = ("deepseek_v3",)
CLOSE = {"F32": 1e-4, "BF16": 5e-2}  # of the largest state


def our_states(model: Path, found: list[Collected]) -> list[torch.Tensor]:
    built = build(Checkpoint.open(model), device="cpu", dtype="float32", layout="vllm")
    assert built.head is not None
    kind = built.head.layout.trunk_hidden
    with torch.no_grad():
        return [
            trunk_states(built.trunk, one.ids.long(), Documents((len(one.ids),)), kind)
            for one in found
        ]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    rows = min(len(one), len(other))
    one, other = one[:rows].float(), other[:rows].float()
    return float((one - other).abs().max() / other.abs().max())


def check_collected(result: Result, model: Path, folder: Path, served: Served) -> None:
    found = [read(path) for path in files(folder)]
    size = len(served.tokens)
    result.expect(served.after == [{"written": size, "left_out": 0}], f"it says {served.after}")
    result.expect(len(found) == size, f"{len(found)} answers of {size} were collected")
    texts = {tuple(one.ids.tolist()[one.num_prompt :]) for one in found}
    given = [tuple(tokens) for tokens in served.tokens]
    result.expect(
        all(any(text == tokens[: len(text)] for tokens in given) for text in texts),
        "a collected text is none that was given",
    )
    most = CLOSE[result.dtype]
    states = our_states(model, found)
    apart = [distance(one.states, own) for one, own in zip(found, states, strict=True)]
    control = [distance(one.states, own) for one, own in zip(found, states[1:], strict=False)]
    lengths = [len(one.ids) - one.num_prompt for one in found]
    print(f"{result.family:17} {len(found)} answers of {lengths} tokens, states apart by at most "
          f"{max(apart):.1e}, of others' {min(control):.1e}", flush=True)  # fmt: skip
    result.expect(max(apart) <= most, f"states are {max(apart):.1e} apart")
    result.expect(min(control) > 10 * most, "control: another answer's states are as near")


def check_training(result: Result, model: Path, folder: Path, work: Path) -> None:
    """A dataset of collected answers, trained on with their states and with our trunk's."""
    words = ("--import", "--min-answer-tokens", "1", "--heldout", "0.3")
    headstart("distill", model, "--prompts", folder, *words, "--out", work / "data")
    computed = metrics_of(model, work, "computed")
    lengths = accepted(computed)
    result.expect(lengths[0] < max(lengths), f"training changes nothing: {lengths}")
    ways: dict[str, str | Path] = {"collected": folder}
    if result.family in EXTRACTED:
        ways["extracted"] = "vllm"
        mended = changing(STATES_CONNECTOR, WITHOUT_GPU, work / "mended")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(mended), os.environ.get("PYTHONPATH")])
        )
    for name, source in ways.items():
        found = metrics_of(model, work, name, "--states-from", source)
        losses = [(a, b) for a, b in zip(found, computed, strict=True) if "loss" in a]
        far = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in losses)
        print(f"{result.family:17} trained on {name} states: acceptance lengths {accepted(found)}, "
              f"on ours {lengths}; losses of {len(losses)} steps apart by at most {far:.1e}",
              flush=True)  # fmt: skip
        result.expect(accepted(found) == lengths, f"{name} states give other acceptance")
        result.expect(far < 0.02, f"losses of {name} states are {far:.1e} apart")


def metrics_of(model: Path, work: Path, name: str, *words: str | Path) -> list[dict[str, Any]]:
    """What a training run wrote down."""
    run = work / f"run-{name}"
    # Not more: when every token is known by heart, a rounded sum sends one to another expert.
    options = ("--epochs", "6", "--eval-every", "4", "--device", "cpu", "--dtype", "float32")
    headstart("train", model, "--data", work / "data", "--out", run, *options, *words)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def accepted(lines: list[dict[str, Any]]) -> list[float]:
    """Tokens of a round on held-out answers, at each evaluation."""
    found = [line["validation"] for line in lines if "validation" in line]
    return [round(each["acceptance_length"], 4) for each in found]


def check(
    family: str,
    python: Path,
    site: Path,
    work: Path,
    versions: dict[str, str],
    _: Namespace,
) -> Result:
    result = Result(family, FAMILIES[family]["dtype"])
    os.environ[PYTHON] = str(python)  # for `train --states-from vllm`
    model = make_model(family, work / "model")
    other = with_changed_head(model, work / "other", swap_fusion_halves)
    with Vllm(python, work / "vllm.log", work, with_plugin(site)) as vllm:
        versions.update(vllm.versions)
        plain = vllm.serve(model, 0, result.dtype).tokens
        half, _rest = halves(plain, vocab_size(model))
        write([half], work / "half.json")

        def serve(start: Path, folder: Path, head: Path | None = None) -> Served:
            asked = asking(draft_vocab=work / "half.json", collect=folder)
            return vllm.serve(
                start, DEPTH, result.dtype, speculative=CHOOSING, worker_cls=WORKER,
                after="headstart_collected", swapped=head, **asked,
            )  # fmt: skip

        own = ours(model, DEPTH, vocab=half)
        found = serve(model, work / "collected")
        result.add("half of them, collected", DEPTH, found, plain, like=own)
        check_collected(result, model, work / "collected", found)
        found = serve(other, work / "again", head=model)
        result.add("swapped in, half of them", DEPTH, found, plain, like=own)
        found = serve(other, work / "control")
        result.add("control: not swapped in", DEPTH, found, plain, like=own, is_control=True)
        check_collected(result, model, work / "control", found)  # states do not depend on the head
    if result.dtype == "F32":
        check_training(result, model, work / "collected", work)
    return result


def main() -> int:
    few = {
        "enforce_eager": True, "max_num_seqs": 8, "max_num_batched_tokens": 512,
        "dtype": "float32", "trust_remote_code": True,
    }  # fmt: skip
    os.environ |= {ARGUMENTS: json.dumps(few), **OFFLINE}
    return check_each(interop_parser(__doc__, FAMILIES), ["mimo"], check, folder="collect")


if __name__ == "__main__":
    sys.exit(main())
