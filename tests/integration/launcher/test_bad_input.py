"""Whatever a person gets wrong: one clear line, the right exit code, nothing hanging and nothing left behind.

Real `aegis-run` processes throughout; leaving a `Job` asserts that nothing of it runs any more. What the
parser alone can judge is tested in `tests/launch/flags/test_options.py`, value by value.
"""

from __future__ import annotations

import asyncio
import http.server
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aegis_elastic.bus import subjects
from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.bus.contact import first_contact
from aegis_elastic.bus.contact.first_contact import Hello, Place
from aegis_elastic.bus.credentials import Credentials, NKey
from aegis_elastic.core.events import Finding, Join
from aegis_elastic.core.model import Failure
from aegis_elastic.core.protocol import messages
from aegis_elastic.core.protocol.messages import IndependentEnd, Message, MessageType, ReportData, WirePhase
from aegis_elastic.launch.ctl import admin_client
from tests.integration.harness import Job, Launch, wait_for

QUICK = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")
USAGE = 2


@pytest.fixture
def sleeper(tmp_path: Path) -> Path:
    """A training that goes on until the file `end` is there."""
    return _sleeper(tmp_path)


def _sleeper(folder: Path) -> Path:
    script = folder / "sleeper.py"
    script.write_text("import os, sys, time\nwhile not os.path.exists(sys.argv[1]):\n    time.sleep(0.05)\n")
    return script


def _last_line(launch: Launch) -> str:
    """Its one line, after it has ended as wrong use should."""
    assert launch.wait() == USAGE, launch.output
    about_secrets = ("NO JOIN SECRET", "INFO join secret")
    lines = [line for line in launch.output.splitlines() if not any(word in line for word in about_secrets)]
    assert len(lines) == 1, launch.output
    assert "cannot" in lines[0]
    return lines[0]


def test_wrong_use_is_told_before_anything_is_started(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    wrong: list[tuple[str, tuple[str, ...], str]] = [
        ("train.py", ("--no-such-flag",), "--no-such-flag"),
        ("train.py", ("--nnodes", "0"), "at least 1 node"),
        ("train.py", ("--nnodes", "3:2"), "did you mean 2:3?"),
        ("nowhere.py", (), "no such file"),
        ("train.py", ("--aegis-report", str(tmp_path / "no" / "report.json")), "there is no directory"),
        ("./train.sh", ("--no-python",), "not executable"),
    ]
    with Job(tmp_path) as job:
        launches = [job.start(program, flags=flags) for program, flags, _ in wrong]
        for launch, (_, _, text) in zip(launches, wrong, strict=True):
            assert text in _last_line(launch)
    assert not (tmp_path / "state").exists(), "a plane was begun for a job that can't be"


class _Silent(http.server.BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the requests are not what the test is about."""


def test_a_port_that_another_program_has(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    listener = socket.create_server(("127.0.0.1", 0))
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Silent)
    serving = threading.Thread(target=web.serve_forever, args=(0.05,))
    serving.start()
    try:
        ports = (listener.getsockname()[1], web.server_port)
        jobs = [Job(tmp_path / str(port), endpoint=f"127.0.0.1:{port}", flags=QUICK) for port in ports]
        for job in jobs:
            job.start(script)
        for job, port in zip(jobs, ports, strict=True):
            with job:
                message = _last_line(job.launches[0])
            assert f"127.0.0.1:{port}: another program uses that port" in message
    finally:
        web.shutdown()
        serving.join()
        web.server_close()
        listener.close()


def test_a_running_job_is_not_disturbed_by_those_who_fail_to_join(tmp_path: Path, sleeper: Path) -> None:
    """Another job on its port, a wrong secret, and a second launcher under a living worker's name."""
    end = tmp_path / "end"
    secret = {"AEGIS_JOIN_SECRET": "the right secret"}
    with Job(tmp_path, nnodes="1:2", flags=QUICK) as job:
        flags = ("--rdzv-conf", "last_call_timeout=0")
        first = job.start(sleeper, str(end), worker="a", env=secret, flags=flags)
        pids = {rank.pid for rank in job.wait_ranks(1).values()}
        wrong = {"AEGIS_JOIN_SECRET": "another secret"}
        stranger = job.start(sleeper, str(end), worker="b", env=wrong)
        double = job.start(sleeper, str(end), worker="a", env=secret)
        other = Job(tmp_path / "other", "other", endpoint=job.endpoint, flags=QUICK)
        with other:
            other.start(sleeper, str(end))
            assert "another program uses that port" in _last_line(other.launches[0])
        assert stranger.wait() == USAGE
        assert "join secret" in stranger.output.splitlines()[-1]
        assert "running here under that name" in _last_line(double)
        assert {rank.pid for rank in job.ranks().values()} == pids, "training was touched"
        end.touch()
        assert first.wait() == 0, first.output
        assert job.report()["recoverCount"] == 0


def test_programs_that_only_running_can_judge(tmp_path: Path) -> None:
    """Not Python, not finished, not there after all: the failure says so. An empty script is a good one.

    pytorch#60910 (a failure to start is restarted in vain): at most as often as --max-restarts allows.
    """
    shutil.copy("/bin/true", tmp_path / "elf.py")
    (tmp_path / "half.py").write_text("def (:\n")
    (tmp_path / "imports.py").write_text("import no_such_library\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "lost.sh").write_text("#!/no/such/interpreter\n")
    (tmp_path / "lost.sh").chmod(0o755)
    tried: list[tuple[str, tuple[str, ...], int, str]] = [
        ("elf.py", (), 1, "SyntaxError"),
        ("half.py", (), 1, "SyntaxError: invalid syntax (half.py, line 1)"),
        ("imports.py", (), 1, "ModuleNotFoundError: No module named 'no_such_library'"),
        ("empty.py", (), 0, "every worker finished"),
        ("lost.sh", ("--no-python",), 1, "lost.sh: No such file or directory"),
    ]
    jobs = [Job(tmp_path / f"of-{program}", max_restarts=0, flags=QUICK) for program, *_ in tried]
    for job, (program, flags, _, _) in zip(jobs, tried, strict=True):
        job.start(tmp_path / program, flags=flags)
    for job, (_, _, code, text) in zip(jobs, tried, strict=True):
        with job:
            launch = job.launches[0]
            assert launch.wait() == code, launch.output
            assert text in launch.output
            assert job.report()["outcome"] == ("failed" if code else "succeeded")
            assert [failure["role"] for failure in job.report()["failures"]] == ["root"] * code


# ---------------------------------------------------------------- what may come over the bus


class _AttackedJob(NamedTuple):
    """A running job, and credentials of a second worker that publishes anything."""

    job: Job
    place: Place
    key: NKey
    uid: str
    worker_and_uid: tuple[str, str]

    def status(self) -> dict[str, Any]:
        assert self.job.run_dir is not None
        admin = admin_client.load(self.job.run_dir)
        assert admin is not None
        status: dict[str, Any] = admin_client.call(admin, "status")
        return status

    async def publish(self, subject: str, payloads: list[bytes]) -> None:
        bus = await BusConnection.connect(
            [f"tls://127.0.0.1:{self.place.welcome.bus_port}"],
            Credentials(self.key, self.place.welcome.jwt),
            name=self.uid,
            ca_pem=self.place.certificate_pem,
        )
        try:
            for payload in payloads:
                await bus.publish(subject, payload)
        finally:
            await bus.close()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_AttackedJob]:
    """A job of one worker, and the credentials that first contact gives to a second one, a spare."""
    folder = tmp_path_factory.mktemp("victim")
    with Job(folder, flags=QUICK) as job:
        launch = job.start(_sleeper(folder), str(folder / "end"), worker="honest")
        job.wait_ranks(1)
        host, port = job.endpoint.split(":")
        key, uid = NKey.generate(), uuid.uuid4().hex
        hello = Hello(
            namespace="default", job=job.name, worker="liar", uid=uid, node_name="elsewhere",
            node_ip="127.0.0.1", nproc=1, ordinal=-1, user_public_key=key.public,
            nonce=first_contact.new_nonce(),
        )  # fmt: skip
        place = first_contact.call(host, int(port), hello, None, 10.0)
        honest = [line.event for line in job.journal() if isinstance(line.event, Join)]
        yield _AttackedJob(job, place, key, uid, ("honest", honest[0].uid))
        (folder / "end").touch()
        assert launch.wait() == 0, launch.output
        report = job.report()
        assert (report["recoverCount"], report["failures"]) == (0, [])


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_numbers = st.integers(-(2**70), 2**70) | st.sampled_from([0, 1, 2])
_text = st.text(max_size=30)


def _report(attacked: _AttackedJob, draw: st.DataObject) -> dict[str, Any]:
    """A report that has the right form; what stands in it is drawn."""
    worker, uid = draw.draw(st.sampled_from([attacked.worker_and_uid, ("liar", attacked.uid), ("liar", "?")]))
    failure = Failure(0, 0, 1.0, 1, None, draw.draw(_text), (draw.draw(_text),))
    data = ReportData(
        state=draw.draw(_text),
        store=draw.draw(st.sampled_from(["", "nonsense", "127.0.0.1:1", "[::1]:9", "x:y:z"])),
        findings=(Finding("gpu", "gpu.lost", "node"),),
        failures=(failure,),
        clues=("collective_timeout",),
        reason=draw.draw(_text),
        independent=(IndependentEnd(attacked.worker_and_uid[0], 1, "it was so", (failure,)),),
        started=draw.draw(st.booleans()),
        alive=("honest", "liar", draw.draw(_text)),
    )
    kind = draw.draw(st.sampled_from([MessageType.ACK, MessageType.ERROR, MessageType.FINISH]))
    message = Message(
        aegis_name=attacked.job.name, aegis_namespace="default", worker=worker, type=kind,
        phase=WirePhase.COMMAND, data=data, time_stamp=1.0, seq_num=attacked.place.welcome.seq_num, uid=uid,
        incarnation=1,
    )  # fmt: skip
    report: dict[str, Any] = msgspec.json.decode(messages.encode(message))
    return report


@given(data=st.data())
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_malformed_messages_change_nothing(attacked: _AttackedJob, data: st.DataObject) -> None:
    before = attacked.status()
    payloads = data.draw(st.lists(st.binary(max_size=200), max_size=5))
    payloads += [msgspec.json.encode(value) for value in data.draw(st.lists(_json, max_size=5))]
    for _ in range(data.draw(st.integers(1, 5))):
        report = _report(attacked, data)
        payloads.append(msgspec.json.encode(report))
        spoilt = data.draw(st.sampled_from(sorted(report)))
        payloads.append(msgspec.json.encode({**report, spoilt: data.draw(_json | _numbers)}))
        inner = data.draw(st.sampled_from(sorted(report["data"])))
        payloads.append(msgspec.json.encode({**report, "data": {**report["data"], inner: data.draw(_json)}}))
    asyncio.run(attacked.publish(subjects.report("default", attacked.job.name, "liar"), payloads))
    after = attacked.status()
    for untouched in ("phase", "incarnation", "recoverCount", "workers", "errorNodes"):
        assert after[untouched] == before[untouched]
    assert after["plane"]["pid"] == before["plane"]["pid"], "the master has died of it"


def test_a_flood_of_malformed_messages_is_a_few_lines(attacked: _AttackedJob) -> None:
    """One line for the first, then ever rarer ones: a worker must not fill the disk of the endpoint."""
    assert attacked.job.run_dir is not None
    log = attacked.job.run_dir.parent / "plane" / "plane.log"
    before = log.read_text().count("malformed report")
    asyncio.run(attacked.publish(subjects.report("default", attacked.job.name, "liar"), [b"{}"] * 500))
    wait_for(lambda: log.read_text().count("malformed report") > before, "a line about the flood")
    attacked.status()
    assert log.read_text().count("malformed report") - before < 12
