from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.launch_examples import command

from headstart.errors import BadConfig, ConfigError, LaunchError
from headstart.launch import LaunchOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 0}, "--tensor-parallel is 0; expected 1 or more"),
        ({"port": 0}, "--port is 0; expected 1 to 65535"),
        ({"port": 65536}, "--port is 65536; expected 1 to 65535"),
        ({"speculate": -1}, "--speculate is -1"),
        ({"memory_fraction": 1.5}, "--memory-fraction is 1.5"),
        ({"kv_offload_gb": 0}, "--kv-offload-gb is 0"),
        ({"prefix_caching": "maybe"}, "expected on or off"),
        ({"chunked_prefill": "0"}, "expected on, off or a size"),
        ({"disaggregation": "both"}, "expected prefill or decode"),
        ({"node_rank": 1}, "--node-rank is 1 with --num-nodes 1"),
        ({"master_addr": "node0"}, "expected HOST:PORT"),
        ({"num_nodes": 2}, "cannot be spread evenly over 2 machines"),
        ({"extra": "'open"}, "--extra cannot be split"),
        ({"speculate": 0, "token_map": Path("m")}, "--token-map says how to draft"),
        ({"speculate": 0, "draft_top_k": 2}, "--draft-top-k says how to draft"),
        ({"schedule": "1:3,9:1", "adaptive": True}, "both choose K at run time"),
        ({"schedule": "3"}, "expected `1:3,9:1,33:0`"),
        ({"schedule": "1:3,1:2"}, "rising numbers of requests from 1"),
        ({"schedule": "2:3"}, "rising numbers of requests from 1"),
        ({"kv_offload_gb": 1, "prefix_caching": "off"}, "drop one"),
        ({"head": Path("a"), "draft_model": Path("b")}, "two names of one option"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_value_without_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchOptions(**options)


def test_a_schedule_is_read_as_first_requests_and_k() -> None:
    assert LaunchOptions(schedule="1:3,9:1,33:0").steps() == {1: 3, 9: 1, 33: 0}


def test_a_schedule_above_the_given_k_is_refused() -> None:
    with pytest.raises(ConfigError, match="goes up to 5 draft tokens and --speculate says 3"):
        command("vllm", schedule="1:5", speculate=3)


def write_head(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
        {"speculators_model_type": "eagle3"},
        {"architectures": ["MedusaModel"]},
    ],
    ids=["architecture", "speculators", "medusa"],
)
def test_an_eagle_draft_beside_the_head_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    head = write_head(tmp_path / "eagle", **config)
    with pytest.raises(LaunchError, match="One server has one drafter"):
        command("vllm", head=head)


@pytest.mark.parametrize(
    "extra", ["--speculative-algorithm EAGLE3", "--speculative-config={}", "--draft_model x"]
)
def test_a_second_drafter_in_the_extra_arguments_is_refused(extra: str) -> None:
    with pytest.raises(ConfigError, match="an engine has one drafter"):
        command("sglang", extra=extra)


def test_a_head_with_an_unreadable_config_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    (head / "config.json").write_text("{")
    with pytest.raises(BadConfig, match=r"config\.json"):
        command("vllm", head=head)
