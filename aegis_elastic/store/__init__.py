"""Shared state under one contract: compare-and-swap, watches and leases, in memory, files, JetStream or etcd.

Each store owns its connections, tasks and at most one thread; stores import nothing of ours but the bus's
errors, and optional packages only in their own module. Start with `contract.py`; one test suite
(`tests/store/test_contract.py`) holds all stores to it.
"""
