"""The flags of `aegis-run` about nodes: their records, taints, probation and isolation."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Callable
from typing import Any

from aegis_elastic.control.controllers.nodes import TAINT_S
from aegis_elastic.control.host import cluster
from aegis_elastic.control.isolation import config_map, drivers
from aegis_elastic.control.isolation.isolations import ISOLATIONS_MAX

PROBATION_BURN_S = 60.0
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def add_node_flags(
    add: Callable[..., None], seconds: Callable[..., Callable[[str], float]], whole_number: Callable[..., Any]
) -> None:
    """Declare them. `add`, `seconds` and `whole_number` as in `launch.flags.group`."""
    add(
        "store",
        "Where records that outlive jobs are kept, instead of in --aegis-state-dir: "
        "etcd://HOST:PORT[,HOST:PORT...]. Needs the extra `etcd`.",
        type=etcd,
        metavar="URL",
    )
    add(
        "taint-s",
        "Seconds that a node stays tainted after a job has found it broken; 0: until somebody lifts it. A "
        "node with broken hardware is on probation then: it comes back by passing check and burn. The "
        f"default is {TAINT_S:.0f}, a day.",
        TAINT_S,
        type=seconds(at_least_zero=True),
        metavar="SECONDS",
    )
    add(
        "probation-burn-s",
        "Seconds of burn that a node on probation must pass, after the checks, before it joins. The "
        f"default is {PROBATION_BURN_S:.0f}.",
        PROBATION_BURN_S,
        type=seconds(),
        metavar="SECONDS",
    )
    add(
        "isolate-exit-code",
        "Exit code of a launcher whose node must leave or is refused because of a taint. The default is 1.",
        1,
        type=whole_number(1, 255),
        metavar="CODE",
    )
    add(
        "isolation",
        "How a broken node is taken from its scheduler: `slurm` drains it, `kubernetes` cordons and "
        "taints it (kubernetes:apis/apps/v1/namespaces/NS/statefulsets/NAME makes that workload avoid it), "
        "`file:PATH` lists it there, `command:ARGV` runs a program with {node} (and {reason}, {action}) "
        "among its arguments, without a shell. The default is none.",
        "none",
        type=isolation,
        metavar="DRIVER",
    )
    add(
        "isolation-max",
        "How many nodes may be isolated at once, over all jobs of the store; beyond that a human is paged. "
        f"The default is {ISOLATIONS_MAX}.",
        ISOLATIONS_MAX,
        type=whole_number(1, 100_000),
        metavar="N",
    )
    add(
        "isolation-dry-run",
        "Write into the journal which nodes would be isolated, and ask no scheduler.",
        False,
        action="store_true",
    )
    add(
        "record",
        "The ConfigMap, configmap:NAMESPACE/NAME, in which the job's record is kept for Kubernetes, and in "
        "which its creator says by `controlled` whether pods from which no worker comes are made anew "
        "(true), or all are cleared, one retry is counted, and a plain job runs (false). The default is "
        "none.",
        type=record,
        metavar="RECORD",
    )


def record(text: str) -> str:
    """The name of a job's record. ArgumentTypeError."""
    return _checked(text, config_map.parse)


def etcd(text: str) -> str:
    """`etcd://HOST:PORT[,HOST:PORT...]`, if the package for it is installed. ArgumentTypeError."""
    _checked(text, cluster.endpoints)
    if importlib.util.find_spec("etcd3") is None:
        raise argparse.ArgumentTypeError("etcd needs the extra: pip install 'aegis-elastic[etcd]'")
    return text


def isolation(text: str) -> str:
    """The name of an isolation driver. Whether it can be used is checked on the node that hosts the plane."""
    return _checked(text, drivers.parse)


def _checked(text: str, check: Callable[[str], object]) -> str:
    """The text itself, if `check` accepts it. Of a ValueError argparse would not show the message."""
    try:
        check(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def duration(text: str) -> float:
    """`90`, `30m`, `2h`, `7d`: a length of time in seconds, above 0. ArgumentTypeError."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS_S or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a length of time like 90s, 30m, 2h or 7d")
    return float(found[1]) * _UNITS_S[found[2]]
