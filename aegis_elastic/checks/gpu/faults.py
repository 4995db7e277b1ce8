"""Faults that GPUs have reported: Xids, by NVML's events while we look and by the kernel log before that."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pynvml

from aegis_elastic.checks.contract.child_process import Scalar
from aegis_elastic.checks.gpu.nvml import Card, Problem, ask
from aegis_elastic.checks.host import kernel_log
from aegis_elastic.core.diagnosis import signatures

EVENTS_MAX = 64
# Where the vendor's catalogue asks for more than a reset of the GPU: power (54), a lost GPU (79).
_DRAIN = frozenset({54, 79})
# Tells a recovery action, which the probe of that name asks for itself.
_ACTION_CHANGED = 154
_LAST_READ = "kernel_log_read_s"

Found = list[tuple[int | None, Problem]]


class Events:
    """Xids from now on, of cards that will tell. Close it, or NVML keeps collecting."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards = {_pointer(card.handle): card for card in cards}
        self._set: Any = ask(pynvml.nvmlEventSetCreate)
        if self._set is None:
            return
        for card in cards:
            try:
                pynvml.nvmlDeviceRegisterEvents(card.handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
            except pynvml.NVMLError:
                # A card without events (MIG, a vGPU) or a lost one: the probes find what is wrong with it.
                continue

    def take(self) -> Found:
        """What has come, without waiting, by card."""
        found: Found = []
        for _ in range(EVENTS_MAX if self._set is not None else 0):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError:
                break  # NVML_ERROR_TIMEOUT: nothing more has come; GPU_IS_LOST: the probes say that
            card = self._cards.get(_pointer(event.device))
            code = int(event.eventData)
            told = signatures.load().classify(f"NVRM: Xid (PCI:{card.bus if card else ''}): {code}")
            if code != _ACTION_CHANGED and told is not None and told.action == "isolate_node":
                problem = _xid(code, f"reports Xid {code} ({told.fault_class}) now")
                found.append((card.index if card else None, problem))
        return found

    def close(self) -> None:
        """Stop collecting."""
        if self._set is not None:
            ask(pynvml.nvmlEventSetFree, self._set)
            self._set = None


def from_kernel_log(
    path: str, cards: Sequence[Card], before: Mapping[str, Scalar], details: dict[str, Scalar]
) -> Found:
    """Complaints since the last check, or of the last `WINDOW_S`; index None: about no card of ours."""
    now_s = time.monotonic()
    last = before.get(_LAST_READ)
    since_s = max(now_s - kernel_log.WINDOW_S, float(last) if isinstance(last, int | float) else 0.0)
    try:
        complaints = kernel_log.complaints(kernel_log.read(path), since_s)
    except OSError as error:
        # Containers mostly may not read it. What NVML says must do then, and whoever reads knows why.
        details["kernel_log"] = f"can't be read: {error.strerror}"
        return []
    details[_LAST_READ] = round(now_s, 3)
    by_bus = {card.bus: card.index for card in cards if card.bus}
    found: Found = []
    for each in complaints:
        index = by_bus.get(each.bus)
        who = "" if index is not None else f"the device at PCI {each.bus} "
        times = "" if each.count == 1 else f", {each.count} times"
        if each.what.startswith("fallen"):
            text = f"{who}has fallen off the bus, says the kernel log: reboot the node, reseat the card"
            found.append((index, Problem("gpu.fallen_off", "hardware", text, "drain")))
        elif each.what.startswith("SXid"):
            text = f"{who}is an NVSwitch with a fatal error, {each.what}{times} in the kernel log"
            found.append((None, Problem("gpu.nvswitch", "hardware", text, "drain")))
        else:
            text = f"{who}had {each.what} ({each.fault_class}{times}) in the kernel log"
            found.append((index, _xid(each.code, text)))
    return found


def _xid(code: int, text: str) -> Problem:
    advice = "drain" if code in _DRAIN else "reset"
    return Problem("gpu.xid", "hardware", f"{text}: {_WORDS[advice]}", advice)


_WORDS = {"drain": "drain the node and reboot it", "reset": "reset it"}


def _pointer(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
