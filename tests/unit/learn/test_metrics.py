"""What learning says of itself, as metrics."""

from __future__ import annotations

from dataclasses import asdict

from headstart.learn.collector import Collected
from headstart.learn.heard import first_numbers, note
from headstart.server.metrics.learning import learning_values
from headstart.server.metrics.table import LEARNING, METRICS


def test_every_metric_of_learning_is_there_and_kinds_have_no_names() -> None:
    facts = {
        "steps": 5, "seconds": 1.5, "checks": 2, "swaps": 1, "rollbacks": 0, "failures": 0,
        "bytes": 100, "busy_seconds": 3.0, "shared_seconds": 0.3, "train": 20, "heldout": 4,
        "collected": asdict(Collected(texts=24)), "live": {"answers": 30, "old": 0.4, "new": 0.5},
        "by_kind": {"other": [2.0, 2.1], "summarize this passage": [1.5, 1.6]},
        "kind_numbers": {"summarize this passage": 1, "other": 2},
        "curve": [{"recent_before": 1.7, "recent": 1.8}],
    }  # fmt: skip
    values = learning_values(facts)
    assert {name for name, _ in values} == {metric.name for metric in LEARNING}
    for name, labels in values:
        known = METRICS[name].labels
        assert all(v in label.values for v, label in zip(labels, known, strict=True))
    assert values["learn_acceptance_length", ("1", "after")] == 1.6
    assert values["learn_acceptance_length", ("other", "before")] == 1.7


def test_a_kind_keeps_its_number_while_others_come_and_go() -> None:
    """Regression: a series of a dashboard became another kind's at a check."""
    numbers = first_numbers()
    gain = {"old": 1.0, "new": 1.0}
    for kinds in (["b"], ["a", "b"], ["a", "c"]):
        event = {"by_kind": {kind: [1.0, 1.0] for kind in kinds}, "reason": "", "steps": 1,
                 "recent": gain, "base": gain}  # fmt: skip
        note(numbers, "checked", event, "start")
    assert numbers["kind_numbers"] == {"b": 1, "a": 2, "c": 3}
