"""The newest unconfirmed message of each subject, to be sent again after a reconnect."""

# A master of 16,000 workers has one order subject for each; nobody repeats the state of four times as many.
SUBJECTS_MAX = 65_536


class Outbox:
    """Keeps one message a subject, the newest, until the server has confirmed what came before a ping.

    Pure bookkeeping, in this order: `put` what could not be sent, `sent` what was written to a socket; `mark`
    when a ping is sent, `confirm` when it is answered; `lost` when the connection is gone; then `take` what
    to send again.
    """

    def __init__(self) -> None:
        self._unsent: dict[str, bytes] = {}
        self._sent: dict[str, bytes] = {}
        self._marked: dict[str, bytes] = {}
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._unsent) + len(self._sent) + len(self._marked)

    def put(self, subject: str, data: bytes) -> None:
        """Keep a message that could not be sent, in place of an older one; over the limit the oldest is
        dropped.
        """
        self._sent.pop(subject, None)
        self._marked.pop(subject, None)
        self._store(self._unsent, subject, data)

    def sent(self, subject: str, data: bytes) -> None:
        """Keep a message that was written to the socket but may have been lost with it."""
        self._unsent.pop(subject, None)
        self._marked.pop(subject, None)
        self._store(self._sent, subject, data)

    def mark(self) -> None:
        """A ping is sent now: its answer will confirm what was sent so far."""
        for subject, data in self._sent.items():
            self._store(self._marked, subject, data)
        self._sent = {}

    def confirm(self) -> None:
        """The ping was answered."""
        self._marked = {}

    def lost(self) -> None:
        """The connection is gone: all that is unconfirmed must be sent again."""
        unsent: dict[str, bytes] = {}
        for part in (self._marked, self._sent, self._unsent):
            for subject, data in part.items():
                self._store(unsent, subject, data)
        self._unsent, self._sent, self._marked = unsent, {}, {}

    def take(self) -> tuple[str, bytes] | None:
        """Remove and return the message that waits longest, or None; the caller reports it `sent`."""
        for subject in self._unsent:
            return subject, self._unsent.pop(subject)
        return None

    def _store(self, kept: dict[str, bytes], subject: str, data: bytes) -> None:
        kept.pop(subject, None)  # a newer message goes to the end
        if len(kept) >= SUBJECTS_MAX:
            del kept[next(iter(kept))]
            self.dropped += 1
        kept[subject] = data
