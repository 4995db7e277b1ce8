"""The rdma check: port states, rates, and growth of error counters of the RDMA adapters, from sysfs.

Absolute counter values mean nothing (a cable was pulled last year); they are compared with `baseline`, the
`details` of an earlier result. Without one, a port that is down may be unused: switched off by its operator
(phys_state Disabled; on RoCE also: no cable), or never cabled, which shows in counters that are all zero.
Such a port is named, but is a finding only if no port is left.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from aegis_elastic.checks.contract.child_process import OnStep, Outcome, Scalar, failed, passed
from aegis_elastic.checks.contract.request import CheckRequest


class CounterLimit(NamedTuple):
    """How much a counter may grow, and the scope of the finding if it grows more."""

    growth_max: int
    scope: str


# A link that went down once has broken every collective on it; single symbol and receive errors are corrected
# by retransmission and within the InfiniBand bit error rate. Errors that the other end reports or discards
# may be the switch's fault or congestion, so it is the network's. Not judged: counters that grow whenever a
# peer dies (time-outs, retries) or a route adapts (out of sequence).
COUNTERS: Mapping[str, CounterLimit] = {
    "link_downed": CounterLimit(0, "hardware"),
    "link_error_recovery": CounterLimit(2, "hardware"),
    "symbol_error": CounterLimit(10, "hardware"),
    "port_rcv_errors": CounterLimit(10, "hardware"),
    "local_link_integrity_errors": CounterLimit(10, "hardware"),
    "excessive_buffer_overrun_errors": CounterLimit(10, "hardware"),
    "port_rcv_remote_physical_errors": CounterLimit(100, "network"),
    "port_xmit_discards": CounterLimit(100_000, "network"),
    "rx_icrc_encapsulated": CounterLimit(100, "network"),
}
# Any of these above zero says that the port has had a link since the driver was loaded.
_TRAFFIC_COUNTERS = (
    "link_downed",
    "port_rcv_data",
    "port_xmit_data",
    "port_rcv_packets",
    "port_xmit_packets",
)
# With fewer ports of a kind there is no majority for the right rate.
_SIBLINGS_MIN = 3

_RATE = re.compile(r"([\d.]+) Gb/sec(?: \((\d+)X)?")
_GRAVEST_FIRST = ("hardware", "network", "slow")


class Problem(NamedTuple):
    """Code, scope, and a text for people."""

    finding: str
    scope: str
    text: str


def check(request: CheckRequest, on_step: OnStep) -> Outcome:
    """Judge every port under `rdma_root`. Passes if there is no adapter."""
    on_step(f"reading {request.rdma_root}")
    now = scan(request.rdma_root)
    # The baseline may hold other checks' details too; a port's keys have a slash ("mlx5_0/1.state").
    then = {key: value for key, value in request.baseline.items() if "/" in key}
    problems = _compare(now, then) if then else _without_baseline(now)
    problems += _compare_siblings(now)
    if problems:
        problems.sort(key=lambda problem: _GRAVEST_FIRST.index(problem.scope))
        worst = problems[0]
        return failed(worst.finding, worst.scope, "rdma: " + "; ".join(p.text for p in problems), now)
    ports = _ports(now)
    if not ports:
        return passed("rdma: no RDMA adapter on this node", now)
    active = [port for port in ports if _is_up(now, port)]
    idle = [port for port in ports if port not in active]
    tail = f"; not in use: {', '.join(idle)}" if idle else ""
    return passed(f"rdma: {len(active)} of {len(ports)} ports active{tail}", now)


def scan(root: str) -> dict[str, Scalar]:
    """All ports, flat: "mlx5_0/1.state" -> "ACTIVE", ".phys_state", ".rate_gbps", ".width" (lanes), ".kind"
    (adapter type and link layer), the judged counters, and ".used": whether it ever had a link (None:
    unknown). An adapter without ports, as a failed driver leaves it, has "mlx5_0/0.state" "".
    """
    found: dict[str, Scalar] = {}
    for device in _list(root):
        numbers = _list(os.path.join(root, device, "ports"))
        if not numbers:
            found[f"{device}/0.state"] = ""
            found[f"{device}/0.phys_state"] = ""
        for number in numbers:
            kind = _read(os.path.join(root, device, "hca_type"))
            folder = os.path.join(root, device, "ports", number)
            port = _port(folder, kind)
            found |= {f"{device}/{number}.{name}": value for name, value in port.items()}
    return found


def _port(folder: str, adapter: str) -> dict[str, Scalar]:
    rate = _RATE.match(_read(os.path.join(folder, "rate")))
    port: dict[str, Scalar] = {
        "state": _read(os.path.join(folder, "state")).rpartition(":")[2].strip(),
        "phys_state": _read(os.path.join(folder, "phys_state")).rpartition(":")[2].strip(),
        "rate_gbps": float(rate[1]) if rate else None,
        "width": int(rate[2]) if rate and rate[2] else None,
        "kind": f"{adapter} {_read(os.path.join(folder, 'link_layer'))}".strip(),
    }
    for name in COUNTERS:
        value = _counter(folder, name)
        if value is not None:
            port[name] = value
    traffic = [value for name in _TRAFFIC_COUNTERS if (value := _counter(folder, name)) is not None]
    port["used"] = any(traffic) if traffic else None
    return port


def _counter(folder: str, name: str) -> int | None:
    """A counter's value; None where the firmware doesn't count ("N/A (no PMA)") or has no such counter."""
    for kind in ("counters", "hw_counters"):
        value = _read(os.path.join(folder, kind, name))
        if value.isdigit():
            return int(value)
    return None


def _ports(now: Mapping[str, Scalar]) -> list[str]:
    return [key.rpartition(".")[0] for key in now if key.endswith(".state")]


def _without_baseline(now: dict[str, Scalar]) -> list[Problem]:
    down = [port for port in _ports(now) if not _is_up(now, port)]
    if len(down) < len(_ports(now)):
        down = [port for port in down if not _is_unused(now, port)]
    return [_down(now, port) for port in down]


def _is_unused(now: Mapping[str, Scalar], port: str) -> bool:
    phys_state = now.get(f"{port}.phys_state")
    return phys_state == "Disabled" or (phys_state == "Polling" and now.get(f"{port}.used") is False)


def _down(now: Mapping[str, Scalar], port: str, tail: str = "") -> Problem:
    state, phys_state = now.get(f"{port}.state"), now.get(f"{port}.phys_state")
    text = f"{port} is {state or '?'} ({phys_state or '?'}){tail}"
    if not state:
        return Problem("rdma.unreadable", "hardware", f"{text}: adapter or driver has given up")
    if phys_state == "LinkUp" and state in ("INIT", "ARMED"):
        # The cable is fine; the subnet manager serves the whole fabric, so no node must leave for it.
        return Problem("rdma.no_subnet_manager", "network", f"{text}: it waits for the subnet manager")
    if phys_state == "LinkErrorRecovery":
        return Problem("rdma.link_errors", "hardware", f"{text}: the link doesn't come out of errors")
    return Problem("rdma.port_down", "hardware", text)


def _compare(now: dict[str, Scalar], then: dict[str, Scalar]) -> list[Problem]:
    problems: list[Problem] = []
    for port in _ports(then):
        if f"{port}.state" not in now:
            problems.append(Problem("rdma.missing", "hardware", f"{port} was there at the start and is gone"))
        elif not _is_up(now, port):
            if _is_up(then, port):
                problems.append(_down(now, port, ", was active at the start"))
        else:
            problems += _slower(now, then, port) + _grown(now, then, port)
    return problems


def _slower(now: dict[str, Scalar], then: dict[str, Scalar], port: str) -> list[Problem]:
    rate, before = now.get(f"{port}.rate_gbps"), then.get(f"{port}.rate_gbps")
    if isinstance(rate, float) and isinstance(before, int | float) and rate < before:
        text = f"{port} runs at {rate:g} Gb/s, at the start it was {before:g}"
        return [Problem("rdma.rate", "hardware", text)]
    return []


def _grown(now: dict[str, Scalar], then: dict[str, Scalar], port: str) -> list[Problem]:
    problems = []
    for name, limit in COUNTERS.items():
        value, before = now.get(f"{port}.{name}"), then.get(f"{port}.{name}")
        # A counter below its old value was reset in between: all of it is new.
        if isinstance(value, int) and isinstance(before, int):
            growth = value - before if value >= before else value
            if growth > limit.growth_max:
                text = f"{port} {name} grew by {growth} since the start"
                problems.append(Problem(f"rdma.{name}", limit.scope, text))
    return problems


def _compare_siblings(now: dict[str, Scalar]) -> list[Problem]:
    """A port that came up with fewer lanes or at a lower rate than the others of its kind.

    Two ports at the same full-width lower rate are a design (storage beside compute), one is a bad cable.
    """
    kinds: dict[Scalar, list[str]] = {}
    for port in _ports(now):
        if _is_up(now, port) and isinstance(now.get(f"{port}.rate_gbps"), float):
            kinds.setdefault(now.get(f"{port}.kind"), []).append(port)
    problems = []
    for ports in kinds.values():
        rates = Counter(_rate(now, port) for port in ports)
        majority, holders = rates.most_common(1)[0]
        if len(ports) < _SIBLINGS_MIN or holders <= len(ports) / 2:
            continue
        width = max(_lanes(now, port) for port in ports)
        for port in ports:
            rate, lanes = _rate(now, port), _lanes(now, port)
            if rate < majority and (rates[rate] == 1 or lanes < width):
                text = (
                    f"{port} runs at {rate:g} Gb/s on {lanes} lanes, the others of its kind at {majority:g}"
                )
                problems.append(Problem("rdma.slow_link", "slow", text))
    return problems


def _rate(now: Mapping[str, Scalar], port: str) -> float:
    return float(now.get(f"{port}.rate_gbps") or 0)


def _lanes(now: Mapping[str, Scalar], port: str) -> int:
    return int(now.get(f"{port}.width") or 0)


def _is_up(ports: Mapping[str, Scalar], port: str) -> bool:
    return ports.get(f"{port}.state") == "ACTIVE" and ports.get(f"{port}.phys_state") == "LinkUp"


def _list(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _read(path: str) -> str:
    """The file's text, or "" if the driver returns an error (EINVAL, EIO) or has no such file."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
