"""The guard process: the parent of a node's ranks, which sees their deaths and ends what they leave behind.

`guard.py` is a program of the standard library only, run as `python -I -S guard.py` with `processes.py`,
`held.py`, `exiting.py` and `signal_handling.py` as its modules; it forks, signals and reads /proc. Start with
the docstring of `guard.py`; `client.py` is the agent's side, and `orphans.py` ends what is left when a guard
was killed.
"""
