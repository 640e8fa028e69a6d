"""The Python that tests start processes with does what the real one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.forked_python import working_pid

SCRIPT = """
import os, signal, sys, time
os.write(int(os.environ["GIVEN"]), b"given")
print(sys.argv[1:], sys.stdin.read(), os.getcwd(), "torch" in sys.modules, flush=True)
time.sleep(float(os.environ["SECONDS"]))
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def started(python: str, script: Path, seconds: float) -> tuple[subprocess.Popen[str], int]:
    """The process, and where it has written to the file that was passed on."""
    reads, writes = os.pipe()
    process = subprocess.Popen(
        [python, script.name, "-u", "b c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, cwd=script.parent, pass_fds=[writes],
        env={**os.environ, "GIVEN": str(writes), "SECONDS": str(seconds)},
    )  # fmt: skip
    os.close(writes)
    return process, reads


def test_words_files_folder_environment_and_code_are_those_of_the_real_one(
    quick_python: str, script: Path
) -> None:
    said = []
    for python in (quick_python, sys.executable):
        process, reads = started(python, script, 0)
        out, _ = process.communicate("asked")
        with os.fdopen(reads) as stream:
            said.append((process.returncode, stream.read(), out))
    assert said[0] == (7, "given", f"['-u', 'b c'] asked {script.parent} True\n")
    assert said[1] == (7, "given", f"['-u', 'b c'] asked {script.parent} False\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=str)
def test_a_signal_ends_what_it_runs(quick_python: str, script: Path, number: int) -> None:
    process, reads = started(quick_python, script, 60)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    assert process.stdout.readline()
    pid = working_pid(process)
    assert pid != process.pid and Path(f"/proc/{pid}").exists()
    process.send_signal(number)
    assert process.stdout.read() == ""  # until it is gone
    assert process.wait(10) == -number
    with os.fdopen(reads) as stream:
        assert stream.read() == "given"
    process.stdout.close()


def test_other_words_are_for_the_real_one(quick_python: str) -> None:
    words = [quick_python, "-c", "import sys; print('torch' in sys.modules)"]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "False\n"
