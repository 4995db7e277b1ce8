"""Where the control plane is at this moment, as an agent sees it, and first contact with it.

The plane has a name, and the name leads to another address when the plane's host has been replaced (a pod of
Kubernetes is never the same twice). So the name is looked up at every attempt. What answers there must be the
plane that we know: it shows the same certificate, since that lies in its directory beside the job's record.
Another one, without our record, would order us to begin anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from aegis_elastic.bus.contact import address, first_contact
from aegis_elastic.bus.contact.first_contact import Hello, Place

logger = logging.getLogger(__name__)

LookUp = Callable[[str], tuple[str, ...]]


class PlaneAddress:
    """Everything here blocks; call it from a thread that may wait."""

    def __init__(
        self,
        endpoint: tuple[str, int],
        hello: Callable[[], Hello],
        secret: bytes | None,
        look_up: LookUp = address.look_up,
    ) -> None:
        """`endpoint`: a name or an address, and the port. `hello` is called for every attempt."""
        self._name, self.port = endpoint
        self._hello = hello
        self._secret = secret
        self._look_up = look_up
        # Of the plane that we have joined.
        self.certificate: str | None = None
        # Numeric once it has been looked up.
        self.host = self._name

    def make_contact(self, timeout_s: float) -> Place:
        """Make first contact, or make it again. ContactError as `first_contact.call`."""
        self.moved()
        return first_contact.call(
            self.host, self.port, self._hello(), self._secret, timeout_s, known_pem=self.certificate
        )

    def moved(self) -> bool:
        """Look the name up: whether it leads elsewhere now. If it leads nowhere, the last address stays."""
        try:
            found = self._look_up(self._name)
        except OSError as error:
            logger.debug("cannot look up %s: %s", self._name, error)
            return False
        # A host may have several addresses: it has moved when the one that we use is none of them any more.
        if self.host in found:
            return False
        moved = self.host != self._name
        if moved:
            logger.warning("%s is at %s now, no longer at %s", self._name, found[0], self.host)
        self.host = found[0]
        return moved
