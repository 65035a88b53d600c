"""Build Kubernetes' compiler of device selectors from its Go modules and hold our verdicts against its."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dra_driver.errors import InvalidConfigError
from dra_driver.validation.rules.cel.values import NotJudgedError
from dra_driver.validation.rules.selectors import compiled

HERE = Path(__file__).resolve().parent
BINARY = HERE.parents[1] / "build" / "celcheck" / "kubernetes-cel"
EXPRESSIONS = HERE / "expressions.txt"
BUILD_S = 900


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many expressions both judge alike, how many we do not judge, and a line for each that we judge wrongly."""

    taken: int
    refused: int
    not_judged: int
    differences: tuple[str, ...]


def build() -> Path:
    """The compiler, as a program. Raises: CalledProcessError, FileNotFoundError without Go."""
    BINARY.parent.mkdir(parents=True, exist_ok=True)
    command = ["go", "build", "-trimpath", "-buildvcs=false", "-o", str(BINARY), "."]
    subprocess.run(command, cwd=HERE, check=True, timeout=BUILD_S)
    return BINARY


def fixed() -> list[str]:
    """The expressions that somebody once got wrong, or may."""
    return [line for line in EXPRESSIONS.read_text().splitlines() if line]


def compare(compiler: Path, expressions: Sequence[str]) -> Comparison:
    """Ask both about every expression."""
    asked = "".join(f"{json.dumps(expression)}\n" for expression in expressions)
    answered = subprocess.run([compiler], input=asked, capture_output=True, text=True, check=True)
    refusals = [json.loads(line)["refusal"] for line in answered.stdout.splitlines()]
    taken = refused = not_judged = 0
    differences = []
    for expression, refusal in zip(expressions, refusals, strict=True):
        try:
            compiled(expression)
            ours = ""
        except NotJudgedError:
            not_judged += 1
            continue
        except InvalidConfigError as error:
            ours = str(error)
        if bool(ours) != bool(refusal):
            differences.append(f"{expression}: ours: {ours or 'OK'}; Kubernetes: {refusal or 'OK'}")
        elif ours:
            refused += 1
        else:
            taken += 1
    return Comparison(taken, refused, not_judged, tuple(differences))
