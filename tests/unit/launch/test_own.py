"""`inspect` names our own server beside the others, where it can draft with the head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.launch_examples import report

from headstart.launch.command import EngineCommand
from headstart.launch.our_server import own_command


def test_a_head_that_the_engine_runs_gets_a_command() -> None:
    found = own_command(replace(report("mimo"), path=Path("my model")))
    assert isinstance(found, EngineCommand) and found.shell() == "headstart serve 'my model'"


def test_what_the_engine_does_not_run_gets_a_reason() -> None:
    assert "would need" in str(own_command(report("openpangu_v2")))
    assert "not known here" in str(own_command(replace(report("mimo"), family=None)))
    whole = report("mimo")
    lost = replace(whole, head=replace(whole.head, state="declared-but-missing"))
    assert "drafts nothing" in str(own_command(lost))
    assert "a head alone" in str(own_command(replace(whole, is_head_alone=True)))
