"""The gpu check: the state of all GPUs by NVML, through nvidia-ml-py.

Every probe queries one aspect of one GPU and returns problems; a query that the GPU or the driver doesn't
support is no problem (`nvml.query`). Each problem has a code, a scope and the vendor's advice; the gravest
decides. NVML calls can hang for ever on a broken GPU: that is what the budget is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pynvml

from aegis_elastic.checks.contract.child_process import OnStep, Outcome, Scalar, failed, passed
from aegis_elastic.checks.contract.request import CheckRequest
from aegis_elastic.checks.gpu import faults, links, memory, speed, tenants
from aegis_elastic.checks.gpu.nvml import Card, Probe, Problem, query
from aegis_elastic.checks.host.kernel_log import address

PROBES: tuple[Probe, ...] = (*memory.PROBES, *speed.PROBES, *links.PROBES)


def check(request: CheckRequest, on_step: OnStep) -> Outcome:
    """Count the GPUs and run every probe on each. Passes if none is there and none is expected.

    Details: "count", "driver", "name", "advice" (of the gravest finding), "gpu3" (its findings' codes), and
    what was read as "gpu3.<fact>"; `request.baseline` is the details of an earlier result.
    """
    expected = request.expected_gpus or 0
    on_step("initialising NVML")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _no_library(error, expected)
    on_step("counting the GPUs")
    count = int(pynvml.nvmlDeviceGetCount())
    details: dict[str, Scalar] = {"count": count, "driver": driver_version()}
    problems: list[tuple[int | None, Problem]] = []
    if count < expected:
        missing = Problem("gpu.missing", "hardware", f"{count} of {expected} GPUs are there", "drain")
        problems.append((None, missing))
    cards: list[Card] = []
    for index in range(count):
        on_step(f"asking GPU {index}")
        try:
            cards.append(_open(index, request.baseline, details))
        except pynvml.NVMLError as error:
            problems.append((index, _error(error)))
    events = faults.Events(cards)
    for card in cards:
        on_step(f"asking GPU {card.index}")
        problems += [(card.index, problem) for problem in _examine(card, request)]
    problems += links.compare_links(cards).items()
    on_step("reading reported faults")
    problems += events.take()
    events.close()
    problems += faults.from_kernel_log(request.kernel_log, cards, request.baseline, details)
    for card in cards:
        details |= {f"gpu{card.index}.{name}": value for name, value in card.facts.items()}
    return _conclude(problems, details)


def _conclude(problems: list[tuple[int | None, Problem]], details: dict[str, Scalar]) -> Outcome:
    if problems:
        codes: dict[int, list[str]] = {}
        for index, problem in problems:
            if index is not None:
                codes.setdefault(index, []).append(problem.finding)
        details |= {f"gpu{index}": ", ".join(dict.fromkeys(found)) for index, found in codes.items()}
        # By gravity, since the first one decides and is read first.
        ordered = sorted(problems, key=lambda found: found[1].gravity)
        worst = ordered[0][1]
        details["advice"] = worst.advice
        text = "; ".join(f"{_prefix(index)}{problem.text}" for index, problem in ordered)
        return failed(worst.finding, worst.scope, f"gpu: {text} [advice: {worst.advice}]", details)
    if not details["count"]:
        return passed("gpu: no GPU on this node, and none is expected", details)
    name, driver = details.get("name"), details["driver"]
    return passed(f"gpu: {details['count']} x {name} healthy, driver {driver}", details)


def _prefix(index: int | None) -> str:
    return "" if index is None else f"GPU {index} "


def driver_version() -> str | None:
    """The kernel driver's version, None if unknown. NVML must be initialised."""
    version: str | None = query(pynvml.nvmlSystemGetDriverVersion)
    return version


def _no_library(error: pynvml.NVMLError, expected: int) -> Outcome:
    absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    if error.value in absent and not expected:
        return passed(f"gpu: no GPU on this node ({error}), and none is expected", {"count": 0})
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        text = "gpu: the driver library and the kernel driver are of different versions"
        return failed("gpu.driver", "software", text, {"advice": "drain"})
    if expected:
        text = f"gpu: 0 of {expected} GPUs are there: {error}"
        return failed("gpu.missing", "hardware", text, {"count": 0, "advice": "drain"})
    text = f"gpu: cannot initialise NVML: {error}"
    return failed("gpu.driver", "software", text, {"advice": "drain"})


def _open(index: int, baseline: Mapping[str, Scalar], details: dict[str, Scalar]) -> Card:
    """The GPU of this index. Raises NVMLError if it doesn't answer at all."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name = query(pynvml.nvmlDeviceGetName, handle)
    details.setdefault("name", name)
    pci = query(pynvml.nvmlDeviceGetPciInfo_v3, handle)
    bus = address(pci.busId) if pci is not None else ""
    prefix = f"gpu{index}."
    previous = {key.removeprefix(prefix): value for key, value in baseline.items() if key.startswith(prefix)}
    return Card(index, handle, bus, {}, previous)


def _examine(card: Card, request: CheckRequest) -> list[Problem]:
    """All problems of this GPU.

    Single probes that fail are only recorded; a GPU on which most probes fail is broken.
    """
    own_pids = tenants.own_pids(request.rank_pids.values())
    problems: list[Problem] = []
    unanswered: list[str] = []
    leftovers: Probe = partial(tenants.leftovers, own_pids=own_pids, exclusive=request.exclusive_gpus)
    for probe in (*PROBES, leftovers):
        try:
            problems += probe(card)
        except pynvml.NVMLError as error:
            problem = _error(error)
            if problem.finding != "gpu.error":
                return [*problems, problem]
            unanswered.append(str(error))
    if unanswered:
        card.facts["unanswered"] = ", ".join(dict.fromkeys(unanswered))
    if len(unanswered) > len(PROBES) / 2:
        problems.append(Problem("gpu.error", "hardware", f"doesn't answer: {unanswered[0]}", "drain"))
    return problems


def _error(error: pynvml.NVMLError) -> Problem:
    found = _ERRORS.get(error.value)
    return found or Problem("gpu.error", "hardware", f"doesn't answer: {error}", "drain")


_ERRORS = {
    pynvml.NVML_ERROR_GPU_IS_LOST: Problem(
        "gpu.lost", "hardware", "has fallen off the bus (GPU is lost)", "drain"
    ),
    pynvml.NVML_ERROR_RESET_REQUIRED: Problem("gpu.reset_required", "hardware", "must be reset", "reset"),
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: Problem(
        "gpu.power",
        "hardware",
        "doesn't get enough power: look at its cables and the node's supplies",
        "isolate",
    ),
    pynvml.NVML_ERROR_IRQ_ISSUE: Problem(
        "gpu.interrupt", "hardware", "doesn't get its interrupts through", "drain"
    ),
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: Problem(
        "gpu.inforom", "hardware", "has lost its board's records (InfoROM): replace it", "isolate"
    ),
    # A container that sees a GPU and may not use it: nothing is wrong with the GPU.
    pynvml.NVML_ERROR_NO_PERMISSION: Problem(
        "gpu.denied", "software", "may not be used from here: give the container this device", "restart"
    ),
}
