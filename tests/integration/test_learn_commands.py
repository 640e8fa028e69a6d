"""`headstart learn run` and `status`: a head of collected texts, which the other commands take."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.commands import headstart
from support.engine_records import records
from support.head_edits import differing, tensors
from support.learning_runs import GREEDY, KIND, collect, learnable_heads, prompt_of
from support.server_runs import served
from support.swapped_heads import Heads, acceptance
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.data.dataset import Header, write_dataset
from headstart.data.fingerprints import template_sha, tokenizer_sha
from headstart.engine.engine import Engine
from headstart.heads.digest import trunk_digest
from headstart.learn import loop, starting
from headstart.learn.certainty import Walked
from headstart.learn.folder import Folder
from headstart.learn.process import Task
from headstart.learn.store import Store
from headstart.server.model import ServedModel
from headstart.server.options import ServerOptions
from headstart.server.preparation import prepare_chat
from headstart.server.protocol.requests import ChatRequest

UNSEEN = [prompt_of(number) for number in range(5000, 5008)]


@dataclass(frozen=True)
class Learned:
    """A folder of texts, what `learn run` printed, and the engine that answered."""

    heads: Heads
    folder: Path
    engine: Engine
    said: dict[str, Any]

    @property
    def head(self) -> Path:
        return Path(self.said["head"])


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return learnable_heads(tmp_path_factory.mktemp("learning"))


@pytest.fixture(scope="module")
def learned(heads: Heads, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learned]:
    """Until the first two checks without a better head."""
    work = tmp_path_factory.mktemp("run")
    engine = Engine(heads.model, heads.weak, speculate=3, threads=1, kernels="off")
    collect(engine, Folder(work / "learned"))
    options = work / "options.json"
    options.write_text(json.dumps({"learning_rate": 3e-3, "batch_tokens": 256}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "Task", partial(Task, least_seconds=0.2, warm_up=1))
        patch.setattr(loop, "_LOWEST_RATE", 0.6)
        found = headstart(
            "learn", "run", str(work / "learned"), "--model", str(heads.model), "--head",
            str(heads.weak), "--options", str(options), "--device", "cpu", "--minutes", "5",
            "--json",
        )  # fmt: skip
    assert found.returncode == 0, found.stderr
    yield Learned(heads, work / "learned", engine, json.loads(found.stdout))


def test_a_run_ends_with_a_head_that_is_better_on_unseen_prompts(learned: Learned) -> None:
    said = learned.said
    assert said["swaps"] > 0 and said["steps"] > said["checks"] > said["swaps"]
    assert (learned.head / "config.json").is_file() and said["reason"]
    asked = [GREEDY] * len(UNSEEN)
    before = sum(sum(each.accepted) for each in acceptance(learned.engine, UNSEEN, asked))
    learned.engine.swap_head(learned.head)
    after = sum(sum(each.accepted) for each in acceptance(learned.engine, UNSEEN, asked))
    learned.engine.swap_head(learned.heads.weak)
    assert after > 1.1 * before


def test_stitch_export_and_score_take_a_learned_head(learned: Learned, tmp_path: Path) -> None:
    model, whole, taken = (str(p) for p in (learned.heads.model, tmp_path / "w", tmp_path / "t"))
    found = headstart("stitch", str(learned.head), model, "--out", whole)
    assert found.returncode == 0, found.stderr
    found = headstart("export", whole, "--out", taken)
    assert found.returncode == 0, found.stderr
    learned_tensors = tensors(learned.head)
    assert not differing(tensors(Path(taken)), learned_tensors)
    assert differing(tensors(learned.heads.weak), learned_tensors)
    data = answers(learned, tmp_path / "data")
    lengths = []
    for head in (learned.heads.weak, learned.head):
        found = headstart(
            "score", model, "--head", str(head), "--data", str(data), "--bandwidth", "100",
            "--device", "cpu", "--dtype", "float64", "--json",
        )  # fmt: skip
        assert found.returncode == 0, found.stderr
        (result,) = json.loads(found.stdout)["results"]
        counters = result["overall"]["walked"]["counters"][3]
        lengths.append(sum(counters["accepted"]))
    assert lengths[1] > 1.1 * lengths[0]


def answers(learned: Learned, out: Path) -> Path:
    """A dataset of what the model says to prompts that were not learned from."""
    opened = Checkpoint.open(learned.heads.model)
    made = records(learned.engine.generate(UNSEEN, GREEDY), GREEDY)
    header = Header(
        origin="engine", trunk_digest=trunk_digest(opened), tokenizer_sha=tokenizer_sha(opened),
        template_sha=template_sha(opened), vocab_size=int(opened.config.get("vocab_size")),
        hidden_size=int(opened.config.get("hidden_size")), sampling=made[0].sampling, seed=0,
        chat_template_kwargs={}, counts={}, report={},
    )  # fmt: skip
    out.mkdir()
    write_dataset(out, header, {"heldout": made})
    return out


def test_status_says_what_is_there_in_words_and_as_json(learned: Learned) -> None:
    folder = str(learned.folder)
    found = headstart("learn", "status", folder, "--json")
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert said["serving"] == learned.head.name and said["server"] == {}
    texts = learned.folder / "texts"
    assert said["bytes"] == sum(path.stat().st_size for path in texts.iterdir()) > 0
    states = [head["state"] for head in said["heads"]]
    assert states == ["served"] * (learned.said["swaps"] - 1) + ["serving"]
    words = headstart("learn", "status", folder).stdout
    assert f"serving   head {learned.head.name}" in words and "server " not in words
    recent = said["heads"][-1]["promise"]["recent"]
    assert f"{recent['old']:.3f} -> {recent['new']:.3f}" in words
    status = learned.folder / "status.json"
    status.write_text(json.dumps({
        "state": "resting", "train": 30, "heldout": 8, "steps": 7, "seconds": 4.2, "checks": 3,
        "swaps": 1, "rollbacks": 0, "reason": "no better head was found", "written": 0,
        "share": 0.0931, "by_kind": {"summarize this passage": [1.5, 1.75]},
    }))  # fmt: skip
    try:
        words = headstart("learn", "status", folder).stdout
        assert "resting" in words and "30 texts to learn from, 8 held out" in words
        assert "7 steps in 4 s of computing, 3 checks, 1 swaps, 0 rollbacks" in words
        assert "9.3% of the time while requests ran" in words
        assert "'summarize this passage': 1.500 -> 1.750" in words
        assert "last      no better head was found" in words
    finally:
        status.unlink()


def holding_words(folder: Path) -> set[str]:
    """Files below a folder that hold a word of a prompt."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and any(word.encode() in path.read_bytes() for word in KIND.split())
    }


def as_written_before(folder: Path, head: str) -> None:
    """Put the words where earlier versions wrote them, and where a kill leaves them."""
    heads, words = folder / "heads", {"by_kind": {"other": [1, 2], KIND: [1.5, 1.7]}}
    for path, place in (
        (heads / "heads.json", lambda own: own[0]["promise"]),
        (heads / head / "headstart.json", lambda own: own["training"]["learned"]),
    ):
        document = json.loads(path.read_text())
        place(document).update(words)
        path.write_text(json.dumps(document))
    walk = asdict(Walked(KIND, 3, 5))
    (heads / "known.json").write_text(json.dumps({"0" * 32: walk}))
    for name in ("status.json", ".status.json.partial", "heads/.heads.json.partial"):
        (folder / name).write_text(json.dumps(words))
    left = heads / ".0009.partial"
    left.mkdir()
    (left / "headstart.json").write_text(json.dumps(words))


def test_after_forgetting_no_word_of_a_prompt_is_left(learned: Learned, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(learned.folder, tmp_path / "learned"))
    name = learned.head.name
    texts = {str(path.relative_to(folder)) for path in (folder / "texts").iterdir()}
    assert holding_words(folder) == texts, "kinds are numbered beside heads"
    kept = json.loads((folder / "heads" / "heads.json").read_text())
    as_written_before(folder, name)
    assert len(holding_words(folder)) == len(texts) + 7
    before = tensors(folder / "heads" / name)
    found = headstart("learn", "forget", str(folder))
    assert found.returncode == 0 and "learned heads remain" in found.stdout, found.stderr
    assert not holding_words(folder) and not list((folder / "texts").iterdir())
    assert not differing(tensors(folder / "heads" / name), before)
    after = json.loads((folder / "heads" / "heads.json").read_text())
    assert [head["name"] for head in after] == [head["name"] for head in kept]
    assert after[0]["promise"]["by_kind"] == {"1": [1, 2], "2": [1.5, 1.7]}
    assert after[1:] == kept[1:]


def test_a_start_takes_words_out_that_earlier_versions_wrote(
    learned: Learned, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(learned.folder, tmp_path / "learned"))
    as_written_before(folder, learned.head.name)
    options = starting.LearnOptions(learn=folder)
    model, head = str(learned.heads.model), learned.heads.weak
    starting.open_folder(options, model, head, device="cpu", dtype="auto")
    assert not any(name.startswith("heads") for name in holding_words(folder))


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER], "temperature": 0.5, "guided_odd": 3},
    "tools": {"messages": [USER], "tools": TOOLS},
    "no tools": {"messages": [USER], "tools": TOOLS, "tool_choice": "none"},
    "thinking": {"messages": [USER], "chat_template_kwargs": {"thinking": False}},
    "earlier call": {"messages": [USER, {"role": "assistant", "content": None,
                                         "tool_calls": [CALL]},
                                  {"role": "tool", "tool_call_id": "c1", "content": "5"}],
                     "tools": TOOLS},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"},
                                                        {"type": "text", "text": "i"}]}]},
}  # fmt: skip


def test_prompts_of_logs_are_read_as_the_server_reads_them(tiny: Tiny, tmp_path: Path) -> None:
    """Regression: tools and chat_template_kwargs were left out, so that token ids were wrong."""
    model = served(tiny)
    files = tmp_path / "asked.jsonl", tmp_path / "said.jsonl"
    two = [{"message": {"content": text}, "finish_reason": "length"} for text in ("yes", "no")]
    calls = {"message": {"content": None, "tool_calls": [CALL]}, "finish_reason": "tool_calls"}
    for path, part in zip(files, (
        lambda body: {"body": body}, lambda body: {"response": {"body": {"choices": [*two, calls]}}}
    ), strict=True):  # fmt: skip
        refused = {"documents": {"messages": [USER], "documents": [{"text": "read this"}]}}
        documents = ({"custom_id": name, **part(body)} for name, body in (BODIES | refused).items())
        path.write_text("".join(json.dumps(each) + "\n" for each in documents))
    found = headstart(
        "learn", "run", str(tmp_path / "learned"), "--model", str(model), "--device", "cpu",
        "--requests", str(files[0]), "--answers", str(files[1]), "--minutes", "0",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    left_out = "4 answers like earlier ones, 6 answers with tool calls, 1 refused requests"
    assert f"read 8 answers; left out {left_out}" in found.stderr
    store = Store(Folder(tmp_path / "learned").texts, 1 << 20)
    kept = [text.record for text in store.refresh()]
    assert len(kept) == 8, "three of the prompts are the same"
    engine = Engine(model, speculate=3, kernels="off")
    with closing(ServedModel(engine, ["small"], "small", ServerOptions())) as own:
        prompts = {name: served_prompt(own, body) for name, body in BODIES.items()}
    tokenizer = engine.prompts.tokenizer
    assert "look" in tokenizer.decode(prompts["tools"])
    assert prompts["no tools"] == prompts["plain"] == prompts["parts"]
    answers = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("yes", "no")}
    wanted = {(tuple(prompt), answer) for prompt in prompts.values() for answer in answers}
    assert {
        (tuple(each.ids[: each.num_prompt]), tuple(each.ids[each.num_prompt :])) for each in kept
    } == wanted


def served_prompt(model: ServedModel, body: dict[str, Any]) -> list[int]:
    """What the server makes of a request."""
    known = {name: value for name, value in body.items() if name != "guided_odd"}
    request = ChatRequest.model_validate(known)
    return prepare_chat(request, "a", model, ServerOptions()).jobs[0].asked.ids


def test_what_there_is_nothing_to_learn_from_or_to_say_of_is_one_line(
    heads: Heads, tmp_path: Path
) -> None:
    run = ("learn", "run", str(tmp_path / "new"), "--model", str(heads.model))
    few = ("learn", "run", str(tmp_path / "few"), *run[3:])
    Folder(tmp_path / "few").make(1.0)
    for words, said in (
        ((*few, "--minutes", "1"), "has too few texts; at least"),
        (run, "there is nothing else to learn from"),
        ((*few, "--base", str(tmp_path / "none")), "does not exist; expected a dataset"),
        ((*run, "--requests", "asked.jsonl"), "--requests and --answers belong together"),
        (("learn", "status", str(tmp_path)), "is not a folder of `headstart serve --learn`"),
    ):
        found = headstart(*words)
        assert found.returncode != 0 and found.stdout == ""
        (line,) = [line for line in found.stderr.splitlines() if line.startswith("error")]
        assert said in line
