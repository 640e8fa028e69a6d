"""TensorRT-LLM: `trtllm-serve` on its PyTorch backend, with a YAML file for what has no flag."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from headstart.heads.detection import quoted
from headstart.heads.inspection import Report
from headstart.launch.command import EngineCommand, Process, as_word
from headstart.launch.options import LaunchOptions
from headstart.launch.plan import Plan
from headstart.launch.planning import make_plan

CONFIG_FILE = "headstart-trtllm.yaml"
_GIB = 1024**3
# Of a separate head TensorRT-LLM takes these tensors, and only from this release on (#17378).
_SEPARATE_NAMES, _SEPARATE_SINCE = "mtp.", "1.3.0rc25"
# Before #12341 the number of the checkpoint's modules took the place of max_draft_len; the older
# name of K is read by all.
_OWN_LENGTH_SINCE = "1.3.0rc20"


def build(report: Report, options: LaunchOptions, version: str) -> EngineCommand:
    """The `trtllm-serve` command of that version and its YAML file."""
    plan = make_plan("trtllm", report, options, version)
    config: dict[str, Any] = {}
    _speculation(plan, config)
    _placement(plan, config)
    _limits(plan, config)
    _caches(plan, config)
    if config:
        plan.add("--config" if plan.has("1.2.0") else "--extra_llm_api_options", CONFIG_FILE)
    program = (*_launcher(plan), "trtllm-serve", as_word(report.path), "--backend", "pytorch")
    files = {CONFIG_FILE: yaml(config)} if config else {}
    return plan.command(Process((*program, *plan.args, *options.extra_args)), files=files)


def _speculation(plan: Plan, config: dict[str, Any]) -> None:
    options = plan.options
    plan.refuse_given(
        "draft_vocab",
        "token_map",
        why="drafts over the whole vocabulary",
        instead="vLLM and SGLang take one.",
    )
    plan.refuse_given(
        "adaptive",
        why="can only switch drafting off for good when acceptance falls",
        instead="Use --schedule or --speculate-off-above.",
    )
    if plan.k == 0:
        return
    length = "max_draft_len" if plan.has(_OWN_LENGTH_SINCE) else "num_nextn_predict_layers"
    speculative: dict[str, Any] = {"decoding_type": "MTP", length: plan.k}
    if options.head_path is not None:
        _check_separate_head(plan, options.head_path)
        speculative["speculative_model"] = str(options.head_path)
    if options.draft_top_k > 1:
        plan.require("1.3.0rc20", "draft_top_k", "Leave it at 1.")
        speculative["use_dynamic_tree"] = True
        speculative["dynamic_tree_max_topK"] = options.draft_top_k
        speculative["max_total_draft_tokens"] = options.draft_top_k * plan.k
        plan.warnings.append("draft trees are greedy only and not made for MLA attention")
    instead = "Upgrade, or lower --max-running-requests."
    if options.speculate_off_above is not None:
        plan.require("1.3.0rc9", "speculate_off_above", instead)
        speculative["max_concurrency"] = options.speculate_off_above
    elif plan.schedule:
        plan.require("1.3.0rc9", "schedule", instead)
        speculative["draft_len_schedule"] = _upper_bounds(plan)
    config["speculative_config"] = speculative
    if plan.num_modules > 1:
        plan.notes.append("several modules: TensorRT-LLM drafts token j with module j (vanilla)")


def _check_separate_head(plan: Plan, path: Path) -> None:
    """Refuse a head that TensorRT-LLM would not draft with; an assistant is a model of its own."""
    family = plan.family
    if family is None or family.name == "gemma4_assistant":
        return
    option = "head" if plan.options.head is not None else "draft_model"
    model = quoted(plan.report.path)
    instead = f"Run `headstart stitch {quoted(path)} {model} --out DIR` and launch DIR."
    if not plan.has(_SEPARATE_SINCE):
        plan.refuse(option, "drafts with the model's own head, whatever is given", instead)
    if not all(name.startswith(_SEPARATE_NAMES) for name in family.keys.pairs):
        why = f"takes tensors called {_SEPARATE_NAMES}* from it, and a {family.name} head has none"
        plan.refuse(option, why, instead)


def _upper_bounds(plan: Plan) -> dict[int, int]:
    """Our first-request schedule as {last number of requests: K}; beyond the last key K is 0."""
    starts = list(plan.schedule)
    if plan.schedule[1] != plan.k:
        plan.refuse(
            "schedule",
            "wants the largest K first",
            f"Start it with 1:{plan.k}, or give --speculate {plan.schedule[1]}.",
        )
    bounds = {after - 1: plan.schedule[start] for start, after in pairwise(starts)}
    if plan.schedule[starts[-1]]:
        last = plan.options.max_running_requests
        if last is None:
            plan.refuse(
                "schedule", "needs an upper bound for its last step",
                "Add --max-running-requests, or end the schedule with N:0.",
            )  # fmt: skip
        bounds[last] = plan.schedule[starts[-1]]
    return bounds


def _placement(plan: Plan, config: dict[str, Any]) -> None:
    options = plan.options
    plan.refuse_given("device", why="runs on NVIDIA GPUs alone", instead="Leave it out.")
    plan.refuse_given("log_dir", why="logs to the terminal", instead="Redirect its output.")
    plan.refuse_given(
        "node_rank",
        "master_addr",
        why="gets ranks and addresses from MPI",
        instead="Leave it out: mpirun starts all machines.",
    )
    if options.pipeline_parallel > 1 and plan.k:
        plan.refuse("pipeline_parallel", "has none with speculation", "Use tensor parallel.")
    size = options.tensor_parallel
    if options.data_parallel > 1:
        if size > 1:
            plan.refuse(
                "data_parallel", "has attention data parallel over all devices or none",
                f"Give --data-parallel {options.num_devices} alone, or --tensor-parallel alone.",
            )  # fmt: skip
        size = options.data_parallel
        config["enable_attention_dp"] = True
    plan.add("--host", options.host)
    plan.add("--port", options.port)
    if options.served_model_name:
        plan.require("1.3.0rc9", "served_model_name", "Clients use the path of the model.")
        plan.add("--served_model_name", options.served_model_name)
    plan.add("--tp_size", size if size > 1 else None)
    plan.add("--pp_size", options.pipeline_parallel if options.pipeline_parallel > 1 else None)
    plan.add("--ep_size", options.expert_parallel if options.expert_parallel > 1 else None)


def _launcher(plan: Plan) -> tuple[str, ...]:
    options = plan.options
    if options.num_nodes == 1:
        return ()
    if options.docker:
        plan.refuse("docker", "needs MPI across the containers", "Use Slurm with its image.")
    each = options.num_devices // options.num_nodes
    plan.notes.append(
        "several machines: mpirun takes their names from a hostfile or from Slurm (`srun --mpi` "
        "in its place); run it once, on one of them"
    )
    return ("mpirun", "-n", str(options.num_devices), "--map-by", f"ppr:{each}:node",
            "trtllm-llmapi-launch")  # fmt: skip


def _limits(plan: Plan, config: dict[str, Any]) -> None:
    options = plan.options
    if options.dtype:
        config["dtype"] = options.dtype
    plan.add("--trust_remote_code", plan.trusts_code)
    plan.add("--kv_cache_free_gpu_memory_fraction", options.memory_fraction)
    if options.memory_fraction is not None:
        plan.notes.append("the memory fraction is of what the weights leave free, for KV alone")
    plan.add("--max_batch_size", options.max_running_requests)
    plan.add("--max_seq_len", options.max_model_len)
    plan.add("--max_num_tokens", options.max_batched_tokens)
    if options.cuda_graph_batch is not None:
        config["cuda_graph_config"] = {
            "enable_padding": True, "max_batch_size": options.cuda_graph_batch,
        }  # fmt: skip
    if options.chunked_prefill.isdigit():
        plan.refuse("chunked_prefill", "cuts chunks at the batch's token limit",
                    "Use on, with --max-batched-tokens.")  # fmt: skip
    if options.chunked_prefill:
        config["enable_chunked_prefill"] = options.chunked_prefill == "on"


def _caches(plan: Plan, config: dict[str, Any]) -> None:
    options = plan.options
    cache: dict[str, Any] = {}
    if options.prefix_caching:
        cache["enable_block_reuse"] = options.prefix_caching == "on"
    if options.kv_offload_gb is not None:
        # Each rank has its own pool, given in bytes.
        cache["host_cache_size"] = int(options.kv_offload_gb * _GIB / options.num_devices)
    if cache:
        config["kv_cache_config"] = cache
    if options.disaggregation:
        config["cache_transceiver_config"] = {"backend": "DEFAULT"}
        if options.disaggregation == "prefill":
            config["disable_overlap_scheduler"] = True
        plan.notes.append(
            f"{options.disaggregation} worker: give both kinds the same speculative_config and put "
            "`trtllm-serve disaggregated` in front; some recipes leave it off the prefill side"
        )


def yaml(values: Mapping[Any, Any], indent: str = "") -> str:
    """Nested mappings of scalars as YAML."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{yaml(value, indent + '  ')}".rstrip("\n"))
        elif isinstance(value, bool):
            lines.append(f"{indent}{key}: {str(value).lower()}")
        elif isinstance(value, str):
            lines.append(f"{indent}{key}: {_scalar(value)}")
        else:
            lines.append(f"{indent}{key}: {value}")
    return "\n".join(lines) + "\n"


def _scalar(text: str) -> str:
    if text.replace("_", "").replace("-", "").isalnum():
        return text
    return "'" + text.replace("'", "''") + "'"
