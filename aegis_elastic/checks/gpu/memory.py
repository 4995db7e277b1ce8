"""What a GPU says about itself and about its memory: recovery action, ECC, remapped rows, retired pages."""

from __future__ import annotations

import ctypes

import pynvml

from aegis_elastic.checks.gpu.nvml import Card, Probe, Problem, ask, field

# Pages that a card may retire in its life before NVIDIA replaces it (cards before Ampere).
RETIRED_PAGES_MAX = 59
# Rows that Ampere and later can remap; a card with more uncorrected errors in its life than that has used up
# what the vendor foresaw. Below it an old, repaired error is no fault.
LIFETIME_UNCORRECTED_MAX = 512
# Single bits are corrected without harm; a storm of them since the last check comes before something worse.
CORRECTED_GROWTH_MAX = 10_000

# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: the driver's own advice. A number that is newer than this table is
# hardware's too: drivers raise it only when work can't go on.
_RECOVERY_ACTIONS = {
    1: ("reset the GPU", "hardware", "reset"),
    2: ("reboot the node", "hardware", "drain"),
    3: ("drain peer-to-peer work", "hardware", "drain"),
    4: ("drain and reset", "hardware", "drain"),
    # The cards are fine; the service that joins nodes into one NVLink domain is not.
    5: ("recover the IMEX domain", "software", "drain"),
    6: ("reset the bus", "hardware", "reset"),
    7: ("reboot the system", "hardware", "drain"),
}


def recovery_action(card: Card) -> list[Problem]:
    """What the driver itself wants done with this card."""
    action = field(card.handle, getattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None))
    if not action:
        return []
    name, scope, advice = _RECOVERY_ACTIONS.get(action, (f"action {action}", "hardware", "drain"))
    return [Problem("gpu.recovery_action", scope, f"asks for recovery: {name}", advice)]


def ecc(card: Card) -> list[Problem]:
    """Uncorrected errors since the driver was loaded and in the card's life; storms of corrected ones."""
    problems = []
    uncorrected, volatile = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    count = ask(pynvml.nvmlDeviceGetTotalEccErrors, card.handle, uncorrected, volatile)
    if count:
        card.facts["ecc_uncorrected"] = count
        problems.append(Problem("gpu.ecc", "hardware", f"has {count} uncorrected ECC errors", "reset"))
    life = ask(pynvml.nvmlDeviceGetTotalEccErrors, card.handle, uncorrected, pynvml.NVML_AGGREGATE_ECC)
    if life:
        card.facts["ecc_uncorrected_life"] = life
    if life and life > LIFETIME_UNCORRECTED_MAX:
        text = f"has had {life} uncorrected ECC errors in its life, above {LIFETIME_UNCORRECTED_MAX}"
        problems.append(Problem("gpu.ecc_life", "hardware", text, "isolate"))
    corrected = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
    repaired = ask(pynvml.nvmlDeviceGetTotalEccErrors, card.handle, corrected, volatile)
    grown = card.grown("ecc_corrected", repaired) if repaired is not None else 0
    if grown > CORRECTED_GROWTH_MAX:
        text = f"had {grown} corrected ECC errors since the last check"
        problems.append(Problem("gpu.ecc_storm", "unknown", text, "watch"))
    return problems


def sram(card: Card) -> list[Problem]:
    """NVIDIA's own threshold for errors in on-chip memory, over which a card is replaced."""
    if not hasattr(pynvml, "c_nvmlEccSramErrorStatus_v1_t"):
        return []
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    known = ask(pynvml.nvmlDeviceGetSramEccErrorStatus, card.handle, ctypes.byref(status)) is not None
    if known and status.bThresholdExceeded:
        text = "is over the SRAM error threshold: replace it"
        return [Problem("gpu.sram", "hardware", text, "isolate")]
    return []


def remapped_rows(card: Card) -> list[Problem]:
    """Broken rows of memory that could not be replaced by spare ones, or wait for it."""
    rows = ask(pynvml.nvmlDeviceGetRemappedRows, card.handle)
    if not rows:
        return []
    corrected, uncorrected, pending, failed = rows
    if corrected or uncorrected:
        card.facts["remapped_rows"] = corrected + uncorrected  # repaired: told, never a fault
    if failed:
        text = "could not remap a broken memory row: replace it"
        return [Problem("gpu.remap_failed", "hardware", text, "isolate")]
    if pending:
        return [Problem("gpu.remap_pending", "hardware", "has a memory row to remap: reset it", "reset")]
    return []


def retired_pages(card: Card) -> list[Problem]:
    """The same by pages, on cards before Ampere."""
    problems = []
    if ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, card.handle):
        text = "has memory pages to retire: reset it"
        problems.append(Problem("gpu.retired_pending", "hardware", text, "reset"))
    causes = (
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    retired = sum(len(ask(pynvml.nvmlDeviceGetRetiredPages, card.handle, cause) or ()) for cause in causes)
    if retired:
        card.facts["retired_pages"] = retired
    if retired > RETIRED_PAGES_MAX:
        text = f"has retired {retired} memory pages, more than {RETIRED_PAGES_MAX}: replace it"
        problems.append(Problem("gpu.retired_pages", "hardware", text, "isolate"))
    return problems


PROBES: tuple[Probe, ...] = (recovery_action, ecc, sram, remapped_rows, retired_pages)
