"""xLLM: one process per device, and the head as a draft checkpoint of its own.

`--nnodes` counts devices over all machines, not machines; tensor parallel is what data parallel
leaves of them. Device, port, rank and log differ per process: the script loops over them.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from headstart.errors import ConfigError
from headstart.heads.inspection import Report
from headstart.launch.command import EngineCommand, Preparation, Process, as_word, continued
from headstart.launch.options import LAST_PORT, LaunchOptions
from headstart.launch.plan import Plan
from headstart.launch.planning import make_plan

_MASTER = "127.0.0.1:19888"
_LOG_DIR = Path("log")


def build(report: Report, options: LaunchOptions, version: str) -> EngineCommand:
    """The script that starts xLLM of that version on this machine's devices."""
    plan = make_plan("xllm", report, options, version)
    for name, (why, instead) in _REFUSED.items():
        plan.refuse_given(name, why=why, instead=instead)
    plan.add("--model", report.path)
    preparation = _speculation(plan)
    _placement(plan)
    _limits(plan)
    common = ("xllm", *plan.args, *options.extra_args)
    count = options.num_devices // options.num_nodes
    if options.port + count - 1 > LAST_PORT:
        raise ConfigError(
            f"--port is {options.port}, and xLLM takes {count} ports from there up; expected at "
            f"most {LAST_PORT - count + 1}."
        )
    log_dir = options.log_dir or _LOG_DIR
    first = _first_rank(options)
    processes = [
        Process(
            (*common, *_own_args(plan, str(i), options.port + i, first + i)),
            log_dir / f"node_{i}.log",
        )
        for i in range(count)
    ]
    script = _script(plan, common, count, log_dir, preparation)
    return plan.command(*processes, script=script, preparation=preparation)


# option -> why not, and what instead
_REFUSED = {
    "speculate_off_above": ("has a fixed K", "Lower --max-running-requests."),
    "schedule": ("has a fixed K", "Use --speculate."),
    "adaptive": ("has a fixed K", "Use --speculate."),
    "draft_top_k": ("drafts one chain with MTP", "Leave it at 1."),
    "draft_vocab": ("drafts over the whole vocabulary", "vLLM and SGLang take one."),
    "token_map": ("drafts over the whole vocabulary", "vLLM and SGLang take one."),
    "pipeline_parallel": ("has no pipeline parallel", "Use --tensor-parallel."),
    "max_model_len": ("takes it from config.json", "Set max_position_embeddings there."),
    "dtype": ("takes it from config.json", "Set torch_dtype there."),
    "trust_remote_code": ("runs no Python code of a checkpoint", "Leave it out."),
    "kv_offload_gb": (
        "sizes host memory by a factor of device blocks, not in GB",
        'Use --extra "--host_blocks_factor=2".',
    ),
    "docker": (
        "has images by hardware and date only",
        "Start one of them and run the script inside.",
    ),
}


def _speculation(plan: Plan) -> Preparation | None:
    """The flags for drafting; xLLM needs the head as a checkpoint of its own, made if absent."""
    if plan.k == 0:
        return None
    preparation = None
    head = plan.options.head_path
    if head is None:
        head = plan.report.path.with_name(plan.report.path.name + "-mtp")
        model, out = as_word(plan.report.path), as_word(head)
        words = ("headstart", "export", model, "--format", "xllm", "--out", out)
        preparation = Preparation(head, words)
        plan.notes.append(
            f"xLLM needs the head as a draft checkpoint: {head} is exported first unless it exists"
        )
    plan.add("--draft_model", head)
    if plan.has("0.9.0"):
        plan.add("--speculative_algorithm", "MTP")
    plan.add("--num_speculative_tokens", plan.k)
    return preparation


def _placement(plan: Plan) -> None:
    options = plan.options
    if options.num_nodes > 1 and not options.master_addr:
        plan.refuse("num_nodes", "needs the address of machine 0", "Add --master-addr.")
    if options.device and plan.has("0.10.0"):
        plan.refuse("device", "takes the kind of device from its build", "Leave it out.")
    plan.add("--host", options.host)
    plan.add("--model_id", options.served_model_name)
    plan.add("--nnodes", options.num_devices)
    plan.add("--master_node_addr", options.master_addr or _MASTER)
    plan.add("--dp_size", options.data_parallel if options.data_parallel > 1 else None)
    plan.add("--ep_size", options.expert_parallel if options.expert_parallel > 1 else None)
    if options.disaggregation:
        plan.args += ["--enable_disagg_pd=true", "--instance_role", options.disaggregation.upper()]
        plan.warnings.append(
            'prefill and decode servers find each other through xllm_service: add --extra "'
            '--etcd_addr=HOST:PORT", and give both the same head'
        )


def _limits(plan: Plan) -> None:
    options = plan.options
    plan.add("--max_memory_utilization", options.memory_fraction)
    plan.add("--max_seqs_per_batch", options.max_running_requests)
    plan.add("--max_tokens_per_batch", options.max_batched_tokens)
    if options.cuda_graph_batch is not None:
        plan.require("0.9.0", "cuda_graph_batch", "Upgrade, or leave graphs off.")
        plan.add("--enable_graph=true", True)
        # Graphs are sized in tokens, and a request that drafts brings K + 1 of them.
        plan.add("--max_tokens_for_graph_mode", options.cuda_graph_batch * (plan.k + 1))
    prefix, chunked = options.prefix_caching, options.chunked_prefill
    if plan.k:
        # The documented MTP launch turns both off, and some models stop with an error otherwise.
        prefix, chunked = prefix or "off", chunked or "off"
    if prefix:
        plan.add(f"--enable_prefix_cache={_truth(prefix)}", True)
    if chunked:
        plan.add(f"--enable_chunked_prefill={_truth(chunked)}", True)
    if options.chunked_prefill.isdigit():
        plan.add("--max_tokens_per_chunk_for_prefill", options.chunked_prefill)
    if plan.k and (prefix, chunked) != ("off", "off"):
        plan.warnings.append(
            "prefix cache and chunked prefill with MTP: newer builds only, and DeepSeek-V3 on "
            "devices other than NPUs refuses both"
        )


def _truth(switch: str) -> str:
    return "false" if switch == "off" else "true"


def _first_rank(options: LaunchOptions) -> int:
    return options.node_rank * (options.num_devices // options.num_nodes)


def _own_args(plan: Plan, index: str, port: object, rank: object) -> tuple[str, ...]:
    """What differs between processes; the script passes shell expressions."""
    if plan.has("0.10.0"):
        where = ["--device_id", index]
    else:
        device = f"{plan.options.device or 'npu'}:{index}"
        where = ["--devices", device] + (["--draft_devices", device] if plan.k else [])
    return (*where, "--port", str(port), "--node_rank", str(rank))


def _expanded(value: str) -> str:
    """Double quotes around the shell expression alone: a device before it is the user's text."""
    device = value.removesuffix("$i")
    if device == value:
        return f'"{value}"'  # a sum of numbers
    return f'{shlex.quote(device) if device else ""}"$i"'


def _script(
    plan: Plan,
    common: tuple[str, ...],
    count: int,
    log_dir: Path,
    preparation: Preparation | None,
) -> str:
    first = _first_rank(plan.options)
    own = _own_args(plan, "$i", f"$(({plan.options.port} + i))", f"$(({first} + i))")
    expressions = [f"{flag} {_expanded(v)}" for flag, v in zip(own[::2], own[1::2], strict=True)]
    folder = shlex.quote(str(log_dir))
    command = " \\\n    ".join([continued(common, indent="    "), *expressions])
    first_line = f"{preparation.shell()}\n" if preparation else ""
    return f"""\
#!/bin/bash
{first_line}# One xLLM process per device; all stop when one stops.
mkdir -p -- {folder}
pids=()
trap 'kill "${{pids[@]}}" 2>/dev/null' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
for (( i = 0; i < {count}; i++ )); do
  {command} \\
    > {folder}/node_$i.log 2>&1 &
  pids+=("$!")
done
wait -n
"""
