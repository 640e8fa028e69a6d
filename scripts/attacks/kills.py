"""Commands that are killed, and disks that are full: a result is whole or absent."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from attacks.outcome import Outcome, command, complaint, digests, environment, run, support

# Written anew with the time in them, or by libraries; what a result is worth is in the others.
_DATED = ("headstart.json", "report.html", "metrics.jsonl", "options.json")
_MOST_TRIES = 4  # runs for each that is killed in time
_GOES_ON = ("train", "distill")  # what a kill leaves of these is where the next run goes on


def commands() -> dict[str, list[str]]:
    """By name, the words of each; all write `out` inside of the working folder."""
    flags = support("training_runs").flags(device="cpu", dtype="float32")
    return {
        "export": ["export", "models/mimo", "--out", "out"],
        "convert": ["convert", "head", "--to", "xllm", "--out", "out"],
        "stitch": ["stitch", "head", "models/mimo", "--out", "out"],
        "restore": ["restore", "bare", "--from", "head", "--out", "out"],
        "graft": ["graft", "models/qwen2", "--out", "out"],
        "vocab": ["vocab", "models/mimo", "--from", "vocabs/v.pt", "--out", "out.json"],
        "calibrate": ["calibrate", "--shape", "layers=1,hidden=256,heads=4,kv_heads=2,vocab=128,"
                      "intermediate=64", "--acceptance", "0.5", "--out", "out"],
        "distill": ["distill", "models/mimo", "--prompts", "answered.jsonl", "--import", "--out",
                    "out", "--heldout", "0"],
        "train": ["train", "models/mimo", "--data", "data", "--out", "out", *flags],
    }  # fmt: skip


def prepare(folder: Path) -> Path:
    """Everything that the commands read."""
    support("odd_readers").prepare(folder)
    from headstart.calibrate.tiny import write_tiny

    write_tiny("mimo", folder / "bare", dtype="F32", with_head=False, max_position_embeddings=512)
    done = run("export", "models/mimo", "--out", "head", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def kills(folder: Path, number: int, say: Callable[[str], None]) -> Outcome:
    """So many kills of each command, at moments drawn over the whole of its run."""
    outcome, draw = Outcome("kill -9"), random.Random(9)
    before = digests(folder)
    for name, words in commands().items():
        target = folder / words[words.index("--out") + 1]
        started = time.monotonic()
        done = run(*words, cwd=folder)
        seconds = time.monotonic() - started
        if done.returncode:
            outcome.broken.append(f"{name} does not run at all: {done.stderr[-300:]}")
            continue
        wanted, num_kills = _content(target), 0
        for _ in range(_MOST_TRIES * number):
            if num_kills == number:
                break
            _remove(target)
            started = time.monotonic()
            if not _killed(words, folder, draw.uniform(0.4, 1.0) * seconds):
                # Quicker than before, on a machine that is not ours alone: no kill, another try.
                seconds = time.monotonic() - started
                outcome.facts["ended before their kill"] = (
                    outcome.facts.get("ended before their kill", 0) + 1
                )
                continue
            num_kills += 1
            is_there = target.exists()
            outcome.ends[f"{name}: {'a result' if is_there else 'none'}"] += 1
            if name not in _GOES_ON and is_there and _content(target) != wanted:
                outcome.broken.append(f"{name}: half a result")
            outcome.broken += [f"{name}: {wrong}" for wrong in _torn(target)]
            if not is_there or _content(target) != wanted:
                again = run(*words, cwd=folder)
                if again.returncode or _content(target) != wanted:
                    outcome.broken.append(f"{name}: the next run differs: {again.stderr[-200:]}")
                outcome.broken += [f"{name}, next run: {wrong}" for wrong in _torn(target)]
        _remove(target)
        if num_kills < number:
            outcome.broken.append(f"{name}: {num_kills} of {number} runs could be killed")
        say(f"{name}: {num_kills} kills")
    left = {name: sha for name, sha in digests(folder).items() if name not in before}
    changed = [name for name, sha in before.items() if digests(folder).get(name) != sha]
    outcome.broken += [f"left behind: {name}" for name in left if "cache" not in name]
    outcome.broken += [f"a source was changed: {name}" for name in changed]
    return outcome


def _killed(words: list[str], folder: Path, seconds: float) -> bool:
    """Kill a command after so many seconds; False where it had ended before."""
    process = subprocess.Popen(
        command(*words), cwd=folder, env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait() == -signal.SIGKILL
    return False


def _torn(target: Path) -> list[str]:
    """Files with the time in them cannot be compared; they must be whole JSON all the same.

    The last line of one that lines are added to may be torn: readers leave it out.
    """
    wrong = []
    for path in sorted(target.rglob("*")) if target.is_dir() else []:
        if path.name in _DATED and path.suffix in (".json", ".jsonl"):
            data = path.read_bytes()
            parts = data.split(b"\n")[:-1] if path.suffix == ".jsonl" else [data]
            try:
                for part in parts:
                    json.loads(part)
            except ValueError as error:
                wrong.append(f"{path.relative_to(target)} is not whole ({error})")
    return wrong


def _content(target: Path) -> dict[str, str]:
    if target.is_file():
        return {"": digests(target.parent)[target.name]}
    return {
        name: sha
        for name, sha in digests(target).items()
        if Path(name).name not in _DATED and "tensorboard" not in name
    }


def _remove(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


def full_disks(folder: Path, number: int) -> Outcome:
    """Commands that write onto disks of random sizes; needs user namespaces to mount them."""
    outcome, draw = Outcome("full disks"), random.Random(7)
    disk = folder / "disk"
    disk.mkdir()
    names = ("export", "convert", "stitch", "restore", "graft", "vocab", "calibrate", "distill")
    for at in range(number):
        name = names[at % len(names)]
        words = [word if word[:3] != "out" else f"disk/{word}" for word in commands()[name]]
        options = (
            f"size={draw.choice([8, 40, 200, 600, 2000])}k,nr_inodes={draw.choice([3, 6, 99])}"
        )
        script = (
            f'mount -t tmpfs -o {options} none "$0" && {{ "$@"; code=$?; '
            'find "$0" -mindepth 1 | sed "s/^/left: /"; exit $code; }'
        )
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", script, str(disk), *command(*words)], cwd=folder,
            env=environment(), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        left = [line[6:] for line in done.stdout.splitlines() if line.startswith("left: ")]
        outcome.ends[f"{name}: {'done' if done.returncode == 0 else 'refused'}"] += 1
        if wrong := complaint(done.returncode, done.stderr):
            outcome.broken.append(f"{name} on {options}: {wrong}")
        # A dataset keeps its answers in a journal; other results are whole or absent.
        if done.returncode and left and name != "distill":
            outcome.broken.append(f"{name} on {options} left {len(left)} files")
    disk.rmdir()
    return outcome
