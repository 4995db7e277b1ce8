"""Faults that GPUs have reported (Xids): by NVML's events during the check, by the kernel log before it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pynvml

from aegis_elastic.checks.contract.child_process import Scalar
from aegis_elastic.checks.gpu.nvml import Card, Problem, query
from aegis_elastic.checks.host import kernel_log
from aegis_elastic.core.diagnosis import signatures

EVENTS_MAX = 64
# Xids for which a reset of the GPU isn't enough by the vendor's catalogue: power (54), a lost GPU (79).
_DRAIN = frozenset({54, 79})
# Reports a recovery action, which has its own probe.
_ACTION_CHANGED = 154
_LAST_READ = "kernel_log_read_s"

Found = list[tuple[int | None, Problem]]


class Events:
    """Collects Xids from now on, of GPUs that support events. Close it, or NVML keeps collecting."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards = {_pointer(card.handle): card for card in cards}
        self._set: Any = query(pynvml.nvmlEventSetCreate)
        if self._set is None:
            return
        for card in cards:
            try:
                pynvml.nvmlDeviceRegisterEvents(card.handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
            except pynvml.NVMLError:
                # A GPU without events (MIG, a vGPU), or a lost one, which the probes find.
                continue

    def take(self) -> Found:
        """The Xids so far, without waiting, by GPU."""
        found: Found = []
        for _ in range(EVENTS_MAX if self._set is not None else 0):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError:
                break  # NVML_ERROR_TIMEOUT: no more events; GPU_IS_LOST: found by the probes
            card = self._cards.get(_pointer(event.device))
            code = int(event.eventData)
            signature = signatures.load().classify(f"NVRM: Xid (PCI:{card.bus if card else ''}): {code}")
            if code != _ACTION_CHANGED and signature is not None and signature.action == "isolate_node":
                problem = _xid(code, f"reports Xid {code} ({signature.fault_class}) now")
                found.append((card.index if card else None, problem))
        return found

    def close(self) -> None:
        """Stop collecting."""
        if self._set is not None:
            query(pynvml.nvmlEventSetFree, self._set)
            self._set = None


def from_kernel_log(
    path: str, cards: Sequence[Card], previous: Mapping[str, Scalar], details: dict[str, Scalar]
) -> Found:
    """Errors since the last check, or in the last `WINDOW_S`; index None: of no GPU that we know."""
    now_s = time.monotonic()
    last = previous.get(_LAST_READ)
    since_s = max(now_s - kernel_log.WINDOW_S, float(last) if isinstance(last, int | float) else 0.0)
    try:
        driver_errors = kernel_log.driver_errors(kernel_log.read(path), since_s)
    except OSError as error:
        # Most containers may not read it. Then NVML must suffice, and the details say why.
        details["kernel_log"] = f"can't be read: {error.strerror}"
        return []
    details[_LAST_READ] = round(now_s, 3)
    by_bus = {card.bus: card.index for card in cards if card.bus}
    found: Found = []
    for each in driver_errors:
        index = by_bus.get(each.bus)
        prefix = "" if index is not None else f"the device at PCI {each.bus} "
        times = "" if each.count == 1 else f", {each.count} times"
        if each.name.startswith("fallen"):
            text = f"{prefix}has fallen off the bus, says the kernel log: reboot the node, reseat the card"
            found.append((index, Problem("gpu.fallen_off", "hardware", text, "drain")))
        elif each.name.startswith("SXid"):
            text = f"{prefix}is an NVSwitch with a fatal error, {each.name}{times} in the kernel log"
            found.append((None, Problem("gpu.nvswitch", "hardware", text, "drain")))
        else:
            text = f"{prefix}had {each.name} ({each.fault_class}{times}) in the kernel log"
            found.append((index, _xid(each.code, text)))
    return found


def _xid(code: int, text: str) -> Problem:
    advice = "drain" if code in _DRAIN else "reset"
    return Problem("gpu.xid", "hardware", f"{text}: {_ADVICE_TEXT[advice]}", advice)


_ADVICE_TEXT = {"drain": "drain the node and reboot it", "reset": "reset it"}


def _pointer(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
