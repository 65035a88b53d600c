"""Quantities of Kubernetes: read exactly, written as the API server writes them."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import InvalidConfigError
from dra_driver.model.units import (
    counted,
    format_bytes,
    format_decimal,
    parse_quantity,
    quantity_bytes,
    same_quantity,
)
from tests.fakes.tables import tabled

wide = st.integers(-(2**80), 2**80)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("10", 10), ("+1", 1), ("+3", 3), ("-1.5", Fraction(-3, 2)), (".5", Fraction(1, 2)), ("5.", 5),
        ("81559Mi", 85520809984), ("1.5Gi", 1610612736), ("1.5G", 1_500_000_000), ("1k", 1000), ("-1Ki", -1024),
        ("1E", 10**18), ("1Ei", 2**60), ("2e3", 2000), ("2E3", 2000), ("2E-3", Fraction(1, 500)),
        ("1e-3", Fraction(1, 1000)), ("100m", Fraction(1, 10)), ("500m", Fraction(1, 2)), ("1u", Fraction(1, 10**6)),
        ("1n", Fraction(1, 10**9)),
    ],
)  # fmt: skip
def test_a_quantity_is_parsed_exactly(text: str, value: int | Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    ["", " 1", "1 ", "1\n", "Mi", "1 Mi", "1MiB", "1mi", "1K", "1ki", "1Kii", "1GiB", "1e", "e3", "1e3Gi", "--1",
     "0x10", "1_000", "1,5", ".", "1.2.3", "\u0661", "nan", "inf", "1e65", "1e1000", "1" * 65, "9" * 65],
)  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="is not a quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (85520809984, "81559Mi"), (10, "10"), (0, "0"), (132, "132"), (1000, "1k"), (-1000, "-1k"), (1023, "1023"),
        (1024, "1Ki"), (1025, "1025"), (1500, "1500"), (2000, "2000"), (-2048, "-2Ki"), (2500 << 10, "2500Ki"),
        (2**60, "1Ei"), (2**70, "1024Ei"), (Fraction(1, 2), "500m"), (Fraction(4097, 2), "2048500m"),
    ],
)  # fmt: skip
def test_bytes_are_written_as_the_api_server_writes_them(value: int | Fraction, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (-3, "-3"), (100, "100"), (1000, "1k"), (1500, "1500"), (1_500_000, "1500k"), (10**18, "1E"),
        (10**21, "1000E"), (Fraction(1, 2), "500m"), (Fraction(-1, 4), "-250m"), (Fraction(1, 3), "333333334n"),
        (Fraction(1, 10**10), "1n"), (Fraction(-1, 10**10), "-1n"),
    ],
)  # fmt: skip
def test_decimals_are_written_as_the_api_server_writes_them(value: int | Fraction, text: str) -> None:
    assert format_decimal(value) == text


def test_quantities_are_compared_by_value() -> None:
    assert same_quantity("1Gi", "1024Mi")
    assert not same_quantity("1G", "1Gi")


@given(wide)
def test_whole_numbers_survive_both_forms(value: int) -> None:
    assert parse_quantity(format_bytes(value)) == value
    assert parse_quantity(format_decimal(value)) == value


@given(st.integers(-(10**18), 10**18))
def test_whole_numbers_are_as_many_bytes(value: int) -> None:
    assert quantity_bytes(format_bytes(value)) == value


@given(st.integers(-(10**15), 10**15))
def test_nano_units_survive(nanos: int) -> None:
    value = Fraction(nanos, 10**9)
    assert parse_quantity(format_decimal(value)) == value
    assert parse_quantity(format_bytes(value)) == value


@given(st.integers(-(10**18), 10**18), st.sampled_from(["", "Ki", "Mi", "Gi", "k", "M", "m"]))
def test_same_value_in_another_form_is_the_same_quantity(number: int, suffix: str) -> None:
    text = f"{number}{suffix}"
    assert same_quantity(text, format_bytes(parse_quantity(text)))
    assert same_quantity(text, format_decimal(parse_quantity(text)))


@given(st.fractions(0, 10**9, max_denominator=10**6))
def test_fractions_are_rounded_up_to_bytes(value: Fraction) -> None:
    nanos = -(-value.numerator * 10**9 // value.denominator)
    expected = -(-nanos // 10**9)
    assert quantity_bytes(f"{nanos}n" if nanos else "0") == expected


@given(st.text(alphabet="0123456789.eE+-KMGTPimnuk", max_size=12))
def test_any_text_is_a_quantity_or_refused(text: str) -> None:
    try:
        value = parse_quantity(text)
    except InvalidConfigError:
        return
    assert parse_quantity(format_decimal(value)) >= value or value < 0


@tabled("number", "nouns", "expected")
def test_counted_nouns(number: int, nouns: list[str], expected: str) -> None:
    assert counted(number, *nouns) == expected
