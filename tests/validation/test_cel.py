"""CEL as selectors use it: against cel-python on made-up expressions, and the functions of Kubernetes by table."""

from __future__ import annotations

import re
from typing import Any

import pytest
from celpy import Environment
from celpy.adapter import json_to_cel
from celpy.evaluation import CELEvalError
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import InvalidConfigError
from dra_driver.validation.rules.cel.evaluate import evaluate
from dra_driver.validation.rules.cel.syntax import CelSyntaxError, children, parse, terms
from dra_driver.validation.rules.cel.values import CelError
from dra_driver.validation.rules.selectors import compiled, device_variable, hints

DRIVER = "gpu.nvidia.com"
PLAIN: dict[str, Any] = {
    "device": {"kind": "gpu", "count": 3, "ready": True, "tags": ["a", "b"], "more": {"x": 1}}
}

NUMBERS = st.recursive(
    st.sampled_from(
        ["0", "1", "2", "5", "device.count", "device.more.x", "device.more.nope", "size(device.tags)"]
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/%"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda text: f"(-{text})"),
    ),
    max_leaves=4,
)
ATOMS = st.sampled_from(
    ['"gpu"', "'a'", '""', "device.kind", "device.nope", 'r"a\\b"', '"a\\n\\u0041"', "device.tags[0]"]
)
# cel-python forgets the methods of a string that was put together.
STRINGS = st.one_of(ATOMS, st.tuples(ATOMS, ATOMS).map(lambda t: f"({t[0]} + {t[1]})"))
SIMPLE = st.one_of(
    st.sampled_from(["true", "false", "device.ready", "device.nope", "has(device.kind)", "has(device.nope)"]),
    st.tuples(NUMBERS, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), NUMBERS).map(" ".join),
    st.tuples(STRINGS, st.sampled_from(["==", "!=", "<", ">"]), STRINGS).map(" ".join),
    st.tuples(ATOMS, st.sampled_from(["contains", "startsWith", "endsWith"]), ATOMS).map(
        lambda t: f"{t[0]}.{t[1]}({t[2]})"
    ),
    STRINGS.map(lambda text: f"{text} in device.tags"),
    STRINGS.map(lambda text: f"{text} in [{text}, 'z']"),
    st.tuples(st.sampled_from(["all", "exists"]), STRINGS).map(
        lambda t: f"device.tags.{t[0]}(x, x == {t[1]})"
    ),
    st.sampled_from(["a", "c"]).map(lambda text: f"device.tags.exists_one(x, x == '{text}')"),
    # Errors within map() are no values to cel-python, so && and || of it do not absorb them.
    st.integers(0, 3).map(lambda number: f"device.tags.map(y, size(y) + {number}).exists(z, z > 2)"),
)
BOOLEANS = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["&&", "||"]), inner).map(lambda t: f"({t[0]}) {t[1]} ({t[2]})"),
        inner.map(lambda text: f"!({text})"),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]}) ? ({t[1]}) : ({t[2]})"),
    ),
    max_leaves=4,
)


ENVIRONMENT = Environment()
"""Made once, outside of any example: making it changes the interpreter's recursion limit."""


def theirs(expression: str) -> Any:
    try:
        return bool(ENVIRONMENT.program(ENVIRONMENT.compile(expression)).evaluate(json_to_cel(PLAIN)))
    except CELEvalError:
        return "error"


def ours(expression: str) -> Any:
    try:
        return evaluate(parse(expression), PLAIN)
    except CelError:
        return "error"


@given(BOOLEANS)
def test_expressions_mean_what_they_mean_to_cel_python(expression: str) -> None:
    assert ours(expression) == theirs(expression), expression


@given(st.text(alphabet="device.atrbus[]()\"'<>=&|!?:,+-*/ \n1x{}\\%", max_size=40))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        tree = parse(text)
    except CelSyntaxError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert terms(tree)
        assert all(0 <= part.span[0] <= part.span[1] <= len(text) for part in children(tree))
    assert "\n" not in refusal


DEVICE = device_variable(
    DRIVER,
    {
        "name": "gpu-1",
        "attributes": {
            "type": {"string": "gpu"},
            "productName": {"string": "NVIDIA H100 80GB HBM3"},
            "cudaComputeCapability": {"version": "9.0.0"},
            "driverVersion": {"version": "580.95.5"},
            "index": {"int": 2},
            "migCapable": {"bool": True},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:16"},
        },
        "capacity": {"memory": {"value": "81559Mi"}, "multiprocessors": {"value": "132"}},
    },
)
A, C = f'device.attributes["{DRIVER}"]', f'device.capacity["{DRIVER}"]'


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (f'{C}.memory.compareTo(quantity("64Gi")) >= 0', True),
        (f'{C}.memory.isLessThan(quantity("81559Mi"))', False),
        (f'{C}.memory == quantity("83516416Ki")', True),
        (f'{C}.memory.sub(quantity("559Mi")) == quantity("81000Mi")', True),
        (f'{C}.multiprocessors.asInteger() == 132 && {C}.multiprocessors.sign() == 1', True),
        (f'{A}.cudaComputeCapability.isGreaterThan(semver("8.9.0"))', True),
        (f'{A}.cudaComputeCapability.compareTo(semver("9.0.0-rc.1")) > 0', True),
        (f'{A}.driverVersion.major() == 580 && {A}.driverVersion.patch() == 5', True),
        (f'{A}.cudaComputeCapability == "9.0.0"', False),
        (f'{A}.productName.lowerAscii().matches("h[12]00")', True),
        (f'{A}.productName.split(" ").exists(w, w.startsWith("H100"))', True),
        ('device.attributes["resource.kubernetes.io"].pcieRoot.startsWith("pci")', True),
        ('"x" in device.attributes["nobody.example.com"]', False),
        (f'{A}.?profile.orValue("none") == "none"', True),
        (f'{A}[?"type"].hasValue() && !{A}.?nope.hasValue()', True),
        (f'cel.bind(a, {A}, a.type == "gpu" && a.migCapable)', True),
        (f'{A}.type.includes("gpu")', True),
        ('[0, 1, 2].exists(x, 4 / x == 4) && ![0, 1, 2].all(x, 4 / x == 4)', True),
        (f'false && {A}.nope', False),
        (f'{A}.nope == 1 || {A}.index == 2', True),
        ('isQuantity("3Gi") && !isQuantity("three") && isSemver("1.2.3")', True),
        ("!device.allowMultipleAllocations", True),
    ],
)  # fmt: skip
def test_functions_of_kubernetes(expression: str, expected: bool) -> None:
    assert compiled(expression).matches(DEVICE) is expected


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        (f'{A}.nope == "x"', "no such key: nope"),
        (f'{A}.index == 2 && {A}.index', "&& takes a bool, not a int"),
        (f'{C}.memory > quantity("1Gi")', "> does not take (quantity, quantity)"),
        (f'{A}.cudaComputeCapability.isGreaterThan("8.9.0")', "isGreaterThan() does not take (version, string)"),
        (f'{A}.cudaComputeCapability.isGreaterThan(semver("8.9"))', "'8.9' is no semantic version such as 9.0.0"),
        (f'{A}.index / 0 == 1', "/ does not take (int, int)"),
        (f'{A}.productName', "the expression is a string, not a bool"),
        (f'{A}.productName.matches("(")', "matches() does not take (string, string)"),
        ('[' + '1,' * 9000 + '1].all(x, [' + '1,' * 100 + '1].all(y, x == y))', "longer than 10240 bytes"),
        ('[1].all(a, [1,2,3,4,5,6,7,8,9].map(b, 1).all(c, [1,2,3].all(d, nope)))', "undeclared reference to 'nope'"),
    ],
)  # fmt: skip
def test_errors_are_one_clear_sentence(expression: str, fault: str) -> None:
    with pytest.raises((CelError, InvalidConfigError), match=re.escape(fault)):
        compiled(expression).matches(DEVICE)


def test_nested_macros_cannot_run_for_ever() -> None:
    digits = "[1,2,3,4,5,6,7,8,9,10]"
    expression = "true"
    for name in "abcdefg":
        expression = f"{digits}.all({name}, {expression})"
    with pytest.raises(CelError, match="too expensive"):
        compiled(expression).matches(DEVICE)


def test_too_deep_expressions_are_refused_and_do_not_crash() -> None:
    for deep in (
        "(" * 500 + "true" + ")" * 500,
        "!" * 500 + "true",
        "true ? true : " * 500 + "true",
    ):
        with pytest.raises(InvalidConfigError, match="nested more than"):
            compiled(deep)


def test_long_chains_are_evaluated_or_refused_and_do_not_crash() -> None:
    assert compiled(" && ".join(["true"] * 1000)).matches(DEVICE)
    assert compiled(" || ".join(["false"] * 1000)).why_not(DEVICE).endswith("is false")
    with pytest.raises((CelError, InvalidConfigError), match="too long"):
        compiled(f"{'+'.join(['1'] * 2000)} == 2000").matches(DEVICE)


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ('devices.driver == "x"', "undeclared reference to 'devices' (did you mean device?)"),
        ('device.atributes["a"].b', "undefined field 'device.atributes'; did you mean device.attributes?"),
        ('"a".contain("b")', "undeclared function 'contain'; did you mean contains?"),
        ('device.driver = "x"', "unexpected '=' at character 15; equality is written =="),
        ('device.driver == "x" &&', "the expression ends too early"),
        ("device.driver == 'x", 'unexpected "\'" at character 18'),
        ("device.driver and true", "unexpected 'and'"),
    ],
)
def test_what_does_not_compile_says_where_and_what_was_meant(expression: str, fault: str) -> None:
    with pytest.raises(InvalidConfigError, match=re.escape(fault)):
        compiled(expression)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (f'{A}.type == "gpu" && {C}.memory.compareTo(quantity("100Gi")) >= 0', "memory is 81559Mi, wanted >= 100Gi"),
        (f'{A}.productName.contains("H200")', 'productName is "NVIDIA H100 80GB HBM3", wanted contains("H200")'),
        (f'{A}.cudaComputeCapability.isGreaterThan(semver("9.0.0"))', "cudaComputeCapability is 9.0.0, wanted > 9.0.0"),
        (f'{A}.cudaComputeCapability == "9.0"', 'is 9.0.0, wanted == "9.0" (version against string)'),
        (f'!({A}.migCapable)', "is false"),
        (f'{A}.index in [0, 1]', "2 is not in [0, 1]"),
        (f'{A}.profile == "1g"', "no such key: profile"),
    ],
)  # fmt: skip
def test_why_a_device_does_not_match(expression: str, reason: str) -> None:
    assert reason in compiled(expression).why_not(DEVICE)


@pytest.mark.parametrize(
    ("expression", "hint"),
    [
        (f'{A}.index == 0', "moves when a GPU is drained"),
        (f'{A}.minor == 0', "select by `uuid`"),
        (f'{A}["index"] == 0', "moves when a GPU is drained"),
        (f'{A}.memory == 1', f"memory is a capacity: write {C}.memory"),
        (f'{C}.productName == "x"', f"productName is an attribute: write {A}.productName"),
        (f'{A}.prodctName == "x"', "did you mean productName?"),
        (f'device.attributes["{DRIVER}/type"].x == 1', f'write the domain and the name apart: {A}.x'),
        ('device.attributes["gpu.nvidia.org"].type == "gpu"', "no device has attributes of the domain"),
        (f'{A}.cudaComputeCapability == "9.0"', 'write cudaComputeCapability == semver("9.0.0")'),
        (f'{C}.memory == 80', 'write memory.compareTo(quantity("80")) == 0'),
        (f'"2" == {A}.index', "index is a int and equals no string"),
    ],
)  # fmt: skip
def test_hints_at_what_is_hardly_meant(expression: str, hint: str) -> None:
    assert any(hint in text for text in hints(compiled(expression), DRIVER, [DEVICE]))


def test_ordinary_selectors_get_no_hint() -> None:
    for expression in (f'{A}.type == "gpu"', f'{A}.profile == "1g.10gb"', f"{C}.memory.sign() == 1"):
        assert hints(compiled(expression), DRIVER, [DEVICE]) == []
        assert hints(compiled(expression), DRIVER, []) == []


def bound(first: str, step: str, times: int, last: str = "size(a) > 0") -> str:
    """`a` is made anew from itself so many times."""
    return f"cel.bind(a, {first}, " + f"cel.bind(a, {step}, " * times + last + ")" * (times + 1)


@pytest.mark.parametrize(
    "text",
    [
        bound("'xxxxxxxxxx'", "a+a+a+a+a+a+a+a+a+a", 12),
        bound("'xxxxxxxxxx'", "a.replace('x', a)", 6),
        bound("'x'", "a.replace('', a + a)", 20),
        bound("[1]", "[a, a]", 50),
        bound("[1]", "[a, a]", 50, "string(a) == ''"),
        bound("[1]", "a + a", 50),
        bound("{1: 1}", "{1: a, 2: a}", 50, "a == {}"),
        bound("[1, 2]", "a.map(x, a)", 40),
        bound("99999999999", "a * a", 50, "a > 0"),
        bound("1", "a + a", 57, "cel.bind(b, a * 64, b * 64 > 0)"),
    ],
)
def test_values_that_grow_end_in_an_error_and_not_in_the_memory(text: str) -> None:
    with pytest.raises(CelError, match=r"too expensive|integer overflow"):
        evaluate(parse(text), {})


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*$",
        "((a)|b*)+c",
        "(?:a*)*b",
        "(a?){50}b",
        "(.*)*",
        "a*a*a*a*a*a*a*b",
        "([a-z]+)*$",
        r"(\\w+)+$",
    ],
)
def test_patterns_that_python_would_try_for_ever_are_not_tried(pattern: str) -> None:
    for method in ("matches", "find"):
        with pytest.raises(CelError, match=r"not tried here|too expensive"):
            evaluate(parse(f"'{'a' * 64}!'.{method}('{pattern}')"), {})


@pytest.mark.parametrize(
    "pattern",
    [
        "^NVIDIA .*H100.*$",
        "A100|H100",
        "(A|H)100",
        "(?i)h1[0-9]+",
        "H[^]]+0",
        "[(+*]?H",
        r"\\(*H100",
        "(NVIDIA )?H?100{0}",
    ],
)
def test_usual_patterns_are_tried(pattern: str) -> None:
    assert evaluate(parse(f"'NVIDIA H100 80GB HBM3'.matches('{pattern}')"), {}) is True
