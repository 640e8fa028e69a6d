"""Stage `answers`: as many answers as the time allows, and second turns that the model asks for.

Each process has an engine, a share of the prompts and a journal: a stage that was stopped goes on.
Of what it wrote every process makes records; these are joined to one dataset. Loops stay in, as
they are in what is served.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from engines import MixedAsker, Turn, in_order, open_engine, turn_ids, write_turns
from kinds import VALIDATION
from own_questions import fault_of
from parallel import side_by_side
from wide_settings import Wide
from wide_text import Entry, avoided, check_benchmarks, read_lines, write_lines

from headstart.data.conversations import Conversation
from headstart.data.dataset import Dataset, Header, write_dataset
from headstart.data.fingerprints import prompt_sha
from headstart.data.journal import JOURNAL_NAME, Answer, Asked, Journal, read_journal
from headstart.data.records import Record
from headstart.distill.dialogue import Dialogue
from headstart.distill.filters import is_looping
from headstart.distill.options import DistillOptions
from headstart.distill.run import plan
from headstart.engine.engine import Engine

_MAX_REPETITION = 0.5  # above it, an answer is counted as looping
_LOOKED_AT = 10  # every so many answers are looked at for that, which takes a while
_FOLLOW_TEMPERATURE = 0.8
_WRITING = 0.2  # of what is left then: a user's turn is short
_SPARE = 4.0  # seconds that the last answers of a deadline take


class _TimeIsUp(Exception):
    pass


def make_answers(settings: Wide) -> None:
    """Leaves answers/, a dataset: training answers at all temperatures, greedy ones to validate."""
    if (settings.answers / "dataset.json").is_file():
        print(f"answers: {settings.answers} is there")
        return
    check_benchmarks(settings)
    entries = read_lines(settings.asked)
    count = min(settings.processes, len(entries))
    folders = [settings.work / f"answers-{count}" / f"part-{i}" for i in range(count)]
    for i, folder in enumerate(folders):
        if not (prompts := folder.with_name(f"{folder.name}.jsonl")).is_file():
            write_lines(prompts, entries[i::count])
    for line in side_by_side(partial(_answer_part, settings), folders, count):
        print(f"answers: {line}", flush=True)
    _join(settings, folders)


def _options(settings: Wide) -> DistillOptions:
    """Of a part's dataset; the temperature of an answer follows from its sample."""
    return DistillOptions(
        samples=len(settings.temperatures), temperature=settings.temperatures[0], top_k=0,
        top_p=1.0, max_tokens=settings.max_tokens, keep_truncated=True,
    )  # fmt: skip


def _answer_part(settings: Wide, folder: Path) -> str:
    """One process from its prompts to its records."""
    if (folder / "dataset.json").is_file():
        return f"{folder.name} is there"
    started = time.monotonic()
    options, prompts = _options(settings), folder.with_name(f"{folder.name}.jsonl")
    planned = plan(settings.model, prompts, folder, options)
    engine = open_engine(settings)
    asker, ready = MixedAsker(engine, options, settings), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    end = started + settings.seconds["answers"] - _SPARE
    until = end - settings.follow_share * (end - ready)
    validated = {e["id"] for e in read_lines(prompts) if e["split"] == VALIDATION}
    with Journal(folder / JOURNAL_NAME, replace(planned.asked, engine=asker.facts)) as journal:
        answers = read_journal(folder / JOURNAL_NAME)[1]  # of an earlier start
        ask = partial(_ask, asker, journal, answers)
        wanted = [d for d in planned.dialogues if not (d.sample and d.conversation.id in validated)]
        ask(in_order(wanted, settings), until)
        follow = folder.with_name(f"{folder.name}-then.jsonl")
        if not follow.is_file() and settings.follow_share:
            seconds = _WRITING * max(0.0, end - time.monotonic())
            write_lines(follow, _second_turns(settings, engine, answers, validated, seconds))
        ask(_following(read_lines(follow), answers), end)
    if all(answer.prompt_id in validated for answer in answers):
        raise SystemExit(
            f"answers: {folder.name} has none to learn from after "
            f"{time.monotonic() - started:.0f} s, of which the engine took {ready - started:.0f}; "
            "the same command goes on. Give more time: --seconds answers=N, or --minutes."
        )
    made = time.monotonic()
    line = _write_part(folder, planned.asked, answers, validated)
    spent = f"engine {ready - started:.0f} s, answers {made - ready:.0f} s"
    return f"{folder.name}: {line}; {spent}, records {time.monotonic() - made:.0f} s"


def _ask(
    asker: MixedAsker, journal: Journal, answers: list[Answer], dialogues: Iterable[Dialogue],
    deadline: float,
) -> None:  # fmt: skip
    def keep(answer: Answer) -> None:
        journal.append(answer)
        answers.append(answer)
        if time.monotonic() > deadline:
            raise _TimeIsUp

    if time.monotonic() < deadline:
        with suppress(_TimeIsUp):  # every answer is in the journal
            asker.ask(dialogues, keep)


def _second_turns(
    settings: Wide, engine: Engine, answers: Sequence[Answer], left_out: set[str], seconds: float
) -> list[Entry]:
    """What a user might say next, after answers to one-turn prompts, in the model's words."""
    benchmarks, result = avoided(settings), list[Entry]()
    several = {answer.prompt_id for answer in answers if answer.turn}
    several |= left_out
    first = {
        str(number): answer
        for number, answer in enumerate(answers)
        if answer.finish_reason == "stop" and answer.prompt_id not in several
    }

    def turn(number: str, answer: Answer) -> Turn:
        said = [
            {"role": "user", "content": answer.user}, {"role": "assistant", "content": answer.text},
        ]  # fmt: skip
        ids = turn_ids(engine.prompts, said, "")
        return Turn(ids, "", _FOLLOW_TEMPERATURE, int(number), number)

    def keep(turn: Turn, text: str, is_whole: bool) -> None:
        if fault_of(text, is_whole=is_whole) is None and not benchmarks.is_near(text):
            answer = first[turn.name]
            result.append({
                "id": f"{answer.prompt_id}-then-{answer.sample}", "sample": answer.sample,
                "turns": [answer.user, text.strip()], "answer": answer.text,
            })  # fmt: skip

    most = settings.max_len - settings.long_tokens - settings.question_tokens
    turns = (
        turn(number, answer)
        for number, answer in first.items()
        if len(answer.prompt_ids) + len(answer.answer_ids) < most
    )
    deadline = time.monotonic() + seconds
    write_turns(engine, turns, settings.question_tokens, keep, deadline)
    return result


def _following(entries: Iterable[Entry], answers: Iterable[Answer]) -> list[Dialogue]:
    """Second turns, after the first answers as they were; those that are answered are left out."""
    known = {answer.prompt_id for answer in answers}
    result = []
    for entry in entries:
        if entry["id"] not in known:
            messages = tuple({"role": "user", "content": turn} for turn in entry["turns"])
            conversation = Conversation(entry["id"], "dialogue", messages)
            dialogue = Dialogue(conversation, entry["sample"], True, prompt_sha(messages))
            dialogue.answers.append(entry["answer"])
            result.append(dialogue)
    return result


def _write_part(folder: Path, asked: Asked, answers: Sequence[Answer], validated: set[str]) -> str:
    records = [_record(a, asked.sampling, a.prompt_id in validated) for a in answers]
    kept = [record for record in records if int(record.mask.sum()) > 1]
    looked = kept[::_LOOKED_AT]
    loops = sum(is_looping(r.ids[r.mask].astype("int64"), _MAX_REPETITION) for r in looked)
    share = loops / max(1, len(looked))
    splits = {True: list[Record](), False: list[Record]()}
    for record in kept:
        splits[record.prompt_id in validated].append(record)
    header = Header(**asdict(asked), counts={}, report={"answers": len(answers), "looping": share})
    header = write_dataset(folder, header, {"train": splits[False], "heldout": splits[True]})
    return f"{json.dumps(header.counts['train'])}, {share:.1%} looping"


def _record(answer: Answer, sampling: dict[str, object], is_validated: bool) -> Record:
    """Only what is validated on is replayed, and that is greedy: others lose their seeds."""
    import numpy as np

    num_prompt = len(answer.prompt_ids)
    ids = np.array([*answer.prompt_ids, *answer.answer_ids], np.int32)
    return Record(
        id=answer.id, prompt_id=answer.prompt_id, category=answer.category, turn=answer.turn,
        sample=answer.sample, ids=ids, mask=np.arange(len(ids)) >= num_prompt,
        seed=answer.seed if is_validated else None, sampling=dict(sampling),
        finish_reason=answer.finish_reason, exact_ids=answer.exact_ids, num_prompt=num_prompt,
        max_tokens=answer.max_tokens,
    )  # fmt: skip


def _join(settings: Wide, folders: Sequence[Path]) -> None:
    """One dataset of all parts, in an order that does not depend on who answered."""
    parts = [Dataset.open(folder) for folder in folders]
    splits = {
        split: sorted((r for part in parts for r in part.records(split)), key=lambda r: r.id)
        for split in ("train", "heldout")
    }
    write_joined(settings.answers, parts[0].header, splits, settings)
    counts = Counter(record.category for record in splits["train"])
    by_temperature = Counter(settings.temperatures[r.sample] for r in splits["train"])
    print(f"answers: by category {dict(counts.most_common())}", flush=True)
    print(f"answers: by temperature {dict(by_temperature.most_common())}", flush=True)


def write_joined(
    out: Path, header: Header, splits: dict[str, list[Record]], settings: Wide
) -> None:
    """The header speaks of the greedy answers that are validated on; its report of the others."""
    out.mkdir(parents=True, exist_ok=True)
    report = {"temperatures": list(settings.temperatures), "refused": {"examples": {}}}
    sampling = {**header.sampling, "temperature": 0.0}
    whole = replace(header, sampling=sampling, report=report, stamp="")
    greedy = settings.temperatures.index(0.0)
    heldout = [record for record in splits["heldout"] if record.sample == greedy]
    made = write_dataset(out, whole, {"train": splits["train"], "heldout": heldout})
    print(f"answers: {out} {json.dumps(made.counts)}", flush=True)
