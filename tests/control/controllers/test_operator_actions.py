"""What an operator asks of a real master: it is in the journal, and counts as the real thing does."""

from __future__ import annotations

import pytest

from aegis_elastic.agents.mailbox.events import ReexecRequested
from aegis_elastic.control.host.errors import AdminRefused
from aegis_elastic.core.accounts import journal
from aegis_elastic.core.events import Finding, Mark
from aegis_elastic.core.protocol.messages import MessageType
from aegis_elastic.core.protocol.orders import Action, Order
from tests.control.conftest import Hold, MakeAgent
from tests.control.planes import wait_for


def test_a_restart_that_is_asked_for_counts_and_is_refused_at_the_limit(hold: Hold, agent: MakeAgent) -> None:
    plane = hold(spec={"max_retry": 1})
    worker = agent(plane, "a")
    with pytest.raises(AdminRefused, match="no worker has ranks yet"):
        plane.ask("restart")
    worker.run()
    assert "manual: a new driver" in plane.ask("restart", worker="a", reason="a new driver")["said"]
    worker.obey(Action.TROUBLESHOOT)
    assert worker.obey(Action.RUN).incarnation == 2
    assert plane.ask()["recoverCount"] == 1
    with pytest.raises(AdminRefused, match="all 1 retries are used up"):
        plane.ask("restart")
    with pytest.raises(AdminRefused, match="no worker called 'b' has ranks; there are a"):
        plane.ask("restart", worker="b")
    assert journal.replay(plane.journal()).ok


def test_marks_are_made_shown_and_taken_back_and_kill_nothing(hold: Hold, agent: MakeAgent) -> None:
    plane = hold()
    worker = agent(plane, "a")
    worker.run()
    plane.ask("mark", worker="a", verdict="frozen", reason="seen on the rack")
    marks = wait_for(lambda: plane.ask()["plane"].get("marks"), "a mark")
    assert [(mark["nodeName"], mark["verdict"], mark["reason"]) for mark in marks] == [
        ("a", "frozen", "seen on the rack")
    ]
    with pytest.raises(AdminRefused, match="marked already"):
        plane.ask("mark", worker="a", verdict="frozen")
    with pytest.raises(AdminRefused, match="'sleepy' is no verdict; there are frozen"):
        plane.ask("mark", worker="a", verdict="sleepy")
    plane.ask("unmark", worker="a", verdict="frozen")
    wait_for(lambda: "marks" not in plane.ask()["plane"], "no mark")
    assert plane.ask()["phase"] == "RunCommand"
    assert [line.transition for line in plane.journal() if isinstance(line.event, Mark)] == ["marked"]
    assert journal.replay(plane.journal()).ok


def test_an_eviction_that_is_asked_for_waits_for_a_checkpoint(hold: Hold, agent: MakeAgent) -> None:
    plane = hold()
    worker = agent(plane, "a")
    worker.run()
    assert "after the next checkpoint" in plane.ask("evict", worker="a", reason="its fan is loud")["said"]
    (mark,) = wait_for(lambda: plane.ask()["plane"].get("marks"), "a mark")
    assert (mark["verdict"], mark["evict"]) == ("slow", "its fan is loud")
    with pytest.raises(AdminRefused, match="allowed already"):
        plane.ask("evict", worker="a")
    assert plane.ask()["phase"] == "RunCommand"


def test_who_missed_its_directive_to_renew_itself_gets_it_again(hold: Hold, agent: MakeAgent) -> None:
    """The directive may be lost; then its process goes on reporting under a uid that is over."""
    plane = hold(spec={"troubleshoot": "full"})
    worker = agent(plane, "a")
    worker.run()
    worker.say(MessageType.ERROR, reason="exit code 1")
    worker.wait(Order, lambda order: order.action is Action.TROUBLESHOOT)
    worker.say(MessageType.FINISH, findings=(Finding("runtime", "runtime.broken", "software"),))
    requested = worker.wait(ReexecRequested)
    assert requested.reason == "runtime.broken"
    # Its heartbeats go on: the master doesn't take it back, but says so again.
    assert worker.wait(ReexecRequested) == requested
    # The clean process: the same name, another life.
    agent(plane, "a").obey(Action.STOP)
    assert journal.replay(plane.journal()).ok
