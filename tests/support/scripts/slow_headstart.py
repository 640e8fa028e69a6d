"""The command line with every copied kilobyte slowed down, so that a test can stop it midway.

python slow_headstart.py SECONDS_PER_CHUNK export ...
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from headstart.checkpoint import transfer
from headstart.cli.main import main

pause = float(sys.argv.pop(1))
real_range, real_read = os.copy_file_range, os.preadv


def slow_range(source: int, target: int, count: int, **options: Any) -> int:
    time.sleep(pause)
    return real_range(source, target, min(count, 100_000), **options)


def slow_read(handle: int, buffers: Any, offset: int) -> int:
    time.sleep(pause / 4)
    return real_read(handle, buffers, offset)


os.copy_file_range = slow_range
os.preadv = slow_read
transfer._FLUSH_BYTES = 300_000
main()
