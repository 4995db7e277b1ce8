"""Bootcheck and the seven checks. They run in a process of their own: `python -m aegis_elastic.checks`.

An agent never calls a check itself: it starts that process, writes one `CheckRequest` and reads
`CheckResult`s. Whatever a broken machine does to a check (hang, crash, never end) then happens there.
"""
