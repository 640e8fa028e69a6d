"""The program that compares families on a CPU: its shapes, and the table that it makes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("numba")

from cpu_families import page
from cpu_shapes import FAMILIES, config_of

from headstart.backends.numba.support import why_unsupported
from headstart.models.config_reader import model_config


def test_shapes_of_all_families_can_be_read_and_most_are_compiled() -> None:
    plain = {}
    for name in FAMILIES:
        config = model_config(config_of(name))
        assert config.hidden == 576 and config.vocab == 49152
        reason = why_unsupported(config, [*config.layers, config.head_layer])
        if reason is not None:
            plain[name] = reason
    assert plain == {
        "deepseek-v3.2": "the model chooses what rows see by an indexer",
        "glm-5": "the model chooses what rows see by an indexer",
        "exaone-4.5": "the model norms what attention and MLPs give",
    }


def test_a_table_has_what_ran_compiled_and_what_did_not() -> None:
    def speed(tokens: float, rate: float) -> dict[str, float]:
        return {"tokens_per_second": tokens, "gigabytes_per_second": rate}

    row: dict[str, Any] = {
        "weights": "int8", "K": 3, "length": 2.0, "bytes_per_round": 160e6, "per_byte": 0.9,
        "torch": speed(10.0, 4.0), "smollm2": speed(50.0, 10.0),
    }  # fmt: skip
    families = {"fast": [{**row, "numba": speed(25.0, 9.0)}], "slow": [row]}
    lines = page({"families": families}).splitlines()
    assert lines[2:] == [
        "| fast | int8 | 3 | 160 | 10.0 | 25.0 | 2.50 | 9.0 | 10.0 | 0.90 |",
        "| slow | int8 | 3 | 160 | 10.0 | - | - | 4.0 | 10.0 | 0.90 |",
    ]
