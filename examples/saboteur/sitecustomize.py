"""For the demo only: SIGUSR1 makes a training process raise, as a bug in it would, unknown to its code."""

import os
import signal


def _raise(_signum: int, _frame: object) -> None:
    raise RuntimeError("injected by the demo")


if "RANK" in os.environ:
    signal.signal(signal.SIGUSR1, _raise)
