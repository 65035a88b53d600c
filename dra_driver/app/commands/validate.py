"""What `validate` takes from the files and from the machine: configurations, and where claims are tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dra_driver.app.commands.inspect import OwnershipUnknownError, slices_to_publish
from dra_driver.errors import InvalidConfigError, NvmlUnavailableError
from dra_driver.model.json_object import JsonObject
from dra_driver.model.units import counted
from dra_driver.settings import Settings, config_values
from dra_driver.validation.documents import Document
from dra_driver.validation.machine_fit import MachineFit


def machine_to_try(settings: Settings) -> tuple[MachineFit | None, str]:
    """The machine on which `validate` tries claims, None if there is none; and why there is none, or how large it is.

    Raises: NvmlUnavailableError if a simulated machine has no NVML.
    """
    name = settings.simulate or "this node"
    try:
        slices, _ = slices_to_publish(settings, is_empty=True)
    except NvmlUnavailableError as error:
        if settings.simulate is not None:
            raise
        reason = str(error).partition(";")[0]
        return None, f"this one has no usable GPU ({reason}); name one with --simulate"
    except OwnershipUnknownError as error:
        return None, f"{error}; run this as root"
    fit = MachineFit(name, settings.driver_name, slices, settings.extra_devices)
    if settings.simulate is None and not fit.devices:
        return None, "this one has no GPU; name one with --simulate"
    return fit, counted(len(fit.devices), "device")


def configured_among(documents: Sequence[Document]) -> tuple[JsonObject, Mapping[int, tuple[str, ...]]]:
    """The settings in those of the documents that are configuration files, and the faults of these by their number."""
    values: JsonObject = {}
    faults: dict[int, tuple[str, ...]] = {}
    for number, document in enumerate(documents):
        if document.is_configuration:
            try:
                values |= config_values(document.content, Path(document.file))
            except InvalidConfigError as error:
                faults[number] = error.faults or (str(error),)
    return values, faults
