"""What `headstart learn status` says: numbers of the last server, and every head that was made."""

from __future__ import annotations

import time
from typing import Any, TypeGuard

from headstart.documents import misfit, parse_json
from headstart.files import read_plain
from headstart.learn.appending import size_of
from headstart.learn.folder import STATES, Folder
from headstart.learn.heads import LearnedHead, LearnedHeads

_NUMBERS = {"written": float, "seconds": float}
_LENGTHS = {"old": float, "new": float}


def status(folder: Folder) -> dict[str, Any]:
    """ConfigError for a folder that is none of `--learn`."""
    folder.check()
    files = list(folder.texts.glob("*.jsonl"))
    states = list(folder.states.glob(f"*{STATES}"))
    heads = LearnedHeads(folder)
    try:
        found = parse_json(read_plain(folder.status))
    except (OSError, ValueError):
        found = {}
    return {
        "folder": str(folder.path), "files": len(files),
        "bytes": sum(size_of(path) for path in files),
        "state_bytes": sum(size_of(path) for path in states),
        "serving": heads.serving.name if heads.serving else "start",
        "heads": [vars(head) for head in heads.heads],
        "server": found if _is_whole(found, _NUMBERS) else {},
    }  # fmt: skip


def lines(folder: Folder) -> list[str]:
    """The same for people."""
    found = status(folder)
    server, heads = found["server"], LearnedHeads(folder).heads
    sizes = found["bytes"] / 1e6, found["state_bytes"] / 1e6
    result = [f"texts     {found['files']} files, {sizes[0]:.1f} MB; states {sizes[1]:.1f} MB"]
    if server:
        age = max(0.0, time.time() - server["written"])
        result += [
            f"server    {server.get('state')}, {age:.0f} s ago: {server.get('train')} texts to "
            f"learn from, {server.get('heldout')} held out",
            f"learned   {server.get('steps')} steps in {server['seconds']:.0f} s of "
            f"computing, {server.get('checks')} checks, {server.get('swaps')} swaps, "
            f"{server.get('rollbacks')} rollbacks; {server.get('share', 0):.1%} of the time while "
            "requests ran",
            f"last      {server.get('reason') or 'nothing to say yet'}",
        ]
        result += [
            f"kind      {kind!r}: {before:.3f} -> {after:.3f} on recent held-out answers"
            for kind, (before, after) in server.get("by_kind", {}).items()
        ]
    is_there = (folder.heads / found["serving"]).is_dir()
    result.append(f"serving   head {found['serving']}" if is_there else "serving   no head is left")
    return [*result, *(_line(head) for head in heads)]


def _line(head: LearnedHead) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(head.time))
    recent = head.promise.get("recent")
    gain = f"{recent['old']:.3f} -> {recent['new']:.3f}" if _is_whole(recent, _LENGTHS) else ""
    note = f" ({head.note})" if head.note else ""
    return f"{head.name}      {when}  {head.state}  {gain}{_live(head)}{note}"


def _live(head: LearnedHead) -> str:
    """How often its first drafts were accepted while it served, against the head before."""
    live = head.live
    if not _is_whole(live, _LENGTHS):
        return ""
    shown = f"{live['old']:.3f} -> {live['new']:.3f}"
    return f"; live first drafts {shown} ({live.get('answers')} answers)"


def _is_whole(found: Any, numbers: dict[str, Any]) -> TypeGuard[dict[str, Any]]:
    """Whether what a file says can be shown: an object that has these numbers."""
    return isinstance(found, dict) and misfit(numbers, found) is None
