"""`gpu-dra-driver cluster`, also `kubectl gpus`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import cached_property, partial
from typing import TypeVar

from dra_driver.app.logs import configure_logs
from dra_driver.app.settings import ADVICE_PATH, DEFAULT_DRIVER_NAME, Flag
from dra_driver.base.threads import run_in_parallel
from dra_driver.cli.claims import advice_lines
from dra_driver.cli.flags import CLUSTER_KUBECONFIG, CONTEXT, of_run, switch, usual_kubeconfig
from dra_driver.cli.output import OUTPUT, answer, drawn, hanging, table
from dra_driver.cli.rules import cluster_rows as rules
from dra_driver.cli.rules.cluster_rows import PluginPod, Row, Slot, Totals, Used, WaitingPod
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, FatalError, InvalidConfigError
from dra_driver.kube.api_errors import ResponseTooLargeError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.model.dataclass import asdict
from dra_driver.model.ids import is_dns_label, printable
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import first_of
from dra_driver.reporting.receipts import advice_of_page
from dra_driver.reporting.rules.advice import Advice

T = TypeVar("T")

_TIMEOUT_S = 60.0
_PAGE = 500
_PAGE_OF_SLICES = 100
_FORGOTTEN = 410
"""Listing took so long that the server no longer has the resource version."""
_PAGED_TRIES = 3
_MAX_UNKNOWN = 5
_GROUP = "/apis/resource.k8s.io/v1"
_PLUGINS = {"labelSelector": "app.kubernetes.io/component=node"}
_METRICS_AT_ONCE = 16
_METRICS_ONE_S = 10.0

FLAGS = (
    switch("usage", "Show utilisation and memory of each claim's devices, the most wasteful first."),
    switch("advise", "Show only which claims were idle, or need only a smaller MIG device or a share."),
    Flag("namespace", "Show only claims and pods in this namespace.", spelled=("-n", "--namespace"), env=()),
    Flag(
        "filter",
        "Show only rows that contain this text, such as a node, a GPU, a pod or `taint`.",
        env=(),
        default="",
    ),
    OUTPUT,
    CLUSTER_KUBECONFIG,
    CONTEXT,
    *of_run("driver_name"),
)
EXAMPLES = ("", "--usage -n ml", "--advise", "--filter taint", "-o json")


def cluster(given: Namespace) -> None:
    """Print a row for each GPU, and for each MIG device and share that a claim has: node, device, claim, pods,
    usage, problem. For products with MIG it also prints how many whole GPUs, or devices of each profile, still fit,
    and it names the nodes whose NVIDIA driver, CUDA or plugin differs from the others. A claim's device that is no
    longer in a slice is listed too, for example after the NVIDIA driver was unloaded. Waiting claims and pods come
    last, with the reason from the scheduler. The command runs nothing on the nodes. `kubectl gpus` is this command,
    and `kubectl gpus top NODE` runs `top` in the plugin's pod on that node. Needs permission to list
    resourceslices, resourceclaims, deviceclasses and pods. With --usage it reads the plugins' metrics through the
    API server, and also needs permission to get pods/proxy in their namespace. With --advise it shows instead what
    to change about claims, from their receipts, and needs only these two permissions: list pods, get pods/proxy.
    """
    configure_logs("critical", "console")
    if given.namespace is not None and not is_dns_label(given.namespace):
        raise InvalidConfigError(f"{given.namespace!r} is not a valid namespace name; check --namespace")
    endpoint = load_endpoint(given.kubeconfig or usual_kubeconfig(), context=given.context)
    look = _Look(ApiClient(endpoint, timeout_s=_TIMEOUT_S), given.driver_name or DEFAULT_DRIVER_NAME)
    wanted = given.filter.lower()
    if given.advise:
        found = [
            (node, one)
            for node, one in look.advice()
            if given.namespace in (None, one.namespace) and wanted in f"{node} {asdict(one).values()}".lower()
        ]
        objects = [{"node": node, **asdict(one)} for node, one in found]
        shown: JsonObject = {"advice": objects, "unknown": look.unknown}
        answer(given.output, partial(advice_lines, found), lambda: shown)
    else:
        rows, totals = look.read(with_usage=given.usage)
        inside = "" if given.namespace is None else f"{given.namespace}/"
        rows = [
            row
            for row in rows
            if any(name.startswith(inside) for name in (row.claim, *row.pods))
            and wanted in str(asdict(row).values()).lower()
        ]
        shown = {
            "totals": asdict(totals), "rows": [asdict(row) for row in rows], "versions": look.versions,
            "unknown": look.unknown,
        }  # fmt: skip
        answer(given.output, partial(_lines, rows, totals, [*rules.drift(look.versions)]), lambda: shown)
    if given.output.is_for_people:
        sys.stdout.flush()  # keeps the order if stdout and stderr go into one pipe
        left = len(look.unknown) - _MAX_UNKNOWN
        more = [f"{left} more (-o json shows all)"] if left > 0 else []
        for text in (*look.unknown[:_MAX_UNKNOWN], *more):
            print(f"gpu-dra-driver: {printable(text)}", file=sys.stderr)


def _lines(rows: Sequence[Row], totals: Totals, versions: Sequence[str], width: int | None) -> Iterator[str]:
    yield hanging("", str(totals), width)
    for product, counts in totals.fits.items():
        yield hanging("  ", rules.room_text(product, counts), width)
    for text in versions:
        yield hanging("VERSIONS DIFFER: ", text, width)
    if not totals.gpus:
        yield hanging(
            "", "no node publishes GPUs; run `gpu-dra-driver doctor` in the plugin's pod on a GPU node", width
        )
    columns = {"NODE": 0, "DEVICE": 0, "PRODUCT": 3, "CLAIM": 0, "POD?": 2, "USE?": 1, "PROBLEM?": 0}
    cells = [(row.node, row.device, row.product, row.claim, _pods(row), row.use, row.problem) for row in rows]
    yield from drawn(["", *table(columns, cells, width)] if rows else [], width)


def _pods(row: Row) -> str:
    return first_of([pod.partition("/")[2] if row.claim != "-" else pod for pod in row.pods]) or "-"


class _Look:
    """`unknown` lists what could not be read, and why.

    It includes objects that the API server would reject: a proxy may return them.
    """

    def __init__(self, client: ApiClient, driver: str) -> None:
        self._client = client
        self._driver = driver
        self.unknown: list[str] = []
        self.versions: dict[str, dict[str, str]] = {}

    def read(self, *, with_usage: bool) -> tuple[list[Row], Totals]:
        """Return rows and totals. Raises: FatalError for a missing permission; ApiUnavailableError,
        ApiRejectedError.
        """
        driver = self._driver
        of_driver = {"fieldSelector": f"spec.driver={driver}"}
        slices = self._list(f"{_GROUP}/resourceslices", rules.seen_slice, _PAGE_OF_SLICES, of_driver)
        claims = self._list(f"{_GROUP}/resourceclaims", partial(rules.seen_claim, driver=driver))
        classes = self._list(f"{_GROUP}/deviceclasses", rules.seen_class)
        pods: Sequence[WaitingPod] = ()
        try:
            unscheduled = {"fieldSelector": "spec.nodeName=,status.phase=Pending"}
            pods = self._list("/api/v1/pods", rules.seen_pod, query=unscheduled)
        except FatalError as error:
            self.unknown.append(f"waiting pods are not shown: {error}")
        plugins: Sequence[PluginPod] = ()
        try:
            plugins = self._plugins
        except FatalError as error:
            self.unknown.append(f"the versions of the plugin are not compared: {error}")
        self.versions = rules.versions_of(slices, plugins)
        loads = self._loads() if with_usage else None
        return rules.cluster_rows(driver, slices, claims, classes, pods, loads)

    @cached_property
    def _plugins(self) -> Sequence[PluginPod]:
        listed = self._list("/api/v1/pods", partial(rules.plugin_pod, driver=self._driver), query=_PLUGINS)
        return [pod for pod in listed if pod is not None]

    def _list(
        self,
        path: str,
        seen: Callable[[JsonObject], T],
        limit: int = _PAGE,
        query: dict[str, str] | None = None,
    ) -> list[T]:
        """Return `seen(object)` for each object.

        Pages become smaller if one takes too much memory. If the list expires between two pages, it is read again, at
        last without paging.
        """
        plural, more = path.rpartition("/")[2], {"limit": str(limit)}
        found: list[T] = []
        expired = 0
        while True:
            try:
                answer = self._client.request(
                    "GET", path, action=f"list {plural}", query=(query or {}) | more
                )
            except ResponseTooLargeError:
                if limit == 1 or "limit" not in more:
                    raise
                limit = max(limit // 4, 1)
                more["limit"] = str(limit)
                continue
            except ApiRejectedError as error:
                if error.status != _FORGOTTEN or "limit" not in more:
                    raise _explained(
                        error, plural if path.startswith("/api/") else f"{plural}.resource.k8s.io"
                    ) from error
                expired += 1
                found, more = [], {"limit": str(limit)} if expired < _PAGED_TRIES else {}
                continue
            entries = answer.get("items", answer)
            if not isinstance(entries, list | None):
                raise ApiUnavailableError(f"cannot list {plural}: the answer contains no list of {plural}")
            found += [one for entry in entries or () for one in self._seen(entry, seen, plural)]
            if not (token := (answer.get("metadata") or {}).get("continue")):
                return found
            more = {"limit": str(limit), "continue": str(token)}

    def _seen(self, entry: JsonObject, seen: Callable[[JsonObject], T], plural: str) -> Iterator[T]:
        try:
            yield seen(entry)
        except (
            KeyError, TypeError, ValueError, AttributeError, StopIteration, InvalidConfigError,
        ) as error:  # fmt: skip
            metadata = entry.get("metadata") if isinstance(entry, dict) else None
            name = metadata.get("name") if isinstance(metadata, dict) else None
            why = f"{type(error).__name__} {error}"
            self.unknown.append(
                f"{plural}: {name or 'an object without a name'} is skipped, because it cannot be read: {why}"
            )

    def advice(self) -> list[tuple[str, Advice]]:
        answers = self._of_plugins("advice is not known", lambda pod: pod.proxy + ADVICE_PATH, advice_of_page)
        return [(node, one) for node, found in answers for one in found]

    def _loads(self) -> dict[Slot, Used]:
        def parsed(text: str) -> dict[str, Used]:
            found = rules.loads_of(text, self._driver)
            if found is None:
                raise ValueError("the plugin does not measure usage (--no-usage-metrics)")
            return found

        answers = self._of_plugins("usage is not known", lambda pod: pod.proxy + pod.metrics, parsed)
        return {(node, device): load for node, found in answers for device, load in found.items()}

    def _of_plugins(
        self, unknown: str, path: Callable[[PluginPod], str], parsed: Callable[[str], T]
    ) -> list[tuple[str, T]]:
        """Return a page of each plugin with its node. `unknown` introduces notes about unread pages."""
        pods = [pod for pod in self._plugins if pod.port]
        if not pods:
            self.unknown.append(f"{unknown}: no pod of driver {self._driver} serves metrics")
        reads = [
            partial(self._client.text, path(pod), action="read its page", timeout_s=_METRICS_ONE_S)
            for pod in pods
        ]
        found: list[tuple[str, T]] = []
        problems: dict[str, str] = {}
        answered: set[str] = set()
        for pod, read in zip(pods, run_in_parallel(reads, _METRICS_AT_ONCE, _TIMEOUT_S), strict=True):
            try:
                page = parsed(read.result(0))
            except (CancelledError, TimeoutError):
                problems[pod.node] = f"the plugin did not answer within {_TIMEOUT_S:g} s"
            except (ApiRejectedError, ApiUnavailableError, ValueError) as error:
                problems[pod.node] = _why_unread(error, pod)
            else:
                # During a rolling update a node has two pods, one of which may be about to exit.
                answered.add(pod.node)
                found.append((pod.node, page))
        left = [f"node {node}: {text}" for node, text in problems.items() if node not in answered]
        self.unknown += [f"{unknown}: {text}" for text in left]
        return found


def _explained(error: ApiRejectedError, resource: str) -> Exception:
    if error.status == 401:
        return FatalError(
            "the API server does not accept these credentials; they may have expired: log in again"
        )
    if error.status == 403:
        return FatalError(
            f"this user may not list {resource} in the whole cluster; "
            f"request a ClusterRole with the verb list for {resource}"
        )
    return error


def _why_unread(error: Exception, pod: PluginPod) -> str:
    if isinstance(error, ApiRejectedError) and error.status == 404:
        return "the plugin does not serve this page (HTTP 404); update the plugin, or do not use --no-usage-metrics"
    if isinstance(error, ApiRejectedError) and error.status == 403:
        return f"this user needs a Role with the verb get for pods/proxy in namespace {pod.namespace}"
    if isinstance(error, ApiUnavailableError):
        return f"{error}; if the pod has a network policy, the policy must let the API server reach port {pod.port}"
    return str(error)
