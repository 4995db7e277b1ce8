"""What can go wrong on the bus, split by whose fault it is."""


class BusError(Exception):
    """Base of the errors of the bus."""


class BusUnavailable(BusError):
    """The machine's fault: no server there, it went away, or it did not answer in time. Trying later can
    help.
    """


class BusRefused(BusError):
    """The credentials' fault: forged, expired, revoked, or a server that isn't the pinned one. Trying the
    same credentials again doesn't help."""


class BusClosed(BusError):
    """Our own fault: used after `close`."""


class BusUsage(BusError):
    """Our own fault: a bad argument, such as a message that is larger than the server takes."""


class ServerFailed(BusError):
    """The server process could not be started, or ended when it should not have."""
