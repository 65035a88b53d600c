"""The generated modules: up to date, on the contract's numbers, apart from other packages' modules."""

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


def test_modules_stay_out_of_the_default_pool():
    from google.protobuf import descriptor_pool

    for module in (dra_v1_pb2, dra_health_v1_pb2, registration_pb2):
        with pytest.raises(KeyError):
            descriptor_pool.Default().FindFileByName(module.DESCRIPTOR.name)
