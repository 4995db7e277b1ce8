"""Every decision, as pure functions over values: no clock, socket, file, process or torch.

Standard library and msgspec only; the modules here are the values that all rooms share, and imports between
the rooms point from `protocol` down to `checkpoints`. Start with `model` (what a job's status is) and
`events` (what can happen to it), then `machine`.
"""
