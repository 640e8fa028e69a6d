"""A finished or stopped run that `--overwrite` replaces: set aside first, removed when the new one
has begun, put back when that fails.

Only names that a run writes are touched, and all by renames within the folder. options.json goes
first and comes back last, so whatever a kill leaves says what it is: without it in the folder, but
with it aside, the rest is yet to be moved.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

_ASIDE = ".replaced"


class Replaced:
    """The older run in the folder of a newer one."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        """`names` are all that a run writes, the one that marks a run first."""
        self.folder, self.aside, self._names = folder, folder / _ASIDE, names

    @property
    def is_half_done(self) -> bool:
        """Whether a kill came while the older run was set aside or put back."""
        marker = self._names[0]
        return (self.aside / marker).is_file() and not (self.folder / marker).exists()

    def set_aside(self, *, has_begun: bool) -> None:
        """Make place; `has_begun`: the run in the folder has something worth keeping."""
        if not any(os.path.lexists(self.folder / name) for name in self._names):
            return
        marker, *others = self._names
        if (self.folder / marker).exists():
            if (self.aside / marker).is_file() and not has_begun:
                # The run that is here was killed before it came to anything: what it was to
                # replace stays aside instead.
                self._remove(others)
                return
            self.drop()
        self.aside.mkdir(exist_ok=True)
        _move(self._names, self.folder, self.aside)

    def put_back(self) -> None:
        """Undo `set_aside`, because the new run could not begin."""
        marker, *others = self._names
        if not (self.aside / marker).is_file():
            return
        if (self.folder / marker).exists():  # else what is here has not been moved yet
            self._remove(others)
            (self.folder / marker).unlink()
        _move([*others, marker], self.aside, self.folder)
        shutil.rmtree(self.aside)

    def drop(self) -> None:
        """Remove what was set aside."""
        (self.aside / self._names[0]).unlink(missing_ok=True)  # first: half a run is no run
        if self.aside.exists():
            shutil.rmtree(self.aside)

    def _remove(self, names: Iterable[str]) -> None:
        for path in (self.folder / name for name in names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _move(names: Iterable[str], source: Path, target: Path) -> None:
    for name in names:
        if os.path.lexists(source / name):
            os.rename(source / name, target / name)
