"""`gpu-dra-driver cluster`, also `kubectl gpus`: what the cluster has, who uses it, and who waits for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dra_driver.cli.options import DriverName, Kubeconfig
from dra_driver.cli.output import Output, OutputOption, print_object
from dra_driver.cli.tables import terminal_width
from dra_driver.diagnostics.rules.tables import Column, table

if TYPE_CHECKING:
    from dra_driver.diagnostics.rules.cluster_view import Count, NodeRow, UserRow
    from dra_driver.validation.pending_claims import PendingClaim

By = Literal["node", "product", "namespace", "workload", "pod", "claim"]

_TIMEOUT_S = 60.0
_MOST_REASONS = 3
_HOME_AND_CLEAR = "\x1b[H\x1b[J"
_COUNTS = (
    Column("GPUS"),
    Column("FREE"),
    Column("ALLOCATED"),
    Column("BLOCKED", drop=3),
    Column("TAINTED"),
    Column("MIG", drop=2),
    Column("SHARES", drop=4),
)


def cluster(
    by: Annotated[By, typer.Option("--by", help="What a row is.")] = "node",
    namespace: Annotated[
        str | None, typer.Option("-n", "--namespace", help="Only what this namespace uses and waits for.")
    ] = None,
    output: OutputOption = Output.table,
    watch: Annotated[
        bool, typer.Option("-w", "--watch", help="Look again every few seconds, until Ctrl-C.")
    ] = False,
    interval: Annotated[float, typer.Option("--interval", min=1, help="Seconds between two looks.")] = 5.0,
    kubeconfig: Kubeconfig = None,
    context: Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")] = None,
    driver_name: DriverName = None,
) -> None:
    """Show the GPUs of the whole cluster and who uses them.

    From ResourceSlices and claims alone: nothing runs on the nodes for it. GPUs are free, allocated, blocked (MIG
    devices have parts of them) or tainted. Below are the claims that wait, with what each kind of node lacks. Needs the
    right to list resourceslices, resourceclaims and deviceclasses, and for workloads pods.
    """
    from dra_driver.diagnostics.cluster_lists import read_cluster
    from dra_driver.kube.endpoint import load_endpoint
    from dra_driver.logs import configure_logs
    from dra_driver.settings import DEFAULT_DRIVER_NAME

    configure_logs("critical", "console")
    driver = driver_name or DEFAULT_DRIVER_NAME
    endpoint = load_endpoint(kubeconfig or _usual_kubeconfig(), context=context)
    with suppress(KeyboardInterrupt):
        while True:
            lists = read_cluster(endpoint, driver, with_pods=by == "workload", timeout_s=_TIMEOUT_S)
            shown = _Shown(driver, lists.slices, lists.claims, lists.classes, lists.pods, by, namespace)
            if watch and output.is_for_people and sys.stdout.isatty():
                typer.echo(_HOME_AND_CLEAR, nl=False)
            shown.print(output)
            if not watch:
                return
            sys.stdout.flush()
            time.sleep(interval)


def kubectl_gpus() -> None:
    """Entry point of `kubectl gpus`."""
    from dra_driver.cli.main import main

    sys.argv[1:1] = ["cluster"]
    main()


def _usual_kubeconfig() -> str | None:
    """Where kubectl looks; None in a pod."""
    named = [path for path in os.environ.get("KUBECONFIG", "").split(os.pathsep) if path]
    usual = Path("~/.kube/config").expanduser()
    return named[0] if named else str(usual) if usual.exists() else None


class _Shown:
    """One look, counted."""

    def __init__(
        self,
        driver: str,
        slices: Sequence[Mapping[str, Any]],
        claims: Sequence[Mapping[str, Any]],
        classes: Sequence[Mapping[str, Any]],
        pods: Sequence[Mapping[str, Any]],
        by: By,
        namespace: str | None,
    ) -> None:
        from dra_driver.diagnostics.rules import cluster_view
        from dra_driver.validation.pending_claims import pending_claims

        members, problems = cluster_view.pools_of(driver, map(dict, slices))
        all_claims = [dict(claim) for claim in claims]
        holders = cluster_view.holders_of(driver, all_claims)
        devices = cluster_view.devices_of(members, holders)
        self._by = by
        self._nodes = cluster_view.by_node(devices, members, problems)
        self._products = cluster_view.by_product(devices)
        self._users: list[UserRow] = []
        if by != "node" and by != "product":  # noqa: PLR1714  mypy narrows it so
            workloads = {
                (str(pod.get("namespace", "")), str(pod["name"])): cluster_view.workload_of(dict(pod))
                for pod in pods
            }
            rows = cluster_view.by_user(devices, by, workloads)
            self._users = [row for row in rows if namespace in (None, row.namespace)]
        whole = {pool: found for pool, found in members.items() if pool not in problems}
        self._pending = pending_claims(
            driver, all_claims, whole, [dict(entry) for entry in classes], namespace
        )

    def print(self, output: Output) -> None:
        """On standard output."""
        if not output.is_for_people:
            print_object(self._object(), output)
            return
        width = terminal_width(all_columns=output is Output.wide)
        match self._by:
            case "node":
                text = _node_table(self._nodes, width)
            case "product":
                text = _product_table(self._products, width)
            case _:
                text = _user_table(self._users, self._by, width)
        typer.echo(text, nl=False)
        for line in _pending_lines(self._pending):
            typer.echo(line)

    def _object(self) -> dict[str, Any]:
        rows: list[Any]
        match self._by:
            case "node":
                rows = [asdict(row) for row in self._nodes]
            case "product":
                rows = [
                    {"product": name, "nodes": nodes, "count": asdict(one)}
                    for name, nodes, one in self._products
                ]
            case _:
                rows = [{**asdict(row), "mig": dict(row.mig)} for row in self._users]
        return {"by": self._by, "rows": rows, "pending": [asdict(claim) for claim in self._pending]}


def _counts(count: Count) -> tuple[str, ...]:
    mig = f"{count.mig_allocated}/{count.mig}" if count.mig else "-"
    numbers = (count.gpus, count.free, count.allocated, count.blocked, count.tainted)
    return (*map(str, numbers), mig, str(count.shares) if count.shares else "-")


def _node_table(rows: Sequence[NodeRow], width: int | None) -> str:
    if not rows:
        return (
            "no node publishes GPUs; see `gpu-dra-driver doctor` in the driver's pod on a node that should\n"
        )
    columns = [Column("NODE"), *_COUNTS, Column("PRODUCT", drop=1, cut=16), Column("PROBLEM", cut=20)]
    cells = [
        (row.node, *_counts(row.count), ", ".join(row.products) or "-", row.problem or "-") for row in rows
    ]
    if all(row.problem is None for row in rows):
        columns, cells = columns[:-1], [row[:-1] for row in cells]
    if len(rows) > 1:
        total = tuple(map(str, _total(row.count for row in rows)))
        cells.append(("(all)", *total, *[""] * (len(columns) - 1 - len(total))))
    return table(columns, cells, width)


def _total(counts: Any) -> tuple[object, ...]:
    found = list(counts)
    gpus, free, allocated, blocked, tainted, mig, used, shares = (
        sum(getattr(one, name) for one in found)
        for name in ("gpus", "free", "allocated", "blocked", "tainted", "mig", "mig_allocated", "shares")
    )
    return gpus, free, allocated, blocked, tainted, f"{used}/{mig}" if mig else "-", shares or "-"


def _product_table(rows: Sequence[tuple[str, int, Count]], width: int | None) -> str:
    columns = [Column("PRODUCT"), Column("NODES"), *_COUNTS]
    return table(columns, [(product, str(nodes), *_counts(count)) for product, nodes, count in rows], width)


def _user_table(rows: Sequence[UserRow], by: By, width: int | None) -> str:
    if not rows:
        return "nobody uses a GPU here\n"
    columns = [
        Column("NAMESPACE"),
        Column(by.upper(), cut=20),
        Column("CLAIMS", drop=2),
        Column("GPUS"),
        Column("MIG", cut=12),
        Column("SHARES", drop=3),
        Column("NODES", drop=1, cut=16),
    ]
    cells: list[tuple[str, ...]] = [
        (
            row.namespace,
            row.name,
            str(row.claims),
            str(row.gpus),
            ", ".join(f"{profile} x{number}" for profile, number in row.mig.items()) or "-",
            str(row.shares) if row.shares else "-",
            ", ".join(row.nodes),
        )
        for row in rows
    ]
    if by == "namespace":
        columns, cells = columns[:1] + columns[2:], [(row[0], *row[2:]) for row in cells]
    return table(columns, cells, width)


def _pending_lines(claims: Sequence[PendingClaim]) -> list[str]:
    lines = []
    for claim in claims:
        lines += ["", f"claim {claim.namespace}/{claim.name} has no devices:"]
        for reason, number in claim.reasons[:_MOST_REASONS]:
            lines.append(f"  {number} node{'s' if number != 1 else ''}: {reason}")
        if len(claim.reasons) > _MOST_REASONS:
            lines.append(f"  and {len(claim.reasons) - _MOST_REASONS} more reasons (-o json has all)")
        if claim.fits:
            more = f" and {len(claim.fits) - 1} more" if len(claim.fits) > 1 else ""
            lines.append(
                f"  {claim.fits[0]}{more} could serve it; if no pod waits for another reason (kubectl describe pod), "
                "the scheduler is about to"
            )
        if claim.untried:
            lines.append(f"  {claim.untried} nodes were not looked at")
        if not (claim.reasons or claim.fits or claim.untried):
            lines.append("  no node publishes devices of this driver")
    return lines
