"""The flags of `aegis-run` about constant monitoring and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aegis_elastic.agents.monitoring.monitor import INTERVAL_S


def add_monitor_flags(
    add: Callable[..., None], seconds: Callable[..., Callable[[str], float]], whole_number: Callable[..., Any]
) -> None:
    """Declare them. `add`, `seconds` and `whole_number` as in `launch.flags.group`."""
    add(
        "monitor",
        "Watch what the ranks use (processor, GPU, memory, network) and write (the log files of --log-dir "
        "with --tee or --redirects): anomalies become lines of the journal, and change nothing. `on` or "
        "`off`; the default is on.",
        "on",
        choices=("on", "off"),
    )
    add(
        "monitor-interval-s",
        "Seconds between two samples. The rules for anomalies count samples, so all of them become "
        f"quicker or slower with it. The default is {INTERVAL_S:g}.",
        INTERVAL_S,
        type=seconds(),
        metavar="SECONDS",
    )
    add(
        "metrics-port",
        "Let Prometheus read the job's metrics at http://HOST:PORT/metrics, on the node that hosts the "
        "control plane; 0 takes any free port, which `aegisctl status --json` names. By default there is "
        "no such port.",
        type=whole_number(0, 65535),
        metavar="PORT",
    )
    add(
        "metrics-host",
        "The address at which it listens. There is no password: the default is 127.0.0.1.",
        "127.0.0.1",
        metavar="HOST",
    )
