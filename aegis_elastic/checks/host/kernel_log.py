"""The kernel log, read to its present end: errors of the NVIDIA driver, and why processes died.

NVML reports an Xid only to those that registered before it came; the kernel log has all since the boot, and
the one error that may come without an Xid: that a GPU has fallen off the bus.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from aegis_elastic.core.diagnosis import signatures

# Much longer than the timeout of a collective, so the cause of a failure is still in it; short enough to
# leave out what an operator has repaired since.
WINDOW_S = 3600.0
RECORD_BYTES_MAX = 8192  # a record of /dev/kmsg is never longer, and a shorter read of it fails
RECORDS_MAX = 200_000  # of a log that grows as fast as we read

_KMSG = re.compile(r"^\d+,\d+,(?P<us>\d+),[^;]*;(?P<text>.*)")
_DMESG = re.compile(r"^(?:<\d+>)?\[ *(?P<s>\d+\.\d+)\] ?(?P<text>.*)")
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)")
_FALLEN = re.compile(r"GPU (?:at )?(?:PCI:)?(?P<bus>[0-9a-fA-F:.]+).*fallen off the bus")
_SWITCH = re.compile(r"SXid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)")
_RECOVERED = re.compile(r"recovery action changed from .* to 0x0\b")
_DRIVERS = (b"NVRM", b"SXid")  # only these records are parsed: a log has tens of thousands
# In records about a process that the kernel has killed, or that has died of a fault.
_PROCESS_MARKS = (
    b"Killed process",
    b"oom-kill",
    b"segfault",
    b"general protection",
    b"traps:",
    b"Memory failure",
)
_DRIVER_LOADS = "NVRM: loading NVIDIA"


@dataclass(frozen=True)
class DriverError:
    """One kind of error of one device: its PCI address, the error, its class, how often it came."""

    bus: str
    name: str
    code: int
    fault_class: str
    count: int


class Record(NamedTuple):
    """A line of the log and its time in seconds since the boot (None: unknown)."""

    time_s: float | None
    text: str


def read(path: str) -> Iterator[Record]:
    """All present records of NVIDIA's drivers. OSError if the log can't be read (a container may not)."""
    return map(_record, _lines(path, _is_of_driver))


def last_line_of(path: str, pids: Collection[int]) -> dict[int, str]:
    """Pid -> the last line of the log on how that process died: killed for lack of memory, a fault in a
    library. Raises OSError as `read`.
    """
    patterns = {pid: re.compile(rb"(?<!\d)%d(?!\d)" % pid) for pid in pids}

    def is_about_them(line: bytes) -> bool:
        return any(mark in line for mark in _PROCESS_MARKS) and any(
            pattern.search(line) for pattern in patterns.values()
        )

    found: dict[int, str] = {}
    for line in _lines(path, is_about_them):
        for pid, pattern in patterns.items():
            if pattern.search(line.partition(b";")[2] or line):
                found[pid] = _record(line).text
    return found


def _lines(path: str, wanted: Callable[[bytes], bool]) -> Iterator[bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # A character device returns one record per read; a file (a saved log) any number of lines.
        rest = b""
        for _ in range(RECORDS_MAX):
            try:
                data = os.read(fd, RECORD_BYTES_MAX)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # the record was overwritten meanwhile; the next read returns the oldest left
                raise
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            yield from filter(wanted, lines)
        if wanted(rest):
            yield rest
    finally:
        os.close(fd)


def _is_of_driver(line: bytes) -> bool:
    return any(name in line for name in _DRIVERS)


def _record(line: bytes) -> Record:
    text = line.decode("utf-8", "replace")
    kmsg = _KMSG.match(text)
    if kmsg:
        return Record(int(kmsg["us"]) / 1e6, kmsg["text"])
    dmesg = _DMESG.match(text)
    return Record(float(dmesg["s"]), dmesg["text"]) if dmesg else Record(None, text)


def driver_errors(records: Iterable[Record], since_s: float) -> list[DriverError]:
    """Errors of GPUs from `since_s` (seconds since the boot) on that still hold. Pure.

    Errors no longer hold after the driver was loaded again, or after it has reported that the GPU needs no
    recovery any more. Xids that are the application's fault, or that follow from another one, don't count:
    `core.diagnosis.signatures` classifies them.
    """
    found: dict[tuple[str, str], DriverError] = {}
    for record in records:
        if record.time_s is not None and record.time_s < since_s:
            continue
        if _DRIVER_LOADS in record.text:
            found.clear()
            continue
        error = _driver_error(record.text)
        if error is None:
            continue
        if _RECOVERED.search(record.text):
            found = {key: old for key, old in found.items() if old.bus != error.bus}
            continue
        signature = signatures.load().classify(record.text)
        if signature is not None and signature.action == "isolate_node" and signature.role != "cascade":
            key = error.bus, error.name
            earlier = found[key].count if key in found else 0
            found[key] = replace(error, fault_class=signature.fault_class, count=earlier + 1)
    return list(found.values())


def _driver_error(text: str) -> DriverError | None:
    xid = _XID.search(text)
    if xid:
        return DriverError(address(xid["bus"]), f"Xid {xid['code']}", int(xid["code"]), "", 1)
    switch = _SWITCH.search(text)
    if switch:
        return DriverError(address(switch["bus"]), f"SXid {switch['code']}", 0, "", 1)
    fallen = _FALLEN.search(text)
    return DriverError(address(fallen["bus"]), "fallen off the bus", 0, "", 1) if fallen else None


def address(bus: str) -> str:
    """A PCI address as the kernel log's Xids have it: "0000:1b:00" of "00000000:1B:00.0"."""
    parts = bus.strip(":.").partition(".")[0].lower().split(":")
    return ":".join([parts[0][-4:], *parts[1:]])
