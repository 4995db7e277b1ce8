"""Runs checks on this node: one JSON request on standard input, one JSON line per result on standard output.

usage: python -m aegis_elastic.checks < REQUEST

The request is one JSON object, read until the end of the input:
  checks        names: io gpu runtime rdma hang env health allreduce_connection allreduce_performance
  worker, node  names of the requester, for file names and texts
  paths         {"checkpoint"|"log"|"data"|"shm": directory}; all but "data" must be writable
  expectedGpus  how many GPUs this node should have (null: no expectation)
  world         {groupRank groupWorldSize rankOffset worldSize localWorldSize masterAddr masterPort device
                tag}, for the collective checks; an agent hosts the TCPStore there
  rankPids      {global rank: pid} of the training processes that should be alive
  exits         {global rank: {exitCode signal exception}} of those that have ended
  budgetsS      {check: seconds} instead of the defaults
  baseline      the "details" of earlier rdma and gpu results, in one object
  more          rdmaRoot, kernelLog, peerMedians, exclusiveGpus, slowFactor: see CheckRequest

A line is a CheckResult: checkType pass result timeStamp durationS finding scope details. Lines come as the
checks end; the end of the output says that all are done. Exit code 0 however the checks ended, 2 for a bad
request. It ends with the process (strictly: the thread) that started it.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from aegis_elastic.checks import runner
from aegis_elastic.checks.contract.child_process import die_with_parent
from aegis_elastic.checks.contract.request import CheckRequest


def main(argv: list[str]) -> int:
    """Serve one request; returns the exit code."""
    if argv in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if argv:
        print(f"cannot run the checks: unexpected argument {argv[0]!r}, see --help", file=sys.stderr)
        return 2
    die_with_parent(os.getppid())
    # An interrupt at the terminal reaches all its processes; the one that started us handles it and ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    runner.load()
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckRequest)
    except msgspec.DecodeError as error:  # a ValidationError is one too
        print(f"cannot run the checks: bad request: {error}", file=sys.stderr)
        return 2
    output = sys.stdout.buffer
    try:
        for result in runner.run(request):
            output.write(msgspec.json.encode(result) + b"\n")
            output.flush()
    except BrokenPipeError:
        # The reader is gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
