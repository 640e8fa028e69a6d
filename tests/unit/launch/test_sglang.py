from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.launch_examples import command, report, value_of

from headstart.errors import LaunchError
from headstart.launch import LaunchOptions, build
from headstart.launch.sglang import ADAPTIVE_FILE
from headstart.launch.versions import NEWEST


def test_k_becomes_steps_and_one_more_draft_token() -> None:
    built = command("sglang", speculate=2)
    assert value_of(built, "--speculative-algorithm") == "NEXTN"
    assert value_of(built, "--speculative-num-steps") == "2"
    assert value_of(built, "--speculative-eagle-topk") == "1"
    assert value_of(built, "--speculative-num-draft-tokens") == "3"


def test_the_draft_path_is_left_out_unless_there_is_a_separate_head() -> None:
    assert "--speculative-draft-model-path" not in command("sglang").argv
    built = command("sglang", head=Path("/heads/h"))
    assert value_of(built, "--speculative-draft-model-path") == "/heads/h"


def test_running_requests_are_always_set_with_speculation() -> None:
    assert value_of(command("sglang"), "--max-running-requests") == "256"
    built = command("sglang", max_running_requests=48)
    assert value_of(built, "--max-running-requests") == "48"
    assert "--max-running-requests" not in command("sglang", speculate=0).argv


def test_pipeline_parallel_goes_only_without_drafting() -> None:
    with pytest.raises(LaunchError, match="--pipeline-parallel"):
        command("sglang", pipeline_parallel=2)
    built = command("sglang", pipeline_parallel=2, speculate=0)
    assert value_of(built, "--pp-size") == "2"


def test_prefill_servers_go_in_stages_from_0_5_23() -> None:
    options = {"pipeline_parallel": 2, "disaggregation": "prefill"}
    assert value_of(command("sglang", **options), "--pp-size") == "2"
    with pytest.raises(LaunchError, match="--pipeline-parallel"):
        command("sglang", version="0.5.22", **options)
    with pytest.raises(LaunchError, match="--pipeline-parallel"):
        command("sglang", pipeline_parallel=2, disaggregation="decode")


def test_where_sglang_verifies_by_arg_max_follows_the_version() -> None:
    said = [" ".join(command("sglang", version=v).warnings) for v in ("0.5.22", "0.5.23")]
    assert ["ROCm, CPU, NPU and XPU verify" in text for text in said] == [True, False]


def test_off_above_is_an_adaptive_file_with_k_0_above() -> None:
    built = command("sglang", speculate=3, speculate_off_above=32)
    assert value_of(built, "--speculative-adaptive-config") == ADAPTIVE_FILE
    assert json.loads(built.files[ADAPTIVE_FILE]) == {
        "1": {"candidate_steps": [3]},
        "33": {"candidate_steps": [0]},
    }


def test_drafting_is_switched_off_from_0_5_14_and_lowered_from_0_5_13() -> None:
    with pytest.raises(LaunchError, match=r"needs SGLang 0\.5\.14 or later, found 0\.5\.13"):
        command("sglang", version="0.5.13", speculate_off_above=8)
    assert command("sglang", version="0.5.13", schedule="1:3,9:1").files


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mimo_v2", {"r_modules": 3}),
        ("deepseek_v3", {"data_parallel": 2, "expert_parallel": 2}),
        ("deepseek_v3", {"draft_top_k": 2}),
    ],
    ids=["several modules", "data-parallel attention", "tree"],
)
def test_k_at_run_time_is_refused_where_sglang_ignores_it(
    name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(LaunchError, match="--speculate-off-above"):
        command("sglang", name, speculate_off_above=8, **options)


def test_adaptive_starts_from_a_depth_it_knows() -> None:
    assert "--speculative-adaptive" in command("sglang", adaptive=True).argv
    with pytest.raises(LaunchError, match="between 1, 3 and 7"):
        command("sglang", adaptive=True, speculate=2)
    with pytest.raises(LaunchError, match=r"--adaptive needs SGLang 0\.5\.11"):
        command("sglang", version="0.5.10", adaptive=True)


def test_several_modules_draft_one_token_each() -> None:
    assert value_of(command("sglang", "mimo_v2", r_modules=3), "--speculative-num-steps") == "3"
    with pytest.raises(LaunchError, match=r"the head has 3\. Use --speculate 3"):
        command("sglang", "mimo_v2", r_modules=3, speculate=4)


def test_inkling_asks_for_several_runners_itself() -> None:
    for config in ({"mtp_config": {"local_layer_ids": [1]}}, {"mtp_local_layer_ids": [1]}):
        asked = command("sglang", "inkling", r_config=config)
        assert "--enable-multi-layer-eagle" in asked.argv
    assert "--enable-multi-layer-eagle" not in command("sglang", "inkling").argv


def test_replicas_with_shared_experts_are_data_parallel_attention() -> None:
    shared = {"tensor_parallel": 4, "data_parallel": 2, "expert_parallel": 8}
    old = command("sglang", version="0.5.21", **shared)
    assert value_of(old, "--tp-size") == "8" and value_of(old, "--dp-size") == "2"
    assert "--enable-dp-attention" in old.argv
    built = command("sglang", version="0.5.22", **shared)
    assert value_of(built, "--tp-size") == "8" and value_of(built, "--attn-dp-size") == "2"
    assert "--enable-dp-attention" not in built.argv and "--dp-size" not in built.argv
    plain = command("sglang", tensor_parallel=4, data_parallel=2)
    assert value_of(plain, "--tp-size") == "4" and "--enable-dp-attention" not in plain.argv


def test_flags_follow_the_version() -> None:
    assert "--cuda-graph-max-bs-decode" in command("sglang", cuda_graph_batch=8).argv
    old = command("sglang", version="0.5.13", cuda_graph_batch=8, expert_parallel=2)
    assert "--cuda-graph-max-bs" in old.argv and "--enable-ep-moe" not in old.argv
    oldest = command("sglang", version="0.4.10", expert_parallel=2)
    assert "--enable-ep-moe" in oldest.argv


def test_host_memory_is_split_over_the_ranks() -> None:
    built = command("sglang", kv_offload_gb=100, tensor_parallel=8)
    assert "--enable-hierarchical-cache" in built.argv
    assert value_of(built, "--hicache-size") == "13"


def test_the_prefill_server_gets_the_speculative_flags_too() -> None:
    built = command("sglang", disaggregation="prefill")
    assert value_of(built, "--disaggregation-mode") == "prefill"
    assert value_of(built, "--speculative-algorithm") == "NEXTN"


def test_a_token_map_is_passed_on() -> None:
    built = command("sglang", token_map=Path("/m/hot.pt"))
    assert value_of(built, "--speculative-token-map") == "/m/hot.pt"
    assert "token map: there is no file /m/hot.pt on this machine" in built.warnings
    hub = command("sglang", token_map=Path("owner/name/hot.pt"))
    assert not [line for line in hub.warnings if "token map" in line]


def test_a_token_map_in_another_format_is_refused() -> None:
    with pytest.raises(
        LaunchError, match=r"\.pt file, not from maps.json.*headstart vocab .*--from"
    ):
        command("sglang", token_map=Path("maps.json"))


def test_chunks_are_off_on_or_sized() -> None:
    sizes = {"off": "-1", "on": "8192", "512": "512"}
    for asked, size in sizes.items():
        built = command("sglang", chunked_prefill=asked)
        assert value_of(built, "--chunked-prefill-size") == size


def test_an_unquantised_head_of_a_quantised_model_is_said_to_be_so() -> None:
    plain = report()
    quantised = replace(plain, trunk=replace(plain.trunk, quantization="fp8"))
    flag = "--speculative-draft-model-quantization"
    built = build("sglang", quantised, LaunchOptions(), NEWEST["sglang"])
    assert value_of(built, flag) == "unquant"
    assert flag not in build("sglang", plain, LaunchOptions(), NEWEST["sglang"]).argv
    carried = replace(quantised, head=replace(quantised.head, is_quantized=True))
    assert flag not in build("sglang", carried, LaunchOptions(), NEWEST["sglang"]).argv
