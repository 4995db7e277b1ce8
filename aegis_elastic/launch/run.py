"""`aegis-run`: torchrun's place in a launch script."""

from __future__ import annotations

import os
import sys

from aegis_elastic.launch import process_one
from aegis_elastic.worker.environment import set_for_ourselves


def main(argv: list[str] | None = None, *, passes_local_rank: bool = False) -> int:
    """Run a job as the command line says; returns the exit code (see the table in docs/exit-codes.md).

    `passes_local_rank`: the script gets --local-rank=N, as from torch.distributed.launch.
    """
    words = sys.argv[1:] if argv is None else argv
    if os.environ.get("AEGIS_OFF"):
        code = _stand_aside(words, passes_local_rank)
        if code is not None:
            return code
    process_one.take_duty()
    # torch's C++ warns about every store that waits in vain, which is how we wait.
    # A math library whose threads are made at import would keep us from forking the first checks.
    set_for_ourselves(
        os.environ, TORCH_CPP_LOG_LEVEL="ERROR", GRPC_VERBOSITY="NONE", OPENBLAS_NUM_THREADS="1"
    )
    from aegis_elastic.control.host.errors import LaunchError
    from aegis_elastic.launch import early_start

    # The plane imports its half while we import ours: torch, a second or more. One whom level 2 has executed
    # again has its plane.
    embryo = early_start.start_plane(words) if "AEGIS_RENEWED" not in os.environ else None
    checks, waits, code = None, False, 0
    try:
        from aegis_elastic.agents.checks.forked_process import fork_checks
        from aegis_elastic.launch.flags import options

        parsed = options.parse(words, passes_local_rank=passes_local_rank)
        if parsed.torch_args.aegis_explain_flags:
            from aegis_elastic.launch.flags.explain import explain

            print(explain(words, parsed, passes_local_rank=passes_local_rank))
            return 0
        # torch is here, and no thread yet.
        checks = fork_checks() if parsed.aegis.bootcheck != "off" else None
        import logging

        from aegis_elastic.launch.launcher import Launcher

        level = parsed.aegis.log_level.upper()
        logging.basicConfig(level=level, format="[aegis] %(levelname)s %(message)s", stream=sys.stderr)
        # asyncio warns of what every TLS connection does at its end.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        code = Launcher(parsed, dict(os.environ), embryo, checks).run()
        waits = _waits_in_vain()
        return code
    except LaunchError as error:
        sys.stderr.write(f"aegis-run: {error}\n")
        return error.exit_code
    finally:
        if embryo is not None:
            embryo.discard()
        if checks is not None:
            checks.discard()
        if waits:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _waits_in_vain() -> bool:
    """Whether a thread waits in torch's C++ for a host that has fallen silent. If that answers while the
    interpreter ends, the process is aborted, and 134 is the exit code of the job.
    """
    import threading

    from aegis_elastic.agents.peers.stores import THREADS

    return any(thread.name in THREADS for thread in threading.enumerate())


def _stand_aside(words: list[str], passes_local_rank: bool) -> int | None:
    """Become the stock launcher if that is wanted. Returns only if it isn't (None), or if it can't be."""
    from aegis_elastic.control.host.errors import LaunchError
    from aegis_elastic.launch import stock

    try:
        if stock.asked():
            stock.execute(words, passes_local_rank=passes_local_rank)
    except (LaunchError, OSError) as error:
        sys.stderr.write(f"aegis-run: {error}\n")
        return getattr(error, "exit_code", 2)
    return None


if __name__ == "__main__":
    sys.exit(main())
