"""Options of an engine, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.engine.options import EngineOptions, engine_options, parse_speculate
from headstart.errors import ConfigError

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weights": "int2"}, "weights is 'int2'; give one of as-dtype, int8"),
    ({"layout": "foo"}, "layout is 'foo'; give one of own, vllm, sglang"),
    ({"speculate": 2.5}, r"speculate is 2\.5; give auto, context or a number from 0 to 16"),
    ({"speculate": True}, "speculate is True; give"),
    ({"speculate": "3"}, "speculate is '3'; give"),
    ({"speculate": 17}, "speculate is 17; give"),
    ({"speculate_off_above": -3}, "speculate_off_above is -3; give a whole number of at least 0"),
    ({"max_running_requests": 2.5}, r"max_running_requests is 2\.5; give a whole number"),
    ({"block_size": True}, "block_size is True; give a whole number of at least 1"),
    ({"kv_bytes": 0}, "kv_bytes is 0; give a whole number of at least 1"),
    ({"threads": 0}, "threads is 0; give"),
    ({"max_model_len": 1}, "max_model_len is 1; give a whole number of at least 2"),
    ({"memory_fraction": 0}, "memory_fraction is 0; give a number above 0, up to 1"),
    ({"memory_fraction": True}, "memory_fraction is True; give"),
    ({"prefix_caching": 1}, "prefix_caching is 1; give true or false"),
    ({"exact": True, "weights": "int8"}, "exact and weights int8 were both given"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_a_value_that_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**fields)


def test_what_may_be_left_open_may_be_none() -> None:
    options = EngineOptions(
        kv_bytes=None, threads=None, max_model_len=None, speculate_off_above=None,
        memory_fraction=None, max_running_requests=None,
    )  # fmt: skip
    assert options == EngineOptions()


def test_settings_beside_options_are_not_dropped() -> None:
    """Regression: `Engine(model, options=..., block_size=-5, nonsense=1)` ignored both."""
    with pytest.raises(ConfigError, match="options and block_size, nonsense were both given"):
        engine_options(EngineOptions(), {"block_size": -5, "nonsense": 1})
    with pytest.raises(ConfigError, match="no option nonsense; it has speculate, "):
        engine_options(None, {"nonsense": 1})
    assert engine_options(None, {"block_size": 4}).block_size == 4


def test_a_number_of_drafts_is_read_as_people_type_it() -> None:
    assert (parse_speculate("auto"), parse_speculate("3")) == ("auto", 3)
    with pytest.raises(ConfigError, match="speculate is 'x'; give auto"):
        parse_speculate("x")


@pytest.mark.parametrize(
    ("options", "rows"),
    [({}, 512), ({"speculate": "auto"}, 512), ({"speculate": 7}, 1024),
     ({"max_running_requests": 130, "speculate": 3}, 1040), ({"chunked_prefill": False}, 2048),
     ({"max_batched_tokens": 16, "max_running_requests": 130}, 16)],
    ids=str,
)  # fmt: skip
def test_half_of_the_rows_of_a_cpu_are_left_for_prompts(options: dict[str, Any], rows: int) -> None:
    given = EngineOptions(**options)
    assert given.num_rows == given.resolved("cpu").num_rows == rows
    assert EngineOptions().resolved("cuda").num_rows == 8192


def test_a_gpu_decides_by_memory_how_many_requests_run() -> None:
    assert EngineOptions().resolved("cpu").max_running_requests == 64
    assert EngineOptions().resolved("cuda").max_running_requests is None
    assert EngineOptions(max_running_requests=3).resolved("cuda").max_running_requests == 3
