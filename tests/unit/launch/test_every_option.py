"""No option is dropped: for every engine each one changes what is run, or is refused by name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.launch_examples import command, everything

from headstart.errors import LaunchError
from headstart.launch import ENGINES, LaunchOptions

# option -> a value, and what has to be given with it
VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "speculate": (2, {}),
    "head": (Path("/heads/h"), {}),
    "draft_model": (Path("/heads/h"), {}),
    "draft_top_k": (2, {}),
    "draft_vocab": (Path("/maps/m.pt"), {}),
    "token_map": (Path("/maps/m.pt"), {}),
    "collect": (Path("/data/collected"), {}),
    "speculate_off_above": (1, {}),
    "schedule": ("1:3,9:0", {}),
    "adaptive": (True, {}),
    "tensor_parallel": (8, {}),
    "data_parallel": (2, {}),
    "expert_parallel": (8, {"tensor_parallel": 8}),
    "pipeline_parallel": (2, {}),
    "num_nodes": (2, {"tensor_parallel": 16, "master_addr": "node0:5000"}),
    "node_rank": (1, {"tensor_parallel": 16, "num_nodes": 2, "master_addr": "node0:5000"}),
    "master_addr": ("node1:5000", {"tensor_parallel": 16, "num_nodes": 2}),
    "host": ("0.0.0.0", {}),
    "port": (9000, {}),
    "device": ("npu", {}),
    "dtype": ("float16", {}),
    "memory_fraction": (0.5, {}),
    "max_running_requests": (7, {}),
    "max_model_len": (4096, {}),
    "max_batched_tokens": (2048, {}),
    "cuda_graph_batch": (16, {}),
    "chunked_prefill": ("1024", {}),
    "prefix_caching": ("off", {}),
    "kv_offload_gb": (1.0, {}),
    "disaggregation": ("prefill", {}),
    "trust_remote_code": (True, {}),
    "served_model_name": ("name", {}),
    "log_dir": (Path("logs"), {}),
    "docker": (True, {}),
    "extra": ("--some-flag 'a b'", {}),
}
# What an engine turns off unless asked for has to be asked for to be seen.
ON = {"xllm": {"prefix_caching": "on"}}


def test_every_option_has_an_example() -> None:
    assert set(VALUES) == {field.name for field in fields(LaunchOptions)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", VALUES)
def test_an_option_changes_the_command_or_is_refused(engine: str, name: str) -> None:
    value, needed = VALUES[name]
    value = ON.get(engine, {}).get(name, value)
    try:
        plain = command(engine, **needed)
    except LaunchError:
        plain = None  # what is needed is refused, or not complete without the option itself
    try:
        built = command(engine, **needed, **{name: value})
    except LaunchError as refusal:
        named = {name, *needed}
        assert any(f"--{option.replace('_', '-')}" in str(refusal) for option in named), refusal
        assert str(refusal).endswith("."), "the last part says what to do"
    else:
        assert plain is None or everything(built) != everything(plain)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_arguments_passed_through_arrive_last_and_whole(engine: str) -> None:
    assert command(engine, extra="--x 'a b'").argv[-2:] == ("--x", "a b")


@pytest.mark.parametrize("engine", ENGINES)
def test_without_drafting_nothing_speculative_is_left(engine: str) -> None:
    built = command(engine, speculate=0)
    assert "specul" not in everything(built) and "draft" not in everything(built)
    assert built.num_drafts == 0
