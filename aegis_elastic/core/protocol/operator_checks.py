"""What an operator asks of all nodes of a job, and how a node says what it has found so far.

A look goes to every agent as a word (`core.protocol.directives.Look`); what comes back is in the agent's
reports, repeated until the next look, so a lost report delays an answer and loses none.
"""

from __future__ import annotations

import msgspec

from aegis_elastic.core.model import CheckResult

# The name under which a node's answer stands in its reports (`ReportData.watched`).
NAME = "looks"
TEXT_CHARS_MAX = 2000
RESULTS_MAX = 64

# Which checks may run beside a training: they read, or write a few megabytes. All others form process groups
# or load every device, and would slow the ranks or take their memory.
HARMLESS = frozenset({"io", "gpu", "runtime", "rdma", "hang", "env"})


class Device(msgspec.Struct, frozen=True, rename="camel"):
    """How far a device under load has come, in seconds and in words."""

    device: str
    elapsed_s: float
    text: str = msgspec.field(name="says")


class Answer(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What one node has found of the look `look`. `done`: all of it; `why`: it could not be done."""

    check_id: str = msgspec.field(name="look")
    results: tuple[CheckResult, ...] = ()
    devices: tuple[Device, ...] = ()
    done: bool = False
    why: str = ""


class NodeAnswer(msgspec.Struct, frozen=True, rename="camel"):
    """The same as `aegisctl` is told: `answer` None as long as that node has said nothing."""

    worker: str
    node: str
    answer: Answer | None = None


class Progress(msgspec.Struct, frozen=True, rename="camel"):
    """How a look stands. `over`: every node is done, or its time is up (`limit_s` seconds after its
    start).
    """

    check_id: str = msgspec.field(name="look")
    nodes: tuple[NodeAnswer, ...]
    over: bool
    limit_s: float
