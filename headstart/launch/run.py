"""Run an engine in the foreground, as if it had been started by hand.

One process replaces this one, so signals and exit code are its own. Several are supervised: signals
go to all, when one ends the others are stopped, and the first failure is the exit code.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from headstart.errors import LaunchError
from headstart.files import write_whole
from headstart.launch.command import EngineCommand, Preparation, Process
from headstart.launch.probe import INSTALL
from headstart.processes import python_command
from headstart.report.terminal import say

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS = 0.05


def run(command: EngineCommand, grace_seconds: float = 60) -> int:
    """Write the files, start everything, and return the exit code when it is over."""
    if command.code_files:
        raise LaunchError(
            f"--run: {command.engine} would run Python code of the checkpoint (auto_map in its "
            f"config: {', '.join(command.code_files)}), which was not allowed. Read those files "
            "and add --trust-remote-code."
        )
    program = command.argv[0]
    if shutil.which(program) is None:
        what = "docker" if command.in_docker else command.engine
        hint = "Install Docker" if command.in_docker else INSTALL[command.engine]
        raise LaunchError(f"cannot run {what}: no program {program} on PATH. {hint}.")
    if command.preparation is not None:
        _prepare(command.preparation)
    for name, text in command.files.items():
        write_whole(Path(name), text.encode())
    environment = {**os.environ, **command.env}
    if len(command.processes) == 1 and command.processes[0].log is None:
        # Python ignores broken pipes, and a program we turn into would inherit that.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvpe(program, command.argv, environment)
    return _supervise(command.processes, environment, grace_seconds)


def _prepare(preparation: Preparation) -> None:
    """Make the folder that the engine needs, unless it is there."""
    if preparation.folder.is_dir():
        return
    # As a module: the program `headstart` need not be on PATH where `python -m headstart` is.
    if subprocess.run(python_command(*preparation.argv), stdout=sys.stderr).returncode:
        raise LaunchError(
            f"--run: {preparation.folder} is not there and could not be made. Run `"
            f"{shlex.join(preparation.argv)}` and see what it says."
        )


def _supervise(
    processes: tuple[Process, ...], environment: dict[str, str], grace_seconds: float
) -> int:
    with ExitStack() as stack:
        running: list[subprocess.Popen[bytes]] = []
        stack.enter_context(_forwarding_to(running))
        for process in processes:
            output = None
            if process.log is not None:
                process.log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(process.log.open("wb"))
            running.append(
                subprocess.Popen(
                    process.argv,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT if output else None,
                    # Ctrl-C reaches the whole group of the terminal; ours get it once, from us.
                    start_new_session=True,
                )
            )
        try:
            return _wait(running, processes)
        finally:
            _stop(running, grace_seconds)


def _wait(running: list[subprocess.Popen[bytes]], processes: tuple[Process, ...]) -> int:
    """The exit code of the first process that ends; a failure wins over a success."""
    while True:
        codes = [child.poll() for child in running]
        ended = [index for index, code in enumerate(codes) if code is not None]
        if ended:
            index = next((i for i in ended if codes[i]), ended[0])
            code = codes[index] or 0
            say(
                f"process {index} ended with {code}, see {processes[index].log}; stopping the rest",
                file=sys.stderr,
            )
            return 128 - code if code < 0 else code
        time.sleep(_POLL_SECONDS)


def _stop(running: list[subprocess.Popen[bytes]], grace_seconds: float) -> None:
    for child in running:
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + grace_seconds
    for child in running:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextmanager
def _forwarding_to(running: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def forward(signum: int, frame: FrameType | None) -> None:
        for child in running:
            if child.poll() is None:
                child.send_signal(signum)

    before = {signum: signal.signal(signum, forward) for signum in _FORWARDED}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
