"""The errors of the bus, split by whose fault they are."""


class BusError(Exception):
    """Base of the errors of the bus."""


class BusUnavailable(BusError):
    """The machine's fault: no server, a lost one, or no answer in time. A later attempt can succeed."""


class BusRefused(BusError):
    """The credentials' fault: forged, expired, revoked, or a server that isn't the pinned one. Another
    attempt with the same credentials fails, too.
    """


class BusClosed(BusError):
    """Our own fault: used after `close`."""


class BusUsage(BusError):
    """Our own fault: a bad argument, such as a message that is larger than the server takes."""


class ServerFailed(BusError):
    """The server process could not be started, or ended when it should not have."""
