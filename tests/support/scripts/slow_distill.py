"""The command line with every engine step slowed down, so that a test can stop it midway.

python slow_distill.py SECONDS_PER_STEP distill ...
"""

from __future__ import annotations

import sys
import time
from typing import Any

from headstart.cli.main import main
from headstart.engine.engine import Engine

pause = float(sys.argv.pop(1))
real_step = Engine.step


def slow_step(self: Engine) -> Any:
    time.sleep(pause)
    return real_step(self)


Engine.step = slow_step
main()
