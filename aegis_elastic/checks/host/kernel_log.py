"""The kernel's log, read to its present end without waiting: what the NVIDIA driver complained about.

NVML reports an Xid only to whoever registered before it came; the kernel log has them from the boot on, and
the one complaint that may come without an Xid: that a GPU has fallen off the bus.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from aegis_elastic.core.diagnosis import signatures

# Much longer than a collective waits before it gives up, so the cause of a failure is still in it; short
# enough that what an operator has repaired since doesn't haunt the node.
WINDOW_S = 3600.0
RECORD_BYTES_MAX = 8192  # a record of /dev/kmsg is never longer, and a shorter read of one fails
RECORDS_MAX = 200_000  # of a log that grows as fast as we read

_KMSG = re.compile(r"^\d+,\d+,(?P<us>\d+),[^;]*;(?P<text>.*)")
_DMESG = re.compile(r"^(?:<\d+>)?\[ *(?P<s>\d+\.\d+)\] ?(?P<text>.*)")
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)")
_FALLEN = re.compile(r"GPU (?:at )?(?:PCI:)?(?P<bus>[0-9a-fA-F:.]+).*fallen off the bus")
_SWITCH = re.compile(r"SXid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)")
_RECOVERED = re.compile(r"recovery action changed from .* to 0x0\b")
_DRIVERS = (b"NVRM", b"SXid")  # of all records only these are looked at: a log holds tens of thousands
# How the kernel speaks of a process that it has killed, or that has died of a fault.
_OF_PROCESSES = (
    b"Killed process",
    b"oom-kill",
    b"segfault",
    b"general protection",
    b"traps:",
    b"Memory failure",
)
_DRIVER_LOADS = "NVRM: loading NVIDIA"


@dataclass(frozen=True)
class Complaint:
    """One kind of complaint about one card: its PCI address, what it was, what it means, how often."""

    bus: str
    what: str
    code: int
    fault_class: str
    count: int


class Record(NamedTuple):
    """A line of the log and its time in seconds since the boot (None: it doesn't say)."""

    time_s: float | None
    text: str


def read(path: str) -> Iterator[Record]:
    """All records there are now of NVIDIA's drivers. Raises OSError where the log can't be read (a container
    may not)."""
    return map(_record, _lines(path, _is_drivers))


def about(path: str, pids: Collection[int]) -> dict[int, str]:
    """Pid -> the last thing that the log says of that process: killed for want of memory, a fault in a
    library. Raises OSError as `read`.
    """
    marks = {pid: re.compile(rb"(?<!\d)%d(?!\d)" % pid) for pid in pids}

    def is_theirs(line: bytes) -> bool:
        return any(word in line for word in _OF_PROCESSES) and any(m.search(line) for m in marks.values())

    found: dict[int, str] = {}
    for line in _lines(path, is_theirs):
        for pid, mark in marks.items():
            if mark.search(line.partition(b";")[2] or line):
                found[pid] = _record(line).text
    return found


def _lines(path: str, wanted: Callable[[bytes], bool]) -> Iterator[bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # A character device gives one record a read; a file (a saved log) any number of lines.
        rest = b""
        for _ in range(RECORDS_MAX):
            try:
                data = os.read(fd, RECORD_BYTES_MAX)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # the record was overwritten while we read; the next read takes the oldest left
                raise
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            yield from filter(wanted, lines)
        if wanted(rest):
            yield rest
    finally:
        os.close(fd)


def _is_drivers(line: bytes) -> bool:
    return any(name in line for name in _DRIVERS)


def _record(line: bytes) -> Record:
    text = line.decode("utf-8", "replace")
    kmsg = _KMSG.match(text)
    if kmsg:
        return Record(int(kmsg["us"]) / 1e6, kmsg["text"])
    dmesg = _DMESG.match(text)
    return Record(float(dmesg["s"]), dmesg["text"]) if dmesg else Record(None, text)


def complaints(records: Iterable[Record], since_s: float) -> list[Complaint]:
    """What stands against GPUs from `since_s` (seconds since the boot) on, and wasn't taken back since. Pure.

    Taken back: a driver that was loaded anew has no old faults, and neither has a card for which the driver
    says that no recovery is needed any more. Xids that are the application's own fault, or follow from
    another, are no complaint about a card: `core.diagnosis.signatures` knows which.
    """
    found: dict[tuple[str, str], Complaint] = {}
    for record in records:
        if record.time_s is not None and record.time_s < since_s:
            continue
        if _DRIVER_LOADS in record.text:
            found.clear()
            continue
        made = _complaint(record.text)
        if made is None:
            continue
        if _RECOVERED.search(record.text):
            found = {key: old for key, old in found.items() if old.bus != made.bus}
            continue
        told = signatures.load().classify(record.text)
        if told is not None and told.action == "isolate_node" and told.role != "cascade":
            key = made.bus, made.what
            before = found[key].count if key in found else 0
            found[key] = replace(made, fault_class=told.fault_class, count=before + 1)
    return list(found.values())


def _complaint(text: str) -> Complaint | None:
    xid = _XID.search(text)
    if xid:
        return Complaint(address(xid["bus"]), f"Xid {xid['code']}", int(xid["code"]), "", 1)
    switch = _SWITCH.search(text)
    if switch:
        return Complaint(address(switch["bus"]), f"SXid {switch['code']}", 0, "", 1)
    fallen = _FALLEN.search(text)
    return Complaint(address(fallen["bus"]), "fallen off the bus", 0, "", 1) if fallen else None


def address(bus: str) -> str:
    """A PCI address as the kernel log's Xids have it: "0000:1b:00" of "00000000:1B:00.0"."""
    parts = bus.strip(":.").partition(".")[0].lower().split(":")
    return ":".join([parts[0][-4:], *parts[1:]])
