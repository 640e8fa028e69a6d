"""What tokens cost: machines are paid by the hour, whatever they do in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.bench.words import positive_number
from headstart.errors import ConfigError

KINDS = ("on-demand", "spot")
_MILLION, _SECONDS_PER_HOUR = 1e6, 3600.0


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Money per GPU-hour by kind of contract, and how many GPUs the server runs on."""

    per_gpu_hour: Mapping[str, float]
    num_gpus: int = 1

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ConfigError(f"--gpus is {self.num_gpus}; give at least 1.")

    def per_million_tokens(self, tokens_per_second: float) -> dict[str, float | None]:
        """By kind; None where no token came."""
        if not tokens_per_second:
            return dict.fromkeys(self.per_gpu_hour)
        hours = _MILLION / tokens_per_second / _SECONDS_PER_HOUR
        return {kind: price * self.num_gpus * hours for kind, price in self.per_gpu_hour.items()}

    def as_json(self) -> dict[str, Any]:
        return {"per_gpu_hour": dict(self.per_gpu_hour), "gpus": self.num_gpus}


def parse_prices(texts: list[str], num_gpus: int | None) -> Prices | None:
    """`2.50` (on demand), or `on-demand=2.50`, `spot=1.10`; None without any."""
    found: dict[str, float] = {}
    for text in (part for whole in texts for part in whole.replace(",", " ").split()):
        kind, equals, number = text.partition("=")
        if not equals:
            kind, number = KINDS[0], text
        price = positive_number(number)
        if kind not in KINDS or price is None or kind in found:
            raise ConfigError(
                f"the price {text!r} cannot be read; give money per GPU-hour, as in "
                "on-demand=2.50,spot=1.10 (each once)."
            )
        found[kind] = price
    if not found and num_gpus is not None:
        raise ConfigError(
            f"--gpus is {num_gpus} without a price, which is all it is for; give --price too."
        )
    return (
        Prices(per_gpu_hour=found, num_gpus=1 if num_gpus is None else num_gpus) if found else None
    )


def saving(base_cost: float | None, cost: float | None) -> float | None:
    """The share of the base's cost that is not paid; negative where it costs more."""
    return None if not base_cost or cost is None else 1 - cost / base_cost
