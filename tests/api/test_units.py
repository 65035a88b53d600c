from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import InvalidConfigError
from dra_driver.model.units import (
    format_bytes,
    format_decimal,
    parse_quantity,
    quantity_bytes,
    same_quantity,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("10", 10), ("+1", 1), ("-1.5", Fraction(-3, 2)), (".5", Fraction(1, 2)), ("5.", 5),
        ("81559Mi", 85520809984), ("1.5Gi", 1610612736), ("1k", 1000), ("1E", 10**18), ("2e3", 2000),
        ("2E-3", Fraction(1, 500)), ("100m", Fraction(1, 10)), ("1u", Fraction(1, 10**6)), ("1n", Fraction(1, 10**9)),
        ("1Ei", 2**60),
    ],
)  # fmt: skip
def test_a_quantity_is_parsed_exactly(text: str, value: int | Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    ["", " 1", "1 ", "1\n", "Mi", "1mi", "1K", "1ki", "1GiB", "1e", "e3", "1e3Gi", "--1", "0x10", "1_000",
     ".", "1.2.3", "\u0661", "nan", "inf", "1e65", "1" * 65],
)  # fmt: skip
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="is no quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (85520809984, "81559Mi"), (10, "10"), (0, "0"), (1023, "1023"), (1000, "1k"), (1024, "1Ki"), (1025, "1025"),
        (-2048, "-2Ki"), (2**70, "1024Ei"), (Fraction(1, 2), "500m"), (Fraction(4097, 2), "2048500m"), (132, "132"),
    ],
)  # fmt: skip
def test_bytes_are_written_as_the_api_server_writes_them(value: int | Fraction, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1000, "1k"), (1500, "1500"), (10**18, "1E"), (10**21, "1000E"), (Fraction(-1, 4), "-250m"),
     (Fraction(1, 3), "333333334n"), (100, "100")],
)  # fmt: skip
def test_decimals_are_written_as_the_api_server_writes_them(value: int | Fraction, text: str) -> None:
    assert format_decimal(value) == text


def test_quantities_are_compared_by_value() -> None:
    assert same_quantity("1Gi", "1024Mi")
    assert not same_quantity("1G", "1Gi")


def test_bytes_are_rounded_up() -> None:
    assert quantity_bytes("1.5") == 2
    assert quantity_bytes("1Ki") == 1024


@given(st.integers(-(2**80), 2**80))
def test_what_is_written_is_read_back_as_the_same_value(value: int) -> None:
    assert parse_quantity(format_bytes(value)) == value
    assert parse_quantity(format_decimal(value)) == value


@given(st.text(alphabet="0123456789.eE+-KMGTPimnuk", max_size=12))
def test_any_text_is_a_quantity_or_refused(text: str) -> None:
    try:
        value = parse_quantity(text)
    except InvalidConfigError:
        return
    assert parse_quantity(format_decimal(value)) >= value or value < 0
