"""Rules for automatic actions: the storm guard, correlated failures, node records, missing workers, verdicts.

Pure: records, findings and `now` in, decisions with reasons out; imports models, events and `diagnosis`, no
threads and no IO. Start with the rules at the top of `storm_guard`; `verdicts.TABLE` says who acts on what.
"""
