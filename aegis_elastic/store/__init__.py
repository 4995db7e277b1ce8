"""Shared truth: one contract (`contract`), and memory, JetStream and etcd behind it."""
