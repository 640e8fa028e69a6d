"""How long a thread that waits for work keeps its core busy."""

from __future__ import annotations

import os

from headstart.processes import SHORT_SPIN

_CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> None:
    """Bound it, unless the user has; must run before torch is imported.

    GNU's OpenMP spins for milliseconds by default. On a busy machine a spinning thread takes the
    core that the thread it waits for would need.
    """
    if not any(name in os.environ for name in _CHOICES):
        os.environ["GOMP_SPINCOUNT"] = SHORT_SPIN
