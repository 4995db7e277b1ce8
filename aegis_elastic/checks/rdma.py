"""RDMA host adapters as the kernel shows them: port states, rates, and error counters since the job's start.

Absolute counter values say nothing (a cable was pulled last year); what counts is what changed since
`baseline`, the `details` of an earlier result. Without one, a port that its operator switched off (phys_state
Disabled; on RoCE also: no cable) may well be unused, so it is named but not held against the node unless no
port is left.
"""

from __future__ import annotations

import os
import re

from aegis_elastic.checks.frame import Note, Outcome, Scalar, failed, passed
from aegis_elastic.checks.request import CheckRequest

# How much a counter may grow unnoticed. A link that went down once has broken every collective on it; single
# symbol and receive errors are corrected by retransmission and within the InfiniBand bit error rate.
ALLOWED_GROWTH = {"link_downed": 0, "symbol_error": 10, "port_rcv_errors": 10}
_RATE = re.compile(r"([\d.]+) Gb/sec")


def check(request: CheckRequest, note: Note) -> Outcome:
    """Judge every port under `rdma_root`; passes, saying so, when there is no adapter."""
    note(f"reading {request.rdma_root}")
    now = scan(request.rdma_root)
    problems = _compare(now, request.baseline) if request.baseline else _at_first_sight(now)
    if problems:
        return failed(problems[0][0], "hardware", "rdma: " + "; ".join(text for _, text in problems), now)
    ports = [key.rpartition(".")[0] for key in now if key.endswith(".state")]
    if not ports:
        return passed("rdma: no RDMA adapter on this node", now)
    active = [port for port in ports if _is_up(now, port)]
    idle = [port for port in ports if port not in active]
    tail = f"; not in use: {', '.join(idle)}" if idle else ""
    return passed(f"rdma: {len(active)} of {len(ports)} ports active{tail}", now)


def scan(root: str) -> dict[str, Scalar]:
    """All ports, flat: "mlx5_0/1.state" -> "ACTIVE", ".phys_state", ".rate_gbps" and the judged counters."""
    found: dict[str, Scalar] = {}
    for device in _list(root):
        for number in _list(os.path.join(root, device, "ports")):
            folder = os.path.join(root, device, "ports", number)
            port = f"{device}/{number}"
            for name in ("state", "phys_state"):
                found[f"{port}.{name}"] = _read(os.path.join(folder, name)).rpartition(":")[2].strip()
            rate = _RATE.match(_read(os.path.join(folder, "rate")))
            found[f"{port}.rate_gbps"] = float(rate[1]) if rate else None
            for name in ALLOWED_GROWTH:
                value = _read(os.path.join(folder, "counters", name))
                if value.isdigit():  # "N/A (no PMA)" where the firmware doesn't count
                    found[f"{port}.{name}"] = int(value)
    return found


def _at_first_sight(now: dict[str, Scalar]) -> list[tuple[str, str]]:
    ports = [key.rpartition(".")[0] for key in now if key.endswith(".state")]
    down = [port for port in ports if not _is_up(now, port)]
    if len(down) < len(ports):
        down = [port for port in down if now[f"{port}.phys_state"] != "Disabled"]
    return [("rdma.port_down", _describe(now, port)) for port in down]


def _compare(now: dict[str, Scalar], then: dict[str, Scalar]) -> list[tuple[str, str]]:
    problems: list[tuple[str, str]] = []
    for port in [key.rpartition(".")[0] for key in then if key.endswith(".state")]:
        if f"{port}.state" not in now:
            problems.append(("rdma.missing", f"{port} was there at the start and is gone"))
        elif not _is_up(now, port):
            if _is_up(then, port):
                problems.append(("rdma.port_down", f"{_describe(now, port)}, was active at the start"))
        else:
            problems += _slower(now, then, port) + _grown(now, then, port)
    return problems


def _slower(now: dict[str, Scalar], then: dict[str, Scalar], port: str) -> list[tuple[str, str]]:
    rate, before = now.get(f"{port}.rate_gbps"), then.get(f"{port}.rate_gbps")
    if isinstance(rate, float) and isinstance(before, int | float) and rate < before:
        return [("rdma.rate", f"{port} runs at {rate:g} Gb/s, at the start it was {before:g}")]
    return []


def _grown(now: dict[str, Scalar], then: dict[str, Scalar], port: str) -> list[tuple[str, str]]:
    problems = []
    for name, allowed in ALLOWED_GROWTH.items():
        value, before = now.get(f"{port}.{name}"), then.get(f"{port}.{name}")
        # A counter below its start was reset in between: then all of it is new.
        if isinstance(value, int) and isinstance(before, int):
            growth = value - before if value >= before else value
            if growth > allowed:
                problems.append((f"rdma.{name}", f"{port} {name} grew by {growth} since the start"))
    return problems


def _is_up(ports: dict[str, Scalar], port: str) -> bool:
    return ports.get(f"{port}.state") == "ACTIVE" and ports.get(f"{port}.phys_state") == "LinkUp"


def _describe(now: dict[str, Scalar], port: str) -> str:
    return f"{port} is {now[f'{port}.state'] or '?'} ({now[f'{port}.phys_state'] or '?'})"


def _list(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _read(path: str) -> str:
    """The file's text, or "" where the driver refuses to tell (EINVAL, EIO) or has no such file."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
