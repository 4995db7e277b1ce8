"""The rdma check on trees that look like /sys/class/infiniband."""

from __future__ import annotations

from pathlib import Path

from aegis_elastic.checks.contract.child_process import Outcome, Scalar
from aegis_elastic.checks.contract.request import CheckRequest
from aegis_elastic.checks.host import rdma


class Adapters:
    """A tree of adapters with one port each, healthy unless told otherwise."""

    def __init__(self, root: Path, *names: str) -> None:
        self.root = root
        for name in names:
            self.set(name, state="4: ACTIVE", phys_state="5: LinkUp", rate="400 Gb/sec (4X NDR)")
            self.count(name, link_downed="1", symbol_error="5", port_rcv_errors="2")

    def set(self, name: str, **files: str) -> None:
        folder = self.root / name / "ports" / "1"
        (folder / "counters").mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text + "\n")

    def count(self, name: str, **counters: str) -> None:
        self.set(name, **{f"counters/{counter}": value for counter, value in counters.items()})

    def check(self, baseline: dict[str, Scalar] | None = None) -> Outcome:
        request = CheckRequest(("rdma",), rdma_root=str(self.root), baseline=baseline or {})
        return rdma.check(request, lambda _: None)


def test_no_adapter_is_said_and_passes(tmp_path: Path) -> None:
    outcome = Adapters(tmp_path / "none").check()
    assert (outcome.passed, outcome.result) == (True, "rdma: no RDMA adapter on this node")


def test_healthy_ports_pass_whatever_their_counters_have_reached(tmp_path: Path) -> None:
    outcome = Adapters(tmp_path, "mlx5_0", "mlx5_1").check()
    assert outcome.passed
    assert outcome.result == "rdma: 2 of 2 ports active"
    assert outcome.details["mlx5_0/1.rate_gbps"] == 400.0
    assert outcome.details["mlx5_1/1.link_downed"] == 1


def test_a_port_without_link_is_down(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path, "mlx5_0", "mlx5_1")
    adapters.set("mlx5_1", state="1: DOWN", phys_state="2: Polling")
    outcome = adapters.check()
    assert (outcome.finding, outcome.scope) == ("rdma.port_down", "hardware")
    assert outcome.result == "rdma: mlx5_1/1 is DOWN (Polling)"


def test_a_port_that_waits_for_its_subnet_manager_is_the_networks_fault(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path, "mlx5_0")
    adapters.set("mlx5_0", state="2: INIT")
    outcome = adapters.check()
    assert (outcome.finding, outcome.scope) == ("rdma.no_subnet_manager", "network")


def test_a_port_that_is_switched_off_is_not_in_use_unless_none_is_left(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path, "mlx5_0", "mlx5_1")
    adapters.set("mlx5_1", state="1: DOWN", phys_state="3: Disabled")
    assert adapters.check().result == "rdma: 1 of 2 ports active; not in use: mlx5_1/1"
    adapters.set("mlx5_0", state="1: DOWN", phys_state="3: Disabled")
    assert adapters.check().finding == "rdma.port_down"


def test_nothing_changed_since_the_start_is_healthy(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path, "mlx5_0", "mlx5_1")
    adapters.set("mlx5_1", state="1: DOWN", phys_state="2: Polling")  # was so at the start: nothing new
    assert adapters.check(adapters.check().details).passed


def test_changes_since_the_start_are_found(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path, "mlx5_0", "mlx5_1")
    start = adapters.check().details

    adapters.set("mlx5_1", state="1: DOWN", phys_state="3: Disabled")
    outcome = adapters.check(start)
    assert outcome.finding == "rdma.port_down"
    assert outcome.result.endswith("was active at the start")
    adapters.set("mlx5_1", state="4: ACTIVE", phys_state="5: LinkUp")

    adapters.set("mlx5_1", rate="100 Gb/sec (1X NDR)")
    assert adapters.check(start).finding == "rdma.rate"
    adapters.set("mlx5_1", rate="400 Gb/sec (4X NDR)")

    adapters.count("mlx5_0", link_downed="2")
    outcome = adapters.check(start)
    assert (outcome.finding, outcome.result) == (
        "rdma.link_downed",
        "rdma: mlx5_0/1 link_downed grew by 1 since the start",
    )
    adapters.count("mlx5_0", link_downed="1")

    adapters.count("mlx5_0", symbol_error="15", port_rcv_errors="12")
    assert adapters.check(start).passed  # within what the link corrects by itself
    adapters.count("mlx5_0", symbol_error="16")
    assert adapters.check(start).finding == "rdma.symbol_error"
    adapters.count("mlx5_0", symbol_error="0")
    assert adapters.check(start).passed  # somebody reset the counter


def test_an_adapter_that_is_gone_is_missing(tmp_path: Path) -> None:
    start = Adapters(tmp_path / "then", "mlx5_0", "mlx5_1").check().details
    outcome = Adapters(tmp_path / "now", "mlx5_0").check(start)
    assert outcome.finding == "rdma.missing"
    assert "mlx5_1/1 was there at the start and is gone" in outcome.result


def test_counters_that_the_firmware_does_not_keep_are_left_out(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path, "mlx5_0")
    adapters.count("mlx5_0", link_downed="N/A (no PMA)")
    outcome = adapters.check()
    assert outcome.passed
    assert "mlx5_0/1.link_downed" not in outcome.details
