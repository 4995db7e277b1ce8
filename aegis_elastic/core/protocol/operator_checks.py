"""Operator checks: what an operator requests of all nodes of a job, and how nodes report the results.

The request goes to every agent as a directive (`core.protocol.directives.OperatorCheck`). The answer is in
the agent's reports, repeated until the next request, so a lost report delays an answer and loses none.
"""

from __future__ import annotations

import msgspec

from aegis_elastic.core.model import CheckResult

# The key of a node's answer in its reports (`ReportData.watched`).
NAME = "looks"
TEXT_CHARS_MAX = 2000
RESULTS_MAX = 64

# Checks that may run beside a training: they read, or write a few megabytes. All others form process groups
# or load every device, and would slow the ranks down or take their memory.
HARMLESS = frozenset({"io", "gpu", "runtime", "rdma", "hang", "env"})


class Device(msgspec.Struct, frozen=True, rename="camel"):
    """Progress of a device under load: seconds so far, and the figures as text."""

    device: str
    elapsed_s: float
    text: str = msgspec.field(name="says")


class Answer(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What one node has found so far for the request `check_id`. `done`: complete; `why`: why it failed."""

    check_id: str = msgspec.field(name="look")
    results: tuple[CheckResult, ...] = ()
    devices: tuple[Device, ...] = ()
    done: bool = False
    why: str = ""


class NodeAnswer(msgspec.Struct, frozen=True, rename="camel"):
    """One node's answer as `aegisctl` gets it: `answer` is None until that node has reported."""

    worker: str
    node: str
    answer: Answer | None = None


class Progress(msgspec.Struct, frozen=True, rename="camel"):
    """Progress of a request. `over`: every node is done, or `limit_s` seconds have passed since its start."""

    check_id: str = msgspec.field(name="look")
    nodes: tuple[NodeAnswer, ...]
    over: bool
    limit_s: float
