"""The command line of `aegis-run`: torch's flags and ours, read, validated and explained.

It reads the command line, PET_* and AEGIS_* variables and the files that they name, and starts nothing; of
`launch` it may import `screens` and `slurm`. Start with `options.py` (`parse` is the whole way), then
`group.py` (the list of our flags).
"""
