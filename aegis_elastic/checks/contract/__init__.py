"""What agents and checks share: requests, budgets, burn's protocol, and how a check runs as a child process.

Only `child_process.py` forks and waits; the rest is values. Nothing here imports torch, NVML or another
sub-room. Start with `request.py`; `child_process.py` explains what becomes of a check that hangs or crashes.
"""
