"""A calibrated checkpoint with a real tokenizer: the trunk writes its ordinary tokens only."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.server_runs import ALPHABET, SPECIAL, VOCAB, write_tokenizer
from support.tiny_gguf import TOKENS, write_gguf
from transformers import AutoTokenizer

from headstart.calibrate.calibrated import active_ids, agreement_of
from headstart.calibrate.given_tokenizer import ANY_TEXT, GivenTokenizer, read_tokenizer
from headstart.checkpoint.provenance import read_provenance
from headstart.checkpoint.reader import Checkpoint
from headstart.cli.calibrate import run
from headstart.data.prompt_reader import PromptReader
from headstart.demo import llama as demo
from headstart.engine.engine import Engine
from headstart.errors import BrokenFile, ConfigError
from headstart.sampling.params import SamplingParams
from headstart.server.grammars.compiler import GrammarCompiler
from headstart.server.grammars.specs import regex
from headstart.server.tools.formats import tool_format

SHAPE = "layers=1,hidden=512,intermediate=96,heads=4,kv_heads=2,vocab=320"
TOOLS = [{"type": "function", "function": {"name": "now"}}]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def made(given: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    run(shape=SHAPE, acceptance=0.8, out=out, tokenizer=str(given), dtype="F32")
    return out


def test_the_cycle_visits_every_ordinary_token_and_no_other(made: Path, given: Path) -> None:
    ordinary = read_tokenizer(given).ordinary
    assert set(ordinary).isdisjoint(range(len(SPECIAL))) and max(ordinary) < VOCAB
    following = agreement_of(made).following.tolist()
    assert sorted(set(following)) == ordinary == active_ids(read_provenance(made))
    seen, at = [], ordinary[0]
    for _ in ordinary:
        at = following[at]
        seen.append(at)
    assert sorted(seen) == ordinary
    texts = PromptReader(Checkpoint.open(made)).tokenizer.batch_decode([[i] for i in ordinary])
    assert all(texts) and not any("\ufffd" in text for text in texts)


def test_answers_are_text_that_goes_on(made: Path) -> None:
    engine = Engine(made, speculate=3, kv_bytes=1 << 22, dtype="float32")
    prompt = engine.prompts.read([{"role": "user", "content": "hello"}])
    params = SamplingParams(temperature=0, max_tokens=200)
    (result,) = engine.generate([prompt], params)
    assert result.outputs[0].finish_reason == "length"
    assert len(result.outputs[0].text) >= 200 and "\ufffd" not in result.outputs[0].text


def test_engines_find_tokenizer_ends_and_a_place_for_tools(made: Path) -> None:
    config, generation = (
        json.loads((made / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    assert config["eos_token_id"] == 1 and generation["eos_token_id"] == [1]
    assert "bos_token_id" not in config  # the tokenizer names none
    tokenizer = AutoTokenizer.from_pretrained(str(made), trust_remote_code=False)
    assert tokenizer.eos_token_id == 1 and tokenizer.is_fast
    found = tool_format(None, tokenizer.chat_template)
    assert found is not None and found.name == "hermes"
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tools=TOOLS, tokenize=False
    )
    assert '"now"' in shown


def test_one_grammar_permits_all_that_is_written(made: Path, given: Path) -> None:
    ordinary = read_tokenizer(given).ordinary
    reader = PromptReader(Checkpoint.open(made))
    compiler = GrammarCompiler(reader.tokenizer, 320, end_ids=reader.end_ids)
    try:
        grammar = compiler.compile(regex(ANY_TEXT))
        for token in ordinary:
            allowed = grammar.allowed()
            assert allowed is None or allowed[ordinary].all()
            assert grammar.accept(token)
    finally:
        compiler.close()


def test_the_demo_has_a_tokenizer_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(demo, "checked_path", lambda: tmp_path / "tiny.gguf")
    run(shape=SHAPE, acceptance=0.8, out=tmp_path / "out", tokenizer="demo", dtype="F32")
    reader = PromptReader(Checkpoint.open(tmp_path / "out"))
    assert reader.end_ids == {2} and reader.tokenizer.bos_token_id == 1
    assert reader.read("the") == [TOKENS.index("the")]
    template = reader.tokenizer.chat_template
    assert template.startswith("{% if tools %}") and "<|im_start|>" in template


def test_templates_with_tools_stay_as_they_are(given: Path) -> None:
    read = read_tokenizer(given)
    own = read.files["tokenizer_config.json"]["chat_template"]
    documents = read.documents(64)
    assert documents["chat_template.jinja"] == own
    assert "chat_template" not in documents["tokenizer_config.json"]
    several = [{"name": "default", "template": "{{ tools }} x"}, {"name": "rag", "template": "y"}]
    changed = {**read.files, "tokenizer_config.json": {"chat_template": several, "auto_map": {}}}
    documents = GivenTokenizer("x", changed).documents(64)
    assert documents["chat_template.jinja"] == "{{ tools }} x"
    assert "auto_map" not in documents["tokenizer_config.json"]


def test_what_does_not_go_together_is_refused(given: Path, tmp_path: Path) -> None:
    small = SHAPE.replace("vocab=320", "vocab=200")
    with pytest.raises(ConfigError, match=f"has {VOCAB} ids and the shape a vocabulary of 200"):
        run(shape=small, acceptance=0.8, tokenizer=str(given), dry_run=True)
    with pytest.raises(ConfigError, match="--active is 20 and --tokenizer has"):
        run(shape=SHAPE, acceptance=0.8, tokenizer=str(given), active=20, dry_run=True)
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        run(shape=SHAPE, acceptance=0.8, tokenizer=str(tmp_path), dry_run=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BrokenFile, match=r"the tokenizer of .* fails"):
        run(shape=SHAPE, acceptance=0.8, tokenizer=str(tmp_path), dry_run=True)
    (tmp_path / "tokenizer.json").write_text((given / "tokenizer.json").read_text())
    with pytest.raises(ConfigError, match="has the end token None"):
        run(shape=SHAPE, acceptance=0.8, tokenizer=str(tmp_path), dry_run=True)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"\xff\xfe{}", r"tokenizer\.json is not text"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja is not text"),
        ("tokenizer_config.json", b'{"eos_token": ["x"]}', r"has the eos_token \['x'\]; expected"),
        ("tokenizer_config.json", b'{"eos_token": {"foo": "x"}}', r"eos_token \{'foo': 'x'\}; exp"),
        ("tokenizer_config.json", b'{"eos_token": {"content": 3}}', r"eos_token .* expected its"),
        ("tokenizer_config.json", b'{"eos_token": 3}', r"has the eos_token 3; expected its text"),
        ("generation_config.json", b'{"eos_token_id": {"a": 1}}', r"has the end token .*; expect"),
        ("generation_config.json", b'{"eos_token_id": [[1]]}', r"has the end token \[\[1\]\]; exp"),
    ],
)  # fmt: skip
def test_a_broken_tokenizer_is_refused_in_one_line(
    name: str, content: bytes, words: str, given: Path, tmp_path: Path
) -> None:
    """Regression: these ended in tracebacks."""
    shutil.copytree(given, tmp_path / "broken")
    (tmp_path / "broken" / name).write_bytes(content)
    with pytest.raises(BrokenFile if "eos_token_id" not in str(content) else ConfigError) as found:
        run(shape=SHAPE, acceptance=0.8, tokenizer=str(tmp_path / "broken"), dry_run=True)
    assert re.search(words, str(found.value)) and "\n" not in str(found.value)


def test_templates_that_are_no_texts_are_passed_over(given: Path) -> None:
    read = read_tokenizer(given)
    changed = {**read.files, "tokenizer_config.json": {"chat_template": ["x", 3]}}
    assert "message.content" in GivenTokenizer("x", changed).documents(64)["chat_template.jinja"]


def test_parts_of_characters_are_left_out(given: Path) -> None:
    read = read_tokenizer(given)
    assert len(SPECIAL) + ALPHABET.index("a") in read.ordinary
    high = [len(SPECIAL) + ALPHABET.index(char) for char in "\u00e2\u00ff"]
    assert set(high) <= set(read.left_out)
