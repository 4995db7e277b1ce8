"""`aegisctl slurm-script`: prints a batch script for Slurm with the given nodes, spares and GPUs.

`deploy/slurm/aegis.sbatch` is what it prints by default; a test compares them.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable

from rich.console import Console

from aegis_elastic.control.host.errors import UsageError

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={all_nodes}    # {nodes} train{spares_text}
#SBATCH --ntasks-per-node=1
{resources}#SBATCH --no-kill    # a lost node doesn't end the job: what is left of it recovers
#SBATCH --requeue    # exit code 75 puts it back into the queue (RequeueExit=75 in slurm.conf)
#SBATCH --signal={signal}    # the ranks hear it before the time is up: for a last checkpoint
#SBATCH --open-mode=append    # a requeued job goes on with its output
#SBATCH --output={name}-%j.out

# Everything that outlives a node or an allocation: accounts, taints, the join secret. All nodes must see it.
export AEGIS_STATE_DIR=${{AEGIS_STATE_DIR:-{shared}}}
export XDG_STATE_HOME=$AEGIS_STATE_DIR/jobs
mkdir -p -m 700 "$AEGIS_STATE_DIR" "$XDG_STATE_HOME"

# One step for all tries: recovery happens inside of it. The nodes meet at the first host of the allocation.
# --no-kill: srun, too, survives a lost node. --wait=0, --kill-on-bad-exit=0: one task's end is not all's.
srun --no-kill --kill-on-bad-exit=0 --wait=0 \\
  aegis-run --nnodes {nnodes} --nproc-per-node {ranks} --max-restarts {max_restarts}{isolation} \\
  {command}
"""


def make(
    *,
    nodes: int,
    least: int,
    spares: int,
    gpus: int,
    ranks: int,
    time: str,
    partition: str,
    name: str,
    shared: str,
    max_restarts: int,
    drain: bool,
    signal_s: int,
    command: list[str],
) -> str:
    """The script. `gpus` 0: none are asked for. `least` nodes are enough to go on with."""
    resources = "".join(
        f"#SBATCH --{flag}\n"
        for flag in (
            f"gpus-per-node={gpus}" if gpus else "",
            f"partition={partition}" if partition else "",
            f"time={time}" if time else "",
        )
        if flag
    )
    return _SCRIPT.format(
        name=name,
        nodes=nodes,
        all_nodes=nodes + spares,
        spares_text=f", {spares} wait as spares" if spares else "",
        resources=resources,
        # To the steps only (no B:): a signalled batch script would end, and the job with it.
        signal=f"USR1@{signal_s}",
        shared=shlex.quote(shared) if not shared.startswith("$") else shared,
        nnodes=nodes if least == nodes else f"{least}:{nodes}",
        ranks=ranks,
        max_restarts=max_restarts,
        isolation=" --aegis-isolation slurm" if drain else "",
        command=" ".join(shlex.quote(word) for word in command),
    )


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `slurm-script` to `aegisctl`."""
    about = "Print a batch script for Slurm that runs a training with spares, requeue and accounts."
    sub = add("slurm-script", _print, about)
    sub.add_argument("--nodes", type=int, default=2, metavar="N", help="nodes that train (2)")
    sub.add_argument("--min-nodes", type=int, metavar="N", help="nodes that are enough to go on with (all)")
    sub.add_argument("--spares", type=int, default=1, metavar="N", help="nodes that wait to step in (1)")
    sub.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs of each node, a rank each (8)")
    sub.add_argument("--ranks", type=int, metavar="N", help="ranks of each node (one a GPU, or 1)")
    sub.add_argument("--time", default="", metavar="LIMIT", help="time limit, as Slurm writes it: 2-00:00:00")
    sub.add_argument("--partition", default="", metavar="NAME", help="partition to run in")
    sub.add_argument("--name", default="train", metavar="NAME", help="name of the job (train)")
    sub.add_argument("--max-restarts", type=int, default=10, metavar="N", help="as for aegis-run (10)")
    sub.add_argument(
        "--signal-s", type=int, default=120, metavar="S", help="seconds from USR1 to the end (120)"
    )
    sub.add_argument("--no-drain", action="store_true", help="don't drain broken nodes (operators may)")
    sub.add_argument(
        "--state-dir", default="$HOME/aegis", metavar="DIR", help="directory that all nodes see ($HOME/aegis)"
    )
    sub.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="script, arguments")


def _print(args: argparse.Namespace, console: Console) -> int:
    command = [word for index, word in enumerate(args.script) if index or word != "--"] or ["train.py"]
    least = args.nodes if args.min_nodes is None else args.min_nodes
    for flag, value, lowest in (
        ("--nodes", args.nodes, 1),
        ("--spares", args.spares, 0),
        ("--gpus", args.gpus, 0),
        ("--max-restarts", args.max_restarts, 0),
        ("--signal-s", args.signal_s, 1),
        ("--min-nodes", least, 1),
        ("--ranks", 1 if args.ranks is None else args.ranks, 1),
    ):
        if value < lowest:
            raise UsageError(f"cannot use {flag} {value}: want {lowest} or more")
    if least > args.nodes:
        raise UsageError(f"cannot use --min-nodes {least}: want at most --nodes, {args.nodes}")
    for flag, text in (("--name", args.name), ("--partition", args.partition), ("--time", args.time)):
        if not re.fullmatch(r"[\w.,:-]*", text) or (flag == "--name" and not text):
            raise UsageError(
                f"cannot use {flag} {text!r}: it goes into a line of #SBATCH; want letters, digits and .,:-"
            )
    sys.stdout.write(
        make(
            nodes=args.nodes, least=least, spares=args.spares, gpus=args.gpus,
            ranks=args.ranks or args.gpus or 1, time=args.time, partition=args.partition, name=args.name,
            shared=args.state_dir, max_restarts=args.max_restarts, drain=not args.no_drain,
            signal_s=args.signal_s, command=command,
        )
    )  # fmt: skip
    return 0
