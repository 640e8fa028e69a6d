"""`headstart inspect MODEL`: is there a head, whose, is it whole, how to serve with it."""

from __future__ import annotations

import json

from headstart.cli.options import Json, Model, ModelType


def run(*, model: Model, json_output: Json = False, model_type: ModelType = None) -> None:
    from headstart.checkpoint.hub import local_folder
    from headstart.checkpoint.reader import Checkpoint
    from headstart.cli.inspect_view import show, show_standalone
    from headstart.heads.inspection import inspect, inspect_standalone
    from headstart.launch import commands_for

    checkpoint = Checkpoint.open(local_folder(model))
    standalone = inspect_standalone(checkpoint)
    if standalone is not None:  # served with its model, so there are no commands to show
        if json_output:
            print(json.dumps(standalone.as_json(), indent=2))
        else:
            show_standalone(standalone)
        return
    report = inspect(checkpoint, model_type)
    engines = commands_for(report)
    if not json_output:
        show(report, engines)
        return
    document = report.as_json()
    document["engines"] = {
        name: {"command": None, "reason": answer}
        if isinstance(answer, str)
        else {"command": answer.shell(), "reason": None}
        for name, answer in engines.items()
    }
    print(json.dumps(document, indent=2))
