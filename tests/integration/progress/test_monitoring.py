"""Constant monitoring through the real launcher: each rule by something that really goes wrong."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from aegis_elastic.core.events import Noted
from aegis_elastic.testing.netns import Host, Net
from tests.integration.harness import Job, Launch, free_port, wait_for

pytestmark = pytest.mark.timeout(240)
FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")
OUR_RULES = ("cpu.", "gpu.", "memory.", "network.", "signature.")
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
# A rank that works, and sends to the rank of its number on the other host what a gradient may be. What it
# does wrong is chosen by files named after it. No torch, so that starts are cheap.
TRAIN = """
import os, socket, sys, threading, time
folder, other = sys.argv[1], sys.argv[2:]
rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
wanted = lambda what: os.path.exists(f"{folder}/{what}.{rank}")
def take(server):
    while True:
        client, _ = server.accept()
        while client.recv(1 << 20): pass
server = socket.create_server(("0.0.0.0", 7000 + local))
threading.Thread(target=take, args=(server,), daemon=True).start()
link, leaked, printed, rounds = None, [], False, 0
while not os.path.exists(f"{folder}/done"):
    until = time.monotonic() + 0.01
    while time.monotonic() < until: pass
    if other and link is None:
        try: link = socket.create_connection((other[0], 7000 + local), 10)
        except OSError: time.sleep(0.05)
    if link is not None: link.sendall(b"x" * 1_000_000)
    if wanted("leak"): leaked.append(b"x" * 2_000_000)
    if wanted("say") and not printed:
        printed = True
        print("@@", file=sys.stderr, flush=True)
        for step in range(200): print("step", step, file=sys.stderr, flush=True)
    if wanted("die"): sys.exit(9)
    time.sleep(0.03)
    rounds += 1
    if rounds == 300: open(f"{folder}/worked.{rank}", "w").close()
""".replace("@@", XID)


class Watched:
    """A job of which a sample is taken many times a second, and what it does wrong."""

    def __init__(self, job: Job, interval_s: float = 0.025) -> None:
        self.job = job
        self.script = job.folder / "train.py"
        self.script.write_text(TRAIN)
        self._interval_s = interval_s

    def start(
        self, *peers: str, worker: str = "", host: Host | None = None, flags: tuple[str, ...] = ()
    ) -> Launch:
        ours = ("--aegis-monitor-interval-s", str(self._interval_s), "--redirects", "3")
        logs = ("--log-dir", str(self.job.folder / "logs"))
        folder = str(self.job.folder)
        return self.job.start(
            self.script, folder, *peers, worker=worker, host=host, flags=(*ours, *logs, *flags)
        )

    def ask(self, what: str, rank: int | str) -> None:
        (self.job.folder / f"{what}.{rank}").touch()

    def stop_asking(self, what: str, rank: int) -> None:
        (self.job.folder / f"{what}.{rank}").unlink()

    def end(self, *launches: Launch) -> None:
        (self.job.folder / "done").touch()
        assert [launch.wait() for launch in launches] == [0] * len(launches)

    def noted(self) -> list[Noted]:
        events = [line.event for line in self.job.journal()]
        return [event for event in events if isinstance(event, Noted) and event.code.startswith(OUR_RULES)]

    def wait_noted(self, code: str, rank: int) -> Noted:
        found: list[Noted] = []

        def check() -> bool:
            found[:] = [
                each for each in self.noted() if each.code == code and each.detail.startswith(f"rank {rank}:")
            ]
            return bool(found)

        wait_for(check, f"{code} of rank {rank}; there were {self.noted()}", 60)
        print(f"{found[0].worker} on {found[0].node_name}: {found[0].code}: {found[0].detail}")
        return found[0]


@pytest.fixture
def one_node(tmp_path: Path) -> Iterator[Watched]:
    with Job(tmp_path / "job", nproc=4, max_restarts=1, flags=FLAGS) as job:
        yield Watched(job)


@pytest.mark.full
@pytest.mark.netns
@pytest.mark.parametrize("net", [2], indirect=True)
def test_a_leaking_rank_a_throttled_link_and_a_stopped_rank_are_each_named(net: Net, tmp_path: Path) -> None:
    """Four ranks on two hosts."""
    addresses = [host.address for host in net.hosts]
    with Job(tmp_path / "job", nnodes="2", nproc=2, endpoint=f"{addresses[0]}:29400", flags=FLAGS) as job:
        watched = Watched(job, interval_s=0.05)
        launches = [
            watched.start(addresses[1 - number], worker=f"w{number}", host=host)
            for number, host in enumerate(net.hosts)
        ]
        ranks = job.wait_ranks(4)
        owner = {rank: launch for launch in launches for rank in job.ranks(launch)}
        watched.ask("leak", 1)
        leak = watched.wait_noted("memory.growth", 1)
        assert (leak.worker, leak.node_name) == (owner[1].worker, net.hosts[owner[1].number].name)
        assert "the node is full in" in leak.detail and "slope_bytes_s=" in leak.detail
        assert "network.drop" not in [note.code for note in watched.noted()]

        throttled = net.hosts[owner[3].number]
        throttled.throttle(5)
        slow = watched.wait_noted("network.drop", 3)
        assert slow.worker == owner[3].worker
        throttled.throttle(None)

        os.kill(ranks[2].pid, signal.SIGSTOP)
        stopped = watched.wait_noted("cpu.zero", 2)
        assert stopped.worker == owner[2].worker
        assert "the process is stopped" in stopped.detail
        os.kill(ranks[2].pid, signal.SIGCONT)
        view = job.view()
        assert (view["phase"], view["incarnation"], view["recoverCount"]) == ("RunCommand", 1, 0)
        watched.end(*launches)


@pytest.mark.full
def test_what_ranks_write_and_whether_they_work_is_told_live_and_last_words_stand_in_the_report(
    one_node: Watched,
) -> None:
    port = free_port()
    launch = one_node.start(flags=("--aegis-metrics-port", str(port)))
    ranks = one_node.job.wait_ranks(4)
    one_node.ask("say", 2)
    live = one_node.wait_noted("signature.gpu_lost", 2)
    assert XID in live.detail
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert 'aegis_anomalies_total{code="signature.gpu_lost"} 1.0' in text
    assert 'aegis_phase{phase="RunCommand"} 1.0' in text
    status = json.loads(one_node.job.ctl("status", "--json").stdout)
    assert status["plane"]["metrics"] == f"http://127.0.0.1:{port}/metrics"
    # Who is to be missed must have been seen at work.
    worked = [one_node.job.folder / f"worked.{rank}" for rank in range(4)]
    wait_for(lambda: all(file.exists() for file in worked), "work of all ranks")
    os.kill(ranks[1].pid, signal.SIGSTOP)
    assert "the process is stopped" in one_node.wait_noted("cpu.zero", 1).detail
    os.kill(ranks[1].pid, signal.SIGCONT)
    one_node.ask("die", 2)
    one_node.job.wait(lambda view: view["phase"] == "Troubleshooting" or view["incarnation"] == 2, "its end")
    one_node.stop_asking("die", 2)
    one_node.job.wait_phase("RunCommand", incarnation=2)
    one_node.end(launch)
    failures = [entry for entry in one_node.job.report()["failures"] if entry["rank"] == 2]
    assert failures[0]["lastLines"][0] == XID, "two hundred lines before its end"
    assert failures[0]["lastLines"][-1] == "step 199"


@pytest.mark.full
@pytest.mark.timeout(400)
def test_four_ranks_that_train_for_a_while_are_not_talked_about(tmp_path: Path) -> None:
    """900 samples; the real half hour is in tests/core/detection/test_samples.py."""
    with Job(tmp_path / "job", nproc=4, flags=FLAGS) as job:
        watched = Watched(job, interval_s=0.1)
        launch = watched.start()
        job.wait_ranks(4)
        with pytest.raises(AssertionError, match="no anything within"):
            wait_for(lambda: bool(watched.noted()), "anything", 90)
        watched.end(launch)
