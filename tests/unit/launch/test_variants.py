"""Models of a family that an engine reads later than the family, or never."""

from __future__ import annotations

import pytest
from support.launch_examples import command, report

from headstart.errors import LaunchError
from headstart.families.engines import served_by
from headstart.families.registry import families
from headstart.launch import LaunchOptions, build


@pytest.mark.parametrize(
    ("engine", "name", "model_type", "before", "since"),
    [
        ("vllm", "intern_s2", "interns2_mobius", "0.27.1", "0.28.0rc1"),
        ("vllm", "longcat_flash", "longcat_flash_ngram", "0.25.0", "0.26.0"),
        ("vllm", "nemotron_h", "nemotron_h_puzzle", "0.18.0", "0.19.0"),
        ("vllm", "step3p5", "step3p7", "0.22.0", "0.23.0"),
        ("sglang", "intern_s2", "interns2_mobius", "0.5.17", "0.5.18"),
        ("sglang", "mimo_v2", "mimo_v2", "0.5.10", "0.5.11"),
        ("sglang", "nemotron_h", "nemotron_h_puzzle", "0.5.12", "0.5.13"),
        ("sglang", "step3p5", "step3p7", "0.5.12", "0.5.13"),
        ("sglang", "bailing_moe", "bailing_hybrid", "0.5.8", "0.5.9"),
    ],
)
def test_a_later_variant_is_refused_before_its_release(
    engine: str, name: str, model_type: str, before: str, since: str
) -> None:
    with pytest.raises(LaunchError, match=f"{model_type}.* needs .* {since} or later"):
        command(engine, name, before, r_model_type=model_type)
    assert command(engine, name, since, r_model_type=model_type)


@pytest.mark.parametrize(
    ("engine", "name", "model_type"),
    [
        ("sglang", "longcat_flash", "longcat_flash_ngram"),
        ("vllm", "nemotron_h", "Nemotron3_5TranscribeForConditionalGeneration"),
    ],
)
def test_a_variant_that_no_release_reads_is_refused(
    engine: str, name: str, model_type: str
) -> None:
    with pytest.raises(
        LaunchError, match=rf"does not read the head of .*{model_type}.*--speculate"
    ):
        command(engine, name, "main", r_model_type=model_type)
    assert command(engine, name, "main", r_model_type=model_type, speculate=0)


@pytest.mark.parametrize("model_type", ["bailing_moe", "bailing_moe_v2"])
def test_a_variant_that_our_plugin_runs_wants_a_folder_of_its_own(model_type: str) -> None:
    with pytest.raises(LaunchError, match=r"from a folder of its own, .* --format vllm --out DIR"):
        command("vllm", "bailing_moe", "0.32.0", r_model_type=model_type)
    assert command("vllm", "bailing_moe", "0.32.0", r_model_type=model_type, speculate=0)
    assert command("vllm", "bailing_moe", "0.25.0", r_model_type="bailing_hybrid")


def test_the_text_part_of_the_config_counts_too() -> None:
    inner = {"text_config": {"model_type": "step3p7"}}
    with pytest.raises(LaunchError, match="step3p7"):
        command("vllm", "step3p5", "0.22.0", r_model_type="wrapper", r_config=inner)


def test_only_text_only_checkpoints_of_qwen3_5_are_late_on_sglang() -> None:
    inner = {"text_config": {"model_type": "qwen3_5_text"}}
    assert command("sglang", "qwen3_5", "0.5.9", r_config=inner)
    found = report("qwen3_5", architectures=("Qwen3_5ForCausalLM",))
    with pytest.raises(LaunchError, match=r"text-only checkpoints .* needs SGLang 0\.5\.17"):
        build("sglang", found, LaunchOptions(), "0.5.16")


def test_limits_of_one_variant_are_no_warning_for_another() -> None:
    warnings = command("sglang", "step3p5", r_modules=3).warnings
    assert "step3p7" not in " ".join(warnings)
    assert any("one draft runner per module" in text for text in warnings)


def test_the_note_for_tables_names_variants_and_what_holds_for_all() -> None:
    assert served_by("step3p5")["sglang"].note == "step3p7 from 0.5.13; one draft runner per module"
    ling = "Ling 2.0 from 0.26.0 with our plugin, in a folder of its own"
    assert served_by("bailing_moe")["vllm"].note == ling
    assert served_by("qwen3_5")["sglang"].note == "text-only checkpoints from 0.5.17"


def test_every_variant_is_a_name_of_its_family() -> None:
    for owner in families():
        names = {*owner.model_types, *owner.architectures}
        assert all(set(variants) <= names for variants in owner.variants.values())
        assert set(owner.variant_titles) <= names
