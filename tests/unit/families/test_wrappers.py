"""Models that wrap the text model of a family: sound, pictures, transcripts, more prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.head_edits import (
    Tensors,
    config,
    differing,
    edited,
    export,
    head_names,
    stitch,
    tensors,
)
from support.launch_examples import command
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import LaunchError
from headstart.heads.detection import find_head

# variant, architecture and model_type of the wrapper, where its text part lies, prefix of names
WRAPPERS = [
    (
        "nemotron_h",
        "NemotronH_Omni_Reasoning_V3",
        "nemotron_h_omni",
        "llm_config",
        "language_model.",
    ),
    ("nemotron_h", "NemotronH_Super_Omni_Reasoning_V3", "", "text_config", "language_model."),
    (
        "nemotron_h",
        "Nemotron3_5TranscribeForConditionalGeneration",
        "nemo_speechlm",
        "text_config",
        "llm.",
    ),
    (
        "bailing_moe_v3",
        "BailingMoeV3VLForConditionalGeneration",
        "bailing_moe_v3_vl",
        "text_config",
        "language_model.",
    ),
]


def wrapped(folder: Path, out: Path, architecture: str, kind: str, part: str, prefix: str) -> Path:
    """The checkpoint of a text model as a wrapper stores it."""

    def change(contents: Tensors) -> None:
        for name in list(contents):
            contents[prefix + name] = contents.pop(name)

    def change_config(document: dict[str, Any]) -> None:
        text = dict(document)
        document.clear()
        document.update(model_type=kind, architectures=[architecture], **{part: text})

    return edited(folder, out, change=change, change_config=change_config)


@pytest.mark.parametrize(
    ("variant", "architecture", "kind", "part", "prefix"), WRAPPERS, ids=[w[1] for w in WRAPPERS]
)
def test_the_head_of_a_wrapper_is_found_taken_out_and_put_back(
    tiny: Tiny, tmp_path: Path, variant: str, architecture: str, kind: str, part: str, prefix: str
) -> None:
    rest = (architecture, kind, part, prefix)
    model = wrapped(tiny(variant), tmp_path / "model", *rest)
    bare = wrapped(tiny(variant, with_head=False), tmp_path / "bare", *rest)
    found = find_head(Checkpoint.open(model))
    assert found.state == "complete" and found.unexpected == ()
    assert all(name.startswith(prefix) for name in head_names(model).values())
    result = stitch(export(model, "headstart", tmp_path / "head"), bare, tmp_path / "result")
    assert differing(tensors(model), tensors(result)) == set()
    assert config(result) == config(model)


@pytest.mark.parametrize(
    ("engine", "name", "architecture", "before", "since"),
    [
        ("vllm", "nemotron_h", "NemotronH_Super_Omni_Reasoning_V3", "0.19.0", "0.20.0"),
        ("vllm", "nemotron_h", "NemotronH_Omni_Reasoning_V3", "0.28.0rc2", "0.29.0"),
        ("vllm", "bailing_moe_v3", "BailingMoeV3VLForConditionalGeneration", "0.29.0", "0.30.0"),
        ("sglang", "nemotron_h", "NemotronH_Omni_Reasoning_V3", "0.5.19", "0.5.20"),
        ("vllm", "glm5_next", "", "0.29.0", "0.30.0"),
        ("sglang", "glm5_next", "", "0.5.19", "0.5.20"),
        ("vllm", "hy_v4", "", "0.28.0rc2", "0.29.0"),
        ("sglang", "hy_v4", "", "0.5.19", "0.5.20"),
        ("vllm", "qwen4_exp", "", "0.28.0rc2", "0.29.0"),
        ("sglang", "qwen4_exp", "", "0.5.19", "0.5.20"),
        ("sglang", "gigachat3_5", "", "0.5.20", "0.5.21"),
    ],
)
def test_new_models_are_served_from_their_release_on(
    engine: str, name: str, architecture: str, before: str, since: str
) -> None:
    own = {"r_architectures": (architecture,)} if architecture else {}
    with pytest.raises(LaunchError, match=rf"needs .* {since} or later"):
        command(engine, name, before, **own)
    assert command(engine, name, since, **own)


def test_a_wrapper_that_no_engine_reads_is_refused() -> None:
    for engine in ("vllm", "sglang"):
        with pytest.raises(
            LaunchError, match=r"does not read the head of Nemotron 3\.5 Transcribe"
        ):
            command(
                engine, "nemotron_h",
                r_architectures=("Nemotron3_5TranscribeForConditionalGeneration",),
            )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("mellum", r"`headstart generate`; transformers 5\.22\.2 with generate"),
        ("motif", "Motif's own fork of vLLM"),
        ("openpangu_v2", r"omni-infer \(Ascend\); exllamav3; ik_llama"),
    ],
)
def test_a_head_that_no_engine_serves_is_said_to_run_elsewhere(name: str, others: str) -> None:
    for engine in ("vllm", "sglang", "trtllm", "xllm"):
        with pytest.raises(LaunchError, match=f"Others that do: {others}"):
            command(engine, name)


def test_a_refusal_names_what_serves_this_very_model() -> None:
    """SGLang reads no LongCat with n-grams; mlx-vlm is not started here with some heads."""
    ling = {"r_model_type": "bailing_moe_v2", "r_architectures": ("BailingMoeV2ForCausalLM",)}
    with pytest.raises(LaunchError, match=r"TensorRT-LLM does not serve .* These do: vLLM, SGLang"):
        command("trtllm", "bailing_moe", **ling)
    ngrams = {"r_model_type": "longcat_flash_ngram"}
    with pytest.raises(LaunchError, match=r"TensorRT-LLM does not serve .* These do: vLLM\. Or"):
        command("trtllm", "longcat_flash", **ngrams)
    with pytest.raises(LaunchError, match=r"TensorRT-LLM does not serve .* These do: vLLM, SGLang"):
        command("trtllm", "bailing_moe", r_model_type="bailing_hybrid")
    own = r"mlx-vlm is not launched here with .* These do: vLLM, SGLang; mlx-vlm from 0\.7\.1"
    with pytest.raises(LaunchError, match=own):
        command("mlx", "hy_v4")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_a_grafted_head_is_served_by_vllm_from_a_folder_of_its_own(name: str) -> None:
    with pytest.raises(LaunchError, match="--format vllm --out DIR"):
        command("vllm", name)
    with pytest.raises(LaunchError, match="These do: vLLM"):
        command("sglang", name)


def test_k_and_runners_of_the_new_families() -> None:
    assert command("vllm", "glm5_next").num_drafts == 5
    assert command("vllm", "hy_v4").num_drafts == command("vllm", "qwen4_exp").num_drafts == 3
    built = command("sglang", "gigachat3_5", r_modules=2)
    assert built.num_drafts == 2
    assert any("one draft runner per module" in note for note in built.notes)
    assert "--mamba-cache-mode" in command("vllm", "qwen4_exp").argv
