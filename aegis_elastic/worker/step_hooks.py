"""Counts a training's steps and measures its own work with torch's hooks, without changes to its code.

torch calls a global hook before and after every optimizer's step. After it the step and the time are written
to the rank's slot (about a microsecond, no system call). An optimizer that steps another one inside
(Megatron's, accelerate's) has made one step, and several optimizers side by side make one step when each has
made its own.

*Own work* is what a rank computed, as opposed to waiting for its peers. When an optimizer begins its step,
all collectives of the iteration are over and all ranks are about equally far; so the time from there to the
next iteration's first collective is this rank's own (the step, the loader, forward, some of backward), and so
is the time to its last one as far as collectives are only enqueued in between, as DDP does (it may include
waiting as well, unless the device reports how long collectives took). When they were enqueued is in torch's
flight recorder, which is read now and then: reading costs some milliseconds, so it is done the more rarely
the more processor time it takes (not the longer it takes: a throttled rank would then read so rarely that it
went unnoticed). All ranks read at the same iterations, at multiples of a power of two: each reading delays
all other ranks, and if they took turns, a thousand of them would delay every step.

Ranks have like own work if they reduce or gather many bytes together: the stages of a pipeline do that each
among themselves. So the process groups that carry this rank's bytes are written, too.

Nothing here may raise, print, or leave a thread. Standard library only and old syntax: it is loaded by path
into whatever Python the user runs.
"""

import os
import sys
import time
from _collections import deque  # type: ignore[import-not-found]  # what `collections` has, without its cost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

HOOKED = "torch.optim.optimizer"
# Between readings of the flight recorder: at least READ_NS, and READ_SHARE times what a reading costs; at
# most twice that, since the number of iterations in between is rounded down. The first comes early.
READ_NS = 10**9
READ_SHARE = 600
# Where steps are so short that this is more than SOON iterations, nothing is found soon anyway: more rarely.
SOON, READ_SHARE_SHORT = 32, 2400
FIRST_READ = 8
# The first pauses are compilation and warm-up: they say nothing about later ones.
WARM_UP_STEPS = 3
# An optimizer whose steps were the iterations, and that made none during so many of others, is no longer
# used.
GONE_STEPS = 256
MARKS = 512
# Groups change rarely, if ever: they are determined at one reading in so many.
GROUPS_EVERY_READS = 32
# A group that carries a smaller share of the bytes synchronises (losses, norms, flags) and links no equals.
GROUP_SHARE = 0.001
# What frameworks call groups whose ranks have different work (Megatron's, DeviceMesh's).
UNLIKE = ("pipeline", "embedding", "mesh_pp", "pp_", "_pp")
OPTIMIZERS_MAX = 4096  # some scripts have one per parameter


class StepHooks:
    """The hooks of one process and their state. ``slot`` is a ``Slot`` of ``worker/slot.py``."""

    def __init__(self, slot: "Any") -> None:
        self._slot = slot
        self._outer = 0  # id of the optimizer whose step runs; 0: none does
        self._inner = 0  # id of one that made a step inside
        self._counts = {}  # type: dict[int, int]
        self._step = 0
        self._step_count = 0
        self._first_ns = self._last_ns = self._longest_ns = 0
        self._leader = 0  # id of the optimizer whose steps are the iterations
        self._leader_count = 0
        self._marks = deque(maxlen=MARKS)  # type: deque[tuple[int, int]]  # iteration, wall ns of its step
        self._iterations = 0
        self._sampled = 0
        self._read_period = FIRST_READ  # iterations between readings of the flight recorder
        self._last_read = (0, 0)  # iterations, monotonic ns, at the last reading
        self._cpu = (0, 0)  # iterations, CPU ns of the main thread, at the last reading
        self._group_reads = 0
        self._active = True

    def before_step(self, optimizer: "Any", args: "Any", kwargs: "Any") -> None:
        """torch's hook before a step."""
        if not self._active or self._outer:
            return
        self._outer = key = id(optimizer)
        if key == self._leader:
            self._iterations += 1
            self._marks.append((self._iterations, time.time_ns()))

    def after_step(self, optimizer: "Any", args: "Any", kwargs: "Any") -> None:
        """torch's hook after a step. An error here stops the hooks, never the training."""
        if not self._active:
            return
        try:
            key = id(optimizer)
            outer = self._outer
            # twice inside one step: then the outer one never came to its end, and this is no inner one
            if outer and outer != key and self._inner != key:
                self._inner = key
                return
            self._outer = self._inner = 0
            now_ns = time.monotonic_ns()
            counts = self._counts
            count = counts.get(key, -1) + 1
            if count == 0:
                count = max(self._step, 1)  # a further one, or in place of another
                if len(counts) >= OPTIMIZERS_MAX:
                    counts.clear()
            counts[key] = count
            if count > self._step:
                self._step = count
            self._step_count = step_count = self._step_count + 1
            if step_count == 1:
                self._first_ns = now_ns
            elif step_count > WARM_UP_STEPS and now_ns - self._last_ns > self._longest_ns:
                self._longest_ns = now_ns - self._last_ns
            self._last_ns = now_ns
            self._slot.write_step(step_count, self._step, now_ns, self._first_ns, self._longest_ns)
            if key == self._leader:
                self._leader_count = step_count
                if not self._iterations % self._read_period:
                    self._read_own_work(now_ns)
            elif step_count - self._leader_count > GONE_STEPS or not self._leader:
                self._leader, self._leader_count = key, step_count
                self._last_read = self._iterations, now_ns
                self._marks.clear()
        except Exception:  # noqa: BLE001 - as the docstring says
            self.stop()

    def stop(self) -> None:
        """Do nothing any more: in a forked child, which is not the rank, or because something went wrong."""
        self._active = False

    # ------------------------------------------------------------ own work

    def _read_own_work(self, now_ns: int) -> None:
        began_ns = time.thread_time_ns()
        try:
            entries = _entries()
            samples = own_work(entries, list(self._marks), self._sampled) if entries else []
            if samples:
                self._read_groups(entries)
        except Exception:  # noqa: BLE001 - another torch, another form: then own work is unknown
            self._read_period = 1 << 62
            return
        cpu_ns = time.thread_time_ns()
        read_ns = cpu_ns - began_ns
        last_read, self._last_read = self._last_read, (self._iterations, now_ns)
        self._read_period = read_period(
            read_ns, (now_ns - last_read[1]) // max(1, self._iterations - last_read[0])
        )
        iterations, before_ns = self._cpu
        self._cpu = self._iterations, cpu_ns
        if samples:
            self._sampled = samples[-1][0]
            each_ns = (cpu_ns - before_ns) // max(1, self._iterations - iterations)
            self._slot.write_own_work(
                samples, each_ns, read_ns, any(entry.get("duration_ms") for entry in entries)
            )

    def _read_groups(self, entries: "list[dict[str, Any]]") -> None:
        if self._group_reads % GROUPS_EVERY_READS == 0:
            try:
                keys = keys_of(groups_of(entries), _members())
            except Exception:  # noqa: BLE001 - another torch: then all ranks are taken for equals
                keys = []
            self._slot.write_groups(keys)
        self._group_reads += 1


def read_period(read_ns: int, step_ns: int) -> int:
    """Iterations between readings that take ``read_ns`` each. A power of two, so that ranks with other
    periods still read at the same iterations: at every second, or fourth, reading of the other.
    """
    rest = max(READ_NS, read_ns * READ_SHARE) // max(1, step_ns)
    if rest >= SOON:
        rest = max(rest, read_ns * READ_SHARE_SHORT // max(1, step_ns))
    return int(1 << max(0, rest.bit_length() - 1))


def groups_of(entries: "list[dict[str, Any]]") -> "list[str]":
    """Names of the process groups whose ranks have the same work as this one, by the flight recorder's
    ``entries``: those that carry a share of its bytes, the heaviest first.
    """
    carried = {}  # type: dict[str, int]
    for entry in entries:
        name, about = entry.get("process_group") or ("", "")
        about = about.lower()
        if name and not entry.get("is_p2p") and not any(word in about for word in UNLIKE):
            carried[name] = carried.get(name, 0) + sum(_size(shape) for shape in entry["input_sizes"])
    least = GROUP_SHARE * sum(carried.values())
    heavy = [name for name, size in carried.items() if size > least]
    return sorted(heavy, key=lambda name: -carried[name])


def _size(shape: "list[int]") -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def keys_of(names: "list[str]", members: "dict[str, list[int]]") -> "list[int]":
    """A number for each of these groups, the same on all of its ranks and different from other groups'. Each
    process numbers its groups' names by itself, so the number is made of the members.
    """
    import zlib

    lists = [sorted(members[name]) for name in names if name in members]
    return [len(ranks) << 32 | zlib.crc32(repr(ranks).encode()) for ranks in lists if len(ranks) > 1]


def _members() -> "dict[str, list[int]]":
    """Global ranks by group name. Gloo's recorder lacks them, and torch has no public list of groups."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names, ranks = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    return {name: list(ranks[group]) for group, name in list(names.items()) if group in ranks}


def own_work(
    entries: "list[dict[str, Any]]", marks: "list[tuple[int, int]]", after: int
) -> "list[tuple[int, int, int, int]]":
    """Samples of the iterations after number ``after``: (iteration, own work up to its first and up to its
    last collective, all of it), in microseconds.

    ``entries`` are the flight recorder's, ``marks`` (iteration, wall ns at which its step began). Where the
    device reports how long collectives took (NCCL with timing), the rest of the iteration is own work.
    """
    created = sorted((entry["time_created_ns"], entry.get("duration_ms") or 0.0) for entry in entries)
    samples = []  # type: list[tuple[int, int, int, int]]
    at = 0
    for place in range(1, len(marks)):
        begin, (iteration, end) = marks[place - 1][1], marks[place]
        while at < len(created) and created[at][0] <= begin:
            at += 1
        first = at
        while at < len(created) and created[at][0] < end:
            at += 1
        if iteration <= after or first == at or not created or created[0][0] > begin:
            continue  # known already, without collectives, or older than the recorder's memory
        last_us = (created[at - 1][0] - begin) // 1000
        waited_us = int(sum(entry[1] for entry in created[first:at]) * 1000)
        if waited_us:
            last_us = (end - begin) // 1000 - waited_us
        samples.append((iteration, (created[first][0] - begin) // 1000, last_us, (end - begin) // 1000))
    return samples


def _entries() -> "list[Any]":
    """The entries of torch's flight recorder in this process; empty without process groups."""
    torch = sys.modules.get("torch")
    distributed = sys.modules.get("torch.distributed")
    if torch is None or distributed is None or not distributed.is_initialized():
        return []
    dump = getattr(getattr(getattr(torch, "_C", None), "_distributed_c10d", None), "_dump_fr_trace", None)
    if dump is None:
        return []
    import pickle

    # torch's own bytes, of this very process
    return list(pickle.loads(dump(True, False, False)).get("entries", ()))  # noqa: S301


# ------------------------------------------------------------ installation


class _Finder:
    """An import finder that finds nothing: called at every import, it registers the hooks once torch's are
    there.
    """

    def __init__(self, hooks: StepHooks) -> None:
        self._hooks = hooks

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> None:
        if _register(self._hooks):
            try:
                sys.meta_path.remove(self)
            except ValueError:
                return  # another thread's import was quicker


def _register(hooks: StepHooks) -> bool:
    module = sys.modules.get(HOOKED)
    register_before = getattr(module, "register_optimizer_step_pre_hook", None)
    register_after = getattr(module, "register_optimizer_step_post_hook", None)
    if register_before is None or register_after is None:
        return False
    register_before(hooks.before_step)
    register_after(hooks.after_step)
    return True


# Called uncompiled from a compiled step: the compiler would look for a module that can't be found by name.
for _hook in (StepHooks.before_step, StepHooks.after_step):
    _hook._torchdynamo_disable = True  # type: ignore[attr-defined]


def install(slots: "ModuleType") -> None:
    """Register the hooks in this process, if the launcher asks for it. Silent, whatever happens."""
    folder, rank = os.environ.get(slots.VARIABLE), os.environ.get("RANK", "")
    if not folder or not rank.isdigit():
        return
    try:
        hooks = StepHooks(slots.Slot(os.path.join(folder, rank)))
    except OSError:
        return  # the launcher is gone, or shared memory is full: nobody reads
    os.register_at_fork(after_in_child=hooks.stop)
    if not _register(hooks):
        sys.meta_path.insert(0, _Finder(hooks))
