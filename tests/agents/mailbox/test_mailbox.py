"""The agent's one queue."""

from __future__ import annotations

import os
import select
import signal
import threading

from aegis_elastic.agents.mailbox.mailbox import Mailbox, SignalReceived, SignalsToMailbox


def test_events_come_in_order_from_any_thread_and_wake_the_loop() -> None:
    mailbox = Mailbox()
    assert select.select([mailbox], [], [], 0)[0] == []
    thread = threading.Thread(target=lambda: list(map(mailbox.put, range(3))))
    thread.start()
    assert select.select([mailbox], [], [], 10)[0] == [mailbox]
    thread.join()
    assert mailbox.drain() == [0, 1, 2]
    assert select.select([mailbox], [], [], 0)[0] == []
    assert mailbox.drain() == []
    mailbox.close()


def test_more_events_than_the_pipe_has_room_for_wake_ups() -> None:
    mailbox = Mailbox()
    for number in range(100_000):
        mailbox.put(number)
    assert mailbox.drain() == list(range(100_000))
    assert select.select([mailbox], [], [], 0)[0] == []
    mailbox.close()


def test_signals_are_events_while_it_lasts_and_what_they_were_afterwards() -> None:
    mailbox = Mailbox()
    before = signal.getsignal(signal.SIGUSR1)
    with SignalsToMailbox(mailbox, {signal.SIGUSR1, signal.SIGTERM}):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        events = mailbox.drain()
    assert all(isinstance(event, SignalReceived) for event in events)
    assert {event.signum for event in events if isinstance(event, SignalReceived)} == {
        signal.SIGUSR1,
        signal.SIGTERM,
    }
    assert signal.getsignal(signal.SIGUSR1) is before
    mailbox.close()
