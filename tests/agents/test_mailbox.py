"""The agent's one queue."""

from __future__ import annotations

import os
import select
import signal
import threading

from aegis_elastic.agents.mailbox import Inbox, Signalled, SignalsToInbox


def test_items_come_in_order_from_any_thread_and_wake_the_loop() -> None:
    inbox = Inbox()
    assert select.select([inbox], [], [], 0)[0] == []
    thread = threading.Thread(target=lambda: list(map(inbox.put, range(3))))
    thread.start()
    assert select.select([inbox], [], [], 10)[0] == [inbox]
    thread.join()
    assert inbox.drain() == [0, 1, 2]
    assert select.select([inbox], [], [], 0)[0] == []
    assert inbox.drain() == []
    inbox.close()


def test_more_items_than_the_pipe_has_room_for_wake_ups() -> None:
    inbox = Inbox()
    for number in range(100_000):
        inbox.put(number)
    assert inbox.drain() == list(range(100_000))
    assert select.select([inbox], [], [], 0)[0] == []
    inbox.close()


def test_signals_are_items_while_it_lasts_and_what_they_were_afterwards() -> None:
    inbox = Inbox()
    before = signal.getsignal(signal.SIGUSR1)
    with SignalsToInbox(inbox, {signal.SIGUSR1, signal.SIGTERM}):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        items = inbox.drain()
    assert all(isinstance(item, Signalled) for item in items)
    assert {item.signum for item in items if isinstance(item, Signalled)} == {signal.SIGUSR1, signal.SIGTERM}
    assert signal.getsignal(signal.SIGUSR1) is before
    inbox.close()
