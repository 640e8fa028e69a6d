"""From values to what a scraper reads: each metric under our name and, where it has one, vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headstart.server.metrics.engine_reading import Values
from headstart.server.metrics.table import COMMON_LABELS, METRICS, Metric

_EVENT_COUNTERS = ("request_success", "http_requests", "http_responses")


class Events:
    """Counters and histograms that are told what happened; the engine's own are read instead."""

    def __init__(self, common: Mapping[str, str]):
        self._registry = CollectorRegistry()
        self._common = dict(common)
        # All at once: made on first use, two threads could make the same one.
        self._counters = {name: self._counter(METRICS[name]) for name in _EVENT_COUNTERS}
        self._histograms = {
            name: self._histogram(metric)
            for name, metric in METRICS.items()
            if metric.kind == "histogram"
        }
        for name in self._histograms:
            if not METRICS[name].labels:
                self.histogram(name)  # exposed with 0, not only after the first observation

    def _counter(self, metric: Metric) -> Counter:
        labels = (*COMMON_LABELS, *metric.label_names)
        return Counter(metric.own, metric.help, labels, registry=self._registry)

    def _histogram(self, metric: Metric) -> Histogram:
        labels = (*COMMON_LABELS, *metric.label_names)
        return Histogram(
            metric.own, metric.help, labels, registry=self._registry, buckets=metric.buckets
        )

    def counter(self, name: str, **labels: str) -> Counter:
        """A counter's series; it is exposed from the first call on, with 0."""
        bounded = METRICS[name].bounded(labels)
        return self._counters[name].labels(**self._common, **bounded)

    def histogram(self, name: str, **labels: str) -> Histogram:
        """A histogram's series, to observe values with."""
        bounded = METRICS[name].bounded(labels)
        return self._histograms[name].labels(**self._common, **bounded)

    def families(self) -> Iterator[Family]:
        yield from self._registry.collect()


class Exposition(Collector):
    """Everything a registry asks for: events, and values that are read now."""

    def __init__(self, common: Mapping[str, str], events: Events, read: Callable[[], Values]):
        self._common, self._events, self._read = dict(common), events, read

    def collect(self) -> Iterator[Family]:
        by_name = {metric.own: metric for metric in METRICS.values()}
        families = [*self._events.families(), *_families(self._read(), self._common)]
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
        own = metric.bounded(dict(zip(metric.label_names, label_values, strict=True)))
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
    """Under the other name; bucket counts are cumulative, so some can be left out."""
    assert metric.alias is not None
    kept = {*metric.alias_buckets, float("inf")}
    for sample in samples:
        bound = sample.labels.get("le") if metric.kind == "histogram" else None
        if bound is None or not metric.alias_buckets or float(bound) in kept:
            yield sample._replace(name=metric.alias + sample.name.removeprefix(metric.own))
