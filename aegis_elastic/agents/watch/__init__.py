"""Watchers: what observes this node's ranks beside the agent's loop (steps, stacks, checks for an operator).

Each watcher owns its thread, reads /proc, the ranks' slots in shared memory and the output of check
processes, and imports nothing of `agents` above `checks`. Start with `contract.py` (the `Watcher` protocol
and `Watchers`, which calls them), then `progress.py`.
"""
