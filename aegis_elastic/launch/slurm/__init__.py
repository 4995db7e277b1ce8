"""Slurm: what a launcher learns of its allocation, and `aegisctl slurm-script`.

It reads SLURM_* variables and calls `scontrol` once; it imports no other sub-room of `launch`. Start with
`allocation.py`; `script.py` prints a batch script.
"""
