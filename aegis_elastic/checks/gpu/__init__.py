"""The gpu check: the state of NVIDIA GPUs, by NVML and the kernel log.

It calls NVML (which may hang on a broken GPU, hence the budget) and reads /proc and /dev/kmsg; no torch, no
CUDA. Start with `check.py`; `memory.py`, `speed.py`, `links.py` and `tenants.py` hold its probes.
"""
