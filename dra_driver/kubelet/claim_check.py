"""Checks claim references from the wire before anything uses them, above all in paths."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dra_driver.model.claim import ClaimRef

_MAX_UID_CHARS = 128
_MAX_NAMESPACE_CHARS = 63
_MAX_NAME_CHARS = 253
_MAX_SHOWN_CHARS = 64

_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_UID = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_NAMESPACE = re.compile(_LABEL)
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True, slots=True)
class CheckedClaims:
    """`accepted` has each claim once, in the order of the request; `refused` has the reason by UID."""

    accepted: tuple[ClaimRef, ...]
    refused: dict[str, str]


def check_claims(claims: Iterable[ClaimRef]) -> CheckedClaims:
    """Sorts the claims of one request into accepted and refused ones.

    A claim that is named twice in the same way counts once. A UID with two names is refused.
    """
    accepted: dict[str, ClaimRef] = {}
    refused: dict[str, str] = {}
    for ref in claims:
        known = accepted.get(ref.uid)
        fault = claim_fault(ref)
        if fault is None and known is not None and known != ref:
            fault = (
                f"claim UID {ref.uid} is named twice in one request, as {known.namespace}/{known.name} "
                f"and as {ref.namespace}/{ref.name}"
            )
        if fault is not None:
            refused.setdefault(ref.uid, fault)
        else:
            accepted[ref.uid] = ref
    return CheckedClaims(tuple(ref for uid, ref in accepted.items() if uid not in refused), refused)


def claim_fault(ref: ClaimRef) -> str | None:
    """What is wrong with the reference, in one sentence; None if it is valid."""
    if not ref.uid:
        return f"claim {_shown(f'{ref.namespace}/{ref.name}')} has no UID"
    if len(ref.uid) > _MAX_UID_CHARS or not _UID.fullmatch(ref.uid) or ".." in ref.uid:
        return (
            f"claim UID {_shown(ref.uid)} is not valid: it must have at most {_MAX_UID_CHARS} letters and "
            f"digits, with single '-', '_' or '.' between them"
        )
    if len(ref.namespace) > _MAX_NAMESPACE_CHARS or not _NAMESPACE.fullmatch(ref.namespace):
        return f"claim namespace {_shown(ref.namespace)} is not valid: it must be a DNS label"
    if len(ref.name) > _MAX_NAME_CHARS or not _NAME.fullmatch(ref.name):
        return f"claim name {_shown(ref.name)} is not valid: it must be a DNS subdomain"
    return None


def _shown(text: str) -> str:
    """The text in quotes, with control characters escaped, cut if it is long."""
    return repr(text) if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]!r}…"
