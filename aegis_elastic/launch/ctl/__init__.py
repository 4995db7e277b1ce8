"""`aegisctl`: looks at a job or a node and asks a job's master to act.

It reads run directories and cluster records, calls the master over gRPC and starts check processes; of
`launch` it may import `flags`, `slurm` and `screens`. Start with `main.py` (the list of commands), then
`admin_client.py` (one call to a master).
"""
