"""Foreign names stay inside one token."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aegis_elastic.bus import subjects
from aegis_elastic.bus.credentials import NKey

anything = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(anything)
@example("a.b")
@example("*")
@example(">")
@example("node 7\t\n")
@example("=2E")
@example("作业")
def test_any_name_becomes_one_token_and_comes_back(name: str) -> None:
    token = subjects.escape(name)
    assert set(token) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-=")
    assert subjects.unescape(token) == name


@given(anything, anything)
def test_different_names_never_share_a_token(one: str, other: str) -> None:
    assert (subjects.escape(one) == subjects.escape(other)) == (one == other)


@given(anything, anything, anything)
def test_a_report_tells_its_worker(ns: str, job: str, worker: str) -> None:
    subject = subjects.report(ns, job, worker)
    assert subject.count(".") == 4
    assert subjects.worker_of_report(subject) == worker


def test_ordinary_names_are_readable() -> None:
    assert subjects.order_all("ml", "llama-7b") == "aegis.ml.llama-7b.order.all"
    assert subjects.order("ml", "llama-7b", "node_1") == "aegis.ml.llama-7b.order.node_1"
    assert (
        subjects.report("ml", "llama-7b", "host.example.org")
        == "aegis.ml.llama-7b.report.host=2Eexample=2Eorg"
    )
    assert subjects.report_wildcard("ml", "llama-7b") == "aegis.ml.llama-7b.report.*"


def test_a_worker_called_all_is_not_everybody() -> None:
    assert subjects.order("ml", "j", "all") != subjects.order_all("ml", "j")
    assert subjects.worker_of_report(subjects.report("ml", "j", "all")) == "all"


@pytest.mark.parametrize("junk", ["", "a.b", "=", "=2", "=zz", "=41", "=2e", "a b", "=FF"])
def test_what_escape_never_makes_is_refused(junk: str) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        subjects.unescape(junk)


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="empty name"):
        subjects.order("ml", "", "w")


@pytest.mark.parametrize(
    "subject", ["", "aegis.a.b.order.w", "aegis.a.b.report", "aegis.a.b.report.w.x", "x.a.b.report.w"]
)
def test_other_subjects_are_no_reports(subject: str) -> None:
    with pytest.raises(ValueError, match="cannot tell"):
        subjects.worker_of_report(subject)


def test_only_user_inboxes_are_inboxes() -> None:
    key = NKey.generate().public
    assert subjects.is_inbox(subjects.inbox(key) + ".1.2")
    for other in (
        "",
        subjects.inbox(key),
        "_INBOX.x.y",
        "aegis.a.b.order.all",
        "$JS.API.INFO",
        f"_INBOX{key}.x",
    ):
        assert not subjects.is_inbox(other), other
    with pytest.raises(ValueError, match="cannot name an inbox"):
        subjects.inbox("A" + key[1:])
