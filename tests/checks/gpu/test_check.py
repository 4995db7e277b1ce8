"""The gpu and runtime checks through the real client library, against stand-ins for NVIDIA's libraries.

The table of all states is in test_gpu_states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aegis_elastic.core.model import CheckResult
from tests.checks.support import run_checks


class Machine:
    """A node whose GPUs are described by lines in a file."""

    def __init__(self, libraries: Path, state: Path) -> None:
        self._env = {"LD_LIBRARY_PATH": str(libraries), "FAKE_NVML_STATE": str(state)}
        self._state = state

    def check(
        self, *lines: str, checks: tuple[str, ...] = ("gpu",), **request: Any
    ) -> dict[str, CheckResult]:
        self._state.write_text("".join(f"{line}\n" for line in lines))
        env = self._env | {"FAKE_CUDA_INIT": str(request.pop("cu_init", 0))}
        return run_checks({"checks": checks, "expectedGpus": 8, **request}, env)


@pytest.fixture
def machine(libraries: Path, tmp_path: Path) -> Machine:
    return Machine(libraries, tmp_path / "state")


def test_eight_healthy_cards_pass(machine: Machine) -> None:
    result = machine.check()["gpu"]
    assert result.passed, result.result
    assert result.result == "gpu: 8 x NVIDIA H100 (fake) healthy, driver 580.65.06"
    assert result.details["count"] == 8


def test_hardware_decides_when_there_is_more_than_one_finding(machine: Machine) -> None:
    result = machine.check("0 temperature 95", "5 remap_failed 1")["gpu"]
    assert (result.finding, result.scope) == ("gpu.remap_failed", "hardware")
    assert "GPU 0 is at 95 C" in result.result


def test_a_card_more_than_expected_or_no_expectation_is_fine(machine: Machine) -> None:
    assert machine.check("* count 9")["gpu"].passed
    assert machine.check("* count 2", expectedGpus=None)["gpu"].passed
    assert machine.check("* count 0", expectedGpus=0)["gpu"].result == (
        "gpu: no GPU on this node, and none is expected"
    )


def test_a_hung_driver_call_ends_at_its_budget_while_the_others_answer(machine: Machine) -> None:
    found = machine.check(
        "2 hang:nvmlDeviceGetRemappedRows 1",
        checks=("io", "gpu", "runtime", "rdma", "hang"),
        budgetsS={"gpu": 0.7},
    )
    assert (found["gpu"].finding, found["gpu"].scope) == ("gpu.timeout", "hardware")
    assert found["gpu"].result == "gpu: no answer in 0.7 s (it was asking GPU 2)"
    assert all(result.passed for name, result in found.items() if name != "gpu")
    assert found["runtime"].details["cuda_driver"] == "13.0"


def test_without_a_driver_none_expected_is_said_plainly_and_one_expected_is_missing() -> None:
    none = run_checks({"checks": ["gpu"]})["gpu"]
    assert none.passed
    assert none.result.startswith("gpu: no GPU on this node")
    missing = run_checks({"checks": ["gpu"], "expectedGpus": 8})["gpu"]
    assert (missing.finding, missing.scope) == ("gpu.missing", "hardware")
    assert missing.result.startswith("gpu: 0 of 8 GPUs are there")


def test_a_cuda_driver_that_does_not_initialise_is_named(machine: Machine) -> None:
    result = machine.check(checks=("runtime",), cu_init=803)["runtime"]
    assert (result.finding, result.scope) == ("runtime.cuda", "software")
    assert (
        "cuInit failed with 803: the driver library and the kernel driver are of different versions"
        in result.result
    )


def test_a_missing_cuda_library_is_named_where_gpus_are_expected() -> None:
    result = run_checks({"checks": ["runtime"], "expectedGpus": 1})["runtime"]
    assert result.finding == "runtime.cuda"
    assert "cannot load the CUDA driver library" in result.result


def test_unusable_shared_memory_is_named(tmp_path: Path) -> None:
    result = run_checks({"checks": ["runtime"], "paths": {"shm": str(tmp_path / "nowhere")}})["runtime"]
    assert result.finding == "runtime.shared_memory"
    assert "No such file" in result.result
