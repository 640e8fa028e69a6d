from __future__ import annotations

import json
from typing import Any

import pytest
from support.launch_examples import MODEL, command, value_of

from headstart.errors import LaunchError


def config(built: Any) -> dict[str, Any]:
    return dict(json.loads(value_of(built, "--speculative-config")))


def test_the_method_is_mtp_for_every_family() -> None:
    assert config(command("vllm")) == {"method": "mtp", "num_speculative_tokens": 3}
    assert config(command("vllm", "qwen3_5"))["method"] == "mtp"


@pytest.mark.parametrize(
    ("name", "version", "method"),
    [
        ("deepseek_v3", "0.10.2", "deepseek_mtp"),
        ("mimo", "0.9.0", "deepseek_mtp"),
        ("glm4_moe", "0.10.0", "deepseek_mtp"),
        ("qwen3_next", "0.10.2", "qwen3_next_mtp"),
        ("ernie4_5_moe", "0.10.2", "ernie_mtp"),
        ("qwen3_next", "0.11.0", "mtp"),
    ],
)
def test_before_0_11_the_method_is_named_by_family(name: str, version: str, method: str) -> None:
    assert config(command("vllm", name, version))["method"] == method


def test_a_version_with_v_and_a_local_part_is_understood() -> None:
    assert config(command("vllm", version="v0.11.0+cu128"))["method"] == "mtp"


def test_a_release_before_the_family_is_refused_with_both_versions() -> None:
    with pytest.raises(LaunchError, match=r"needs vLLM 0\.17\.0 or later, found 0\.16\.0"):
        command("vllm", "qwen3_5", "0.16.0")


def test_a_family_of_the_development_branch_is_served_by_main() -> None:
    with pytest.raises(LaunchError, match=r"needs vLLM 0\.28\.0rc1"):
        command("vllm", "dots3_note", "0.27.1")
    assert config(command("vllm", "dots3_note", "main"))["method"] == "mtp"


def test_the_v0_engine_is_too_old() -> None:
    with pytest.raises(LaunchError, match=r"written for 0\.9\.0 and later"):
        command("vllm", version="0.8.5")


def test_several_modules_need_a_multiple_above_their_number() -> None:
    with pytest.raises(LaunchError, match=r"wants a multiple of 3 above 3\. Use 3"):
        command("vllm", "step3p5", r_modules=3, speculate=4)
    assert config(command("vllm", "step3p5", r_modules=3, speculate=2))
    assert config(command("vllm", "step3p5", r_modules=3, speculate=6))


def test_mimo_v2_has_one_module_in_vllm_so_that_any_k_passes() -> None:
    assert config(command("vllm", "mimo_v2", r_modules=3, speculate=2))
    assert config(command("vllm", "mimo_v2", r_modules=3))["num_speculative_tokens"] == 1


def test_off_above_becomes_ranges_that_end_with_k_0() -> None:
    built = command("vllm", speculate=3, speculate_off_above=32, max_running_requests=256)
    assert config(built)["num_speculative_tokens_per_batch_size"] == [[1, 32, 3], [33, 256, 0]]


def test_a_schedule_becomes_ranges() -> None:
    ranges = config(command("vllm", schedule="1:3,9:1,33:0"))
    assert ranges["num_speculative_tokens"] == 3
    assert ranges["num_speculative_tokens_per_batch_size"] == [[1, 8, 3], [9, 32, 1], [33, 33, 0]]


@pytest.mark.parametrize("options", [{"speculate_off_above": 8}, {"schedule": "1:2,9:0"}])
def test_k_by_batch_size_needs_0_24_and_no_data_parallel(options: dict[str, Any]) -> None:
    name = "--" + next(iter(options)).replace("_", "-")
    with pytest.raises(LaunchError, match=rf"{name} needs vLLM 0\.24\.0 or later, found 0\.23\.0"):
        command("vllm", version="0.23.0", **options)
    with pytest.raises(LaunchError, match=f"{name}: .* ignores it with data parallel"):
        command("vllm", data_parallel=2, **options)


def test_recurrent_trunks_get_the_align_mode_where_it_exists() -> None:
    assert value_of(command("vllm", "qwen3_5"), "--mamba-cache-mode") == "align"
    assert "--mamba-cache-mode" not in command("vllm", "qwen3_next", "0.14.0").argv
    assert "--mamba-cache-mode" not in command("vllm", "qwen3_5", prefix_caching="off").argv
    assert "--mamba-cache-mode" not in command("vllm", "deepseek_v3").argv


def test_align_mode_does_not_go_without_chunked_prefill() -> None:
    with pytest.raises(LaunchError, match="--chunked-prefill"):
        command("vllm", "qwen3_5", chunked_prefill="off")
    assert command("vllm", "qwen3_5", chunked_prefill="off", prefix_caching="off")


def test_graphs_are_sized_for_every_drafted_token() -> None:
    built = command("vllm", speculate=3, cuda_graph_batch=64)
    assert value_of(built, "--max-cudagraph-capture-size") == "256"


def test_experts_spread_over_all_devices_or_none() -> None:
    built = command("vllm", tensor_parallel=4, data_parallel=2, expert_parallel=8)
    assert "--enable-expert-parallel" in built.argv
    with pytest.raises(LaunchError, match=r"over all 8 tensor x data devices\. Use 8"):
        command("vllm", tensor_parallel=8, expert_parallel=4)


def test_other_machines_run_headless() -> None:
    shared = {"tensor_parallel": 16, "num_nodes": 2, "master_addr": "[fe80::1]:2345"}
    first, second = command("vllm", **shared), command("vllm", **shared, node_rank=1)
    assert "--headless" not in first.argv and "--headless" in second.argv
    assert value_of(second, "--master-addr") == "[fe80::1]"
    assert value_of(second, "--master-port") == "2345"
    with pytest.raises(LaunchError, match=r"--num-nodes needs vLLM 0\.11\.1"):
        command("vllm", version="0.11.0", **shared)


def test_both_sides_of_a_disaggregated_server_speculate() -> None:
    for role in ("prefill", "decode"):
        built = command("vllm", disaggregation=role)
        assert config(built)
        transfer = json.loads(value_of(built, "--kv-transfer-config"))
        assert transfer == {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def test_host_memory_for_kv_is_given_in_gib() -> None:
    assert value_of(command("vllm", kv_offload_gb=64), "--kv-offloading-size") == "64"
    with pytest.raises(LaunchError, match="one KV connector"):
        command("vllm", kv_offload_gb=64, disaggregation="decode")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_code_that_a_config_needs_runs_only_when_it_was_asked_for(engine: str) -> None:
    code = {"auto_map": {"AutoConfig": "configuration.X", "AutoModel": "someone/else--modeling.Y"}}
    built = command(engine, "mimo", r_config=code)
    assert not any("trust" in word for word in built.argv)
    files = ("configuration.py", "modeling.py of the hub's someone/else")
    assert built.code_files == files
    said = [text for text in built.warnings if "trust-remote-code" in text]
    assert len(said) == 1 and f"auto_map: {', '.join(files)}" in said[0]
    assert f"`headstart launch '{MODEL}' --engine {engine} --trust-remote-code`" in said[0]
    asked = command(engine, "mimo", r_config=code, trust_remote_code=True)
    assert any("trust" in word for word in asked.argv)
    assert not asked.code_files and not any("auto_map" in text for text in asked.warnings)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_code_of_a_checkpoint_does_not_run_where_the_engine_has_its_own(engine: str) -> None:
    code = {"auto_map": {"AutoConfig": "configuration.X"}}
    built = command(engine, r_config=code)
    assert not any("trust" in word for word in built.argv) and not built.code_files
    assert not any("auto_map" in text for text in built.warnings)
    asked = command(engine, r_config=code, trust_remote_code=True)
    assert any("trust" in word for word in asked.argv)
