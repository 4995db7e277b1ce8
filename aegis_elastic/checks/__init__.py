"""The checks of a node: bootcheck, the seven checks, and burn, in a process of their own.

An agent never calls a check: it starts `python -m aegis_elastic.checks`, writes one `CheckRequest` and reads
`CheckResult`s, so that whatever a broken machine does to a check (hang, crash, never end) happens there. Of
this package the checks import only `core`. Start with `__main__.py` (the protocol), then `runner.py` (which
task runs which check).
"""
