"""The checks of the host: storage, runtime, RDMA adapters, and the state of training processes.

They read /proc, /sys and the kernel log, write small files where training writes, and run py-spy; no torch.
Each module with a function `check` is one check: start with `io.py`.
"""
