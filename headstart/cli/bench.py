"""`headstart bench run|tasks|diff`: what MTP brings, measured over HTTP."""

from __future__ import annotations

# subcommand -> what it does; its code is headstart/cli/bench_<subcommand>.py, function `run`
SUBCOMMANDS = {
    "run": "Put a load on a server or a MODEL, with and without MTP.",
    "tasks": "Answer files of questions with and without MTP, task by task.",
    "diff": "Say what changed between two results, and whether it is noise.",
}
