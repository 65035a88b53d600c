"""Claims that fit a machine, but whose Prepare would fail until the machine changes."""

from __future__ import annotations

from dra_driver.cli.validation.rules.classes import standard_classes
from dra_driver.model.gpu import Fabric
from dra_driver.model.host import ExtraDevices
from tests.fakes.samples import DRIVER, h100, inventory
from tests.fakes.slices import machine_fit


def test_claim_that_waits_for_imex_channels_fits_with_a_hint() -> None:
    fabric = Fabric("7f3c1ad2-96f4-4e0b-8b7a-0d5f6a2c9e11", (3,))
    found = inventory(h100(0, fabric=fabric))
    spec = {"devices": {"requests": [{"name": "g", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}}
    fit = machine_fit(found, extra_devices=ExtraDevices(imex=3)).claim(spec, standard_classes(DRIVER))
    assert (fit.problem, fit.refusal, len(fit.devices)) == (None, None, 1)
    assert fit.delay is not None
    assert fit.delay.startswith(
        "if the claim is allocated on m, Prepare fails for now: request g: device gpu-"
    )
    assert "the NVIDIA driver of this node has no IMEX channels" in fit.delay
