from __future__ import annotations

from pathlib import Path

import pytest
from support.launch_examples import command, value_of

from headstart.errors import LaunchError
from headstart.launch.trtllm import CONFIG_FILE, yaml


def written(**options: object) -> str:
    return command("trtllm", **options).files[CONFIG_FILE]


def test_mtp_is_a_decoding_type_in_the_yaml() -> None:
    assert written(speculate=2) == "speculative_config:\n  decoding_type: MTP\n  max_draft_len: 2\n"
    built = command("trtllm")
    assert built.argv[0] == "trtllm-serve" and value_of(built, "--backend") == "pytorch"
    assert value_of(built, "--config") == CONFIG_FILE


def test_older_releases_spell_the_file_and_the_length_differently() -> None:
    built = command("trtllm", version="1.1.0")
    assert value_of(built, "--extra_llm_api_options") == CONFIG_FILE
    assert "num_nextn_predict_layers: 3" in built.files[CONFIG_FILE]


@pytest.mark.parametrize("version", ["1.2.0", "1.2.1", "1.3.0rc9"])
def test_k_is_written_under_the_name_that_a_release_does_not_overwrite(version: str) -> None:
    """There max_draft_len became the number of modules, so that K = 3 was 1 without a word."""
    text = command("trtllm", version=version).files[CONFIG_FILE]
    assert "num_nextn_predict_layers: 3" in text and "max_draft_len" not in text


def test_dense_qwen3_5_is_served_as_text_only() -> None:
    assert command("trtllm", "qwen3_next")
    assert command("trtllm", "qwen3_5", r_architectures=("Qwen3_5ForCausalLM",))
    with pytest.raises(LaunchError, match=r"does not read the head of .* vision part"):
        command("trtllm", "qwen3_5", r_architectures=("Qwen3_5ForConditionalGeneration",))


def test_off_above_is_max_concurrency_and_a_schedule_has_upper_bounds() -> None:
    assert "max_concurrency: 32" in written(speculate_off_above=32)
    assert written(schedule="1:3,9:1,33:0").endswith("draft_len_schedule:\n    8: 3\n    32: 1\n")
    assert "64: 1" in written(schedule="1:3,9:1", max_running_requests=64)


def test_a_schedule_that_trtllm_would_reject_is_refused() -> None:
    with pytest.raises(LaunchError, match="needs an upper bound for its last step"):
        command("trtllm", schedule="1:3,9:1")
    with pytest.raises(LaunchError, match="wants the largest K first"):
        command("trtllm", schedule="1:1,9:3,33:0")
    with pytest.raises(LaunchError, match=r"--schedule needs TensorRT-LLM 1\.3\.0rc9"):
        command("trtllm", version="1.2.0", schedule="1:3,9:0")


def test_a_release_candidate_counts_as_older_than_a_later_one() -> None:
    with pytest.raises(LaunchError, match=r"1\.3\.0rc14 or later, found 1\.3\.0rc12"):
        command("trtllm", "qwen3_5_moe", "1.3.0rc12")
    assert command("trtllm", "qwen3_5_moe", "1.3.0")


def test_several_machines_go_through_mpi() -> None:
    built = command("trtllm", tensor_parallel=16, num_nodes=2)
    assert built.argv[:7] == (
        "mpirun", "-n", "16", "--map-by", "ppr:8:node", "trtllm-llmapi-launch", "trtllm-serve",
    )  # fmt: skip
    for option, value in (("node_rank", 1), ("master_addr", "node0:1")):
        with pytest.raises(LaunchError, match=f"--{option.replace('_', '-')}: .* from MPI"):
            command("trtllm", tensor_parallel=16, num_nodes=2, **{option: value})


def test_data_parallel_is_attention_over_all_devices() -> None:
    built = command("trtllm", data_parallel=8)
    assert value_of(built, "--tp_size") == "8"
    assert "enable_attention_dp: true" in built.files[CONFIG_FILE]
    with pytest.raises(LaunchError, match="--data-parallel 16 alone"):
        command("trtllm", data_parallel=2, tensor_parallel=8)


def test_caches_and_graphs_are_in_the_yaml() -> None:
    text = written(
        prefix_caching="on", kv_offload_gb=8, tensor_parallel=2, cuda_graph_batch=32,
        chunked_prefill="on", dtype="bfloat16",
    )  # fmt: skip
    assert "kv_cache_config:\n  enable_block_reuse: true\n  host_cache_size: 4294967296\n" in text
    assert "cuda_graph_config:\n  enable_padding: true\n  max_batch_size: 32\n" in text
    assert "enable_chunked_prefill: true" in text and "dtype: bfloat16" in text


def test_both_workers_of_a_disaggregated_server_speculate() -> None:
    for role in ("prefill", "decode"):
        text = written(disaggregation=role)
        assert "decoding_type: MTP" in text and "cache_transceiver_config:" in text
        assert ("disable_overlap_scheduler: true" in text) == (role == "prefill")


def test_a_separate_head_is_quoted_in_the_yaml() -> None:
    built = command("trtllm", "qwen3_5_moe", head=Path("/heads/it's"))
    assert "speculative_model: '/heads/it''s'" in built.files[CONFIG_FILE]


@pytest.mark.parametrize("version", ["1.0.0", "1.2.0", "1.3.0rc20", "1.3.0rc24"])
def test_a_separate_head_is_refused_where_the_models_own_would_draft(version: str) -> None:
    with pytest.raises(LaunchError, match=r"own head, whatever .*headstart stitch /heads/h .* DIR"):
        command("trtllm", "nemotron_h", max(version, "1.3.0rc9"), head=Path("/heads/h"))


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "step3p5"])
def test_a_separate_head_without_mtp_names_is_refused(name: str) -> None:
    with pytest.raises(LaunchError, match=rf"mtp\.\* from it, and a {name} head has none"):
        command("trtllm", name, head=Path("/heads/h"))


def test_nested_mappings_become_yaml() -> None:
    assert yaml({"a": {"b": {1: 2}}, "c": "x: y"}) == "a:\n  b:\n    1: 2\nc: 'x: y'\n"
