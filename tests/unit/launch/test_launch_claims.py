"""Claims about MTP that are repeated and wrong, as far as they touch a launch command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launch_examples import command, everything, report, value_of

from headstart.errors import BadConfig, LaunchError
from headstart.launch import ENGINES, LaunchOptions, advice, build
from headstart.launch.versions import NEWEST


@pytest.mark.parametrize("engine", ENGINES)
def test_two_drafts_from_one_module_are_allowed(engine: str) -> None:
    built = command(engine, speculate=2)
    assert built.num_drafts == 2
    assert any("applied to its own output" in note for note in built.notes)


def test_a_head_that_was_tuned_gets_the_k_that_it_was_tuned_for(tmp_path: Path) -> None:
    """What was published about the stock head says nothing about it."""
    stock = command("vllm", "mimo", r_path=tmp_path)
    write = (tmp_path / "headstart.json").write_text
    write(json.dumps({"training": {"num_depths": 3}}))
    tuned = command("vllm", "mimo", r_path=tmp_path)
    assert (stock.num_drafts, tuned.num_drafts) == (1, 3)
    assert any("trained this head" in note for note in tuned.notes)
    assert not any("stock head" in note for note in tuned.notes)
    assert command("vllm", "mimo", r_path=tmp_path, speculate=2).num_drafts == 2
    write(json.dumps({"training": {"num_depths": "many"}}))
    assert command("vllm", "mimo", r_path=tmp_path).num_drafts == 1
    write(json.dumps({"training": "long"}))
    with pytest.raises(BadConfig, match="training"):
        command("vllm", "mimo", r_path=tmp_path)


@pytest.mark.parametrize(
    ("engine", "family", "best", "k"),
    [("vllm", "mimo", 3, 3), ("vllm", "mimo", 0, 1), ("vllm", "mimo_v2", 3, 1),
     ("sglang", "mimo_v2", 2, 2), ("sglang", "mimo_v2", 5, 3)],
)  # fmt: skip
def test_what_score_predicted_is_said_also_where_another_k_is_advised(
    engine: str, family: str, best: int, k: int, tmp_path: Path
) -> None:
    """Regression: that no drafts were fastest, or a K of several modules, was not mentioned."""
    speed = [{"speed_up": 1 - 0.1 * (best - i) ** 2, "acceptance_length": 1.5} for i in range(6)]
    result = {"vocabulary": "whole vocabulary", "best_drafts": best, "speed": speed}
    document = {"results": [result], "costs": "measured"}
    (tmp_path / "score.json").write_text(json.dumps(document))
    built = command(engine, family, r_path=tmp_path, r_modules=3 if family == "mimo_v2" else 1)
    assert built.num_drafts == k
    (said,) = [note for note in built.notes if "predicted" in note]
    assert said.startswith(f"K = {k}") and f"1.00x with K = {best}," in said


def test_a_fresh_head_has_no_published_figures(tmp_path: Path) -> None:
    """Nor has one that others have trained and that was put in."""
    for own, said in (({"fresh": True}, "is fresh"), ({}, "one draft token per")):
        made = {"operation": "graft", **own}
        (tmp_path / "headstart.json").write_text(json.dumps(made))
        built = command("vllm", "mimo", r_path=tmp_path)
        assert built.num_drafts == 1
        assert [said in note for note in built.notes].count(True) == 1
        assert not any("stock head" in note for note in built.notes)


def test_the_old_batch_size_switch_of_vllm_is_never_written() -> None:
    built = command("vllm", speculate_off_above=8)
    assert "disable" not in value_of(built, "--speculative-config")
    with pytest.raises(LaunchError, match="disable_by_batch_size is no way out"):
        command("vllm", version="0.16.0", speculate_off_above=8)


def test_sglang_has_no_algorithm_called_mtp() -> None:
    assert value_of(command("sglang"), "--speculative-algorithm") == "NEXTN"


def test_tensorrt_llm_does_not_take_the_medusa_path() -> None:
    text = everything(command("trtllm")).lower()
    assert "decoding_type: mtp" in text and "medusa" not in text


def test_a_head_has_kv_of_its_own_and_it_is_counted() -> None:
    options = LaunchOptions(max_model_len=4096, max_running_requests=2)
    lines = advice.memory(report(), options, 3, running=2)
    assert "KV of the head 1.1 KiB per token, 9.0 MiB for 2 x 4096 tokens" in lines


def test_memory_counts_weights_and_the_logits_of_every_checked_token() -> None:
    lines = advice.memory(report(), LaunchOptions(), 3, running=64)
    assert lines[0] == "head weights 3.0 GiB"
    assert lines[-1].startswith("logits to verify 126.2 MiB for 64")
    tree = advice.memory(report(), LaunchOptions(draft_top_k=4), 3, running=64)
    assert tree[-1].startswith("logits to verify 410.3 MiB for 64"), "13 rows instead of 4"
    assert advice.memory(report(), LaunchOptions(), 3, running=None)[-1] == (
        "logits to verify 2.0 MiB per running request, fp32"
    )


def test_memory_counts_the_requests_that_the_command_allows() -> None:
    assert "for 256 running" in command("sglang").memory[-1]
    assert "for 7 running" in command("sglang", max_running_requests=7).memory[-1]
    assert "for 7 running" in command("vllm", max_running_requests=7).memory[-1]
    assert "per running request" in command("vllm").memory[-1]
    assert command("sglang", speculate=0).memory == ()


def test_drafting_is_described_as_one_after_the_other() -> None:
    assert any("one after the other" in note for note in command("vllm").notes)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_speedup_is_promised_for_every_batch_size(engine: str) -> None:
    assert any("can turn into a loss" in note for note in command(engine).notes)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", "min_p or logit_bias are rejected"),
        ("sglang", "CPU, NPU and XPU verify by arg-max"),
        ("trtllm", "min_p or log-probabilities are rejected"),
        ("xllm", "only approximates"),
    ],
)
def test_where_output_or_requests_differ_is_said(engine: str, words: str) -> None:
    assert any(words in warning for warning in command(engine).warnings)


def test_chunked_prefill_is_not_sold_as_part_of_mtp() -> None:
    assert "chunked" not in command("vllm").shell()


def test_a_llama_4_without_head_is_refused_with_its_state() -> None:
    found = report("", state="absent", model_type="llama4")
    for engine in ENGINES:
        with pytest.raises(LaunchError, match="no head to serve with: llama4, absent"):
            build(engine, found, LaunchOptions(), NEWEST[engine])


@pytest.mark.parametrize(
    ("state", "model_type", "advice_word"),
    [
        ("declared-but-missing", "deepseek_v3", "headstart restore"),
        ("partial", "deepseek_v3", "1 tensors missing, first model.layers.61.eh_proj"),
        ("absent", "llama", "headstart graft"),
        ("absent", "qwen3", "headstart graft"),
        ("absent", "qwen3_moe", "headstart graft"),
        ("absent", "solar_open", "EAGLE-3"),
        ("absent", "headstart_head", "headstart launch MODEL --head"),
    ],
)
def test_a_model_without_a_usable_head_gets_advice(
    state: str, model_type: str, advice_word: str
) -> None:
    name = model_type if model_type in ("deepseek_v3", "qwen3", "qwen3_moe") else ""
    found = report(name, state=state, model_type=model_type)
    with pytest.raises(LaunchError, match=advice_word):
        build("vllm", found, LaunchOptions(), "0.27.1")
    assert build("vllm", found, LaunchOptions(speculate=0), "0.27.1")


def test_a_head_that_the_config_hides_is_warned_about() -> None:
    built = command("vllm", r_state="undeclared")
    assert any("num_nextn_predict_layers" in warning for warning in built.warnings)


@pytest.mark.parametrize(
    ("name", "engine", "own", "k"),
    [
        ("glm4_moe", "vllm", {}, 1),
        ("glm_moe_dsa", "vllm", {"r_config": {"index_share_for_mtp_iteration": True}}, 5),
        ("glm_moe_dsa", "vllm", {}, 1),
        ("mimo", "vllm", {}, 1),
        ("deepseek_v3", "trtllm", {}, 3),
        ("mimo_v2", "sglang", {"r_modules": 3}, 3),
        ("step3p5", "sglang", {"r_modules": 3}, 3),
        ("hy_v3", "vllm", {}, 1),
    ],
)
def test_k_follows_the_advice_for_the_family(
    name: str, engine: str, own: dict[str, object], k: int
) -> None:
    built = command(engine, name, **own)
    assert built.num_drafts == k
    assert any(f"K = {k}" in note for note in built.notes)


def test_what_is_written_for_vllm_is_json() -> None:
    assert json.loads(value_of(command("vllm"), "--speculative-config"))["method"] == "mtp"
