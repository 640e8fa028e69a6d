"""`headstart learn status|forget|run`: what a server with --learn collected and learned."""

from __future__ import annotations

# subcommand -> what it does; its code is headstart/cli/learn_<subcommand>.py, function `run`
SUBCOMMANDS = {
    "status": "Say what was collected and learned, and which head serves.",
    "forget": "Remove what was collected; learned heads remain, unless --heads is given.",
    "run": "Learn without a server, from what was collected or from logs of another one.",
}
