"""The folder of `--learn`: its files, the lock of its one writer, and the page that explains it."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from headstart.errors import ConfigError, WriteFailed
from headstart.files import partial_of, write_whole
from headstart.learn.scrubbing import scrub

WORDS = """What this folder holds
======================

It belongs to a Headstart server that was started with --learn. The server keeps here:

texts/   What it was asked and what it answered, as token ids, which anyone with the model's
         tokenizer can turn back into text. Of each: prompt, answer, the first words of the
         prompt (its kind), time, and how it was sampled. No names, keys or addresses of clients.
         At most {gigabytes:g} GB with states/: of more, a sample that is even over time and kinds
         is kept.
states/  What the model computes inside for these texts (its trunk's states), which saves computing
         it again. Texts may be guessed from it: it is as private as they are. It is removed first
         where room is short, and may outlast a text that was dropped from the sample.
heads/   Heads that were tuned on these texts, and how good they were. A head is weights. Like
         any model it may have learned something of what it was tuned on; so may the list of
         tokens that lies beside it (draft_vocab.json). Kinds are numbered there: no words of
         prompts. known.json has digests of the texts that heads are compared on.
status.json   Numbers that `headstart learn status` shows, with the names of kinds, which are
         the first words of prompts. It goes with the texts.

Requests with {{"headstart": {{"learn": false}}}} are not kept, nor those of keys named by
--learn-not-for.

To remove the texts:           headstart learn forget FOLDER       (learned heads remain)
To remove the heads as well:   headstart learn forget FOLDER --heads
"""
STATES = ".states"  # how names of files with states end
START = "start"  # the name of the head that the server was started with
_WORDS_NAME = "WHAT-IS-KEPT.txt"


class Folder:
    """Paths inside; nothing is read or made by making one."""

    def __init__(self, path: Path):
        self.path = path
        self.texts, self.heads = path / "texts", path / "heads"
        self.states = path / "states"
        self.status = path / "status.json"
        self.words = path / _WORDS_NAME
        self.record = self.heads / "heads.json"
        self.known = self.heads / "known.json"

    @property
    def is_there(self) -> bool:
        return self.words.is_file()

    def check_free(self) -> None:
        """ConfigError for a file, and for a folder of something else."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--learn is {self.path}, which is no folder. Give another name.")
        if self.path.is_dir() and not self.is_there and any(map(_is_others, self.path.iterdir())):
            raise ConfigError(
                f"--learn is {self.path}, which holds other files (no {_WORDS_NAME} in it). Give "
                "a new folder, or one that an earlier server learned in."
            )

    def make(self, gigabytes: float) -> None:
        """Make the folder and say in it what it is; WriteFailed where that cannot be."""
        self.check_free()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)  # it holds what clients wrote
            self._explain(gigabytes)  # first: by this file a later start knows the folder
            for folder in (self.texts, self.states, self.heads):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise WriteFailed(
                f"--learn {self.path} cannot be written ({error.strerror}). Give another folder."
            ) from error

    def _explain(self, gigabytes: float) -> None:
        try:
            write_whole(self.words, WORDS.format(gigabytes=gigabytes).encode())
        except OSError:
            if not self.is_there:
                raise  # else the disk is full: a server starts with it all the same

    def check(self) -> None:
        if not self.is_there:
            raise ConfigError(
                f"{self.path} is not a folder of `headstart serve --learn` (no {_WORDS_NAME} in "
                "it). Give one that is."
            )

    def lock(self) -> BinaryIO:
        """Keep other servers and `forget` out until the file is closed; ConfigError if one is in.

        The system gives the lock back when the process ends, however it ends.
        """
        try:
            file = open(self.path / ".lock", "ab")  # noqa: SIM115  the caller's
        except OSError as error:
            raise WriteFailed(f"{self.path} cannot be written ({error.strerror}).") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ConfigError(
                f"{self.path} is in use by a running server or learner. Stop it first, or give "
                "another folder."
            ) from None
        os.set_inheritable(file.fileno(), False)
        return file


def forget(folder: Folder, *, heads: bool) -> str:
    """Remove texts and their states, words of them beside learned heads, and these where asked.

    Says what was removed; ConfigError where a record that may hold such words cannot be read.
    """
    folder.check()
    with folder.lock():
        files = [
            path for own in (folder.texts, folder.states) if own.is_dir() for path in own.iterdir()
        ]
        num_bytes = sum(path.stat().st_size for path in files)
        for path in files:
            path.unlink()
        for path in (folder.status, partial_of(folder.status)):
            path.unlink(missing_ok=True)
        what = counted(len(files), "file")
        said = f"removed {what} of texts and states ({num_bytes / 1e6:.1f} MB)"
        unread = [] if heads else scrub(folder)
        names = {path.name for path in folder.heads.glob("*") if path.is_dir()}
        learned = counted(len(names - {START}), "learned head")
        if heads:
            shutil.rmtree(folder.heads, ignore_errors=not folder.heads.exists())
            folder.heads.mkdir()
            return f"{said} and {learned}"
        if unread:
            raise ConfigError(
                f"{unread[0]} cannot be read and may hold first words of prompts; everything else "
                "is forgotten. Remove that file, or all heads with --heads."
            )
        verb = "remains" if learned.startswith("1 ") else "remain"
        return f"{said}; {learned} {verb} (--heads removes heads, too)"


def _is_others(path: Path) -> bool:
    """Whether it is nothing that a start which was killed has left."""
    return not path.name.startswith(f".{_WORDS_NAME}.")


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
