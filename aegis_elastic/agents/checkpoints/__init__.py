"""Checkpoints on a node: watching the folders that a training saves to, and keeping the user's saver running.

Both are watchers (`agents.watch.contract`) with a thread each, and import nothing of `agents` above `watch`;
folders are listed and read, never written, and how a complete checkpoint is recognised is in
`core.checkpoints`. Start with `boundary.py`; `saver.py` stands for itself.
"""
