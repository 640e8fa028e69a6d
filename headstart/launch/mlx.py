"""MLX: mlx-vlm's server, with a head in a drafter folder or inside the model.

Of the servers that run on MLX it is the one whose flags were tried (0.7.10, on a CPU).
"""

from __future__ import annotations

from headstart.errors import LaunchError
from headstart.heads.detection import quoted
from headstart.heads.inspection import Report
from headstart.launch.command import EngineCommand, Process, as_word
from headstart.launch.options import LaunchOptions
from headstart.launch.plan import Plan
from headstart.launch.planning import make_plan


def build(report: Report, options: LaunchOptions, version: str) -> EngineCommand:
    """The `mlx_vlm.server` command."""
    plan = make_plan("mlx", report, options, version)
    _speculation(plan)
    _refuse(plan)
    plan.add("--host", options.host)
    plan.add("--port", options.port)
    plan.add("--max-num-seqs", options.max_running_requests)
    plan.add("--max-kv-size", options.max_model_len)
    plan.add("--trust-remote-code", options.trust_remote_code)
    if options.chunked_prefill.isdigit():
        plan.add("--prefill-step-size", options.chunked_prefill)
    program = ("python", "-m", "mlx_vlm.server", "--model", as_word(report.path))
    return plan.command(Process((*program, *plan.args, *options.extra_args)))


def _speculation(plan: Plan) -> None:
    if plan.k == 0:
        return
    folder = plan.options.head_path or _inside(plan)
    plan.add("--draft-model", folder)
    plan.add("--draft-kind", "mtp")
    plan.add("--draft-block-size", plan.k + 1)  # the token that is certain counts, too


def _inside(plan: Plan) -> object:
    """The model itself, where mlx-vlm finds a head in it: `mtp.*` in any of its own files."""
    report = plan.report
    is_below = any("/" in name for name in report.head.outside)
    if not report.head.root and not is_below:
        return report.path
    raise LaunchError(
        f"{report.path} keeps its head where mlx-vlm does not look "
        f"({report.facts.get('head in', '')}). Make a drafter folder: `headstart export "
        f"{quoted(report.path)} --format mlx --out DIR`, and launch with --head DIR."
    )


def _refuse(plan: Plan) -> None:
    plan.refuse_given(
        "draft_vocab",
        "token_map",
        why="drafts over the whole vocabulary",
        instead="vLLM and SGLang take one.",
    )
    plan.refuse_given(
        "schedule", "speculate_off_above", "adaptive", "draft_top_k",
        why="drafts one chain, whatever the load",
        instead="Leave it out.",
    )  # fmt: skip
    plan.refuse_given(
        "tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel", "num_nodes",
        "node_rank", "master_addr", "disaggregation",
        why="is launched on one machine here",
        instead="Leave it out.",
    )  # fmt: skip
    plan.refuse_given(
        "dtype", "device", "memory_fraction", "cuda_graph_batch", "max_batched_tokens",
        why="has no such setting",
        instead="Leave it out; further flags go through --extra.",
    )  # fmt: skip
    plan.refuse_given(
        "prefix_caching", "kv_offload_gb", "served_model_name",
        why="has no such setting as far as is known here",
        instead="Leave it out.",
    )  # fmt: skip
    plan.refuse_given("docker", why="runs on Apple machines", instead="Leave it out.")
    plan.refuse_given("log_dir", why="logs to the terminal", instead="Redirect its output.")
    if plan.options.chunked_prefill in ("on", "off"):
        plan.refuse(
            "chunked_prefill", "always reads prompts in pieces", "Give the size of a piece."
        )
