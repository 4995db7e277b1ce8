"""What monitoring reads: processes and their children, connections, GPUs, logs; and what sampling costs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from aegis_elastic.agents.monitoring import gpus, procfs
from aegis_elastic.agents.monitoring.gpus import Gpu
from aegis_elastic.agents.monitoring.log_reader import LINES_MAX, READ_BYTES_MAX, LogReader
from aegis_elastic.agents.monitoring.monitor import REPORTED_MAX, Monitor
from aegis_elastic.agents.watch.contract import WatchedRanks
from aegis_elastic.core.detection.anomalies import Anomaly
from aegis_elastic.core.rank_assignment import RankAssignment
from aegis_elastic.testing.netns import Net, NetnsUnavailable
from tests.checks.support import compile_c

MIB = 1 << 20
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."

Start = Callable[..., int]


def wait_for(holds: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until_s, f"no {what}"
        time.sleep(0.02)


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(code)`: the pid of a Python that runs it, once it has printed a line."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield run
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


# ------------------------------------------------------------ processes


def test_a_rank_s_time_and_memory_are_those_of_its_whole_tree(start: Start) -> None:
    worker = "x = bytearray(96 << 20)\nwhile True: pass"
    pid = start(
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {worker!r}])\nprint(); time.sleep(60)"
    )
    trees = procfs.ProcessTrees({3: pid})
    trees.rescan()
    wait_for(lambda: (usage := trees.usage(3)) and usage.memory_bytes > 90 * MIB, "the child's memory")
    trees.usage(3)
    began_s = time.monotonic()
    time.sleep(0.5)
    usage = trees.usage(3)
    assert usage is not None
    assert 0.02 < usage.cpu_s <= 1.2 * (time.monotonic() - began_s) + 0.02
    assert usage.state == "S", "the rank itself waits"


def test_what_a_child_did_before_it_was_seen_is_not_counted_at_once(start: Start) -> None:
    pid = start(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    until = time.monotonic() + 0.4\n"
        "    while time.monotonic() < until: pass\n"
        "    print(flush=True); time.sleep(60)\n"
        "time.sleep(60)"
    )
    trees = procfs.ProcessTrees({0: pid})
    trees.usage(0)
    trees.rescan()
    usage = trees.usage(0)
    assert usage is not None and usage.cpu_s < 0.2


def test_a_rank_that_has_ended_or_whose_pid_was_reused_has_no_usage(start: Start) -> None:
    pid = start("import time; print(flush=True); time.sleep(60)")
    trees = procfs.ProcessTrees({0: pid, 1: 2**22 + 1})
    assert trees.usage(0) is not None
    assert trees.usage(1) is None
    trees._start_times[pid] = "1"
    assert trees.usage(0) is None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: procfs.ProcessTrees({0: pid}).usage(0) is None, "its end")


def test_the_memory_of_the_node_is_no_more_than_the_cgroup_allows() -> None:
    node = procfs.NodeReader().read()
    assert 0 < node.available_bytes <= node.total_bytes
    assert node.cpu_s > 0
    limit = procfs.memory_limit()
    if limit is not None:
        assert node.total_bytes <= int(Path(limit[0]).read_text())


# ------------------------------------------------------------ connections

_TALK = """
import socket, sys, threading, time
sys.path.insert(0, sys.argv[2])
from aegis_elastic.agents.monitoring.sockets import Connections
if sys.argv[1] == "listen":
    server = socket.create_server(("0.0.0.0", 7000)); print(flush=True)
    client, _ = server.accept()
    while client.recv(1 << 20): pass
    sys.exit()
client = socket.create_connection(("10.88.0.1", 7000))
local = socket.create_server(("127.0.0.1", 0)); loop = socket.create_connection(local.getsockname())
loop.sendall(b"x" * 1000)
connections = Connections()
before = connections.read()
client.sendall(b"x" * 3_000_000)
until = time.monotonic() + 20
while time.monotonic() < until:
    after = connections.read()
    (key, now), = after.items()
    if now.sent_bytes - before[key].sent_bytes >= 3_000_000: break
print(now.sent_bytes - before[key].sent_bytes, now.busy_s - before[key].busy_s, key[0] ==
__import__("os").fstat(client.fileno()).st_ino)
"""


@pytest.mark.netns
def test_the_kernel_counts_what_a_connection_delivered_and_how_long_it_took(
    tmp_path: Path, unmet: Callable[[str], None]
) -> None:
    with ExitStack() as stack:
        net = Net(2, share=[tmp_path])
        try:
            stack.enter_context(net)
        except NetnsUnavailable as error:
            unmet(str(error))
        argv = [sys.executable, "-c", _TALK]
        root = str(Path.cwd())
        listener = net.hosts[0].popen([*argv, "listen", root], stdout=subprocess.PIPE)
        assert listener.stdout is not None
        listener.stdout.readline()
        net.hosts[1].throttle(80)
        done = net.hosts[1].run([*argv, "talk", root])
        listener.stdout.close()
        listener.wait(10)
    assert done.returncode == 0, done.stderr
    sent, busy, same = done.stdout.split()
    assert same == "True", "the loopback connection is none of them"
    assert 3_000_000 <= int(sent) < 3_100_000
    assert 0.15 < float(busy) < 5.0, "3 MB by 10 MB/s"


# ------------------------------------------------------------ GPUs


def test_gpus_belong_to_the_ranks_that_compute_on_them() -> None:
    node_gpus = [Gpu(0.9, 1, 2, (11,)), Gpu(0.5, 1, 2, (12, 99)), Gpu(0.1, 1, 2, ())]
    members = {4: (10, 11), 5: (12,)}
    assert gpus.owned(node_gpus, members, {4: 0, 5: 1}) == {4: [node_gpus[0]], 5: [node_gpus[1]]}
    strangers = [gpu._replace(pids=(7000,)) for gpu in node_gpus]
    assert gpus.owned(strangers, members, {4: 0, 5: 1}) == {4: [strangers[0]], 5: [strangers[1]]}
    assert gpus.owned(node_gpus[:1], {}, {4: 0, 5: 1}) == {}
    assert gpus.owned([], members, {4: 0, 5: 1}) == {}


def test_the_sampler_prints_every_gpu_and_ends_with_its_reader(
    tmp_path: Path, unmet: Callable[[str], None]
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        unmet("no C compiler")
        return
    source = Path(__file__).parents[2] / "checks" / "fake_nvml.c"
    compile_c(compiler, source, tmp_path / "libnvidia-ml.so.1", "-shared", "-fPIC")
    state = tmp_path / "state"
    state.write_text("* count 2\n0 utilisation 70\n1 process 4242\n1 error:nvmlDeviceGetMemoryInfo 3\n")
    sampler = subprocess.Popen(
        [sys.executable, "-m", "aegis_elastic.agents.monitoring.gpu_sampler", "0.05"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "FAKE_NVML_STATE": str(state)},
    )
    assert sampler.stdin is not None and sampler.stdout is not None
    first, second = (gpus._decoder.decode(sampler.stdout.readline()) for _ in range(2))
    assert first == second
    assert [gpu.utilisation for gpu in first] == [0.7, 0.0]
    assert first[0].total_bytes is not None and first[0].used_bytes is not None
    assert first[1] == Gpu(0.0, None, None, (4242,)), "what a GPU doesn't report is left out"
    sampler.stdin.close()
    assert sampler.wait(10) == 0
    sampler.stdout.close()


def test_a_node_without_gpus_has_no_sampler() -> None:
    node_gpus = gpus.GpuReader(1.0)
    if node_gpus._process is None:
        assert node_gpus.read() == []
    node_gpus.close()


# ------------------------------------------------------------ logs


def test_lines_are_classified_as_they_are_written_and_only_once(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    logs = LogReader({5: (str(out), str(err)), 6: (str(tmp_path / "not there"),)})
    assert logs.read() == []
    out.write_text(f"step 1 loss 0.5\n{OOM[:20]}")
    assert logs.read() == [], "half a line is none"
    with out.open("a") as file:
        file.write(f"{OOM[20:]}\nstep 2\n")
    err.write_text(f"{XID}\n")
    found = logs.read()
    assert [(hit.rank, hit.signature.fault_class) for hit in found] == [(5, "cuda_oom"), (5, "gpu_lost")]
    assert found[0].line == OOM
    assert logs.read() == []
    assert logs.log_lines(5)[-1] == XID
    assert logs.log_lines(6) == ()


def test_of_a_log_that_grows_too_fast_the_newest_part_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    logs = LogReader({0: (str(log),)})
    log.write_bytes(b"step and nothing more\n" * 400_000 + XID.encode() + b"\n")
    began_s = time.thread_time()
    found = logs.read()
    assert time.thread_time() - began_s < 1.0
    assert [hit.line for hit in found] == [XID]
    assert logs.skipped_bytes > log.stat().st_size - READ_BYTES_MAX - 1000
    short = b"x\n" * (LINES_MAX + 500)
    with log.open("ab") as file:
        file.write(XID.encode() + b"\n" + short)
    assert logs.read() == [], "more lines than it takes at once"


def test_odd_logs_do_no_harm(tmp_path: Path) -> None:
    fifo, binary, emptied = tmp_path / "fifo", tmp_path / "binary", tmp_path / "emptied"
    os.mkfifo(fifo)
    binary.write_bytes(os.urandom(50_000) + b"\n" + XID.encode() + b"\r\n")
    emptied.write_text("a long line that will be gone\n" * 10)
    files = str(fifo), str(binary), str(emptied), str(tmp_path), "/dev/zero"
    logs = LogReader({0: files})
    assert [hit.line for hit in logs.read()] == [XID]
    emptied.write_text(f"{OOM}\n")
    assert [hit.line for hit in logs.read()] == [OOM]


def test_only_lines_of_recent_root_causes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_text(f"{XID}\nRuntimeError: [gloo] Connection closed by peer [10.0.0.1]:1234\n")
    logs = LogReader({0: (str(log),)})
    assert len(logs.read()) == 2
    assert logs.log_lines(0) == (XID,)
    later_s = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert logs.log_lines(0) == ()


# ------------------------------------------------------------ the whole


class Reports:
    """The anomalies and wakes of a monitor."""

    def __init__(self) -> None:
        self.anomalies: list[Anomaly] = []
        self.wakes = 0

    def on_anomalies(self, anomalies: Sequence[Anomaly]) -> None:
        self.anomalies += anomalies

    def wake(self) -> None:
        self.wakes += 1

    def codes(self) -> list[str]:
        return [each.code for each in self.anomalies]


def watched_ranks(pids: dict[int, int], logs: dict[int, tuple[str, ...]] | None = None) -> WatchedRanks:
    return WatchedRanks(1, RankAssignment("w", "u", 0, min(pids), len(pids)), pids, logs or {})


def test_anomalies_are_reported_facts_are_given_lines_are_kept_and_its_thread_ends(
    tmp_path: Path, start: Start
) -> None:
    reports, log = Reports(), tmp_path / "log"
    monitor = Monitor(reports.wake, reports.on_anomalies, 0.02)
    pid = start("import time; print(flush=True); time.sleep(60)")
    assert monitor.facts() is None
    monitor.on_started(watched_ranks({7: pid}, {7: (str(log),)}))
    log.write_text(f"{XID}\n" * 50)
    wait_for(lambda: reports.codes() and monitor.facts(), "facts")
    assert reports.codes() == ["signature.gpu_lost"]
    assert reports.anomalies[0].detail == f"rank 7: {XID}"
    assert reports.anomalies[0].numbers["lines"] >= 1
    facts = monitor.facts()
    assert facts is not None and [rank[0] for rank in facts["ranks"]] == [7]
    assert reports.wakes >= 1
    with log.open("a") as file:
        file.write(f"{OOM}\n")
    monitor.on_ended()
    wait_for(lambda: "signature.cuda_oom" in reports.codes(), "the end of its log")
    assert list(monitor.log_lines(7))[-1] == OOM
    monitor.close()
    assert "aegis-monitor" not in {thread.name for thread in threading.enumerate()}


def test_log_lines_of_an_incarnation_are_not_those_of_the_one_before(tmp_path: Path, start: Start) -> None:
    reports, log = Reports(), tmp_path / "log"
    monitor = Monitor(reports.wake, reports.on_anomalies, 0.02)
    pid = start("import time; print(flush=True); time.sleep(60)")
    log.write_text(f"{XID}\n")
    monitor.on_started(watched_ranks({7: pid}, {7: (str(log),)}))
    wait_for(lambda: monitor.log_lines(7), "lines")
    monitor.on_ended()
    wait_for(lambda: monitor._sampler is None, "its end")
    assert list(monitor.log_lines(7)) == [XID]
    monitor.on_started(watched_ranks({7: pid}, {7: (str(tmp_path / "next"),)}))
    assert list(monitor.log_lines(7)) == []
    with log.open("a") as file:
        file.write(f"{OOM}\n")
    (tmp_path / "next").write_text("NVRM: Xid (PCI:0000:3b:00): 48, pid=1, double bit ecc error\n")
    wait_for(lambda: monitor.log_lines(7), "the next lines")
    assert "signature.cuda_oom" not in reports.codes(), "what was written after its end"
    monitor.close()


def test_reports_of_thousands_of_anomalies_are_limited(tmp_path: Path, start: Start) -> None:
    reports, log = Reports(), tmp_path / "log"
    pids = {rank: start("import time; print(flush=True); time.sleep(60)") for rank in range(2)}
    many: dict[int, tuple[str, ...]] = {rank: (str(log),) for rank in range(60)}
    monitor = Monitor(reports.wake, reports.on_anomalies, 0.02)
    monitor.on_started(watched_ranks(pids, many))
    for _ in range(3):
        with log.open("a") as file:
            file.write(f"{XID}\n{OOM}\n")
        time.sleep(0.2)
    monitor.close()
    assert 0 < len(reports.anomalies) <= REPORTED_MAX


def test_sampling_eight_ranks_with_four_helpers_each_costs_less_than_a_two_hundredth_of_a_core(
    start: Start,
) -> None:
    code = (
        "import os, time\nfor _ in range(4):\n    if os.fork() == 0: time.sleep(60)\n"
        "print(flush=True); time.sleep(60)"
    )
    pids = {rank: start(code) for rank in range(8)}
    reports = Reports()
    monitor = Monitor(reports.wake, reports.on_anomalies, 0.05)
    monitor.on_started(watched_ranks(pids))
    wait_for(lambda: monitor._sampler is not None and monitor._sampler.number >= 25, "samples", 30)
    cost_s = monitor._cost_s
    monitor.close()
    print(f"one sample of 8 ranks, 40 processes: {1e3 * cost_s:.2f} ms of CPU time")
    assert cost_s < 0.005, "at one sample a second"
    assert reports.anomalies == []
