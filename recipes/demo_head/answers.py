"""Stages `evaluation` and `answers`: what the head is scored on, and what it learns from."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from parallel import side_by_side
from settings import Settings

from headstart.checkpoint.hub import local_folder
from headstart.checkpoint.reader import Checkpoint
from headstart.data.conversations import Conversation, read_conversations
from headstart.data.dataset import Dataset
from headstart.data.fingerprints import is_heldout, prompt_sha, tokenizer_sha
from headstart.data.journal import JOURNAL_NAME
from headstart.data.prompt_reader import PromptReader
from headstart.distill.finish import finish
from headstart.distill.options import DistillOptions
from headstart.distill.run import distill, plan
from headstart.engine.options import EngineOptions
from headstart.vocab import making, ranking
from headstart.vocab.draft_vocab import ALL
from headstart.vocab.files import write
from headstart.vocab.forced import forced_ids


class Asked(Protocol):
    """What prompts, answers and vocabulary need of the settings of a recipe."""

    @property
    def model(self) -> str: ...
    @property
    def prompts(self) -> Path | None: ...
    @property
    def answers(self) -> Path: ...
    @property
    def vocab(self) -> Path: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def heldout(self) -> float: ...
    @property
    def num_evaluated(self) -> int: ...


def make_answers(settings: Settings) -> None:
    """As many answers as the time allows, and the draft vocabulary that they call for."""
    if not (settings.answers / "dataset.json").is_file():
        parts = _parts(settings)
        for _ in side_by_side(partial(_ask_part, settings), parts, settings.processes):
            pass
        _join(settings, parts)
    make_vocabulary(settings)


def _parts(settings: Settings) -> list[Path]:
    """The prompts, dealt out to so many files."""
    conversations = list(read_conversations(settings.prompts))
    count = min(settings.processes, len(conversations))
    folder = settings.work / f"parts-{count}"  # dealt out otherwise, answers would be mixed up
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"prompts-{i}.jsonl" for i in range(count)]
    for i, path in enumerate(paths):
        write_prompts(path, conversations[i::count])
    return paths


def _ask_part(settings: Settings, prompts: Path) -> None:
    ask(settings, prompts, _answers_to(prompts), sampled(settings), settings.seconds["answers"])


def _answers_to(prompts: Path) -> Path:
    return prompts.with_suffix("")


def _join(settings: Settings, parts: list[Path]) -> None:
    """One journal, as one process would have written it: an answer depends on its prompt alone."""
    folder = settings.answers
    folder.mkdir(parents=True, exist_ok=True)
    refused: dict[str, str] = {}
    with open(folder / JOURNAL_NAME, "w") as joined:
        for i, part in enumerate(parts):
            with open(_answers_to(part) / JOURNAL_NAME) as journal:
                header = journal.readline()
                joined.writelines([header] if i == 0 else [])
                joined.writelines(journal)
            refused |= Dataset.open(_answers_to(part)).header.report["refused"]["examples"]
    made = finish(folder, sampled(settings), refused)
    print(f"answers: {folder} {json.dumps(made.counts)}", flush=True)


def make_evaluation(settings: Settings) -> None:
    """Answers to held-out prompts at two temperatures, and to MT-Bench's first turns."""
    # Loops stay in: they are reported apart.
    scored = replace(
        sampled(settings), samples=1, heldout=1.0, max_repetition=1.0, min_answer_tokens=1
    )
    greedy = replace(scored, temperature=0.0)
    folder = settings.work / "evaluation"
    folder.mkdir(parents=True, exist_ok=True)
    heldout = folder / "heldout.jsonl"
    write_prompts(heldout, heldout_prompts(settings))
    ask(settings, heldout, folder / "heldout-0.6", scored)
    ask(settings, heldout, folder / "heldout-0", greedy)
    if settings.questions is not None:
        first = folder / "mt-bench.jsonl"
        write_prompts(first, [first_turn(c) for c in read_conversations(settings.questions)])
        ask(settings, first, folder / "mt-bench", greedy)


def sampled(settings: Asked) -> DistillOptions:
    """By temperature alone, as the model's own distribution is."""
    return DistillOptions(
        samples=settings.samples, temperature=settings.temperature, top_k=0, top_p=1.0,
        max_tokens=settings.max_tokens, heldout=settings.heldout, keep_truncated=True,
        max_similarity=1.0,
    )  # fmt: skip


def ask(
    settings: Settings,
    prompts: Path,
    out: Path,
    options: DistillOptions,
    seconds: float = float("inf"),
) -> None:
    """`headstart distill`, ended after so many seconds with what is there by then."""
    if (out / "dataset.json").is_file():
        print(f"answers: {out} is there")
        return
    engine = EngineOptions(
        speculate=0, device=settings.device, max_running_requests=settings.running,
        max_model_len=settings.max_len,
    )  # fmt: skip
    planned = plan(settings.model, prompts, out, options)
    deadline = time.monotonic() + seconds

    def heard(count: int) -> None:
        if time.monotonic() > deadline:
            raise _TimeIsUp  # every answer is in the journal

    try:
        header = distill(planned, options, engine, report=heard).header
    except _TimeIsUp:
        header = finish(out, options, {})
    print(f"answers: {out} {json.dumps(header.counts)}", flush=True)


class _TimeIsUp(Exception):
    pass


def heldout_prompts(settings: Asked) -> list[Conversation]:
    """Prompts that training never sees, from all categories in turn."""
    assert settings.prompts is not None
    by_category: dict[str, list[Conversation]] = {}
    for conversation in read_conversations(settings.prompts):
        if is_heldout(prompt_sha(conversation.messages), settings.heldout):
            by_category.setdefault(conversation.category, []).append(conversation)
    each = -(-settings.num_evaluated // max(1, len(by_category)))
    return [one for found in by_category.values() for one in found[:each]]


def first_turn(conversation: Conversation) -> Conversation:
    return replace(conversation, messages=conversation.messages[:1])


def write_prompts(path: Path, conversations: list[Conversation]) -> None:
    lines = [
        {"id": c.id, "category": c.category, "messages": [dict(m) for m in c.messages]}
        for c in conversations
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_vocabulary(settings: Asked) -> None:
    """The tokens that the model writes most; drafts come from these, so losses are cheap, too.

    What `headstart vocab --by none --size N` does.
    """
    if settings.vocab.is_file():
        return
    checkpoint = Checkpoint.open(local_folder(settings.model))
    prompts, data = PromptReader(checkpoint), Dataset.open(settings.answers)
    model = making.Model(
        vocab_size=int(checkpoint.config.fields["vocab_size"]), languages=False,
        tokenizer_sha=tokenizer_sha(checkpoint),
        forced=forced_ids(prompts.tokenizer, prompts.end_ids),
    )  # fmt: skip
    counts = ranking.count(data.records("train"), ranking.together)[ALL]
    group = making.Group(ALL, counts, tuple(data.records("heldout")))
    made = making.make(group, model, (settings.vocab_size,), None)
    write([made.vocab], settings.vocab)
    print(f"vocabulary: {len(made.vocab.ids)} tokens, coverage {made.vocab.coverage}", flush=True)
