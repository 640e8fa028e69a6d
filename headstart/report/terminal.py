"""Text for a terminal: what others wrote is shown, and never steers it.

Generated text, configs, names of tokens and errors of templates may hold escape sequences, which
move the cursor, hide lines, or write to the clipboard. Everything that a command prints goes
through `say` or `Console`; both show control characters as escapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

_CODES = (*range(0x20), *range(0x7F, 0xA0))  # C0, DEL and C1
CONTROLS = {code: f"\\x{code:02x}" for code in _CODES if chr(code) not in "\n\t"}


def shown(text: str) -> str:
    r"""Control characters as `\x1b`; newlines and tabs as they are."""
    return text.translate(CONTROLS)


def say(text: str = "", *, file: TextIO | None = None, flush: bool = False) -> None:
    """Print a line, or several."""
    print(shown(text), file=file, flush=flush)


class Console(RichConsole):
    """Colours and cursor are rich's own; text never becomes a part of them."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(shown(segment.text), segment.style)
