"""After a failure: from clues, log lines, check findings and clocks to the root cause and the recovery level.

Pure; imports only the models, events and `detection`, no threads and no IO (`signatures.json` is read once).
Start with `evidence.conclude`, which weighs everything; `attribution` decides whose failure it was.
"""
