"""Probes of what makes a GPU slow: heat, throttling, a narrow PCIe link. Their scope is "slow"."""

from __future__ import annotations

import pynvml

from aegis_elastic.checks.gpu.nvml import Card, Probe, Problem, field, query

# Single PCIe replays are harmless; so many since the last check mean a bad link.
PCIE_REPLAY_GROWTH_MAX = 1000

# Reasons for lower clocks that are faults. Not among them, because healthy GPUs have them all the time: idle
# (1), application clocks (2), the power cap (4), sync boost (16), display (256).
_HW_SLOWDOWN, _SW_THERMAL, _HW_THERMAL, _POWER_BRAKE = 0x08, 0x20, 0x40, 0x80


def temperature(card: Card) -> list[Problem]:
    """Core and memory against the GPU's own thresholds, or its margin where it has no absolute ones."""
    now = query(pynvml.nvmlDeviceGetTemperature, card.handle, pynvml.NVML_TEMPERATURE_GPU)
    if now is not None:
        card.facts["temperature_c"] = now
    return _core(card, now) + _memory(card)


def _core(card: Card, now: int | None) -> list[Problem]:
    shutdown = _threshold(card, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN)
    slowdown = _threshold(card, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    if shutdown and now is not None and now >= shutdown:
        text = f"is at {now} C and shuts down from {shutdown} C: stop it and look at its cooling"
        return [Problem("gpu.shutdown_temperature", "hardware", text, "drain")]
    if slowdown and now is not None and now >= slowdown:
        return [_hot("gpu.temperature", f"is at {now} C and slows down from {slowdown} C")]
    if slowdown or not hasattr(pynvml, "nvmlDeviceGetMarginTemperature"):
        return []
    # Hopper and later report how far below the limit they are; they slow down at the margin in that field.
    margin = query(pynvml.nvmlDeviceGetMarginTemperature, card.handle)
    limit = field(card.handle, getattr(pynvml, "NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT", None)) or 0
    if margin is not None and margin <= limit:
        return [
            _hot("gpu.temperature", f"is {-margin} C over its limit (it slows down from {-limit} C over)")
        ]
    return []


def _memory(card: Card) -> list[Problem]:
    now = field(card.handle, getattr(pynvml, "NVML_FI_DEV_MEMORY_TEMP", None))
    limit = _threshold(card, pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX)
    if now and limit and now >= limit:
        return [_hot("gpu.memory_temperature", f"has its memory at {now} C, the most allowed is {limit} C")]
    return []


def _hot(code: str, text: str) -> Problem:
    return Problem(code, "slow", text, "watch")


def _threshold(card: Card, which: int) -> int | None:
    limit: int | None = query(pynvml.nvmlDeviceGetTemperatureThreshold, card.handle, which)
    return limit


def throttling(card: Card) -> list[Problem]:
    """Whether the clocks are throttled now, and why."""
    new = getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", None)  # the old name went in 2023
    reasons = query(new or pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, card.handle) or 0
    problems = []
    if reasons & (_HW_THERMAL | _SW_THERMAL):
        who = "hardware" if reasons & _HW_THERMAL else "driver"
        text = f"is throttled for heat by the {who}: look at its cooling"
        problems.append(Problem("gpu.throttle_thermal", "slow", text, "watch"))
    if reasons & _POWER_BRAKE:
        text = "is throttled by the external power brake: look at the node's power supplies"
        problems.append(Problem("gpu.throttle_power", "slow", text, "watch"))
    if reasons & _HW_SLOWDOWN and not problems:
        text = "is slowed down by its hardware (heat, power or the power brake)"
        problems.append(Problem("gpu.throttle_hardware", "slow", text, "watch"))
    return problems


def pcie(card: Card) -> list[Problem]:
    """Missing lanes and replays. The link's generation isn't judged: it drops whenever a GPU idles."""
    problems = []
    width = query(pynvml.nvmlDeviceGetCurrPcieLinkWidth, card.handle)
    widest = query(pynvml.nvmlDeviceGetMaxPcieLinkWidth, card.handle)
    if width and widest and width < widest:
        text = f"runs on {width} of {widest} PCIe lanes: reseat it or drain the node"
        problems.append(Problem("gpu.pcie_width", "slow", text, "drain"))
    replays = query(pynvml.nvmlDeviceGetPcieReplayCounter, card.handle)
    grown = card.grown("pcie_replays", replays) if replays is not None else 0
    if grown > PCIE_REPLAY_GROWTH_MAX:
        text = f"had {grown} PCIe packets sent again since the last check"
        problems.append(Problem("gpu.pcie_replay", "slow", text, "drain"))
    return problems


PROBES: tuple[Probe, ...] = (temperature, throttling, pcie)
