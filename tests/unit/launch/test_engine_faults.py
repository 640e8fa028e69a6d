"""Releases of engines in which a head that is whole drafts badly: said by version, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.launch_examples import command

from headstart.checkpoint.reader import Checkpoint
from headstart.cli.families import family_rows
from headstart.errors import LaunchError
from headstart.families.cautions import Caution
from headstart.families.registry import families, family
from headstart.heads.inspection import inspect
from headstart.launch import ENGINES, LaunchOptions, build, commands_for
from headstart.launch.versions import NEWEST

NO_OUT_NORM = "final_layernorm is not loaded"
FIRST_MODULE = "the first module drafts every token"
TRUNKS_LM_HEAD = "model's LM head takes the place"
UNROTATED = "is not rotated as it was trained"
BEFORE_NORM = "recycled_hidden = before_out_norm"


def warned(engine: str, name: str, version: str, text: str, **options: Any) -> bool:
    return any(text in warning for warning in command(engine, name, version, **options).warnings)


@pytest.mark.parametrize(
    ("engine", "name", "text", "faulty", "sound"),
    [
        ("sglang", "hy_v3", NO_OUT_NORM, ("0.5.11", "0.5.15.post1"), ("0.5.16", "0.5.23")),
        ("vllm", "step3p5", FIRST_MODULE, ("0.15.1", "0.22.1"), ("0.23.0", "main")),
        (
            "vllm",
            "step3p5",
            TRUNKS_LM_HEAD,
            ("0.16.0", "0.22.0", "0.27.0", "0.28.0rc1"),
            ("0.15.1", "0.23.0", "0.26.0", "0.28.0rc2", "0.32.0"),
        ),
        ("vllm", "deepseek_v3", BEFORE_NORM, ("0.9.0", "0.23.0"), ("0.24.0", "0.32.0")),
        ("vllm", "glm_moe_dsa", BEFORE_NORM, ("0.16.0",), ("0.24.0",)),
    ],
)
def test_a_fault_is_said_for_the_releases_that_have_it(
    engine: str, name: str, text: str, faulty: tuple[str, ...], sound: tuple[str, ...]
) -> None:
    modules = family(name).default_modules
    for version in faulty:
        assert warned(engine, name, version, text, r_modules=modules), version
    for version in sound:
        assert not warned(engine, name, version, text, r_modules=modules), version


@pytest.mark.parametrize(
    ("head", "trunk", "version", "is_said"),
    [
        ("full_attention", "sliding_attention", "0.31.0", True),
        ("full_attention", "sliding_attention", "0.32.0", False),
        ("sliding_attention", "sliding_attention", "0.31.0", False),
        ("full_attention", "full_attention", "0.31.0", False),
    ],
)
def test_older_releases_leave_a_head_of_exaone_unrotated(
    head: str, trunk: str, version: str, is_said: bool
) -> None:
    config = {"layer_types": [trunk], "mtp_layer_types": [head], "num_hidden_layers": 1}
    assert warned("vllm", "exaone_moe", version, UNROTATED, r_config=config) == is_said


def test_step_does_not_start_where_kinds_of_layers_are_given() -> None:
    config = {"layer_types": ["full_attention"] * 6, "attention_other_setting": {"head_dim": 64}}
    modules = family("step3p5").default_modules
    for version, given, is_said in (("0.32.0", config, True), ("0.18.1", config, False),
                                    ("0.32.0", {}, False)):  # fmt: skip
        said = warned("vllm", "step3p5", version, "#40000", r_config=given, r_modules=modules)
        assert said == is_said, version


def test_older_releases_run_another_contract() -> None:
    layout = family("deepseek_v3").layout
    assert layout.as_("vllm", "0.23.0").recycled_hidden == "before_out_norm"
    assert layout.as_("vllm", "0.24.0") == layout.as_("vllm")
    assert layout.as_("vllm").recycled_hidden == layout.recycled_hidden == "after_out_norm"
    assert layout.as_("vllm", "0.23.0").zero_embed_at_position_0
    assert layout.as_("sglang", "0.4.0") == layout


def test_the_table_of_families_names_faults_with_their_releases() -> None:
    rows = {row["family"]: row for row in family_rows()}
    assert any(
        note.startswith("SGLang from 0.5.11 before 0.5.16: ")
        for note in rows["hy_v3"]["engine_notes"]
    )
    assert "vllm before 0.24.0" in rows["deepseek_v3"]["deviations"]


def test_faults_are_of_engines_that_serve_the_family() -> None:
    for owner in families():
        assert {caution.engine for caution in owner.cautions} <= set(owner.served), owner.name


def test_a_fault_may_concern_some_configs_only() -> None:
    caution = Caution(engine="vllm", text="x", concerns=lambda fields: "odd" in fields)
    assert caution.holds("vllm", "main", {"odd": 1})
    assert not caution.holds("vllm", "main", {})
    assert not caution.holds("sglang", "main", {"odd": 1})


@pytest.mark.parametrize(("ranks", "size"), [(4, 4), (8, 8), (8, 4), (4, 1)])
def test_a_fused_qkv_of_mimo_fits_one_tensor_parallel_size(ranks: int, size: int) -> None:
    config = {"num_key_value_heads": ranks, "attention_projection_layout": "fused_qkv"}
    said = warned(
        "vllm", "mimo_v2", "0.32.0", f"stored for {ranks} ranks",
        r_model_type="mimo_v2", r_config=config, r_modules=3, tensor_parallel=size,
    )  # fmt: skip
    assert said == (ranks != size)


def test_separate_projections_of_mimo_fit_every_size() -> None:
    config = {"num_key_value_heads": 8}
    assert not warned(
        "vllm", "mimo_v2", "0.32.0", "ranks",
        r_model_type="mimo_v2_flash", r_config=config, r_modules=3,
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_a_head_whose_names_an_engine_skips_is_refused(tiny: Any, engine: str) -> None:
    model = tiny("qwen3_5_moe_text", root="model.")
    found = inspect(Checkpoint.open(model))
    with pytest.raises(LaunchError, match=rf"'model\.'; .* skips .*stitch {model} {model} --out"):
        build(engine, found, LaunchOptions(), NEWEST[engine])
    if engine != "trtllm":
        with pytest.raises(LaunchError, match=r"skips those"):
            build(engine, found, LaunchOptions(head=Path(model)), NEWEST[engine])
    assert build(engine, found, LaunchOptions(speculate=0), NEWEST[engine])


def test_xllm_reads_either_name(tiny: Any) -> None:
    found = inspect(Checkpoint.open(tiny("qwen3_5_moe_text", root="model.")))
    commands = commands_for(found)
    assert set(commands) == set(ENGINES)
    assert [name for name, answer in commands.items() if not isinstance(answer, str)] == ["xllm"]


def test_a_head_without_a_count_is_fine_where_engines_take_one_module() -> None:
    built = command("sglang", "dots3_note", "0.5.19", r_state="undeclared")
    assert not any("does not declare" in text for text in built.warnings)
    with pytest.raises(LaunchError, match=r"needs SGLang 0\.5\.19 or later"):
        command("sglang", "dots3_note", "0.5.18")


def test_ling_3_is_served_by_sglang_from_0_5_19() -> None:
    assert command("sglang", "bailing_moe_v3", "0.5.19")
    with pytest.raises(LaunchError, match=r"needs SGLang 0\.5\.19 or later"):
        command("sglang", "bailing_moe_v3", "0.5.18")
