"""Controllers: each watches one matter beside the master and puts events in line; whether anything follows
from them is for `core.machine.step`. They may read reports and transitions, and use stores, the isolation
drivers and asyncio tasks of their own; all calls come from the master's loop and return at once. Start with
`contract` (what a controller is), then `spares`, the smallest; `main` adds them to the master.
"""
