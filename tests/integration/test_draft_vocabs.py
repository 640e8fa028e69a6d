"""Draft vocabularies in the engine and from the command line, with a model of two languages.

Tokens 2 to 32 are English words, the others Chinese characters; what the model says with them is
noise, but which map a request drafts with is told by the script of its prompt.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.engine_records import records
from support.engine_runs import VOCAB, assert_head_is_alive, ids_of, make_prompts, run, soft, start
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.cli import score
from headstart.cli.main import main
from headstart.data.dataset import Header, write_dataset
from headstart.data.fingerprints import tokenizer_sha
from headstart.data.records import Record
from headstart.engine.auto import host_times, served_costs
from headstart.engine.engine import Engine
from headstart.errors import ConfigError, DataError, RequestError
from headstart.heads.digest import trunk_digest
from headstart.sampling.params import SamplingParams
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import read, write

FIRST_CHINESE = 33
ENGLISH = [f"word{'abcdefghijklmnopqrstuvwxyz'[i % 26]}{'xy'[i // 26]}" for i in range(31)]
CHINESE = [chr(0x4E00 + i) for i in range(VOCAB - FIRST_CHINESE)]
WORDS = ["<s>", "</s>", *ENGLISH, *CHINESE]
EN_PROMPT, ZH_PROMPT = "wordax wordcx wordbx", " ".join(CHINESE[3:8])
PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def model(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bilingual") / "model"
    shutil.copytree(soft(tiny), out)
    document = json.loads((out / "tokenizer.json").read_text())
    document["model"]["vocab"] = {word: token for token, word in enumerate(WORDS)}
    (out / "tokenizer.json").write_text(json.dumps(document))
    return out


def seeded(seed: int = 3, **fields: Any) -> SamplingParams:
    fields = {"temperature": 0.7, "seed": seed, "max_tokens": 24, "ignore_eos": True, **fields}
    return SamplingParams(**fields)


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[int]]:
    """The answers without drafts."""
    return ids_of(run(start(model, speculate=0), PROMPTS, seeded()))


@pytest.fixture(scope="module")
def maps(model: Path, plain: list[list[int]]) -> list[DraftVocab]:
    """What the model writes most, and another half that shares some of it."""
    ranked = [token for token, _ in Counter(t for ids in plain for t in ids).most_common()]
    facts: dict[str, Any] = {
        "vocab_size": VOCAB, "tokenizer_sha": tokenizer_sha(Checkpoint.open(model)),
    }  # fmt: skip
    return [
        DraftVocab.of(ranked[:30], name="en", language="en", **facts),
        DraftVocab.of(ranked[10:40], name="zh", language="zh", **facts),
    ]


@pytest.fixture(scope="module")
def engine(model: Path, maps: list[DraftVocab], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("maps") / "maps.json"
    write(maps, path)
    return start(model, speculate=3, draft_vocab=str(path))


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Every draft token that the engine proposes, by request."""
    assert engine.loop.drafter is not None
    propose, seen = engine.loop.drafter.propose, {}

    def watch(drafting: Any) -> None:
        propose(drafting)
        for request in drafting:
            seen.setdefault(request.group, set()).update(request.drafts)

    monkeypatch.setattr(engine.loop.drafter, "propose", watch)
    return seen


def test_two_maps_in_one_batch_give_the_text_of_no_drafts_at_all(
    engine: Engine, maps: list[DraftVocab], plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watched(engine, monkeypatch)
    names = [("en", "zh", "full")[i % 3] for i in range(len(PROMPTS))]
    results = run(engine, PROMPTS, [seeded(draft_vocab=name) for name in names])
    assert ids_of(results) == plain
    assert_head_is_alive(results)
    inside = {"en": set(maps[0].ids), "zh": set(maps[1].ids), "full": set(range(VOCAB))}
    used: dict[str, set[int]] = {}
    for result, name in zip(results, names, strict=True):
        assert seen[result.request_id] <= inside[name]
        used.setdefault(name, set()).update(seen[result.request_id])
        assert result.stats.draft_vocab == (None if name == "full" else name)
    assert used["en"] - inside["zh"] and used["zh"] - inside["en"], "the maps were not told apart"
    assert used["full"] - inside["zh"]
    for name in inside:
        assert_head_is_alive([r for r, n in zip(results, names, strict=True) if n == name])


def test_a_map_that_lacks_what_the_model_writes_lowers_acceptance_and_nothing_else(
    model: Path, plain: list[list[int]]
) -> None:
    counts = Counter(token for ids in plain for token in ids)
    ranked = sorted(range(VOCAB), key=lambda token: -counts[token])
    accepted = []
    for ids in (range(VOCAB), ranked[:40], ranked[40:]):
        own = start(model, speculate=3, draft_vocab=list(ids))
        results = run(own, PROMPTS, seeded())
        assert ids_of(results) == plain
        accepted.append(sum(own.stats.acceptance.accepted))
    everything, frequent, rare = accepted
    assert everything > 0 and frequent > 0.6 * everything
    assert rare < 0.4 * frequent


@pytest.mark.parametrize(
    ("prompt", "name"),
    [(EN_PROMPT, "en"), (ZH_PROMPT, "zh"), ([5, 6, 7], "en"), ([40, 41, 42], "zh"),
     ([40, 5, 6, 7], "en"), ("12 + 3", None)],
    ids=["english", "chinese", "english ids", "chinese ids", "mostly english", "neither"],
)  # fmt: skip
def test_the_map_is_chosen_by_the_script_of_the_prompt(
    engine: Engine, prompt: Any, name: str | None
) -> None:
    (result,) = run(engine, [prompt], seeded())
    assert result.stats.draft_vocab == name


def test_the_last_user_message_tells_the_language_of_a_chat(
    model: Path, maps: list[DraftVocab], tmp_path: Path
) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(model, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    engine = start(folder, speculate=2, draft_vocab=maps)
    chat = [
        {"role": "system", "content": f"{EN_PROMPT} {EN_PROMPT}"},
        {"role": "user", "content": EN_PROMPT},
        {"role": "assistant", "content": EN_PROMPT},
        {"role": "user", "content": ZH_PROMPT},
    ]
    for messages, name in ((chat, "zh"), (chat[:2], "en")):
        (result,) = run(engine, [messages], seeded(max_tokens=4))
        assert result.stats.draft_vocab == name


def test_a_request_may_name_a_map_or_none(engine: Engine) -> None:
    for asked, name in (("zh", "zh"), ("none", None), ("full", None)):
        (result,) = run(engine, [EN_PROMPT], seeded(draft_vocab=asked))
        assert result.stats.draft_vocab == name
    with pytest.raises(RequestError, match=r"is called 'fr'\. There are en, zh; none or full"):
        engine.add(EN_PROMPT, seeded(draft_vocab="fr"))
    assert not engine.has_work


def test_the_only_map_is_for_everybody_and_a_map_for_all_takes_the_rest(
    model: Path, maps: list[DraftVocab]
) -> None:
    one = start(model, speculate=2, draft_vocab=maps[1:])
    (result,) = run(one, [EN_PROMPT], seeded(max_tokens=4))
    assert result.stats.draft_vocab == "zh"
    several = [*maps, DraftVocab.of(range(20), name="all", vocab_size=VOCAB)]
    three = start(model, speculate=2, draft_vocab=several)
    results = run(three, ["12 + 3", ZH_PROMPT], seeded(max_tokens=4))
    assert [r.stats.draft_vocab for r in results] == ["all", "zh"]
    assert "draft vocabularies: en (30 tokens), zh (30 tokens), all (20 tokens)" in three.notes


def test_scoring_takes_the_map_that_the_engine_takes(
    model: Path, maps: list[DraftVocab], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With several maps it failed: the tokenizer was given where its reader is expected."""
    file, data = tmp_path / "maps.json", tmp_path / "data"
    write(maps, file)
    engine = start(model, speculate=3, draft_vocab=str(file))
    prompts = [[5, 6, 7], [40, 41, 42], [8, 9, 10], [50, 51, 52]]
    results = run(engine, prompts, seeded())
    assert {result.stats.draft_vocab for result in results} == {"en", "zh"}
    opened, made = Checkpoint.open(model), records(results, seeded())
    header = Header(
        origin="engine", trunk_digest=trunk_digest(opened), tokenizer_sha=tokenizer_sha(opened),
        template_sha="absent", vocab_size=VOCAB, hidden_size=128, sampling=made[0].sampling,
        seed=0, chat_template_kwargs={}, counts={}, report={},
    )  # fmt: skip
    data.mkdir()
    write_dataset(data, header, {"heldout": made})
    score.run(
        model=str(model), data=data, vocab=file, dtype="float64", device="cpu", bandwidth=100.0,
        json_output=True,
    )  # fmt: skip
    _, reduced = json.loads(capsys.readouterr().out)["results"]
    counters = reduced["overall"]["walked"]["counters"][3]
    assert counters["accepted"] == engine.stats.acceptance.accepted
    assert counters["drafted"] == engine.stats.acceptance.drafted


@pytest.mark.parametrize("name", ["map.pt", "map.safetensors", "d2t.npy", "t2d.npy"])
def test_the_engine_takes_files_of_every_format(
    name: str, model: Path, maps: list[DraftVocab], plain: list[list[int]], tmp_path: Path
) -> None:
    write(maps[:1], tmp_path / name)
    engine = start(model, speculate=3, draft_vocab=str(tmp_path / name))
    (loaded,) = engine.backend.draft_vocabs.values()
    assert tuple(loaded.ids.tolist()) == maps[0].ids
    assert ids_of(run(engine, PROMPTS[:3], seeded())) == plain[:3]


def test_maps_of_another_model_are_refused_at_start(
    tiny: Tiny, model: Path, maps: list[DraftVocab], tmp_path: Path
) -> None:
    write(maps, tmp_path / "maps.json")
    with pytest.raises(DataError, match=r"maps.json: map 'en' was made with another tokenizer"):
        start(soft(tiny), speculate=3, draft_vocab=str(tmp_path / "maps.json"))
    torch.save([1, 2, 64], tmp_path / "map.pt")
    with pytest.raises(DataError, match="holds 64; the model has tokens 0 to 63"):
        start(model, speculate=3, draft_vocab=str(tmp_path / "map.pt"))
    larger = DraftVocab.of([1, 2], vocab_size=128)
    with pytest.raises(DataError, match="for a vocabulary of 128 tokens; the model has 64"):
        start(model, speculate=3, draft_vocab=[larger])


def test_maps_and_ids_together_are_refused(model: Path) -> None:
    """Regression: this was a TypeError."""
    mixed = cast(list[int], [DraftVocab.of({2, 3}), 5, 6])
    with pytest.raises(ConfigError, match="holds 1 draft vocabularies and 2 other items; give a"):
        start(model, draft_vocab=mixed)


def test_auto_profiles_the_reduced_head_and_keeps_the_text(
    model: Path, maps: list[DraftVocab], plain: list[list[int]]
) -> None:
    engine = start(model, speculate="auto", draft_vocab=maps)
    assert ids_of(run(engine, PROMPTS, seeded())) == plain


def record(number: int, ids: list[int], category: str) -> Record:
    prompt = [2, 40]
    return Record(
        id=f"r{number}", prompt_id=f"p{number}", category=category, turn=0, sample=0,
        ids=np.array([*prompt, *ids], np.int32),
        mask=np.array([False] * len(prompt) + [True] * len(ids)), seed=number,
        sampling={}, finish_reason="stop", exact_ids=True, num_prompt=len(prompt),
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """English answers with tokens 10 to 14 (and once 15), Chinese ones with 50 to 53."""
    folder = tmp_path_factory.mktemp("data")
    header = Header(
        origin="engine", trunk_digest="", tokenizer_sha=tokenizer_sha(Checkpoint.open(model)),
        template_sha="absent", vocab_size=VOCAB, hidden_size=128, sampling={}, seed=0,
        chat_template_kwargs={}, counts={}, report={},
    )  # fmt: skip
    english, chinese = [10, 11, 12, 13, 14] * 8, [50, 51, 52, 53] * 8
    train = [record(0, [*english, 15, 1], "chat"), record(1, [*chinese, 1], "chat")]
    heldout = [record(2, [*english[:7], 30, 1], "chat"), record(3, [*chinese[:3], 1], "story")]
    write_dataset(folder, header, {"train": train, "heldout": heldout})
    return folder


Command = Callable[..., tuple[Any, str, str]]


@pytest.fixture
def vocab(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`headstart vocab` in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)

    def call(*arguments: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["headstart", "vocab", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err

    return call


def test_the_command_makes_a_map_per_language_that_the_engine_takes(
    model: Path, data: Path, tmp_path: Path, vocab: Command
) -> None:
    out = tmp_path / "maps.json"
    sizes = ("--sizes", "9,12", "--min-tokens", 20, "--bandwidth", 100)
    code, printed, errors = vocab(model, "--data", data, *sizes, "--out", out, "--json")
    assert code == 0, errors
    document = json.loads(printed)
    said, notes = {each["name"]: each for each in document["maps"]}, document["notes"]
    assert set(said) == {"en", "zh", "all"}
    found = {each.name: each for each in read(out)}
    assert found["en"].language == "en" and found["en"].vocab_size == VOCAB
    assert {1, 10, 11, 12, 13, 14} <= set(found["en"].ids)
    assert {1, 50, 51, 52, 53} <= set(found["zh"].ids) and 10 not in found["zh"].ids
    assert said["en"]["coverage"] == pytest.approx(8 / 9), "token 30 was never seen"
    assert said["zh"]["coverage"] == 1 and said["zh"]["size"] == 9
    for each in said.values():
        tried = {one["size"]: one for one in each["candidates"]}
        assert set(tried) == {9, 12}
        # Drafts by chance do not pay at any size, so that coverage decides, and a note says it.
        assert all((one["drafts"], one["predicted_speed"]) == (0, 1) for one in tried.values())
        enough = [size for size, one in tried.items() if one["coverage"] >= 0.99]
        assert each["size"] == min(enough, default=12)
        assert sum(note.startswith(f"{each['name']}: no size is predicted") for note in notes) == 1
        assert all(one["acceptance_length"] >= 1 for one in each["candidates"])
    engine = start(model, speculate=2, draft_vocab=str(out))
    (answer,) = run(engine, [ZH_PROMPT], seeded(max_tokens=4))
    assert answer.stats.draft_vocab == "zh"


def test_rounds_of_the_sizes_that_nobody_gave_are_timed(
    model: Path, data: Path, vocab: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with a KeyError."""
    asked: list[int | None] = []
    of = served_costs.EngineCosts.of

    def watched(costs: Any, built: Any, size: int | None) -> Any:
        asked.append(size)
        assert ", greedy, " in costs.origin, "as the answers are"
        return of(costs, built, size)

    monkeypatch.setattr(served_costs.EngineCosts, "of", watched)
    monkeypatch.setattr(host_times, "_TURNS", (1, 1))
    code, printed, errors = vocab(model, "--data", data, "--by", "none", "--json", "--dry-run")
    assert code == 0, errors
    (said,) = json.loads(printed)["maps"]
    sizes = [one["size"] for one in said["candidates"]]
    assert len(sizes) > 1 and asked == sizes


def test_a_label_without_held_out_answers_takes_the_size_of_all(
    model: Path, data: Path, tmp_path: Path, vocab: Command
) -> None:
    """It made the whole command fail."""
    text = tmp_path / "letters.txt"
    text.write_text(f"{CHINESE[0]} {CHINESE[1]}\n" * 20)
    code, printed, errors = vocab(
        model, "--data", data, "--by", "category", "--text", text, "--sizes", "9,12",
        "--min-tokens", 10, "--bandwidth", 100, "--json", "--dry-run",
    )  # fmt: skip
    assert code == 0, errors
    document = json.loads(printed)
    said = {each["name"]: each for each in document["maps"]}
    assert said["letters"]["size"] == said["all"]["size"]
    assert any(note.startswith("letters: no held-out answer") for note in document["notes"])
    alone = (model, "--text", text, "--sizes", "9,12", "--min-tokens", 10, "--dry-run")
    code, _, errors = vocab(*alone)
    assert code == 2 and "no held-out answers to measure coverage on" in errors


def test_maps_by_label_have_the_names_of_the_labels(
    model: Path, data: Path, tmp_path: Path, vocab: Command
) -> None:
    text = tmp_path / "story.txt"
    text.write_text(f"{CHINESE[0]} {CHINESE[1]}\n" * 20)
    code, printed, errors = vocab(
        model, "--data", data, "--by", "category", "--text", text, "--size", 9,
        "--min-tokens", 10, "--json", "--dry-run",
    )  # fmt: skip
    assert code == 0, errors
    said = {each["name"]: each for each in json.loads(printed)["maps"]}
    assert set(said) == {"chat", "story", "all"}
    assert said["story"]["counted_tokens"] == 40 and said["story"]["language"] == ""


def test_the_command_converts_and_never_harms_what_is_there(
    model: Path, data: Path, tmp_path: Path, vocab: Command
) -> None:
    made = tmp_path / "m.json"
    code, printed, errors = vocab(
        model, "--data", data, "--size", 12, "--by", "none", "--out", made
    )
    assert code == 0 and "<- taken" in printed, errors
    out = tmp_path / "map.pt"
    convert = (model, "--from", made, "--out", out)
    assert vocab(*convert, "--dry-run")[0] == 0 and not out.exists()
    assert vocab(*convert)[0] == 0
    assert torch.load(out, weights_only=True) == list(read(made)[0].ids)
    code, _, errors = vocab(*convert)
    assert code == 1 and "exists. Choose another --out" in errors
    assert vocab(*convert, "--overwrite")[0] == 0


MISUSE: dict[str, tuple[tuple[Any, ...], int, str]] = {
    "nothing to count": (("--out", "OUT"), 2, "nothing to count; give --data"),
    "no out": (("--data", "DATA"), 2, "no --out given"),
    "too small": (("--data", "DATA", "--out", "OUT", "--size", "1"), 2, "--size is 1; "),
    "bad sizes": (("--data", "DATA", "--out", "OUT", "--sizes", "8k"), 2, "--sizes is '8k'"),
    "no such map": (("--data", "DATA", "--out", "OUT", "--only", "fr"), 2, "--only is 'fr'"),
    "several in one": (
        ("--data", "DATA", "--out", "OUT.pt", "--size", "12", "--min-tokens", "9"), 2,
        "a .pt file holds one map and there are 3 (en, zh, all)",
    ),
    "no data": (("--data", "OUT", "--out", "OUT.pt"), 1, "expected a dataset"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_of_the_command_is_one_line_and_writes_nothing(
    case: str, model: Path, data: Path, tmp_path: Path, vocab: Command
) -> None:
    words, expected, said = MISUSE[case]
    places = {"DATA": str(data), "OUT": str(tmp_path / "o.json"), "OUT.pt": str(tmp_path / "o.pt")}
    code, _, errors = vocab(model, *(places.get(word, word) for word in words))
    assert (code, len(errors.splitlines())) == (expected, 1), errors
    assert said in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", ["too small", "no such map"])
def test_what_needs_no_model_is_refused_before_one_is_loaded(
    case: str, model: Path, data: Path, tmp_path: Path, vocab: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def load(*arguments: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("headstart.predict.vocab_speed.predictor_of", load)
    words, expected, said = MISUSE[case]
    places = {"DATA": str(data), "OUT": str(tmp_path / "o.json")}
    code, _, errors = vocab(model, *(places.get(word, word) for word in words))
    assert code == expected and said in errors


def test_answers_of_another_tokenizer_are_refused(
    tiny: Tiny, data: Path, tmp_path: Path, vocab: Command
) -> None:
    code, _, errors = vocab(soft(tiny), "--data", data, "--out", tmp_path / "m.json")
    assert code == 1 and "another tokenizer" in errors
