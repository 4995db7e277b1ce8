"""The newest message of each subject is never forgotten before the server has it."""

from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.bus import outbox
from aegis_elastic.bus.outbox import Outbox


def drain(box: Outbox) -> list[tuple[str, bytes]]:
    taken = []
    while (waiting := box.take()) is not None:
        taken.append(waiting)
    return taken


def test_only_the_newest_of_a_subject_waits_in_order_of_last_change() -> None:
    box = Outbox()
    for subject, data in [("a", b"1"), ("b", b"1"), ("a", b"2")]:
        box.put(subject, data)
    assert drain(box) == [("b", b"1"), ("a", b"2")]


def test_what_a_ping_confirmed_is_not_sent_again() -> None:
    box = Outbox()
    box.sent("a", b"1")
    box.mark()
    box.sent("b", b"1")
    box.confirm()
    box.lost()
    assert drain(box) == [("b", b"1")]


def test_an_unanswered_ping_confirms_nothing() -> None:
    box = Outbox()
    box.sent("a", b"1")
    box.mark()
    box.sent("a", b"2")
    box.mark()
    box.lost()
    assert drain(box) == [("a", b"2")]


def test_the_number_of_subjects_is_bounded() -> None:
    box = Outbox()
    for n in range(outbox.SUBJECTS_MAX + 3):
        box.put(f"s{n}", b"")
    assert (len(box), box.dropped) == (outbox.SUBJECTS_MAX, 3)
    assert box.take() == ("s3", b"")


steps = st.lists(st.sampled_from(["publish", "mark", "confirm", "lost", "send"]), max_size=40)


@given(steps)
def test_the_newest_is_always_either_confirmed_or_still_there(walk: list[str]) -> None:
    """The dumb twin: follow single message numbers through the same walk."""
    box, newest, on_server, up = Outbox(), 0, 0, True
    pinged: int | None = None
    for step in walk:
        if step == "publish":
            newest += 1
            (box.sent if up else box.put)("s", b"%d" % newest)
        elif step == "mark" and up:
            pinged = newest
            box.mark()
        elif step == "confirm" and up and pinged is not None:
            on_server, pinged = max(on_server, pinged), None
            box.confirm()
        elif step == "lost":
            up, pinged = False, None
            box.lost()
        elif step == "send" and not up:
            up = True
            for subject, data in drain(box):
                assert int(data) == newest, "an older message must never overtake a newer one"
                box.sent(subject, data)
        if newest > on_server:
            assert len(box) >= 1
    box.lost()
    left = drain(box)
    assert left == ([("s", b"%d" % newest)] if newest > on_server else left)
