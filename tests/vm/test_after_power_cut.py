"""The second boot of `make e2e-vm`, on the disk of the first one."""

from __future__ import annotations

from tests.vm.conftest import GPUS, Vm, driver_of, eventually


def test_claims_of_the_boot_before_are_prepared_and_end(vm: Vm) -> None:
    """Whatever the power cut left of records and ledgers: the kubelet calls again, and finally nothing
    remains.
    """
    assert [ref.name for ref in vm.kept] == ["cut-a", "cut-b", "cut-c", "cut-d"]
    assert [vm.call("prepare", ref) for ref in vm.kept] == [None] * 4
    assert [driver_of(bus_id) for bus_id in GPUS] == ["vfio-pci", "vfio-pci", "nvidia", "vfio-pci"]
    for ref in vm.kept:
        vm.release(ref)
    eventually("the return of the cards", lambda: {driver_of(bus_id) for bus_id in GPUS} == {"nvidia"})
    records = [f"*/*{ref.uid}*" for ref in vm.kept] + ["passthrough/*.json"]
    eventually(
        "the end of all records", lambda: not any(any(vm.node.plugin_dir.glob(one)) for one in records)
    )
