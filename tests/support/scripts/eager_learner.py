"""headstart, with a learner that checks and offers heads after a few steps. Run by a test."""

from __future__ import annotations

import sys
from functools import partial

from headstart.learn import collector, starting
from headstart.learn.process import Task

# Nothing waits: tests are about what happens, and their machine may be busy.
starting.Task = partial(Task, least_seconds=0.2, warm_up=1, gives_way=False)
collector._WRITE_SECONDS = 0.2

from headstart.cli.main import main  # noqa: E402

sys.exit(main())
