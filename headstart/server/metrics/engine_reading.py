"""What an engine has counted and how it stands, read from outside of its thread.

Nothing is locked: whole numbers and copies of lists are read at once, and what was accepted is
read before what was drafted, so a rate is never above 1. Two counters may be a step apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from headstart.engine.auto.policy import DecidedBy

if TYPE_CHECKING:
    from headstart.engine.engine import Engine

Series = tuple[str, tuple[str, ...]]  # a metric's name and the values of its labels
Values = dict[Series, float]

_REASONS = (*get_args(DecidedBy), "none")


def counters(engine: Engine) -> Values:
    """Everything that only grows while this engine lives."""
    stats, scheduler = engine.stats, engine.scheduler
    cached, computed = stats.cached_tokens, stats.prompt_tokens
    values: Values = {
        ("num_preemptions", ()): scheduler.num_preemptions,
        ("prefix_cache_hits", ()): cached,
        ("prefix_cache_queries", ()): cached + computed,
        ("external_prefix_cache_hits", ()): 0,
        ("external_prefix_cache_queries", ()): 0,
        ("prompt_tokens", ()): cached + computed,
        ("prompt_tokens_by_source", ("local_compute",)): computed,
        ("prompt_tokens_by_source", ("local_cache_hit",)): cached,
        ("prompt_tokens_cached", ()): cached,
        ("generation_tokens", ()): stats.output_tokens,
        ("decode_rounds", ()): stats.acceptance.rounds,
        ("trunk_seconds", ()): stats.trunk_seconds,
        ("draft_seconds", ()): stats.draft_seconds,
    }
    return values | _draft_counters(engine) if engine.policy is not None else values


def _draft_counters(engine: Engine) -> Values:
    acceptance = engine.stats.acceptance
    accepted, drafted = list(acceptance.accepted), list(acceptance.drafted)
    depths = range(max(len(drafted), engine.options.max_drafts))  # all there before the first round
    drafted += [0] * (len(depths) - len(drafted))
    accepted += [0] * (len(depths) - len(accepted))
    chosen = dict.fromkeys(range(len(depths) + 1), 0) | dict(engine.stats.chosen_drafts)
    values: Values = {
        ("spec_decode_num_drafts", ()): drafted[0] if drafted else 0,
        ("spec_decode_num_draft_tokens", ()): sum(drafted),
        ("spec_decode_num_accepted_tokens", ()): sum(accepted),
    }
    for depth in depths:
        position = (str(depth),)
        values["spec_decode_num_draft_tokens_per_pos", position] = drafted[depth]
        values["spec_decode_num_accepted_tokens_per_pos", position] = accepted[depth]
    for num_drafts, rounds in sorted(chosen.items()):
        values["spec_decode_chosen_drafts", (str(num_drafts),)] = rounds
    return values


def gauges(engine: Engine, num_queued: int) -> Values:
    """How the engine stands now; `num_queued` requests have not reached it yet."""
    scheduler, pool = engine.scheduler, engine.pool
    waiting, deferred = len(scheduler.waiting) + num_queued, scheduler.num_held_back
    config = (
        str(engine.options.block_size), str(pool.num_blocks),
        str(engine.options.prefix_caching), str(engine.model.dtype).removeprefix("torch."),
    )  # fmt: skip
    values: Values = {
        ("num_requests_running", ()): len(scheduler.running),
        ("num_requests_waiting", ()): waiting + deferred,
        ("num_requests_waiting_by_reason", ("capacity",)): waiting,
        ("num_requests_waiting_by_reason", ("deferred",)): deferred,
        ("kv_cache_usage_perc", ()): pool.num_used / pool.num_blocks,
        ("kv_cache_blocks", ("used",)): pool.num_used,
        ("kv_cache_blocks", ("cached",)): pool.num_cached,
        ("kv_cache_blocks", ("free",)): max(0, pool.num_available - pool.num_cached),
        ("cache_config_info", config): 1,
        ("engine_sleep_state", ("awake",)): 1,
    }
    speculation = engine.policy
    reason = speculation.decided_by if speculation is not None else "none"
    values |= {("spec_decode_reason", (name,)): float(name == reason) for name in _REASONS}
    if speculation is not None:
        if speculation.expected_speedup is not None:
            values["spec_decode_expected_speedup", ()] = speculation.expected_speedup
        batch = max(1, len(scheduler.running))
        for drafts in range(engine.options.max_drafts + 1):
            seconds = speculation.round_seconds(batch, drafts)
            if seconds is not None:
                values["round_cost_seconds", (str(drafts),)] = seconds
    return values
