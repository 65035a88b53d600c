"""`gpu-dra-driver cluster`, also `kubectl gpus`: what the cluster has, who uses it, and who waits for it."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from dra_driver.app.settings import DEFAULT_DRIVER_NAME, Flag
from dra_driver.cli.flags import CLUSTER_KUBECONFIG, CONTEXT, of_run, switch, usual_kubeconfig
from dra_driver.cli.output import OUTPUT, Output, answer
from dra_driver.cli.rules.tables import Column, hanging, table
from dra_driver.errors import InvalidConfigError
from dra_driver.model.ids import is_dns_label, printable
from dra_driver.model.schema import Choice
from dra_driver.model.units import counted

if TYPE_CHECKING:
    from dra_driver.cli.cluster_lists import ClusterLists
    from dra_driver.cli.rules.cluster_usage import Used
    from dra_driver.cli.rules.cluster_view import Count, NodeRow, ProductRow, UserRow
    from dra_driver.cli.rules.waiting_pods import WaitingPod
    from dra_driver.cli.validation.pending_claims import PendingClaim

By = Literal["node", "product", "namespace", "workload", "pod", "claim"]

_TIMEOUT_S = 60.0
_MOST_REASONS = 3
_GIB = 1 << 30
_MOST_UNREADABLE = 5
_COUNTS = (
    Column("GPUS"), Column("FREE"), Column("ALLOCATED"), Column("BLOCKED", drop=1), Column("TAINTED"),
    Column("MIG", drop=2), Column("SHARES", drop=3),
)  # fmt: skip


FLAGS = (
    Flag("by", "Group rows by.", Choice(get_args(By)), env=(), shown="node; with --usage claim"),
    switch("usage", "Show utilisation and memory beside each claim, who wastes most first."),
    Flag("namespace", "Only what this namespace uses and waits for.", spelled=("-n", "--namespace"), env=()),
    OUTPUT,
    CLUSTER_KUBECONFIG,
    CONTEXT,
    *of_run("driver_name"),
)
EXAMPLES = ("", "--by workload -n ml", "-o json")


def cluster(given: Namespace) -> None:
    """From ResourceSlices, claims and pods alone: nothing runs on the nodes for it. A GPU is free, allocated, or
    blocked (MIG devices have parts of it); TAINTED counts all GPUs that get no new pods, also allocated ones. Below
    are the claims that are pending, with what each kind of node lacks.
    Needs the right to list resourceslices, resourceclaims, deviceclasses and pods. With --usage it reads the metrics of
    the plugins through the API server, which needs the right to get pods/proxy in their namespace.
    """
    from dra_driver.app.logs import configure_logs
    from dra_driver.cli.cluster_lists import read_cluster
    from dra_driver.kube.endpoint import load_endpoint

    configure_logs("critical", "console")
    namespace, output = given.namespace, given.output
    by: By = given.by or ("claim" if given.usage else "node")
    if given.usage and by in ("node", "product"):
        raise InvalidConfigError(f"--usage has no rows by {by}: use --by claim, pod, workload or namespace")
    if namespace is not None and not is_dns_label(namespace):
        raise InvalidConfigError(
            f"no namespace can be called {namespace!r}: a name has lower-case letters, digits and -, at most 63 of them"
        )
    driver = given.driver_name or DEFAULT_DRIVER_NAME
    endpoint = load_endpoint(given.kubeconfig or usual_kubeconfig(), context=given.context)
    lists = read_cluster(
        endpoint, driver, timeout_s=_TIMEOUT_S, with_owners=by == "workload", with_usage=given.usage
    )
    _Shown(driver, lists, by, namespace).print(output)


def _print_problems(texts: Sequence[str], of_others: str = "{}", what: str = "more problem") -> None:
    """The first of them on standard error, and how many others there are."""
    shown = [printable(text) for text in texts[:_MOST_UNREADABLE]]
    left = len(texts) - len(shown)
    shown += [f"{of_others.format(counted(left, what))} (-o json has all)"] if left else []
    sys.stdout.flush()  # in this order also where both go into one pipe
    for text in shown:
        print(f"gpu-dra-driver: {text}", file=sys.stderr)


class _Shown:
    """One look, counted."""

    def __init__(self, driver: str, lists: ClusterLists, by: By, namespace: str | None) -> None:
        from dra_driver.cli.rules import cluster_view, waiting_pods
        from dra_driver.cli.validation.pending_claims import pending_claims
        from dra_driver.cli.validation.rules.extended_resources import extended_claims

        members, problems = cluster_view.pools_of(driver, lists.slices)
        holders = cluster_view.holders_of(driver, lists.claims)
        devices = cluster_view.devices_of(members, holders)
        self._by = by
        self._table: Callable[[int | None], str]
        self._lists = lists
        self._rows: Sequence[NodeRow | ProductRow | UserRow]
        match by:
            case "node":
                nodes = cluster_view.by_node(devices, members, problems)
                self._rows, self._table = nodes, partial(_node_table, nodes)
            case "product":
                products = cluster_view.by_product(devices)
                self._rows, self._table = products, partial(_product_table, products)
            case _:
                rows = cluster_view.by_user(devices, by, lists.workloads, lists.loads)
                users = [row for row in rows if namespace in (None, row.namespace)]
                self._rows, self._table = users, partial(_user_table, users, by)
        local = {pool: found for pool, found in members.items() if cluster_view.node_of(found)}
        whole = {pool: found for pool, found in local.items() if pool not in problems}
        self._shared_pools = len(members) - len(local)
        wanted = [*lists.claims, *extended_claims(lists.waiting, lists.classes)]
        self._pending = pending_claims(driver, wanted, whole, lists.classes, namespace)
        self._pods = waiting_pods.pods_by_claim(lists.waiting)
        self._pods_of_resource = {
            (pod["metadata"].get("namespace", ""), pod["metadata"]["name"]): [waiting_pods.waiting_pod(pod)]
            for pod in lists.waiting
        }

    def print(self, output: Output) -> None:
        """On standard output."""
        answer(output, self._lines, self._object)
        if not output.is_for_people:
            return
        lists = self._lists
        _print_problems([f"use is not known: {text}" for text in lists.unmeasured], "nor of {}", "more node")
        _print_problems([f"the pods that wait are not known: {text}" for text in lists.lacking])
        _print_problems(lists.unreadable, "{} cannot be read", "more object")

    def _lines(self, width: int | None) -> Iterator[str]:
        yield self._table(width).removesuffix("\n")
        for line in self._pending_lines():
            indent = " " * (len(line) - len(line.lstrip()))
            yield hanging(indent, line, width)

    def _object(self) -> dict[str, Any]:
        pending = [
            {**asdict(claim), "pods": [asdict(pod) for pod in self._waiting(claim)]}
            for claim in self._pending
        ]
        return {
            "by": self._by, "rows": [asdict(row) for row in self._rows], "pending": pending,
            "lacking": self._lists.lacking, "unreadable": self._lists.unreadable,
            "unmeasured": list(self._lists.unmeasured), "shared_pools": self._shared_pools,
        }  # fmt: skip

    def _waiting(self, claim: PendingClaim) -> Sequence[WaitingPod]:
        pods = self._pods_of_resource if claim.kind == "Pod" else self._pods
        return pods.get((claim.namespace, claim.name), ())

    def _pending_lines(self) -> list[str]:
        """What waits for the same reasons in a namespace stands together."""
        alike: dict[PendingClaim, list[PendingClaim]] = {}
        for claim in self._pending:
            alike.setdefault(replace(claim, name=""), []).append(claim)
        lines = []
        for verdict, claims in alike.items():
            pods = [pod for claim in claims for pod in self._waiting(claim)]
            lines += ["", *_verdict_lines(verdict, claims, pods, self._lists.lacking, self._shared_pools)]
        return lines


def _counts(count: Count) -> tuple[str, ...]:
    mig = f"{count.mig_allocated}/{count.mig}" if count.mig else "-"
    numbers = (count.gpus, count.free, count.allocated, count.blocked, count.tainted)
    return (*map(str, numbers), mig, str(count.shares) if count.shares else "-")


def _node_table(rows: Sequence[NodeRow], width: int | None) -> str:
    from dra_driver.cli.rules.cluster_view import Count

    if not rows:
        return "no node publishes GPUs; run `gpu-dra-driver doctor` in its pod on a node that should\n"
    columns = [
        Column("NODE"),
        *_COUNTS,
        Column("PRODUCT", drop=5, cut=16),
        Column("CONSUMED", drop=6, cut=12, optional=True),
        Column("TAINTS", cut=16, optional=True),
        Column("PROBLEM", cut=20, optional=True),
    ]
    cells = [
        (
            row.node,
            *_counts(row.count),
            ", ".join(row.products) or "-",
            ", ".join(
                f"{name} {taken}/{there}" for name, (taken, there) in row.consumed.items() if taken != "0"
            )
            or "-",
            ", ".join(row.taints) or "-",
            row.problem or "-",
        )
        for row in rows
    ]
    if len(rows) > 1:
        total = ("(all)", *_counts(sum((row.count for row in rows), start=Count())))
        cells.append((*total, *[""] * (len(columns) - len(total))))
    return table(columns, cells, width)


def _product_table(rows: Sequence[ProductRow], width: int | None) -> str:
    columns = [Column("PRODUCT"), Column("NODES"), *_COUNTS]
    return table(columns, [(row.product, str(row.nodes), *_counts(row.count)) for row in rows], width)


def _user_table(rows: Sequence[UserRow], by: By, width: int | None) -> str:
    if not rows:
        return "nobody uses a GPU here\n"
    columns = [
        Column("NAMESPACE"),
        Column(by.upper(), cut=20, optional=True),
        Column("CLAIMS", drop=2),
        Column("UTIL", optional=True),
        Column("MEMORY GiB", optional=True),
        Column("GPUS"),
        Column("MIG", cut=12),
        Column("SHARES", drop=3),
        Column("CONSUMED", drop=4, cut=12, optional=True),
        Column("NODES", drop=1, cut=16),
    ]
    cells: list[tuple[str, ...]] = [
        (
            row.namespace,
            row.name,
            str(row.claims),
            *_use(row.used),
            str(row.gpus),
            ", ".join(f"{profile} x{number}" for profile, number in row.mig.items()) or "-",
            str(row.shares) if row.shares else "-",
            ", ".join(f"{name} {amount}" for name, amount in row.consumed.items()) or "-",
            ", ".join(row.nodes),
        )
        for row in rows
    ]
    return table(columns, cells, width)


def _use(used: Used | None) -> tuple[str, str]:
    """Utilisation and memory; `-` where it is not known. With `shared` others use the devices too."""
    if used is None or not used.memory_total_bytes:
        return "-", "-"
    shared = " shared" if used.is_shared else ""
    percent = "-" if used.utilisation_percent is None else f"{used.utilisation_percent}%{shared}"
    return percent, f"{used.memory_used_bytes / _GIB:.1f}/{used.memory_total_bytes / _GIB:.0f}"


def _verdict_lines(
    verdict: PendingClaim,
    claims: Sequence[PendingClaim],
    pods: Sequence[WaitingPod],
    lacking: Sequence[str],
    shared_pools: int,
) -> list[str]:
    what = "pod" if verdict.kind == "Pod" else "claim"
    also = f" and {len(claims) - 1} more" if len(claims) > 1 else ""
    first, are = claims[0], "are" if also else "is"
    others = f" and {len(pods) - 1} more" if len(pods) > 1 else ""
    by = f" (pod {pods[0].name}{others})" if pods and what == "claim" else ""
    lines = [f"{what} {first.namespace}/{first.name}{also} {are} pending{by}:"]
    if verdict.unknown:
        lines.append(f"  not judged: {verdict.unknown}")
    lines += [f"  {counted(number, 'node')}: {reason}" for reason, number in verdict.reasons[:_MOST_REASONS]]
    if len(verdict.reasons) > _MOST_REASONS:
        lines.append(
            f"  and {counted(len(verdict.reasons) - _MOST_REASONS, 'more reason')} (-o json has all)"
        )
    if verdict.fits:
        more = f" and {len(verdict.fits) - 1} more" if len(verdict.fits) > 1 else ""
        idle = "" if pods or lacking else "; no pod uses it, and devices are allocated only for a pod"
        lines.append(f"  {verdict.fits[0]}{more} could serve it{idle}")
    if verdict.untried:
        lines.append(f"  {counted(verdict.untried, 'more node was', 'more nodes were')} not checked")
    if shared_pools and not verdict.fits and not verdict.unknown:
        were = counted(shared_pools, "pool that nodes share was", "pools that nodes share were")
        lines.append(f"  {were} not checked")
    elif not (verdict.reasons or verdict.fits or verdict.untried or verdict.unknown):
        lines.append("  no node publishes devices of gpu-dra-driver")
    said = next((pod.says for pod in pods if pod.says), None)
    if said:
        lines.append(f"  the scheduler says: {said}")
    return lines
