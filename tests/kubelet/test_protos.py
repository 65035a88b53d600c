"""The generated modules: up to date, on the contract's numbers, apart from other packages' modules."""

import subprocess
import sys
from pathlib import Path

import pytest

from dra_driver.kubelet.pb import (
    dra_health_v1_pb2,
    dra_health_v1alpha1_pb2,
    dra_v1_pb2,
    dra_v1beta1_pb2,
    registration_pb2,
)

ROOT = Path(__file__).parents[2]


def fields(message):
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.message_type and fields(field.message_type),
        )
        for field in message.fields
    }


def messages(module):
    return {name: fields(message) for name, message in module.DESCRIPTOR.message_types_by_name.items()}


def numbers(message):
    return {field.name: field.number for field in message.DESCRIPTOR.fields}


def test_generated_code_is_up_to_date():
    pytest.importorskip("grpc_tools")
    done = subprocess.run(
        [sys.executable, ROOT / "hack" / "proto" / "generate.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_v1beta1_differs_from_v1_by_the_share_id_only():
    v1, v1beta1 = messages(dra_v1_pb2), messages(dra_v1beta1_pb2)

    def without_share_id(shape):
        if not isinstance(shape, dict):
            return shape
        return {
            name: tuple(map(without_share_id, value)) if isinstance(value, tuple) else without_share_id(value)
            for name, value in shape.items()
            if name != "share_id"
        }

    assert v1 != v1beta1
    assert without_share_id(v1) == v1beta1


def test_both_health_generations_are_the_same():
    assert messages(dra_health_v1_pb2) == messages(dra_health_v1alpha1_pb2)


def test_field_numbers_are_those_of_the_wire():
    assert numbers(dra_v1_pb2.Claim) == {"namespace": 1, "uid": 2, "name": 3}
    assert numbers(dra_v1_pb2.Device) == {
        "request_names": 1,
        "pool_name": 2,
        "device_name": 3,
        "cdi_device_ids": 4,
        "share_id": 5,
    }
    assert numbers(registration_pb2.PluginInfo) == {
        "type": 1,
        "name": 2,
        "endpoint": 3,
        "supported_versions": 4,
    }
    assert numbers(registration_pb2.RegistrationStatus) == {"plugin_registered": 1, "error": 2}
    assert numbers(dra_health_v1_pb2.DeviceHealth) == {
        "device": 1,
        "health": 2,
        "last_updated_time": 3,
        "health_check_timeout_seconds": 4,
        "message": 5,
    }


@pytest.mark.parametrize(
    ("module", "service", "full_name"),
    [
        (dra_v1_pb2, "DRAPlugin", "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"),
        (dra_v1beta1_pb2, "DRAPlugin", "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"),
        (registration_pb2, "Registration", "pluginregistration.Registration"),
        (dra_health_v1_pb2, "DRAResourceHealth", "v1.DRAResourceHealth"),
        (dra_health_v1alpha1_pb2, "DRAResourceHealth", "v1alpha1.DRAResourceHealth"),
    ],
)
def test_service_names_are_those_of_the_wire(module, service, full_name):
    assert module.DESCRIPTOR.services_by_name[service].full_name == full_name


def test_modules_stay_out_of_the_default_pool():
    from google.protobuf import descriptor_pool

    for module in (dra_v1_pb2, dra_health_v1_pb2, registration_pb2):
        with pytest.raises(KeyError):
            descriptor_pool.Default().FindFileByName(module.DESCRIPTOR.name)
