"""The collective checks: process groups among ranks or nodes, to find broken nodes, broken links and slow
nodes.

They import torch and talk to other nodes over a TCPStore, each in a child process with a budget. Start with
`allreduce.py` (the two checks); `process_group.py` forms a group, `rounds.py` locates what breaks it.
"""
