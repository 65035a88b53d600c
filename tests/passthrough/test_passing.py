"""Claims for virtual machines on a simulated machine: binding, what goes wrong with it, and the way back."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.api.config import GROUP_VERSION
from dra_driver.errors import DeviceBusyError, InvalidConfigError
from dra_driver.model.claim import AllocatedClaim, DeviceConfig, Failed, Prepared
from dra_driver.model.gpu import OwnedCard
from dra_driver.model.plan import Plan
from dra_driver.model.steps import BindVfio
from dra_driver.simulator import SimulatedPciControl
from tests.fakes.kindnode import FOR_MACHINES, KindNode, Site
from tests.fakes.preparing import in_threads
from tests.fakes.samples import DRIVER, claim
from tests.fakes.waiting import eventually

HURRY_S = 4.0


def wanted(site: Site, uid: str = "uid-1") -> AllocatedClaim:
    return claim(site.for_machine(FOR_MACHINES), uid=uid)


def whole(site: Site, uid: str = "uid-2") -> AllocatedClaim:
    return claim(site.whole(FOR_MACHINES), uid=uid)


def in_a_hurry(node: KindNode, one: AllocatedClaim) -> Any:
    node.claims.add(one)
    return node.service.prepare([one.ref], HURRY_S)[one.ref.uid]


def refused(answer: object, *parts: str) -> None:
    assert isinstance(answer, Failed), answer
    for part in parts:
        assert part in answer.error


def test_card_goes_to_vfio_with_all_its_functions_and_back(node: KindNode, site: Site) -> None:
    untouched = node.state()
    answer = node.prepare(wanted(site))
    assert isinstance(answer, Prepared), answer
    assert site.drivers() == {"0": "vfio-pci", "1": "vfio-pci"}
    [had] = node.ledger.details(OwnedCard)
    assert (had.gpu_uuid, had.persistence) == (site.card.gpu_uuid, True)
    assert [function.driver for function in had.functions] == ["nvidia", "snd_hda_intel"]
    # All that slices and metadata say of the card stays, though only the NVIDIA driver knows its name.
    [now] = site.cards(node.plugin).read(())
    assert replace(now, driver="nvidia", by_us=False) == site.card
    assert site.card.product_name is not None
    assert node.prepare(wanted(site)) == answer
    assert node.unprepare(wanted(site)) is None
    assert site.drivers() == {"0": "nvidia", "1": "snd_hda_intel"}
    assert node.state() == untouched
    assert isinstance(node.prepare(whole(site)), Prepared)


FAULTS = [
    (function, code)
    for function in ("driver_override", "unbind", "drivers_probe")
    for code in ("EBUSY", "ENODEV", "no-effect")
]


@pytest.mark.parametrize(("function", "code"), FAULTS)
def test_bind_that_fails_leaves_every_function_with_the_driver_that_it_had(
    node: KindNode, site: Site, function: str, code: str
) -> None:
    untouched = node.state()
    site.machine.set_fault(function, code=code, count=1, gpu=site.card.gpu_uuid)
    answer = node.prepare(wanted(site))
    if code == "EBUSY":  # the call waits a moment for the user of the card, and retries
        assert isinstance(answer, Prepared)
        assert node.unprepare(wanted(site)) is None
    else:
        refused(answer)
    assert node.state() == untouched
    assert node.ledger.pending() == []
    assert node.runner.runners[BindVfio]._rendezvous_by_claim == {}
    assert isinstance(node.prepare(wanted(site)), Prepared)


@pytest.mark.parametrize("code", ["EBUSY", "ENODEV", "no-effect"])
@pytest.mark.parametrize("function", ["driver_override", "unbind", "bind"])
def test_return_that_fails_is_retried_and_the_card_is_withheld_in_between(
    node: KindNode, site: Site, function: str, code: str
) -> None:
    untouched = node.state()
    node.prepare(wanted(site))
    site.machine.set_fault(function, code=code, gpu=site.card.gpu_uuid)
    assert node.unprepare(wanted(site)) is None
    left = node.cleaner.outstanding()
    if left:  # the kernel may choose the driver itself
        assert left[0].kinds == ("vfio",)
        shown = node.cleaner.withheld()
        for name in (site.for_machine(FOR_MACHINES), site.whole(FOR_MACHINES)):
            assert shown(site.inventory.by_name[name]) is not None
    site.machine.clear_faults()
    assert node.cleaner.clean_all() == []
    assert node.state() == untouched


def test_process_on_the_gpu_is_named_and_nothing_is_changed(node: KindNode, site: Site) -> None:
    untouched, card = node.state(), site.card
    site.machine.hold_gpu(card.gpu_uuid, 4711, "python3")
    step = BindVfio(site.for_machine(FOR_MACHINES), card.gpu_uuid, card.bus_id, card.vfio_driver)
    with pytest.raises(
        DeviceBusyError, match=r"GPU-\S+ \(0000:\S+\) is in use by process 4711 \(python3\)"
    ) as caught:
        node.runner.do(step, Plan(wanted(site), (), (step,)))
    assert caught.value.has_no_effect
    assert node.state() == untouched


def test_program_that_opens_the_gpu_after_the_first_check_is_named_and_not_waited_for(
    node: KindNode, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dra_driver.host.vfio.VfioCards.gpu_users",
        lambda *_, others_only=False: [] if others_only else ["dcgm-exporter (process 812)"],
    )
    untouched, pauses = node.state(), site.simulated.session.pauses
    refused(node.prepare(wanted(site)), "in use by dcgm-exporter (process 812)")
    assert site.simulated.session.pauses == pauses + 1
    assert node.state() == untouched
    assert node.ledger.pending() == []


def test_monitor_that_has_the_gpu_open_does_not_close_nvml_for_others(node: KindNode, site: Site) -> None:
    """Each retry of the kubelet would close it, and a monitor never exits."""
    exporter = site.machine.open_session("dcgm-exporter")
    untouched, pauses = node.state(), site.simulated.session.pauses
    refused(node.prepare(wanted(site)), "in use by dcgm-exporter (process ")
    assert (site.simulated.session.pauses, node.state()) == (pauses, untouched)
    site.machine.close_session(exporter)
    assert isinstance(node.prepare(wanted(site)), Prepared)


def test_gpu_whose_users_are_not_known_is_not_unbound(
    node: KindNode, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would wait for them in the unbind, without a limit."""
    monkeypatch.setattr("dra_driver.host.vfio.VfioCards.gpu_users", lambda *_, **__: None)
    untouched = node.state()
    refused(node.prepare(wanted(site)), "cannot find the programs that have GPU", "`nvidia-smi -q`")
    assert node.state() == untouched


def test_virtual_machine_keeps_its_card_until_it_ends(node: KindNode, site: Site) -> None:
    untouched = node.state()
    node.prepare(wanted(site))
    site.machine.hold_gpu(site.card.gpu_uuid, 900, "qemu-system-x86")
    assert node.unprepare(wanted(site)) is None
    assert site.drivers() == {"0": "vfio-pci", "1": "vfio-pci"}
    [left] = node.cleaner.outstanding()
    assert left.kinds == ("vfio",)
    assert "qemu-system-x86 (process 900)" in left.text
    for other in (whole(site), wanted(site, "uid-3")):
        refused(in_a_hurry(node, other), "qemu-system-x86 (process 900)")
    site.machine.release_gpu(site.card.gpu_uuid)
    assert isinstance(node.prepare(whole(site)), Prepared)
    assert node.unprepare(whole(site)) is None
    assert node.state() == untouched


def test_running_virtual_machine_stays_when_its_claim_is_prepared_again(node: KindNode, site: Site) -> None:
    answer = node.prepare(wanted(site))
    site.machine.hold_gpu(site.card.gpu_uuid, 900, "qemu-system-x86")
    following = node.restarted()
    assert following.prepare(wanted(site)) == answer
    assert site.drivers() == {"0": "vfio-pci", "1": "vfio-pci"}


def test_two_calls_of_one_claim_converge(node: KindNode, site: Site) -> None:
    one, two = in_threads(lambda: node.prepare(wanted(site)), lambda: node.prepare(wanted(site)))
    assert isinstance(one, Prepared)
    assert one == two
    assert len(node.ledger.details(OwnedCard)) == 1


def test_card_that_an_administrator_has_bound_gets_no_step_and_stays_bound(
    node: KindNode, site: Site, memory_path: Path
) -> None:
    site.machine.give_to(site.card.gpu_uuid, "vfio-pci")
    [card] = site.cards(memory_path / "none").read(())
    assert (card.is_bound, card.by_us) == (True, False)
    step = BindVfio(site.for_machine(FOR_MACHINES), card.gpu_uuid, card.bus_id, card.vfio_driver)
    runner = node.runner.runners[BindVfio]
    # As where it was bound after the claim was planned.
    runner.do(step, Plan(wanted(site), (), (step,)))
    assert node.ledger.details(OwnedCard) == []
    runner.undo(step, wanted(site).ref)
    assert site.drivers() == {"0": "vfio-pci", "1": "vfio-pci"}


def test_reboot_under_a_virtual_machine(node: KindNode, site: Site) -> None:
    node.prepare(wanted(site))
    site.machine.hold_gpu(site.card.gpu_uuid, 900, "qemu-system-x86")
    site.machine.reboot()
    site.machine.release_gpu(site.card.gpu_uuid)
    site.simulated.session.reopen()
    following = node.restarted(boot_id="boot-2")
    assert following.ledger.details(OwnedCard) == []
    assert site.drivers() == {"0": "nvidia", "1": "snd_hda_intel"}
    assert isinstance(following.prepare(wanted(site)), Prepared)
    assert site.drivers() == {"0": "vfio-pci", "1": "vfio-pci"}
    assert following.unprepare(wanted(site)) is None
    assert site.drivers() == {"0": "nvidia", "1": "snd_hda_intel"}


def test_pending_return_is_void_after_a_reboot(node: KindNode, site: Site) -> None:
    node.prepare(wanted(site))
    site.machine.hold_gpu(site.card.gpu_uuid, 900, "qemu-system-x86")
    node.unprepare(wanted(site))
    site.machine.reboot()
    site.machine.release_gpu(site.card.gpu_uuid)
    following = node.again(boot_id="boot-2")
    assert following.cleaner.outstanding() == []
    assert following.cleaner.withheld()(site.inventory.by_name[site.for_machine(FOR_MACHINES)]) is None


def test_ledger_that_cannot_be_read_is_not_in_the_way(node: KindNode, site: Site) -> None:
    answer = node.prepare(wanted(site))
    (node.plugin / "ledger" / f"{site.card.gpu_uuid}.json").write_bytes(b"torn")
    following = node.restarted()
    assert following.prepare(wanted(site)) == answer
    assert following.unprepare(wanted(site)) is None
    assert following.cleaner.outstanding() == []
    assert site.drivers() == {"0": "nvidia", "1": "snd_hda_intel"}


def test_claim_whose_record_was_lost_returns_its_card(node: KindNode, site: Site) -> None:
    node.prepare(wanted(site))
    (node.plugin / "claims" / "uid-1.json").write_bytes(b"torn")
    following = node.again()
    assert following.unprepare(wanted(site)) is None
    assert site.drivers() == {"0": "nvidia", "1": "snd_hda_intel"}
    assert following.ledger.details(OwnedCard) == []


def test_user_that_appears_between_check_and_bind_does_not_close_nvml_for_others(
    node: KindNode, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.journal.executor._UNDO_WAIT_S", 0.5)
    monkeypatch.setattr("dra_driver.passthrough.steps._STUCK_FIRST_S", 0.1)
    untouched, session = node.state(), site.simulated.session
    before = session.pauses
    site.machine.set_fault("unbind", code="late-user", count=1, gpu=site.card.gpu_uuid)
    refused(in_a_hurry(node, wanted(site)))
    eventually(lambda: session.is_open)
    assert set(node.lanes.under_way()) == {site.card.gpu_uuid}
    time.sleep(0.5)
    assert session.pauses == before + 1, "for the bind"
    site.machine.release_gpu(site.card.gpu_uuid)
    eventually(lambda: not node.lanes.under_way())
    assert node.cleaner.clean_all() == []
    assert node.state() == untouched


def test_nvml_is_closed_again_after_a_write_hung_for_another_reason(
    node: KindNode, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards NVML, which was opened again, is the last thing that the kernel waits for."""
    for name, value in {"_STUCK_FIRST_S": 0.01, "_STUCK_MOST_S": 0.05, "_RELEASE_S": 0.05}.items():
        monkeypatch.setattr(f"dra_driver.passthrough.steps.{name}", value)
    before = site.simulated.session.pauses
    site.machine.set_fault("unbind", code="hang", gpu=site.card.gpu_uuid)
    refused(in_a_hurry(node, wanted(site)))
    eventually(lambda: site.simulated.session.pauses >= before + 4)
    monkeypatch.setattr("dra_driver.passthrough.steps._RELEASE_S", 2.0)
    site.machine.clear_faults()
    eventually(lambda: not node.lanes.under_way())
    assert node.cleaner.clean_all() == []


def test_modprobe_that_hangs_ends_with_the_call(node: KindNode, site: Site) -> None:
    untouched = node.state()
    site.machine.set_fault("modprobe", code="hang")
    refused(in_a_hurry(node, wanted(site)))
    eventually(lambda: not node.lanes.under_way())
    assert node.state() == untouched


MAPS = "the kernel module vfio_iommu_type1"


@pytest.mark.parametrize(
    ("loaded", "code", "text"),
    [
        ([], "EPERM", "run `modprobe vfio_pci` on the node"),
        # The virtual machine would get ENODEV when it sets its IOMMU.
        (
            ["vfio_pci"],
            "EPERM",
            f"load {MAPS} for mapping the memory of virtual machines: modprobe reports ",
        ),
        (["vfio_pci"], "no-effect", f"{MAPS} is missing; run `modprobe vfio_iommu_type1` on the node"),
    ],
)
def test_claim_without_a_kernel_module_is_refused_before_nvml_is_closed(
    node: KindNode, site: Site, loaded: list[str], code: str, text: str
) -> None:
    site.machine.set_system(vfio_loaded=loaded)
    untouched, pauses = node.state(), site.simulated.session.pauses
    site.machine.set_fault("modprobe", code=code)
    refused(in_a_hurry(node, wanted(site)), text)
    assert (node.state(), site.simulated.session.pauses) == (untouched, pauses)
    site.machine.clear_faults()
    assert isinstance(node.prepare(wanted(site)), Prepared)


def test_claim_by_iommufd_needs_no_module_that_maps_memory(node: KindNode, site: Site) -> None:
    site.machine.set_system(iommufd=True, vfio_modules=["vfio_pci"])
    parameters = {
        "apiVersion": GROUP_VERSION,
        "kind": "VfioDeviceConfig",
        "iommu": {"backendPolicy": "PreferIommuFD"},
    }
    by_iommufd = claim(wanted(site).results[0], configs=(DeviceConfig("FromClaim", (), DRIVER, parameters),))
    assert isinstance(node.prepare(by_iommufd), Prepared)
    assert site.machine.current().system["vfio_loaded"] == ["vfio_pci"]
    assert node.unprepare(by_iommufd) is None
    refused(node.prepare(wanted(site)), "run `modprobe vfio_iommu_type1` on the node")


def test_card_waits_until_the_nvidia_driver_is_back(node: KindNode, site: Site) -> None:
    node.prepare(wanted(site))
    site.machine.unload_driver()
    assert node.unprepare(wanted(site)) is None
    [left] = node.cleaner.outstanding()
    assert "nvidia is not loaded" in left.text
    assert site.drivers()["0"] == "vfio-pci"
    site.machine.load_driver()
    site.simulated.session.reopen()
    assert node.cleaner.clean_all() == []
    assert site.drivers() == {"0": "nvidia", "1": "snd_hda_intel"}


def test_nothing_changes_drivers_while_nvml_is_kept_closed(
    node: KindNode, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = node.runner.runners[BindVfio]
    monkeypatch.setattr(runner, "detached", lambda: "NVML is closed until noon")
    untouched = node.state()
    refused(node.prepare(wanted(site)), "NVML is closed until noon")
    assert node.state() == untouched
    monkeypatch.undo()
    node.prepare(wanted(site))
    monkeypatch.setattr(runner, "detached", lambda: "NVML is closed until noon")
    assert node.unprepare(wanted(site)) is None
    [left] = node.cleaner.outstanding()
    assert "NVML is closed until noon" in left.text
    monkeypatch.undo()
    assert node.cleaner.clean_all() == []


def test_card_that_was_pulled_out_leaves_nothing(node: KindNode, site: Site) -> None:
    gpu = site.machine.gpu(site.card.gpu_uuid)
    node.prepare(wanted(site))
    site.machine.remove_gpu(gpu.uuid)
    try:
        assert node.unprepare(wanted(site)) is None
        assert node.cleaner.outstanding() == []
        assert node.ledger.details(OwnedCard) == []
    finally:
        assert site.machine.add_gpu(gpu.model) == gpu.uuid


def test_card_that_is_pulled_out_under_a_virtual_machine_names_that(node: KindNode, site: Site) -> None:
    """The kernel waits for the virtual machine, and a write to the card would wait with it."""
    gpu = site.machine.gpu(site.card.gpu_uuid)
    node.prepare(wanted(site))
    site.machine.hold_gpu(gpu.uuid, 900, "qemu-system-x86")
    site.machine.remove_gpu(gpu.uuid)
    try:
        refused(
            in_a_hurry(node, wanted(site)),
            "the kernel waits for qemu-system-x86 (process 900) to close the GPU",
        )
        assert node.unprepare(wanted(site)) is None
        [left] = node.cleaner.outstanding()
        assert "in use by qemu-system-x86 (process 900)" in left.text
        assert node.lanes.under_way() == {}
        site.machine.release_gpu(gpu.uuid)
        assert node.cleaner.clean_all() == []
        assert node.ledger.details(OwnedCard) == []
    finally:
        with suppress(InvalidConfigError):
            site.machine.release_gpu(gpu.uuid)
        assert site.machine.add_gpu(gpu.model) == gpu.uuid


def test_card_whose_entry_was_lost_half_way_still_comes_back(node: KindNode, site: Site) -> None:
    untouched = node.state()
    control = SimulatedPciControl(site.machine)
    pci = site.machine.host_root / "sys/bus/pci"
    site.simulated.session.close()
    site.machine.set_gpu(site.card.gpu_uuid, persistence=0)
    control.write(f"{pci}/devices/{site.card.bus_id}/driver_override", "vfio-pci")
    control.write(f"{pci}/drivers/nvidia/unbind", site.card.bus_id)
    site.simulated.session.reopen()
    assert site.drivers()["0"] == ""
    assert isinstance(node.prepare(wanted(site)), Prepared)
    assert node.unprepare(wanted(site)) is None
    site.machine.set_gpu(site.card.gpu_uuid, persistence=1)
    assert node.state() == untouched


@pytest.mark.parametrize("override", ["nvidia", "none"])
def test_override_of_an_administrator_outlives_claims(node: KindNode, site: Site, override: str) -> None:
    path = f"{site.machine.host_root}/sys/bus/pci/devices/{site.card.bus_id}/driver_override"
    SimulatedPciControl(site.machine).write(path, override)
    untouched = node.state()
    site.machine.set_fault("drivers_probe", code="ENODEV", count=1, gpu=site.card.gpu_uuid)
    refused(node.prepare(wanted(site)))
    assert node.state() == untouched
    assert isinstance(node.prepare(wanted(site)), Prepared)
    following = node.restarted()
    site.machine.set_fault("driver_override", code="no-effect", gpu=site.card.gpu_uuid)
    assert following.unprepare(wanted(site)) is None
    assert following.cleaner.outstanding() != []
    site.machine.clear_faults()
    assert following.cleaner.clean_all() == []
    assert following.state() == untouched


def test_override_that_is_not_restored_stays_pending(
    node: KindNode, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{site.machine.host_root}/sys/bus/pci/devices/{site.card.bus_id}/driver_override"
    SimulatedPciControl(site.machine).write(path, "nvidia")
    untouched = node.state()
    node.prepare(wanted(site))
    write = SimulatedPciControl.write
    monkeypatch.setattr(
        SimulatedPciControl,
        "write",
        lambda control, path, text: None if text == "nvidia\n" else write(control, path, text),
    )
    assert node.unprepare(wanted(site)) is None
    [left] = node.cleaner.outstanding()
    assert "its driver_override could not be restored to nvidia" in left.text
    monkeypatch.undo()
    assert node.cleaner.clean_all() == []
    assert node.state() == untouched


def test_persistence_mode_is_left_off_where_it_was_off(node: KindNode, site: Site) -> None:
    site.machine.set_gpu(site.card.gpu_uuid, persistence=0)
    assert isinstance(node.prepare(wanted(site)), Prepared)
    assert node.unprepare(wanted(site)) is None
    assert site.machine.gpu(site.card.gpu_uuid).persistence == 0


def test_other_claims_are_prepared_while_a_card_is_bound(node: KindNode, site: Site) -> None:
    site.machine.set_fault("unbind", code="hang", gpu=site.card.gpu_uuid)
    answers: list[object] = []
    bind = threading.Thread(target=lambda: answers.append(node.prepare(wanted(site))))
    bind.start()
    eventually(lambda: node.ledger.details(OwnedCard))
    assert isinstance(node.prepare(claim(site.whole(4), uid="plain")), Prepared)
    assert answers == []
    site.machine.clear_faults()
    bind.join()
    assert isinstance(answers[0], Prepared)


def test_process_on_the_gpu_is_named_also_where_the_time_of_the_call_ends(node: KindNode, site: Site) -> None:
    site.machine.hold_gpu(site.card.gpu_uuid, 4711, "python3")
    refused(in_a_hurry(node, wanted(site)), "in use by process 4711 (python3)")
