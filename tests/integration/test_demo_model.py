"""The real SmolLM2-135M-Instruct, where its package is installed."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from headstart.demo.package import INSTALL, PACKAGE
from headstart.demo.unpacked import ready


def is_installed() -> bool:
    try:
        distribution(PACKAGE)
    except PackageNotFoundError:
        return False
    return True


pytestmark = pytest.mark.skipif(not is_installed(), reason=f"needs `{INSTALL}`")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ready(cache=tmp_path_factory.mktemp("demo"))


def test_the_trunk_computes_what_transformers_llama_computes(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from headstart.checkpoint.reader import Checkpoint
    from headstart.models.build import build
    from headstart.models.documents import Documents
    from headstart.models.unroll import trunk_states

    fields = json.loads((folder / "config.json").read_text())
    foreign = ("model_type", "architectures", "auto_map", "num_nextn_predict_layers")
    plain = {name: value for name, value in fields.items() if name not in foreign}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**plain, "attention_bias": False})).eval()
    stored = load_file(folder / "model.safetensors")
    state = {n: v for n, v in stored.items() if not n.endswith(".bias") and ".mtp_" not in n}
    trunk = [n for n in stored if ".mtp_" not in n]  # the head has learned its own
    assert not any(stored[n].any() for n in trunk if n.endswith(".bias"))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    rotary = model.model.rotary_emb
    rotary.inv_freq, _ = rotary.compute_default_rope_parameters(model.config)
    text = "Gravity is the force that 12 apples\n\tand \u4f60\u597d know. def f(x): return x**2"
    ids = PreTrainedTokenizerFast.from_pretrained(str(folder)).encode(text, return_tensors="pt")
    built = build(Checkpoint.open(folder), device="cpu", dtype="float32", with_head=False)
    with torch.no_grad():
        theirs = model(ids).logits[0]
        states = trunk_states(built.trunk, ids[0], Documents((ids.shape[1],)), "after_final_norm")
        ours = built.trunk.logits(states)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
