"""llama-server's command: MTP by build, files with and without a head, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gguf_models import random_bits, write_head, write_trunk
from support.launch_examples import command, report, value_of

from headstart.errors import LaunchError
from headstart.heads.export import plan_export
from headstart.heads.formats import open_any, open_head
from headstart.heads.formats.gguf.archs import arch_named
from headstart.heads.inspection import inspect
from headstart.launch import LaunchOptions, build, commands_for
from headstart.launch.probe import probe
from headstart.launch.versions import NEWEST


def test_a_head_in_the_file_is_asked_for_by_type_and_length() -> None:
    built = command("llamacpp", speculate=2, max_model_len=4096, max_running_requests=3)
    assert built.argv[:3] == ("llama-server", "--model", "/models/a model")
    assert value_of(built, "--spec-type") == "draft-mtp"
    assert value_of(built, "--spec-draft-n-max") == "2"
    assert value_of(built, "--ctx-size") == "12288"  # shared out among three
    assert value_of(built, "--parallel") == "3"
    assert "--spec-draft-model" not in built.argv


def test_builds_are_compared_as_numbers() -> None:
    assert command("llamacpp", version="b10586").version == "b10586"
    assert not command("llamacpp", version="b10586").warnings[1:]
    older = command("llamacpp", version="9999")
    assert any("were read in b10586" in warning for warning in older.warnings)
    with pytest.raises(LaunchError, match=r"commands are written for b9180 and later"):
        command("llamacpp", version="b9000")
    with pytest.raises(LaunchError, match=r"needs llama\.cpp b10238 or later, found b10000"):
        command("llamacpp", "qwen3_next", version="b10000")


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("version: 0.5.0 (build 11042, commit de3ff81)", "b11042"),
        ("version: 9500 (b21e4de7)", "b9500"),
        ("version: 0.5.0-dev (build 0, commit unknown)", NEWEST["llamacpp"]),
    ],
)
def test_the_build_is_read_from_what_the_program_says(
    said: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    answer = probe("llamacpp")
    assert (answer.version, answer.is_installed) == (found, True)
    assert bool(answer.note) is (found == NEWEST["llamacpp"])


def test_releases_are_newer_than_builds() -> None:
    assert command("llamacpp", "bailing_moe_v3", version="0.5.0").argv[0] == "llama-server"


def test_only_llama_cpp_serves_gguf_and_nothing_else() -> None:
    with pytest.raises(LaunchError, match=r"is a GGUF file, which llama.cpp serves"):
        command("vllm", "qwen3_5", r_format="gguf")
    with pytest.raises(LaunchError, match=r"is not GGUF, which llama.cpp reads"):
        command("llamacpp", r_format=None)
    commands = commands_for(report("qwen3_5", format="gguf"))
    refused = {name for name, answer in commands.items() if isinstance(answer, str)}
    assert refused == {"vllm", "sglang", "trtllm", "xllm", "mlx"}
    assert len({commands[name] for name in refused}) == 1  # said once by inspect


def test_families_that_it_does_not_draft_with_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"llama\.cpp does not serve the head of GLM-4\.5"):
        command("llamacpp", "glm4_moe")


def test_a_head_in_a_file_of_its_own(tmp_path: Path) -> None:
    arch = arch_named("qwen35")
    assert arch is not None
    head = write_head(arch, tmp_path / "hf", random_bits())
    trunk = write_trunk(arch, tmp_path / "trunk")
    plan_export(open_head(head), "gguf", trunk=open_any(trunk)).write(tmp_path / "draft")
    draft = tmp_path / "draft" / "mtp-trunk.gguf"
    model = inspect(open_any(trunk))
    built = build("llamacpp", model, LaunchOptions(head=draft), "b10586")
    assert value_of(built, "--spec-draft-model") == str(draft)
    with pytest.raises(LaunchError, match=r"holds a head without its model.*--head "):
        build("llamacpp", inspect(open_any(draft)), LaunchOptions(), "b10586")
    with pytest.raises(LaunchError, match=r"qwen35, absent.*headstart restore .*--from ORIGINAL"):
        build("llamacpp", model, LaunchOptions(), "b10586")
    with pytest.raises(LaunchError, match=r"reads a GGUF file with a head alone.*--format gguf"):
        build("llamacpp", model, LaunchOptions(head=head), "b10586")
