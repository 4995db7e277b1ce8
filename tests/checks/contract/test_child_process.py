"""Child processes of checks: whatever a check does to its own process, nothing else is affected."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from aegis_elastic.checks.contract import child_process
from aegis_elastic.checks.contract.child_process import Channel, OnStep, Outcome, Task, failed, passed
from tests.checks.support import ROOT


def healthy(on_step: OnStep) -> Outcome:
    return passed("all is well", {"pid": os.getpid()})


def forever(on_step: OnStep) -> Outcome:
    on_step("waiting for nothing")
    while True:
        signal.pause()


def wait_gone(pid: int, timeout_s: float = 5.0) -> bool:
    """Whether the process ends (a zombie has ended) within `timeout_s`."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_check_answers_from_a_process_of_its_own() -> None:
    (result,) = child_process.run([child_process.task("io", healthy, 5)])
    assert (result.check_type, result.passed, result.result) == ("io", True, "all is well")
    assert result.details["pid"] != os.getpid()
    assert abs(result.time_stamp - time.time()) < 5
    assert 0 <= result.duration_s < 5


def test_a_finding_keeps_its_code_and_scope() -> None:
    (result,) = child_process.run(
        [child_process.task("gpu", lambda _: failed("gpu.lost", "hardware", "gone"), 5)]
    )
    assert (result.passed, result.finding, result.scope) == (False, "gpu.lost", "hardware")


def test_an_overrun_is_a_finding_and_does_not_delay_the_others(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def opens_a_fifo(on_step: OnStep) -> Outcome:
        on_step("opening a pipe that nobody reads")
        return passed(str(os.open(fifo, os.O_WRONLY)))

    started = time.monotonic()
    slow, quick = child_process.task("io", opens_a_fifo, 0.5), child_process.task("rdma", healthy, 5)
    first, last = ((result, time.monotonic() - started) for result in child_process.run([slow, quick]))
    assert first[0].check_type == "rdma"
    assert first[1] < 0.4
    assert (last[0].finding, last[0].scope) == ("io.timeout", "node")
    assert last[0].result == "io: no answer in 0.5 s (it was opening a pipe that nobody reads)"


def test_a_stopped_check_ends_at_its_budget() -> None:
    def stops_itself(on_step: OnStep) -> Outcome:
        os.kill(os.getpid(), signal.SIGSTOP)
        return passed("never said")

    (result,) = child_process.run([child_process.task("hang", stops_itself, 0.3)])
    assert result.finding == "hang.timeout"


def test_an_overrun_takes_its_whole_process_group_along(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def leaves_a_child(on_step: OnStep) -> Outcome:
        pid_file.write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        return forever(on_step)

    (result,) = child_process.run([child_process.task("io", leaves_a_child, 0.5)])
    assert result.finding == "io.timeout"
    assert wait_gone(int(pid_file.read_text()))


def test_a_check_that_answered_leaves_no_child_behind(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def leaves_a_child(on_step: OnStep) -> Outcome:
        pid_file.write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        return passed("done")

    (result,) = child_process.run([child_process.task("io", leaves_a_child, 5)])
    assert result.passed
    assert wait_gone(int(pid_file.read_text()))


def test_a_crash_is_a_finding_about_the_check_not_the_node() -> None:
    def is_killed(on_step: OnStep) -> Outcome:
        on_step("in the driver")
        os.kill(os.getpid(), signal.SIGKILL)
        return passed("never said")

    def leaves(on_step: OnStep) -> Outcome:
        os._exit(3)

    def raises(on_step: OnStep) -> Outcome:
        raise ValueError("bad luck")

    tasks = [
        child_process.task("gpu", is_killed, 5),
        child_process.task("io", leaves, 5),
        child_process.task("rdma", raises, 5),
    ]
    found = {result.check_type: result for result in child_process.run(tasks)}
    assert {(r.finding, r.scope) for r in found.values()} == {
        ("gpu.crashed", "software"),
        ("io.crashed", "software"),
        ("rdma.crashed", "software"),
    }
    assert found["gpu"].result == "gpu: the check itself crashed while it was in the driver (SIGKILL)"
    assert "exit code 3" in found["io"].result
    assert "ValueError: bad luck" in found["rdma"].result


def test_a_task_that_owes_several_results_gives_each_exactly_once() -> None:
    def half(channel: Channel) -> None:
        for result in child_process.run([child_process.task("env", healthy, 5)]):
            channel.result(result)
            channel.result(result)  # said twice, counted once
        channel.extend(0.3)
        channel.step("lost")
        forever(channel.step)

    started = time.monotonic()
    found = list(child_process.run([Task(half, 60, ("env", "health"))]))
    assert [(r.check_type, r.finding) for r in found] == [("env", ""), ("health", "health.timeout")]
    assert "no answer in 0.3 s" in found[1].result
    assert time.monotonic() - started < 10


def test_a_process_in_the_kernel_is_left_behind_and_reported(
    mount: Callable[..., Path], tmp_path: Path, unmet: Callable[[str], None]
) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(8 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", image], capture_output=True, text=True)
    if made.returncode != 0:
        unmet(f"mkfs.ext4 doesn't work here: {made.stderr.strip()}")
    folder = mount("frozen", "-o", "loop", str(image))
    # A frozen file system holds a writer in D state, as a dead storage does: SIGKILL can't end it.
    if subprocess.run(["fsfreeze", "-f", folder]).returncode != 0:
        unmet("this machine can't freeze a file system")
    try:
        started = time.monotonic()
        writing = child_process.task("io", lambda _: passed(str((folder / "x").write_text("x"))), 0.3)
        found = list(child_process.run([writing, child_process.task("rdma", healthy, 5)]))
        took_s = time.monotonic() - started
    finally:
        subprocess.run(["fsfreeze", "-u", folder], check=True)
    assert [result.finding for result in found] == ["", "io.timeout"]
    left = int(found[1].result.rpartition("pid ")[2].split()[0])
    assert "can't be killed" in found[1].result
    assert took_s < 0.3 + child_process.KILL_WAIT_S + 2
    os.waitpid(left, 0)  # thawed, it dies of the signal that it already has


def test_closing_the_results_early_kills_what_still_runs() -> None:
    before = children()
    running = child_process.run(
        [child_process.task("io", healthy, 5), child_process.task("gpu", forever, 60)]
    )
    first = next(running)
    assert first.check_type == "io"
    del running
    assert children() == before


def test_when_the_parent_is_killed_the_checks_die_with_it(tmp_path: Path) -> None:
    # The runner forks a check, which forks a rank, and the runner gets SIGKILL.
    script = tmp_path / "runner.py"
    script.write_text(
        "import os, signal, sys\n"
        "from aegis_elastic.checks.contract import child_process\n"
        "def rank(note):\n"
        "    print('PID', os.getpid(), file=sys.stderr, flush=True)\n"
        "    while True: signal.pause()\n"
        "def check(note):\n"
        "    print('PID', os.getpid(), file=sys.stderr, flush=True)\n"
        "    list(child_process.run([child_process.task('rank 0', rank, 60)]))\n"
        "list(child_process.run([child_process.task('health', check, 60)]))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True, env=env) as runner:
        assert runner.stderr is not None
        pids = [int(runner.stderr.readline().split()[1]) for _ in range(2)]
        assert not any(wait_gone(pid, 0) for pid in pids)
        runner.kill()
    assert all(wait_gone(pid) for pid in pids)


def test_fifty_checks_leak_no_descriptor_and_no_zombie() -> None:
    before = os.listdir("/proc/self/fd"), children()
    for _ in range(5):
        assert all(result.passed for result in child_process.run([child_process.task("io", healthy, 5)] * 10))
    assert (os.listdir("/proc/self/fd"), children()) == before
