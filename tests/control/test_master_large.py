"""A master with hundreds of agents that are mere voices: what it says to all of them, and how often."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from aegis_elastic.bus import subjects
from aegis_elastic.bus.contact.first_contact import Hello
from aegis_elastic.bus.credentials import NKey
from aegis_elastic.bus.subscription import Message as BusMessage
from aegis_elastic.control import effects
from aegis_elastic.control.job_record import JobRecordStore
from aegis_elastic.control.journal_file import Journal
from aegis_elastic.control.master import Master
from aegis_elastic.core.detection.liveness import Patience
from aegis_elastic.core.model import Status
from aegis_elastic.core.protocol import messages
from aegis_elastic.core.protocol.messages import Message, MessageType, ReportData, WirePhase
from aegis_elastic.store.memory import MemoryStore
from tests.control.planes import spec

WORKERS = 200


class CountingPublisher:
    """Counts orders."""

    def __init__(self) -> None:
        self.orders = 0

    async def publish_order(self, status: Status, peers: Any = None) -> None:
        """One more to all."""
        self.orders += 1

    async def send(self, worker: str, directive: Any) -> None:
        """To one: of no interest here."""


def joining(worker: str) -> BusMessage:
    message = Message(
        aegis_name="job",
        aegis_namespace="team",
        worker=worker,
        type=MessageType.ACK,
        phase=WirePhase.BOOTCHECK,
        time_stamp=time.time(),
        seq_num=0,
        uid=f"uid-{worker}",
        incarnation=0,
        data=ReportData(state="joining"),
    )
    return BusMessage(subjects.report("team", "job", worker), messages.encode(message), "")


async def orders_while_all_come(folder: Path) -> int:
    record_store, counting, now = JobRecordStore(MemoryStore()), CountingPublisher(), time.time()
    begun = await record_store.open(spec(worker_num=WORKERS, min_worker_num=WORKERS), now, resume=True)
    publisher: Any = counting
    master = Master(
        record_store,
        publisher,
        Journal(folder),
        begun,
        now,
        run_dir=folder,
        make_jwt=lambda worker, key: ("jwt", time.time() + 1000),
        bus={"bus_port": 1, "bus_url": "", "bus_ca": ""},
        jwt_life_s=1000.0,
        patience=Patience(),
        attribution_s=1.0,
        plane={},
        notify_supervisor=lambda state: None,
    )
    leading = asyncio.create_task(master.run())
    key = NKey.generate().public
    for number in range(WORKERS):
        worker = f"w{number}"
        await master.greet(
            Hello("team", "job", worker, f"uid-{worker}", worker, "10.0.0.1", 8, -1, key, "nonce")
        )
        master.on_report(joining(worker))
        await asyncio.sleep(0)
    leading.cancel()
    await asyncio.wait({leading})
    return counting.orders


def test_many_who_come_one_after_the_other_dont_have_the_order_sent_to_all_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows with every one of them: of a thousand, eleven gigabytes would leave the master's host."""
    monkeypatch.setattr(effects, "REST_S_PER_WORKER", 100.0)
    began_s = time.monotonic()
    orders = asyncio.run(orders_while_all_come(tmp_path))
    assert orders <= 3 + (time.monotonic() - began_s) / effects.REPEAT_S
