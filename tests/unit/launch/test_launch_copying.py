"""What launch says of drafts from the context in other engines."""

from __future__ import annotations

import pytest

from headstart.launch.copying import about_copies


@pytest.mark.parametrize(
    ("engine", "version", "words"),
    [
        ("vllm", "0.11.0", ["vLLM 0.11.0", "by the method ngram only in place of MTP"]),
        ("vllm", "0.11.1", ["the method ngram or suffix (needs arctic-inference) only in place"]),
        ("vllm", "0.17.1", ["the method ngram or suffix"]),
        ("vllm", "0.18.0", ["the method ngram, ngram_gpu or suffix (needs arctic-inference) only"]),
        ("vllm", "0.32.0", ["ngram_gpu or", "vllm-project/vllm#46977", "headstart serve"]),
        ("sglang", "0.5.3", ["--speculative-algorithm NGRAM only in place of MTP"]),
        ("sglang", "0.5.4.post3", ["--speculative-algorithm NGRAM only in place of MTP"]),
        ("sglang", "0.5.23", ["--speculative-algorithm NGRAM only in place of MTP"]),
        ("trtllm", "1.4.0rc1", ["beside MTP", "sa_config"]),
        ("llamacpp", "b10586", ["beside MTP", "--spec-type"]),
    ],
)
def test_engines_that_copy_say_how(engine: str, version: str, words: list[str]) -> None:
    (line,) = about_copies(engine, version)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("engine", "version"), [("sglang", "0.5.2"), ("xllm", "0.10.1"), ("mlx", "0.7.10")]
)
def test_engines_that_do_not_are_not_mentioned(engine: str, version: str) -> None:
    assert about_copies(engine, version) == []
