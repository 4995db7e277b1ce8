"""The mailbox: the one queue through which other threads and signals reach the agent's loop, and its events.

Nothing here imports another room of `agents` or has a thread; `mailbox.py` owns a pipe and, for as long as
`SignalsToMailbox` is active, the handlers of signals. Start with `events.py`, the list of everything that can
happen to an agent.
"""
