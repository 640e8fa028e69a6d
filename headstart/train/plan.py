"""What of a run can be known without loading a model: everything is checked here, cheap things
first, and nothing is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstart.checkpoint.provenance import digest
from headstart.checkpoint.reader import Checkpoint
from headstart.data.dataset import Dataset
from headstart.data.fingerprints import tokenizer_sha
from headstart.data.records import Record, spread
from headstart.errors import ConfigError, DataError, HeadNotFound, TrainError, some
from headstart.heads.detection import find_family, find_head_of
from headstart.heads.digest import trunk_digest
from headstart.heads.formats import open_head
from headstart.heads.head import Head, head_of
from headstart.heads.operation import counted, megabytes
from headstart.models.config_reader import model_config
from headstart.train.folders import check_together, common_step, run_folders
from headstart.train.job import HEAD, Job
from headstart.train.options import TrainOptions, sized
from headstart.train.packing import Kept, fit, pack, plan_epoch
from headstart.train.run_folder import RunFolder
from headstart.train.states.cache import StateCache
from headstart.train.states.header import HEADER_NAME, CacheHeader, check_header, disk_bill
from headstart.train.states.source import fingerprint
from headstart.train.targets import count
from headstart.train.watching import Watch
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import read as read_vocabs


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that nothing speaks against so far."""

    job: Job  # with the sizes of steps that fit the data
    checkpoint: Checkpoint
    identity: dict[str, Any]  # what a run is known by, beside its options
    records: list[Record]
    tested: list[Record]  # held out, all of them
    steps_per_epoch: int
    num_steps: int
    folders: dict[str, RunFolder]  # empty without --out
    vocabs: dict[str, DraftVocab | None]
    cache: CacheHeader | None

    @property
    def resumed(self) -> int | None:
        """The step that the run would go on from."""
        if self.job.overwrite or not self.folders:
            return None
        return common_step(self.folders.values())

    @property
    def cache_bytes(self) -> int:
        """Bytes still to be written, at most."""
        folder = self.job.shared.cache
        if self.cache is None or folder is None or StateCache.is_finished(Path(folder)):
            return 0
        num_tokens = sum(len(record.ids) for record in self.records + self.tested)
        return disk_bill(num_tokens, self.cache.hidden_size, self.cache.dtype)

    def as_json(self) -> dict[str, Any]:
        job, tokens = self.job, sum(len(record.ids) for record in self.records)
        return {
            "dry_run": True, "model": str(job.model), "data": str(job.data),
            "head": None if job.head is None else str(job.head),
            "out": None if job.out is None else str(job.out),
            "train": {"records": len(self.records), "tokens": tokens},
            "heldout": {"records": len(self.tested), "validated": self.num_validated},
            "steps": self.num_steps, "steps_per_epoch": self.steps_per_epoch,
            "tokens_per_step": round(tokens / self.steps_per_epoch),
            "resumed_step": self.resumed, "cache_bytes": self.cache_bytes,
            "options": {name or HEAD: own.document() for name, own in job.options.items()},
        }  # fmt: skip

    @property
    def validated(self) -> list[Record]:
        """The held-out records that heads are compared on."""
        return spread(self.tested, self.job.shared.eval_limit)

    @property
    def num_validated(self) -> int:
        return min(self.job.shared.eval_limit, len(self.tested))

    def describe(self) -> str:
        """The options that matter, as they were resolved, and what would happen."""
        facts = self.as_json()
        lines = []
        for name, own in self.job.options.items():
            lines.append(
                f"{name or HEAD:<8}  recipe {own.recipe}: loss {own.loss}, context {own.context}, "
                f"K {own.num_depths}, learning rate {own.learning_rate:g} ({own.schedule})"
            )
        lines.append(
            f"steps     {self.num_steps}, {self.steps_per_epoch} in an epoch, "
            f"about {facts['tokens_per_step']} tokens each"
        )
        if self.cache is not None:
            bill = f"{megabytes(self.cache_bytes)} to write" if self.cache_bytes else "complete"
            lines.append(f"cache     {self.job.shared.cache}, {bill}")
        begun = "begins anew" if self.resumed is None else f"goes on from step {self.resumed}"
        lines.append(f"run       {self.job.out or '(no --out)'}, {begun}")
        return "\n".join(lines)


def plan(job: Job, watch: Watch) -> Plan:
    """Check model, head, data, options and folders against each other, and say what was found."""
    job.check()
    checkpoint, data = Checkpoint.open(job.model), Dataset.open(job.data)
    head = _head(checkpoint, job.head)
    identity = _identity(checkpoint, head, data, watch)
    config = model_config(checkpoint.config.fields)
    vocabs = {
        name: _vocab(own.draft_vocab, config.vocab, identity["tokenizer"])
        for name, own in job.options.items()
    }
    longest = min(job.shared.max_len, config.max_positions)
    kept = fit(data.records("train"), longest, job.shared.long_records or "cut")
    _check_records(data, kept, job)
    tested = fit(data.records("heldout"), longest, "cut").records
    job = _sized(job, sum(len(record.ids) for record in kept.records), watch)
    options = job.shared
    assert options.epochs is not None
    steps_per_epoch = len(plan_epoch(kept.records, options, 0))
    num_steps = steps_per_epoch * options.epochs
    steps = min(num_steps, options.max_steps or num_steps)
    folders = {} if job.out is None else run_folders(job, identity, vocabs)
    if folders and not job.overwrite:
        folders = _not_failed(folders, watch)
        check_together(folders, steps)
        job = replace(job, options={name: job.options[name] for name in folders})
    state_size = config.state_size(head.family.layout)
    result = Plan(
        job=job, checkpoint=checkpoint, identity=identity, records=kept.records, tested=tested,
        steps_per_epoch=steps_per_epoch, num_steps=steps, folders=folders, vocabs=vocabs,
        cache=_cache(options, identity, head, kept.records + tested, state_size),
    )  # fmt: skip
    done = f"{result.num_steps} of " if result.num_steps < num_steps else ""
    watch.say(
        f"train: {kept.describe()}; {done}{counted(num_steps, 'step')}, {steps_per_epoch} in each "
        f"of {counted(options.epochs, 'epoch')}"
    )
    if result.num_validated:
        watch.say(f"held out: {result.num_validated} of {len(tested)} records are validated on")
    else:
        watch.say("no held-out records: nothing is validated, the last weights are the result")
    return result


def _head(checkpoint: Checkpoint, folder: Path | None) -> Head:
    if folder is not None:
        return open_head(folder)
    owner = find_family(checkpoint)
    found = None if owner is None else find_head_of(checkpoint, owner)
    if found is None or found.state in ("absent", "declared-but-missing"):
        raise HeadNotFound(
            f"{checkpoint.folder} has no head to train. Add a fresh one with `headstart graft`, "
            "give the lost one back with `headstart restore`, or name one with --head."
        )
    return head_of(checkpoint)


def _identity(checkpoint: Checkpoint, head: Head, data: Dataset, watch: Watch) -> dict[str, Any]:
    """What a run is known by; DataError for data of another tokenizer."""
    trunk, tokenizer = trunk_digest(checkpoint), tokenizer_sha(checkpoint)
    vocab_size = int(checkpoint.config.fields["vocab_size"])
    warnings = data.header.check(tokenizer_sha=tokenizer, vocab_size=vocab_size, trunk_digest=trunk)
    for warning in warnings:
        watch.say(f"warning: {warning}")
    own = {"trunk": trunk, "tokenizer": tokenizer, "data": data.header.stamp}
    return {**own, "head": digest(head.origin)}


def _vocab(file: str | None, vocab_size: int, tokenizer: str) -> DraftVocab | None:
    if file is None:
        return None
    found = read_vocabs(Path(file))
    if len(found) != 1:
        raise ConfigError(
            f"{file} holds {len(found)} draft vocabularies ({some(v.name for v in found)}); a head "
            "is trained for one. Give a file with one."
        )
    found[0].check(vocab_size=vocab_size, tokenizer_sha=tokenizer, where=file)
    return found[0]


def _check_records(data: Dataset, kept: Kept, job: Job) -> None:
    """DataError where nothing is left to learn from, or a head would learn nothing from it."""
    counts = data.header.counts
    if not counts["train"]["records"]:
        raise DataError(
            f"{data.folder} has no record to train on (train 0, held out "
            f"{counts['heldout']['records']}). Run `headstart distill` again with a lower "
            "--heldout, with more prompts, or with other filters (--keep-truncated, "
            "--max-repetition, --max-similarity)."
        )
    if not kept.records:
        raise DataError(
            f"no record is left to train on ({kept.describe()}). Raise --max-len, or distill more "
            "prompts."
        )
    for own in job.options.values():
        # Only for that loss: packing many records takes a while.
        if own.loss == "e2e-tv" and not _has_whole_chain(kept, job, own.num_depths):
            raise DataError(
                f"loss e2e-tv with K {own.num_depths} has nothing to learn: no answer in "
                f"{data.folder} has {own.num_depths} tokens in a row to draft. Lower --num-depths, "
                "or distill longer answers."
            )


def _has_whole_chain(kept: Kept, job: Job, num_depths: int) -> bool:
    return bool(count(pack(kept.records, job.shared.pack_tokens), num_depths).complete)


def _not_failed(folders: dict[str, RunFolder], watch: Watch) -> dict[str, RunFolder]:
    """Heads that were not dropped in an earlier start of this run."""
    failures = {name: folder.failure for name, folder in folders.items()}
    left = {name: folder for name, folder in folders.items() if failures[name] is None}
    if not left:
        raise TrainError(
            f"{some(folder.path for folder in folders.values())} was dropped from training: "
            f"{next(iter(failures.values()))} Add --overwrite to begin anew."
        )
    for name in folders.keys() - left.keys():
        watch.say(f"{name} stays left out. {failures[name]}")
    return left


def _sized(job: Job, num_tokens: int, watch: Watch) -> Job:
    options = {name: sized(own, num_tokens) for name, own in job.options.items()}
    result = replace(job, options=options)
    was, now = job.shared.batch_tokens, result.shared.batch_tokens
    if now != was:
        watch.say(
            f"little data: batch_tokens is {now} instead of {was}, towards {job.shared.min_steps} "
            "steps (--min-steps); give --batch-tokens to choose it yourself"
        )
    return result


def _cache(
    options: TrainOptions, identity: dict[str, Any], head: Head, records: list[Record], hidden: int
) -> CacheHeader | None:
    """What a cache must be; DataError if there is another one."""
    if options.cache is None:
        return None
    header = CacheHeader(
        trunk_digest=identity["trunk"], tokenizer_sha=identity["tokenizer"],
        dataset_fingerprint=fingerprint(records),
        hidden_kind=head.family.layout.trunk_hidden, dtype=options.cache_dtype, hidden_size=hidden,
    )  # fmt: skip
    if (Path(options.cache) / HEADER_NAME).exists():
        check_header(Path(options.cache), header)
    return header
