"""The page of metrics: each under our name and, where vLLM has the same one, under vLLM's."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headstart.server.metrics.readings import Readings, Values
from headstart.server.metrics.series import Series
from headstart.server.metrics.table import METRICS, Metric
from headstart.server.recording import bounded


class MetricsPage:
    """GET /metrics: everything that one server has counted, and what its engine says now."""

    def __init__(self, series: Series, readings: Readings):
        self.registry = CollectorRegistry()
        self.registry.register(_Exposition(series, readings))
        ProcessCollector(registry=self.registry)
        self._lock = threading.Lock()

    def render(self) -> tuple[bytes, str]:
        """Body and content type."""
        with self._lock:  # two scrapers at once would each get a part
            return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4


class _Exposition(Collector):
    """What a registry asks for: counted events, and values that are read now."""

    def __init__(self, series: Series, readings: Readings):
        self._series, self._readings = series, readings

    def collect(self) -> Iterator[Family]:
        by_name = {metric.own: metric for metric in METRICS.values()}
        read = _families(self._readings.values(), self._series.common)
        families = [*self._series.families(), *read]
        for family in families:
            metric = by_name[family.name]
            samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield _family(metric, metric.own, samples)
            if metric.alias is not None:
                yield _family(metric, metric.alias, [*_renamed(metric, samples)])


def _families(values: Values, common: Mapping[str, str]) -> Iterator[Family]:
    grouped: dict[str, list[Sample]] = {}
    for (name, label_values), value in values.items():
        metric = METRICS[name]
        own = bounded(metric, dict(zip(metric.label_names, label_values, strict=True)))
        labels = {**common, **own}
        ending = "_total" if metric.kind == "counter" else ""
        grouped.setdefault(name, []).append(Sample(metric.own + ending, labels, float(value)))
    for name, samples in grouped.items():
        yield _family(METRICS[name], METRICS[name].own, samples)


def _family(metric: Metric, name: str, samples: Iterable[Sample]) -> Family:
    family = Family(name, metric.help, metric.kind)
    family.samples = list(samples)
    return family


def _renamed(metric: Metric, samples: Iterable[Sample]) -> Iterator[Sample]:
    """Samples under vLLM's name; bucket counts are cumulative, so some can be left out."""
    assert metric.alias is not None
    kept = {*metric.alias_buckets, float("inf")}
    for sample in samples:
        bound = sample.labels.get("le") if metric.kind == "histogram" else None
        if bound is None or not metric.alias_buckets or float(bound) in kept:
            yield sample._replace(name=metric.alias + sample.name.removeprefix(metric.own))
