"""Name rules of the API: labels, subdomains, qualified names."""

from __future__ import annotations

import re
import secrets

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_RANDOM = "bcdfghjklmnpqrstvwxz2456789"  # no vowels: no words by accident
_PREFIX_MAX = 58


def generated_name(prefix: str) -> str:
    """A name from `generateName`: the prefix cut to 58 characters and five random ones."""
    return prefix[:_PREFIX_MAX] + "".join(secrets.choice(_RANDOM) for _ in range(5))


def is_subdomain(text: object, most: int = 253) -> bool:
    """DNS subdomain of at most `most` characters."""
    if not isinstance(text, str) or not text or len(text) > most:
        return False
    return all(_LABEL.fullmatch(part) for part in text.split("."))


def is_pool_name(text: object) -> bool:
    """Subdomains joined by slashes, at most 253."""
    if not isinstance(text, str) or not text or len(text) > 253:
        return False
    return all(is_subdomain(part) for part in text.split("/"))


def is_attribute_name(text: object) -> bool:
    """`[domain/]id` with a C identifier of at most 32 and a domain of at most 63."""
    if not isinstance(text, str):
        return False
    domain, slash, identifier = text.rpartition("/")
    if slash and not is_subdomain(domain, 63):
        return False
    return len(identifier) <= 32 and bool(_IDENTIFIER.fullmatch(identifier))


def is_label_key(text: object) -> bool:
    """`[prefix/]name` of labels and taints."""
    if not isinstance(text, str):
        return False
    prefix, slash, name = text.rpartition("/")
    if slash and not is_subdomain(prefix):
        return False
    return 0 < len(name) <= 63 and bool(_QUALIFIED.fullmatch(name))


def is_label_value(text: object) -> bool:
    """At most 63 characters; may be empty."""
    return isinstance(text, str) and (text == "" or (len(text) <= 63 and bool(_QUALIFIED.fullmatch(text))))
