import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.kubelet.claim_check import check_claims, claim_fault
from dra_driver.model.claim import ClaimRef
from tests.fakes.tables import tabled
from tests.kubelet.support import claim

GOOD_UID = "0a1b2c3d-1111-2222-3333-444455556666"


@pytest.mark.parametrize("uid", [GOOD_UID, "uid-1", "a", "0123456789abcdef" * 2, "A_b.c", "u" * 128])
def test_uids_of_every_kind_are_accepted(uid):
    assert claim_fault(claim(uid)) is None


@tabled("uid")
def test_unsafe_uid_gets_one_printable_sentence(uid):
    fault = claim_fault(claim(uid))
    assert fault
    assert fault.isprintable()
    assert len(fault) < 300


@pytest.mark.parametrize("name", ["", "a/b", "..", "a..b", "A", "a_b", "n" * 254, "a\n", ".a", "a."])
def test_name_must_be_a_subdomain(name):
    assert "claim name" in claim_fault(claim(name=name))


@pytest.mark.parametrize("namespace", ["", "a/b", "..", "a.b", "A", "n" * 64, "a\n"])
def test_namespace_must_be_a_label(namespace):
    assert "claim namespace" in claim_fault(claim(namespace=namespace))


def test_longest_names_are_accepted():
    assert claim_fault(ClaimRef("n" * 63, ".".join(["n" * 62] * 4), GOOD_UID)) is None


def test_claim_named_twice_alike_counts_once():
    checked = check_claims([claim("u1"), claim("u2"), claim("u1")])
    assert [ref.uid for ref in checked.accepted] == ["u1", "u2"]
    assert checked.refused == {}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_uid_for_two_names_is_refused(order):
    refs = [claim("u1", name="a"), claim("u1", name="b")]
    checked = check_claims([refs[order[0]], refs[order[1]], claim("u2")])
    assert [ref.uid for ref in checked.accepted] == ["u2"]
    assert "twice" in checked.refused["u1"]


def test_uid_with_one_bad_name_is_refused_whatever_the_order():
    for refs in ([claim("u1"), claim("u1", name="a/b")], [claim("u1", name="a/b"), claim("u1")]):
        checked = check_claims(refs)
        assert checked.accepted == ()
        assert list(checked.refused) == ["u1"]


@given(st.lists(st.builds(ClaimRef, st.text(max_size=70), st.text(max_size=260), st.text(max_size=140))))
def test_every_uid_is_either_accepted_or_refused_and_accepted_ones_are_safe_names(refs):
    checked = check_claims(refs)
    accepted = [ref.uid for ref in checked.accepted]
    assert sorted([*accepted, *checked.refused]) == sorted({ref.uid for ref in refs})
    for ref in checked.accepted:
        for text in (ref.uid, ref.name, ref.namespace):
            assert text
            assert text.isascii()
            assert not set(text) & set("/\\\0\n ")
            assert ".." not in text
            assert not text.startswith(".")
