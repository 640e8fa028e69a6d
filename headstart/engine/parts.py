"""What an engine is made of: plain, or with fused kernels and captured rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headstart.assembly.build import Built
from headstart.assembly.forms import why_not_compiled
from headstart.engine.auto.blank_rounds import BlankPasses
from headstart.engine.auto.costs import MENU
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.auto.profile import profile_host_rounds
from headstart.engine.draft_weights import drafts_in_int8
from headstart.engine.drafter import Drafter
from headstart.engine.kv_cache import BlockPool
from headstart.engine.loop import Loop
from headstart.engine.memory import Memory, plan_memory, seat_drafts
from headstart.engine.options import EngineOptions
from headstart.engine.pauses import keep_pauses_short
from headstart.engine.runner import Runner
from headstart.engine.scheduler import Scheduler
from headstart.engine.state_plan import StatePlan
from headstart.engine.state_pool import StatePool
from headstart.errors import ConfigError
from headstart.vocab.draft_vocab import DraftVocab

_WIDEST_FP32 = 128  # of heads: wider ones do not fit into a GPU's shared memory


@dataclass(frozen=True)
class Parts:
    """Everything behind an engine's requests; `drafter` and `speculation` where it has a head."""

    memory: Memory
    scheduler: Scheduler
    runner: Runner
    drafter: Drafter | None
    speculation: DraftPolicy | None
    loop: Loop


def make_parts(built: Built, options: EngineOptions, vocabs: Mapping[str, DraftVocab]) -> Parts:
    """Memory first, then what computes, then who decides; all is warm and timed at the end."""
    fused = uses_kernels(built, options)
    memory = plan_memory(built, options, fused=fused)
    scheduler = make_scheduler(options, memory)
    runner = make_runner(built, options, memory, fused=fused)
    runner.drafts_in_int8 = drafts_in_int8(built, options, fused=fused)
    drafter = speculation = None
    if built.head is not None:
        for name, vocab in vocabs.items():
            runner.add_draft_vocab(name, vocab.ids)
        drafter = Drafter(runner)
        speculation = make_policy(built, options, memory, drafter, runner)
    loop = make_loop(built, options, scheduler, runner, drafter, speculation, fused=fused)
    return Parts(memory, scheduler, runner, drafter, speculation, loop)


def why_no_kernels(built: Built, options: EngineOptions) -> str | None:
    """What keeps a model from running through the kernels, or None."""
    from headstart.backends.cuda.forward import why_unsupported

    if built.dtype == torch.float64:
        return "numbers are float64"
    if built.dtype == torch.float32 and built.config.head_dim > _WIDEST_FP32:
        return f"numbers are float32 and heads of size {built.config.head_dim}"
    if options.weights == "int8":
        return "weights are int8"
    if options.weights == "fp8" and built.config.moe is not None:
        return f"{built.config.model_type} models have experts, which stay as they are stored"
    if options.exact and built.config.mla is not None:
        return f"{built.config.model_type} models have latent attention, whose kernels are inexact"
    if options.exact and built.config.delta is not None:
        return f"{built.config.model_type} models have recurrent layers, whose kernels are inexact"
    if built.head is not None and built.head.num_modules > 1:
        return f"the head has {built.head.num_modules} modules"
    heads = [built.head.config] if built.head is not None else []
    reasons = map(why_unsupported, [built.config, *heads])
    return next((reason for reason in reasons if reason is not None), None)


def uses_kernels(built: Built, options: EngineOptions) -> bool:
    if options.exact and options.kernels == "off" and built.device.type == "cuda":
        raise ConfigError(
            "exact and kernels off were both given on a GPU, where libraries choose their "
            "arithmetic by the number of rows. Leave one of them out, or use device cpu."
        )
    if options.kernels == "off" or (options.kernels == "auto" and built.device.type != "cuda"):
        return False
    try:
        reason = why_no_kernels(built, options)
    except ModuleNotFoundError:
        reason = "triton is not installed"
    if reason is not None and options.kernels == "on":
        raise ConfigError(f"kernels on was asked for and {reason}. Use kernels auto.")
    if reason is not None and options.exact:
        raise ConfigError(f"exact needs the kernels on a GPU and {reason}. Leave exact out.")
    if reason is not None and options.weights == "fp8":
        raise ConfigError(f"weights fp8 needs the kernels and {reason}. Use weights as-dtype.")
    return reason is None


def make_scheduler(options: EngineOptions, memory: Memory) -> Scheduler:
    caching, size = options.prefix_caching, options.block_size
    pool = BlockPool(memory.num_blocks, size, prefix_caching=caching)
    states = None
    if memory.num_states:
        states = StatePlan(StatePool(memory.num_states), size, prefix_caching=caching)
    return Scheduler(pool, options, states)


def make_runner(built: Built, options: EngineOptions, memory: Memory, *, fused: bool) -> Runner:
    kind = Runner
    if fused and options.exact:
        from headstart.engine.exact_runner import ExactRunner

        kind = ExactRunner
    elif fused:
        from headstart.engine.device_runner import DeviceRunner

        kind = DeviceRunner
    elif why_not_compiled(built.trunk, built.head, built.dtype) is None:
        from headstart.engine.cpu_runner import CpuRunner

        kind = CpuRunner
    return kind(
        built.trunk, built.head, num_blocks=memory.num_blocks, block_size=options.block_size,
        dtype=built.dtype, is_exact=options.exact and not fused, num_states=memory.num_states,
    )  # fmt: skip


def make_policy(
    built: Built, options: EngineOptions, memory: Memory, drafter: Drafter, runner: Runner
) -> DraftPolicy:
    if options.speculate != "auto":
        return DraftPolicy(options, None, built.max_len)
    passes = BlankPasses(
        runner, drafter, num_blocks=memory.num_blocks, max_rows=options.num_rows,
        one_by_one=options.exact,
    )  # fmt: skip
    with torch.inference_mode():  # before the first request: K/V memory is still scratch
        costs, greedy = profile_host_rounds(passes, max_batch=options.max_running_requests)
    return DraftPolicy(options, costs, built.max_len, greedy)


def make_loop(
    built: Built,
    options: EngineOptions,
    scheduler: Scheduler,
    runner: Runner,
    drafter: Drafter | None,
    speculation: DraftPolicy | None,
    *,
    fused: bool,
) -> Loop:
    parts = (options, scheduler, runner, drafter, speculation)
    if not fused:
        return Loop(*parts)
    from headstart.engine.device_loop import DeviceLoop
    from headstart.engine.device_runner import DeviceRunner
    from headstart.engine.seating import Seating

    assert isinstance(runner, DeviceRunner)
    vocabs = list(runner.draft_vocabs)
    draft_vocab = vocabs[0] if len(vocabs) == 1 else None
    seating = Seating.create(
        runner, scheduler, count=options.max_running_requests,
        max_drafts=seat_drafts(built, options),
        max_len=min(built.max_len, scheduler.pool.num_slots), draft_vocab=draft_vocab,
        menu=MENU if options.speculate == "auto" else (),
    )  # fmt: skip
    loop = DeviceLoop(*parts, seating=seating, draft_vocab=draft_vocab)
    if built.device.type == "cuda":
        loop.warm_up()
        keep_pauses_short(loop)
    return loop
