"""The guard with real processes: starting, stopping, signals, and every death reported once."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from aegis_elastic.agents.guard import client
from aegis_elastic.agents.guard.client import (
    Exited,
    GuardClient,
    GuardDied,
    GuardError,
    RankSpec,
    SpawnError,
    Stopped,
)
from tests.agents.processes import (
    PATIENCE_S,
    ended,
    next_event,
    parent_of,
    python,
    rank,
    stubborn,
    wait_family,
    wait_files,
    wait_stopped,
)


def test_every_exit_is_reported_with_its_code_or_signal_and_the_first_failure_is_marked(
    guard: GuardClient,
) -> None:
    before_s = time.monotonic()
    pids = guard.spawn(
        3,
        [
            rank(0, "sh", "-c", "exit 0"),
            rank(1, "sh", "-c", "sleep 0.3; kill -SEGV $$"),
            rank(2, "sh", "-c", "sleep 0.6; exit 7"),
        ],
    )
    exits = [next_event(guard) for _ in range(3)]
    assert [(e.local_rank, e.exit_code, e.signal, e.first) for e in exits if isinstance(e, Exited)] == [
        (0, 0, None, False),
        (1, None, signal.SIGSEGV, True),
        (2, 7, None, False),
    ]
    for event in exits:
        assert isinstance(event, Exited)
        assert event.generation == 3
        assert event.pid == pids[event.local_rank]
        assert before_s < event.monotonic_s < time.monotonic()
        assert abs(event.wall_s - time.time()) < PATIENCE_S


def test_deaths_are_reported_in_the_order_in_which_they_happened(guard: GuardClient) -> None:
    count = 6
    pids = guard.spawn(0, [rank(i, "sleep", "100") for i in range(count)])
    order = [4, 1, 5, 0, 3, 2]
    os.kill(guard.pid, signal.SIGSTOP)  # so that it finds all of them at once
    for local_rank in order:
        os.kill(pids[local_rank], signal.SIGKILL)
        assert ended(pids[local_rank])
    os.kill(guard.pid, signal.SIGCONT)
    exits = [next_event(guard) for _ in range(count)]
    assert [e.local_rank for e in exits if isinstance(e, Exited)] == order
    assert [e.first for e in exits if isinstance(e, Exited)] == [True] + [False] * (count - 1)


def test_healthy_ranks_make_no_event(guard: GuardClient) -> None:
    guard.spawn(0, [rank(0, "sleep", "100"), rank(1, "sh", "-c", "(sleep 0.05; exit 3) & true; sleep 100")])
    assert guard.wait_event(0.5) is None
    assert guard.events() == []


def test_ranks_are_children_of_a_process_that_preemption_traps_find(guard: GuardClient) -> None:
    pids = guard.spawn(0, [rank(0, "sleep", "100"), rank(1, "sleep", "100")])
    found = subprocess.run(["pgrep", "-f", "torchrun|distributed.run"], capture_output=True, text=True).stdout
    assert str(guard.pid) in found.split()
    command = Path(f"/proc/{guard.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    assert "-m torch.distributed.run" in command
    assert "test-job" in command
    for pid in pids.values():
        assert parent_of(pid) == guard.pid
        assert os.getsid(pid) == pid, "a rank leads its own session, as under torchrun"


@pytest.mark.parametrize(
    "signum", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
)
def test_a_signal_to_the_guard_reaches_the_ranks_and_spares_the_guard(
    guard: GuardClient, tmp_path: Path, signum: signal.Signals
) -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(int(sys.argv[1]), lambda *_: sys.exit(40 + int(sys.argv[3])))\n"
        "open(sys.argv[2], 'w').close()\n"
        "while True: signal.pause()"
    )
    ready = [tmp_path / f"ready{i}" for i in range(2)]
    argvs = [python(code, str(int(signum)), str(path), str(i)) for i, path in enumerate(ready)]
    guard.spawn(0, [rank(i, *argv) for i, argv in enumerate(argvs)])
    wait_files(*ready)
    os.kill(guard.pid, signum)
    exits = [next_event(guard), next_event(guard)]
    assert {(e.local_rank, e.exit_code) for e in exits if isinstance(e, Exited)} == {(0, 40), (1, 41)}
    assert guard.spawn(1, [rank(0, "true")])


def test_the_launcher_can_signal_its_ranks(guard: GuardClient) -> None:
    guard.spawn(0, [rank(0, "sleep", "100")])
    guard.signal(signal.SIGUSR1)
    event = next_event(guard)
    assert isinstance(event, Exited)
    assert event.signal == signal.SIGUSR1


@pytest.mark.parametrize(
    ("program", "stdout", "code", "text"),
    [
        ("no-such-program", "", errno.ENOENT, "execute no-such-program: No such file"),
        ("/etc/passwd", "", errno.EACCES, "execute /etc/passwd: Permission denied"),
        ("sleep", "/no/such/folder/log", errno.ENOENT, "open stdout /no/such/folder/log"),
        ("sl\0eep", "", errno.EINVAL, "Invalid argument"),
    ],
)
def test_a_rank_that_cannot_start_is_an_error_and_its_group_does_not_run(
    guard: GuardClient, tmp_path: Path, program: str, stdout: str, code: int, text: str
) -> None:
    alive = tmp_path / "pid"
    script = f"echo $$ > {alive}; exec sleep 100"
    with pytest.raises(SpawnError, match="cannot start rank 1") as raised:
        guard.spawn(0, [rank(0, "sh", "-c", script), rank(1, program, "100", stdout=stdout)])
    assert raised.value.local_rank == 1
    assert raised.value.errno == code
    assert text in str(raised.value)
    if alive.exists() and (pid := alive.read_text()):
        assert ended(int(pid))
    assert guard.events() == [], "ranks of a group that never ran have no exits"
    assert guard.spawn(0, [rank(0, "true")]), "the guard is ready for the next try"


def test_a_file_without_a_format_is_refused_like_any_that_cannot_be_executed(
    guard: GuardClient, tmp_path: Path
) -> None:
    program = tmp_path / "not-a-program"
    program.write_text("no shebang here\n")
    program.chmod(0o755)
    with pytest.raises(SpawnError) as raised:
        guard.spawn(0, [rank(0, str(program))])
    assert raised.value.errno == errno.ENOEXEC


def test_a_second_generation_beside_a_running_one_is_refused(guard: GuardClient) -> None:
    guard.spawn(0, [rank(0, "sleep", "100")])
    with pytest.raises(SpawnError, match="generation 1 while generation 0 runs"):
        guard.spawn(1, [rank(0, "true")])


def test_stop_ends_a_polite_family_well_before_the_grace(guard: GuardClient) -> None:
    guard.spawn(5, [rank(i, "sleep", "100") for i in range(3)])
    start_s = time.monotonic()
    guard.stop(grace_s=PATIENCE_S)
    exits, stopped = wait_stopped(guard)
    assert time.monotonic() - start_s < PATIENCE_S / 2
    assert stopped == Stopped(5, (), ())
    assert {e.signal for e in exits} == {signal.SIGTERM}
    assert not any(e.first for e in exits), "an exit that a stop order caused is no failure"


def test_stop_gives_the_grace_to_ranks_that_ignore_term_and_then_kills_the_whole_tree(
    guard: GuardClient, tmp_path: Path
) -> None:
    guard.spawn(0, [stubborn(i, tmp_path / str(i)) for i in range(2)])
    family = [pid for i in range(2) for pid in wait_family(tmp_path / str(i))]
    grace_s = 0.6
    start_s = time.monotonic()
    guard.stop(grace_s)
    exits, stopped = wait_stopped(guard)
    assert grace_s <= time.monotonic() - start_s < PATIENCE_S
    assert set(family) <= set(stopped.killed)
    assert stopped.unkillable == ()
    assert [e.signal for e in exits] == [signal.SIGKILL] * 2
    assert all(ended(pid) for pid in family)


def test_stop_with_nothing_running_is_done_at_once(guard: GuardClient) -> None:
    guard.stop(grace_s=PATIENCE_S)
    assert wait_stopped(guard) == ([], Stopped(-1, (), ()))


def test_a_rank_inherits_three_descriptors_default_signals_and_exactly_its_environment(
    guard: GuardClient, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code = (
        "import os, signal\n"
        "print(sorted(os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')))\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status') if line.startswith('Sig'))\n"
        "print(int(status['SigBlk'], 16), int(status['SigCgt'], 16) & ~(1 << 1))\n"
        "print(dict(os.environb) == {b'NAME': b'v\\xe4\\xff', b'LC_CTYPE': b'C.UTF-8'}, os.getcwd())"
    )
    spec = RankSpec(0, python(code), {"NAME": os.fsdecode(b"v\xe4\xff"), "LC_CTYPE": "C.UTF-8"}, str(out), "")
    guard.spawn(0, [spec])
    assert isinstance(next_event(guard), Exited)
    # the fourth descriptor is the listing's own; the only signal that Python itself catches is SIGINT
    assert out.read_text().splitlines() == ["['0', '1', '2'] 4", "0 0", f"True {os.getcwd()}"]


def test_the_join_secret_is_not_in_the_guards_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_JOIN_SECRET", "hush-7f3a")
    guard = GuardClient.start("test-job")
    try:
        assert b"hush-7f3a" not in Path(f"/proc/{guard.pid}/environ").read_bytes()
    finally:
        guard.close()


def test_a_stop_may_leave_out_ranks_that_ignore_the_signal(guard: GuardClient, tmp_path: Path) -> None:
    """They can't know of the grace. A rank that handles the signal has it, and with it all others."""
    listening = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), open(sys.argv[2], 'w'), sys.exit(0)))\n"
        "open(sys.argv[1], 'w').write('x')\n"
        "while True: signal.pause()"
    )
    ready, ended_well = tmp_path / "ready", tmp_path / "ended-well"
    guard.spawn(0, [stubborn(0, tmp_path / "family")])
    wait_family(tmp_path / "family")
    guard.stop(grace_s=PATIENCE_S, wait_if_ignored=False)
    assert wait_stopped(guard)[1].generation == 0
    guard.spawn(1, [stubborn(0, tmp_path / "next"), rank(1, *python(listening, str(ready), str(ended_well)))])
    wait_family(tmp_path / "next")
    wait_files(ready)
    guard.stop(grace_s=PATIENCE_S, wait_if_ignored=False)
    assert wait_stopped(guard)[1].generation == 1
    assert ended_well.exists()


def test_a_start_that_comes_too_late_is_not_taken_for_the_next_one(
    guard: GuardClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exec from a file server that is away for minutes: nobody waits for those ranks any more."""
    monkeypatch.setattr(client, "SPAWN_TIMEOUT_S", 0.3)
    os.kill(guard.pid, signal.SIGSTOP)
    with pytest.raises(GuardError, match=r"no answer in 0\.3 s"):
        guard.spawn(1, [rank(0, "sh", "-c", f"touch {tmp_path / 'late'}; sleep 100")])
    assert guard.events() == [GuardDied(None, signal.SIGKILL)]
    assert ended(guard.pid)
    assert not (tmp_path / "late").exists()


def test_a_process_that_was_never_killed_is_not_reported_as_unkillable() -> None:
    """The guard itself may have stood still since the order: a node that swaps, a stopped process."""
    guard = GuardClient.start("test-job", kill_wait_s=0.0)
    try:
        pid = guard.spawn(0, [rank(0, "sleep", "100")])[0]
        guard.stop(grace_s=0.0)
        wait_stopped(guard)
        assert ended(pid)
    finally:
        guard.close()


def test_a_death_that_comes_together_with_an_answer_is_not_overlooked(
    guard: GuardClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that ends at once, and a launcher that reads late: both messages are there by then."""
    wait = guard._wait_readable

    def late(timeout_s: float) -> bool:
        time.sleep(0.3)
        return wait(timeout_s)

    monkeypatch.setattr(guard, "_wait_readable", late)
    guard.spawn(0, [rank(0, "true")])
    poll = select.poll()
    poll.register(guard, select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000), "there are events to read"
    assert [type(event) for event in guard.events()] == [Exited]
    assert not poll.poll(0), "and only once"
