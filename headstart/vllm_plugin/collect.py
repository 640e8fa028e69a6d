"""A worker that keeps target states and accepted text of what vLLM serves with an MTP head.

`--worker-cls headstart.vllm_plugin.collect.Worker`, and `collect` among the plugin's settings. An
answer is copied when vLLM says that it has ended, before the step that may give its KV blocks to
another; a thread writes it (collected.py). The last rounds of an answer are left out: what of them
was accepted is not known here.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from headstart.errors import ConfigError
from headstart.families.registry import PLAIN_TRUNKS
from headstart.vllm_plugin.collected import DEFAULT_BYTES, Collected, Made, StateKind, Writing
from headstart.vllm_plugin.followed import Followed, Requests
from headstart.vllm_plugin.settings import settings_of
from headstart.vllm_plugin.state_table import StateTable, open_table
from headstart.vllm_plugin.swap import HeadSwap, draft_of

log = logging.getLogger("vllm.headstart")
_ROUNDS = 2  # of which nothing is taken at an answer's end: two are under way at once
_LEAST = 8  # tokens of an answer that are worth a file


def __getattr__(name: str) -> type:
    if name != "Worker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: type = globals().setdefault(name, _worker_class())
    return found


class Collector:
    """What one worker does at each step."""

    def __init__(
        self, table: StateTable, group: int, block_size: int, drafts: int, out: Writing,
        kind: StateKind | None = None,
    ):  # fmt: skip
        self.out, self._kind = out, kind
        self._table, self._block_size = table, block_size
        self._requests = Requests(group)
        self._margin = _ROUNDS * (drafts + 1)

    def step(self, scheduled: Any) -> None:
        """Before vLLM runs what was scheduled."""
        for request in self._requests.finished(scheduled):
            self._keep(request)
        self._requests.follow(scheduled)

    def _keep(self, request: Followed) -> None:
        count = request.num_computed - self._margin
        if count - len(request.prompt) < _LEAST or not len(self._table.states):
            return
        slots = torch.tensor(request.slots(count, self._block_size))
        num_bytes = self._table.num_bytes(len(slots))
        if not self.out.has_room(num_bytes):
            self.out.leave_out()
            return
        copies = [_to_cpu(part) for part in self._table.rows(slots)]
        event = None
        if self._table.states.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self.out.add(_when_copied(request.prompt, copies, event, self._kind), num_bytes)


def _to_cpu(part: torch.Tensor) -> torch.Tensor:
    if not part.is_cuda:
        return part
    target = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
    return target.copy_(part, non_blocking=True)


def _when_copied(
    prompt: list[int], copies: list[torch.Tensor], event: Any, kind: StateKind | None
) -> Made:
    def made() -> Collected | None:
        if event is not None:
            event.synchronize()
        states, following, positions = copies
        return joined(prompt, states, following, positions, kind)

    return made


def joined(
    prompt: list[int], states: torch.Tensor, following: torch.Tensor, positions: torch.Tensor,
    kind: StateKind | None = None,
) -> Collected | None:  # fmt: skip
    """The answer whose slots were read; None where they hold anything else."""
    count = len(states)
    ids = torch.cat([torch.tensor(prompt[:1], dtype=torch.int32), following[:-1]])
    known = torch.tensor(prompt[:count], dtype=torch.int32)
    is_whole = torch.equal(positions, torch.arange(count, dtype=positions.dtype))
    if not is_whole or not torch.equal(ids[: len(known)], known):
        return None
    return Collected(ids, states, len(prompt), kind)


def collector_of(worker: Any, kv_cache_config: Any) -> Collector | None:
    """None on ranks whose states are another rank's, too."""
    settings = settings_of(worker.vllm_config)
    if settings.collect is None:
        raise ConfigError(
            "the worker collects, and no folder was named: add `collect` to the plugin's settings "
            "(docs/vllm.md)."
        )
    draft = draft_of(worker.model_runner)
    if not hasattr(draft, "headstart_table"):
        raise ConfigError(
            f"vLLM drafts with {type(draft).__name__}, which the plugin does not know; its states "
            "cannot be collected. Serve without `collect`."
        )
    group, size = open_table(draft, kv_cache_config)
    if worker.rank:
        return None
    drafts = int(worker.vllm_config.speculative_config.num_speculative_tokens)
    log.info("headstart: answers and their states are collected in %s", settings.collect)
    out = Writing(settings.collect, settings.collect_bytes or DEFAULT_BYTES)
    return Collector(
        draft.headstart_table, group, size, drafts, out, state_kind(worker.vllm_config)
    )


def state_kind(vllm_config: Any) -> StateKind | None:
    """What a trunk gives to its drafts; None: what the tables of the head's family say of vLLM.

    Grafted heads of plain trunks are of family mimo, whose own trunk leaves the last norm out in
    vLLM. Classes of plain trunks do not.
    """
    is_plain = vllm_config.model_config.hf_text_config.model_type in PLAIN_TRUNKS
    return "after_final_norm" if is_plain else None


def _worker_class() -> type:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Stock
    else:
        from vllm.v1.worker.gpu_worker import Worker as Stock

    class Worker(Stock, HeadSwap):  # type: ignore[misc]
        _collector: Collector | None = None

        def initialize_from_config(self, kv_cache_config: Any) -> None:
            self._collector = collector_of(self, kv_cache_config)
            super().initialize_from_config(kv_cache_config)

        def execute_model(self, scheduler_output: Any) -> Any:
            if self._collector is not None:
                with torch.inference_mode():
                    self._collector.step(scheduler_output)
            return super().execute_model(scheduler_output)

        def headstart_collected(self) -> dict[str, int]:
            """Wait for the files of all answers so far; how many were written, and left out."""
            if self._collector is None:
                return {}
            out = self._collector.out
            out.wait()
            return {"written": out.num_written, "left_out": out.num_left_out}

    return Worker
