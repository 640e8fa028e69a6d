"""What `headstart families` says about the engine is what the models do."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.backends.cuda.support import why_unsupported
from headstart.calibrate.tiny_configs import TINY_CONFIGS
from headstart.checkpoint.config import Config
from headstart.cli.families import family_rows, markdown_table
from headstart.errors import UnsupportedFamily
from headstart.families.parameters import UNUSUAL, USUAL, held_by, parameters
from headstart.families.registry import GRAFTED_AS, families, match_family, runtimes
from headstart.families.runtime import Runtime
from headstart.models.config_reader import model_config

HEADED = {name: config for name, config in TINY_CONFIGS.items() if name not in GRAFTED_AS}


def test_every_type_that_runs_is_listed_and_no_other() -> None:
    listed = {kind for family in families() for kind in family.run_types}
    assert listed == set(runtimes()) - set(GRAFTED_AS)
    for family in families():
        assert set(family.run_types) <= {*family.model_types, *family.marked_types}
        assert family.engine_lacks or set(family.model_types) <= set(family.run_types)


@pytest.mark.parametrize("config", HEADED.values(), ids=HEADED)
def test_what_is_said_of_a_family_holds_for_its_tiny_config(config: dict[str, Any]) -> None:
    parsed = Config(config)
    owner = match_family(parsed.fields, parsed.model_types, parsed.architectures)
    assert owner is not None
    if owner.runtime is None:
        with pytest.raises(UnsupportedFamily) as refusal:
            model_config(parsed.fields)
        assert owner.engine_lacks in str(refusal.value)
        return
    made = model_config(parsed.fields)
    assert (why_unsupported(made) is None) == owner.runtime.has_gpu_kernels, why_unsupported(made)


def test_a_family_is_refused_with_what_is_missing() -> None:
    with pytest.raises(UnsupportedFamily, match=r"'gigachat3_5'.* It would need "):
        model_config(TINY_CONFIGS["gigachat3_5"])
    (row,) = [row for row in family_rows() if row["family"] == "gigachat3_5"]
    assert row["files"] == "complete" and row["engine_lacks"]
    assert (row["engine_cpu"], row["engine_gpu"], row["training"]) == ("no", "no", "no")


def test_the_table_has_a_row_for_each_family_and_says_who_serves_it() -> None:
    rows = {row["family"]: row for row in family_rows()}
    assert rows["deepseek_v3"]["engine_cpu"] == rows["deepseek_v3"]["training"] == "yes"
    assert rows["exaone4_5"]["engine_gpu"] == "plain"
    assert rows["deepseek_v3"]["engine_gpu"] == rows["mimo"]["engine_gpu"] == "kernels"
    assert rows["nemotron_h"]["engine_cpu"] == "partly"
    assert "puzzle" in rows["nemotron_h"]["engine_lacks"]
    table = markdown_table(list(rows.values())).splitlines()
    assert len(table) == 3 * (len(rows) + 2) + 2  # three tables, empty lines between them
    models, contract, runs = [line for line in table if line.startswith("| `deepseek_v3` |")]
    assert models.endswith("| 1 | complete |") and "| embed first |" in contract
    assert "| yes | kernels | vllm 0.7.3," in runs
    assert all(row["training"] == row["engine_cpu"] for row in rows.values())


def test_a_config_is_completed_in_order_and_left_as_it_is() -> None:
    runtime = Runtime(
        defaults={"a": 1, "b": 2}, fixed={"c": 3}, renamed={"theirs": "b"},
        normalise=lambda fields: {"sum": fields["a"] + fields["b"] + fields["c"]},
        refused={"odd": "the engine computes it without."},
    )  # fmt: skip
    raw = {"a": None, "c": 9, "theirs": 5}
    assert runtime.complete(raw) == {"a": 1, "b": 5, "c": 3, "theirs": 5, "sum": 9}
    assert raw == {"a": None, "c": 9, "theirs": 5}
    with pytest.raises(UnsupportedFamily, match="odd is true; the engine computes it without"):
        runtime.complete({"odd": True})


def test_a_table_of_parameters_is_read_and_families_override_the_usual_one() -> None:
    own = parameters("""
        mlp.router.weight            moe.gate.weight
        mlp.experts.gate_up.weight   moe.{expert}.{gate,up}_proj.weight
    """)
    assert own["mlp.experts.gate_up.weight"] == (
        "moe.{expert}.gate_proj.weight", "moe.{expert}.up_proj.weight",
    )  # fmt: skip
    assert held_by({"moe.gate.weight", "mlp.down_proj.weight"}, own) == {
        "mlp.router.weight", "mlp.down.weight",
    }  # fmt: skip
    assert held_by({"moe.gate.weight"}, {}) == frozenset()


def test_families_override_parameters_that_exist() -> None:
    for name, runtime in runtimes().items():
        assert set(runtime.parameters) <= {*USUAL, *UNUSUAL}, name
