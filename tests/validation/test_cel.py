"""CEL of selectors on a device, its faults in words, and what is not judged. tests/e2e asks Kubernetes' compiler."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import InvalidConfigError
from dra_driver.validation.documents import read_documents
from dra_driver.validation.manifest_check import check_documents
from dra_driver.validation.rules.cel import libraries, program
from dra_driver.validation.rules.cel.syntax import CelSyntaxError, children, parse, terms
from dra_driver.validation.rules.cel.values import CelError, NotJudgedError
from dra_driver.validation.rules.selectors import compiled, device_variable, hints

DRIVER = "gpu.nvidia.com"


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
        (f'{C}.multiprocessors.asInteger() == 132 && sign({C}.multiprocessors) == 1', True),
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
        (f'{A}.index == 2 && {A}.index', "No matching overloads found : _&&_"),
        (f'{C}.memory > quantity("1Gi")', "'_>_' applied to '(kubernetes.Quantity, kubernetes.Quantity)'"),
        (f'{A}.cudaComputeCapability.isGreaterThan("8.9.0")', "'isGreaterThan' applied to '(any, string)'"),
        (f'{A}.cudaComputeCapability.isGreaterThan(semver("8.9"))', "'8.9' is no semantic version such as 9.0.0"),
        (f'{A}.index / 0 == 1', "divide by zero"),
        (f'{A}.productName', "the expression is a string, not a bool"),
        (f'{A}.productName.matches("(")', "the pattern '(' is not one of RE2: missing ): ("),
        ('[' + '1,' * 9000 + '1].all(x, [' + '1,' * 100 + '1].all(y, x == y))', "longer than 10240 bytes"),
        ('[1].all(a, [1,2,3,4,5,6,7,8,9].map(b, 1).all(c, [1,2,3].all(d, nope)))', "undeclared reference to 'nope'"),
    ],
)  # fmt: skip
def test_errors_are_one_clear_sentence(expression: str, fault: str) -> None:
    with pytest.raises((CelError, InvalidConfigError), match=re.escape(fault)):
        compiled(expression).matches(DEVICE)


DIGITS = "[1,2,3,4,5,6,7,8,9,10]"


@pytest.mark.parametrize(
    "expression",
    [
        "".join(f"{DIGITS}.all({name}, " for name in "abcdefg") + "true" + ")" * 7,
        "(" * 500 + "true" + ")" * 500,
        "!" * 500 + "true",
        "true ? true : " * 500 + "true",
        f"{'+'.join(['1'] * 2000)} == 2000",
        f"cel.bind(a, 'xxxxxxxx', {'cel.bind(a, a+a+a+a, ' * 9}a == ''{')' * 10}",
        f'{A}.productName.find("(a)(b)").replace("a", "b").split("").map(x, x + x).join(",") == ""',
        f'{A}.type.includes("gpu")',
        'ip("10.0.0.1").isLoopback()',
        "[1, 2].sum() == 3",
        "device == device",
        "has(device.driver)",
        "[1].exists(device, device > 0)",
        "[1].exists_one(i, v, v > 0)",
        "kubernetes.Quantity{} == quantity('1')",
        "device.`driver` == 'x'",
        f"{C}.memory != {C}.memory",
        "'%q'.format([1]) == ''",
    ],
)
def test_what_nobody_here_can_say_is_not_judged(expression: str) -> None:
    with pytest.raises(NotJudgedError):
        compiled(expression)


def test_long_chains_are_evaluated() -> None:
    assert compiled(" && ".join(["true"] * 1000)).matches(DEVICE)
    assert compiled(" || ".join(["false"] * 1000)).why_not(DEVICE).endswith("is false")


@pytest.fixture
def without_cel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    made = (
        libraries._cel, libraries.compiler, libraries.runtime, libraries._texts, libraries._text_expression,
        program.program, compiled,
    )  # fmt: skip
    for function in made:
        function.cache_clear()
    yield
    for function in made:
        function.cache_clear()


@pytest.mark.usefixtures("without_cel")
@pytest.mark.parametrize(
    "expression", ['device.driver == "x"', "device.driver == 5", 'device.driver == "x" &&', "'"]
)
def test_without_the_library_nothing_is_judged(expression: str) -> None:
    with pytest.raises(NotJudgedError, match=re.escape("pip install 'gpu-dra-driver[cel]'")):
        compiled(expression)


@pytest.mark.usefixtures("without_cel")
def test_a_claim_is_not_judged_without_the_library(tmp_path: Path) -> None:
    path = tmp_path / "claim.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": "claim"},
                "spec": {
                    "devices": {
                        "requests": [
                            {
                                "name": "gpu",
                                "exactly": {
                                    "deviceClassName": "gpu.nvidia.com",
                                    "selectors": [{"cel": {"expression": "nonsense =="}}],
                                },
                            }
                        ]
                    }
                },
            }
        )
    )
    [report] = check_documents(list(read_documents([str(path)])), DRIVER).reports
    assert report.verdict == "not judged"
    assert report.faults == []
    assert any("gpu-dra-driver[cel]" in note for note in report.notes)


def test_patterns_are_those_of_re2() -> None:
    text = "'NVIDIA H100 80GB HBM3'"
    assert compiled(f"{text}.matches('^NVIDIA .*H100.*$') && {text}.find('H1[0-9]+') == 'H100'").matches(
        DEVICE
    )
    assert compiled(f"{text}.findAll('[0-9]+') == ['100', '80', '3']").matches(DEVICE)
    # Python's own would try this for ever.
    assert not compiled(f"'{'a' * 64}!'.matches('(a+)+$')").matches(DEVICE)


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ('devices.driver == "x"', "undeclared reference to 'devices.driver'; did you mean device?"),
        ('device.atributes["a"].b', "undefined field 'device.atributes'; did you mean device.attributes?"),
        ('"a".contain("b")', "undeclared reference to 'contain'; did you mean contains?"),
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
    assert any(hint in text for text in hints(expression, DRIVER, [DEVICE]))


def test_ordinary_selectors_get_no_hint() -> None:
    for expression in (f'{A}.type == "gpu"', f'{A}.profile == "1g.10gb"', f"{C}.memory.sign() == 1"):
        assert hints(expression, DRIVER, [DEVICE]) == []
        assert hints(expression, DRIVER, []) == []
