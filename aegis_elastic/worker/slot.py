"""A rank's slot: a small file in shared memory with the progress of its training.

The rank maps the file and writes without a system call; its agent reads it at any moment and without a lock.
Each record carries its number twice, first and last: two different ones mean that it was read while it was
written, and it is read again. A record that can't be read is missing, never wrong.

Layout, version 2, little-endian, ``SIZE`` bytes::

       0  head        magic "AEGISLOT", version, pid of the rank
      64  step        optimizer steps: total, step, monotonic ns of the last and the first, longest pause (ns)
     128  progress    calls of ``aegis_elastic.progress``: total, step, monotonic ns of the last
     192  own work    samples in the ring so far, CPU ns per step of the main thread, ns that the last reading
                      of the flight recorder took, whether waiting between collectives is subtracted
     256  checkpoint  calls of ``checkpoint_saved``: total, step, wall ns, path (PATH_BYTES_MAX, utf-8)
    3072  groups      how often they were written; then GROUPS_MAX numbers of groups of equals, 0: none
    4096  ring        RING samples of own work: step, then µs to its first and last collective, and in all

``agents/watch/slots.py`` reads. Standard library only, without typing (which costs a rank time), and old
syntax: it is loaded by path into whatever Python the user runs.
"""

import mmap
import os
import struct

MAGIC = b"AEGISLOT"
VERSION = 2
SIZE = 8192
# The folder with the slots of this node, one per rank: set for ranks, inherited by their children.
VARIABLE = "AEGIS_PROGRESS"
PATH_BYTES_MAX = 2048
RING = 256
TRIES = 8

HEAD = struct.Struct("<8sIIQ")
STEP, STEP_AT = struct.Struct("<QQqqqqQ"), 64
PROGRESS, PROGRESS_AT = struct.Struct("<QQqqQ"), 128
OWN_WORK, OWN_WORK_AT = struct.Struct("<QQqqQQ"), 192
CHECKPOINT, CHECKPOINT_AT = struct.Struct("<QQqqH%dsQ" % PATH_BYTES_MAX), 256  # noqa: UP031 - old syntax
GROUPS_MAX = 8
GROUPS, GROUPS_AT = struct.Struct("<Q%dQQ" % GROUPS_MAX), 3072  # noqa: UP031 - old syntax
SAMPLE, RING_AT = struct.Struct("<IIII"), 4096
_MICROS_MAX = (1 << 32) - 1


class Slot:
    """The writer's side. One process, one thread per record."""

    def __init__(self, path: str) -> None:
        """Open the file, or create it (mode 0600). OSError if it can't be, or the file system is full."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # allocated now: a full file system would otherwise be a SIGBUS in the middle of training
            os.posix_fallocate(handle, 0, SIZE)
            self._map = mmap.mmap(handle, SIZE)
        finally:
            os.close(handle)
        self._step_records = 0
        self._sample_count = 0
        self._group_records = 0
        # Another process of this rank may have written before: its numbers must not be used again.
        self._progress_calls = PROGRESS.unpack_from(self._map, PROGRESS_AT)[0]
        self._checkpoints = CHECKPOINT.unpack_from(self._map, CHECKPOINT_AT)[0]
        HEAD.pack_into(self._map, 0, MAGIC, VERSION, 0, os.getpid())

    def write_step(self, total: int, step: int, last_ns: int, first_ns: int, longest_ns: int) -> None:
        """An optimizer has made a step: ``total`` so far, the training step, times in monotonic ns."""
        self._step_records = number = self._step_records + 1
        STEP.pack_into(self._map, STEP_AT, number, total, step, last_ns, first_ns, longest_ns, number)

    def write_progress(self, step: int, now_ns: int) -> None:
        """The training code has called ``progress``."""
        self._progress_calls = calls = self._progress_calls + 1
        PROGRESS.pack_into(self._map, PROGRESS_AT, calls, calls, step, now_ns, calls)

    def write_checkpoint(self, step: int, wall_ns: int, path: str) -> None:
        """The training code has called ``checkpoint_saved``. ValueError for a path that is too long."""
        encoded = os.fsencode(path)
        if len(encoded) > PATH_BYTES_MAX:
            size = "%d bytes, at most %d" % (len(encoded), PATH_BYTES_MAX)  # noqa: UP031 - old syntax
            raise ValueError("cannot note a checkpoint: its path has " + size)
        self._checkpoints = checkpoints = self._checkpoints + 1
        record = checkpoints, checkpoints, step, wall_ns, len(encoded), encoded, checkpoints
        CHECKPOINT.pack_into(self._map, CHECKPOINT_AT, *record)

    def write_own_work(
        self, samples: "list[tuple[int, int, int, int]]", cpu_ns: int, read_ns: int, timed: bool
    ) -> None:
        """Add samples of own work: (step, µs to its first and last collective, µs in all)."""
        for sample in samples[-RING:]:
            offset = RING_AT + self._sample_count % RING * SAMPLE.size
            SAMPLE.pack_into(self._map, offset, *(min(max(part, 0), _MICROS_MAX) for part in sample))
            self._sample_count += 1
        total = self._sample_count
        OWN_WORK.pack_into(self._map, OWN_WORK_AT, total, total, cpu_ns, read_ns, timed, total)

    def write_groups(self, keys: "list[int]") -> None:
        """The process groups of the rank's equals, by number; more than GROUPS_MAX are left out."""
        self._group_records = number = self._group_records + 1
        padded = (list(keys) + [0] * GROUPS_MAX)[:GROUPS_MAX]
        GROUPS.pack_into(self._map, GROUPS_AT, number, *padded, number)
