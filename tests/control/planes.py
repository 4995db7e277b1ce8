"""Real control planes for tests, held as a launcher holds them, and agents that speak with them."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aegis_elastic.agents.mailbox.events import Joined
from aegis_elastic.agents.mailbox.mailbox import Mailbox
from aegis_elastic.agents.plane.link import Identity, PlaneLink
from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.bus.contact import first_contact
from aegis_elastic.bus.contact.first_contact import Hello, Place
from aegis_elastic.bus.credentials import Credentials, NKey
from aegis_elastic.control.host.config import PlaneConfig
from aegis_elastic.control.host.plane_process import PlaneProcess
from aegis_elastic.core.accounts import journal
from aegis_elastic.core.model import JobSpec
from aegis_elastic.core.protocol.messages import MessageType, ReportData, WirePhase
from aegis_elastic.core.protocol.orders import Action, Order
from aegis_elastic.launch.ctl import admin_client

PATIENCE_S = 30.0
_T = TypeVar("_T")


def spec(job: str = "job", **changes: Any) -> JobSpec:
    """A small job without checks."""
    plain = {"worker_num": 1, "min_worker_num": 1, "max_retry": 2, "bootcheck": "off", "troubleshoot": "off"}
    return JobSpec(job_name=job, namespace="team", **{**plain, **changes})


def config(folder: Path, job: str = "job", **changes: Any) -> PlaneConfig:
    """A plane on any port of the loopback, in `folder`."""
    spec_changes = changes.pop("spec", {})
    return PlaneConfig(
        directory=str(folder / job / "plane"),
        host="127.0.0.1",
        port=0,
        spec=spec(job, **spec_changes),
        job_dir=str(folder / job),
        **changes,
    )


def wait_for(look: Callable[[], _T], what: str) -> _T:
    """Look again and again until there is something to see; returns that."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (seen := look()):
        assert time.monotonic() < deadline_s, f"no {what} within {PATIENCE_S:.0f} s"
        time.sleep(0.02)
    return seen


def children(pid: int) -> dict[str, int]:
    """`master`, `nats` -> pid: what a plane's supervisor has started."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        argv = Path(f"/proc/{child}/cmdline").read_bytes()
        found["nats" if b"nats-server" in argv else "master"] = int(child)
    return found


def ended(pid: int) -> bool:
    """Whether a process that may not be our child has ended (its corpse counts as ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class Held:
    """A plane that we hold, as a launcher does."""

    def __init__(self, settings: PlaneConfig, restarts_max: int = 0) -> None:
        self.config = settings
        self.said: list[str] = []
        self.host = PlaneProcess(settings, restarts_max, self.said.append)
        self.host.open()

    @property
    def pid(self) -> int:
        """The supervisor's process id, of a plane that this holder has started."""
        assert self.host._process is not None
        return self.host._process.pid

    def ask(self, op: str = "status", **args: Any) -> Any:
        """What `aegisctl` would be told."""
        found = admin_client.load(self.host.run_dir)
        assert found is not None
        return admin_client.call(found, op, args)

    def journal(self) -> list[journal.Line]:
        """The journal's lines so far."""
        return journal.read(self.host.run_dir / "journal.jsonl")

    def close(self) -> None:
        """Let it go and have it ended, whoever is still connected."""
        self.host.close(wait=False)
        if self.host._process is not None:
            self.host._process.terminate()
            self.host._process.wait(PATIENCE_S)


class Agent:
    """An agent's link with nothing behind it: it does what it is ordered by saying that it has done it."""

    def __init__(
        self, plane: Held, worker: str, secret: bytes | None = None, address: str = "127.0.0.1"
    ) -> None:
        """`address`: what it says that its own is."""
        job = plane.config.spec
        self.identity = Identity(job.namespace, job.job_name, worker, os.urandom(8).hex(), worker, address, 1)
        self.mailbox = Mailbox()
        self.seen: list[object] = []
        self.order: Order | None = None
        self.link = PlaneLink(self.identity, ("127.0.0.1", plane.host.port), secret, self.mailbox)
        self.link.start(PATIENCE_S)

    def wait(self, kind: type[_T], holds: Callable[[_T], bool] = lambda _: True) -> _T:
        """The first item of that kind, from the last one waited for on."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            for item in self.mailbox.drain():
                self.seen.append(item)
                if isinstance(item, Order):
                    self.order = item
            while self.seen:
                item = self.seen.pop(0)
                if isinstance(item, kind) and holds(item):
                    return item
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{self.identity.worker} got no {kind.__name__} in {PATIENCE_S:.0f} s"
            select.select([self.mailbox], [], [], left_s)

    def join(self) -> None:
        """Be part of the job."""
        self.wait(Joined)
        if self.order is not None and self.order not in self.seen:
            # The link hears the bus before it says that it has joined: nobody would be told that order again.
            self.seen.insert(0, self.order)
        self.say(MessageType.ACK, state="joining")

    def obey(self, action: Action) -> Order:
        """Wait for that order and say that it has been carried out."""
        order = self.wait(Order, lambda order: order.action is action)
        if action is Action.RUN:
            self.say(MessageType.ACK, state="running", started=True)
        else:
            self.say(MessageType.FINISH)
        return order

    def run(self) -> Order:
        """Join and follow orders until training runs; returns the order to run."""
        self.join()
        self.obey(Action.READY)
        self.obey(Action.BOOTCHECK)
        return self.obey(Action.RUN)

    def say(self, kind: MessageType, **data: Any) -> None:
        """Report as an answer to the newest order."""
        seq_num, incarnation = (self.order.seq_num, self.order.incarnation) if self.order else (0, 0)
        report = ReportData(store="127.0.0.1:1", **data)
        self.link.report(kind, WirePhase.COMMAND, seq_num, incarnation, report)

    def close(self) -> None:
        """Leave. The inbox is left to the garbage collector: the link's thread may still know it."""
        self.link.close()


def hello(plane: Held, worker: str, key: NKey, **changes: Any) -> Hello:
    """An introduction."""
    job = plane.config.spec
    whole = Hello(
        namespace=job.namespace, job=job.job_name, worker=worker, uid=os.urandom(8).hex(), node_name=worker,
        node_ip="127.0.0.1", nproc=1, ordinal=-1, user_public_key=key.public, nonce=first_contact.new_nonce(),
    )  # fmt: skip
    return msgspec.structs.replace(whole, **changes)


def meet(plane: Held, worker: str, key: NKey, secret: bytes | None = None, **changes: Any) -> Place:
    """First contact as a worker makes it."""
    introduction = hello(plane, worker, key, **changes)
    return first_contact.call("127.0.0.1", plane.host.port, introduction, secret, PATIENCE_S)


async def on_the_bus(place: Place, key: NKey, name: str, violations: list[str]) -> BusConnection:
    """A connection with the credentials that first contact gave."""
    return await BusConnection.connect(
        [f"tls://127.0.0.1:{place.welcome.bus_port}"],
        Credentials(key, place.welcome.jwt),
        name=name,
        ca_pem=place.certificate_pem,
        on_violation=violations.append,
    )


async def violated(violations: list[str], subject: str) -> bool:
    """Wait until the server has refused `subject` (it tells in lower case)."""
    for _ in range(int(PATIENCE_S / 0.02)):
        if any(f'"{subject.lower()}"' in violation.lower() for violation in violations):
            return True
        await asyncio.sleep(0.02)
    return False
