"""Taking a node from its scheduler: one contract (`contract`), and Slurm, Kubernetes, a file and a
command.
"""
