"""Distilling, from prompts to a dataset: plan, ask, keep, finish.

Every answer goes into the journal when it comes, so a run that is stopped at any moment goes on
where it was. The engine or server is only started when something is left to ask.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headstart.checkpoint.atomic import check_parents, write_failed
from headstart.checkpoint.hub import local_folder
from headstart.checkpoint.reader import Checkpoint
from headstart.data.conversations import Conversation, read_conversations
from headstart.data.dataset import Header
from headstart.data.fingerprints import ABSENT, template_sha, tokenizer_sha
from headstart.data.journal import JOURNAL_NAME, Answer, Asked, Journal, earlier_answers
from headstart.data.prompt_reader import PromptReader
from headstart.distill import collected
from headstart.distill.dialogue import Dialogue, open_dialogues
from headstart.distill.finish import finish
from headstart.distill.imported import WARNING, Importer
from headstart.distill.local import LocalAsker
from headstart.distill.options import DistillOptions
from headstart.distill.remote import RemoteAsker, require_httpx
from headstart.errors import ConfigError, DataError
from headstart.heads.digest import trunk_digest
from headstart.heads.formats import open_runnable
from headstart.heads.operation import counted

if TYPE_CHECKING:
    from headstart.engine.options import EngineOptions

_MANY_CUT = 0.2  # a larger share of answers that were cut off deserves a word
_NO_HELP = 1.05  # acceptance length of drafts that cost more than they bring


@dataclass(frozen=True)
class Plan:
    """What a run will ask, and what is there already."""

    checkpoint: Checkpoint
    asked: Asked
    conversations: list[Conversation]
    dialogues: list[Dialogue]
    num_known: int  # answers that are in the journal
    out: Path
    prompts: Path  # where they were read

    @property
    def num_left(self) -> int:
        """Answers still to come, if none is cut off."""
        return sum(dialogue.turns_left for dialogue in self.dialogues)

    def as_json(self) -> dict[str, Any]:
        return {
            "prompts": len(self.conversations),
            "answers_known": self.num_known,
            "answers_to_ask": self.num_left,
            **{name: getattr(self.asked, name) for name in ("origin", "sampling", "seed")},
            "out": str(self.out),
        }


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    header: Header
    num_new: int
    acceptance: dict[str, Any] | None  # of the embedded engine, where it was used

    @property
    def advice(self) -> list[str]:
        """What a user should know before training on this."""
        report, limit = self.header.report, self.header.sampling.get("max_tokens")
        num_cut = report["dropped"].get("truncated", {"count": 0})["count"]
        notes = []
        if num_cut > _MANY_CUT * report["answers"]:
            notes.append(
                f"{num_cut} of {counted(report['answers'], 'answer')} were cut off at --max-tokens "
                f"{limit} and dropped. Add --keep-truncated (they are in the journal, nothing is "
                "asked again), or raise --max-tokens with another --out"
            )
        found = self.acceptance
        if found is not None and any(found["drafted"]) and found["acceptance_length"] < _NO_HELP:
            notes.append(
                f"drafts were hardly ever right (acceptance length "
                f"{found['acceptance_length']:.2f}): the head is fresh, or not this model's. Until "
                "it is trained, --speculate 0 answers faster"
            )
        if not self.header.counts["train"]["records"]:
            notes.append(
                "nothing is left to train on: all that the filters kept is held out; lower "
                "--heldout or give more prompts"
            )
        if not self.header.counts["heldout"]["records"]:
            notes.append("nothing is held out for scoring; raise --heldout")
        return notes


class Asker(Protocol):
    """A source of answers: an engine, a server, or the given conversations themselves."""

    refused: dict[str, str]  # prompt id -> why it got no answer

    def ask(self, dialogues: Iterable[Dialogue], keep: Callable[[Answer], None]) -> None: ...


def plan(
    model: str, prompts: Path, out: Path, options: DistillOptions, *, as_given: bool = False
) -> Plan:
    """Read and check everything that is cheap; nothing is written."""
    if as_given and (options.server is not None or options.samples != 1):
        raise ConfigError(
            "--import takes the answers of the file; leave --server and --samples out."
        )
    if options.server is not None:
        require_httpx()
    checkpoint = open_runnable(local_folder(model))
    fields = checkpoint.config.fields
    origin = "import" if as_given else "engine" if options.server is None else "server"
    if as_given and prompts.is_dir():
        origin = collected.ORIGIN
        conversations = collected.conversations(prompts, PromptReader(checkpoint), options.limit)
    else:
        conversations = read_conversations(prompts)
    conversations = conversations[: options.limit]
    asked = Asked(
        origin=origin,
        trunk_digest=trunk_digest(checkpoint),
        tokenizer_sha=tokenizer_sha(checkpoint),
        template_sha=template_sha(checkpoint),
        vocab_size=int(fields["vocab_size"]),
        hidden_size=int(fields["hidden_size"]),
        sampling={} if as_given else options.sampling,
        seed=None if as_given else options.seed,
        chat_template_kwargs=options.chat_template_kwargs,
    )
    if origin not in ("server", collected.ORIGIN) and ABSENT in (
        asked.template_sha,
        asked.tokenizer_sha,
    ):
        raise DataError(
            f"{checkpoint.folder} has no tokenizer.json or no chat template (chat_template.jinja, "
            "or chat_template in tokenizer_config.json), so prompts cannot be put to it. Add the "
            "files of the model's chat release."
        )
    answers = _known(out, asked)
    dialogues = open_dialogues(
        conversations, answers,
        samples=options.samples, goes_on_after_cut=options.keep_truncated or as_given,
    )  # fmt: skip
    return Plan(checkpoint, asked, conversations, dialogues, len(answers), out, prompts)


def _known(out: Path, asked: Asked) -> list[Answer]:
    """Answers of an earlier run; DataError if `out` is something else than its dataset."""
    if (out / JOURNAL_NAME).is_file():
        return earlier_answers(out / JOURNAL_NAME, asked)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(
            f"{out} exists and is no dataset (it has no {JOURNAL_NAME}). Choose another --out."
        )
    check_parents(out)
    above = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        raise write_failed(out, PermissionError(errno.EACCES, "not allowed", str(above)))
    return []


def distill(
    plan: Plan,
    options: DistillOptions,
    engine_options: EngineOptions | None = None,
    *,
    head: Path | None = None,
    warn: Callable[[str], None] = lambda text: None,
    report: Callable[[int], None] = lambda count: None,
) -> Outcome:
    """Ask what is left to ask, then write the dataset. `report` hears of each answer."""
    asker = _asker(plan, options, engine_options, head, warn) if plan.num_left else None
    facts = asker.facts if isinstance(asker, LocalAsker) else {}
    with _journal(plan.out, replace(plan.asked, engine=facts)) as journal:
        if journal.num_answers != plan.num_known:
            raise DataError(f"{journal.path} grew meanwhile: another run wrote to it. Run again.")

        def keep(answer: Answer) -> None:
            journal.append(answer)
            report(1)

        if asker is not None:
            asker.ask(plan.dialogues, keep)
        num_new = journal.num_answers - plan.num_known
    if plan.asked.origin == collected.ORIGIN:
        options = replace(options, keep_truncated=True)
    header = finish(plan.out, options, asker.refused if asker is not None else {})
    acceptance = asker.acceptance if isinstance(asker, LocalAsker) else None
    return Outcome(header, num_new, acceptance)


def _journal(out: Path, asked: Asked) -> Journal:
    try:
        out.mkdir(parents=True, exist_ok=True)
        return Journal(out / JOURNAL_NAME, asked)
    except OSError as error:
        raise write_failed(out, error) from error


def _asker(
    plan: Plan,
    options: DistillOptions,
    engine_options: EngineOptions | None,
    head: Path | None,
    warn: Callable[[str], None],
) -> Asker:
    if plan.asked.origin == collected.ORIGIN:
        reader = PromptReader(plan.checkpoint)
        return collected.Importer(plan.prompts, reader, plan.asked.vocab_size)
    if plan.asked.origin == "import":
        warn(WARNING)
        return Importer(PromptReader(plan.checkpoint), options.chat_template_kwargs)
    if plan.asked.origin == "server":
        reader = PromptReader(plan.checkpoint)
        return RemoteAsker(reader, options, plan.asked.vocab_size, warn)
    from headstart.engine.engine import Engine

    engine = Engine(plan.checkpoint.folder, head, options=engine_options)
    for note in engine.notes:
        warn(note)
    return LocalAsker(engine, options)
