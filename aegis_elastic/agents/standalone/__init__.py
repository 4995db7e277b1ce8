"""Going on without a control plane: for a while, when it is lost, or from the start, when none was found.

What the agents agree on goes through the incarnation's store (`peers`); nothing here stops or starts a rank.
Start with `standalone.py`, which the agent asks; `unreported_ends.py` holds what the master is told later,
and `fallback.py` forms a world without any master.
"""
