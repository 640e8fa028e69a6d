"""The script that holds our tables against sources of other projects finds what is put there."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "upstream_check.py"
SPECULATIVE = """
def override(hf_config):
    if hf_config.model_type in ("deepseek_v3", "phi9"):
        return "num_nextn_predict_layers"
    if hf_config.model_type == "mimo":
        return "mimo_mtp"
"""
FILES = {
    "vllm/vllm/config/speculative.py": SPECULATIVE,
    "vllm/vllm/engine/arg_utils.py": "class Args:\n    speculative_config: dict\n    host: str\n",
    "vllm/vllm/model_executor/models/deepseek_mtp.py": "enorm = hnorm = 'shared_head.norm'\n",
    "vllm/vllm/model_executor/models/mimo_mtp.py": (
        "NAMES = ('token_layernorm', 'hidden_layernorm', 'input_proj', 'final_layernorm')\n"
    ),
    "transformers/transformers/models/phi9/modeling_phi9.py": (
        "class Phi9:\n    _keys_to_ignore_on_load_unexpected = [r'^mtp.*']\n"
    ),
    "llama.cpp/conversion/base.py": (
        "class Mixin:\n    supports_mtp_export = True\n\n\n"
        "@ModelBase.register('Phi9ForCausalLM')\nclass Phi9(Mixin):\n    pass\n\n\n"
        "@ModelBase.register('Glm4MoeForCausalLM')\nclass Glm(Mixin):\n    pass\n"
    ),
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = util.spec_from_file_location("upstream_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_every_kind_of_difference_is_found_with_its_place(script: ModuleType, trees: Path) -> None:
    found = {(d.tree, d.about, d.text) for d in script.differences(trees, {"vllm": "0.9.0"})}
    assert ("vllm", "deepseek_v3", "eh_proj is not in the loader") in found
    assert ("vllm", "deepseek_v3", "enorm is not in the loader") not in found
    assert not any(tree == "vllm" and about == "mimo" for tree, about, _ in found)
    assert any(about == "phi9" and tree == "vllm" for tree, about, _ in found)
    assert ("vllm", "--dtype", "is not an option of this tree") in found
    assert not any(about in ("--host", "--speculative-config") for _, about, _ in found)
    assert any(about == "phi9" and tree == "transformers" for tree, about, _ in found)
    assert any(about == "Phi9ForCausalLM" for tree, about, _ in found if tree == "llama.cpp")
    assert any(about == "glm4_moe" and "we say no" in text for _, about, text in found)


def test_a_family_of_a_later_release_is_not_missed(script: ModuleType, trees: Path) -> None:
    early, late = (
        {d.about for d in script.differences(trees, {"vllm": release}) if d.tree == "vllm"}
        for release in ("0.9.0", "0.20.0")
    )
    assert "glm4_moe" not in early and "glm4_moe" in late


def test_what_has_a_reason_is_listed_apart(script: ModuleType) -> None:
    known = script.Difference("vllm", "medusa", "is given a drafting class", "x.py")
    other = script.Difference("vllm", "medusa", "something else", "x.py")
    text = script.report([known, other])
    assert text.startswith("1 differences are open.") and "1 are explained." in text
    assert text.index("something else") < text.index("another method")
