"""Counters and histograms of one server, made from the table; `recording.py` fills them.

Numbers that the engine counts itself are not among them: `readings.py` reads those.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric as Family

from headstart.server.metrics.table import COMMON_LABELS, METRICS, Metric

_COUNTERS = ("request_success", "http_requests", "http_responses")


class Series:
    """Metrics by their names in the table; `plain` are the histograms that have no labels.

    All are made at once: made on first use, two threads could make the same one.
    """

    def __init__(self, model_name: str):
        self._registry = CollectorRegistry()
        self.common = {"model_name": model_name, "engine": "0"}  # labels of all of them
        self.counters = {name: self._counter(METRICS[name]) for name in _COUNTERS}
        self.histograms = {
            name: self._histogram(metric)
            for name, metric in METRICS.items()
            if metric.kind == "histogram"
        }
        # What has its labels here is exposed with 0, not only after the first observation.
        self.plain = {
            name: histogram.labels(**self.common)
            for name, histogram in self.histograms.items()
            if not METRICS[name].labels
        }
        (finished,) = METRICS["request_success"].labels
        for reason in finished.values:
            self.counters["request_success"].labels(**self.common, finished_reason=reason)

    def _counter(self, metric: Metric) -> Counter:
        labels = (*COMMON_LABELS, *metric.label_names)
        return Counter(metric.own, metric.help, labels, registry=self._registry)

    def _histogram(self, metric: Metric) -> Histogram:
        labels = (*COMMON_LABELS, *metric.label_names)
        return Histogram(
            metric.own, metric.help, labels, registry=self._registry, buckets=metric.buckets
        )

    def families(self) -> Iterator[Family]:
        """As prometheus_client collects them."""
        yield from self._registry.collect()
