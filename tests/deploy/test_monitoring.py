"""Dashboard and alerts of daemonset/components/monitoring: they use only metrics, labels and names that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dra_driver.cli.commands import commands_for
from dra_driver.model import events
from tests.deploy.test_daemonset import one, rendered, with_components
from tests.fakes.logevents import PACKAGE
from tests.fakes.scrapes import complete_metrics, labels_of_samples, scraped

MONITORING = Path(__file__).parents[2] / "daemonset/components/monitoring"
RULES = yaml.safe_load((MONITORING / "prometheus/rules.yaml").read_text())
BOARD = json.loads((MONITORING / "dashboard/dashboard.json").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
TARGET_LABELS = {"job", "instance", "node", "pod"}
NO_NAMES = {
    "by", "on", "group_left", "offset", "or", "unless", "and", "sum", "max", "count", "rate", "increase", "changes",
    "absent", "vector", "label_replace", "histogram_quantile", "label_values",
}  # fmt: skip
_STRING = re.compile(r"'[^']*'|\"[^\"]*\"")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|on|group_left)\s*\(([^)]*)\)")


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """The labels of every metric that a query may use."""
    return labels_of_samples(complete_metrics()) | {"up": set()}


def names_of(text: str) -> set[str]:
    return {name.strip() for name in text.split(",") if name.strip()}


def faults_of(expr: str, known: dict[str, set[str]]) -> list[str]:
    """Metrics and labels of a PromQL expression that no scrape has."""
    faults = []
    made = set(re.findall(r"label_replace\(.*?,\s*\"(\w+)\",\s*\"\$1\"", expr))
    bare = _STRING.sub('""', expr)
    for metric, matchers in _SELECTOR.findall(bare):
        used = {entry.split("=")[0].split("!")[0].strip() for entry in matchers.split(",") if entry.strip()}
        faults += [f"{metric}{{{label}}}" for label in used - known.get(metric, set()) - TARGET_LABELS]
    outside = _GROUPING.sub("", _SELECTOR.sub(r"\1", bare))
    outside = re.sub(r"\[[^\]]*\]|\"\"|\b\d[\w.]*", " ", outside)
    metrics = set(re.findall(r"[a-zA-Z_:][\w:]*", outside)) - NO_NAMES
    faults += sorted(metrics - known.keys())
    if not metrics:
        faults.append(f"no metric in {expr}")
    labels = set().union(*(known.get(metric, set()) for metric in metrics)) | TARGET_LABELS | made
    for group in _GROUPING.findall(bare):
        faults += [f"by {label}" for label in names_of(group) - labels]
    return faults


def queries_of_the_board() -> Iterator[tuple[str, str, str]]:
    """Title of the panel, expression, legend."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def result_labels(expr: str, known: dict[str, set[str]]) -> set[str]:
    """The labels that the result of an alert's expression has at least."""
    groups = re.findall(r"\bby\s*\(([^)]*)\)", expr)
    if groups:
        return names_of(groups[0]) - {"le"}
    metric = re.search(r"(nvidia_dra_\w+|process_\w+|\bup\b)", expr)
    assert metric
    return known[metric[1]] | TARGET_LABELS


@pytest.mark.parametrize(
    "wrong",
    [
        "nvidia_dra_nothing == 1",
        'nvidia_dra_ready{colour="red"}',
        'sum(rate(nvidia_dra_requests_total{node="a", cause="b"}[5m]))',
        "sum by (profile) (nvidia_dra_ready)",
        "up + on (node) nvidia_dra_request_duration_seconds",
        "vector(0)",
    ],
)
def test_the_check_finds_what_is_wrong(wrong: str, known: dict[str, set[str]]) -> None:
    assert len(faults_of(wrong, known)) == 1


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_uses_what_exists_and_says_what_to_do(alert: str, known: dict[str, set[str]]) -> None:
    rule = ALERTS[alert]
    assert faults_of(rule["expr"], known) == []
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    text = "\n".join(rule["annotations"].values())
    shown = set(re.findall(r"\$labels\.(\w+)", text))
    assert shown <= result_labels(rule["expr"], known)
    assert shown or alert == "GpuDraDriverAbsent"
    assert re.search(r"kubectl|nvidia-smi", rule["annotations"]["runbook"])


def test_runbooks_name_commands_events_and_log_entries_that_exist() -> None:
    text = "\n".join(rule["annotations"]["runbook"] for rule in ALERTS.values())
    commands = set(re.findall(r"-- gpu-dra-driver ([a-z]+)", text))
    assert commands >= {"doctor", "claims"}
    assert commands <= {command.name for command in commands_for([]).registered_commands}
    reasons = set(re.findall(r"reason=(\w+)", text))
    assert reasons
    assert reasons <= {value for value in vars(events).values() if isinstance(value, str)}
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    searched = re.findall(r"logs \{\{ \$labels\.pod \}\} \| grep (?:-E '([^']+)'|(\w+))", text)
    words = {word for pair in searched for word in re.split(r"[|()]", "".join(pair)) if word}
    assert len(words) > 5
    assert [word for word in words if not re.search(rf'"{word}', source)] == []


def test_every_metric_of_the_driver_that_calls_for_action_is_in_an_alert() -> None:
    text = "\n".join(rule["expr"] for rule in ALERTS.values())
    for name in (
        "up", "gpu_severity", "mig_severity", "gpu_monitored", "node_problem",
        "publish_problem", "mig_devices_stuck", "partitions_unsupported",
        "mps_daemons", "node_prepare_errors_total", "node_unprepare_errors_total", "ready", "scrape_errors_total",
    ):  # fmt: skip
        assert re.search(rf"\b(nvidia_dra_)?{name}\b", text), name


@pytest.mark.parametrize("query", [*queries_of_the_board()], ids=lambda query: query[0])
def test_panel_uses_what_exists(query: tuple[str, str, str], known: dict[str, set[str]]) -> None:
    _, expr, legend = query
    assert faults_of(expr.replace("$__rate_interval", "5m"), known) == []
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert shown <= (result_labels(expr, known) if shown else set())


def test_board_shows_every_metric_and_hangs_together() -> None:
    shown = " ".join(expr for _, expr, _ in queries_of_the_board())
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in scraped(complete_metrics())}
    own = {name for name in names if name.startswith("nvidia_dra_")}
    # How much of the day is rest is seen in other panels.
    assert {name for name in own if name not in shown} <= {"nvidia_dra_gpu_monitored"}
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {entry["name"] for entry in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD["panels"])))
    assert used - {"__rate_interval", "1"} == variables == {"datasource", "node"}
    (node,) = (entry for entry in BOARD["templating"]["list"] if entry["name"] == "node")
    assert node["query"]["query"] == "label_values(nvidia_dra_ready, node)"


def test_both_forms_of_the_rules_and_of_the_scrape_say_the_same(tmp_path: Path) -> None:
    manifests = with_components(tmp_path, "monitoring")
    assert one(manifests, "PrometheusRule", "gpu-dra-driver")["spec"] == RULES
    monitor = one(manifests, "PodMonitor", "gpu-dra-driver")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (scrape,) = yaml.safe_load((MONITORING / "prometheus/scrape.yaml").read_text())
    assert endpoint["honorLabels"]
    assert scrape["honor_labels"]
    assert (endpoint["interval"], endpoint["path"]) == (scrape["scrape_interval"], scrape["metrics_path"])
    assert {entry["targetLabel"] for entry in endpoint["relabelings"]} == {"node"}  # the operator adds pod
    targets = {entry.get("target_label") for entry in scrape["relabel_configs"]}
    assert targets - {None} == {"node", "pod"}
    daemonset = one(manifests, "DaemonSet", "gpu-dra-driver")
    labels = daemonset["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["jobLabel"]] == scrape["job_name"] == "gpu-dra-driver"
    keep = scrape["relabel_configs"][0]["regex"].split(";")
    assert keep == [
        labels["app.kubernetes.io/name"], labels["app.kubernetes.io/component"], endpoint["port"],
    ]  # fmt: skip
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]


def test_dashboard_alone_is_a_config_map_that_grafana_picks_up(tmp_path: Path) -> None:
    without = {(entry["kind"], entry["metadata"]["name"]) for entry in rendered(MONITORING.parents[1])}
    manifests = with_components(tmp_path, "monitoring/dashboard")
    added = [entry for entry in manifests if (entry["kind"], entry["metadata"]["name"]) not in without]
    (config,) = added
    assert (config["kind"], config["metadata"]["namespace"]) == ("ConfigMap", "gpu-dra-driver")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["gpu-dra-driver.json"]) == BOARD


def test_readme_lists_every_alert() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \|", (MONITORING / "README.md").read_text(), re.MULTILINE)
    assert listed == [(name, rule["labels"]["severity"]) for name, rule in ALERTS.items()]
