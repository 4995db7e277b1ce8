"""`aegis-master`: a job's control plane as a program of its own, on a host outside of the job.

It takes the flags of `aegis-run`, with `--aegis-plane HOST:PORT` for where it listens and no script; the
nodes are started with the same flags. So the control plane survives the loss of any node of the job.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
from collections.abc import Sequence

from aegis_elastic.agents.mailbox.mailbox import Mailbox, SignalReceived, SignalsToMailbox
from aegis_elastic.control.host import addresses
from aegis_elastic.control.host.errors import LaunchError, UsageError
from aegis_elastic.core.model import Phase
from aegis_elastic.launch import process_one
from aegis_elastic.launch.flags import options
from aegis_elastic.launch.flags.options import Options
from aegis_elastic.launch.launcher import EXIT_JOB_FAILED, Launcher, announce

# aegis-run's parser requires a program to run.
_NO_SCRIPT = ("--no-python", "true")


class StandingMaster(Launcher):
    """Serves the control plane of one job until the job ends."""

    def __init__(self, chosen: Options) -> None:
        """UsageError if the flags don't say where to listen, or that is no address of this host."""
        if chosen.aegis.plane is None:
            raise UsageError("cannot start: give --aegis-plane HOST:PORT, an address of this host")
        super().__init__(chosen, dict(os.environ))
        host = chosen.aegis.plane[0]
        if not addresses.is_ours(addresses.resolve(host)):
            raise UsageError(f"cannot listen on --aegis-plane {host}: that is no address of this host")
        self._serves_plane = True
        self._mailbox = Mailbox()

    def run(self) -> int:
        """Serve until the job has ended or a signal comes: 0 if the job succeeded, 1 if not, 128+N."""
        with SignalsToMailbox(self._mailbox, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}):
            _, failed = self._open_plane()
            if failed or self._plane is None:
                announce(failed)
                return EXIT_JOB_FAILED
            try:
                return self._serve()
            finally:
                self._plane.close()

    def _serve(self) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(self._mailbox, selectors.EVENT_READ)
            while True:
                selector.select()
                for item in self._mailbox.drain():
                    if isinstance(item, SignalReceived):
                        announce(f"ended by {signal.Signals(item.signum).name}; the job goes on without us")
                        return 128 + item.signum
                    announce(f"the job has ended: {item}")
                    return 0 if item == Phase.SUCCEED.value else EXIT_JOB_FAILED

    def _on_ended(self, phase: str) -> None:
        self._mailbox.put(phase)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `aegis-master`; returns the exit code."""
    process_one.serve_as_init()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return StandingMaster(options.parse([*arguments, *_NO_SCRIPT])).run()
    except LaunchError as error:
        sys.stderr.write(f"aegis-master: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
