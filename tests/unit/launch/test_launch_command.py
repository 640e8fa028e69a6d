from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.launch_examples import command, report

from headstart.errors import ConfigError, LaunchError
from headstart.families.engines import ENGINE_TITLES, served_by
from headstart.families.registry import families
from headstart.heads.inspection import Report
from headstart.launch import ENGINES, EngineCommand, LaunchOptions, build, commands_for
from headstart.launch.command import Process, continued

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0\n"), max_size=12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(WORDS, st.just("--flag"), st.just("-v")), min_size=1, max_size=8))
def test_a_printed_command_reads_back_as_the_same_arguments(words: list[str]) -> None:
    # To bash a backslash at the end of a line is nothing; to shlex it is a newline.
    text = continued(tuple(words))
    assert [word for word in shlex.split(text) if word != "\n" or "\n" in words] == words
    told = subprocess.run(["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, check=True)
    assert told.stdout.decode().split("\0")[:-1] == words


NAME = "it's $HOME `x`"


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_printed_is_valid_bash(engine: str) -> None:
    # mlx-vlm's server has no option for a name.
    odd = {"extra": '--x "it\'s \\$HOME"'} if engine == "mlx" else {"served_model_name": NAME}
    text = command(engine, speculate=1, **odd).shell()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_shell_gives_the_program_exactly_the_arguments(tmp_path: Path) -> None:
    program = tmp_path / "my engine"
    program.write_text('#!/bin/bash\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    program.chmod(0o755)
    words = ("--config", '{"a": "it\'s"}', "--name", "two words", "--flag", "$HOME")
    built = EngineCommand(
        engine="vllm",
        version="1",
        processes=(Process((str(program), *words)),),
        files={"a file.yaml": "x: 'y'\n"},
        env={"NAME": "a b"},
    )
    done = subprocess.run(
        ["bash", "-c", built.shell()], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert tuple(done.stdout.split("\0")[:-1]) == words
    assert (tmp_path / "a file.yaml").read_text() == "x: 'y'\n"


def test_no_text_ends_the_file_that_it_is_written_to(tmp_path: Path) -> None:
    def writing(text: str) -> EngineCommand:
        processes = (Process(("true",)),)
        return EngineCommand(
            engine="vllm", version="1", processes=processes, files={"-f.yaml": text}
        )

    (known,) = re.findall("<<'(.*)'", writing("a: 1\n").shell())
    text = "".join(f"a: 1\n{mark}\ntouch owned\n" for mark in ("END", "EOF", known))
    built = writing(text)
    subprocess.run(["bash", "-c", built.shell()], cwd=tmp_path, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["-f.yaml"]
    assert (tmp_path / "-f.yaml").read_text() == text


@pytest.mark.parametrize("engine", ENGINES)
def test_a_name_that_begins_with_a_dash_is_no_option(engine: str) -> None:
    version = "main" if engine == "xllm" else ""
    built = command(engine, r_path=Path("-model"), speculate=0, version=version)
    words = [word for process in built.processes for word in process.argv]
    assert "./-model" in words and "-model" not in words


def test_a_script_runs_no_text_of_an_option(tmp_path: Path) -> None:
    hostile = '$(touch owned)`touch owned`"; touch owned; "'
    logs = tmp_path / "-logs"
    built = command("xllm", version="0.9.0", device=hostile, speculate=0, log_dir=logs)
    bare = "\n".join(["xllm() { :; }", built.shell()])
    subprocess.run(["bash", "-c", bare], cwd=tmp_path, check=False, capture_output=True, timeout=20)
    assert [path.name for path in tmp_path.iterdir()] == ["-logs"]


@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_docker_sees_the_model_and_its_own_files_and_cannot_write(engine: str) -> None:
    built = command(engine, docker=True)
    mounts = [built.argv[i + 1] for i, word in enumerate(built.argv) if word == "-v"]
    files = [Path.cwd() / name for name in built.files]
    assert mounts == [f"{path}:{path}:ro" for path in ("/models/a model", *files)]
    assert bool(files) is (engine == "trtllm")


@pytest.mark.parametrize(
    ("engine", "version", "image"),
    [
        ("vllm", "0.27.1+cu128", "vllm/vllm-openai:v0.27.1"),
        ("vllm", "main", "vllm/vllm-openai:nightly"),
        ("sglang", "0.5.18", "lmsysorg/sglang:v0.5.18"),
        ("trtllm", "1.3.0", "nvcr.io/nvidia/tensorrt-llm/release:1.3.0"),
    ],
)
def test_docker_runs_the_image_of_the_version(engine: str, version: str, image: str) -> None:
    argv = command(engine, version=version, docker=True).argv
    assert argv[:2] == ("docker", "run") and image in argv
    assert "/models/a model:/models/a model:ro" in argv


def test_docker_sees_the_files_behind_a_snapshot_of_the_hub_cache() -> None:
    cache = Path("/cache/models--a--b")
    found = report(path=cache / "snapshots" / "0123")
    argv = build("vllm", found, LaunchOptions(docker=True), "0.27.1").argv
    assert f"{cache}:{cache}:ro" in argv


def test_docker_has_no_image_of_a_development_branch_without_one() -> None:
    with pytest.raises(LaunchError, match="publishes no image"):
        command("trtllm", version="main", docker=True).shell()


def test_no_engine_is_unknown() -> None:
    named = [(*family.served, *family.variants) for family in families()]
    assert {engine for engines in named for engine in engines} == set(ENGINE_TITLES)
    assert served_by("motif") == {}
    apart = [(family.name, engine) for family in families() for engine in family.served_apart]
    assert apart == [("qwen3", "vllm"), ("qwen3_moe", "vllm"), ("bailing_moe", "vllm")]
    assert [served_by(name)[engine].is_apart for name, engine in apart] == [True, True, False]


@pytest.mark.parametrize("name", sorted(family.name for family in families() if family.served))
def test_each_family_has_a_command_for_each_engine_that_serves_it(name: str) -> None:
    for engine in served_by(name):
        if name == "gemma4_assistant":
            with pytest.raises(LaunchError, match="cannot serve by itself"):
                build(engine, report(name), LaunchOptions(), "main")
        else:
            # Ling 2.0 shares its family with 2.5, and its name is the family's.
            model_type = "bailing_hybrid" if name == "bailing_moe" else None
            form = {"llamacpp": "gguf", "mlx": "mlx"}.get(engine)
            found = report(name, model_type=model_type, format=form)
            assert build(engine, found, LaunchOptions(), "main").num_drafts > 0


def test_inspect_gets_a_command_or_a_reason_per_engine() -> None:
    answers = commands_for(report("qwen3_next"))
    assert isinstance(answers["vllm"], EngineCommand)
    assert isinstance(answers["xllm"], str)
    assert "These do: vLLM, SGLang" in answers["xllm"]


@pytest.mark.parametrize(
    "found",
    [
        report("motif"),
        report("", state="absent", model_type="llama4"),
        report("deepseek_v3", state="declared-but-missing"),
        report("gemma4_assistant"),
    ],
    ids=["no engine", "no family", "no head", "assistant"],
)
def test_a_reason_that_holds_for_every_engine_is_the_same_text_for_each(found: Report) -> None:
    reasons = list(commands_for(found).values())
    assert all(isinstance(reason, str) for reason in reasons)
    assert len(set(map(str, reasons))) == 1


def test_a_version_that_is_only_assumed_is_not_said_to_be_found() -> None:
    found = report("glm_moe_dsa")
    with pytest.raises(LaunchError, match=r"or later, found 0\.9\.0\. Upgrade") as named:
        build("vllm", found, LaunchOptions(), "0.9.0")
    with pytest.raises(LaunchError, match=r"0\.9\.0 is the newest version known") as assumed:
        build("vllm", found, LaunchOptions(), "0.9.0", is_assumed=True)
    assert "--engine-version" in str(assumed.value) and ", found" not in str(assumed.value)
    assert "--engine-version" not in str(named.value)


def test_what_only_a_development_branch_has_is_said_so_wherever_the_engine_is_named() -> None:
    answers = commands_for(report("mimo"))
    said = str(answers["xllm"])
    assert "needs a build of xLLM's development branch: no release has it, up to 0.10.1" in said
    assert "--engine-version main" in said
    assert "These do: vLLM, SGLang, xLLM (development branch)." in str(answers["trtllm"])
    with pytest.raises(LaunchError, match=r"development branch, found 0\.10\.0"):
        build("xllm", report("mimo"), LaunchOptions(), "0.10.0")


def test_an_unknown_engine_and_a_bad_version_are_named() -> None:
    with pytest.raises(ConfigError, match="no engine is called 'ollama'; expected one of vllm"):
        build("ollama", report(), LaunchOptions(), "1")
    with pytest.raises(ConfigError, match="'newest' is not a version"):
        build("vllm", report(), LaunchOptions(), "newest")
