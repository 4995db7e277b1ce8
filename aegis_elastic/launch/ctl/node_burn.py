"""`aegisctl burn` on this node: the stress test with a progress bar."""

from __future__ import annotations

import argparse
import os
import socket

from rich.console import Console

from aegis_elastic.agents.checks import burn
from aegis_elastic.checks.contract.burn_protocol import Progress, Request
from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.launch.screens.node_checks import Bars, as_json, table


def request_of(args: argparse.Namespace) -> Request:
    """The request that the arguments make; UsageError."""
    try:
        return Request(args.minutes * 60, args.size, args.threads)
    except ValueError as error:
        raise UsageError(f"cannot burn: {error}") from error


def burn_node(args: argparse.Namespace, console: Console) -> int:
    """`aegisctl burn`; returns the exit code."""
    request = request_of(args)
    node = socket.gethostname()
    process = burn.start(request, os.environ)
    try:
        with Bars(args.json) as bars:

            def show(progress: Progress) -> None:
                text = burn.describe_progress(progress)
                bars.show(progress.device, request.duration_s, progress.elapsed_s, text)

            results = burn.wait_results(process, show)
    finally:
        process.kill()
        process.wait()
    if args.json:
        print(as_json(node, results))
    else:
        console.print(table(node, results))
    return 0 if all(result.passed for result in results) else 1
