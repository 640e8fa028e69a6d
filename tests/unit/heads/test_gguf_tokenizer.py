"""The tokenizer and the keys of a GGUF file: read, or said what is wrong and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_gguf

from headstart.checkpoint.gguf.fields import ARRAY, FLOAT32, INT32, STRING, UINT32, field
from headstart.checkpoint.gguf.shard import GgufShard
from headstart.checkpoint.source import stored
from headstart.checkpoint.writer import FolderPlan, write_folder
from headstart.data.fingerprints import ABSENT, template_sha, tokenizer_sha
from headstart.data.prompt_reader import PromptReader
from headstart.errors import BadConfig, HeadstartError, RequestError
from headstart.heads.formats import open_runnable
from headstart.heads.formats.gguf import open_gguf
from headstart.heads.formats.gguf.tokenizer import token_ids
from headstart.models.build import build


def reader(folder: Path, pre: str) -> PromptReader:
    folder.mkdir(exist_ok=True)
    tiny_gguf.write_gguf(folder / "x.gguf", pre=pre)
    return PromptReader(open_runnable(folder / "x.gguf"))


def names(found: PromptReader, text: str, **options: Any) -> list[str]:
    return [tiny_gguf.TOKENS[token] for token in found.encode(text, **options)]


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("smollm", ["ab", "1", "2", "3"]), ("qwen2", ["ab", "1", "2", "3"]),
        ("qwen35", ["ab", "1", "2", "3"]), ("glm4", ["ab", "123"]), ("gpt-2", ["ab", "123"]),
        ("deepseek-v3", ["ab", "123"]),
    ],
)  # fmt: skip
def test_texts_are_split_as_the_file_says(tmp_path: Path, pre: str, digits: list[str]) -> None:
    """All are held against llama.cpp itself by scripts/interop/gguf_tokenizer_check.py."""
    found = reader(tmp_path, pre)
    assert names(found, "ab123") == digits
    assert names(found, "the the") == ["the", "\u0120the"]
    assert found.encode("<|im_start|>a<|im_end|>")[::2] == [1, 2]
    for text in ("it's caf\u00e9\n\t\u4f60\u597d  x ", "1234 \U0001f389"):
        assert found.decode(found.encode(text)) == text
    messages = [{"role": "user", "content": "hi"}]
    assert found.decode(found.read(messages)).endswith("<|im_start|>assistant\n")


def test_llama_3_puts_its_first_token_in_front_of_texts_and_not_of_chats(tmp_path: Path) -> None:
    found = reader(tmp_path, "llama-bpe")
    assert names(found, "ab123") == ["<|im_start|>", "ab", "123"]
    assert found.read([{"role": "user", "content": "a"}])[:2] != [1, 1]


def test_ends_of_texts_are_those_of_the_file_and_of_its_control_tokens(tmp_path: Path) -> None:
    found = reader(tmp_path, "qwen2")
    assert found.end_ids == {0, 2}  # <|endoftext|>, and <|im_end|>, which the file names
    assert token_ids(open_gguf(tmp_path / "x.gguf")) == {"eos_token_id": [0, 2], "bos_token_id": 1}


def test_an_unknown_tokenizer_is_said_with_what_to_do(tmp_path: Path) -> None:
    found = reader(tmp_path, "odd-bpe")
    model = open_runnable(tmp_path / "x.gguf")
    [note] = model.remarks()
    assert "'gpt2' with pre-tokenizer 'odd-bpe'" in note and "Put the release's tokenizer" in note
    assert found.tokenizer is None and found.read([3, 4]) == [3, 4]
    with pytest.raises(RequestError, match="no tokenizer; give token ids instead of text"):
        found.read("hello")
    assert tokenizer_sha(model) == template_sha(model) == ABSENT


def test_a_tokenizer_beside_the_file_takes_its_place(tmp_path: Path) -> None:
    own = open_runnable_documents(tmp_path / "own", "qwen2")
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "tokenizer.json").write_text(own["tokenizer.json"])
    found = reader(odd, "odd-bpe")
    assert names(found, "ab123") == ["ab", "1", "2", "3"]
    assert found.read([{"role": "user", "content": "a"}])  # the template is the file's
    model = open_runnable(odd / "x.gguf")
    assert model.remarks() == (f"the tokenizer is {odd / 'tokenizer.json'}",)
    document = json.loads(own["tokenizer.json"])
    document["model"]["vocab"]["ab"] = 5
    (odd / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(BadConfig, match="is of another model: its token 'ab' is not where"):
        open_runnable(odd / "x.gguf")


def open_runnable_documents(folder: Path, pre: str) -> dict[str, Any]:
    reader(folder, pre)
    return open_runnable(folder / "x.gguf").tokenizer_documents()


def test_what_was_distilled_is_told_apart_by_tokenizer_and_template(tmp_path: Path) -> None:
    shas = set()
    for pre in ("qwen2", "glm4"):
        reader(tmp_path / pre, pre)
        model = open_runnable(tmp_path / pre / "x.gguf")
        shas.add((tokenizer_sha(model), template_sha(model)))
    assert len({sha for sha, _ in shas}) == 2 and len({sha for _, sha in shas}) == 1


VALUES = st.one_of(
    st.tuples(st.just(UINT32), st.none(), st.sampled_from([0, 1, 3, 64, 2**31, 2**32 - 1])),
    st.tuples(st.just(INT32), st.none(), st.sampled_from([-1, 7, -(2**31)])),
    st.tuples(st.just(FLOAT32), st.none(), st.sampled_from([0.0, -1.0, float("nan"), 1e30])),
    st.tuples(st.just(STRING), st.none(), st.sampled_from(["", "yarn", "gpt2", "x" * 50])),
    st.tuples(st.just(ARRAY), st.just(INT32), st.lists(st.sampled_from([0, -1, 5]), max_size=4)),
    st.tuples(st.just(ARRAY), st.just(STRING), st.lists(st.just("a"), max_size=3)),
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "x.gguf"
    tiny_gguf.write_gguf(path)
    return path


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_hostile_keys_end_in_one_line(data: st.DataObject, plain: Path) -> None:
    model = open_gguf(plain)
    more = ["llama.rope.scaling.type", "tokenizer.ggml.eot_token_id", "tokenizer.chat_template"]
    fields = dict(model.fields)
    for name in data.draw(st.lists(st.sampled_from([*fields, *more]), min_size=1, max_size=3)):
        kind, item, value = data.draw(VALUES)
        fields[name] = field(name, value, kind, item)
    tensors = {name: stored(info) for name, info in model.tensors.items()}
    out = plain.parent / "hostile"
    shard = GgufShard(tensors, tuple(fields.values()))
    try:
        write_folder(FolderPlan({"x.gguf": shard}), out, provenance={}, overwrite=out.exists())
        found = open_runnable(out / "x.gguf")
        prompts = PromptReader(found)
        assert prompts.tokenizer is None or prompts.encode("the ab12") is not None
        assert prompts.end_ids is not None
        build(found, device="cpu", dtype="float32", max_model_len=8)
    except HeadstartError as error:
        assert "\n" not in str(error) and len(str(error)) < 900
