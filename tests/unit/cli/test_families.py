"""The list of families on narrow terminals."""

from __future__ import annotations

import json

import pytest
from support.commands import headstart

from headstart.families.registry import families


@pytest.mark.parametrize("columns", ["80", "100", "200"])
def test_no_name_is_cut_in_two(columns: str) -> None:
    """Regression: `deepseek_v3` was `deepseek_` and `v3` on 80 columns."""
    lines = headstart("families", COLUMNS=columns).stdout.splitlines()
    firsts = {line.split()[0] for line in lines if line and not line.startswith(" ")}
    assert {family.name for family in families()} <= firsts
    assert max(map(len, lines)) <= int(columns)


def test_engines_that_need_our_plugin_are_said_to() -> None:
    """In the table of the terminal, in both of the documentation, and in the JSON."""
    rows = {row["family"]: row for row in json.loads(headstart("families", "--json").stdout)}
    for family in families():
        apart = [engine for engine in family.served_apart if engine not in family.served]
        assert rows[family.name]["engines_with_plugin"] == apart
    assert "vllm 0.26.0 (with plugin)" in " ".join(
        headstart("families", COLUMNS="400").stdout.split()
    )
    written = [line for line in headstart("families", "--markdown").stdout.splitlines()
               if "(with plugin)" in line]  # fmt: skip
    assert [line.split("`")[1] for line in written] == [
        f.name for f in families() if f.served_apart.keys() - f.served.keys()
    ]
