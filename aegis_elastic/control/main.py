"""The master's process, a child of the plane's supervisor: `python -m aegis_elastic.control.main`.

Reads one line from its standard input, {"directory": the plane's, "natsPort": where the bus is}, and leads.

Reports its state on its standard output, a JSON object a line: {"ready": {...}} with the port, {"failed":
why}, and after every decision how many agents there are and whether the job has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from aegis_elastic.bus import advisories, credentials, subjects, tls
from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.bus.credentials import Credentials, NKey, PlaneKeys
from aegis_elastic.bus.errors import BusError
from aegis_elastic.bus.subscription import Message
from aegis_elastic.control.controllers import platform_record, storm_guard
from aegis_elastic.control.controllers.checkpoints import CheckpointController
from aegis_elastic.control.controllers.monitoring import MonitoringController
from aegis_elastic.control.controllers.operator_checks import OperatorCheckController
from aegis_elastic.control.controllers.post_mortems import PostMortemController
from aegis_elastic.control.controllers.progress import ProgressController
from aegis_elastic.control.controllers.spares import SpareController
from aegis_elastic.control.effects import Publisher
from aegis_elastic.control.host import config as plane_config
from aegis_elastic.control.host.config import ADMIN_FILE, LOG_FILE, PlaneConfig, write_private
from aegis_elastic.control.host.grpc_server import AddressTaken, GrpcServer
from aegis_elastic.control.job_record import Fenced, JobRecordStore
from aegis_elastic.control.journal_file import Journal
from aegis_elastic.control.master import Master
from aegis_elastic.control.run_files import set_aside
from aegis_elastic.core.detection.liveness import Patience
from aegis_elastic.core.events import Requeued
from aegis_elastic.observe.controller import MetricsController
from aegis_elastic.store.contract import StoreUnavailable
from aegis_elastic.store.jetstream import JetStreamStore, bucket_name

logger = logging.getLogger(__name__)

# Exit codes that the supervisor reads: no use in starting again.
EXIT_FENCED = 3
EXIT_ADDRESS = 4
# Our own credentials outlive any job; they never leave this process.
OWN_JWT_LIFE_S = 10 * 365 * 86400.0


def notify_supervisor(state: dict[str, Any]) -> None:
    """Write one line for the supervisor."""
    sys.stdout.write(json.dumps(state) + "\n")
    sys.stdout.flush()


async def _connect(
    config: PlaneConfig, keys: PlaneKeys, pem: str, port: int
) -> tuple[BusConnection, BusConnection]:
    """The master's two connections: in the jobs' account, and in the system account, where the server
    publishes who connects.
    """
    host = f"[{config.host}]" if ":" in config.host else config.host
    urls = [config.bus.url or f"tls://{host}:{port}"]
    trusted = (config.bus.ca_pem or None) if config.bus.url else pem
    job_key, system_key = NKey.generate(), NKey.generate()
    mine = Credentials(job_key, credentials.master_jwt(keys, job_key.public, expires_s=OWN_JWT_LIFE_S))
    servers = Credentials(
        system_key, credentials.system_jwt(keys, system_key.public, expires_s=OWN_JWT_LIFE_S)
    )
    bus, system_bus = await asyncio.gather(
        BusConnection.connect(urls, mine, name="master", ca_pem=trusted),
        BusConnection.connect(urls, servers, name="master", ca_pem=trusted),
    )
    return bus, system_bus


async def _lead(config: PlaneConfig, nats_port: int) -> None:
    keys = PlaneKeys.load(Path(config.bus.keys_file) if config.bus.url else config.path / "keys.json")
    certificate = tls.load_certificate(config.path)
    bus, system = await _connect(config, keys, certificate.pem, nats_port)
    server: GrpcServer | None = None
    try:
        master, monitoring, run_dir = await _make_master(config, keys, bus, nats_port)

        def on_connect(bus_message: Message) -> None:
            advisory = advisories.parse_connect(bus_message.data)
            master.on_connected(advisory.name, advisory.client_id)

        def on_disconnect(bus_message: Message) -> None:
            advisory = advisories.parse_disconnect(bus_message.data)
            master.on_disconnected(advisory.name, advisory.reason, advisory.client_id)

        system.on_new_client(master.on_bus_lost)
        spec = master.status.spec
        await system.subscribe(advisories.CONNECTS, on_connect)
        await system.subscribe(advisories.DISCONNECTS, on_disconnect)
        await bus.subscribe(subjects.report_wildcard(spec.namespace, spec.job_name), master.on_report)
        token = secrets.token_hex(16)
        secret = config.secret.encode() or None
        server = GrpcServer(certificate, secret, token, master.greet, master.admin, monitoring.take, keys)
        port = server.open(config.host, config.port)
        admin = {"endpoint": f"{config.host}:{port}", "certPem": certificate.pem, "token": token}
        write_private(run_dir / ADMIN_FILE, msgspec.json.encode(admin))
        ready = {
            "port": port,
            "runDir": str(run_dir),
            "generation": spec.generation,
            "resumed": master.resumed,
        }
        notify_supervisor({"ready": ready})
        await master.run()
    finally:
        if server is not None:
            server.close()
        await asyncio.gather(bus.close(), system.close())


async def _lead_until_sigterm(config: PlaneConfig, nats_port: int) -> None:
    """Lead until SIGTERM: controllers may have something under way that is worth a moment."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await _lead(config, nats_port)


async def _make_master(
    config: PlaneConfig, keys: PlaneKeys, bus: BusConnection, nats_port: int
) -> tuple[Master, MonitoringController, Path]:
    """The master with the status that it goes on from, its controller for notes, and the run directory of
    this generation.
    """
    wanted = config.spec
    store = await JetStreamStore.open(bus, bucket_name("aegis", wanted.namespace, wanted.job_name))
    record_store = JobRecordStore(store)
    begun_at = time.time()
    begun = await record_store.open(wanted, begun_at, resume=config.resume, leads=config.leads)
    spec = begun.status.spec
    run_dir = Path(config.run_dir) if config.run_dir else Path(config.job_dir) / str(spec.generation)
    if begun.name == "create":
        set_aside(run_dir)

    def make_jwt(worker: str, public_key: str) -> tuple[str, float]:
        who = {"ns": spec.namespace, "job": spec.job_name, "worker": worker}
        jwt = credentials.worker_jwt(keys, public_key, expires_s=config.jwt_life_s, **who)
        return jwt, time.time() + config.jwt_life_s

    journal = Journal(run_dir)
    plane = {"kind": "embedded", "host": config.host, "pid": os.getpid(), "runDir": str(run_dir)}
    publisher = Publisher(bus, spec.namespace, spec.job_name)
    master = Master(
        record_store,
        publisher,
        journal,
        begun,
        begun_at,
        run_dir=run_dir,
        make_jwt=make_jwt,
        bus={"bus_port": nats_port, "bus_url": config.bus.url, "bus_ca": config.bus.ca_pem},
        jwt_life_s=config.jwt_life_s,
        patience=Patience(silent_s=config.silent_s),
        attribution_s=config.attribution_s,
        plane=plane,
        notify_supervisor=notify_supervisor,
    )
    if begun.status.suspended and not config.leads:
        master.feed(Requeued(begun.status.attempt))  # started anew by hand: nobody counts that
    master.controllers.add(CheckpointController(master.feed))
    master.controllers.add(SpareController(master.feed))
    operator_checks = OperatorCheckController(publisher.send)
    master.controllers.add(operator_checks)
    master.controllers.admin_handlers |= operator_checks.admin_handlers
    master.controllers.add(
        PostMortemController(master.feed, fail_fast=config.fail_fast, earlier=journal.lines)
    )
    limits = {"floor_s": config.hang_after_s, "silent_s": config.silent_s}
    limits["no_steps_s"] = config.policy.guard.heartbeat_stale_s
    master.controllers.add(ProgressController(master.feed, **limits, on_moved=master.on_training_moved))
    fresh = begun.name == "create"
    storm_guard.add_to(master.controllers, master.feed, spec, config, store, fresh=fresh)
    monitoring = MonitoringController(master.feed, begun.status)
    master.controllers.add(monitoring)
    if config.nodes.record:
        platform_record.add_to(master.controllers, master.feed, config.nodes.record, config.host)
    if config.metrics_port is not None:
        metrics = MetricsController(lambda: monitoring.usage, journal.lines)
        master.controllers.add(metrics)
        plane["metrics"] = await metrics.open(config.metrics_host, config.metrics_port)
    return master, monitoring, run_dir


def main() -> int:
    """Run until ended by the supervisor; returns the exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s master %(levelname)s %(message)s", stream=sys.stderr
    )
    line = sys.stdin.readline()
    if not line:
        return 0  # The supervisor has ended before it had a job for us.
    start = json.loads(line)
    directory = Path(start["directory"])
    plane_config.log_to(directory / LOG_FILE, (2,))  # started before there was one
    # asyncio warns of what every TLS connection does at its end.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    config = plane_config.load(directory / plane_config.CONFIG_FILE)
    try:
        asyncio.run(_lead_until_sigterm(config, int(start["natsPort"])))
    except asyncio.CancelledError:
        return 0  # Our supervisor ends us with the job.
    except Fenced as error:
        notify_supervisor({"failed": str(error), "final": True})
        return EXIT_FENCED
    except AddressTaken as error:
        notify_supervisor({"failed": str(error), "final": True})
        return EXIT_ADDRESS
    except (BusError, StoreUnavailable, OSError) as error:
        logger.error("the master ends: %s", error)
        notify_supervisor({"failed": str(error), "final": False})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
