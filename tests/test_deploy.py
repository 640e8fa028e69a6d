"""The examples in deploy/ fit the real thing: metrics, flags, probes and time limits."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headstart.cli.main import build_command
from headstart.server.metrics.table import METRICS

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
MARGIN_SECONDS = 10  # for the step that is running when the time is over
EXTERNAL = {"up", "process_resident_memory_bytes"}  # of Prometheus and of prometheus_client


def exposed_names() -> set[str]:
    """Every name that PromQL may use. An integration test compares this table with /metrics."""
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    return EXTERNAL | {
        name + ending
        for metric in METRICS.values()
        for name in metric.exposed
        for ending in endings.get(metric.kind, ("",))
    }


def alert_rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    return document


def queries() -> dict[str, str]:
    """Every PromQL expression, by where it stands."""
    found = {rule.get("alert") or rule["record"]: rule["expr"] for rule in alert_rules()}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['id']} {panel['title']} {target['refId']}"] = target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            found[variable["name"]] = variable["query"]["query"]
    return found


def metrics_in(query: str) -> set[str]:
    """Names of metrics: what is left without labels, strings, ranges and the language's words."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", query)
    bare = re.sub(r"\b(by|on|without|ignoring)\s*\([^)]*\)", " ", bare)
    bare = re.sub(r"(label_values\([^,]+),[^)]*", r"\1", bare)
    words = re.findall(r"(?<![\w:.$])[a-z_][a-z0-9_:]*\b(?!\s*\()", bare)
    return {word for word in words if word not in ("and", "or", "unless", "on", "by")}


def test_queries_use_only_metrics_that_exist() -> None:
    known = exposed_names() | {rule["record"] for rule in alert_rules() if "record" in rule}
    assert len(queries()) > 50
    for place, query in queries().items():
        used = metrics_in(query)
        assert used and used <= known, f"{place}: {used - known}"


def test_a_metric_that_does_not_exist_would_be_found() -> None:
    used = metrics_in('sum by (a) (rate(headstart:no_such_total{code="5"}[5m])) > 0.1 and up == 1')
    assert used == {"headstart:no_such_total", "up"}


@pytest.mark.parametrize(
    "page",
    [DEPLOY / "README.md", ROOT / "docs/metrics.md", PROMETHEUS / "alerts_test.yml"],
    ids=lambda page: page.name,
)
def test_documents_name_only_metrics_that_exist(page: Path) -> None:
    named = set(re.findall(r"\b(?:headstart|vllm):[a-z0-9_]+\b", page.read_text()))
    bases = {name for metric in METRICS.values() for name in metric.exposed}
    assert named <= exposed_names() | bases, named - exposed_names() - bases


def test_the_two_limits_on_acceptance_are_the_documented_ones() -> None:
    by_name = {rule.get("alert"): rule for rule in alert_rules()}
    assert "< 0.60" in by_name["HeadstartAcceptanceLow"]["expr"]
    assert "Reduce K" in by_name["HeadstartAcceptanceLow"]["annotations"]["description"]
    assert "< 0.55" in by_name["HeadstartHeadDoesNotFit"]["expr"]
    readme = (DEPLOY / "README.md").read_text()
    for rule in alert_rules():
        assert rule.get("alert", "Headstart") in readme, f"{rule['alert']} is not explained"


def test_alerts_fire_when_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; it comes with Prometheus")
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def serve_arguments() -> dict[str, list[str]]:
    """What each example gives to `headstart serve`."""
    unit = (DEPLOY / "headstart.service").read_text().replace("\\\n", " ")
    start = re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert start is not None
    readme = (DEPLOY / "README.md").read_text().replace("\\\n", " ")
    docker = re.search(r"^docker run .* headstart (/models.*)$", readme, re.MULTILINE)
    assert docker is not None
    return {
        "headstart.service": shlex.split(start[1])[2:],
        "kubernetes.yaml": container()["args"],
        "README.md": shlex.split(docker[1]),
    }


def kubernetes(kind: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (found,) = [document for document in documents if document["kind"] == kind]
    return dict(found)


def pod() -> dict[str, Any]:
    return dict(kubernetes("Deployment")["spec"]["template"]["spec"])


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    return dict(only)


@pytest.mark.parametrize("example", ["headstart.service", "kubernetes.yaml", "README.md"])
def test_examples_are_parsed_by_the_real_command(example: str) -> None:
    command = build_command("serve")
    context = command.make_context("serve", list(serve_arguments()[example]))
    assert context.params["model"]
    with pytest.raises(Exception, match="no-such-flag"):
        command.make_context("serve", [*serve_arguments()[example], "--no-such-flag"])


@pytest.mark.parametrize(
    "page", [*sorted(DEPLOY.rglob("*.yml")), DEPLOY / "README.md"], ids=lambda page: page.name
)
def test_flags_in_advice_exist(page: Path) -> None:
    """Advice names flags of `serve` and `inspect`; docker's own are in code blocks."""
    text = re.sub(r"```.*?```|`docker [^`]*`", "", page.read_text(), flags=re.DOTALL)
    options = {
        flag
        for name in ("serve", "inspect")
        for parameter in build_command(name).params
        for flag in parameter.opts
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= options


def test_whoever_stops_the_server_waits_longer_than_it_drains() -> None:
    unit = (DEPLOY / "headstart.service").read_text()
    limit = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert limit is not None and int(limit[1]) >= drained("headstart.service") + MARGIN_SECONDS
    assert "KillSignal=SIGTERM" in unit and "Restart=on-failure" in unit
    before = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = pod()["terminationGracePeriodSeconds"]
    assert grace >= before + drained("kubernetes.yaml") + MARGIN_SECONDS


def drained(example: str) -> float:
    params = build_command("serve").make_context("serve", list(serve_arguments()[example])).params
    return float(params["drain_seconds"])


def test_probes_ask_the_port_and_path_that_are_served() -> None:
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container()[probe]["httpGet"]
        assert asked["path"] == "/health" and ports[asked["port"]] == 8000
    start = container()["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800  # big models load slowly
    (port,) = kubernetes("Service")["spec"]["ports"]
    assert port["targetPort"] in ports
    assert container()["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_images_and_units_do_not_run_as_root() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^USER 10001$", dockerfile, re.MULTILINE)
    assert "HEALTHCHECK" in dockerfile and "/health" in dockerfile
    assert "constraints.txt" in dockerfile
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert "User=headstart" in (DEPLOY / "headstart.service").read_text()


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    kept = {
        line.removeprefix("!")
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    copied = [
        name
        for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile, re.MULTILINE)
        for name in line.split()[:-1]
    ]
    assert set(copied) == kept
    assert all((ROOT / name).exists() for name in copied)


def test_the_docs_of_metrics_list_every_metric() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    for metric in METRICS.values():
        for name in metric.exposed:
            assert f"`{name}`" in page
