"""Requests that draft their own text's tokens beside a list: the same text, by every backend."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.copying_runs import Parity
from support.engine_records import records
from support.engine_runs import VOCAB, assert_head_is_alive, ids_of, make_prompts, run, soft, start
from support.tiny_fixture import Tiny
from support.training_runs import StopAt, metrics

from headstart.checkpoint.reader import Checkpoint
from headstart.cli import score
from headstart.data.dataset import Header, write_dataset
from headstart.data.fingerprints import tokenizer_sha
from headstart.data.records import Record
from headstart.engine.engine import Engine
from headstart.engine.options import EngineOptions
from headstart.engine.request import Request
from headstart.errors import ConfigError
from headstart.heads.digest import trunk_digest
from headstart.predict.options import PredictionOptions
from headstart.sampling.params import SamplingParams
from headstart.train.job import Job
from headstart.train.options import TrainOptions, resolve
from headstart.train.trainer import train
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write
from headstart.vocab.own_tokens import OwnRule

PROMPTS = make_prompts()
LIMIT = 6
BACKENDS: dict[str, dict[str, Any]] = {
    "torch": {"kernels": "off"},
    "numba": {"kernels": "auto", "dtype": "float32"},
    "numba int8": {"kernels": "auto", "dtype": "float32", "weights": "int8"},
}


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return soft(tiny)


def seeded(**fields: Any) -> SamplingParams:
    fields = {"temperature": 0.7, "seed": 3, "max_tokens": 24, "ignore_eos": True, **fields}
    return SamplingParams(**fields)


# Every way in which a draft is chosen.
SETTINGS = [
    seeded(temperature=0), seeded(), seeded(top_k=5), seeded(top_p=0.8, logit_bias={7: 2.0}),
    seeded(min_p=0.05, presence_penalty=0.5), seeded(acceptance="rejection", top_k=20),
    seeded(acceptance="rejection"), seeded(temperature=0, banned_token_ids=(3, 4)),
    seeded(temperature=0, acceptance="rejection"), seeded(min_tokens=5, top_p=0.9),
]  # fmt: skip
# Requests without the rejection rule, whose text the rule's own noise decides.
MATCHED = [i for i, params in enumerate(SETTINGS) if params.acceptance == "match"]


def few(model: Path) -> list[DraftVocab]:
    """Two lists that lack half of what the model writes."""
    counts = Counter(t for ids in ids_of(run(start(model, speculate=0), PROMPTS, seeded()))
                     for t in ids)  # fmt: skip
    ranked = [token for token, _ in counts.most_common()]
    return [
        DraftVocab.of(ranked[0:24:2], name="even", vocab_size=VOCAB),
        DraftVocab.of(ranked[1:24:2], name="odd", vocab_size=VOCAB),
    ]


@pytest.fixture(scope="module")
def maps(model: Path) -> list[DraftVocab]:
    return few(model)


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int], set[int]]]:
    """Of every proposal the request, its drafts, and what it could have drafted by the rule."""
    assert engine.loop.drafter is not None
    propose, seen = engine.loop.drafter.propose, []
    by_name = {name: set(vocab.ids) for name, vocab in engine.draft_vocabs.by_name.items()}

    def allowed(request: Request) -> set[int]:
        if request.draft_vocab is None:
            return set(range(VOCAB))
        listed = by_name[request.draft_vocab]
        own = dict.fromkeys(token for token in reversed(request.tokens) if token not in listed)
        return listed | set(list(own)[: engine.options.draft_vocab_own])

    def note(drafting: Any) -> None:
        propose(drafting)
        seen.extend((r.group, list(r.drafts), allowed(r)) for r in drafting)

    monkeypatch.setattr(engine.loop.drafter, "propose", note)
    return seen


def names(count: int) -> list[str]:
    return [("even", "odd", "even", "full")[i % 4] for i in range(count)]


def asked() -> list[SamplingParams]:
    each = zip(SETTINGS, names(len(SETTINGS)), strict=True)
    return [replace(params, draft_vocab=name) for params, name in each]


@pytest.mark.parametrize("backend", BACKENDS)
def test_texts_are_those_without_drafts_and_drafts_are_of_list_and_text(
    backend: str, model: Path, maps: list[DraftVocab], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = BACKENDS[backend]
    plain = ids_of(run(start(model, speculate=0, **kind), PROMPTS, SETTINGS))
    for own in (0, LIMIT):
        engine = start(model, speculate=3, draft_vocab=maps, draft_vocab_own=own, **kind)
        assert engine.backend.name == backend.split()[0]
        seen = watch(engine, monkeypatch)
        results = run(engine, PROMPTS, asked())
        found = ids_of(results)
        assert [found[i] for i in MATCHED] == [plain[i] for i in MATCHED]
        assert_head_is_alive(results)
        for _, drafts, allowed in seen:
            assert set(drafts) <= allowed
        listed = {vocab.name: set(vocab.ids) for vocab in maps}
        by_group = dict(zip((r.request_id for r in results), names(len(PROMPTS)), strict=True))
        outside = {
            token for group, drafts, _ in seen if by_group[group] != "full"
            for token in drafts if token not in listed[by_group[group]]
        }  # fmt: skip
        assert bool(outside) == bool(own), "own tokens are drafted where there are any"


def proposals(engine: Engine, monkeypatch: pytest.MonkeyPatch, prompts: Any, params: Any) -> Any:
    seen = watch(engine, monkeypatch)
    results = run(engine, prompts, params)
    return ids_of(results), [(group, drafts) for group, drafts, _ in seen]


def test_compiled_calls_draft_what_the_plain_modules_draft(
    model: Path, maps: list[DraftVocab], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for kind in ({"kernels": "off"}, {"kernels": "auto"}):
        engine = start(
            model, speculate=3, draft_vocab=maps, draft_vocab_own=LIMIT, dtype="float32", **kind
        )
        found.append(proposals(engine, monkeypatch, PROMPTS, asked()))
    assert found[0] == found[1]


def test_several_modules_draft_own_tokens_as_plain_modules_do(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = soft(tiny, "step3p5"), []
    maps = few(folder)
    for kind in ({"kernels": "off"}, {"kernels": "auto"}):
        engine = start(
            folder, speculate=3, draft_vocab=maps, draft_vocab_own=LIMIT, dtype="float32", **kind
        )
        assert engine.backend.num_modules > 1
        found.append(proposals(engine, monkeypatch, PROMPTS[:4], asked()[:4]))
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_preemption_prefix_hits_and_aborts_change_no_text_and_no_rule(
    backend: str, model: Path, maps: list[DraftVocab], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = BACKENDS[backend]
    params = [seeded(temperature=0, draft_vocab=name) for name in names(len(PROMPTS))]
    plain = ids_of(run(start(model, speculate=0, **kind), PROMPTS, seeded(temperature=0)))
    engine = start(
        model,
        slots=160 if backend == "torch" else 80,
        speculate=3,
        draft_vocab=maps,
        draft_vocab_own=LIMIT,
        **kind,
    )
    seen = watch(engine, monkeypatch)
    for _ in range(2):  # the second time prefixes are found
        gone = [engine.add(prompt, params[0]) for prompt in PROMPTS[:3]]
        for _ in range(4):
            engine.step()
        for request_id in gone:
            engine.abort(request_id)
        assert ids_of(run(engine, PROMPTS, params)) == plain
    assert engine.stats.preemptions > 0 and engine.stats.cached_tokens > 0
    assert all(set(drafts) <= allowed for _, drafts, allowed in seen)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_grammars_several_samples_and_other_numbers_of_drafts(
    backend: str, model: Path, maps: list[DraftVocab], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, each = BACKENDS[backend], [replace(own, n=2, logprobs=2) for own in SETTINGS[:4]]
    plain = start(model, speculate=0, **kind)
    wanted = ids_of(run(plain, PROMPTS[:4], each, grammar=Parity()))
    engine = start(model, speculate=3, draft_vocab=maps, draft_vocab_own=LIMIT, **kind)
    seen = watch(engine, monkeypatch)
    both = zip(each, names(4), (1, 2, 5, 8), strict=True)
    given = [replace(own, draft_vocab=name, speculate=k) for own, name, k in both]
    results = run(engine, PROMPTS[:4], given, grammar=Parity())
    assert ids_of(results) == wanted
    assert_head_is_alive(results)
    assert all(set(drafts) <= allowed for _, drafts, allowed in seen)
    assert max(len(drafts) for _, drafts, _ in seen) > 3


def test_the_limit_is_a_whole_number_that_kernels_have_room_for() -> None:
    assert EngineOptions(draft_vocab_own=1024).draft_vocab_own == 1024
    for bad in (-1, 1025, 1.5, True):
        with pytest.raises(ConfigError, match="draft_vocab_own is"):
            EngineOptions(draft_vocab_own=bad)


def test_a_limit_without_a_list_is_refused(model: Path) -> None:
    """Regression: it was ignored."""
    with pytest.raises(ConfigError, match=r"without a draft vocabulary.* Give --draft-vocab, too"):
        start(model, speculate=3, draft_vocab_own=4)
    with pytest.raises(ConfigError, match=r"without a draft vocabulary.* Give --vocab, too"):
        PredictionOptions(own=4)


def write_answers(model: Path, out: Path, splits: dict[str, list[Record]]) -> None:
    opened, sampling = Checkpoint.open(model), splits["heldout"][0].sampling
    header = Header(
        origin="engine", trunk_digest=trunk_digest(opened), tokenizer_sha=tokenizer_sha(opened),
        template_sha="absent", vocab_size=VOCAB, hidden_size=128, sampling=sampling,
        seed=0, chat_template_kwargs={}, counts={}, report={},
    )  # fmt: skip
    out.mkdir()
    write_dataset(out, header, splits)


@pytest.mark.parametrize("by", ["plain modules", "the backend that serves"])
def test_scoring_replays_the_engine(
    by: str, model: Path, maps: list[DraftVocab], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counters of `score` are those of the engine, greedy and sampled; a small limit drops some."""
    dtype = {"plain modules": "float64", "the backend that serves": "float32"}[by]
    file, data = tmp_path / "maps.json", tmp_path / "data"
    write(maps[:1], file)
    params = seeded()
    engine = start(
        model, speculate=3, draft_vocab=str(file), draft_vocab_own=4, dtype=dtype,
        kernels="off" if by == "plain modules" else "auto",
    )  # fmt: skip
    made = records(run(engine, PROMPTS, params), params)
    write_answers(model, data, {"heldout": made})
    found = {}
    for own in (0, 4, 40):
        score.run(
            model=str(model), data=data, vocab=file, dtype=dtype, device="cpu", bandwidth=100.0,
            draft_vocab_own=own, json_output=True,
        )  # fmt: skip
        document = json.loads(capsys.readouterr().out)
        scored_by = "plain modules" if by == "plain modules" else "backend numba"
        assert document["scored_by"].startswith(scored_by)
        _, found[own] = document["results"]
    counters = found[4]["overall"]["walked"]["counters"][3]
    assert counters["accepted"] == engine.stats.acceptance.accepted
    assert counters["drafted"] == engine.stats.acceptance.drafted
    shares = [found[own]["coverage"] for own in (0, 4, 40)]
    assert shares == sorted(set(shares)), "more tokens can be drafted"
    listed = OwnRule.of(maps[0].ids, VOCAB, 4)
    inside = sum(listed.num_inside(record.ids.tolist(), record.mask.tolist()) for record in made)
    assert shares[1] == pytest.approx(inside / sum(int(record.mask.sum()) for record in made))


def test_rows_follow_when_the_head_is_swapped(model: Path, maps: list[DraftVocab]) -> None:
    engine = start(model, speculate=3, draft_vocab=maps[:1], draft_vocab_own=LIMIT, dtype="float32")
    before = ids_of(run(engine, PROMPTS[:3], seeded(temperature=0)))
    engine.backend.head_swapped()
    assert ids_of(run(engine, PROMPTS[:3], seeded(temperature=0))) == before


def test_training_learns_and_validates_own_tokens(
    model: Path, maps: list[DraftVocab], tmp_path: Path
) -> None:
    """What a head is worth before the first step is what the engine counts with own tokens."""
    file, data = tmp_path / "maps.json", tmp_path / "data"
    write(maps[:1], file)
    params, counted, first = seeded(), [], []
    for own in (0, 4):
        engine = start(
            model, speculate=3, draft_vocab=str(file), draft_vocab_own=own, dtype="float64",
            kernels="off",
        )  # fmt: skip
        made = records(run(engine, PROMPTS, params), params)
        if not own:
            write_answers(model, data, {"train": made, "heldout": made})
        options = TrainOptions(
            draft_vocab=str(file), draft_vocab_own=own, num_depths=3, loss="ce", dtype="float64",
            device="cpu", optimizer="adamw",
        )  # fmt: skip
        out = tmp_path / f"run-{own}"
        train(Job(model=model, data=data, out=out, options={"": resolve(options)}), StopAt(1))
        (before, step), acceptance = metrics(out)[:2], engine.stats.acceptance
        assert before["validation"]["rounds"] == acceptance.rounds
        assert before["validation"]["cumulative_acceptance"] == acceptance.cumulative
        counted.append(acceptance.length)
        first.append(step["loss"])
    assert counted[0] != counted[1]
    assert first[0] < 0.9 * first[1], "labels that the list lacks have a loss, too"
    with pytest.raises(ConfigError, match=r"without a draft vocabulary.* Give --draft-vocab, too"):
        resolve(TrainOptions(draft_vocab_own=4))
