"""`headstart doctor` without a URL: what there is, what is missing, and what looking took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import headstart

from headstart.doctor import installed, machine
from headstart.errors import install


def looked(*words: str, **environment: str) -> tuple[int, dict[str, Any]]:
    done = headstart("doctor", *words, "--json", **environment)
    return done.returncode, json.loads(done.stdout)


def test_it_says_what_there_is_without_importing_torch(tmp_path: Path) -> None:
    """The command in a process of its own; the clock is not looked at, what it imports is."""
    code = (
        "import sys; sys.argv = ['headstart', 'doctor', '--json']\n"
        "from headstart.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules)"
    )
    words = [sys.executable, "-c", code]
    paths = {"HEADSTART_CACHE": str(tmp_path), "HF_HOME": str(tmp_path), "PATH": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in paths.items():
            patch.setenv(name, value)
        done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["torch"] and found["versions"]["python"]
    assert found["torch_seconds"] is None and found["seconds"] > 0
    assert found["backends"]["cuda"] == "nvidia-smi names no GPU"
    assert found["backends"]["torch"] is None
    assert found["engines"]["xllm"] is None
    assert {"serve", "bench", "demo"} <= set(found["wishes"])
    assert all(cache["path"].startswith(str(tmp_path)) for cache in found["caches"])


def test_people_read_the_same(tmp_path: Path) -> None:
    done = headstart("doctor", HEADSTART_CACHE=str(tmp_path), HF_HOME=str(tmp_path))
    assert done.returncode == 0
    for words in ("versions", "backend numba", "for serve", "Headstart's own: ", "writable"):
        assert words in done.stdout
    assert "looked around in" in done.stderr and "torch was not imported" in done.stderr


def test_a_wish_fails_with_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = machine.package_version
    monkeypatch.setattr(
        installed, "package_version", lambda name: None if name == "uvicorn" else before(name)
    )
    private = {"HEADSTART_CACHE": str(tmp_path), "HF_HOME": str(tmp_path), "PATH": str(tmp_path)}
    code, found = looked("--for", "serve", **private)
    assert code == 1 and found["problems"] == [f"missing for serve: uvicorn. {install('serve')}."]
    assert found["wishes"]["serve"]["missing"] == ["uvicorn"]
    assert looked("--for", "bench", **private)[0] == 0
    assert looked(**private)[0] == 0, "it was not asked for"
    code, found = looked("--for", "sglang", **private)
    assert code == 1 and 'pip install "sglang[all]"' in found["problems"][0]
    code, found = looked("--for", "gpu", **private)
    assert code == 1 and "no GPU can be used: nvidia-smi names no GPU." in found["problems"]


def test_extras_are_those_of_the_package() -> None:
    assert "uvicorn" in installed.packages_of("serve")
    assert installed.packages_of("bench") == ["aiohttp"]
    assert installed.packages_of("no such extra") == []


def test_caches_that_cannot_be_used_are_a_problem(tmp_path: Path) -> None:
    kernels = tmp_path / "headstart-triton"
    kernels.mkdir(mode=0o755)
    kernels.chmod(0o755)
    (kernels / "x").write_bytes(bytes(2000))
    older = tmp_path / "kernels-of-old"
    older.mkdir()
    code, found = looked(HEADSTART_CACHE=str(tmp_path), HF_HOME=str(tmp_path))
    (problem,) = found["problems"]
    assert code == 1 and "not used: it has mode 0755, not 0700" in problem
    by_name = {cache["what"]: cache for cache in found["caches"]}
    assert by_name["compiled GPU kernels"]["num_bytes"] == 2000
    assert by_name["CPU kernels of other versions, 1 folders"]["state"] == "may be removed"
    file = tmp_path / "file"
    file.write_text("")
    code, found = looked(HEADSTART_CACHE=str(file / "x"), HF_HOME=str(tmp_path))
    assert code == 1 and f"{file} is not a folder" in "\n".join(found["problems"])


@pytest.mark.parametrize(
    ("found", "versions", "compiler", "reason"),
    [
        ([], {}, "cc", "names no GPU"),
        (["H200"], {"torch's CUDA": None}, "cc", "torch 2 is built without CUDA"),
        (["H200"], {"triton": None}, "cc", "triton is not installed"),
        (["H200"], {}, "", "needs a C compiler"),
        (["H200"], {}, "cc", "torch sees no GPU"),
    ],
)
def test_why_a_gpu_is_not_used(
    found: list[str],
    versions: dict[str, str | None],
    compiler: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: compiler or None)
    known = {"torch": "2", "torch's CUDA": "13.0", "triton": "3", **versions}
    said, has_imported = machine._why_no_kernels(found, known)
    assert said is not None and reason in said
    assert has_imported == ("torch sees" in reason)


def test_the_build_of_torch_is_read_from_its_files() -> None:
    import torch

    assert machine.torch_cuda() == torch.version.cuda
    source = "from x import y\na = b = '1'\ncuda: str | None = '13.0'\nhip = None\nd['e'] = 'f'\n"
    assert machine._assigned(source) == {"a": "1", "b": "1", "cuda": "13.0"}
