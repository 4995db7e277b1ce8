"""`aegis-run`: the launcher's entry, a drop-in for torchrun."""

from __future__ import annotations

import os
import sys

from aegis_elastic.launch import process_one
from aegis_elastic.worker.environment import set_for_ourselves


def main(argv: list[str] | None = None, *, passes_local_rank: bool = False) -> int:
    """Run a job as the command line says; returns the exit code (see the table in docs/exit-codes.md).

    `passes_local_rank`: the script gets --local-rank=N, as from torch.distributed.launch.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if os.environ.get("AEGIS_OFF"):
        code = _run_stock_launcher(arguments, passes_local_rank)
        if code is not None:
            return code
    process_one.serve_as_init()
    # torch's C++ warns of every store call that times out, which is how we wait.
    # OpenBLAS would start threads at its import, and then the first checks couldn't be forked.
    set_for_ourselves(
        os.environ, TORCH_CPP_LOG_LEVEL="ERROR", GRPC_VERBOSITY="NONE", OPENBLAS_NUM_THREADS="1"
    )
    from aegis_elastic.control.host.errors import LaunchError
    from aegis_elastic.launch import early_start

    # The plane process imports while we import torch, which takes a second or more. After a level 2 restart
    # the plane still runs.
    starting_plane = early_start.start_plane(arguments) if "AEGIS_RENEWED" not in os.environ else None
    checks, blocked, code = None, False, 0
    try:
        from aegis_elastic.agents.checks.forked_process import fork_checks
        from aegis_elastic.launch.flags import options

        parsed = options.parse(arguments, passes_local_rank=passes_local_rank)
        if parsed.torch_args.aegis_explain_flags:
            from aegis_elastic.launch.flags.explain import explain

            print(explain(arguments, parsed, passes_local_rank=passes_local_rank))
            return 0
        # torch is imported, and there is no thread yet.
        checks = fork_checks() if parsed.aegis.bootcheck != "off" else None
        import logging

        from aegis_elastic.launch.launcher import Launcher

        level = parsed.aegis.log_level.upper()
        logging.basicConfig(level=level, format="[aegis] %(levelname)s %(message)s", stream=sys.stderr)
        # asyncio warns at the end of every TLS connection.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        code = Launcher(parsed, dict(os.environ), starting_plane, checks).run()
        blocked = _store_call_is_blocked()
        return code
    except LaunchError as error:
        sys.stderr.write(f"aegis-run: {error}\n")
        return error.exit_code
    finally:
        if starting_plane is not None:
            starting_plane.discard()
        if checks is not None:
            checks.discard()
        if blocked:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _store_call_is_blocked() -> bool:
    """Whether a thread is blocked in torch's C++ on a store whose host is silent. If that answers while the
    interpreter shuts down, the process is aborted, and the exit code would be 134.
    """
    import threading

    from aegis_elastic.agents.peers.peers import THREADS

    return any(thread.name in THREADS for thread in threading.enumerate())


def _run_stock_launcher(arguments: list[str], passes_local_rank: bool) -> int | None:
    """Execute the stock launcher if AEGIS_OFF wants it; None if not, an exit code if that fails."""
    from aegis_elastic.control.host.errors import LaunchError
    from aegis_elastic.launch import stock

    try:
        if stock.is_wanted():
            stock.execute(arguments, passes_local_rank=passes_local_rank)
    except (LaunchError, OSError) as error:
        sys.stderr.write(f"aegis-run: {error}\n")
        return getattr(error, "exit_code", 2)
    return None


if __name__ == "__main__":
    sys.exit(main())
