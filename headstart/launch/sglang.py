"""SGLang: `sglang.launch_server` with NEXTN, its name for MTP."""

from __future__ import annotations

import json
from math import ceil

from headstart.checkpoint.config import Config
from headstart.heads.inspection import Report
from headstart.launch.command import EngineCommand, Process, as_word
from headstart.launch.options import LaunchOptions
from headstart.launch.plan import Plan
from headstart.launch.planning import make_plan

ADAPTIVE_FILE = "headstart-sglang-adaptive.json"
# SGLang silently limits itself to 48 running requests with speculation; no server wants that.
DEFAULT_RUNNING_REQUESTS = 256
_CHUNK = 8192
# data-parallel attention by a size instead of a switch; pipeline parallel where no token is drafted
_ATTENTION_SIZE, _STAGED_PREFILL = "0.5.22", "0.5.23"
_REJECTION = "--speculative-use-rejection-sampling"
_TIED_TRAP = ("qwen3_5", "qwen3_5_moe")
# One draft runner per module, switched on by SGLang itself.
_MULTI_LAYER = ("mimo_v2", "step3p5", "gigachat3_5")


def build(report: Report, options: LaunchOptions, version: str) -> EngineCommand:
    """The `python3 -m sglang.launch_server` command of that version."""
    plan = make_plan("sglang", report, options, version)
    files = _speculation(plan)
    _placement(plan)
    _limits(plan)
    _caches(plan)
    program = ("python3", "-m", "sglang.launch_server", "--model-path", as_word(report.path))
    return plan.command(Process((*program, *plan.args, *options.extra_args)), files=files)


def _speculation(plan: Plan) -> dict[str, str]:
    options, k = plan.options, plan.k
    if k == 0:
        return {}
    plan.add("--speculative-algorithm", "NEXTN")
    plan.add("--enable-metrics", True)  # whether drafts are accepted is seen there alone
    if options.head_path is not None:
        plan.add("--speculative-draft-model-path", options.head_path)
    plan.add("--speculative-num-steps", k)
    plan.add("--speculative-eagle-topk", options.draft_top_k)
    # The root counts as a draft token here, so K drafts are K + 1.
    plan.add("--speculative-num-draft-tokens", k * options.draft_top_k + 1)
    if options.draft_top_k > 1:
        if _is_multi_layer(plan):
            plan.refuse("draft_top_k", "drafts a chain with several modules", "Leave it at 1.")
        plan.warnings.append(
            "draft_top_k above 1: a tree, documented without the overlap scheduler; page sizes "
            "above 1 need the flashinfer, fa3 or triton attention backend"
        )
    _check_token_map(plan)
    plan.add("--speculative-token-map", options.vocab_path)
    if plan.family_name == "inkling" and _has_local_modules(plan):
        plan.add("--enable-multi-layer-eagle", True)
    if _is_multi_layer(plan):
        if k > plan.num_modules and options.head_path is None:
            plan.refuse(
                "speculate",
                f"has one module per draft token here, and the head has {plan.num_modules}",
                f"Use --speculate {plan.num_modules}.",
            )
        plan.notes.append("one draft runner per module: SGLang enables multi-layer EAGLE itself")
    return _adaptive(plan)


def _check_token_map(plan: Plan) -> None:
    """SGLang reads a file of torch's, or one in a repository of the hub: OWNER/NAME/FILE.pt."""
    path = plan.options.vocab_path
    if path is None:
        return
    option = "draft_vocab" if plan.options.draft_vocab else "token_map"
    if path.suffix != ".pt":
        plan.refuse(
            option, f"reads token ids from a .pt file, not from {path}",
            f"`headstart vocab {plan.report.path} --from {path} --out FILE.pt` makes one.",
        )  # fmt: skip
    is_on_hub = len(path.parts) == 3 and not path.is_absolute()
    if not path.is_file() and not is_on_hub:
        plan.warnings.append(f"token map: there is no file {path} on this machine")
    # All of this was read in 0.5.23, the newest release that is known here.
    for bad, why, instead in (
        (plan.options.tensor_parallel > 1,
         "cuts the LM head by token ids of the whole vocabulary on every rank, so with tensor "
         "parallel above 1 drafts are wrong (sgl-project/sglang#4328)",
         "Use --tensor-parallel 1, or draft from the whole vocabulary."),
        (_is_multi_layer(plan), "ignores it with several modules", "Drop it."),
        (_REJECTION in plan.options.extra_args, "refuses it with rejection sampling", "Drop one."),
    ):  # fmt: skip
        if bad:
            plan.refuse(option, why, instead)
    if plan.family_name in _TIED_TRAP and Config(plan.report.config).get("tie_word_embeddings"):
        plan.warnings.append(
            "token map: embeddings are tied, and SGLang's Qwen3.5 class then keeps the whole LM "
            "head while it still translates ids: drafts are wrong, as its source reads. Look at "
            "the acceptance with and without"
        )
    plan.notes.append(
        "token map: SGLang turns its fused path for chains of drafts off; measure with and without"
    )


def _has_local_modules(plan: Plan) -> bool:
    """Whether some of Inkling's modules see a window only; SGLang's own config has it flat."""
    config = Config(plan.report.config)
    return bool(config.at("mtp_config.local_layer_ids") or config.get("mtp_local_layer_ids"))


def _is_multi_layer(plan: Plan) -> bool:
    return plan.family_name in _MULTI_LAYER


def _adaptive(plan: Plan) -> dict[str, str]:
    """Flags and file for K at run time."""
    options = plan.options
    if not (options.adaptive or plan.schedule):
        return {}
    option = next(
        name for name in ("adaptive", "speculate_off_above", "schedule") if getattr(options, name)
    )
    for bad, why in (
        (options.draft_top_k > 1, "changes K for chains only, not with --draft-top-k"),
        (_is_multi_layer(plan), "cannot change K for several modules"),
        (_uses_dp_attention(options), "cannot change K with data-parallel attention"),
    ):
        if bad:
            plan.refuse(option, why, "Drop it, or set --max-running-requests lower.")
    instead = "Upgrade, or lower --max-running-requests."
    if options.adaptive:
        plan.require("0.5.11", "adaptive", instead)
        if plan.k not in (1, 3, 7):
            plan.refuse("adaptive", "moves between 1, 3 and 7 drafts", "Use --speculate 3.")
        plan.add("--speculative-adaptive", True)
        return {}
    plan.require("0.5.14" if 0 in plan.schedule.values() else "0.5.13", option, instead)
    slots = {str(start): {"candidate_steps": [k]} for start, k in plan.schedule.items()}
    plan.add("--speculative-adaptive", True)
    plan.add("--speculative-adaptive-config", ADAPTIVE_FILE)
    return {ADAPTIVE_FILE: json.dumps(slots) + "\n"}


def _uses_dp_attention(options: LaunchOptions) -> bool:
    """Replicas that share their experts are one server with data-parallel attention."""
    return options.data_parallel > 1 and options.expert_parallel > 1


def _placement(plan: Plan) -> None:
    options = plan.options
    plan.refuse_given("log_dir", why="logs to the terminal", instead="Redirect its output.")
    if options.pipeline_parallel > 1 and plan.k and not _is_staged_prefill(plan):
        plan.refuse(
            "pipeline_parallel", "asserts that there is none with speculation, but on prefill "
            f"servers from {_STAGED_PREFILL}", "Use tensor parallel, or --speculate 0.",
        )  # fmt: skip
    plan.add("--host", options.host)
    plan.add("--port", options.port)
    plan.add("--device", options.device)
    plan.add("--served-model-name", options.served_model_name)
    size = options.tensor_parallel
    if _uses_dp_attention(options):
        size *= options.data_parallel
        if plan.has(_ATTENTION_SIZE):
            plan.add("--attn-dp-size", options.data_parallel)
        else:
            plan.add("--enable-dp-attention", True)
        plan.notes.append("shared experts: SGLang counts the replicas inside --tp-size")
    plan.add("--tp-size", size if size > 1 else None)
    if not (_uses_dp_attention(options) and plan.has(_ATTENTION_SIZE)):
        plan.add("--dp-size", options.data_parallel if options.data_parallel > 1 else None)
    plan.add("--pp-size", options.pipeline_parallel if options.pipeline_parallel > 1 else None)
    if options.expert_parallel > 1:
        if not plan.has("0.5.1"):
            plan.add("--enable-ep-moe", True)
        plan.add("--ep-size", options.expert_parallel)
    if options.num_nodes > 1:
        if not options.master_addr:
            plan.refuse("num_nodes", "needs the address of machine 0", "Add --master-addr.")
        plan.add("--nnodes", options.num_nodes)
        plan.add("--node-rank", options.node_rank)
        plan.add("--dist-init-addr", options.master_addr)
    elif options.master_addr:
        plan.refuse("master_addr", "has no use for it on one machine", "Add --num-nodes.")


def _is_staged_prefill(plan: Plan) -> bool:
    return plan.options.disaggregation == "prefill" and plan.has(_STAGED_PREFILL)


def _limits(plan: Plan) -> None:
    options = plan.options
    plan.add("--dtype", options.dtype)
    plan.add("--trust-remote-code", plan.trusts_code)
    if plan.k and plan.has("0.5.7") and _is_plain_head_of_quantized(plan):
        plan.add("--speculative-draft-model-quantization", "unquant")
    plan.add("--mem-fraction-static", options.memory_fraction)
    running = options.max_running_requests
    if running is None and plan.k:
        running = plan.running_requests = DEFAULT_RUNNING_REQUESTS
        plan.notes.append(
            f"--max-running-requests {running}: with speculation SGLang would silently make it 48 "
            "(sgl-project/sglang#34290); lower it if memory runs out"
        )
    plan.add("--max-running-requests", running)
    plan.add("--context-length", options.max_model_len)
    plan.add("--max-prefill-tokens", options.max_batched_tokens)
    graphs = "--cuda-graph-max-bs-decode" if plan.has("0.5.14") else "--cuda-graph-max-bs"
    plan.add(graphs, options.cuda_graph_batch)
    if options.chunked_prefill == "off":
        plan.add("--chunked-prefill-size", -1)
    elif options.chunked_prefill:
        size = _CHUNK if options.chunked_prefill == "on" else options.chunked_prefill
        plan.add("--chunked-prefill-size", size)
        plan.notes.append("prefill chunks are not mixed with decoding while speculation is on")


def _caches(plan: Plan) -> None:
    options = plan.options
    plan.add("--disable-radix-cache", options.prefix_caching == "off")
    if options.prefix_caching == "on":
        plan.notes.append("prefix caching is on by default: no flag needed")
    if options.kv_offload_gb is not None:
        # The pool is per rank in SGLang, and whole gigabytes.
        per_rank = max(1, ceil(options.kv_offload_gb / options.num_devices))
        plan.add("--enable-hierarchical-cache", True)
        plan.add("--hicache-size", per_rank)
        plan.notes.append(f"{per_rank} GB of host memory on each of {options.num_devices} ranks")
    if options.disaggregation:
        plan.add("--disaggregation-mode", options.disaggregation)
        if plan.k:
            plan.require("0.4.8", "disaggregation", "Upgrade, or --speculate 0.")
            plan.notes.append(
                "both servers need the speculative flags: prefill fills the head's KV and sends it "
                "with the last hidden state; the number of steps may differ"
            )


def _is_plain_head_of_quantized(plan: Plan) -> bool:
    """SGLang would build the head quantised like the trunk and drop weights that are not."""
    head = plan.report.head if plan.head is None else plan.head
    return bool(plan.report.trunk.quantization) and not head.is_quantized
