"""`headstart score`: what is printed is what the engine would count; bad data is refused."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import headstart
from support.copying_runs import assert_copies_are_alive, copied, prompts_of
from support.engine_records import records
from support.engine_runs import (
    VOCAB,
    assert_head_is_alive,
    checkpoint,
    make_prompts,
    run,
    soft,
    start,
)
from support.head_edits import edited, export
from support.tiny_fixture import Tiny

from headstart.backends.base import Backend, DeviceBytes
from headstart.checkpoint.reader import Checkpoint
from headstart.cli import score as command
from headstart.data.dataset import Header, write_dataset
from headstart.data.fingerprints import template_sha, tokenizer_sha
from headstart.data.records import Record
from headstart.engine import core, memory
from headstart.engine.auto import host_times, profile, served_costs, timed_rounds
from headstart.engine.auto.costs import RoundCosts
from headstart.engine.auto.host_times import HostTimes
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.auto.served_costs import CapturedCosts, EngineCosts, RoundTimes
from headstart.engine.loop import Loop
from headstart.engine.options import VERIFIED
from headstart.errors import ConfigError, DataError, EngineError, HeadNotFound
from headstart.heads import predicted
from headstart.heads.digest import trunk_digest
from headstart.predict import head_speed
from headstart.sampling.acceptance import Acceptance
from headstart.sampling.params import SamplingParams
from headstart.simulate import drafting, scoring
from headstart.simulate.plan import make_plan
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write

SAMPLING = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=24, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def dataset(model: Path, out: Path, heldout: list[Record], **changes: Any) -> Path:
    opened = Checkpoint.open(model)
    fields: dict[str, Any] = {
        "origin": "engine", "trunk_digest": trunk_digest(opened),
        "tokenizer_sha": tokenizer_sha(opened), "template_sha": template_sha(opened),
        "vocab_size": VOCAB, "hidden_size": 128, "seed": 0, "chat_template_kwargs": {},
        "sampling": heldout[0].sampling if heldout else {}, "counts": {}, "report": {},
    }  # fmt: skip
    out.mkdir()
    write_dataset(out, Header(**{**fields, **changes}), {"heldout": heldout})
    return out


@pytest.fixture(autouse=True)
def own_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for `inspect` and `launch` is not the user's."""
    monkeypatch.setattr(predicted, "cache_folder", lambda: tmp_path / "cache")


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return checkpoint(tiny, "mimo")


@pytest.fixture(scope="module")
def answered(model: Path) -> dict[float, tuple[list[Record], Acceptance]]:
    """By temperature: six answers in two categories, and the engine's counters at K = 3."""
    result = {}
    for params in (SAMPLING, GREEDY):
        engine = start(model, speculate=3, slots=8000)
        prompts = make_prompts(6)
        each = [replace(params, seed=number) for number in range(len(prompts))]
        results = run(engine, prompts, each)
        assert_head_is_alive(results)
        made = records(results, params)
        made = [replace(r, category="ab"[i % 2]) for i, r in enumerate(made)]
        result[params.temperature] = (made, engine.stats.acceptance)
    return result


@pytest.fixture
def scored(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def score(model: Path, data: Path, **options: Any) -> dict[str, Any]:
        settings = {"dtype": "float64", "device": "cpu", "bandwidth": 100.0, **options}
        command.run(model=str(model), data=data, json_output=True, **settings)
        document = json.loads(capsys.readouterr().out)
        assert isinstance(document, dict)
        return document

    return score


@pytest.mark.parametrize("temperature", [0.6, 0.0])
def test_counters_and_lengths_are_those_of_the_engine(
    temperature: float, model: Path, answered: Any, scored: Any, tmp_path: Path
) -> None:
    made, counters = answered[temperature]
    document = scored(model, dataset(model, tmp_path / "data", made))
    (result,) = document["results"]
    walked = result["overall"]["walked"]
    assert document["method"] == "replay" and "exact" in document["explanation"]
    assert walked["counters"][3] == {
        "rounds": counters.rounds, "drafted": counters.drafted, "accepted": counters.accepted,
    }  # fmt: skip
    assert walked["acceptance_length"][3] == counters.length
    assert walked["acceptance_length"][0] == 1 and len(walked["acceptance_length"]) == 9
    low, high = walked["acceptance_length_interval"][3]
    assert low < counters.length < high
    assert [part["answers"] for part in result["by_category"].values()] == [3, 3]
    rows = result["overall"]["row_average"]
    assert rows["acceptance_length"][3] == pytest.approx(1 + sum(rows["cumulative_acceptance"][:3]))
    best = max(result["speed"], key=lambda speed: speed["speed_up"])
    assert result["best_drafts"] == best["drafts"]
    assert result["speed"][0]["speed_up"] == 1
    three = result["speed"][3]
    share = three["speed_up"] / three["acceptance_length"]
    assert three["speed_up_interval"] == pytest.approx([low * share, high * share])


def test_a_draft_vocabulary_is_scored_beside_the_whole_one(
    model: Path, answered: Any, scored: Any, tmp_path: Path
) -> None:
    made, _ = answered[0.6]
    file = tmp_path / "small.json"
    reduced = DraftVocab(ids=tuple(i for i in range(VOCAB) if i % 4), name="small")
    write([replace(reduced, vocab_size=VOCAB)], file)
    document = scored(model, dataset(model, tmp_path / "data", made), vocab=file)
    whole, small = document["results"]
    assert (whole["vocabulary"], small["vocabulary"]) == ("whole vocabulary", "small.json")
    engine = start(model, speculate=3, slots=8000, draft_vocab=[reduced])
    prompts = [record.ids[: record.num_prompt].tolist() for record in made]
    run(engine, prompts, [replace(SAMPLING, seed=number) for number in range(len(prompts))])
    counters = engine.stats.acceptance
    assert small["overall"]["walked"]["counters"][3]["accepted"] == counters.accepted
    assert counters.accepted != whole["overall"]["walked"]["counters"][3]["accepted"]
    tokens = [token for record in made for token in record.ids[record.mask].tolist()]
    assert small["coverage"] == sum(token % 4 != 0 for token in tokens) / len(tokens)
    assert small["speed"][1]["round_seconds"] < whole["speed"][1]["round_seconds"]


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        ({"rule": "rejection"}, {}, "rejection rule draws noise of its own"),
        ({"temperature": 1.0}, {}, "sampled at temperature 0.6"),
        ({}, {"seed": None}, "6 of 6 answers have no seed"),
        ({}, {"exact_ids": False}, "6 of 6 answers have no seed or no exact ids"),
    ],
    ids=["rejection", "another temperature", "no seeds", "re-tokenised"],
)
def test_what_cannot_be_replayed_is_scored_by_formula_and_says_so(
    options: Any, changes: Any, said: str, model: Path, answered: Any, scored: Any, tmp_path: Path
) -> None:
    made = [replace(record, **changes) for record in answered[0.6][0]]
    document = scored(model, dataset(model, tmp_path / "data", made), **options)
    assert document["method"] == "formula" and said in document["explanation"]
    assert "not predicted" in document["copies"]
    formulas = document["results"][0]["overall"]["formula"]
    assert list(formulas) == ["rejection", "greedy_drafts", "shared_noise"]
    for found in formulas.values():
        average = found["row_average"]
        assert average["acceptance_length"][8] == pytest.approx(
            1 + sum(average["cumulative_acceptance"])
        )
        assert all(0 <= rate <= 1 for rate in average["conditional_acceptance"])
    rejection, shared = (
        formulas[rule]["row_average"]["conditional_acceptance"][0]
        for rule in ("rejection", "shared_noise")
    )
    assert shared <= rejection + 0.1  # in expectation it is lower


def test_a_head_of_its_own_folder_is_scored_instead(
    model: Path, answered: Any, scored: Any, tiny: Tiny, tmp_path: Path
) -> None:
    made, counters = answered[0.0]
    data = dataset(model, tmp_path / "data", made)
    head = export(model, "headstart", tmp_path / "head")
    other = export(checkpoint(tiny, "mimo", seed=7), "headstart", tmp_path / "other")
    same, strange = (
        scored(model, data, head=folder)["results"][0]["overall"]["walked"]["counters"][3]
        for folder in (head, other)
    )
    assert same["accepted"] == counters.accepted
    assert sum(strange["accepted"]) < sum(same["accepted"])


def first_token(record: Record) -> Record:
    stop = record.num_prompt + 1
    return replace(record, ids=record.ids[:stop], mask=record.mask[:stop], finish_reason="stop")


def test_answers_of_one_token_have_nothing_to_draft(
    model: Path, answered: Any, scored: Any, tmp_path: Path
) -> None:
    made, _ = answered[0.0]
    with pytest.raises(DataError, match=r"6 answers has a single token.*nothing to draft"):
        scored(model, dataset(model, tmp_path / "data", [first_token(r) for r in made]))
    some = [first_token(r) if r.category == "a" else r for r in made]
    (result,) = scored(model, dataset(model, tmp_path / "some", some))["results"]
    assert result["overall"]["answers"] == 6
    assert list(result["by_category"]) == ["b"], "a category without rounds has no rates"


def test_each_reduced_lm_head_is_made_once(
    model: Path, answered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = answered[0.0]
    vocabs = [DraftVocab(ids=tuple(range(0, VOCAB, n)), name=f"every {n}") for n in (2, 3)]
    built: list[Any] = []
    real = drafting._logits
    monkeypatch.setattr(drafting, "_logits", lambda b, ids: built.append(ids) or real(b, ids))
    ways: dict[str, scoring.VocabOf] = {"by category": lambda r: vocabs[r.category == "a"]}
    engine = start(model, speculate=3, slots=8000)
    scoring.score(engine.model, made, make_plan(made, None, "match"), vocabs=ways)
    assert len(made) == 6 and {tuple(ids.tolist()) for ids in built} == {v.ids for v in vocabs}
    assert len(built) == 2


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rounds are timed: what they take is not looked at."""
    monkeypatch.setattr(host_times, "_TURNS", (1, 1))
    monkeypatch.setattr(timed_rounds, "_ROUNDS", (1, 1))
    monkeypatch.setattr(profile, "_BUDGET_SECONDS", 0.0)


@pytest.mark.usefixtures("quick")
def test_costs_are_measured_here_unless_a_bandwidth_is_given(
    model: Path, answered: Any, scored: Any, tmp_path: Path
) -> None:
    data = dataset(model, tmp_path / "data", answered[0.0][0])
    document = scored(model, data, bandwidth=None, limit=2, max_drafts=3)
    assert document["costs"] == (
        "rounds of this engine, timed in turns here: backend torch, float64, greedy, requests at "
        "once: 1"
    )
    (result,) = document["results"]
    assert document["copies"] == "played in rounds that were timed as whole steps"
    assert 0 <= result["auto_copied_share"] <= 1
    assert result["overall"]["answers"] == 2
    assert [speed["round_seconds"] > 0 for speed in result["speed"]] == [True] * 4
    by_bytes = scored(model, data, limit=2)
    assert by_bytes["costs"] == "from bytes read at 100 GB/s"
    assert "not predicted" in by_bytes["copies"]
    assert "auto_copied_share" not in by_bytes["results"][0]


@pytest.mark.usefixtures("quick")
def test_requests_that_there_is_no_memory_for_are_refused(
    model: Path, answered: Any, scored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of those that found some were timed as if they were all."""
    data = dataset(model, tmp_path / "data", answered[0.0][0])
    free = 1 << 40
    monkeypatch.setattr(memory, "_CPU_BYTES", 1)
    monkeypatch.setattr(Backend, "device_bytes", lambda backend: DeviceBytes(free, free))
    settings = {"bandwidth": None, "limit": 2, "max_drafts": 1, "requests": 3}
    assert scored(model, data, **settings)["costs"].endswith("requests at once: 3")
    free = 1 << 18
    with pytest.raises(EngineError, match=r"--requests is 3, and there is memory for [012] of"):
        scored(model, data, **settings)


def repeated(record: Record) -> Record:
    """The answer stands in the prompt, too."""
    ids = np.concatenate([record.ids[record.mask], record.ids])
    num_prompt = len(ids) - int(record.mask.sum())
    return replace(record, ids=ids, mask=np.arange(len(ids)) >= num_prompt, num_prompt=num_prompt)


def test_copies_are_played_in_captured_rounds_where_those_were_timed(
    model: Path, answered: Any, scored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = tuple(1 + 0.1 * k for k in range(4))
    table = RoundCosts(((1, tuple(enumerate(seconds))),), passes=((64, 1.0),))
    times = RoundTimes(seconds, captured=CapturedCosts(table, 1))
    known = {None: times}
    timed = EngineCosts(known, "captured")
    monkeypatch.setattr(head_speed, "timed_costs", lambda *_, **__: timed)
    data = dataset(model, tmp_path / "data", [repeated(own) for own in answered[0.0][0]])
    document = scored(model, data, bandwidth=None, max_drafts=3)
    assert "captured rounds" in document["copies"] and "not checked on a GPU" in document["copies"]
    (result,) = document["results"]
    assert result["auto_speed_up"] > result["head_speed_up"] > 0
    assert result["auto_copied_share"] > 0.3 and result["context_speed_up"] > 1.5
    known[None] = replace(times, captured=None)
    assert "not predicted" in scored(model, data, bandwidth=None, max_drafts=3)["copies"]


WITHOUT_HEAD = 0.75  # seconds of a step, where one with a head takes 1 and more
DECIDING = 0.25  # seconds of a round of `auto`
LOOK = 1e-6  # of a look at the clock; a step has some dozens


def near(seconds: Any) -> Any:
    return pytest.approx(seconds, abs=1e-3)


class Clock:
    """Every look at the clock while rounds are timed: a step takes as long as its rows say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.backends = 0.0, list[Any]()
        self.requests, self.vocabs, self.copied = set[int](), set[int](), set[int]()
        real = core.EngineCore.create

        def create(backend: Any, options: Any, vocabs: Any) -> Any:
            self.backends.append(backend)
            return real(backend, options, vocabs)

        step = Loop.step

        def timed(loop: Loop) -> Any:
            running = [r for r in loop.scheduler.running if r.is_decoding]
            self.now += WITHOUT_HEAD if loop.drafter is None else 1.0
            self.now += sum(0.1 * len(r.drafts) for r in running)
            self.requests.add(len(running))
            for request in running:
                vocab = loop.backend.draft_vocabs.get(request.draft_vocab)
                self.vocabs.add(VOCAB if vocab is None else len(vocab.ids))
                if request.drafts and not request.num_of_head:
                    self.copied.add(len(request.drafts))
            return step(loop)

        plan = DraftPolicy.plan

        def planned(policy: DraftPolicy, requests: Any, *more: Any) -> Any:
            if any(request.params.speculate == "auto" for request in requests):
                self.now += DECIDING
            return plan(policy, requests, *more)

        monkeypatch.setattr(DraftPolicy, "plan", planned)
        monkeypatch.setattr(timed_rounds, "_ROUNDS", (2, 2))
        monkeypatch.setattr(host_times, "_TURNS", (2, 2))
        monkeypatch.setattr(core.EngineCore, "create", create)
        monkeypatch.setattr(Loop, "step", timed)
        monkeypatch.setattr(host_times.time, "perf_counter", self.look)

    def look(self) -> float:
        self.now += LOOK
        return self.now


@pytest.mark.parametrize("requests", [1, 3])
def test_timed_rounds_are_those_that_will_be_served(
    requests: int, model: Path, answered: Any, scored: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Backend, weights, draft vocabulary and requests; a row of drafts takes a tenth more.

    Without drafts an engine without a head counts.
    """
    pytest.importorskip("numba")
    data = dataset(model, tmp_path / "data", answered[0.0][0])
    vocab = tmp_path / "vocab.json"
    write([DraftVocab(ids=tuple(range(0, VOCAB, 2)), name="half", vocab_size=VOCAB)], vocab)
    timed = list[HostTimes]()
    with monkeypatch.context() as patches:
        clock = Clock(patches)
        real = served_costs.time_rounds

        def time_rounds(*given: Any) -> Any:
            found = real(*given)
            timed.append(found[1])
            return found

        patches.setattr(served_costs, "time_rounds", time_rounds)
        document = scored(
            model, data, bandwidth=None, limit=2, max_drafts=2, dtype="float32", vocab=vocab,
            weights="int8", requests=requests,
        )  # fmt: skip
    (backend,) = clock.backends
    assert (backend.name, backend.options.weights) == ("numba", "int8")
    assert clock.vocabs == {VOCAB, VOCAB // 2} and max(clock.requests) == requests
    assert clock.copied >= {1, 2, 3, 5, 8, 12, 16}, "copies of all lengths are timed as whole steps"
    assert f"backend numba, int8, greedy, requests at once: {requests}" in document["costs"]
    assert document["scored_by"] == "backend numba, int8"
    (host,) = timed
    rows = [0.1 * k * requests for k in VERIFIED]
    for source, least in (("head", 1.0), ("auto", 1.0), ("context", WITHOUT_HEAD)):
        curve = host.sources[source].rounds
        assert [k for k, _ in curve] == [*VERIFIED]
        assert [took for _, took in curve] == near([least + more for more in rows])
        own = host.sources[source].deciding
        assert (own.usual, own.copying) == near((DECIDING, DECIDING))
    for result in document["results"]:
        seconds = [speed["round_seconds"] for speed in result["speed"]]
        drafting = [1 + 0.1 * k * requests for k in (1, 2)]
        assert seconds == near([WITHOUT_HEAD, *drafting])
        assert result["auto_speed_up"] > 0


def test_copies_are_predicted_beside_the_head(
    model: Path, scored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance lengths of copies alone are the engine's; speeds are those of rounds that cost
    a tenth more with each row."""
    engine = start(model, speculate=3, slots=8000)
    results = run(engine, prompts_of(model), copied(GREEDY, 3))
    assert_copies_are_alive(results)
    made = [replace(r, category="ab"[i % 2]) for i, r in enumerate(records(results, GREEDY))]
    data = dataset(model, tmp_path / "data", made)
    with monkeypatch.context() as patches:
        Clock(patches)
        (result,) = scored(model, data, bandwidth=None, max_drafts=3)["results"]
    lengths = result["context_acceptance_length"]
    assert lengths[0] == 1 and lengths[3] == engine.stats.acceptance.length
    for part in (result, *result["by_category"].values()):
        assert part["context_acceptance_length"][3] > part["context_acceptance_length"][1] > 1
        assert part["context_speed_up"] > 1 and part["auto_speed_up"] > part["head_speed_up"]
        assert 0 < part["auto_copied_share"] < 1 and 0 < part["context_copied_share"] < 1
    (untimed,) = scored(model, data)["results"]
    assert "context_speed_up" not in untimed, "what rounds with copies take is not known"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("temperature", [0.6, 0.0])
def test_the_serving_backend_scores_as_plain_modules_do(
    temperature: float, model: Path, answered: Any, scored: Any, tmp_path: Path
) -> None:
    """In fp32 by compiled kernels, in fp64 by plain modules; at every depth, for every K."""
    pytest.importorskip("numba")
    made, counters = answered[temperature]
    data = dataset(model, tmp_path / "data", made)
    vocab = tmp_path / "vocab.json"
    write([DraftVocab(ids=tuple(range(0, VOCAB, 2)), name="half", vocab_size=VOCAB)], vocab)
    plain, served = (
        scored(model, data, dtype=dtype, vocab=vocab) for dtype in ("float64", "float32")
    )
    assert served["scored_by"] == "backend numba, float32"
    assert plain["scored_by"] == "plain modules, float64"
    for one, other in zip(plain["results"], served["results"], strict=True):
        assert one["overall"]["walked"]["counters"] == other["overall"]["walked"]["counters"]
        assert one["overall"]["row_average"] == other["overall"]["row_average"]
        assert list(one["by_category"]) == list(other["by_category"])
    assert served["results"][0]["overall"]["walked"]["counters"][3]["accepted"] == counters.accepted
    assert served["results"][0]["overall"] != served["results"][1]["overall"]


@pytest.mark.usefixtures("quick")
def test_a_model_that_was_timed_and_cannot_score_is_given_up(
    model: Path, answered: Any, scored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By formula plain modules score: the engine's own model is dropped before they are loaded."""
    pytest.importorskip("numba")
    held: list[Any] = []
    create = core.EngineCore.create

    def watched(backend: Any, options: Any, vocabs: Any) -> Any:
        made = create(backend, options, vocabs)
        held.extend(map(weakref.ref, (made, backend, backend.trunk)))
        return made

    monkeypatch.setattr(core.EngineCore, "create", watched)
    data = dataset(model, tmp_path / "data", answered[0.6][0])
    document = scored(
        model, data, bandwidth=None, limit=2, max_drafts=2, dtype="float32", rule="rejection"
    )
    assert document["scored_by"] == "plain modules, float32"
    assert len(held) == 3 and not any(each() for each in held)


def report(*cells: tuple[int | str, int, float, float]) -> dict[str, Any]:
    """As `headstart bench run` writes it, as far as costs go."""
    names = dict.fromkeys(drafts for drafts, *_ in cells)
    return {
        "format": "headstart-bench", "version": 1, "environment": {}, "workload": {},
        "is_valid": True, "variants": [{"name": f"K={k}", "drafts": k} for k in names],
        "cells": [
            {"variant": f"K={drafts}", "task": None, "concurrency": count, "rate": None,
             "measures": {"output_tokens_per_second": 1.0, "tpot_seconds": {"mean": seconds},
                          "ttft_seconds": None},
             "speculation": {"acceptance_length": length}, "requests": []}
            for drafts, count, seconds, length in cells
        ],
    }  # fmt: skip


def test_costs_from_a_report_of_bench(
    model: Path, answered: Any, scored: Any, tmp_path: Path
) -> None:
    data = dataset(model, tmp_path / "data", answered[0.0][0])
    file = tmp_path / "bench.json"
    cells = [(0, 4, 0.02, 1.0), (3, 4, 0.013, 2.0), ("auto", 4, 0.01, 2.0), (3, 1, 0.9, 2.0)]
    file.write_text(json.dumps(report(*cells)))
    document = scored(model, data, bandwidth=None, bench=file, requests=4, max_drafts=3)
    assert document["costs"] == f"from {file}, which has K = 0, 3; requests at once: 4"
    seconds = [speed["round_seconds"] for speed in document["results"][0]["speed"]]
    assert seconds == pytest.approx([0.02, 0.022, 0.024, 0.026])
    with pytest.raises(DataError, match=r"rounds of 2 request\(s\).*loads of 1, 4.*--requests"):
        scored(model, data, bandwidth=None, bench=file, requests=2)
    with pytest.raises(ConfigError, match="both say what rounds cost"):
        scored(model, data, bench=file)


def test_inspect_and_launch_advise_what_score_predicted(
    model: Path, answered: Any, scored: Any, tiny: Tiny, tmp_path: Path
) -> None:
    assert "predicted" not in headstart("inspect", str(model)).stdout
    data = dataset(model, tmp_path / "data", answered[0.0][0])
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(report((0, 1, 0.02, 1.0), (3, 1, 0.0101, 2.0))))
    result = scored(model, data, bandwidth=None, bench=file)["results"][0]
    best = result["speed"][result["best_drafts"]]
    assert best["drafts"] not in (0, 1), "the advice without it would be 1"
    said = f"{best['speed_up']:.2f}x with K = {best['drafts']}"
    assert f"{said}, acceptance length" in headstart("inspect", str(model)).stdout
    launched = headstart("launch", str(model), "--engine", "vllm", "--json")
    document = json.loads(launched.stdout)
    assert document["speculate"] == best["drafts"]
    assert any(said in note and f"from {file}" in note for note in document["notes"])
    other = checkpoint(tiny, "mimo", seed=7)
    assert "predicted" not in headstart("inspect", str(other)).stdout, "another head"


def test_the_table_is_plain_text_when_piped(model: Path, answered: Any, tmp_path: Path) -> None:
    data = dataset(model, tmp_path / "data", answered[0.6][0])
    words = ["score", str(model), "--data", str(data), "--bandwidth", "100", "--dtype", "float64"]
    result = headstart(*words)
    assert result.returncode == 0, result.stderr
    assert "exact replay of the engine's noise at temperature 0.6" in result.stdout
    assert "acceptance length, walked" in result.stdout and "best K: " in result.stdout
    assert "copies from the context: not predicted" in result.stdout
    rows = re.findall(r"^3 .* \d\.\d\d \(\d\.\d\d to \d\.\d\d\) *$", result.stdout, re.MULTILINE)
    assert len(rows) == 1, "predicted speed-ups have an interval"
    assert result.stdout.isascii()


def test_data_of_another_model_is_refused(
    model: Path, answered: Any, scored: Any, tiny: Tiny, tmp_path: Path
) -> None:
    made, _ = answered[0.0]
    data = dataset(model, tmp_path / "data", made)
    other = soft(tiny, "mimo")
    found, expected = (
        trunk_digest(Checkpoint.open(folder)).rpartition(":")[2][:12] for folder in (model, other)
    )
    with pytest.raises(DataError, match=f"trunk {found}, the model has {expected}"):
        scored(other, data)
    wrong = dataset(model, tmp_path / "wrong", made, tokenizer_sha="0" * 64)
    with pytest.raises(DataError, match="another tokenizer"):
        scored(model, wrong)


def test_unusable_input_is_refused_with_what_to_do(
    model: Path, answered: Any, scored: Any, tmp_path: Path
) -> None:
    made, _ = answered[0.0]
    data = dataset(model, tmp_path / "data", made)
    with pytest.raises(DataError, match="no answers in its train split"):
        scored(model, data, split="train")
    with pytest.raises(ConfigError, match="--split is 'test'"):
        scored(model, data, split="test")
    with pytest.raises(ConfigError, match="--max-drafts is 0"):
        scored(model, data, max_drafts=0)
    with pytest.raises(ConfigError, match="--draft-from-answers is -1"):
        scored(model, data, draft_from_answers=-1)
    with pytest.raises(ConfigError, match="bandwidth"):
        scored(model, data, bandwidth=-1.0)
    strange = tmp_path / "strange.json"
    write([DraftVocab(ids=(1, 2), name="strange", vocab_size=9)], strange)
    with pytest.raises(DataError, match="made for a vocabulary of 9 tokens"):
        scored(model, data, vocab=strange)


@pytest.mark.usefixtures("quick")
def test_of_a_model_without_a_head_copies_alone_are_scored(
    model: Path, answered: Any, scored: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def drop(own: dict[str, Any]) -> None:
        for name in [name for name in own if "mtp_layers" in name]:
            del own[name]

    bare = edited(model, tmp_path / "bare", change=drop)
    engine = start(bare, speculate="context", slots=8000)
    again = [repeated(record) for record in answered[0.0][0]]
    prompts = [record.ids[: record.num_prompt].tolist() for record in again]
    results = run(engine, prompts, replace(GREEDY, max_tokens=60, speculate=3))
    made = [replace(r, category="ab"[i % 2]) for i, r in enumerate(records(results, GREEDY))]
    data = dataset(bare, tmp_path / "data", made)
    document = scored(bare, data, bandwidth=None, max_drafts=3)
    found = document["context"]
    assert document["results"] == [] and "timed in turns" in document["costs"]
    lengths = found["overall"]["context_acceptance_length"]
    assert lengths[0] == 1 < lengths[3] == engine.stats.acceptance.length
    assert found["overall"]["context_speed_up"] > 0
    assert [part["answers"] for part in found["by_category"].values()] == [3, 3]
    untimed = scored(bare, data)  # from bytes
    assert untimed["context"]["overall"]["context_speed_up"] is None
    assert untimed["context"]["overall"]["context_acceptance_length"][:4] == lengths
    assert "only rounds that are timed on a CPU" in untimed["costs"]
    beside = scored(bare, data, draft_from_answers=4)
    assert "from up to 4 answers before, in the order of the data" in beside["explanation"]
    command.run(model=str(bare), data=data, device="cpu", dtype="float64", bandwidth=100.0)
    shown = capsys.readouterr().out
    assert "tokens copied" in shown
    assert f"{untimed['context']['overall']['context_acceptance_length'][8]:.3f}" in shown
    small = tmp_path / "small.json"
    write([DraftVocab(ids=(1, 2), name="small", vocab_size=VOCAB)], small)
    with pytest.raises(HeadNotFound, match="headstart graft"):
        scored(bare, data, vocab=small)
