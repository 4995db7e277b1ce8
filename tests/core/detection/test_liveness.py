"""Lost, unreachable or merely suspected: what the master makes of silence and closed connections."""

from __future__ import annotations

from typing import Any

from aegis_elastic.core.detection.liveness import AWAY, CLEAN_CLOSE, STALE_CLOSE, Contact, Patience, judge

PATIENCE = Patience()


def contact(worker: str, heard_s: float = 0.0, **more: Any) -> Contact:
    return Contact(worker, f"uid-{worker}", heard_s, **more)


def lost(contacts: list[Contact], now_s: float) -> set[str]:
    return {worker for worker, _, _ in judge(contacts, now_s, PATIENCE).lost}


def heard(*workers: str, at_s: float) -> list[Contact]:
    return [contact(worker, at_s) for worker in workers]


def test_everybody_is_heard_and_nobody_is_missed() -> None:
    judgement = judge(heard("a", "b", "c", at_s=10.0), 11.0, PATIENCE)
    assert judgement == ((), frozenset(), frozenset(), 10.0 + PATIENCE.silent_s)


def test_a_process_that_ended_closes_its_connection_and_is_lost_a_moment_later() -> None:
    contacts = [*heard("a", "b", at_s=10.0), contact("c", 9.5, closed_s=10.0, closed_why=CLEAN_CLOSE)]
    before = judge(contacts, 10.5, PATIENCE)
    assert (before.lost, before.suspects, before.next_s) == ((), frozenset("c"), 11.0)
    after = judge(contacts, 11.0, PATIENCE)
    assert after.lost == (("c", "uid-c", "its connection is gone: Client Closed"),)
    # What its peers tell of it afterwards is what they saw before.
    seen = [*contacts[:2], contacts[2]._replace(peers_saw_s=10.9)]
    assert lost(seen, 11.0) == {"c"}


def test_one_that_comes_back_in_time_was_never_away() -> None:
    contacts = [*heard("a", "b", at_s=10.0), contact("c", 10.4, closed_s=10.0, closed_why=CLEAN_CLOSE)]
    assert judge(contacts, 20.0, PATIENCE)[:3] == ((), frozenset(), frozenset())


def test_cut_off_from_the_bus_but_seen_by_its_peers_it_is_unreachable_and_never_lost() -> None:
    for now_s in range(15, 200):
        cut_off = contact("c", 0.0, peers_saw_s=now_s - 1.0, closed_s=15.0, closed_why=STALE_CLOSE)
        judgement = judge([*heard("a", "b", at_s=float(now_s)), cut_off], float(now_s), PATIENCE)
        assert judgement.lost == ()
        assert judgement.unreachable == frozenset("c" if now_s >= PATIENCE.silent_s else "")


def test_a_node_without_power_is_silent_on_both_ways_and_lost() -> None:
    dead = contact("c", 0.0, peers_saw_s=0.0, closed_s=15.0, closed_why=STALE_CLOSE)
    others = heard("a", "b", at_s=19.0)
    assert lost([*others, dead], PATIENCE.silent_s) == {"c"}
    # Its connection need not even be known to be closed.
    silent = contact("c", 0.0, peers_saw_s=3.0)
    assert lost([*others, silent], 31.0) == set()
    assert judge([*others, silent], 31.0, PATIENCE).unreachable == frozenset("c")
    assert lost([*others, silent], 33.0) == {"c"}


def test_an_agent_that_is_stopped_for_a_while_is_suspected_but_not_lost_before_the_timeout() -> None:
    """The bus closes its connection after two pings; its ranks know nothing of that and train on."""
    stopped = contact("c", 1.0, peers_saw_s=1.0, closed_s=12.0, closed_why=STALE_CLOSE)
    for now_s in range(13, 31):
        judgement = judge([*heard("a", "b", at_s=now_s), stopped], now_s, PATIENCE)
        assert judgement[:2] == ((), frozenset("c"))
    assert lost([*heard("a", "b", at_s=31.0), stopped], 31.0) == {"c"}
    back = stopped._replace(heard_s=25.0)
    assert judge([*heard("a", "b", at_s=31.0), back], 31.0, PATIENCE)[:3] == ((), frozenset(), frozenset())


def test_a_reset_connection_of_a_dead_process_is_not_excused_by_what_its_peers_saw_just_before() -> None:
    dead = contact("c", 9.8, peers_saw_s=11.0, closed_s=10.0, closed_why="Read Error")
    assert lost([*heard("a", "b", at_s=14.0), dead], 14.0) == {"c"}


def test_most_of_them_silent_together_is_trouble_of_the_plane() -> None:
    silent = [contact(worker, 0.0) for worker in "ab"]
    judgement = judge([*silent, contact("c", 100.0)], 100.0, PATIENCE)
    assert (judgement.lost, judgement.unreachable) == ((), frozenset("ab"))
    assert lost([contact("only", 0.0)], 1000.0) == set()


def test_most_connections_gone_together_get_the_time_to_come_back() -> None:
    gone = [contact(worker, 9.0, closed_s=10.0, closed_why=CLEAN_CLOSE) for worker in "ab"]
    contacts = [*gone, contact("c", 19.0)]
    assert judge(contacts, 19.0, PATIENCE)[:2] == ((), frozenset("ab"))
    assert lost(contacts, 20.0) == {"a", "b"}


def test_who_comes_back_first_does_not_make_the_others_late() -> None:
    """A bus that hung closes both connections of a job of two; one is back at once, the other later."""
    both = [
        contact(worker, 9.0, closed_s=10.0 + late_s, closed_why=CLEAN_CLOSE)
        for worker, late_s in zip("ab", (0, 1.2), strict=True)
    ]
    contacts = [both[0]._replace(heard_s=11.0), both[1]]
    assert lost(contacts, 14.0) == set()
    assert lost(contacts, 10.0 + 1.2 + PATIENCE.away_s) == {"b"}
    # Seen over the training network meanwhile, it is merely late.
    seen = [contacts[0], both[1]._replace(peers_saw_s=14.0)]
    assert lost(seen, 22.0) == set()


def test_after_its_own_restart_a_master_misses_only_who_is_late_when_others_have_come() -> None:
    away = [contact(worker, 0.0, closed_s=0.0, closed_why=AWAY) for worker in "abc"]
    assert judge(away, 500.0, PATIENCE).lost == ()
    back = [away[0]._replace(heard_s=5.0), away[1]._replace(heard_s=5.5), away[2]]
    assert lost(back, 9.0) == set()
    assert lost(back, 10.0) == {"c"}


def test_silent_on_every_way_while_steps_advance_it_is_unreachable_until_they_stop() -> None:
    """Its store may be out of reach, too: ranks that step together are the third way."""
    contacts = [contact("a", 0.0), *heard("b", "c", at_s=340.0)]
    judged = judge(contacts, 340.0, PATIENCE, moved_s=339.0)
    assert (judged.lost, judged.unreachable) == ((), frozenset({"a"}))
    assert judge(contacts, 340.0, PATIENCE, moved_s=340.0 - PATIENCE.silent_s).lost


def test_a_stale_connection_is_no_end_while_steps_advance_but_a_process_that_closed_it_has_ended() -> None:
    def closed(why: str) -> list[Contact]:
        return [contact("a", 0.0, closed_s=25.0, closed_why=why), *heard("b", "c", at_s=60.0)]

    assert not judge(closed(STALE_CLOSE), 60.0, PATIENCE, moved_s=59.0).lost
    assert judge(closed(CLEAN_CLOSE), 60.0, PATIENCE, moved_s=59.0).lost
