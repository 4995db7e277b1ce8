"""The GPUs as NVIDIA's management library sees them, through nvidia-ml-py.

Every probe asks one question about one card and answers with a problem or nothing; a card or driver that
doesn't know the question is no problem. NVML calls can hang for ever on a dead card: that is what the budget
is for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import pynvml

from aegis_elastic.checks.frame import Note, Outcome, Scalar, failed, passed
from aegis_elastic.checks.request import CheckRequest

_UNKNOWN_QUESTION = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
_ARGUMENT_VERSION_MISMATCH = 25  # older nvidia-ml-py has no name for it

# The driver's own advice (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION).
_RECOVERY_ACTIONS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer-to-peer work",
    4: "drain and reset",
}


class Problem(NamedTuple):
    """A finding about one card: code, whose fault, and words for a person."""

    finding: str
    scope: str
    text: str


def check(request: CheckRequest, note: Note) -> Outcome:
    """Count the cards and put every probe to each; passes, saying so, if none is there or expected."""
    expected = request.expected_gpus or 0
    note("initialising NVML")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _no_library(error, expected)
    note("counting the GPUs")
    count = int(pynvml.nvmlDeviceGetCount())
    details: dict[str, Scalar] = {"count": count, "driver": driver_version()}
    problems: list[Problem] = []
    if count < expected:
        problems.append(Problem("gpu.missing", "hardware", f"{count} of {expected} GPUs are there"))
    for index in range(count):
        note(f"asking GPU {index}")
        found = _examine(index, details)
        if found:
            details[f"gpu{index}"] = ", ".join(problem.finding for problem in found)
        problems += [problem._replace(text=f"GPU {index} {problem.text}") for problem in found]
    if problems:
        # Hardware first: it decides whether the node may stay.
        worst = min(problems, key=lambda problem: problem.scope != "hardware")
        return failed(worst.finding, worst.scope, "gpu: " + "; ".join(p.text for p in problems), details)
    if not count:
        return passed("gpu: no GPU on this node, and none is expected", details)
    return passed(f"gpu: {count} x {details.get('name')} healthy, driver {details['driver']}", details)


def driver_version() -> str | None:
    """The kernel driver's version, None where it doesn't tell. NVML must be initialised."""
    version: str | None = _ask(pynvml.nvmlSystemGetDriverVersion)
    return version


def _no_library(error: pynvml.NVMLError, expected: int) -> Outcome:
    absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    if error.value in absent and not expected:
        return passed(f"gpu: no GPU on this node ({error}), and none is expected", {"count": 0})
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        text = "gpu: the driver library and the kernel driver are of different versions"
        return failed("gpu.driver", "software", text)
    if expected:
        text = f"gpu: 0 of {expected} GPUs are there: {error}"
        return failed("gpu.missing", "hardware", text, {"count": 0})
    return failed("gpu.driver", "software", f"gpu: cannot initialise NVML: {error}")


def _examine(index: int, details: dict[str, Scalar]) -> list[Problem]:
    problems: list[Problem] = []
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        details.setdefault("name", _ask(pynvml.nvmlDeviceGetName, handle))
        for probe in PROBES:
            problem = probe(handle)
            if problem:
                problems.append(problem)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
            problems.append(Problem("gpu.lost", "hardware", "has fallen off the bus (GPU is lost)"))
        elif error.value == pynvml.NVML_ERROR_RESET_REQUIRED:
            problems.append(Problem("gpu.reset_required", "hardware", "must be reset"))
        else:
            problems.append(Problem("gpu.error", "hardware", f"doesn't answer: {error}"))
    return problems


def _ask(question: Callable[..., Any], *arguments: object) -> Any:
    """The answer, or None where card or driver don't know the question. Other errors are the card's."""
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error.value in (*_UNKNOWN_QUESTION, _ARGUMENT_VERSION_MISMATCH):
            return None
        raise


def _recovery_action(handle: object) -> Problem | None:
    field = getattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    values = _ask(pynvml.nvmlDeviceGetFieldValues, handle, [field]) if field is not None else None
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS or not values[0].value.uiVal:
        return None
    action = _RECOVERY_ACTIONS.get(values[0].value.uiVal, f"action {values[0].value.uiVal}")
    return Problem("gpu.recovery_action", "hardware", f"asks for recovery: {action}")


def _ecc(handle: object) -> Problem | None:
    kind, since_boot = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    count = _ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, since_boot)
    return Problem("gpu.ecc", "hardware", f"has {count} uncorrected ECC errors") if count else None


def _sram(handle: object) -> Problem | None:
    if not hasattr(pynvml, "c_nvmlEccSramErrorStatus_v1_t"):
        return None
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    known = _ask(pynvml.nvmlDeviceGetSramEccErrorStatus, handle, ctypes.byref(status)) is not None
    if known and status.bThresholdExceeded:
        return Problem("gpu.sram", "hardware", "is over the SRAM error threshold: replace it")
    return None


def _remapped_rows(handle: object) -> Problem | None:
    rows = _ask(pynvml.nvmlDeviceGetRemappedRows, handle)  # corrected, uncorrected, pending, failed
    if rows and rows[3]:
        return Problem("gpu.remap_failed", "hardware", "could not remap a broken memory row: replace it")
    if rows and rows[2]:
        return Problem("gpu.remap_pending", "hardware", "has a memory row to remap: reset it")
    return None


def _retired_pages(handle: object) -> Problem | None:
    if _ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle):
        return Problem("gpu.retired_pending", "hardware", "has memory pages to retire: reset it")
    return None


def _temperature(handle: object) -> Problem | None:
    limit = _ask(pynvml.nvmlDeviceGetTemperatureThreshold, handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    now = _ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
    if limit and now is not None and now >= limit:
        return Problem("gpu.temperature", "slow", f"is at {now} C and slows down from {limit} C")
    return None


PROBES: tuple[Callable[[object], Problem | None], ...] = (
    _recovery_action,
    _ecc,
    _sram,
    _remapped_rows,
    _retired_pages,
    _temperature,
)
