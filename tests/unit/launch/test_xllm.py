from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.launch_examples import command, report

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import ConfigError, LaunchError
from headstart.heads.inspection import inspect
from headstart.launch import LaunchOptions, build
from headstart.launch.run import run


def test_there_is_one_process_per_device_with_its_own_port_rank_and_log() -> None:
    built = command("xllm", tensor_parallel=4, data_parallel=2, port=9000)
    assert len(built.processes) == 8
    last = built.processes[7]
    assert last.argv[-6:] == ("--device_id", "7", "--port", "9007", "--node_rank", "7")
    assert last.argv[last.argv.index("--nnodes") + 1] == "8"
    assert last.log == Path("log/node_7.log")


def test_all_ports_must_exist() -> None:
    assert len(command("xllm", tensor_parallel=2, port=65534).processes) == 2
    with pytest.raises(ConfigError, match=r"takes 2 ports from there up; expected at most 65534"):
        command("xllm", tensor_parallel=2, port=65535)


def test_another_machine_goes_on_counting_ranks_but_not_devices() -> None:
    built = command("xllm", tensor_parallel=16, num_nodes=2, node_rank=1, master_addr="node0:9748")
    assert len(built.processes) == 8
    assert built.processes[0].argv[-6:] == (
        "--device_id", "0", "--port", "8000", "--node_rank", "8",
    )  # fmt: skip
    with pytest.raises(LaunchError, match=r"--num-nodes: .* Add --master-addr"):
        command("xllm", tensor_parallel=16, num_nodes=2)


def test_without_a_head_folder_the_export_comes_first() -> None:
    built = command("xllm")
    argv = built.processes[0].argv
    assert argv[argv.index("--draft_model") + 1] == "/models/a model-mtp"
    assert built.shell().splitlines()[1] == (
        "[ -d '/models/a model-mtp' ] || headstart export '/models/a model' --format xllm --out "
        "'/models/a model-mtp' || exit 1"
    )
    assert "headstart export" not in command("xllm", head=Path("/heads/h")).shell()
    assert "headstart export" not in command("xllm", speculate=0).shell()


def test_running_exports_the_head_first_unless_it_is_there(
    tiny: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = fake_xllm(tmp_path, 'echo "$@"')
    monkeypatch.setenv("PATH", environment["PATH"])
    model = tmp_path / "model"
    model.symlink_to(tiny("deepseek_v3"))
    options = LaunchOptions(log_dir=tmp_path / "log")
    for _ in range(2):  # the second finds the folder that the first made
        built = build("xllm", inspect(Checkpoint.open(model)), options, "0.10.0")
        assert run(built) == 0
    assert built.preparation is not None
    draft = json.loads((built.preparation.folder / "config.json").read_text())
    assert draft["model_type"] == "deepseek_v3_mtp"


def test_running_stops_with_the_command_if_the_export_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", fake_xllm(tmp_path, "exit 0")["PATH"])
    built = build("xllm", report(path=tmp_path / "nowhere"), LaunchOptions(), "0.10.0")
    with pytest.raises(LaunchError, match=r"Run `headstart export .* --format xllm --out"):
        run(built)


def test_no_release_is_said_to_need_bf16_weights() -> None:
    assert not any("dequantise" in text for text in command("xllm", "glm4_moe").warnings)


def test_older_releases_name_the_device_and_that_of_the_draft() -> None:
    argv = command("xllm", version="0.9.1", device="mlu").processes[0].argv
    assert argv[-8:-4] == ("--devices", "mlu:0", "--draft_devices", "mlu:0")
    assert "--speculative_algorithm" not in command("xllm", version="0.8.0").processes[0].argv


def test_prefix_cache_and_chunks_are_off_with_a_head_unless_asked_for() -> None:
    argv = command("xllm").processes[0].argv
    assert "--enable_prefix_cache=false" in argv and "--enable_chunked_prefill=false" in argv
    asked = command("xllm", prefix_caching="on", chunked_prefill="512")
    assert "--enable_prefix_cache=true" in asked.processes[0].argv
    assert any("newer builds only" in warning for warning in asked.warnings)
    plain = command("xllm", speculate=0).processes[0].argv
    assert not any("prefix_cache" in word for word in plain)


def test_mimo_needs_a_build_of_the_development_branch() -> None:
    with pytest.raises(
        LaunchError, match=r"needs a build of xLLM's development branch, found 0\.10\.1"
    ):
        command("xllm", "mimo")
    assert command("xllm", "mimo", "main").processes


def fake_xllm(folder: Path, body: str) -> dict[str, str]:
    program = folder / "xllm"
    program.write_text(f"#!/bin/bash\n{body}\n")
    program.chmod(0o755)
    exporter = folder / "headstart"  # the script makes the draft checkpoint first
    exporter.write_text(f"#!/bin/bash\necho \"$@\" >> '{folder}/exported'\n")
    exporter.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_the_script_starts_what_the_list_of_processes_says(tmp_path: Path) -> None:
    record = 'for word in "$@"; do printf "%s\\n" "$word"; done; sleep 1'
    environment = fake_xllm(tmp_path, record)
    log_dir = tmp_path / "the logs"
    built = build(
        "xllm",
        report(),
        LaunchOptions(tensor_parallel=2, log_dir=log_dir, extra="--x 'a $b'"),
        "0.10.0",
    )
    subprocess.run(["bash", "-n"], input=built.shell(), text=True, check=True)
    subprocess.run(["bash"], input=built.shell(), text=True, check=True, env=environment)
    for process in built.processes:
        assert process.log is not None
        assert tuple(process.log.read_text().splitlines()) == process.argv[1:]
    assert (tmp_path / "exported").read_text().startswith("export /models/a model --format xllm")


def test_the_script_stops_all_and_fails_when_one_process_fails(tmp_path: Path) -> None:
    body = '[[ "$*" == *"--node_rank 1"* ]] && exit 3; exec sleep 60'
    environment = fake_xllm(tmp_path, body)
    built = build(
        "xllm", report(), LaunchOptions(tensor_parallel=2, log_dir=tmp_path / "log"), "0.10.0"
    )
    ended = subprocess.run(["bash"], input=built.shell(), text=True, env=environment, timeout=10)
    assert ended.returncode == 3


def test_the_machine_readable_form_lists_every_process() -> None:
    document = json.loads(json.dumps(command("xllm", tensor_parallel=2).as_json()))
    assert len(document["processes"]) == 2 and document["speculate"] == 3
