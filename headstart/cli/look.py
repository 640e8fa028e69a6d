"""The one look of what commands print: tables, progress, and tokens by origin.

A table has no lines, a bold head, its first column on the left and the others on the right. Into a
pipe it goes with room for every cell (COLUMNS says otherwise) and without
colours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from headstart.report.terminal import Console

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

_PIPED_WIDTH = 140
# A token that was not drafted has no colour: in an answer that drafts write, it is the exception.
ORIGIN_STYLES = {"accepted": "green", "copied": "cyan", "recovered": "red", "bonus": "default"}


def console_of(*, soft_wrap: bool = False) -> Console:
    """For stdout; lines that are to be broken by the terminal alone want `soft_wrap`."""
    console = Console(highlight=False, soft_wrap=soft_wrap)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(highlight=False, soft_wrap=soft_wrap, width=_PIPED_WIDTH, no_color=True)


def table_of(heads: Sequence[str], *, left: Sequence[str] = ()) -> Table:
    """An empty table; the columns in `left` are words, like the first one."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, head in enumerate(heads):
        is_left = number == 0 or head in left
        table.add_column(head, justify="left" if is_left else "right", no_wrap=number == 0)
    return table


def bar_of(*columns: ProgressColumn) -> Progress:
    """A bar on stderr between what stands before and behind it; it is gone in the end."""
    from rich.progress import Progress

    return Progress(
        *columns, console=Console(stderr=True), transient=True, refresh_per_second=4,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip
