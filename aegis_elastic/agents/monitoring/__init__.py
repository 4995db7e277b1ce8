"""Monitoring: samples of what the ranks use (CPU, memory, GPUs, network), their logs, and the anomalies in
both.

One thread reads /proc, sock_diag and log files; a process of its own reads the GPUs, as NVML may hang. It is
a watcher (`agents.watch.contract`) and imports nothing of `agents` above `watch`. Start with `monitor.py`,
then `samples.py`.
"""
