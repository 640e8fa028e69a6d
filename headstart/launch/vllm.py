"""vLLM: `vllm serve` with a `--speculative-config` in JSON."""

from __future__ import annotations

import json

from headstart.checkpoint.config import Config
from headstart.errors import LaunchError
from headstart.heads.inspection import Report
from headstart.launch.command import EngineCommand, Process, as_word
from headstart.launch.options import LaunchOptions
from headstart.launch.plan import Plan
from headstart.launch.planning import make_plan
from headstart.launch.vllm_plugin import add_grafted, with_plugin

# Trunks with recurrent layers; their prefix cache needs states at block boundaries.
HYBRID = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "intern_s2", "nemotron_h", "glm5_next",
    "bailing_moe_v3",
)  # fmt: skip
# Before 0.11.0 the method was named by family; everything else was DeepSeek's.
_OLD_METHODS = {"qwen3_next": "qwen3_next_mtp", "ernie4_5_moe": "ernie_mtp"}


def build(report: Report, options: LaunchOptions, version: str) -> EngineCommand:
    """The `vllm serve` command of that version."""
    plan = make_plan("vllm", report, options, version)
    _speculation(plan)
    _placement(plan)
    _limits(plan)
    _caches(plan)
    program = ("vllm", "serve", as_word(report.path))
    return plan.command(Process((*program, *plan.args, *options.extra_args)))


def _speculation(plan: Plan) -> None:
    options = plan.options
    plan.refuse_given(
        "draft_top_k", why="verifies one chain of drafts, no tree", instead="Leave it at 1."
    )
    plan.refuse_given(
        "adaptive",
        why="chooses K by acceptance for DSpark drafts only",
        instead="Use --schedule or --speculate-off-above.",
    )
    if plan.k == 0:
        return
    modules = 1 if plan.family_name == "mimo_v2" else plan.num_modules
    if plan.k > modules and plan.k % modules:
        raise LaunchError(
            f"--speculate is {plan.k} and the head has {modules} modules; vLLM wants a multiple of "
            f"{modules} above {modules}. Use {plan.k // modules * modules}."
        )
    _check_fused_qkv(plan)
    old = _OLD_METHODS.get(plan.family_name, "deepseek_mtp")
    config: dict[str, object] = {"method": "mtp" if plan.has("0.11.0") else old}
    if options.head_path is not None:
        config["model"] = str(options.head_path)
    config["num_speculative_tokens"] = plan.k
    if plan.schedule:
        config["num_speculative_tokens_per_batch_size"] = _ranges(plan)
    config |= with_plugin(plan)
    plan.add("--speculative-config", json.dumps(config))
    add_grafted(plan)


def _check_fused_qkv(plan: Plan) -> None:
    """MiMo-V2.5 stores q, k and v for as many ranks as K/V heads; vLLM cuts by its own number."""
    config = Config(plan.report.config)
    is_fused = config.get("attention_projection_layout") == "fused_qkv"
    if plan.family_name != "mimo_v2" or not (is_fused or plan.report.model_type == "mimo_v2"):
        return
    ranks, size = config.get("num_key_value_heads"), plan.options.tensor_parallel
    if ranks != size:
        plan.warnings.append(
            f"the head's q, k and v are stored for {ranks or 'several'} ranks, and vLLM gives each "
            f"of {size} its share of rows as if they were for so many: drafts are nonsense. Use "
            f"--tensor-parallel {ranks or 'with that number'}"
        )


def _ranges(plan: Plan) -> list[list[int]]:
    """[first, last, K] by number of running requests; the last range is open in vLLM."""
    option = "speculate_off_above" if plan.options.speculate_off_above else "schedule"
    plan.require(
        "0.24.0", option,
        "disable_by_batch_size is no way out: it does nothing since the V1 engine. Upgrade, or "
        "lower --max-running-requests.",
    )  # fmt: skip
    if plan.options.data_parallel > 1:
        plan.refuse(
            option, "ignores it with data parallel above 1",
            "Use tensor parallel, or one server per replica behind a router.",
        )  # fmt: skip
    starts = list(plan.schedule)
    ends = [start - 1 for start in starts[1:]]
    ends.append(max(starts[-1], plan.options.max_running_requests or 0))
    plan.warnings.append(
        "K by batch size: on vLLM's V1 model runner this forces piecewise CUDA graphs (about 14 % "
        "slower single stream, vllm-project/vllm#49548); VLLM_USE_V2_MODEL_RUNNER=1 avoids it"
    )
    return [[start, end, plan.schedule[start]] for start, end in zip(starts, ends, strict=True)]


def _placement(plan: Plan) -> None:
    options = plan.options
    plan.refuse_given(
        "device", why="takes the device from its build", instead="Install the build for it."
    )
    plan.refuse_given("log_dir", why="logs to the terminal", instead="Redirect its output.")
    plan.add("--host", options.host)
    plan.add("--port", options.port)
    plan.add("--served-model-name", options.served_model_name)
    plan.add("--tensor-parallel-size", _above_one(options.tensor_parallel))
    plan.add("--data-parallel-size", _above_one(options.data_parallel))
    plan.add("--pipeline-parallel-size", _above_one(options.pipeline_parallel))
    if options.pipeline_parallel > 1 and plan.k:
        plan.warnings.append(
            "pipeline parallel with MTP works for some families only and can be slower "
            "(vllm-project/vllm#44697)"
        )
    if options.expert_parallel > 1:
        group = options.tensor_parallel * options.data_parallel
        if options.expert_parallel != group:
            plan.refuse(
                "expert_parallel", f"spreads experts over all {group} tensor x data devices",
                f"Use {group}, or change those.",
            )  # fmt: skip
        plan.add("--enable-expert-parallel", True)
    if options.num_nodes > 1:
        plan.require("0.11.1", "num_nodes", "Upgrade, or start a Ray cluster by hand.")
        if not options.master_addr:
            plan.refuse("num_nodes", "needs the address of machine 0", "Add --master-addr.")
        address, _, port = options.master_addr.rpartition(":")
        plan.add("--nnodes", options.num_nodes)
        plan.add("--node-rank", options.node_rank)
        plan.add("--master-addr", address)
        plan.add("--master-port", port)
        plan.add("--headless", options.node_rank > 0)
    elif options.master_addr:
        plan.refuse("master_addr", "has no use for it on one machine", "Add --num-nodes.")


def _limits(plan: Plan) -> None:
    options = plan.options
    plan.add("--dtype", options.dtype)
    plan.add("--trust-remote-code", plan.trusts_code)
    plan.add("--gpu-memory-utilization", options.memory_fraction)
    plan.add("--max-num-seqs", options.max_running_requests)
    plan.add("--max-model-len", options.max_model_len)
    plan.add("--max-num-batched-tokens", options.max_batched_tokens)
    if options.cuda_graph_batch is not None:
        plan.require("0.11.1", "cuda_graph_batch", "Use --extra with --compilation-config.")
        # Graphs are sized in tokens, and a request that drafts brings K + 1 of them.
        plan.add("--max-cudagraph-capture-size", options.cuda_graph_batch * (plan.k + 1))
    if options.chunked_prefill == "off":
        plan.add("--no-enable-chunked-prefill", True)
    elif options.chunked_prefill:
        plan.add("--enable-chunked-prefill", True)
        if options.chunked_prefill != "on":
            plan.add("--long-prefill-token-threshold", options.chunked_prefill)


def _caches(plan: Plan) -> None:
    options = plan.options
    if options.prefix_caching:
        switch = "" if options.prefix_caching == "on" else "no-"
        plan.add(f"--{switch}enable-prefix-caching", True)
    if plan.family_name in HYBRID and plan.k and options.prefix_caching != "off":
        if plan.has("0.15.0"):
            plan.add("--mamba-cache-mode", "align")
        plan.notes.append(
            "recurrent layers: prefix caching with MTP works in `align` mode only, and hits less "
            "often than on other models (vllm-project/vllm#54360)"
        )
        if options.chunked_prefill == "off":
            plan.refuse(
                "chunked_prefill", "needs it for prefix caching with recurrent layers",
                "Add --prefix-caching off, or leave chunked prefill on.",
            )  # fmt: skip
    if options.kv_offload_gb is not None:
        plan.require("0.11.1", "kv_offload_gb", "Upgrade, or use an LMCache connector.")
        if options.disaggregation:
            plan.refuse(
                "kv_offload_gb", "has one KV connector, and --disaggregation uses it", "Drop one."
            )
        plan.add("--kv-offloading-size", f"{options.kv_offload_gb:g}")
        plan.add("--kv-offloading-backend", "native")
    if options.disaggregation:
        role = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        plan.add("--kv-transfer-config", json.dumps(role))
        plan.notes.append(
            f"{options.disaggregation} server: NIXL gives both sides the same role, the router in "
            "front tells them apart; both sides need the same speculative config, because the KV "
            "of the head travels too"
        )


def _above_one(size: int) -> int | None:
    return size if size > 1 else None
