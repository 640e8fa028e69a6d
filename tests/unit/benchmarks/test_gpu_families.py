"""The program that compares every family with vLLM: what it asks for, and what it says of that."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import family_budgets
import gpu_families
import pytest
from gpu_families import FAMILIES, main
from versus.families_page import page, summary
from versus.family_cases import GIB, needs_of, sizes_of, weight_bytes
from versus.floor import Speeds, answer_seconds, prompt_seconds, trunk_pass
from versus.plan import parse_plan
from versus.quick_checkpoints import write_quickly

from headstart.calibrate.shape_config import shape_config
from headstart.engine.engine import Engine

TINY = (
    "qwen3.5-27b,layers=4,hidden=128,intermediate=64,heads=2,kv_heads=1,head_dim=16,vocab=512"
)  # fmt: skip
GPU_GIB, DISK_GB, BESIDE_GIB = 139, 46, 9  # beside weights and K/V of both


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_families.py", *words])
    return main()


def test_every_shape_and_the_plan_are_known() -> None:
    assert all(shape_config(case.shape)["vocab_size"] for case in FAMILIES.values())
    groups = parse_plan(gpu_families._PLAN)
    assert [group.drafts for group in groups] == [3, 0]
    for group in groups:
        asked = [stage.requests for stage in group.stages if stage.kind == "answer"]
        assert sorted(asked) == [1, 16, 64, 128]
    assert [stage.prompt for stage in groups[0].stages if stage.kind == "first"] == [2500, 30000]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_fits_on_the_disk_and_both_engines_on_the_gpu(name: str) -> None:
    needs = needs_of(FAMILIES[name].shape, 128)
    assert 29e9 < needs.weights < DISK_GB * 1e9
    both = 2 * needs.weights + needs.headstart_kv + needs.vllm_kv
    assert both / GIB + BESIDE_GIB < GPU_GIB


def test_a_checkpoint_is_compared_with_an_engine_that_starts_with_drafts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "stub" / "vllm"
    package.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("stub_vllm.py"), package / "__init__.py")
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """In this process, which has torch already."""
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", command[1:])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(command[1], run_name="__main__")
        return subprocess.CompletedProcess(command, int(ended.value.code or 0))

    monkeypatch.setattr(subprocess, "run", run)
    path = ":".join([str(tmp_path / "stub"), str(Path(gpu_families.__file__).parents[1])])
    ours = {"device": "cpu", "dtype": "float32", "kernels": "off", "threads": 1}
    words = [str(tmp_path), "--families", "qwen3.5", "--shape", TINY, "--active", "40"]
    words += ["--plan", "3:2,first40;0:1", "--prompt", "12", "--answer", "4", "--agree", "9"]
    words += ["--headstart-options", json.dumps(ours), "--vllm-env", f"PYTHONPATH={path}"]
    assert run_main(monkeypatch, *words) == 1
    document = json.loads((tmp_path / "qwen3.5.json").read_text())
    found = [(row["k"], row["stage"], sorted(row["engines"])) for row in document["rows"]]
    both = ["headstart", "vllm"]
    assert found == [(3, "answer", both), (3, "first", both), (0, "answer", ["headstart"])]
    assert all(row["floor"] > 0 for row in document["rows"])
    assert document["needs"]["weights"] == weight_bytes(TINY) and document["write_seconds"] > 0
    (failure,) = document["failures"]
    assert "K = 0" in failure and "['Ours'] are not supported" in failure
    told = capsys.readouterr().out
    assert "- vLLM: Using STUB attention backend" in told
    assert "K = 0: vllm ended with 1" in told.splitlines()[-1]
    assert "['Ours'] are not supported" in told.splitlines()[-1]
    # The same page from the results alone.
    words = [str(tmp_path), "--families", "qwen3.5", "--page"]
    assert run_main(monkeypatch, *words) == 1
    assert capsys.readouterr().out.strip() in told


def test_a_family_that_fails_is_told_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "ernie-4.5-21b" in command:
            raise subprocess.CalledProcessError(1, command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    assert run_main(monkeypatch, str(tmp_path), "--families", "ernie,glm") == 1
    said = capsys.readouterr().out
    assert "ernie: not compared: Command" in said and "gpu_vs_vllm.py ended with 3" in said


def test_nothing_begins_when_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "glm").mkdir()
    assert run_main(monkeypatch, str(tmp_path), "--families", "glm", "--time-limit", "0") == 1
    assert "no time was left" in capsys.readouterr().out


def test_a_summary_is_above_one_where_ours_is_faster() -> None:
    times = {name: {"first_token_seconds": {"value": value}} for name, value in
             (("headstart", 0.1), ("vllm", 0.2))}  # fmt: skip
    rows = [
        {"k": 0, "stage": "first", "requests": 1, "prompt": 2500, "engines": times, "floor": 40.0},
        {"k": 0, "stage": "answer", "requests": 1, "engines": {"headstart": {"value": 1.0}}},
    ]
    assert summary({"rows": rows, "failures": []}) == "K=0 first 2500 2.00x, K=0 1 -"
    lines = page({"it": {"rows": rows, "failures": []}}).splitlines()
    assert lines[2] == "| it | 0 | first 2500 | 100 ms | 200 ms | 2.00x | 4.00 / 8.00 |"
    assert lines[3] == "| it | 0 | 1 | 1 | - | - | - / - |"


def test_memory_that_is_asked_for_holds_all_requests(tmp_path: Path) -> None:
    write_quickly(TINY, None, tmp_path / "model", rate=0.8, active=40)
    weights = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert weight_bytes(TINY) <= weights < 1.01 * weight_bytes(TINY) + 20_000  # a header
    needs = needs_of(TINY, 20, tokens=4000)
    engine = Engine(
        tmp_path / "model", device="cpu", dtype="bfloat16", speculate=3, kernels="off",
        kv_bytes=needs.headstart_kv, max_running_requests=20, prefix_caching=False,
    )  # fmt: skip
    states = re.search(r"(\d+) recurrent states", " ".join(engine.notes))
    assert engine.pool.num_slots >= 20 * 4000 and states is not None and int(states[1]) >= 20


def test_a_floor_counts_weights_experts_contexts_and_states() -> None:
    speeds, config = Speeds(1.0, 1e30), sizes_of(TINY)  # bytes alone
    work = trunk_pass(config, requests=2, rows=4, seen=100)
    inner, hidden, vocab = 64, 128, 512
    delta = config.delta
    assert delta is not None
    mixers = 3 * hidden * (delta.channels + 2 * delta.v_heads + 2 * delta.values)
    mixers += hidden * 16 * (2 * 2 + 1 + 1 + 2)  # q with gates, k, v and o
    weights = mixers + 4 * 3 * hidden * inner + vocab * hidden
    states = 2 * 2 * 3 * (2 * delta.conv_values + 4 * delta.memory_values)
    assert work.bytes == 2 * weights + 2 * 2 * 100 * 2 * 16 + states
    assert work.flops > 2 * 8 * weights
    # Few rows read few experts, many read all of them.
    shape = "ernie-4.5-21b,layers=2,hidden=128,intermediate=64,heads=2,kv_heads=1,head_dim=16"
    experts = sizes_of(shape)
    one, many = (trunk_pass(experts, rows, 1, 0).bytes for rows in (1, 4096))
    assert many - one == pytest.approx(2 * 58 * 3 * 128 * 1536)
    # A prompt's attention grows with its square, where nothing is cut off.
    flops = Speeds(1e30, 1.0)
    short, long = (prompt_seconds(config, 1, rows, flops) for rows in (1000, 2000))
    assert long - 2 * short == pytest.approx(2 * 2000 * 500 * 2 * 2 * 16 - 2 * vocab * hidden)
    seconds = answer_seconds(
        config, requests=1, prompt=10, answer=31, drafts=3, per_round=3, speeds=speeds
    )
    assert seconds > 10 * trunk_pass(config, 1, 4, 25.5).bytes


def test_parts_of_a_budget_add_up_to_a_round() -> None:
    config = sizes_of(FAMILIES["deepseek-sparse"].shape)
    parts = family_budgets.budget(config, 64, 3, 4000)
    whole = trunk_pass(config, 64, 4, 4000).seconds(Speeds())
    trunk = sum(parts.values()) - parts["drafts"]
    assert whole < trunk < 1.4 * whole  # of each part the longer time
    # What an indexer chooses bounds attention; its scores go on growing.
    longer = family_budgets.budget(config, 64, 3, 64_000)["contexts"]
    dense = sizes_of(FAMILIES["deepseek"].shape)
    assert longer < family_budgets.budget(dense, 64, 3, 64_000)["contexts"] / 2
    assert longer > 2 * parts["contexts"]
