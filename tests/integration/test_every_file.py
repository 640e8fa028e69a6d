"""Every file that any command reads, made odd: used, or refused in one line without a traceback.

`make test` tries what once went wrong (SEEDS); `make test-long` tries so many oddities of each file
as `PER_FILE` says, others in each run of HEADSTART_TEST_SEED.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.long_runs import IS_LONG, unless_long
from support.odd_files import DEEP, PANICS, REFUSED, USED, WHOLE, attempt, chosen, replaced
from support.odd_readers import READERS, prepare

PER_FILE = unless_long(0, 40)
SEED = int(os.environ.get("HEADSTART_TEST_SEED", "0"))
BY_NAME = {reader.name: reader for reader in READERS}
# Reader, file, and what is in it instead: bytes, or the value of a field.
SEEDS: list[tuple[str, str, bytes | tuple[tuple[Any, ...], Any]]] = [
    ("generate: chat", "chat/tokenizer.json", b""),
    ("generate: chat", "chat/tokenizer.json", DEEP),
    ("generate: chat", "chat/tokenizer.json", (("added_tokens", 0), False)),
    ("generate: chat", "chat/tokenizer.json", (("pre_tokenizer",), PANICS["pre_tokenizer"])),
    ("generate: chat", "chat/tokenizer.json", (("normalizer",), PANICS["normalizer"])),
    ("generate: chat", "chat/tokenizer.json", (("decoder",), PANICS["decoder"])),
    ("generate: text", "chat/tokenizer.json", (("post_processor",), PANICS["post_processor"])),
    ("vocab: text", "chat/tokenizer.json", (("pre_tokenizer",), PANICS["pre_tokenizer"])),
    ("calibrate: tokenizer", "chat/tokenizer.json", (("decoder",), PANICS["decoder"])),
    ("generate: chat", "chat/tokenizer_config.json", b"[]"),
    ("generate: chat", "chat/generation_config.json", (("eos_token_id",), [[]])),
    ("generate: chat", "chat/config.json", (("rope_theta",), [None])),
    ("generate: mimo", "models/mimo/config.json", (("rms_norm_eps",), float("nan"))),
    ("generate: mimo", "models/mimo/config.json", (("max_position_embeddings",), {"a": 1})),
    ("generate: mimo", "models/mimo/config.json", (("num_attention_heads",), 2**31)),
    ("generate: deepseek_v3", "models/deepseek_v3/config.json", (("n_group",), {"": {}})),
    ("generate: step3p5", "models/step3p5/config.json", (("layer_types",), -1)),
    ("generate: qwen3_5", "models/qwen3_5/config.json",
     (("text_config", "rope_parameters"), float("inf"))),
    ("inspect: qwen3_next", "models/qwen3_next/config.json", (("mlp_only_layers",), 5)),
    ("launch: qwen3_next", "models/qwen3_next/config.json", (("decoder_sparse_step",), "a")),
    ("vocab: d2t.npy", "vocabs/d2t.npy", WHOLE["zeros"]),
    ("vocab: v.json", "vocabs/v.json", DEEP),
    ("vocab: v.pt", "vocabs/v.pt", b"PK\3\4"),
    ("score: dataset", "data/dataset.json", (("sampling",), [])),
    ("train: cache", "cache/index.json", DEEP),
    ("train: cache", "cache/header.json", DEEP),
    ("train: run", "run/metrics.jsonl", b'{"step": []}\n'),
    ("train: variants", "variants.json", DEEP),
    ("distill: import", "distilled/journal.jsonl", DEEP),
    ("distill: server", "answers/whole.json", DEEP),
    ("bench: diff", "old.json", (("cells", 0, "speculation"), 5)),
    ("bench: server", "answers/chunk.json", (("choices", 0, "token_ids"), 0.5)),
    ("bench: server", "answers/models.json", DEEP),
    ("calibrate: tokenizer", "chat/tokenizer_config.json", (("eos_token",), {"a": 1})),
]  # fmt: skip


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("odd") / "template")


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Iterator[None]:
    """An odd number must not become an allocation that takes the machine along."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if IS_LONG:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (6 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(("name", "file", "odd"), SEEDS, ids=lambda value: str(value)[:40])
def test_what_once_went_wrong_is_refused_or_harmless(
    template: Path, tmp_path: Path, name: str, file: str, odd: Any
) -> None:
    if not isinstance(odd, bytes):
        odd = json.dumps(replaced(json.loads((template / file).read_text()), *odd)).encode()
    assert attempt(BY_NAME[name], template, tmp_path / "work", file, odd) in (USED, *REFUSED)


@pytest.mark.parametrize("name", unless_long((), tuple(BY_NAME)))
def test_every_file_is_used_or_refused(template: Path, tmp_path: Path, name: str) -> None:
    reader, codes = BY_NAME[name], []
    for file in reader.files:
        for label, content in chosen(template / file, PER_FILE, SEED):
            try:
                codes.append(attempt(reader, template, tmp_path / "work", file, content))
            except BaseException as error:  # a panic of a library in Rust is no Exception
                raise AssertionError(f"{name}, {file}: {label}") from error
    assert set(codes) <= {USED, *REFUSED} and set(codes) & set(REFUSED), "something odd is refused"


def test_files_as_they_should_be_are_used(template: Path, tmp_path: Path) -> None:
    """The control: without it, the tests above would also pass if everything were refused."""
    for reader in unless_long(READERS[:3], READERS):
        file = reader.files[0]
        content = (template / file).read_bytes()
        assert attempt(reader, template, tmp_path / "work", file, content) == USED, reader.name
