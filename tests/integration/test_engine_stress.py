"""Random use: requests come, flood, share beginnings and leave, with hardly any memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.engine_runs import VOCAB, ids_of, run, soft, start
from support.long_runs import IS_LONG, unless_long
from support.tiny_fixture import Tiny
from test_engine_cached_states import compare

from headstart.engine.engine import Engine
from headstart.engine.output import Completion
from headstart.sampling.params import SamplingParams

_DRAW = random.Random(4)
STEMS = [[_DRAW.randrange(2, VOCAB) for _ in range(length)] for length in (2, 6, 11, 17)]
STEMS.append(STEMS[3][:9] + STEMS[2])
Asked = tuple[list[int], SamplingParams]
Expect = Callable[[list[Asked]], list[list[int]]]


class Traffic(RuleBasedStateMachine):
    """Every answer is compared with what plain decoding says to the same prompt and seed."""

    def __init__(self, folder: Path, expect: Expect, seen: dict[str, int], **options: Any):
        super().__init__()
        self._folder, self._expect, self._seen = folder, expect, seen
        self._options = options
        self._open: dict[str, Asked] = {}
        self._ended: list[tuple[Asked, Completion]] = []
        self._texts: list[list[int]] = []
        self._streamed: dict[str, list[int]] = {}

    @initialize(
        size=st.sampled_from([1, 3, 4, 16]), rows=st.sampled_from([5, 12, 60]),
        speculate=st.integers(1, 5), slots=st.sampled_from([48, 48, 60, 90]),
        caching=st.sampled_from([True, True, False]), running=st.sampled_from([2, 5, 64]),
    )  # fmt: skip
    def build(
        self, size: int, rows: int, speculate: int, slots: int, caching: bool, running: int
    ) -> None:
        self._settings = {"block_size": size, **self._options}
        self.engine: Engine = start(
            self._folder, speculate=speculate, max_batched_tokens=rows, slots=slots,
            prefix_caching=caching, max_running_requests=running, **self._settings,
        )  # fmt: skip

    @rule(
        stem=st.sampled_from(STEMS), tail=st.lists(st.integers(2, VOCAB - 1), max_size=6),
        tokens=st.integers(1, 14), heat=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 3),
        k=st.sampled_from([None, None, 0, 2]), priority=st.integers(0, 2),
    )  # fmt: skip
    def add(
        self, stem: list[int], tail: list[int], tokens: int, heat: float, seed: int,
        k: int | None, priority: int,
    ) -> None:  # fmt: skip
        params = SamplingParams(
            max_tokens=tokens, temperature=heat, seed=seed, speculate=k, ignore_eos=True
        )
        name = self.engine.add([*stem, *tail], params, priority=priority)
        self._open[name] = ([*stem, *tail], params)
        self._streamed[name] = []

    @rule(stem=st.sampled_from(STEMS), count=st.integers(3, 8))
    def flood(self, stem: list[int], count: int) -> None:
        for number in range(count):
            self.add(
                [*stem[:4], 40 + number, *stem[4:]], [2 + number], 14, 1.0, number % 4, None, 0
            )

    @precondition(lambda self: self._open)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        name = list(self._open)[which % len(self._open)]
        self.engine.abort(name)
        self._finish(name)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            for update in self.engine.step():
                self._streamed[update.request_id] += update.token_ids
                if update.finish_reason is not None:
                    self._finish(update.request_id)
            self.engine.scheduler.check()

    def _finish(self, name: str) -> None:
        asked = self._open.pop(name)  # a second answer would be a KeyError
        output = self.engine.collect(name).outputs[0]
        assert output.token_ids == self._streamed.pop(name)
        self._ended.append((asked, output))
        for origin in output.origins:
            self._seen[origin] = self._seen.get(origin, 0) + 1
        self._texts.append([*asked[0], *output.token_ids])

    def _compare_with_plain_decoding(self) -> None:
        every = self._expect([asked for asked, _ in self._ended])
        for (_, output), expected in zip(self._ended, every, strict=True):
            assert output.token_ids == expected[: len(output.token_ids)]
            if output.finish_reason != "abort":
                assert output.token_ids == expected

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()
            scheduler = self.engine.scheduler
            assert {r.group for r in [*scheduler.running, *scheduler.waiting]} == set(self._open)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step(1)
        assert not self._open, "requests that never end"
        self._compare_with_plain_decoding()
        assert self.engine.pool.num_used == 0
        assert len(self.engine._groups) == 0
        stats = self.engine.stats
        for name in ("preemptions", "cached_tokens", "aborted"):
            self._seen[name] = self._seen.get(name, 0) + getattr(stats, name)
        fresh = start(self._folder, speculate=1, **self._settings)
        self._seen["compared"] = self._seen.get("compared", 0) + compare(
            self.engine, fresh, self._texts[-8:]
        )


RUNS = unless_long(5, 20)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one module": ("mimo", {}, {"topology": None}),
    "sparse latent attention": ("deepseek_v32", {}, {}),
    # memory for few states and few blocks, whatever their number of slots: enough for the longest
    # request in blocks of one token
    "recurrent layers": ("qwen3_next", {}, {"kv_bytes": 180_000}),
}
if IS_LONG:
    MODELS["three chained with LM heads"] = ("step3p5", {}, {})
    several = {"num_nextn_predict_layers": 3}
    MODELS["three chained"] = ("mimo", several, {"topology": "chained"})
    MODELS["three parallel"] = ("mimo", several, {"topology": "parallel"})


@pytest.mark.parametrize(("family", "fields", "options"), MODELS.values(), ids=MODELS)
def test_random_traffic_keeps_the_books_the_text_and_the_cached_states(
    family: str, fields: dict[str, Any], options: dict[str, Any], tiny: Tiny
) -> None:
    folder = soft(tiny, family, **fields)
    plain = start(folder, speculate=0, slots=4000)
    answers: dict[Any, list[int]] = {}
    seen: dict[str, int] = {}

    def expect(every: list[Asked]) -> list[list[int]]:
        keys = [(tuple(prompt), params.seed, params.temperature) for prompt, params in every]
        new = [key for key in dict.fromkeys(keys) if key not in answers]
        longest = [
            SamplingParams(max_tokens=14, temperature=heat, seed=seed, ignore_eos=True)
            for _, seed, heat in new
        ]
        found = run(plain, [list(prompt) for prompt, *_ in new], longest)
        answers.update(zip(new, ids_of(found), strict=True))
        return [answers[key][: own.max_tokens] for key, (_, own) in zip(keys, every, strict=True)]

    run_state_machine_as_test(
        lambda: Traffic(folder, expect, seen, **options),
        settings=settings(
            max_examples=RUNS, stateful_step_count=14, deadline=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    lacking = {"accepted", "recovered", "bonus", "preemptions", "cached_tokens", "aborted"}
    assert not {name for name in lacking if not seen.get(name)}, seen
    assert seen["compared"] > 0
