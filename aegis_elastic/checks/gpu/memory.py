"""Probes of a GPU's memory and of its recovery action: ECC, remapped rows, retired pages."""

from __future__ import annotations

import ctypes

import pynvml

from aegis_elastic.checks.gpu.nvml import Card, Probe, Problem, field, query

# Pages that a GPU may retire in its life before NVIDIA replaces it (before Ampere).
RETIRED_PAGES_MAX = 59
# Rows that Ampere and later can remap: a GPU with more uncorrected errors in its life has used up its spare
# rows. Below that an old, repaired error is no fault.
LIFETIME_UNCORRECTED_MAX = 512
# Corrected errors are harmless; very many of them since the last check announce worse ones.
CORRECTED_GROWTH_MAX = 10_000

# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: the driver's own advice. Numbers newer than this table count as
# hardware, too: drivers set them only when work can't go on.
_RECOVERY_ACTIONS = {
    1: ("reset the GPU", "hardware", "reset"),
    2: ("reboot the node", "hardware", "drain"),
    3: ("drain peer-to-peer work", "hardware", "drain"),
    4: ("drain and reset", "hardware", "drain"),
    # The GPUs are fine; the service that joins nodes into one NVLink domain is not.
    5: ("recover the IMEX domain", "software", "drain"),
    6: ("reset the bus", "hardware", "reset"),
    7: ("reboot the system", "hardware", "drain"),
}


def recovery_action(card: Card) -> list[Problem]:
    """The recovery action that the driver asks for."""
    action = field(card.handle, getattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None))
    if not action:
        return []
    name, scope, advice = _RECOVERY_ACTIONS.get(action, (f"action {action}", "hardware", "drain"))
    return [Problem("gpu.recovery_action", scope, f"asks for recovery: {name}", advice)]


def ecc(card: Card) -> list[Problem]:
    """Uncorrected errors since the driver was loaded and in the GPU's life; very many corrected ones."""
    problems = []
    uncorrected, volatile = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    count = query(pynvml.nvmlDeviceGetTotalEccErrors, card.handle, uncorrected, volatile)
    if count:
        card.facts["ecc_uncorrected"] = count
        problems.append(Problem("gpu.ecc", "hardware", f"has {count} uncorrected ECC errors", "reset"))
    life = query(pynvml.nvmlDeviceGetTotalEccErrors, card.handle, uncorrected, pynvml.NVML_AGGREGATE_ECC)
    if life:
        card.facts["ecc_uncorrected_life"] = life
    if life and life > LIFETIME_UNCORRECTED_MAX:
        text = f"has had {life} uncorrected ECC errors in its life, above {LIFETIME_UNCORRECTED_MAX}"
        problems.append(Problem("gpu.ecc_life", "hardware", text, "isolate"))
    corrected = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
    repaired = query(pynvml.nvmlDeviceGetTotalEccErrors, card.handle, corrected, volatile)
    grown = card.grown("ecc_corrected", repaired) if repaired is not None else 0
    if grown > CORRECTED_GROWTH_MAX:
        text = f"had {grown} corrected ECC errors since the last check"
        problems.append(Problem("gpu.ecc_storm", "unknown", text, "watch"))
    return problems


def sram(card: Card) -> list[Problem]:
    """NVIDIA's threshold for errors in on-chip memory, over which a GPU is replaced."""
    if not hasattr(pynvml, "c_nvmlEccSramErrorStatus_v1_t"):
        return []
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    known = query(pynvml.nvmlDeviceGetSramEccErrorStatus, card.handle, ctypes.byref(status)) is not None
    if known and status.bThresholdExceeded:
        text = "is over the SRAM error threshold: replace it"
        return [Problem("gpu.sram", "hardware", text, "isolate")]
    return []


def remapped_rows(card: Card) -> list[Problem]:
    """Broken rows of memory that could not be remapped, or are yet to be."""
    rows = query(pynvml.nvmlDeviceGetRemappedRows, card.handle)
    if not rows:
        return []
    corrected, uncorrected, pending, failed = rows
    if corrected or uncorrected:
        card.facts["remapped_rows"] = corrected + uncorrected  # repaired: recorded, never a fault
    if failed:
        text = "could not remap a broken memory row: replace it"
        return [Problem("gpu.remap_failed", "hardware", text, "isolate")]
    if pending:
        return [Problem("gpu.remap_pending", "hardware", "has a memory row to remap: reset it", "reset")]
    return []


def retired_pages(card: Card) -> list[Problem]:
    """The same by pages, on GPUs before Ampere."""
    problems = []
    if query(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, card.handle):
        text = "has memory pages to retire: reset it"
        problems.append(Problem("gpu.retired_pending", "hardware", text, "reset"))
    causes = (
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    retired = sum(len(query(pynvml.nvmlDeviceGetRetiredPages, card.handle, cause) or ()) for cause in causes)
    if retired:
        card.facts["retired_pages"] = retired
    if retired > RETIRED_PAGES_MAX:
        text = f"has retired {retired} memory pages, more than {RETIRED_PAGES_MAX}: replace it"
        problems.append(Problem("gpu.retired_pages", "hardware", text, "isolate"))
    return problems


PROBES: tuple[Probe, ...] = (recovery_action, ecc, sram, remapped_rows, retired_pages)
