"""Money per token."""

from __future__ import annotations

import pytest

from headstart.bench.cost import parse_prices, saving
from headstart.errors import ConfigError


def test_an_hour_of_gpus_is_shared_among_its_tokens() -> None:
    prices = parse_prices(["3.60"], num_gpus=2)
    assert prices is not None
    # 1000 tokens a second are 3.6 million an hour, which costs 2 x 3.60.
    assert prices.per_million_tokens(1000) == {"on-demand": pytest.approx(2.0)}
    assert prices.per_million_tokens(0) == {"on-demand": None}


def test_prices_are_given_by_kind_in_one_word_or_several() -> None:
    for texts in (["on-demand=2,spot=1"], ["2", "spot=1"]):
        prices = parse_prices(texts, 1)
        assert prices is not None and prices.per_gpu_hour == {"on-demand": 2.0, "spot": 1.0}
    assert parse_prices([], None) is None


@pytest.mark.parametrize("text", ["cheap", "spot=-1", "reserved=1", "2,on-demand=3", "spot="])
def test_a_price_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="per GPU-hour"):
        parse_prices([text], 1)


def test_no_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="--gpus is 0"):
        parse_prices(["1"], 0)
    with pytest.raises(ConfigError, match="--gpus is 8 without a price"):
        parse_prices([], 8)


def test_a_saving_is_the_share_not_paid() -> None:
    assert saving(2.0, 1.5) == 0.25
    assert saving(1.0, 1.5) == -0.5
    assert saving(None, 1.0) is None and saving(1.0, None) is None
