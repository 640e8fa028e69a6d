"""The whole comparison: engines are started, stages measured, results kept as they come."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from versus.measure import Sizes, Turns, first_tokens, long_prompts, speeds
from versus.plan import Group, Stage, most_requests
from versus.process import Failed, Worker, settings_of
from versus.quantized_page import told
from versus.report import write_json

_SPARE_TOKENS = 64  # of a request's length, beyond prompt and answer
_CACHES = {
    "headstart": ("TRITON_CACHE_DIR", "~/.triton/cache"),
    "vllm": ("VLLM_CACHE_ROOT", "~/.cache/vllm"),
}


class Bench:
    """One run; `document` is what is written after every row."""

    def __init__(self, given: argparse.Namespace, checkpoint: dict[str, Any], folder: Path):
        self._given, self._folder, self._began = given, folder, time.perf_counter()
        self.sizes = Sizes(
            given.prompt, given.answer, given.repeats, given.long, given.decoding, given.agree
        )
        self._checkpoint = checkpoint
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.document: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python3", *sys.argv]), "device": "", "engines": {},
            "checkpoint": {n: v for n, v in checkpoint.items() if n != "cycle"},
            "sizes": vars(self.sizes), "plan": given.plan, "starts": [], "rows": self.rows,
            "failures": self.failures, "notes": [], "page_cache": "assumed",
        }  # fmt: skip

    def run(self, groups: Sequence[Group]) -> None:
        """One K after another; with --start-all the engines of every K are there from the start."""
        engines, overlap = self._given.engines, self._given.overlap_start
        if not self._given.start_all:
            for group in groups:
                if not self._is_late(f"K = {group.drafts}"):
                    self._measure_all(group, self._start(group, engines, overlap=overlap))
            return
        launched = [self._launch(group, engines) for group in groups]
        try:
            ready = [
                self._await_all(group, own) for group, own in zip(groups, launched, strict=True)
            ]
            for group, workers in zip(groups, ready, strict=True):
                self._measure_all(group, workers)
        finally:
            for worker, _ in chain(*launched):
                worker.stop()

    def _measure_all(self, group: Group, workers: list[Worker]) -> None:
        """Every stage of one K, with the engines that are there; they are stopped at the end."""
        try:
            for stage in group.stages:
                workers = self._running(group, workers)
                if workers and not self._is_late(f"K = {group.drafts}, {stage}"):
                    workers = self._measure(group, stage, workers)
        finally:
            for worker in workers:
                worker.stop()

    def _running(self, group: Group, workers: list[Worker]) -> list[Worker]:
        """Workers that still run; those that ended are started again, where that is asked for."""
        ended = [worker.name for worker in workers if not worker.is_running]
        running = [worker for worker in workers if worker.is_running]
        if not self._given.restart or not ended:
            return running
        started = self._start(group, ended)
        return sorted([*running, *started], key=lambda own: self._given.engines.index(own.name))

    def _measure(self, group: Group, stage: Stage, workers: list[Worker]) -> list[Worker]:
        """Rows of one stage; returns the workers that the next one has."""
        own: dict[str, Any] = {}
        if stage.kind == "vocab":
            workers = self._with_draft_vocab(group, workers)
            own["draft_vocab"] = self._given.draft_vocab
        with self._timed(f"K = {group.drafts}, {stage}"):
            if stage.kind == "long":
                for decoding in self.sizes.decoding:
                    turns = Turns(workers)
                    found = long_prompts(turns, self.sizes, decoding)
                    self._keep(group, stage, turns, found, long=self.sizes.long, decoding=decoding)
                return workers
            turns = Turns(workers)
            if stage.kind == "first":
                own["prompt"] = stage.prompt or self.sizes.prompt
                found = first_tokens(turns, self.sizes, own["prompt"])
            elif stage.kind == "off":  # only ours can
                turns = Turns([worker for worker in workers if worker.name == "headstart"])
                found = speeds(turns, self.sizes, stage.requests, is_off=True)
            else:
                found = speeds(turns, self.sizes, stage.requests)
            self._keep(group, stage, turns, found, **own)
        return workers

    def _with_draft_vocab(self, group: Group, workers: Sequence[Worker]) -> list[Worker]:
        """Ours is started again: the GPU has no room for a third engine beside two full ones."""
        for worker in workers:
            if worker.name == "headstart":
                worker.stop()
        # Everything else as before, or the difference would not be the vocabulary's.
        started = self._start(group, ["headstart"], draft_vocab=self._given.draft_vocab)
        return [*started, *(worker for worker in workers if worker.name != "headstart")]

    def _start(
        self, group: Group, engines: Sequence[str], *, overlap: bool = False, draft_vocab: int = 0
    ) -> list[Worker]:
        """Engines one after another, each timed alone, unless they shall overlap."""
        if overlap:
            return self._await_all(group, self._launch(group, engines, draft_vocab))
        ready: list[Worker] = []
        for engine in engines:
            ((worker, has_cache),) = self._launch(group, [engine], draft_vocab)
            ready += [worker] if self._await(group, worker, has_cache, overlap=False) else []
        return ready

    def _launch(
        self, group: Group, engines: Sequence[str], draft_vocab: int = 0
    ) -> list[tuple[Worker, bool]]:
        """Processes that begin to start, and whether they find compiled code."""
        found = [_has_cache(engine) for engine in engines]  # before the first one writes any
        workers = [
            Worker(engine, self._settings(engine, group, draft_vocab), self._folder)
            for engine in engines
        ]
        return list(zip(workers, found, strict=True))

    def _await_all(self, group: Group, launched: Sequence[tuple[Worker, bool]]) -> list[Worker]:
        return [w for w, found in launched if self._await(group, w, found, overlap=True)]

    def _await(self, group: Group, worker: Worker, has_cache: bool, *, overlap: bool) -> bool:
        try:
            ready = worker.started()
        except Failed as failure:
            self._fail(f"K = {group.drafts}: {failure}")
            worker.stop()
            return False
        self.document["device"] = ready["device"]
        own = self.document["engines"].setdefault(worker.name, {})
        own |= {name: ready[name] for name in ("version", "torch", "python")}
        vocab = worker.settings["draft_vocab"]
        own[f"K = {group.drafts}{f', draft vocabulary {vocab}' if vocab else ''}"] = {
            name: ready[name] for name in ("options", "resolved", "notes") if name in ready
        }
        if worker.name == "vllm":
            own["kernels"] = told(worker.log)
        start = {
            "k": group.drafts, "engine": worker.name, "is_overlapped": overlap,
            "caches_found": has_cache, "draft_vocab": vocab, "kv_tokens": ready["kv_tokens"],
            **{name: ready[name] for name in ("start_seconds", "until_made_seconds")},
        }  # fmt: skip
        self.document["starts"].append(start)
        self._check_memory(group, worker.name, ready["kv_tokens"])
        how = " (overlapped)" if overlap else ""
        seconds = start["start_seconds"]
        self._say(f"K = {group.drafts}: {worker.name}'s first token after {seconds:.1f} s{how}")
        self.write()
        return True

    def _check_memory(self, group: Group, name: str, kv_tokens: int | None) -> None:
        """An engine that must let requests wait is not in its best configuration."""
        needed = most_requests(group, self.sizes.decoding) * (self.sizes.prompt + self.sizes.answer)
        if kv_tokens is not None and kv_tokens < needed:
            note = f"K = {group.drafts}: {name} has K/V memory for {kv_tokens} of {needed} tokens"
            self.document["notes"].append(note)
            self._say(f"NOTE {note}; raise --memory or --kv-gib")

    def _settings(self, engine: str, group: Group, draft_vocab: int) -> dict[str, Any]:
        given, sizes = self._given, self.sizes
        length = sizes.prompt + sizes.answer
        if any(stage.kind == "long" for stage in group.stages):
            length = max(length, sizes.long + sizes.answer)
        longest = max(stage.prompt or 0 for stage in group.stages)
        length = max(length, longest + sizes.answer)
        is_vllm = engine == "vllm"
        return {
            **settings_of(engine, given.vllm_python if is_vllm else None,
                          given.vllm_env if is_vllm else {}),
            "model": str(Path(given.model).resolve()), "drafts": group.drafts,
            "max_requests": most_requests(group, sizes.decoding),
            "max_model_len": length + _SPARE_TOKENS,
            "draft_vocab": draft_vocab, "kv_gib": given.kv_gib, "memory": given.memory,
            "patience": given.patience,
            "options": given.vllm_options if is_vllm else given.headstart_options,
            "cycle": str(self._checkpoint["cycle"]), "active": self._checkpoint["active"],
        }  # fmt: skip

    def _keep(
        self, group: Group, stage: Stage, turns: Turns, found: dict[str, Any], **own: Any
    ) -> None:
        for failure in turns.failures:
            self._fail(f"K = {group.drafts}, {stage}: {failure}")
        if not found:
            return
        row = {
            "k": group.drafts, "stage": stage.kind, "requests": stage.requests, **own,
            "engines": found,
        }  # fmt: skip
        self.rows.append(row)
        self._say(describe(row, self.rows))
        self.write()

    def write(self) -> None:
        self.document["elapsed_seconds"] = time.perf_counter() - self._began
        if self._given.out:
            write_json(self.document, self._given.out)

    def _is_late(self, what: str) -> bool:
        limit = self._given.time_limit
        if not limit or time.perf_counter() - self._began < limit:
            return False
        self._fail(f"{what}: not measured, {limit:.0f} s were over")
        return True

    def _fail(self, what: str) -> None:
        self.failures.append(what)
        self._say(f"FAILED {what}")
        self.write()

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._say(f"{what}: the stage took {time.perf_counter() - began:.1f} s")

    def _say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f} s] {text}", flush=True)


def describe(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """A row as one line for people."""
    head = f"K = {row['k']}, {row['stage']}"
    engines = row["engines"]
    if row["stage"] in ("first", "long"):
        key = f"{'long_' if row['stage'] == 'long' else ''}first_token_seconds"
        parts = [f"{name} {found[key]['value'] * 1e3:.1f} ms" for name, found in engines.items()]
        for name, found in engines.items():
            if "during.chunk_max_seconds" in found:
                gaps = [f"{found[f'during.chunk_{kind}_seconds']['value'] * 1e3:.1f}"
                        for kind in ("p50", "max")]  # fmt: skip
                parts.append(f"{name} gaps p50 {gaps[0]} max {gaps[1]} ms")
        beside = f" ({row['decoding']} decoding)" if row["stage"] == "long" else ""
        return f"{head}{beside}: first token {', '.join(parts)}"
    parts = [f"{name} {found['value']:.1f} tokens/s" for name, found in engines.items()]
    if len(engines) == 2:
        parts.append(f"{engines['headstart']['value'] / engines['vllm']['value']:.3f}x vLLM")
    if row["stage"] == "vocab":
        without = [
            other["engines"]["headstart"]["value"] for other in rows
            if (other["k"], other["stage"], other["requests"]) == (row["k"], "answer", 1)
            and "headstart" in other["engines"]
        ]  # fmt: skip
        if without and "headstart" in engines:
            parts.append(f"{engines['headstart']['value'] / without[-1]:.3f}x ours without it")
    return f"{head}, {row['requests']} requests: {', '.join(parts)}"


def _has_cache(engine: str) -> bool:
    """Whether compiled code of an earlier start may be there."""
    variable, default = _CACHES[engine]
    folder = Path(os.environ.get(variable) or os.path.expanduser(default))
    return folder.is_dir() and any(folder.iterdir())
