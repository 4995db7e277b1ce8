"""The ranks of this node: starting them as torchelastic would, warm spares for them, and what their ends
mean.

Processes are started and ended by the guard process only (`agents.guard`); `torch_seam.py` is the only module
that uses torchelastic's private names, and nothing here has a thread. Start with `rank_group.py` (the ranks
of one incarnation), then `torch_seam.py` and `warm_spares.py`.
"""
