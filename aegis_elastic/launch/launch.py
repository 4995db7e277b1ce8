"""`python -m aegis_elastic.launch.launch`: a drop-in for `python -m torch.distributed.launch`.

As there, the script gets `--local-rank=N` as its first argument unless `--use-env` was given.
"""

from __future__ import annotations

import sys

from aegis_elastic.launch import run


def main(argv: list[str] | None = None) -> int:
    """Run a job as the command line says; returns the exit code."""
    return run.main(argv, passes_local_rank=True)


if __name__ == "__main__":
    sys.exit(main())
