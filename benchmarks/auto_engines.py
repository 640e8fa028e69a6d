"""The two engines of gpu_auto.py: with `auto` and without a head, at one rate after another."""

from __future__ import annotations

import argparse
import gc
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.engine.options import Speculate

AUTO, NO_HEAD = "auto", "no head"
_ROWS = 8192  # of the embedding, exchanged at a time


@dataclass(frozen=True)
class Played:
    """What one contender took for one set of prompts."""

    seconds: float
    chosen: dict[int, int]  # K -> how many rounds, counted for every request
    first_right: float | None  # share of first drafts that were right
    new_rounds: list[str]  # rounds that were compiled or captured meanwhile,
    new_rounds_seconds: float  # and how long that took
    gc_seconds: float  # in which Python's garbage collector had the host

    @property
    def notes(self) -> dict[str, Any]:
        """What a play's time holds besides rounds, for the results."""
        return {
            "seconds": self.seconds, "chosen": self.chosen, "new_rounds": self.new_rounds,
            "new_rounds_seconds": self.new_rounds_seconds, "gc_seconds": self.gc_seconds,
        }  # fmt: skip


class Collections:
    """Seconds that Python's garbage collector took so far."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


class EnginePair:
    """The two engines with one rate at a time."""

    def __init__(self, given: argparse.Namespace):
        from headstart.calibrate.calibrated import agreement_of
        from headstart.checkpoint.provenance import read_provenance

        self._given, self._model = given, Path(given.model)
        facts = read_provenance(self._model)
        self.rate: float = facts["rate"]
        self._tokens = range(2, facts["active"] + 2)
        self._following = agreement_of(self._model).following.tolist()
        self.seconds: dict[str, float] = {}  # of every part of the start
        self._collections = Collections()
        began = time.perf_counter()
        self._engines = {AUTO: self._start("auto")}
        self.seconds["start with a head"] = time.perf_counter() - began
        began = time.perf_counter()
        self._engines[NO_HEAD] = self._start(0)
        self.seconds["start without a head"] = time.perf_counter() - began
        began = time.perf_counter()
        self.captured = capture_all(self._engines[AUTO])
        self.seconds[f"capture of {self.captured} rounds more"] = time.perf_counter() - began

    def _start(self, speculate: Speculate) -> Any:
        from headstart.engine.engine import Engine

        given = self._given
        return Engine(
            self._model, speculate=speculate, device=given.device, kernels=given.kernels,
            max_running_requests=max(given.counts), prefix_caching=False,
            kv_bytes=int(given.kv_gib * 2**30), max_model_len=given.prompt + given.answer + 64,
        )  # fmt: skip

    def become(self, rate: float) -> None:
        """Be the checkpoint of another rate; what `auto` has learnt about this one is forgotten."""
        import torch

        from headstart.calibrate.agreement import make_agreement
        from headstart.checkpoint.provenance import read_provenance
        from headstart.engine.auto.rates import AcceptanceRates

        engine, facts = self._engines[AUTO], read_provenance(self._model)
        engine.policy.rates.overall = AcceptanceRates().overall
        if rate == self.rate:
            return
        vocab, hidden = engine.model.trunk.embed.shape
        agreement = make_agreement(
            vocab, hidden, rate=rate, seed=facts["seed"], active=facts["active"]
        )
        assert agreement.following.tolist() == self._following, "the trunk says something else"
        with torch.inference_mode():
            for start in range(0, vocab, _ROWS):
                stop = min(start + _ROWS, vocab)
                engine.model.trunk.embed[start:stop].copy_(agreement.embedding_rows(start, stop))
        self.rate = rate

    def answer(self, name: str, count: int, *, prompt: int, answer: int, seed: int) -> Played:
        """All prompts at once, by one contender; the text is checked."""
        from headstart.sampling.params import SamplingParams

        engine = self._engines[NO_HEAD if name == NO_HEAD else AUTO]
        draw = random.Random(seed)
        prompts = [draw.choices(self._tokens, k=prompt) for _ in range(count)]
        params = SamplingParams(
            temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False,
            speculate=None if name in (AUTO, NO_HEAD) else int(name),
        )  # fmt: skip
        rounds = dict(engine.stats.chosen_drafts)
        shapes, collecting = new_seconds(engine), self._collections.seconds
        before = time.perf_counter()
        results = engine.generate(prompts, params)
        seconds = time.perf_counter() - before
        collecting = self._collections.seconds - collecting
        new = {k: s - shapes.get(k, 0.0) for k, s in new_seconds(engine).items()}
        for given, result in zip(prompts, results, strict=True):
            token, text = given[-1], result.outputs[0].token_ids
            for chosen in text:
                token = self._following[token]
                assert chosen == token, "the text is not the cycle's"
            assert len(text) == answer
        played = {k: n - rounds.get(k, 0) for k, n in engine.stats.chosen_drafts.items()}
        tried = sum(r.stats.acceptance.drafted[0] for r in results if r.stats.acceptance.drafted)
        right = sum(r.stats.acceptance.accepted[0] for r in results if r.stats.acceptance.drafted)
        return Played(
            seconds,
            {k: n for k, n in sorted(played.items()) if n},
            right / tried if tried else None,
            sorted(shape for shape, s in new.items() if s),
            sum(new.values()),
            collecting,
        )


def new_seconds(engine: Any) -> dict[str, float]:
    """What every shape of round took to compile and capture, by its name."""
    if engine.loop.rounds is None:
        return {}
    return {
        f"{shape.count} requests, K = {shape.num_drafts}, {shape.head_rows} head rows": seconds
        for shape, seconds in engine.loop.rounds._device.graphs.new_seconds.items()
    }


def capture_all(engine: Any) -> int:
    """Every round that may come, at every size: a capture would take as long as many rounds.

    An engine that has served for a while has captured them all.
    """
    import torch

    from headstart.backends.cuda.shapes import RoundShape

    if engine.loop.rounds is None or engine.model.device.type != "cuda":
        return 0
    captured, rounds = 0, engine.loop.rounds._device
    graphs, window = rounds.graphs, rounds.window
    with torch.inference_mode():
        for count in graphs.sizes():
            shapes = [RoundShape.usual(count, drafts) for drafts in rounds.menu]
            shapes += [RoundShape(count, drafts, window) for drafts in (0, 1)]
            for shape in shapes:
                captured += not graphs.is_captured(shape)
                while not graphs.is_captured(shape):
                    graphs.run(shape)
        torch.cuda.synchronize()
    return captured
