"""Text for a terminal: what others wrote is shown, and never steers it.

Generated text, configs, names of tokens and errors of templates may hold escape sequences, which
move the cursor, hide lines, or write to the clipboard. Everything that a command prints goes
through `say`, or through the console of `cli/console.py`; both show control characters as escapes.
"""

from __future__ import annotations

import re
from typing import TextIO

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0, DEL and C1 but newline and tab


def shown(text: str) -> str:
    r"""Control characters as `\x1b`; newlines and tabs as they are."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def say(text: str = "", *, file: TextIO | None = None, flush: bool = False) -> None:
    """Print a line, or several."""
    print(shown(text), file=file, flush=flush)
