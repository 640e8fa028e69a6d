"""Opens the folder of `--learn` for a server: whose model it is, and which head serves first."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.checkpoint.hub import local_folder
from headstart.data.fingerprints import tokenizer_sha
from headstart.documents import parse_json
from headstart.errors import ConfigError
from headstart.files import read_plain, read_text, why_unreadable, write_whole
from headstart.heads.digest import trunk_digest
from headstart.heads.export import plan_export
from headstart.heads.formats import open_head, open_runnable
from headstart.heads.head import Head, dequantize, head_of
from headstart.learn.folder import START, Folder
from headstart.learn.heads import LearnedHeads
from headstart.learn.options import LearnOptions, key_name
from headstart.learn.process import Task
from headstart.learn.scrubbing import scrub
from headstart.models.build import resolve_device

if TYPE_CHECKING:
    from headstart.checkpoint.source import TensorSource

_log = logging.getLogger("headstart.learn")
_NAME = "model.json"
_SAMPLE_BYTES = 1 << 16
_OVERRIDES = 'Give a JSON file of options of `headstart train`, as {"num_depths": 2}.'


def open_folder(
    options: LearnOptions, model: str, head: Path | None, *, device: str, dtype: str
) -> Task:
    """Make or check the folder; the task is for the head that the model was started with.

    ConfigError for a folder of another model. Where another head is given than before, learning
    begins anew from it; what was collected stays.
    """
    assert options.learn is not None
    overrides = read_overrides(options.learn_options)
    folder = Folder(options.learn)
    checkpoint = open_runnable(local_folder(model), "Give its model, and the head with --head.")
    if options.learn_base is not None:  # the learner would say it to nobody
        from headstart.learn.assembly import open_base

        open_base(options.learn_base, checkpoint)
    source = dequantize(open_head(head) if head is not None else head_of(checkpoint))
    known = {
        "tokenizer": tokenizer_sha(checkpoint), "trunk": trunk_digest(checkpoint),
        "head": head_digest(source),
    }  # fmt: skip
    folder.make(options.learn_gigabytes)
    with folder.lock():
        with contextlib.suppress(OSError):  # a full disk: a later start, or `forget`, does it
            scrub(folder)
        _check_model(folder, known, source)
    max_bytes = int(options.learn_gigabytes * 1e9)
    where = options.learn_device
    return Task(
        folder=str(folder.path), model=str(model), head=None,
        base=None if options.learn_base is None else str(options.learn_base),
        device=device if where == "same" else where, dtype=dtype if where == "same" else "auto",
        max_bytes=max_bytes, overrides=overrides,
    )  # fmt: skip


def is_gpu(device: str) -> bool:
    return _named(device).startswith("cuda")


def _named(device: str) -> str:
    return str(resolve_device(device)) if device == "auto" else device


def is_on(device: str, other: str) -> bool:
    """Whether two names mean one device."""
    names = _named(device), _named(other)
    (kind, _, index), (other_kind, _, other_index) = (name.partition(":") for name in names)
    return kind == other_kind and (index or "0") == (other_index or "0")


def _check_model(folder: Folder, known: Mapping[str, str], source: Head) -> None:
    path = folder.path / _NAME
    before = parse_json(read_plain(path)) if path.is_file() else {}
    for name in ("tokenizer", "trunk"):
        if before and before.get(name) != known[name]:
            raise ConfigError(
                f"{folder.path} belongs to another model (its {name} differs). Give this model a "
                "folder of its own."
            )
    if before.get("head") == known["head"] and (folder.heads / START).is_dir():
        return
    heads = LearnedHeads(folder)
    if heads.serving is not None:
        _log.warning("learning: another head is served than before: it begins anew from that one")
        heads.begin_anew()
    folder.known.unlink(missing_ok=True)  # it is of the head before
    plan_export(source, "headstart", name="learn").write(folder.heads / START, overwrite=True)
    write_whole(path, (json.dumps(known) + "\n").encode(), is_only_writer=True)


def head_digest(head: Head) -> str:
    """Of names, shapes and the beginnings of all tensors."""
    state = hashlib.sha256()
    for name, tensor in sorted(head.tensors.items()):
        state.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        state.update(_sample(tensor))
    return state.hexdigest()


def _sample(tensor: TensorSource) -> bytes:
    from headstart.checkpoint.source import FileSlice

    for piece in tensor.pieces():
        if not isinstance(piece, FileSlice):
            return bytes(piece[:_SAMPLE_BYTES])
        with open(piece.file, "rb") as file:
            file.seek(piece.start)
            return file.read(min(_SAMPLE_BYTES, piece.num_bytes))
    return b""


def read_overrides(path: Path | None) -> dict[str, Any]:
    """Options of `train` that a file changes; ConfigError where it is none."""
    if path is None:
        return {}
    from headstart.learn.assembly import learning_options

    try:
        found = parse_json(read_text(path, 1 << 16))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--learn-options {path} cannot be read ({why_unreadable(error)}). {_OVERRIDES}"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"--learn-options {path} holds no JSON object. {_OVERRIDES}")
    learning_options(found, device="cpu", dtype="auto")
    return found


def start_lines(options: LearnOptions, keys: tuple[str, ...], *, shares_device: bool) -> list[str]:
    """What a server's log says at its start about what is kept, and when learning runs."""
    shared = f"at most {options.learn_share:.0%} of the time while requests run"
    lines = [
        f"learning: prompts and answers are COLLECTED in {options.learn} (token ids, and on a CPU "
        f"the model's states of them; at most {options.learn_gigabytes:g} GB) to tune the head; "
        "requests decline with "
        '{"headstart": {"learn": false}}',
        f"learning: {shared if shares_device else 'all the time'}, on {options.learn_device}; "
        "docs/learning.md says what is kept",
    ]
    if keys:
        names = ", ".join(key_name(key) for key in keys)
        excluded = ", ".join(options.learn_not_for or ()) or "none of them"
        lines.append(f"learning: the keys are called {names}; not collected for {excluded}")
    return lines
