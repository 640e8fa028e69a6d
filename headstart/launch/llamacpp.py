"""llama.cpp: `llama-server` with a head inside its GGUF file, or in one of its own."""

from __future__ import annotations

from headstart.families.versions import MAIN
from headstart.heads.inspection import Report
from headstart.launch.command import EngineCommand, Process, as_word
from headstart.launch.options import LaunchOptions
from headstart.launch.plan import Plan
from headstart.launch.planning import make_plan
from headstart.launch.versions import NEWEST

_MIB_PER_GB = 1024


def build(report: Report, options: LaunchOptions, version: str) -> EngineCommand:
    """The `llama-server` command of that build, or of a release such as 0.5.0."""
    # Releases are counted apart, since August 2026; all are newer than any build named here.
    plan = make_plan("llamacpp", report, options, MAIN if "." in version else version)
    _speculation(plan)
    _placement(plan)
    _limits(plan)
    program = ("llama-server", "--model", as_word(report.path))
    return plan.command(Process((*program, *plan.args, *options.extra_args)))


def _speculation(plan: Plan) -> None:
    options = plan.options
    whole = "drafts over the whole vocabulary"
    plan.refuse_given("draft_vocab", "token_map", why=whole, instead="vLLM and SGLang take one.")
    plan.refuse_given(
        "schedule", "speculate_off_above", "adaptive",
        why="drafts as much whatever the load",
        instead="Its --spec-draft-p-min, given with --extra, ends drafts that it doubts.",
    )  # fmt: skip
    if options.draft_top_k > 1:
        plan.refuse("draft_top_k", "drafts one chain with MTP heads", "Leave it at 1.")
    if plan.k == 0:
        return
    plan.add("--spec-type", "draft-mtp")
    plan.add("--spec-draft-n-max", plan.k)
    plan.add("--metrics", True)  # whether drafts are accepted is seen there
    if options.head_path is not None:
        plan.add("--spec-draft-model", options.head_path)
    if 1 < plan.num_modules < plan.k:
        plan.warnings.append(
            f"llama.cpp drafts no more than one token per module where there are several: "
            f"{plan.num_modules}, not {plan.k}"
        )
    if not plan.has(NEWEST["llamacpp"]):
        plan.warnings.append(
            f"the names of these flags were read in {NEWEST['llamacpp']}; look at `llama-server "
            "--help` where an older build refuses one"
        )


def _placement(plan: Plan) -> None:
    options = plan.options
    plan.refuse_given(
        "tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel",
        why="spreads layers over the devices that it finds",
        instead="Leave it at 1; --split-mode and --tensor-split go through --extra.",
    )  # fmt: skip
    plan.refuse_given(
        "num_nodes", "node_rank", "master_addr", "disaggregation",
        why="is launched on one machine here",
        instead="Leave it out.",
    )  # fmt: skip
    plan.refuse_given(
        "docker", why="has one image for each kind of device", instead="Choose one by hand."
    )
    plan.refuse_given("log_dir", why="logs to the terminal", instead="Redirect its output.")
    plan.add("--host", options.host)
    plan.add("--port", options.port)
    plan.add("--alias", options.served_model_name)
    plan.add("--device", options.device)


def _limits(plan: Plan) -> None:
    options = plan.options
    plan.refuse_given(
        "dtype", why="computes with the types of the file", instead="Quantise the file instead."
    )
    plan.refuse_given(
        "memory_fraction", "cuda_graph_batch",
        why="takes memory for the context that it is given",
        instead="Use --max-model-len and --max-running-requests.",
    )  # fmt: skip
    plan.refuse_given(
        "trust_remote_code", why="runs no code of a checkpoint", instead="Leave it out."
    )
    plan.add("--parallel", options.max_running_requests)
    if options.max_model_len is not None:
        # One context is shared out among all requests.
        plan.add("--ctx-size", options.max_model_len * (options.max_running_requests or 1))
    plan.add("--batch-size", options.max_batched_tokens)
    if options.chunked_prefill == "off":
        plan.refuse("chunked_prefill", "always reads prompts in pieces", "Leave it out.")
    if options.chunked_prefill.isdigit():
        plan.add("--ubatch-size", options.chunked_prefill)
    if options.prefix_caching:
        plan.add("--cache-prompt" if options.prefix_caching == "on" else "--no-cache-prompt", True)
    if options.kv_offload_gb is not None:
        plan.add("--cache-ram", round(options.kv_offload_gb * _MIB_PER_GB))
