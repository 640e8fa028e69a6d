"""How this package starts Python again: one place, so that no child takes code from where it runs.

`python -m` puts the working directory first on the module path. A command that runs in a model's
folder would then execute a typer.py or xgrammar.py that lies there.
"""

from __future__ import annotations

import os
import sys

# Turns of a waiting thread of GNU's OpenMP, GOMP_SPINCOUNT, that commands set unless the user has:
# some microseconds, longer than the gap between two products of a layer, shorter than the slice
# that another process could have used. A child has it in its environment, too.
SHORT_SPIN = "1000"


def python_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """`python -m MODULE ARGUMENTS` without the working directory on the path; PYTHONPATH counts.

    `python`: the interpreter of another environment, 3.11 or newer.
    """
    return [python or sys.executable, "-P", "-m", module, *arguments]


def drop_working_directory() -> None:
    """Take away what `python -m headstart` put first, unless the package itself lies there.

    Only what is imported afterwards is protected: for the rest there is `python -P -m headstart`.
    """
    if sys.flags.safe_path or not sys.path:
        return
    here, first = os.path.realpath(os.getcwd()), os.path.realpath(sys.path[0])
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if first == here and first != home:
        del sys.path[0]
