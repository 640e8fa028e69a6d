"""The list of families on narrow terminals."""

from __future__ import annotations

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
