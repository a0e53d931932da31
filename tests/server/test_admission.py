"""Which tenants a full server still admits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.params import RequestClass
from neaptide.server.context import Admission
from neaptide.server.http.errors import OverloadedError

ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE


def test_one_tenant_alone_has_the_whole_class() -> None:
    admission = Admission(max_online=8, max_offline=8)
    admission.enter(ONLINE, "one", 8)
    with pytest.raises(OverloadedError):
        admission.enter(ONLINE, "one", 1)
    assert admission.count(ONLINE) == 8


def test_a_tenant_that_has_filled_the_class_leaves_each_other_its_share() -> None:
    admission = Admission(max_online=8, max_offline=8)
    admission.enter(ONLINE, "greedy", 8)
    admission.enter(ONLINE, "second", 4)
    admission.enter(ONLINE, "third", 2)
    for tenant in ("greedy", "second", "third"):
        with pytest.raises(OverloadedError):
            admission.check(ONLINE, tenant)
    assert admission.count(ONLINE) == 14


def test_the_share_is_of_those_that_are_there() -> None:
    admission = Admission(max_online=8, max_offline=8)
    admission.enter(ONLINE, "gone", 2)
    admission.enter(ONLINE, "greedy", 6)
    admission.leave(ONLINE, "gone", 2)
    admission.enter(ONLINE, "greedy", 2)
    admission.enter(ONLINE, "late", 4)


def test_classes_do_not_count_for_one_another() -> None:
    admission = Admission(max_online=1, max_offline=1)
    admission.enter(ONLINE, "one", 1)
    admission.enter(OFFLINE, "one", 1)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=60), st.integers(1, 12))
def test_what_n_tenants_hold_is_bounded(asked: list[tuple[int, int]], limit: int) -> None:
    admission, tenants = Admission(limit, limit), set[int]()
    for tenant, choices in asked:
        try:
            admission.enter(ONLINE, str(tenant), choices)
        except OverloadedError:
            assert admission.count(ONLINE) + choices > limit
        else:
            tenants.add(tenant)
        assert admission.count(ONLINE) <= sum(limit / k for k in range(1, len(tenants) + 1))
