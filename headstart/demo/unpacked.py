"""The demo's checkpoint in the user's cache: unpacked once, checked by digest at every use.

A file beside the folder, written last, says what the folder was made from and the SHA-256 of each
of its files. Where anything differs (another head ships, a file is damaged, unpacking was killed)
the folder is made again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from headstart.checkpoint.atomic import write_failed
from headstart.checkpoint.cache import cache_folder
from headstart.checkpoint.provenance import PROVENANCE_NAME, provenance
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.writer import write_folder
from headstart.demo.llama import plan_llama
from headstart.demo.package import PACKAGE, SHA256, VERSION, check, gguf_path, sha256
from headstart.demo.shipped import head_digest, shipped_head
from headstart.documents import parse_json
from headstart.errors import CheckpointError
from headstart.files import read_plain, write_whole
from headstart.heads.formats import open_head
from headstart.heads.graft import plan_graft

NAME = "smollm2-135m-instruct-mtp"
_LAYOUT = 1  # of the unpacked folder; another number unpacks again

Report = Callable[[str], None]  # gets what is being done


def ready(
    gguf: Path | None = None,
    *,
    head: Path | None = None,
    is_fresh: bool = False,
    cache: Path | None = None,
    expected: str = SHA256,
    report: Report = lambda text: None,
) -> Path:
    """The checkpoint's folder, whole.

    `gguf` instead of the package's file must have the SHA-256 `expected`; `head` is used instead
    of the shipped one. `is_fresh`: with a head that has learned nothing, in a folder of its own.
    """
    out = (cache or cache_folder()) / (f"{NAME}-fresh" if is_fresh else NAME)
    head = None if is_fresh else head or shipped_head()
    key = {"layout": _LAYOUT, "gguf": expected, "head": head_digest(head)}
    if _is_whole(out, key, report):
        return out
    gguf = gguf or gguf_path()
    report(f"checking {gguf.name}")
    check(gguf, expected)
    with _locked(out.parent, report) as has_waited:
        if not (has_waited and _is_whole(out, key, report)):
            _unpack(gguf, head, out, report)
            report("writing down digests")
            _write_record(out, {**key, "files": _digests(out)})
    return out


@contextmanager
def _locked(cache: Path, report: Report) -> Iterator[bool]:
    """One process unpacks at a time; gives whether another one had to be waited for."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise write_failed(cache, error) from error
    try:
        has_waited = not _locks_at_once(folder)
        if has_waited:
            report("waiting for another process that unpacks it")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield has_waited
    finally:
        os.close(folder)


def _locks_at_once(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unpack(gguf: Path, head: Path | None, out: Path, report: Report) -> None:
    """GGUF to Llama, Llama to the MiMo layout with a head."""
    llama = out.with_name(f"{out.name}.llama")
    made_from = {"gguf": gguf.name, "sha256": sha256(gguf), "package": PACKAGE, "version": VERSION}
    _clear(out)
    _clear(llama)
    try:
        report("dequantising")
        source = provenance("unpack", (), made_from=made_from)
        write_folder(plan_llama(gguf), llama, provenance=source)
        report("adding the head")
        operation = plan_graft(Checkpoint.open(llama), open_head(head) if head else None)
        details = {**operation.details, "made_from": made_from}
        replace(operation, details=details).write(out)
    finally:
        shutil.rmtree(llama, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Remove what an earlier unpacking left, and nothing else."""
    if not os.path.lexists(folder):
        return
    if not (folder / PROVENANCE_NAME).is_file() and not _record(folder).is_file():
        raise CheckpointError(
            f"{folder} is in the way and was not written by Headstart. Remove it, or choose "
            "another cache folder with HEADSTART_CACHE."
        )
    shutil.rmtree(folder)


def _is_whole(out: Path, key: dict[str, Any], report: Report) -> bool:
    try:
        record = parse_json(read_plain(_record(out)))
    except (OSError, ValueError):
        return False
    if not isinstance(record, dict) or {n: record.get(n) for n in key} != key or not out.is_dir():
        return False
    report("checking the unpacked files")
    return bool(record.get("files") == _digests(out))


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.is_file()}


def _record(out: Path) -> Path:
    return out.with_name(f"{out.name}.json")


def _write_record(out: Path, document: dict[str, Any]) -> None:
    path = _record(out)
    try:
        write_whole(path, (json.dumps(document, indent=2) + "\n").encode())
    except OSError as error:
        raise write_failed(path, error) from error
