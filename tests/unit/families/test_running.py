"""What `headstart families` says about the engine is what the models do."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.backends.cuda.support import why_unsupported
from headstart.calibrate.tiny_configs import TINY_CONFIGS
from headstart.checkpoint.config import Config
from headstart.cli.families import family_rows, markdown_table
from headstart.errors import UnsupportedFamily
from headstart.families.registry import families, match_family
from headstart.families.running import lacking, running
from headstart.models.config import model_config
from headstart.models.spelling import RUN_TYPES

# trunks without published heads; they run grafted
GRAFTED = ("llama", "qwen2")
HEADED = {name: config for name, config in TINY_CONFIGS.items() if name not in GRAFTED}


def test_every_type_that_runs_is_listed_and_no_other() -> None:
    listed = {kind for f in families() if (r := running(f.name)) for kind in r.model_types}
    assert listed == set(RUN_TYPES) - set(GRAFTED)
    for family in families():
        found = running(family.name)
        own = {*family.model_types, *family.marked_types}
        assert found is None or set(found.model_types) <= own


@pytest.mark.parametrize("config", HEADED.values(), ids=HEADED)
def test_what_is_said_of_a_family_holds_for_its_tiny_config(config: dict[str, Any]) -> None:
    parsed = Config(config)
    owner = match_family(parsed.fields, parsed.model_types, parsed.architectures)
    assert owner is not None
    found = running(owner.name)
    if found is None:
        with pytest.raises(UnsupportedFamily) as refusal:
            model_config(parsed.fields)
        assert lacking(owner.name) in str(refusal.value)
        return
    made = model_config(parsed.fields)
    is_fused = why_unsupported(made) is None and owner.default_modules == 1
    assert is_fused == found.is_fused, why_unsupported(made)


def test_deepseek_v4_is_refused_with_what_is_missing() -> None:
    with pytest.raises(UnsupportedFamily, match=r"'deepseek_v4'.*need several residual streams"):
        model_config(TINY_CONFIGS["deepseek_v4"])
    (row,) = [row for row in family_rows() if row["family"] == "deepseek_v4"]
    assert row["files"] == "complete" and "hyper-connections" in row["engine_lacks"]
    assert (row["engine_cpu"], row["engine_gpu"], row["training"]) == ("no", "no", "no")


def test_the_table_has_a_row_for_each_family_and_says_who_serves_it() -> None:
    rows = {row["family"]: row for row in family_rows()}
    assert rows["deepseek_v3"]["engine_cpu"] == rows["deepseek_v3"]["training"] == "yes"
    assert rows["deepseek_v32"]["engine_gpu"] == "plain"
    assert rows["deepseek_v3"]["engine_gpu"] == rows["mimo"]["engine_gpu"] == "kernels"
    assert (
        rows["mimo_v2"]["engine_cpu"] == "partly" and "qkv_proj" in rows["mimo_v2"]["engine_lacks"]
    )
    table = markdown_table(list(rows.values())).splitlines()
    assert len(table) == len(rows) + 2
    (line,) = [line for line in table if line.startswith("| `deepseek_v3` |")]
    assert "| complete | yes | kernels | yes | vllm 0.7.3," in line
