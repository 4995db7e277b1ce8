"""Taking a node from its scheduler and giving it back: Slurm, Kubernetes, a file, or a command of the user's.
Drivers may run programs and call the API server, never raise for what a scheduler answers, and import only
`control.host`. Start with `contract` (what a driver is), then `drivers` (its names) and `isolations`, which
verifies, limits, retries and records.
"""
