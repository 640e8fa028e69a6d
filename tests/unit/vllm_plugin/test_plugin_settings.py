"""What is asked of the plugin, where, and which of vLLM's releases it stays out of."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.errors import ConfigError
from headstart.vllm_plugin.settings import Settings, settings_of
from headstart.vllm_plugin.versions import why_not


def config(additional: Any = None, **draft: Any) -> Any:
    hf_config = SimpleNamespace(**draft)
    return SimpleNamespace(
        additional_config=additional if additional is not None else {},
        speculative_config=SimpleNamespace(
            draft_model_config=SimpleNamespace(hf_config=hf_config, model="/heads/h")
        ),
    )


def test_nothing_asked_is_nothing() -> None:
    assert settings_of(config(), {}) == Settings()
    assert not settings_of(config(), {}).is_asked


def test_a_file_beside_the_head_is_found_by_its_config() -> None:
    found = settings_of(config(headstart={"draft_vocab": "draft_vocab.json"}), {})
    assert found.draft_vocab == Path("/heads/h/draft_vocab.json")
    assert "/heads/h" in found.said_by


def test_the_command_line_wins_over_variables_and_they_over_the_config() -> None:
    both = config({"headstart": {"draft_vocab": "/a.json"}}, headstart={"draft_vocab": "c.json"})
    variables = {"HEADSTART_VLLM_DRAFT_VOCAB": "/b.json", "HEADSTART_VLLM_DRAFT_ROWS": "int8"}
    assert settings_of(both, variables).draft_vocab == Path("/a.json")
    only = config(headstart={"draft_vocab": "c.json"})
    found = settings_of(only, variables)
    assert (found.draft_vocab, found.is_int8) == (Path("/b.json"), True)
    assert not settings_of(only, {"HEADSTART_VLLM_DRAFT_VOCAB": "off"}).is_asked


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"draft_vocabulary": "x"}, "draft_vocabulary"),
        ("x.json", "x.json"),
        ({"draft_vocab": 3}, "draft_vocab is 3"),
        ({"draft_rows": "fp4"}, "draft_rows is 'fp4'"),
    ],
    ids=json.dumps,
)
def test_what_makes_no_sense_is_an_error(found: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings_of(config({"headstart": found}), {})


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.32.0", "0.32.3", "0.31.0+cpu"])
def test_known_releases_are_joined(version: str) -> None:
    assert why_not(version) == ""


@pytest.mark.parametrize(
    ("version", "words"),
    [("0.25.1", "too old"), ("0.33.0", "too new"), ("1.0.0", "too new"), ("dev", "no release's")],
)
def test_others_are_named(version: str, words: str) -> None:
    assert words in why_not(version)
    assert version in why_not(version)
