"""The table of GPU states: each fault found with its code, scope and advice; nothing found on healthy cards.

All through the real client library, against a stand-in for the driver's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from aegis_elastic.core.model import CheckResult
from tests.checks.support import run_many

# Every part of the mask not true, configuration none, partition assigned, fabric manager connected.
FABRIC_HEALTHY = 0x51AA
BUS_3 = "PCI:0000:1d:00"  # of GPU 3


class State(NamedTuple):
    """A machine: the stand-in's lines, the kernel's log, what the last check had read."""

    lines: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    baseline: Mapping[str, Any] = MappingProxyType({})
    request: Mapping[str, Any] = MappingProxyType({})


class Fault(NamedTuple):
    """A state and what must be found in it."""

    state: State
    finding: str
    scope: str
    advice: str


def gpu(*lines: str, **last: int) -> State:
    """A state of GPU 3; `last` is what the last check had read of it."""
    about = tuple(line if line[0] in "*0123456789" else f"3 {line}" for line in lines)
    return State(about, baseline={f"gpu3.{name}": value for name, value in last.items()})


def log(*lines: str) -> State:
    return State(log=lines)


def health(shift: int, value: int, mask: int) -> State:
    return gpu(f"fabric_health {FABRIC_HEALTHY & ~(mask << shift) | value << shift}")


FAULTS = {
    "seven of eight": Fault(gpu("* count 7"), "gpu.missing", "hardware", "drain"),
    "no driver loaded": Fault(gpu("* error:nvmlInitWithFlags 9"), "gpu.missing", "hardware", "drain"),
    "driver mismatch": Fault(gpu("* error:nvmlInitWithFlags 18"), "gpu.driver", "software", "drain"),
    "driver unknown error": Fault(
        State(("* error:nvmlInitWithFlags 999",), request={"expectedGpus": None}),
        "gpu.driver", "software", "drain",
    ),
    "lost": Fault(gpu("lost 1"), "gpu.lost", "hardware", "drain"),
    "lost when asked": Fault(gpu("error:nvmlDeviceGetRemappedRows 15"), "gpu.lost", "hardware", "drain"),
    "needs a reset": Fault(
        gpu("error:nvmlDeviceGetHandleByIndex_v2 16"), "gpu.reset_required", "hardware", "reset"
    ),
    "too little power": Fault(
        gpu("error:nvmlDeviceGetHandleByIndex_v2 8"), "gpu.power", "hardware", "isolate"
    ),
    "no interrupts": Fault(
        gpu("error:nvmlDeviceGetHandleByIndex_v2 11"), "gpu.interrupt", "hardware", "drain"
    ),
    "no interrupts when asked": Fault(
        gpu("error:nvmlDeviceGetTemperature 11"), "gpu.interrupt", "hardware", "drain"
    ),
    "InfoROM": Fault(gpu("error:nvmlDeviceGetTotalEccErrors 14"), "gpu.inforom", "hardware", "isolate"),
    "not for this container": Fault(
        gpu("error:nvmlDeviceGetHandleByIndex_v2 4"), "gpu.denied", "software", "restart"
    ),
    "no answer at all": Fault(
        gpu("error:nvmlDeviceGetHandleByIndex_v2 999"), "gpu.error", "hardware", "drain"
    ),
    "no name": Fault(gpu("error:nvmlDeviceGetName 999"), "gpu.error", "hardware", "drain"),
    "no answer to most questions": Fault(
        gpu(*(f"error:nvmlDevice{name} 999" for name in (
            "GetFieldValues", "GetTotalEccErrors", "GetSramEccErrorStatus", "GetRemappedRows",
            "GetRetiredPagesPendingStatus", "GetTemperature",
        ))),
        "gpu.error", "hardware", "drain",
    ),
    "action: reset": Fault(gpu("recovery_action 1"), "gpu.recovery_action", "hardware", "reset"),
    "action: reboot": Fault(gpu("recovery_action 2"), "gpu.recovery_action", "hardware", "drain"),
    "action: drain P2P": Fault(gpu("recovery_action 3"), "gpu.recovery_action", "hardware", "drain"),
    "action: drain and reset": Fault(gpu("recovery_action 4"), "gpu.recovery_action", "hardware", "drain"),
    "action: IMEX domain": Fault(gpu("recovery_action 5"), "gpu.recovery_action", "software", "drain"),
    "action: newer than we": Fault(gpu("recovery_action 12"), "gpu.recovery_action", "hardware", "drain"),
    "uncorrected ECC": Fault(gpu("ecc_uncorrected 2"), "gpu.ecc", "hardware", "reset"),
    "ECC of a whole life": Fault(gpu("ecc_uncorrected_life 600"), "gpu.ecc_life", "hardware", "isolate"),
    "ECC storm": Fault(
        gpu("ecc_corrected 20007", ecc_corrected=7), "gpu.ecc_storm", "unknown", "watch"
    ),
    "SRAM threshold": Fault(gpu("sram_threshold 1"), "gpu.sram", "hardware", "isolate"),
    "remap pending": Fault(gpu("remap_pending 1"), "gpu.remap_pending", "hardware", "reset"),
    "remap failed": Fault(gpu("remap_failed 1"), "gpu.remap_failed", "hardware", "isolate"),
    "retirement pending": Fault(gpu("retired_pending 1"), "gpu.retired_pending", "hardware", "reset"),
    "too many pages retired": Fault(
        gpu("retired_single 40", "retired_double 20"), "gpu.retired_pages", "hardware", "isolate"
    ),
    "hot": Fault(gpu("temperature 90"), "gpu.temperature", "slow", "watch"),
    "about to shut down": Fault(gpu("temperature 92"), "gpu.shutdown_temperature", "hardware", "drain"),
    "hot by its margin": Fault(gpu("no_thresholds 1", "margin -3"), "gpu.temperature", "slow", "watch"),
    "hot memory": Fault(gpu("memory_temperature 96"), "gpu.memory_temperature", "slow", "watch"),
    "throttled by the driver": Fault(gpu("clock_reasons 32"), "gpu.throttle_thermal", "slow", "watch"),
    "throttled for heat": Fault(gpu("clock_reasons 72"), "gpu.throttle_thermal", "slow", "watch"),
    "power brake": Fault(gpu("clock_reasons 136"), "gpu.throttle_power", "slow", "watch"),
    "slowed by hardware": Fault(gpu("clock_reasons 8"), "gpu.throttle_hardware", "slow", "watch"),
    "half its lanes": Fault(gpu("pcie_width 8"), "gpu.pcie_width", "slow", "drain"),
    "PCIe replays": Fault(gpu("pcie_replays 5000", pcie_replays=3), "gpu.pcie_replay", "slow", "drain"),
    "a link down": Fault(gpu("nvlinks_up 17"), "gpu.nvlink_down", "hardware", "drain"),
    "all links of one card down": Fault(gpu("nvlinks_up 0"), "gpu.nvlink_down", "hardware", "drain"),
    "a link down since the last check": Fault(
        gpu("* count 1", "* nvlinks_up 17")._replace(
            baseline={"gpu0.nvlinks_up": 18}, request={"expectedGpus": 1}
        ),
        "gpu.nvlink_down", "hardware", "drain",
    ),
    "link recovery": Fault(
        gpu("nvlink_recovery 5", nvlink_recovery=4), "gpu.nvlink_recovery", "hardware", "drain"
    ),
    "link replays": Fault(
        gpu("nvlink_replay 2000", nvlink_replay=4), "gpu.nvlink_replay", "hardware", "drain"
    ),
    "link checksums": Fault(
        gpu("nvlink_crc_data 200", nvlink_crc_data=4), "gpu.nvlink_crc_data", "hardware", "drain"
    ),
    "fabric not started": Fault(gpu("* fabric_state 1"), "gpu.fabric", "software", "drain"),
    "fabric in progress": Fault(gpu("fabric_state 2"), "gpu.fabric", "software", "drain"),
    "fabric refused the card": Fault(gpu("fabric_status 999"), "gpu.fabric_error", "hardware", "reset"),
    "unhealthy route": Fault(health(4, 1, 3), "gpu.fabric_route", "hardware", "drain"),
    "less bandwidth": Fault(health(0, 1, 3), "gpu.fabric_degraded", "slow", "drain"),
    "timeouts in the fabric": Fault(health(6, 1, 3), "gpu.fabric_timeout", "hardware", "reset"),
    "wrongly configured": Fault(health(8, 5, 15), "gpu.fabric_config", "software", "drain"),
    "unhealthy altogether": Fault(gpu("fabric_summary 2"), "gpu.fabric_error", "hardware", "reset"),
    "limited capacity": Fault(gpu("fabric_summary 3"), "gpu.fabric_degraded", "slow", "drain"),
    "Xid 79 now": Fault(gpu("xid 79"), "gpu.xid", "hardware", "drain"),
    "Xid 48 now": Fault(gpu("xid 48"), "gpu.xid", "hardware", "reset"),
    "Xid 95 in the log": Fault(
        log(f"NVRM: Xid ({BUS_3}): 95, pid=77, Uncontained ECC error"), "gpu.xid", "hardware", "reset"
    ),
    "Xid 119 in the log": Fault(
        log(f"NVRM: Xid ({BUS_3}): 119, pid=77, name=python, Timeout after 6s of waiting for RPC response"),
        "gpu.xid", "hardware", "reset",
    ),
    "NVLink error in the log": Fault(
        log(f"NVRM: Xid ({BUS_3}): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 01"), "gpu.xid", "hardware", "reset"
    ),
    "fallen off the bus": Fault(
        log(f"NVRM: GPU at {BUS_3}: GPU-c0ffee has fallen off the bus."),
        "gpu.fallen_off", "hardware", "drain",
    ),
    "fallen off without Xid": Fault(
        log("NVRM: GPU 0000:1d:00.0: GPU has fallen off the bus."), "gpu.fallen_off", "hardware", "drain"
    ),
    "NVSwitch": Fault(
        log("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"),
        "gpu.nvswitch", "hardware", "drain",
    ),
}  # fmt: skip

HEALTHY = {
    "nothing special": State(),
    "busy at the power cap": gpu("* clock_reasons 4", "* temperature 74"),
    "idle": gpu("* clock_reasons 1"),
    "application clocks": gpu("* clock_reasons 258"),
    "sync boost": gpu("* clock_reasons 16"),
    "warm": gpu("* temperature 88"),
    "cool by its margin": gpu("* no_thresholds 1", "* margin 1"),
    "ECC off": gpu("* error:nvmlDeviceGetTotalEccErrors 3", "* error:nvmlDeviceGetSramEccErrorStatus 3"),
    "old driver": gpu("* error:nvmlDeviceGetFieldValues 13", "* error:nvmlDeviceGetGpuFabricInfoV 13"),
    "other structure version": gpu("* error:nvmlDeviceGetSramEccErrorStatus 25"),
    "MIG": gpu(
        "* error:nvmlDeviceRegisterEvents 3", "* error:nvmlDeviceGetNvLinkState 3",
        "* error:nvmlDeviceGetComputeRunningProcesses_v3 3",
    ),
    "one question unanswered": gpu("error:nvmlDeviceGetGpuFabricInfoV 999"),
    "no rights": gpu("* error:nvmlDeviceGetPcieReplayCounter 4", "* error:nvmlDeviceGetRemappedRows 4"),
    "no NVLink": gpu("* nvlinks 0"),
    "NVLink without bridges": gpu("* nvlinks_up 0"),
    "bridged in pairs, two not": gpu("* nvlinks 12", "6 nvlinks_up 0", "7 nvlinks_up 0"),
    "no fabric": gpu("* fabric_state 0", "* fabric_health 0", "* fabric_summary 0"),
    "fabric without health": gpu("* fabric_health 0", "* fabric_summary 0"),
    "x8 slot": gpu("* pcie_width 8", "* pcie_width_max 8"),
    "repaired long ago": gpu("ecc_uncorrected_life 3", "retired_double 2"),
    "counters at rest": gpu(
        "nvlink_replay 90000", "pcie_replays 7000", "ecc_corrected 99999",
        nvlink_replay=90000, pcie_replays=7000, ecc_corrected=99999,
    ),
    "counters high at first sight": gpu("nvlink_recovery 12", "nvlink_crc_flit 99999", "pcie_replays 9"),
    "counters reset since": gpu("nvlink_replay 1", nvlink_replay=90000),
    "application's Xid now": gpu("xid 13"),
    "application's Xid in the log": log(
        f"NVRM: Xid ({BUS_3}): 31, pid=77, name=python, MMU Fault", f"NVRM: Xid ({BUS_3}): 43, pid=77",
    ),
    "row remapped": log(f"NVRM: Xid ({BUS_3}): 63, pid='<unknown>', Row Remapper: New row marked"),
    "contained error": log(f"NVRM: Xid ({BUS_3}): 94, pid=77, Contained ECC error"),
    "non-fatal link event": log(f"NVRM: Xid ({BUS_3}): 149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 01"),
    "driver loaded since": log(
        f"NVRM: Xid ({BUS_3}): 79, GPU has fallen off the bus.",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06",
    ),
    "recovered since": log(
        f"NVRM: Xid ({BUS_3}): 48, pid=77, DBE (double bit error)",
        f"NVRM: Xid ({BUS_3}): 154, GPU recovery action changed from 0x1 (Reset) to 0x0 (None)",
    ),
    "long ago": log(f"6,1,0,-;NVRM: Xid ({BUS_3}): 79, GPU has fallen off the bus."),
    "other people's lines": log("6,9,99,-;usb 1-1: reset device", " SUBSYSTEM=usb", "", "\x00\xff"),
    "another program at work": gpu(f"process {os.getpid()}"),
    "a process of another container": gpu("process 4194305"),
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckResult]:
    """The check's answer for every state of both tables."""
    folder = tmp_path_factory.mktemp("states")
    env = {"LD_LIBRARY_PATH": str(libraries), "FAKE_NVML_STATE": str(folder / "state")}
    states = {name: fault.state for name, fault in FAULTS.items()} | HEALTHY
    assert len(states) == len(FAULTS) + len(HEALTHY)
    requests = []
    for number, state in enumerate(states.values()):
        kernel_log = folder / f"kmsg{number}"
        now_us = int(time.monotonic() * 1e6)
        stamped = (line if line[:2] in ("6,", "") else f"4,{number},{now_us},-;{line}" for line in state.log)
        kernel_log.write_text("".join(f"{line}\n" for line in stamped), encoding="latin-1")
        request = {"checks": ["gpu"], "expectedGpus": 8, "kernelLog": str(kernel_log)}
        requests.append((state.lines, {**request, "baseline": dict(state.baseline), **state.request}))
    return dict(zip(states, run_many(requests, env), strict=True))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(answers: dict[str, CheckResult], name: str) -> None:
    result, fault = answers[name], FAULTS[name]
    assert (result.finding, result.scope) == (fault.finding, fault.scope), result.result
    assert result.details["advice"] == fault.advice
    about_gpu_3 = any(line.startswith("3") for line in fault.state.lines) or BUS_3 in "".join(fault.state.log)
    if about_gpu_3:
        assert "GPU 3 " in result.result
        assert result.details["gpu3"] == fault.finding
        assert "gpu2" not in result.details


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_state_has_no_finding(answers: dict[str, CheckResult], name: str) -> None:
    assert answers[name].passed, answers[name].result


def test_the_tables_are_large_enough() -> None:
    assert len(FAULTS) >= 40
    assert len(HEALTHY) >= 20


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[int]:
    """A training process whose launcher has gone: its pid."""
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3).pid)"
    env = {**os.environ, "LOCAL_RANK": "3"}
    left = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    pid = int(left.stdout)
    yield pid
    os.kill(pid, 9)


def test_leftovers_of_an_ended_job_are_found_and_ones_own_ranks_are_not(
    orphan: int, libraries: Path, tmp_path: Path, unmet: Callable[[str], None]
) -> None:
    env = {"LD_LIBRARY_PATH": str(libraries), "FAKE_NVML_STATE": str(tmp_path / "state")}
    request = {"checks": ["gpu"], "kernelLog": os.devnull}
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        mine, exclusive, known, small, left = run_many(
            [
                ([f"5 process {stranger.pid}"], request),
                ([f"5 process {stranger.pid}"], request | {"exclusiveGpus": True}),
                ([f"5 process {orphan}"], request | {"exclusiveGpus": True, "rankPids": {"0": orphan}}),
                ([f"5 process {orphan}", "5 process_mib 300"], request),
                ([f"5 process {orphan}"], request),
            ],
            env,
        )
    finally:
        stranger.kill()
        stranger.wait()
    assert mine.passed
    assert known.passed
    assert small.passed
    # A child of whoever asks is never a stranger: here that is pytest, an agent elsewhere.
    assert exclusive.passed
    parent = Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[1]
    if parent != "1":
        unmet(f"orphans here go to process {parent}, not to the first one")
    assert (left.finding, left.scope, left.details["advice"]) == ("gpu.leftover", "node", "restart")
    assert f"GPU 5 holds 4096 MiB of an orphaned process, pid {orphan} (sleep): end it" in left.result


def test_a_kernel_log_that_may_not_be_read_is_said(libraries: Path, tmp_path: Path) -> None:
    env = {"LD_LIBRARY_PATH": str(libraries), "FAKE_NVML_STATE": str(tmp_path / "state")}
    (result,) = run_many([((), {"checks": ["gpu"], "kernelLog": str(tmp_path / "none")})], env)
    assert result.passed
    assert result.details["kernel_log"] == "can't be read: No such file or directory"


def test_what_was_seen_once_is_not_found_again(libraries: Path, tmp_path: Path) -> None:
    """The next check gets this one's details as its baseline: only what came after counts."""
    kernel_log = tmp_path / "kmsg"
    kernel_log.write_text(f"4,1,{int(time.monotonic() * 1e6)},-;NVRM: Xid ({BUS_3}): 79, lost\n")
    env = {"LD_LIBRARY_PATH": str(libraries), "FAKE_NVML_STATE": str(tmp_path / "state")}
    request = {"checks": ["gpu"], "kernelLog": str(kernel_log)}
    (first,) = run_many([((), request)], env)
    assert first.finding == "gpu.xid"
    (again,) = run_many([((), request | {"baseline": first.details})], env)
    assert again.passed, again.result
