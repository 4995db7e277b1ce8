"""Shared truth: one contract (`contract`), and memory, files, JetStream and etcd behind it."""
