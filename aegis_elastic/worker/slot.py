"""A rank's slot: one small file in shared memory that says how far its training is, without a system call.

The rank maps it and writes; its agent maps it and reads, at any moment and without a lock. Each record
carries its number twice, first and last: who reads two different ones has caught the writer in the middle,
and looks again. A record that can't be read is no news, never wrong news.

Layout, version 2, little-endian, ``SIZE`` bytes::

       0  head   magic "AEGISLOT", version, pid of the rank
      64  beat   steps of optimizers: beats, step, monotonic ns of the last and the first, longest pause in ns
     128  call   calls of ``aegis_elastic.progress``: calls, step, monotonic ns of the last
     192  own    samples in the ring so far, CPU ns a step of the main thread, ns that the last look took,
                 whether waiting between collectives is taken off
     256  saved  calls of ``checkpoint_saved``: calls, step, wall ns, path (at most PATH_BYTES_MAX, utf-8)
    3072  groups how often they were told; then GROUPS_MAX numbers of groups of equals, 0: none
    4096  ring   RING samples of own work: step, then µs to its first and its last collective, and in all

``agents/watch/slots.py`` reads. Standard library only, without typing (which costs a rank time), and old
syntax: it is loaded by path into whatever Python the user runs.
"""

import mmap
import os
import struct

MAGIC = b"AEGISLOT"
VERSION = 2
SIZE = 8192
# Names the folder with the slots of this node, one a rank: set for ranks, inherited by what they start.
VARIABLE = "AEGIS_PROGRESS"
PATH_BYTES_MAX = 2048
RING = 256
TRIES = 8

HEAD = struct.Struct("<8sIIQ")
BEAT, BEAT_AT = struct.Struct("<QQqqqqQ"), 64
CALL, CALL_AT = struct.Struct("<QQqqQ"), 128
OWN, OWN_AT = struct.Struct("<QQqqQQ"), 192
SAVED, SAVED_AT = struct.Struct("<QQqqH%dsQ" % PATH_BYTES_MAX), 256  # noqa: UP031 - old syntax
GROUPS_MAX = 8
GROUPS, GROUPS_AT = struct.Struct("<Q%dQQ" % GROUPS_MAX), 3072  # noqa: UP031 - old syntax
SAMPLE, RING_AT = struct.Struct("<IIII"), 4096
_MICROS_MAX = (1 << 32) - 1


class Slot:
    """The writer's side. One process, one thread a record."""

    def __init__(self, path: str) -> None:
        """Open the file, or make it (mode 0600). OSError if that can't be, or there is no room for it."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # room is taken now: a full file system would otherwise be a SIGBUS in the middle of training
            os.posix_fallocate(handle, 0, SIZE)
            self._map = mmap.mmap(handle, SIZE)
        finally:
            os.close(handle)
        self._number = 0
        self._samples = 0
        self._groups = 0
        # What was there before, another process of this rank wrote: its numbers must not come again.
        self._calls = CALL.unpack_from(self._map, CALL_AT)[0]
        self._saves = SAVED.unpack_from(self._map, SAVED_AT)[0]
        HEAD.pack_into(self._map, 0, MAGIC, VERSION, 0, os.getpid())

    def beat(self, beats: int, step: int, last_ns: int, first_ns: int, longest_ns: int) -> None:
        """An optimizer has made a step."""
        self._number = number = self._number + 1
        BEAT.pack_into(self._map, BEAT_AT, number, beats, step, last_ns, first_ns, longest_ns, number)

    def call(self, step: int, now_ns: int) -> None:
        """The training code says which step it has done."""
        self._calls = calls = self._calls + 1
        CALL.pack_into(self._map, CALL_AT, calls, calls, step, now_ns, calls)

    def saved(self, step: int, wall_ns: int, path: str) -> None:
        """The training code says that a checkpoint is complete. ValueError for a path that is too long."""
        encoded = os.fsencode(path)
        if len(encoded) > PATH_BYTES_MAX:
            size = "%d bytes, at most %d" % (len(encoded), PATH_BYTES_MAX)  # noqa: UP031 - old syntax
            raise ValueError("cannot note a checkpoint: its path has " + size)
        self._saves = saves = self._saves + 1
        record = saves, saves, step, wall_ns, len(encoded), encoded, saves
        SAVED.pack_into(self._map, SAVED_AT, *record)

    def own(self, samples: "list[tuple[int, int, int, int]]", cpu_ns: int, look_ns: int, timed: bool) -> None:
        """Add what was found out about own work: (step, µs to its first and last collective, µs in all)."""
        for sample in samples[-RING:]:
            place = RING_AT + self._samples % RING * SAMPLE.size
            SAMPLE.pack_into(self._map, place, *(min(max(part, 0), _MICROS_MAX) for part in sample))
            self._samples += 1
        count = self._samples
        OWN.pack_into(self._map, OWN_AT, count, count, cpu_ns, look_ns, timed, count)

    def groups(self, keys: "list[int]") -> None:
        """Say in which process groups its equals are, by number; more than GROUPS_MAX are left out."""
        self._groups = number = self._groups + 1
        told = (list(keys) + [0] * GROUPS_MAX)[:GROUPS_MAX]
        GROUPS.pack_into(self._map, GROUPS_AT, number, *told, number)
