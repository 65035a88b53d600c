from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import InvalidConfigError
from dra_driver.model.units import format_bytes, format_decimal, parse_quantity, quantity_bytes, same_quantity

wide = st.integers(-(10**18), 10**18)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("81559Mi", 81559 << 20), ("1.5G", 1_500_000_000), ("500m", Fraction(1, 2)), ("2e3", 2000),
        ("2E3", 2000), ("1E", 10**18), ("1Ei", 1 << 60), (".5", Fraction(1, 2)), ("5.", 5), ("-1Ki", -1024),
        ("+3", 3), ("1n", Fraction(1, 10**9)), ("1u", Fraction(1, 10**6)), ("1e-3", Fraction(1, 1000)),
    ],
)  # fmt: skip
def test_quantity_has_its_exact_value(text: str, value: Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Mi",
        "1 Mi",
        "1MiB",
        "1mi",
        "0x10",
        "1e",
        "1e1000",
        "--1",
        "1\n",
        "\u0661",
        "1,5",
        "9" * 65,
        "1Kii",
        "e3",
    ],
)
def test_text_is_refused_when_it_is_no_quantity(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="is no quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [(85520809984, "81559Mi"), (10, "10"), (0, "0"), (1023, "1023"), (1024, "1Ki"), (1500, "1500"),
     (-2048, "-2Ki"), (1 << 60, "1Ei"), (1 << 70, "1024Ei"), (Fraction(1, 2), "500m"), (1000, "1k"),
     (-1000, "-1k"), (2000, "2000"), (2500 << 10, "2500Ki")],
)  # fmt: skip
def test_bytes_have_the_canonical_form(value: int, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1000, "1k"), (Fraction(1, 2), "500m"), (0, "0"), (-3, "-3"), (10**18, "1E"), (1_500_000, "1500k"),
     (Fraction(1, 10**10), "1n"), (Fraction(-1, 10**10), "-1n"), (Fraction(1, 3), "333333334n")],
)  # fmt: skip
def test_decimals_have_the_canonical_form(value: Fraction, text: str) -> None:
    assert format_decimal(value) == text


@given(wide)
def test_whole_numbers_survive_both_forms(value: int) -> None:
    assert parse_quantity(format_bytes(value)) == value
    assert parse_quantity(format_decimal(value)) == value
    assert quantity_bytes(format_bytes(value)) == value


@given(st.integers(-(10**15), 10**15))
def test_nano_units_survive(nanos: int) -> None:
    value = Fraction(nanos, 10**9)
    assert parse_quantity(format_decimal(value)) == value
    assert parse_quantity(format_bytes(value)) == value


@given(wide, st.sampled_from(["", "Ki", "Mi", "Gi", "k", "M", "m"]))
def test_same_value_in_another_form_is_the_same_quantity(number: int, suffix: str) -> None:
    text = f"{number}{suffix}"
    assert same_quantity(text, format_bytes(parse_quantity(text)))
    assert same_quantity(text, format_decimal(parse_quantity(text)))


@given(st.fractions(0, 10**9, max_denominator=10**6))
def test_fractions_are_rounded_up_to_bytes(value: Fraction) -> None:
    nanos = -(-value.numerator * 10**9 // value.denominator)
    expected = -(-nanos // 10**9)
    assert quantity_bytes(f"{nanos}n" if nanos else "0") == expected
