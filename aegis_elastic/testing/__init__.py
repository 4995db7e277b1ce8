"""Public test tools: `faults` stops agents at chosen points, `netns` makes real hosts on one machine.

They may import everything, start processes and need root for namespaces; the product never imports them.
Start with the module docstrings of `faults.py` and `netns.py`.
"""
