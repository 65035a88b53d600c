"""Dashboard and alerts of the chart: they use only metrics, labels and names that exist.

Prometheus' own engine answers the queries, over what a scrape of the driver has."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
import yaml

from dra_driver.cli.commands import ROOT as COMMANDS
from dra_driver.model.claim import ClaimRef, HeldDevice, PodRef
from dra_driver.model.problems import EventReason
from dra_driver.model.record import ClaimRecord
from dra_driver.reporting.metrics import Metrics
from dra_driver.reporting.rules.receipts import Part
from tests.deploy.test_daemonset import one
from tests.fakes.logevents import PACKAGE
from tests.fakes.samples import (
    DRIVER,
    GPU_0,
    GPU_1,
    MIG_1G,
    MIG_3G,
    MIXED,
    NODE,
    h100,
    hold,
    inventory,
    record,
    uuid,
)
from tests.fakes.scrapes import BUSY, Samples, complete_metrics, node_use, scraped
from tests.fakes.tables import read_yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "hack/cluster"))
import localcluster  # noqa: E402
from localcluster import chart  # noqa: E402

FILES = ROOT / "daemonset/chart/files"
MANUAL = (ROOT / "docs/monitoring.md").read_text()
RULES = read_yaml(FILES / "rules.yaml")
BOARD = json.loads((FILES / "dashboard.json").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
RECORDS = {
    rule["record"]: rule["expr"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule
}


def queries_of_the_board() -> Iterator[tuple[str, str, str]]:
    """Title of the panel, expression, legend."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def assert_is_in_the_docs(url: str) -> None:
    """`docs/FILE.md#heading` is a heading of a file."""
    path, _, anchor = url.partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    made = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert path.startswith("docs/")
    assert anchor in made | {""}, url


def test_links_of_the_board_are_in_the_docs() -> None:
    for link in BOARD["links"]:
        assert link["url"].startswith("${docs:raw}")
        assert_is_in_the_docs(link["url"].removeprefix("${docs:raw}"))


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_says_what_to_do(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"runbook_url", "summary", "description", "runbook"}
    assert_is_in_the_docs(rule["annotations"]["runbook_url"])
    assert "$labels." in str(rule["annotations"]) or alert == "GpuDraDriverAbsent"
    assert re.search(r"kubectl|nvidia-smi", rule["annotations"]["runbook"])


def test_runbooks_name_commands_events_and_log_entries_that_exist() -> None:
    text = "\n".join(rule["annotations"]["runbook"] for rule in ALERTS.values())
    commands = set(re.findall(r"-- gpu-dra-driver ([a-z]+)", text))
    assert commands >= {"doctor", "claims"}
    assert commands <= set(COMMANDS.commands)
    reasons = set(re.findall(r"reason=(\w+)", text))
    assert reasons
    assert reasons <= set(get_args(EventReason))
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    searched = re.findall(r"logs \{\{ \$labels\.pod \}\} \| grep (?:-E '([^']+)'|(\w+))", text)
    words = {word for pair in searched for word in re.split(r"[|()]", "".join(pair)) if word}
    assert len(words) > 5
    assert [word for word in words if not re.search(rf'"{word}', source)] == []


def test_pending_cleanup_is_not_said_to_come_from_ended_claims_alone() -> None:
    """A failed Prepare leaves cleanup too, although its claim has not ended."""
    shown = [json.dumps(ALERTS["GpuDraCleanupPending"]), json.dumps(BOARD)]
    shown += [
        line
        for page in ("docs/log-events.md", "docs/troubleshooting.md", "docs/metrics.md", "docs/commands.md")
        for line in (ROOT / page).read_text().splitlines()
        if re.search("undone|cleanup|debt", line)
    ]
    assert [text for text in shown if re.search(r"ended claim|claims? (that |has |have )*ended", text)] == []


def test_every_metric_of_the_driver_that_calls_for_action_is_in_an_alert() -> None:
    text = "\n".join(rule["expr"] for rule in ALERTS.values())
    for name in (
        "up", "gpu_severity", "mig_severity", "gpu_monitored", "node_problem",
        "publish_problem", "pending_cleanups", "partitions_unsupported",
        "mps_daemons", "device_utilization_ratio",
        "node_prepare_errors_total", "node_unprepare_errors_total", "ready", "scrape_errors_total",
    ):  # fmt: skip
        assert re.search(rf"\b(nvidia_dra_)?{name}\b", text), name


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
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([BOARD["panels"], BOARD["links"]])))
    assert used - {"__rate_interval", "1"} == variables == {"datasource", "node", "docs"}
    (node,) = (entry for entry in BOARD["templating"]["list"] if entry["name"] == "node")
    assert node["query"]["query"] == "label_values(nvidia_dra_ready, node)"


@pytest.mark.cluster
def test_both_forms_of_the_rules_and_of_the_scrape_say_the_same() -> None:
    names = ("podMonitor", "prometheusRule", "dashboard")
    text = chart.template({"monitoring": {name: {"enabled": True} for name in names}})
    manifests = [entry for entry in yaml.load_all(text, Loader=yaml.CSafeLoader) if entry]
    config = one(manifests, "ConfigMap", "gpu-dra-driver-dashboard")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1", "Grafana's sidecar looks for it"
    assert json.loads(config["data"]["gpu-dra-driver.json"]) == BOARD
    assert one(manifests, "PrometheusRule", "gpu-dra-driver")["spec"] == RULES
    monitor = one(manifests, "PodMonitor", "gpu-dra-driver")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (scrape,) = yaml.safe_load(MANUAL.partition("```yaml\n")[2].partition("```")[0])
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


def test_manual_lists_every_alert_and_every_record() -> None:
    assert re.findall(r"^\| `(\w+:\w+:\w+)` \|", MANUAL, re.MULTILINE) == list(RECORDS)
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \|", MANUAL, re.MULTILINE)
    assert listed == [(name, rule["labels"]["severity"]) for name, rule in ALERTS.items()]


Grown = tuple[float, float]
"""A series: its first value, and what is added every 30 s."""
END_S = 3600


def series(samples: Samples, grown: Callable[[str, dict[str, str]], Grown | None], node: str = NODE) -> str:
    """What Prometheus has after an hour of scrapes of the plugin of a node, whose name is a label of the target.
    `grown` answers None for what stays as it is."""
    lines = ["load 30s"]
    target = {"job": "gpu-dra-driver", "instance": "10.0.0.1:8080", "node": node, "pod": "driver-1"}
    for (name, labels), value in samples.items():
        first, step = grown(name, dict(labels)) or (value, 0)
        shown = ",".join(f"{label}={json.dumps(text)}" for label, text in (target | dict(labels)).items())
        lines.append(f"  {name}{{{shown}}} {first:g}+{step:g}x{END_S // 30}")
    return "\n".join(lines)


def requested(load: str, *queries: str, at: int = END_S) -> list[list[tuple[dict[str, str], float]]]:
    """The answers of Prometheus' engine; an error of a query fails the test."""
    text = json.dumps({"load": load, "at": at, "queries": queries})
    done = subprocess.run(
        [str(localcluster.promql())], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert [
        f"{query}: {answer['error']}"
        for query, answer in zip(queries, answers, strict=True)
        if "error" in answer
    ] == []
    return [[(one["labels"], float(one["value"])) for one in answer["samples"]] for answer in answers]


def on_the_node(expr: str) -> str:
    return expr.replace("$node", NODE).replace("$__rate_interval", "5m")


def with_foreign(samples: Samples) -> Samples:
    """Also what a panel takes from others."""
    return samples | {
        ("up", ()): 1,
        ("DCGM_FI_DEV_GPU_UTIL", (("UUID", uuid(0)), ("job", "dcgm"), ("gpu", "0"))): 70,
        ("resourceclaim_controller_resource_claims", (("admin_access", "false"), ("allocated", "false"))): 5,
        ("resourceclaim_controller_resource_claims", (("admin_access", "false"), ("allocated", "true"))): 9,
        ("scheduler_pending_pods", (("queue", "unschedulable"),)): 4,
    }


def held_by(name: str, *devices: HeldDevice, namespace: str = "default") -> ClaimRecord:
    made = record(*devices)
    claim = replace(
        made.claim,
        ref=ClaimRef(namespace, name, f"uid-{name}"),
        pods=(PodRef(f"pod-{name}", f"uid-pod-{name}"),),
    )
    return replace(made, claim=claim)


def recorded(expr: str) -> str:
    """The query with its records written out: nothing records them here."""
    for name, query in reversed(RECORDS.items()):
        expr = expr.replace(f"{name}[1h]", f"({query})[1h:1m]").replace(name, f"({query})")
    return expr


def used_node(*more: ClaimRecord, by_pod: Mapping[str, int] | None = None) -> Samples:
    """Three GPUs: two claims share the first, a third claim has the second, and a monitor observes all. They
    are busy half of the time; MIG devices are idle. `by_pod` is as in `node_use`.
    """
    monitor = [replace(hold(gpu), admin_access=True) for gpu in (GPU_0, GPU_1)]
    records = [
        held_by("a", hold(GPU_0), namespace="team-a"),
        held_by("b", hold(GPU_0), namespace="team-b"),
        held_by("c", hold(GPU_1), namespace="team-b"),
        held_by("monitor", *monitor, namespace="gpu-monitoring"),
        *more,
    ]
    metrics = Metrics(DRIVER, NODE, list)
    metrics.show.claims(lambda: records, lambda device: None, lambda: MIXED)
    metrics.show.usage(lambda: node_use(records, replace(BUSY, utilisation_percent=50), by_pod=by_pod))
    metrics.show.inventory(lambda: inventory(h100(0), h100(1), h100(2)))
    return with_foreign(scraped(metrics))


@pytest.mark.cluster
def test_every_query_of_the_board_has_an_answer() -> None:
    queries = {f"{title}: {expr}": on_the_node(expr) for title, expr, _ in queries_of_the_board()}
    load = series(
        with_foreign(scraped(complete_metrics())),
        lambda name, _: (1, 1) if re.search(r"_(total|bucket|sum|count)$", name) else None,
    )
    answers = dict(zip(queries, requested(load, *queries.values()), strict=True))
    # These need metrics that are absent on a healthy node; the test below covers some of them.
    rare = {"Shared GPUs", "GPUs allocated and free, by product", "What discovery could not read"}
    empty = [query for query, answer in answers.items() if not answer]
    assert {query.split(": ")[0] for query in empty} <= rare
    for (title, expr, legend), answer in zip(queries_of_the_board(), answers.values(), strict=True):
        shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert all(shown <= labels.keys() for labels, _ in answer), f"{title}: {expr}"
    assert [
        query
        for query, answer in answers.items()
        if answer and not any(math.isfinite(value) for _, value in answer)
    ] == []


@pytest.mark.cluster
def test_board_reports_who_uses_which_gpu() -> None:
    queries = [
        (title, on_the_node(expr)) for title, expr, _ in queries_of_the_board() if title in {
            "GPUs allocated and free, by product", "GPUs by namespace", "Claims without a device",
            "Who uses which device", "Shared GPUs", "Utilisation, by pod",
        }
    ]  # fmt: skip
    answers = requested(series(used_node(), lambda *_: None), *(expr for _, expr in queries))
    reported = [(title, answer) for (title, _), answer in zip(queries, answers, strict=True)]
    product = h100(0).product_name
    assert reported[0] == (reported[0][0], [({"product": product}, 2)])
    assert reported[1] == (reported[0][0], [({"product": product}, 1)])
    assert sorted(value for _, value in reported[2][1]) == [1, 2]
    assert {labels["namespace"]: value for labels, value in reported[2][1]} == {"team-a": 1, "team-b": 2}
    assert [value for _, answer in reported[3:5] for _, value in answer] == [5, 4]
    assert sorted((labels["namespace"], labels["uuid"]) for labels, _ in reported[5][1]) == [
        ("team-a", uuid(0)), ("team-b", uuid(0)), ("team-b", uuid(1)),
    ]  # fmt: skip
    assert reported[6][1] == [({"node": NODE, "parent_uuid": uuid(0)}, 2)]
    assert sorted((labels["namespace"], labels["pod"], value) for labels, value in reported[7][1]) == [
        ("team-a", "pod-a", 0.5), ("team-b", "pod-b", 0.5), ("team-b", "pod-c", 0.5),
    ]  # fmt: skip


@pytest.mark.cluster
def test_records_report_what_each_team_holds_and_uses() -> None:
    mine = held_by("d", hold(MIG_1G), hold(MIG_3G), namespace="team-c")
    load = series(used_node(mine), lambda *_: None)
    answers = requested(load, *(recorded(name) for name in RECORDS if name.startswith("namespace:")))
    found = [{labels["namespace"]: round(value, 3) for labels, value in answer} for answer in answers]
    part = round((9984 + 40448) / 81559, 3)
    assert found[:2] == [
        {"team-a": 0.5, "team-b": 1.5, "team-c": part},
        {"team-a": 0.25, "team-b": 0.75, "team-c": 0},
    ]
    # Within the hour, including the samples of its first and last minute.
    assert found[2] == {team: pytest.approx(gpus, rel=0.02) for team, gpus in found[0].items()}
    assert found[3] == {team: pytest.approx(gpus, rel=0.02) for team, gpus in found[1].items()}


@pytest.mark.cluster
def test_records_of_nodes_count_gpus_without_claims_too() -> None:
    load = series(used_node(), lambda *_: None)
    names = [name for name in RECORDS if name.startswith("node:")]
    assert requested(load, *(recorded(name) for name in names)) == [
        [({"node": NODE}, 0.5)], [({"node": NODE}, 3 * 350)],
    ]  # fmt: skip


@pytest.mark.cluster
def test_idle_device_names_its_team_and_a_busy_one_is_left_out() -> None:
    mine = held_by("d", hold(MIG_1G), namespace="team-c")
    load = series(used_node(mine), lambda *_: None)
    board = {title: on_the_node(expr) for title, expr, _ in queries_of_the_board()}
    for query in (ALERTS["GpuDraHeldIdle"]["expr"], board["Idle now"]):
        [(answer)] = requested(load, query)
        assert [
            (labels["namespace"], labels["claim"], labels["device"], value) for labels, value in answer
        ] == [("team-c", "d", MIG_1G, 0)]
    teams = requested(
        load, *(expr for title, expr in board.items() if title.startswith("GPUs held and used"))
    )
    assert {labels["namespace"]: value for labels, value in teams[0]} == pytest.approx(
        {"team-a": 0.25, "team-b": 0.75, "team-c": 0}
    )


@pytest.mark.cluster
def test_teams_that_share_a_gpu_are_distinguished_where_nvml_measures_their_pods() -> None:
    load = series(used_node(by_pod={"uid-pod-a": 45, "uid-pod-b": 2, "uid-pod-c": 60}), lambda *_: None)
    board = {title: on_the_node(expr) for title, expr, _ in queries_of_the_board()}
    held = next(expr for title, expr in board.items() if title.startswith("GPUs held and used"))
    idle, idle_now, used, used_now, by_pod = requested(
        load,
        ALERTS["GpuDraHeldIdle"]["expr"],
        board["Idle now"],
        recorded("namespace:nvidia_dra_gpus_used:sum"),
        held,
        board["Utilisation, by pod"],
    )
    for answer in (idle, idle_now):
        assert [(labels["namespace"], labels["claim"], value) for labels, value in answer] == [
            ("team-b", "b", 0.02)
        ]
    for answer in (used, used_now):
        assert {labels["namespace"]: value for labels, value in answer} == pytest.approx(
            {"team-a": 0.45, "team-b": 0.62}
        )
    assert {labels["pod"]: value for labels, value in by_pod} == {"pod-a": 0.45, "pod-b": 0.02, "pod-c": 0.6}


@pytest.mark.cluster
def test_queries_of_the_document_have_answers() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    blocks = "\n".join(re.findall(r"```promql\n(.*?)```", text, re.DOTALL))
    queries = ["\n".join(part.splitlines()) for part in re.split(r"^# .*\n", blocks, flags=re.MULTILINE)[1:]]
    assert len(queries) > 8
    both = used_node(by_pod={"uid-pod-a": 45}) | {
        ("nvidia_dra_gpu_severity", (("driver", DRIVER), ("uuid", uuid(0)))): 3,
        ("nvidia_dra_mig_severity", (("driver", DRIVER), ("parent_uuid", uuid(1)), ("uuid", uuid(1)))): 3,
        ("nvidia_dra_gpu_xids_total", (("driver", DRIVER), ("uuid", uuid(0)), ("xid", "79"))): 1,
    }
    load = series(both, lambda name, _: (1, 1) if name == "nvidia_dra_gpu_xids_total" else None)
    answers = requested(load, *queries)
    assert [query for query, answer in zip(queries, answers, strict=True) if not answer] == []


def well(name: str, labels: dict[str, str]) -> Grown | None:
    if name in ("nvidia_dra_gpu_severity", "nvidia_dra_mig_severity"):
        return (0, 0)
    good = ("nvidia_dra_gpu_monitored", "nvidia_dra_ready", "nvidia_dra_device_utilization_ratio", "up")
    return (1, 0) if name in good else None


def slow(name: str, labels: dict[str, str]) -> Grown:
    """All calls take longer than the largest bucket but one."""
    return (0, 1 if labels["le"] == "+Inf" or float(labels["le"]) >= 100 else 0)


TROUBLE = read_yaml(Path(__file__).with_name("values").joinpath("trouble.yaml"))


def firing(load: str) -> dict[str, dict[str, str]]:
    """The labels of the first result of each alert that has one; `for` is not waited for."""
    answers = requested(load, *(rule["expr"] for rule in ALERTS.values()))
    return {name: answer[0][0] for name, answer in zip(ALERTS, answers, strict=True) if answer}


@pytest.mark.cluster
def test_no_alert_fires_on_a_node_that_is_well() -> None:
    assert firing(series(with_foreign(scraped(complete_metrics())), well)) == {}


@pytest.mark.cluster
@pytest.mark.parametrize("alert", ALERTS)
def test_alert_fires_alone_and_has_the_labels_of_its_words(alert: str) -> None:
    samples = with_foreign(scraped(complete_metrics()))
    if alert == "GpuDraDriverAbsent":
        assert firing("load 30s\n  other 1x120") == {alert: {"job": "gpu-dra-driver"}}
        return
    if alert == "GpuDraVersionsDiffer":
        older = {
            ("nvidia_dra_gpu_driver_info", (("cuda", "12.0"), ("driver", DRIVER), ("version", "1.2"))): 1.0
        }
        nodes = [series(samples, well, node) for node in (NODE, "node-b")] + [series(older, well, "node-old")]
        fired = firing("load 30s\n" + "\n".join(one.partition("\n")[2] for one in nodes))
        assert fired.keys() == {alert}
        assert (fired[alert]["node"], fired[alert]["version"]) == ("node-old", "1.2")
        return
    metric, first, step = TROUBLE[alert]

    def grown(name: str, labels: dict[str, str]) -> Grown | None:
        if name != metric:
            return well(name, labels)
        return slow(name, labels) if name.endswith("_bucket") else (first, step)

    fired = firing(series(samples, grown))
    assert fired.keys() == {alert}
    text = "\n".join(ALERTS[alert]["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= fired[alert].keys()


class Phase(NamedTuple):
    """Hours in which a scrape has these samples, and counters grow by so much in a second."""

    hours: int
    samples: Samples
    rates: Mapping[str, float]


def recorded_day(*phases: Phase) -> str:
    """What Prometheus has after these phases, scraped every minute. A counter that was absent begins at 0 again."""
    target = {"job": "gpu-dra-driver", "instance": "10.0.0.1:8080", "node": NODE, "pod": "driver-1"}
    lines = ["load 1m"]
    for key in dict.fromkeys(key for phase in phases for key in phase.samples):
        name, labels = key
        counter, runs = 0.0, []
        for hours, samples, rates in phases:
            step = 60 * rates.get(name, 0.0)
            if key not in samples:
                counter = 0.0
                runs.append(f"_x{60 * hours}")
            else:
                first = counter if name in rates else samples[key]
                runs.append(f"{first:g}+{step:g}x{60 * hours - 1}")
                counter += step * 60 * hours
        shown = ",".join(f"{label}={json.dumps(text)}" for label, text in (target | dict(labels)).items())
        lines.append(f"  {name}{{{shown}}} {' '.join(runs)}")
    return "\n".join(lines)


BUSY_RATES = {"nvidia_dra_claim_busy_gpu_seconds_total": 0.5, "nvidia_dra_claim_energy_joules_total": 400.0}
IDLE_RATES = {"nvidia_dra_claim_busy_gpu_seconds_total": 0.0, "nvidia_dra_claim_energy_joules_total": 100.0}


@pytest.fixture(scope="module")
def day() -> str:
    """A day of a node: eight hours of work, eight hours in which the same claims hold the GPUs idle, four hours without
    the plugin, and four hours of work."""
    used = Part("H100", "gpu", 0, None, 3600, 1800, 3600, 0, 1e6, 3600)
    metrics = Metrics(DRIVER, NODE, list)
    metrics.show.receipts(lambda: {("team-b", "H100", "gpu"): used})
    receipts = {key: value for key, value in scraped(metrics).items() if key[0] in BUSY_RATES}
    busy, idle = (
        used_node(by_pod=dict.fromkeys(("uid-pod-a", "uid-pod-b", "uid-pod-c"), percent)) | receipts
        for percent in (50, 0)
    )
    away: Samples = {("up", ()): 0}
    return recorded_day(
        Phase(8, busy, BUSY_RATES), Phase(8, idle, IDLE_RATES), Phase(4, away, {}), Phase(4, busy, BUSY_RATES)
    )


@pytest.mark.cluster
def test_records_of_a_day_have_the_hours_of_work_and_not_those_of_absence(day: str) -> None:
    def over_the_day(name: str) -> str:
        return f"sum_over_time(({recorded(name)})[24h:1h])"

    held, used, busy, energy = requested(
        day, *(over_the_day(name) for name in RECORDS if "sum1h" in name), at=24 * 3600
    )
    assert {labels["namespace"]: value for labels, value in held} == pytest.approx(
        {"team-a": 10, "team-b": 30}, rel=0.05
    )
    assert {labels["namespace"]: value for labels, value in used} == pytest.approx(
        {"team-a": 6, "team-b": 12}, rel=0.05
    )
    assert {labels["namespace"]: value for labels, value in busy} == pytest.approx({"team-b": 6}, rel=0.05)
    kwh = (12 * 400 + 8 * 100) / 1000
    assert {labels["namespace"]: value for labels, value in energy} == pytest.approx(
        {"team-b": kwh}, rel=0.05
    )


@pytest.mark.cluster
def test_absent_node_is_not_idle_and_an_idle_one_is_not_down(day: str) -> None:
    alerts = [ALERTS[name]["expr"] for name in ("GpuDraHeldIdle", "GpuDraDriverDown")]
    board = [(title, on_the_node(expr)) for title, expr, _ in queries_of_the_board()]
    found = {}
    for hour in (6, 14, 18, 23):
        idle, down, *answers = requested(day, *alerts, *(expr for _, expr in board), at=hour * 3600)
        shown = {title for (title, _), answer in zip(board, answers, strict=True) if answer}
        found[hour] = bool(idle), bool(down), shown
    everything = found[6][2]
    assert len(everything) > 30
    assert found == {
        6: (False, False, everything),
        14: (True, False, everything | {"Idle now"}),
        18: (False, True, {"Drivers up"}),
        23: (False, False, everything),
    }
