"""Running checks of this node: the process that runs them, what is requested of it, and what it found.

A check never runs in the agent's process: it is started here (a new process, or a fork of the launcher) and
its results are read by the agent's loop, without a thread; of `agents` only `peers` and `plane` are imported,
and no check's own code. Start with `runner.py` (checks of an order), then `process.py` (one run) and
`requests.py`.
"""
