"""A bus that somebody else runs: two jobs of real launchers and planes on one nats-server of its owner's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aegis_elastic.bus.credentials import PlaneKeys
from aegis_elastic.bus.server import find_binary
from aegis_elastic.bus.tls import make_certificate
from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.launch.flags import bus as bus_flags
from tests.integration.harness import Job, free_port
from tests.integration.planes import write_worker

QUICK = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")


class Bus:
    """A nats-server as its owner starts it, with what `aegisctl bus-config` prints and a store of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.keys, self.port = folder / "keys.json", free_port()
        command = [str(Path(sys.executable).parent / "aegisctl"), "bus-config", "--keys", str(self.keys)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        certificate = make_certificate(folder, ["127.0.0.1"])
        self.ca = certificate.cert_path
        secure = {"cert_file": str(certificate.cert_path), "key_file": str(certificate.key_path)}
        config = json.loads(printed) | {
            "listen": f"127.0.0.1:{self.port}",
            "jetstream": {"store_dir": str(folder / "store")},
            "tls": secure | {"handshake_first": True},
        }
        (folder / "nats.conf").write_text(json.dumps(config))
        self._command = [str(find_binary()), "-c", str(folder / "nats.conf")]
        self.start()

    @property
    def flags(self) -> tuple[str, ...]:
        """What a launcher is given."""
        url = f"tls://127.0.0.1:{self.port}"
        return ("--aegis-bus", url, "--aegis-bus-keys", str(self.keys), "--aegis-bus-ca", str(self.ca))

    def start(self) -> None:
        """Start it, again."""
        self.process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    made = Bus(tmp_path / "bus")
    yield made
    made.kill()


@pytest.mark.full
def test_two_jobs_on_one_bus_that_is_killed_and_comes_back(bus: Bus, tmp_path: Path) -> None:
    assert os.stat(bus.keys).st_mode & 0o777 == 0o600
    script = write_worker(tmp_path)
    one = Job(tmp_path / "one", "one", flags=(*QUICK, *bus.flags))
    two = Job(tmp_path / "two", "two", flags=(*QUICK, *bus.flags))
    with one, two:
        launches = [job.start(script, str(tmp_path)) for job in (one, two)]
        for job in (one, two):
            job.wait_phase("RunCommand", 1)
        ranks = [job.wait_ranks(1, restart_count=0)[0] for job in (one, two)]
        servers = [pid for job in (one, two) for pid in job.processes() if _is_server(pid)]
        assert not servers, "none of our own"
        bus.kill()
        for launch in launches:
            launch.wait_output("the control plane can't be reached; training is not touched")
        bus.start()
        for launch in launches:
            launch.wait_output("the control plane can be reached again")
        os.kill(ranks[0].pid, 9)
        one.wait_phase("RunCommand", 2)
        one.wait_ranks(1, restart_count=1)
        (tmp_path / "end").touch()
        assert [launch.wait() for launch in launches] == [0, 0]
        assert (one.report()["recoverCount"], two.report()["recoverCount"]) == (1, 0)


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    PlaneKeys.load_or_generate(keys)
    assert bus_flags.read("nats://h:4222", keys, None).url == "nats://h:4222"
    assert bus_flags.read(None, None, None).url == ""
    for wrong, why in (
        ((None, keys, None), "without --aegis-bus"),
        (("nats://h:4222", None, None), "give --aegis-bus-keys, too"),
        (("tls://h:4222", keys, None), "--aegis-bus-ca goes with tls://"),
        (("nats://h:4222", keys, tmp_path / "ca"), "--aegis-bus-ca goes with tls://"),
        (("tls://h:4222", keys, tmp_path / "none"), "No such file"),
        (("tls://h:4222", keys, keys), "not a PEM certificate"),
    ):
        with pytest.raises(UsageError, match=why):
            bus_flags.read(*wrong)
    keys.chmod(0o644)
    with pytest.raises(UsageError, match="want 0600"):
        bus_flags.read("nats://h:4222", keys, None)


def _is_server(pid: int) -> bool:
    try:
        return b"nats-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
