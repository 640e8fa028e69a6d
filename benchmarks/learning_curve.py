"""What learning while serving brings on a CPU: acceptance of weak kinds of requests, over time.

    python benchmarks/learning_curve.py --texts texts --prompts prompts.jsonl \
        --questions mt_bench.jsonl --work work --out benchmarks/results/learning_curve

A learner computes the states of the base, as it does while it waits for texts. Then a server with
`--learn` answers requests of `--kinds` (learning_kinds.py; three, unless others are given), with
`--learn-share 0`, so that nothing is learned yet, and is stopped. Started again, it has no traffic
for `--minutes`, in which the head learns and is swapped. Before and after, the server answers other
requests of these kinds, whose passages it never saw, and MT-Bench's questions, with K = 3; nothing
is kept of these.
The curve between is the simulator's, on the same answers, for up to eight of the heads that served.
`--learn-base` is made of `--prompts`, which are no questions of MT-Bench. `--only serve`, `--only
learn` and `--only report` do these parts by themselves: only the second needs a quiet machine, and
the first goes on where an earlier one ended if `--served` has become larger. `--only weak` measures
the shipped head on twelve requests of every kind, so that weak ones can be named beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from learning_kinds import KINDS, USUAL, Asked, requests, trial
from learning_report import MT_BENCH, write
from learning_server import Answered, Server, cpu_name, gains, lengths

from headstart.data.dataset import Dataset
from headstart.data.fingerprints import is_heldout, prompt_sha
from headstart.demo.unpacked import ready
from headstart.learn.folder import START, Folder
from headstart.learn.heads import LearnedHeads
from headstart.processes import python_command

_HELDOUT = 0.03  # of prompts, by the recipe of the demo's head
_MOST_WALKED = 8  # heads of the curve
_TRIAL = 12  # requests of each kind, to name the weak ones
_PART = 96  # requests after which it is written down how many were served


def make_base(model: Path, prompts: Path, out: Path, number: int, max_tokens: int) -> None:
    """The model's answers to prompts of other kinds, as the first tuning had them.

    A fifth, 200 at most, are prompts that the first tuning held out, and are held out here.
    """
    some, parts = out.with_suffix(".jsonl"), dict[bool, list[str]]({False: [], True: []})
    with open(prompts, encoding="utf-8") as file:
        for line in file:
            sha = prompt_sha(json.loads(line)["messages"])
            parts[is_heldout(sha, _HELDOUT)].append(line)
    num_heldout = min(200, number // 5)
    wanted = "".join(parts[False][: number - num_heldout] + parts[True][:num_heldout])
    if (out / "dataset.json").is_file() and some.read_text() == wanted:
        return
    some.write_text(wanted)
    command = python_command(
        "headstart", "distill", str(model), "--prompts", str(some), "--out", str(out),
        "--max-tokens", str(max_tokens), "--keep-truncated", "--heldout", str(_HELDOUT),
        "--speculate", "0", "--weights", "int8", "--max-running-requests", "16",
    )  # fmt: skip
    subprocess.run(command, check=True)


def watch(folder: Path, seen: Path, minutes: float) -> list[dict[str, Any]]:
    """Wait, and keep a copy of every head that serves; returns when each began to."""
    began, swaps = time.time(), []
    while time.time() - began < 60 * minutes:
        time.sleep(3)
        record = folder / "heads" / "heads.json"
        found = json.loads(record.read_text()) if record.is_file() else []
        for head in found:
            name = head["name"]
            if head["state"] == "serving" and not (seen / name).exists():
                shutil.copytree(folder / "heads" / name, seen / name)
                swaps.append({"name": name, "minutes": (time.time() - began) / 60})
                print(f"{swaps[-1]['minutes']:5.1f} min: head {name} serves", flush=True)
    return swaps


def walked(model: Path, heads: Sequence[Path], answers: Sequence[Answered]) -> list[dict[str, Any]]:
    """Acceptance lengths of these answers with each head, by the simulator."""
    from headstart.heads.formats import open_runnable
    from headstart.learn.assembly import learning_options
    from headstart.learn.certainty import length
    from headstart.learn.texts import Text
    from headstart.learn.training import HeadTraining

    options = learning_options({}, device="cpu", dtype="auto")
    training = HeadTraining(open_runnable(model, ""), None, options, state_bytes=1 << 30)
    records = [
        Text(
            id=str(i), prompt=a.prompt, answer=a.answer, kind=a.kind, time=0.0, seed=0,
            finish_reason=a.finish_reason, sampling={"temperature": 0.0},
        ).record()
        for i, a in enumerate(answers)
    ]  # fmt: skip
    result = []
    for head in heads:
        training.serve(head)
        found = training.walk(records, share=0.0)
        kinds = dict.fromkeys(answer.kind for answer in answers)
        result.append({k: length([w for w in found.values() if w.kind == k]) for k in kinds})
    return result


def asked(arguments: argparse.Namespace) -> tuple[list[Asked], list[Asked]]:
    """Requests to serve, and to measure on."""
    served, measured = requests(
        arguments.texts, arguments.kinds, served=arguments.served, measured=arguments.measured
    )
    questions = [json.loads(line) for line in arguments.questions.read_text().splitlines()]
    measured += [Asked(MT_BENCH, q["turns"][0]) for q in questions[: arguments.num_questions]]
    return served, measured


def serve(arguments: argparse.Namespace) -> None:
    """The first half: answers before anything was learned, and those to learn from."""
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    model, folder, known = ready(), work / "learn", work / "before.json"
    served, measured = asked(arguments)
    make_base(model, arguments.prompts, work / "base", arguments.num_base, arguments.max_tokens)
    if known.is_file():
        found = json.loads(known.read_text())
    else:
        shutil.rmtree(folder, ignore_errors=True)
        found = {"served": 0, "traffic_seconds": 0.0, "before": [], "with_states": 0,
                 "base_states": None, "kinds": arguments.kinds}  # fmt: skip
    if (kinds := found.get("kinds")) != arguments.kinds:  # earlier versions did not say
        raise SystemExit(f"{work} has requests of {kinds or 'other kinds'}. Give another --work.")
    if found["base_states"] is None:
        gigabytes = arguments.gigabytes
        found["base_states"] = prepare_base(model, folder, work / "base", gigabytes)
        known.write_text(json.dumps(found))
    flags = [*_flags(arguments), "--learn-share", "0"]
    server = Server(model, folder, work / "base", work / "server.log", flags)
    try:
        if len(found["before"]) != len(measured):
            before = server.ask_all(measured, arguments.max_tokens, is_kept=False)
            print("before:", {k: round(v, 3) for k, v in lengths(before).items()}, flush=True)
            found["before"] = [asdict(answer) for answer in before]
            known.write_text(json.dumps(found))
        while found["served"] < len(served):
            part = served[found["served"] :][:_PART]
            started = time.time()
            server.ask_all(part, arguments.max_tokens, is_kept=True)
            found["served"] += len(part)
            found["traffic_seconds"] += time.time() - started
            known.write_text(json.dumps(found))
            print(f"served {found['served']} requests", flush=True)
    finally:
        server.stop()
    found["with_states"] += status_of(folder)["collected"]["with_states"]
    known.write_text(json.dumps(found))


def _flags(arguments: argparse.Namespace) -> list[str]:
    """Of a server that learns."""
    return [*arguments.flags.split(), "--learn-gigabytes", f"{arguments.gigabytes:g}"]


def prepare_base(model: Path, folder: Path, base: Path, gigabytes: float) -> dict[str, Any]:
    """Let a learner compute the states of the base, as it does while it waits for texts.

    Not the server's own: that one lets every other process go first, and may never come to it.
    """
    from headstart.learn.assembly import make_loop
    from headstart.learn.options import LearnOptions
    from headstart.learn.starting import open_folder

    began, found = time.time(), dict[str, Any]()
    options = LearnOptions(learn=folder, learn_base=base, learn_gigabytes=gigabytes)
    task = open_folder(options, str(model), None, device="cpu", dtype="auto")
    start = Folder(folder).heads / START
    loop = make_loop(replace(task, head=str(start)), lambda name, facts: found.update(facts))
    while loop.turn():
        pass
    found["waited"] = time.time() - began
    print(f"states of {found['prepared']} texts of the base in {found['waited']:.0f} s", flush=True)
    return found


def status_of(folder: Path) -> dict[str, Any]:
    path = Folder(folder).status
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def weak(arguments: argparse.Namespace) -> None:
    """Acceptance lengths of the shipped head, by kind, as the server counts."""
    arguments.work.mkdir(parents=True, exist_ok=True)
    log, flags = arguments.work / "server.log", arguments.flags.split()
    server = Server(ready(), None, arguments.work / "base", log, flags)
    try:
        asked = trial(arguments.texts, _TRIAL)
        answers = server.ask_all(asked, arguments.max_tokens, is_kept=False)
    finally:
        server.stop()
    found = lengths(answers)
    for kind in sorted(found, key=lambda kind: found[kind]):
        rounds = sum(answer.rounds for answer in answers if answer.kind == kind)
        print(f"{kind:12} {found[kind]:.3f} ({rounds} rounds)", flush=True)
    (arguments.work / "weak.json").write_text(json.dumps([asdict(answer) for answer in answers]))


def learn(arguments: argparse.Namespace) -> None:
    """The second half: learning without traffic, and the same requests again.

    They are answered by a server that learns nothing any more.
    """
    work: Path = arguments.work
    model, folder, seen = ready(), work / "learn", work / "seen"
    if (serving := LearnedHeads(Folder(folder)).serving) is not None:
        raise SystemExit(f"{folder} serves head {serving.name} already: what is measured before "
                         "is of the first one. Give another --work.")  # fmt: skip
    shutil.rmtree(seen, ignore_errors=True)
    seen.mkdir()
    _, measured = asked(arguments)
    parts = (model, folder, work / "base", work / "server.log")
    flags = _flags(arguments)
    server = Server(*parts, flags)
    try:
        swaps = watch(folder, seen, arguments.minutes)
    finally:
        server.stop()
    status = status_of(folder)
    server = Server(*parts, [*flags, "--learn-share", "0"])
    try:
        after = server.ask_all(measured, arguments.max_tokens, is_kept=False)
    finally:
        server.stop()
    print("after:", {k: round(v, 3) for k, v in lengths(after).items()}, flush=True)
    kept = {"swaps": swaps, "status": status, "after": [asdict(answer) for answer in after]}
    (work / "after.json").write_text(json.dumps(kept))


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the two halves found, and the curve between them."""
    work: Path = arguments.work
    found, learned = (json.loads((work / f"{n}.json").read_text()) for n in ("before", "after"))
    before, after = (
        [Answered(**each) for each in part] for part in (found["before"], learned["after"])
    )
    print(json.dumps(gains(before, after), indent=1), flush=True)
    swaps, status = spread(learned["swaps"]), learned["status"]
    heads = [work / "learn" / "heads" / "start", *(work / "seen" / s["name"] for s in swaps)]
    minutes = [0.0, *(swap["minutes"] for swap in swaps)]
    curve = walked(ready(), heads, before)
    points = [
        {"minutes": at, "head": head.name, **each}
        for at, head, each in zip(minutes, heads, curve, strict=True)
    ]
    return {
        "minutes": arguments.minutes, "served": found["served"], "measured": len(before),
        "max_tokens": arguments.max_tokens, "traffic_seconds": found["traffic_seconds"],
        "kinds": found["kinds"], "base_states": found["base_states"],
        "with_states": found["with_states"],
        "base": Dataset.open(work / "base").header.counts,
        "same_texts": sum(a.answer == b.answer for a, b in zip(before, after, strict=True)),
        "before": lengths(before), "after": lengths(after), "gains": gains(before, after),
        "curve": points, "swaps": learned["swaps"], "checks": status["curve"],
        "learner": {k: status[k] for k in ("steps", "seconds", "trained_tokens", "checks", "swaps",
                                           "rollbacks", "train", "heldout")},
        "cpu": cpu_name(), "cores": os.cpu_count(), "python": sys.version.split()[0],
        "command": "python benchmarks/learning_curve.py " + " ".join(
            f"--{k.replace('_', '-')} {v}" for k, v in (
                ("kinds", " ".join(arguments.kinds)), ("served", arguments.served),
                ("measured", arguments.measured),
                ("num_questions", arguments.num_questions), ("num_base", arguments.num_base),
                ("max_tokens", arguments.max_tokens), ("gigabytes", f"{arguments.gigabytes:g}"),
                ("minutes", f"{arguments.minutes:g}"))
        ),
    }  # fmt: skip


def spread(swaps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some of many, the last among them: the simulator takes a minute for each."""
    step = -(-len(swaps) // _MOST_WALKED) or 1
    return swaps[::-1][::step][::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("texts", "prompts", "questions", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(USUAL))
    parser.add_argument("--served", type=int, default=80, help="requests of each kind")
    parser.add_argument("--measured", type=int, default=24, help="requests of each kind")
    parser.add_argument("--num-questions", type=int, default=80)
    parser.add_argument("--num-base", type=int, default=160, help="prompts of the base")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--gigabytes", type=float, default=1, help="of texts and their states")
    parser.add_argument("--flags", default="--weights int8", help="more options of the server")
    parser.add_argument("--only", choices=("weak", "serve", "learn", "report"), help="a part of it")
    arguments = parser.parse_args()
    if arguments.only == "weak":
        weak(arguments)
    if arguments.only in (None, "serve"):
        serve(arguments)
    if arguments.only in (None, "learn"):
        learn(arguments)
    if arguments.only in (None, "report"):
        write(report(arguments), arguments.out)


if __name__ == "__main__":
    main()
