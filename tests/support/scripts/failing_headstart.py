"""The command line with an engine whose steps fail from SIGUSR1 on."""

from __future__ import annotations

import signal
import threading
from typing import Any

from headstart.cli.main import main
from headstart.engine.engine import Engine

is_broken, step = threading.Event(), Engine.step


def failing(engine: Engine) -> Any:
    if is_broken.is_set():
        raise RuntimeError("the device is on fire")
    return step(engine)


Engine.step = failing
signal.signal(signal.SIGUSR1, lambda *_: is_broken.set())
main()
