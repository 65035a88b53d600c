"""Commands for the installed chart."""

from __future__ import annotations

import pytest

from dra_driver.base import installation


@pytest.fixture
def in_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RELEASE": "gpus -n kube-gpus",
        "NAMESPACE": "other",
        "HOSTNAME": "gpus-7xk2p",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("in_pod")
def test_command_in_a_pod_names_its_release_namespace_and_pod() -> None:
    assert installation.helm_set("a=1") == (
        "`helm upgrade gpus -n kube-gpus daemonset/chart --reset-then-reuse-values --set a=1`"
    )
    assert installation.apply_again() == (
        "`helm get manifest gpus -n kube-gpus | kubectl apply -f -` as an administrator"
    )
    assert installation.logs().startswith("`kubectl -n other logs ")
    assert installation.from_outside("first `gpu-dra-driver detach X`, then `nvidia-smi`") == (
        "first `kubectl -n other exec gpus-7xk2p -- gpu-dra-driver detach X`, then `nvidia-smi`"
    )


def test_command_outside_of_a_pod_stays_as_it_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert installation.from_outside("`gpu-dra-driver claims`") == "`gpu-dra-driver claims`"
