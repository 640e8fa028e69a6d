"""The folders of a run, or of several heads trained side by side: checked, and none touched."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headstart.checkpoint.atomic import check_target
from headstart.errors import TrainError, some
from headstart.train.job import HEAD, Job
from headstart.train.options import FROM_VLLM
from headstart.train.run_folder import OPTIONS, RunFolder
from headstart.vocab.draft_vocab import DraftVocab


def run_folders(
    job: Job, identity: Mapping[str, Any], vocabs: Mapping[str, DraftVocab | None]
) -> dict[str, RunFolder]:
    """By the name of each head; refused where something else is there."""
    assert job.out is not None
    if "" not in job.options and (job.out / OPTIONS).exists():
        raise TrainError(
            f"{job.out} is a run of one head; several need a folder of their own. Choose another "
            "--out."
        )
    folders = {}
    for name, own in job.options.items():
        states = None if own.states_from == FROM_VLLM else own.states_from
        inputs = (job.model, job.head, job.data, own.cache, states, own.draft_vocab)
        given = tuple(Path(path) for path in inputs if path is not None)
        _check_apart(job.folder(name), given)
        whole = {"options": own.document(), **identity, "vocabulary": _sha(vocabs[name])}
        folder = RunFolder(job.folder(name), own.keep, whole)
        folder.check(overwrite=job.overwrite)
        check_target(folder.path / HEAD, overwrite=True, inputs=given)
        folders[name] = folder
    return folders


def common_step(folders: Iterable[RunFolder]) -> int | None:
    """The newest step that all can go on from; None: they begin."""
    steps = [set(folder.checkpoints.steps()) for folder in folders]
    return max(set.intersection(*steps), default=None)


def check_together(folders: Mapping[str, RunFolder], num_steps: int) -> None:
    """Refuse heads of which some are further than what all could go on from."""
    step = common_step(folders.values())
    finished = [name for name, folder in folders.items() if folder.is_finished]
    if finished and step != num_steps:
        left = [name for name in folders if name not in finished]
        raise TrainError(
            f"{some(finished)} finished training and {some(left)} did not; heads trained side by "
            "side go on together. Leave the finished ones out of --variants, choose another --out, "
            "or add --overwrite to train all of them again."
        )
    begun = [name for name, folder in folders.items() if max(folder.checkpoints.steps() or [0])]
    if begun and step is None:
        others = [name for name in folders if name not in begun]
        raise TrainError(
            f"{some(begun)} has begun and has no checkpoint of a step in common with "
            f"{some(others) or 'the others'}; heads trained side by side begin together. Train new "
            "ones with another --out, or add --overwrite to train all of them again."
        )


def begin(folders: Iterable[RunFolder], locks: ExitStack, *, overwrite: bool) -> None:
    """Make all folders, or leave all as they were; other runs are kept out until `locks` ends."""
    folders = list(folders)
    try:
        for folder in folders:
            folder.start(overwrite=overwrite, locks=locks)
    except BaseException:
        for folder in folders:
            folder.replaced.put_back()
        raise


def _check_apart(run: Path, inputs: Iterable[Path]) -> None:
    resolved = Path(os.path.realpath(run))
    for source in inputs:
        other = Path(os.path.realpath(source))
        if resolved == other or resolved in other.parents:
            raise TrainError(
                f"the input {source} lies in the run's own folder {run}; results never go where "
                "their source is. Choose another --out, or move the input."
            )


def _sha(vocab: DraftVocab | None) -> str | None:
    if vocab is None:
        return None
    return hashlib.sha256(",".join(map(str, vocab.ids)).encode()).hexdigest()
