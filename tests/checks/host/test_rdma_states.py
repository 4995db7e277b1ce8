"""The table of RDMA states: eight adapters for compute, each fault found, nothing found on healthy ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from aegis_elastic.checks.contract.child_process import Outcome
from aegis_elastic.checks.contract.request import CheckRequest
from aegis_elastic.checks.host import rdma

UP = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "400 Gb/sec (4X NDR)",
    "link_layer": "InfiniBand",
    "counters/link_downed": "1",
    "counters/symbol_error": "5",
    "counters/port_rcv_errors": "2",
    "counters/port_rcv_data": "123456789",
    "counters/link_error_recovery": "N/A (no PMA)",
    "counters/port_xmit_discards": "40",
    "hw_counters/out_of_sequence": "3",
    "hw_counters/rx_icrc_encapsulated": "0",
}
DOWN = {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"}
NEVER_UP = DOWN | {"counters/link_downed": "0", "counters/port_rcv_data": "0"}


class Node:
    """A tree as in /sys/class/infiniband."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for index in range(8):
            self.add(f"mlx5_{index}")

    def add(self, name: str, hca_type: str = "MT4129", **files: str) -> None:
        self.port(name, UP | files)
        (self.root / name / "hca_type").write_text(f"{hca_type}\n")

    def port(self, name: str, files: Mapping[str, str], number: int = 1) -> None:
        for file, text in files.items():
            path = self.root / name / "ports" / str(number) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    def remove(self, name: str) -> None:
        shutil.rmtree(self.root / name)


Change = Callable[[Node], None]


def nothing(node: Node) -> None:
    """The node stays as it is."""


def port(name: str = "mlx5_3", **files: str) -> Change:
    return lambda node: node.port(name, files)


def counter(name: str, value: int, folder: str = "counters") -> Change:
    return lambda node: node.port("mlx5_3", {f"{folder}/{name}": str(value)})


def all_ports(**files: str) -> Change:
    def change(node: Node) -> None:
        for index in range(8):
            node.port(f"mlx5_{index}", files)

    return change


def both(*changes: Change) -> Change:
    def change(node: Node) -> None:
        for each in changes:
            each(node)

    return change


class Fault(NamedTuple):
    """What a node was like at the last check (None: there was none), what happened, what must be found."""

    before: Change | None
    change: Change
    finding: str
    scope: str = "hardware"


SLOW_SPEED, SLOW_WIDTH = "200 Gb/sec (4X HDR)", "100 Gb/sec (1X NDR)"

FAULTS = {
    "down at first sight": Fault(None, port(**DOWN), "rdma.port_down"),
    "down since": Fault(nothing, port(**DOWN), "rdma.port_down"),
    "switched off since": Fault(nothing, port(**(DOWN | {"phys_state": "3: Disabled"})), "rdma.port_down"),
    "all down": Fault(None, all_ports(**NEVER_UP), "rdma.port_down"),
    "all switched off": Fault(None, all_ports(**(DOWN | {"phys_state": "3: Disabled"})), "rdma.port_down"),
    "in link error recovery": Fault(
        None, port(state="1: DOWN", phys_state="6: LinkErrorRecovery"), "rdma.link_errors"
    ),
    "asleep": Fault(None, port(state="1: DOWN", phys_state="1: Sleep"), "rdma.port_down"),
    "no subnet manager": Fault(None, all_ports(state="2: INIT"), "rdma.no_subnet_manager", "network"),
    "armed for ever": Fault(None, port(state="3: ARMED"), "rdma.no_subnet_manager", "network"),
    "adapter without ports": Fault(
        None, lambda node: shutil.rmtree(node.root / "mlx5_3" / "ports"), "rdma.unreadable"
    ),
    "port that says nothing": Fault(None, port(state="", phys_state=""), "rdma.unreadable"),
    "adapter gone": Fault(nothing, lambda node: node.remove("mlx5_3"), "rdma.missing"),
    "slower since": Fault(nothing, port(rate=SLOW_SPEED), "rdma.rate"),
    "slower than its siblings": Fault(None, port(rate=SLOW_SPEED), "rdma.slow_link", "slow"),
    "fewer lanes than its siblings": Fault(None, port(rate=SLOW_WIDTH), "rdma.slow_link", "slow"),
    "two with fewer lanes": Fault(
        None, both(port(rate=SLOW_WIDTH), port("mlx5_4", rate=SLOW_WIDTH)), "rdma.slow_link", "slow"
    ),
    "link went down and up": Fault(nothing, counter("link_downed", 2), "rdma.link_downed"),
    "link recoveries": Fault(
        counter("link_error_recovery", 0), counter("link_error_recovery", 3), "rdma.link_error_recovery"
    ),
    "symbol errors": Fault(nothing, counter("symbol_error", 16), "rdma.symbol_error"),
    "receive errors": Fault(nothing, counter("port_rcv_errors", 13), "rdma.port_rcv_errors"),
    "integrity errors": Fault(
        counter("local_link_integrity_errors", 0),
        counter("local_link_integrity_errors", 11),
        "rdma.local_link_integrity_errors",
    ),
    "counter reset and grown": Fault(
        counter("symbol_error", 90), counter("symbol_error", 40), "rdma.symbol_error"
    ),
    "errors at the other end": Fault(
        counter("port_rcv_remote_physical_errors", 0),
        counter("port_rcv_remote_physical_errors", 101),
        "rdma.port_rcv_remote_physical_errors",
        "network",
    ),
    "discards": Fault(nothing, counter("port_xmit_discards", 200_000), "rdma.port_xmit_discards", "network"),
    "broken packets on RoCE": Fault(
        nothing, counter("rx_icrc_encapsulated", 101, "hw_counters"), "rdma.rx_icrc_encapsulated", "network"
    ),
}


def storage(rate: str) -> Change:
    def change(node: Node) -> None:
        for index in (8, 9):
            node.add(f"mlx5_{index}", "MT41692", rate=rate, link_layer="Ethernet")

    return change


def no_adapter(node: Node) -> None:
    shutil.rmtree(node.root)


def second_ports_uncabled(node: Node) -> None:
    for index in range(8):
        node.port(f"mlx5_{index}", UP | NEVER_UP, 2)


HEALTHY: dict[str, tuple[Change | None, Change]] = {
    "nothing special": (None, nothing),
    "nothing since": (nothing, nothing),
    "no adapter": (None, no_adapter),
    "a port that was never cabled": (None, port(**NEVER_UP)),
    "second ports never cabled": (None, second_ports_uncabled),
    "a port that is switched off": (None, port(**(DOWN | {"phys_state": "3: Disabled"}))),
    "down then and now": (port(**DOWN), nothing),
    "slower storage adapters": (None, storage("200 Gb/sec (4X HDR)")),
    "one slower storage adapter": (None, lambda node: node.add("mlx5_8", "MT41692", rate=SLOW_SPEED)),
    "two slower by design": (None, both(port(rate=SLOW_SPEED), port("mlx5_4", rate=SLOW_SPEED))),
    "all at the same low rate": (None, all_ports(rate=SLOW_SPEED)),
    "faster than before": (port(rate=SLOW_SPEED), port(rate="400 Gb/sec (4X NDR)")),
    "within the bit error rate": (nothing, both(counter("symbol_error", 15), counter("port_rcv_errors", 12))),
    "a peer died": (nothing, counter("out_of_sequence", 90_000, "hw_counters")),
    "high counters at first sight": (None, counter("link_downed", 90)),
    "counters reset": (counter("symbol_error", 90), counter("symbol_error", 0)),
    "another adapter came": (nothing, lambda node: node.add("mlx5_9")),
}


def check(root: Path, before: Change | None, change: Change) -> Outcome:
    node = Node(root)
    baseline = {}
    if before is not None:
        before(node)
        first = rdma.check(CheckRequest(("rdma",), rdma_root=str(root)), lambda _: None)
        # Other checks' details may stand beside it.
        baseline = {**first.details, "gpu0.nvlinks_up": 18}
    change(node)
    return rdma.check(CheckRequest(("rdma",), rdma_root=str(root), baseline=baseline), lambda _: None)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    outcome = check(tmp_path / "infiniband", fault.before, fault.change)
    assert (outcome.finding, outcome.scope) == (fault.finding, fault.scope), outcome.result
    assert "mlx5_3/" in outcome.result


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_state_has_no_finding(tmp_path: Path, name: str) -> None:
    outcome = check(tmp_path / "infiniband", *HEALTHY[name])
    assert outcome.passed, outcome.result


def test_a_port_that_was_never_cabled_is_named(tmp_path: Path) -> None:
    outcome = check(tmp_path, None, port(**NEVER_UP))
    assert outcome.result == "rdma: 7 of 8 ports active; not in use: mlx5_3/1"
