"""Stages `evaluation` and `score`: answers that nothing was trained on, and what heads are worth.

The study's sets (held-out prompts of people at two temperatures, MT-Bench's first turns), and
held-out tasks of each kind. The head that ships is scored beside the new one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from answers import first_turn, heldout_prompts, sampled, write_prompts
from collect import read_passages
from engines import open_engine
from kinds import SCORED_KINDS, TEST, tasks
from scores import length_of, score_all, table
from wide_settings import Wide
from wide_text import avoided, read_lines

from headstart.data.conversations import Conversation, read_conversations
from headstart.data.journal import JOURNAL_NAME, Journal
from headstart.demo.shipped import shipped_head, shipped_vocab
from headstart.distill.finish import finish
from headstart.distill.local import LocalAsker
from headstart.distill.options import DistillOptions
from headstart.distill.run import plan
from headstart.engine.engine import Engine
from headstart.simulate.scoring import WHOLE

SHIPPED, FINAL = "shipped", "final"


def make_evaluation(settings: Wide) -> None:
    """Answers to all sets, by one engine; what is there stays."""
    folder = settings.work / "evaluation"
    folder.mkdir(parents=True, exist_ok=True)
    engine: list[Engine] = []

    def opened() -> Engine:
        engine[:] = engine or [open_engine(settings)]
        return engine[0]

    own = replace(settings, max_tokens=settings.evaluated_tokens)
    # Loops stay in: they are reported apart.
    scored = replace(sampled(own), heldout=1.0, max_repetition=1.0, min_answer_tokens=1)
    greedy = replace(scored, temperature=0.0)
    for name, prompts in _sets(settings).items():
        path = folder / f"{name}.jsonl"
        if not path.is_file():
            write_prompts(path, prompts())
        for out, options in (
            [(folder / "heldout-0.6", scored), (folder / "heldout-0", greedy)]
            if name == "heldout"
            else [(folder / name, greedy)]
        ):
            _ask(settings, path, out, options, opened)


def _sets(settings: Wide) -> dict[str, Callable[[], list[Conversation]]]:
    sets: dict[str, Callable[[], list[Conversation]]] = {}
    questions = settings.questions
    if settings.prompts is not None:
        sets["heldout"] = lambda: heldout_prompts(settings)
    if questions is not None:
        sets["mt-bench"] = lambda: [first_turn(c) for c in read_conversations(questions)]
    if settings.passages is not None:
        found = _heldout_tasks(settings)
        sets |= {kind: partial(found.__getitem__, kind) for kind in SCORED_KINDS}
    return sets


def _heldout_tasks(settings: Wide) -> dict[str, list[Conversation]]:
    """So many of each kind, by the hash of the passage, from as many packages as there are."""
    assert settings.passages is not None
    result: dict[str, list[Conversation]] = {kind: [] for kind in SCORED_KINDS}
    benchmarks, by_source = avoided(settings), dict[tuple[str, str], int]()
    found = [task for task in tasks(read_passages(settings.passages)) if task.split == TEST]
    for task in sorted(found, key=lambda task: task.id):
        many = by_source.get((task.category, task.source), 0)
        if task.category not in result or many >= max(2, settings.num_of_kind // 12):
            continue
        if len(result[task.category]) < settings.num_of_kind and not benchmarks.is_near(
            task.turns[0]
        ):
            by_source[task.category, task.source] = many + 1
            message = {"role": "user", "content": task.turns[0]}
            result[task.category].append(Conversation(task.id, task.category, (message,)))
    lacking = [kind for kind, own in result.items() if not own]
    if lacking:
        raise SystemExit(
            f"{settings.passages} has no held-out {lacking[0]}; collect more passages."
        )
    return result


def _ask(
    settings: Wide, prompts: Path, out: Path, options: DistillOptions, engine: Callable[[], Engine]
) -> None:
    if (out / "dataset.json").is_file():
        print(f"evaluation: {out.name} is there")
        return
    planned = plan(settings.model, prompts, out, options)
    asker = LocalAsker(engine(), options)
    out.mkdir(parents=True, exist_ok=True)
    with Journal(out / JOURNAL_NAME, replace(planned.asked, engine=asker.facts)) as journal:
        asker.ask(planned.dialogues, journal.append)
    header = finish(out, options, asker.refused)
    print(f"evaluation: {out.name} {json.dumps(header.counts['heldout'])}", flush=True)


def score_heads(settings: Wide) -> None:
    """Leaves scores.jsonl and scores.md: both heads on every set, and what was won."""
    ordered = score_all(settings, scored_heads(settings))
    text = f"{table(ordered)}\n{gains(ordered)}"
    (settings.work / "scores.md").write_text(text)
    print(gains(ordered), flush=True)


def scored_heads(settings: Wide) -> dict[str, tuple[Path, Path]]:
    """Name -> folder and draft vocabulary of the head that ships, of the demo, and the new one."""
    heads: dict[str, tuple[Path, Path]] = {}
    head, vocab = shipped_head(), shipped_vocab()
    if settings.is_demo and head is not None and vocab is not None:
        heads[SHIPPED] = (head, vocab)
    if settings.final.is_dir():
        heads[FINAL] = (settings.final, settings.vocab)
    return heads


def gains(found: Iterable[dict[str, Any]]) -> str:
    """Whole vocabulary, K = 3: the head that ships, the new one, and how much longer."""
    lengths: dict[str, dict[str, float]] = {}
    for line in found:
        lengths.setdefault(line["set"], {})[line["head"]] = length_of(line, WHOLE)
    rows = ["| answers | shipped | new | gain |", "|---|---|---|---|"]
    for name, both in lengths.items():
        if SHIPPED in both and FINAL in both:
            gain = both[FINAL] / both[SHIPPED]
            rows.append(f"| {name} | {both[SHIPPED]:.3f} | {both[FINAL]:.3f} | {gain - 1:+.1%} |")
    return "\n".join(rows) + "\n"


def curve(settings: Wide) -> None:
    """Leaves curve.json and curve.md: held-out acceptance by answer tokens seen, begin and long."""
    points: list[dict[str, Any]] = []
    seen, share = 0.0, _answer_share(settings)
    for run in ("begin", "long"):
        for line in read_lines(settings.work / run / "metrics.jsonl"):
            if "loss" in line:
                seen += line["tokens"] * share
            if "validation" in line:
                found = line["validation"]
                by = {n: p["acceptance_length"] for n, p in found["by_category"].items()}
                points.append({
                    "run": run, "step": line["step"], "answer_tokens": round(seen),
                    "length": found["acceptance_length"], "by_category": by,
                })  # fmt: skip
    (settings.work / "curve.json").write_text(json.dumps(points, indent=1) + "\n")
    names = sorted({name for point in points for name in point["by_category"]})
    rows = [["run", "step", "M answer tokens seen", "all", *names], ["---"] * (len(names) + 4)]
    for point in points:
        own = [point["by_category"].get(name) for name in names]
        cells = [f"{value:.3f}" if value is not None else "" for value in (point["length"], *own)]
        rows.append(
            [point["run"], str(point["step"]), f"{point['answer_tokens'] / 1e6:.1f}", *cells]
        )
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    (settings.work / "curve.md").write_text(text)
    print(text, flush=True)


def _answer_share(settings: Wide) -> float:
    counts = json.loads((settings.answers / "dataset.json").read_text())["counts"]["train"]
    return float(counts["answer_tokens"] / max(1, counts["tokens"]))
