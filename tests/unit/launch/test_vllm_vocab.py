"""Draft vocabularies on vLLM's command line, by our plugin; and SGLang's traps with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launch_examples import command, value_of

from headstart.errors import ConfigError, DataError, LaunchError
from headstart.vllm_plugin.versions import NEWEST_RUN
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write


def test_a_vocabulary_goes_to_the_plugin() -> None:
    built = command("vllm", version=NEWEST_RUN, draft_vocab=Path("/maps/m.json"))
    spec = json.loads(value_of(built, "--speculative-config"))
    assert spec["use_local_argmax_reduction"] is True
    asked = json.loads(value_of(built, "--additional-config"))
    assert asked == {"headstart": {"draft_vocab": "/maps/m.json"}}
    assert any("pip install 'headstart[vllm]'" in note for note in built.notes)
    assert any("no file /maps/m.json" in warning for warning in built.warnings)
    assert command("vllm", version=NEWEST_RUN, token_map=Path("/maps/m.json")).argv == built.argv


def test_without_one_nothing_is_asked_of_it() -> None:
    assert "--additional-config" not in command("vllm").argv


@pytest.mark.parametrize(
    ("version", "words"),
    [("0.25.0", r"needs vLLM 0\.26\.0"), ("0.33.0", r"too new.*--engine-version 0\.32\.0")],
)
def test_releases_that_the_plugin_does_not_know_are_refused(version: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        command("vllm", version=version, draft_vocab=Path("/maps/m.json"))


def test_a_list_of_another_model_is_refused(tmp_path: Path) -> None:
    write([DraftVocab(ids=(1, 2), vocab_size=3)], tmp_path / "m.json")
    with pytest.raises(DataError, match="vocabulary of 3 tokens"):
        command("vllm", version=NEWEST_RUN, draft_vocab=tmp_path / "m.json")


def test_several_lists_are_refused_unless_one_counts_everything(tmp_path: Path) -> None:
    maps = [DraftVocab(ids=(1, 2), name="en"), DraftVocab(ids=(3,), name="zh")]
    write(maps, tmp_path / "m.json")
    with pytest.raises(ConfigError, match="--only NAME"):
        command("vllm", version=NEWEST_RUN, draft_vocab=tmp_path / "m.json")
    write([*maps, DraftVocab(ids=(1, 2, 3), name="all")], tmp_path / "a.json")
    command("vllm", version=NEWEST_RUN, draft_vocab=tmp_path / "a.json")


def test_collecting_brings_our_worker_beside_a_vocabulary() -> None:
    given = {"collect": Path("/data/c"), "draft_vocab": Path("/maps/m.json")}
    built = command("vllm", version=NEWEST_RUN, **given)
    asked = {"collect": "/data/c", "draft_vocab": "/maps/m.json"}
    assert json.loads(value_of(built, "--additional-config")) == {"headstart": asked}
    assert value_of(built, "--worker-cls") == "headstart.vllm_plugin.collect.Worker"
    assert any("is written to /data/c" in note for note in built.notes)
    with pytest.raises(LaunchError, match="too new"):
        command("vllm", version="0.33.0", collect=Path("/data/c"))
    with pytest.raises(LaunchError, match="vLLM alone has"):
        command("sglang", collect=Path("/data/c"))
    in_docker = command("vllm", version=NEWEST_RUN, collect=Path("/data/c"), docker=True)
    assert any("-v /data/c:/data/c" in warning for warning in in_docker.warnings)


def test_an_image_without_headstart_is_said() -> None:
    built = command("vllm", version=NEWEST_RUN, draft_vocab=Path("/maps/m.json"), docker=True)
    assert any("image has no Headstart" in warning for warning in built.warnings)


def test_two_names_of_one_option_are_refused() -> None:
    with pytest.raises(ConfigError, match="two names of one option"):
        command("vllm", version=NEWEST_RUN, draft_vocab=Path("a.json"), token_map=Path("b.json"))


MAP = Path("/m/hot.pt")


def test_sglang_is_refused_a_map_with_tensor_parallel() -> None:
    with pytest.raises(LaunchError, match="4328"):
        command("sglang", draft_vocab=MAP, tensor_parallel=2)


def test_sglang_is_refused_a_map_where_it_ignores_or_refuses_it() -> None:
    with pytest.raises(LaunchError, match="several modules"):
        command("sglang", "step3p5", draft_vocab=MAP, r_modules=3)
    with pytest.raises(LaunchError, match="rejection sampling"):
        command("sglang", draft_vocab=MAP, extra="--speculative-use-rejection-sampling")


def test_tied_embeddings_with_a_map_are_warned_of() -> None:
    tied = command("sglang", "qwen3_5", draft_vocab=MAP, r_config={"tie_word_embeddings": True})
    assert any("embeddings are tied" in warning for warning in tied.warnings)
    plain = command("sglang", "qwen3_5", draft_vocab=MAP)
    assert not any("embeddings are tied" in warning for warning in plain.warnings)
