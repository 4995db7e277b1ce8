"""One launch on one node: starts the control plane if it is ours, runs the agent, returns the exit code."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.elastic.agent.server.api import WorkerSpec

from aegis_elastic.agents.agent import AegisElasticAgent
from aegis_elastic.agents.checks.forked_process import ForkedChecks
from aegis_elastic.agents.checks.requests import CheckSettings
from aegis_elastic.agents.checks.spare_fitness import SPARE_CHECKS
from aegis_elastic.agents.contract import Outcome, Settings
from aegis_elastic.agents.mailbox.mailbox import Mailbox, SignalReceived, SignalsToMailbox
from aegis_elastic.agents.plane.link import CONTACT_TIMEOUT_S, Identity, PlaneLink
from aegis_elastic.agents.ranks.guarded_ranks import GuardedRanks
from aegis_elastic.agents.ranks.torch_seam import JobIdentity, command_of, run_log_dir
from aegis_elastic.agents.standalone.fallback import Meeting
from aegis_elastic.bus.contact.secret import SecretError, find_secret
from aegis_elastic.control.host import addresses, run_directories, worker_names
from aegis_elastic.control.host.config import NodesConfig, PlaneConfig
from aegis_elastic.control.host.errors import LaunchError, UsageError
from aegis_elastic.control.host.plane_process import PlaneFailed, PlaneProcess, PortTaken, StartingPlane
from aegis_elastic.control.isolation import api_server, drivers
from aegis_elastic.core.model import JobSpec
from aegis_elastic.launch import reexec, watchers
from aegis_elastic.launch.ctl import admin_client, probation
from aegis_elastic.launch.flags import bus
from aegis_elastic.launch.flags.options import Options
from aegis_elastic.launch.screens import final_report
from aegis_elastic.launch.slurm import allocation

logger = logging.getLogger(__name__)

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
SIGNALS_TO_HANDLE = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
EXIT_JOB_FAILED = 1
QUIT_TIMEOUT_S = 3.0


def announce(text: str) -> None:
    """Write one line for people to stderr."""
    sys.stderr.write(f"[aegis] {text}\n")
    sys.stderr.flush()


class Launcher:
    """One launch on one node. `run` returns the exit code."""

    # Replaced by `aegis_elastic.testing.faults`, whose launcher starts agents that stop at given points.
    agent_type: type[AegisElasticAgent] = AegisElasticAgent

    def __init__(
        self,
        options: Options,
        environment: Mapping[str, str],
        starting_plane: StartingPlane | None = None,
        checks: ForkedChecks | None = None,
    ) -> None:
        """`starting_plane`: a plane process started ahead, in case that this host serves the plane. `checks`:
        a process for the first checks. Whoever made them ends them if they aren't used.
        """
        self._starting_plane = starting_plane
        self._checks = checks
        self._inherited_fds = reexec.inheritable_fds()
        self._handover = reexec.take_handover(os.environ)
        if self._handover is not None:
            self._inherited_fds -= {self._handover.lock_fd, self._handover.plane_fd}
            options = reexec.same_job(options, self._handover)
        self._options = options
        self._environment = environment
        self._address = addresses.resolve(options.endpoint.host)
        self._endpoint_is_local = addresses.is_ours(self._address)
        # Where the plane is, and whether we serve it: at the endpoint, unless it is an `aegis-master`.
        self._plane_address = options.aegis.plane or (options.endpoint.host, options.endpoint.port)
        self._serves_plane = self._endpoint_is_local and options.aegis.plane is None
        self._node_ip = options.config.local_addr or (
            self._address if self._endpoint_is_local else addresses.address_towards(self._address)
        )
        self._secret = self._find_secret()
        self._plane: PlaneProcess | None = None

    def run(self) -> int:
        """Run this node's part of the job: its exit code. UsageError, PortTaken: nothing was started."""
        options = self._options
        mailbox = Mailbox()
        to_handle = str(getattr(options.config, "signals_to_handle", SIGNALS_TO_HANDLE))  # not in torch 2.6
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = to_handle  # as torchrun does: the ranks inherit it
        signals = {getattr(signal, name.strip()) for name in to_handle.split(",")}
        with SignalsToMailbox(mailbox, signals | set(PASSED_ON)), self._hold_name() as name:
            port, failed = self._open_plane()
            aegis = self._options.aegis
            probation.run_before_joining(
                aegis.state_dir, aegis.store, aegis.probation_burn_s, mailbox, announce
            )
            if self._handover is not None and self._handover.plane_fd >= 0:
                os.close(self._handover.plane_fd)  # The plane has been taken over, or has ended.
            numeric = addresses.resolve(self._plane_address[0])
            link = PlaneLink(
                self._identity(name.text),
                # By name: a replaced host of the plane may have another address. Our own address stays.
                (numeric if self._serves_plane else self._plane_address[0], port),
                self._secret,
                mailbox,
                parks=allocation.in_step(),
            )
            agent = self._agent(link, mailbox, frozenset(int(number) for number in signals), port)
            if failed:
                # Our plane can't start and nobody else serves one: training must not wait for it.
                from aegis_elastic.agents.mailbox.events import NotJoined

                mailbox.put(NotJoined(failed))
            else:
                link.start(options.join_timeout_s)
            renewing = False
            try:
                outcome = agent.supervise()
                self._quit_if_interrupted(outcome)
                renewing = outcome.renew and self._may_renew()
            finally:
                link.close()
                if self._plane is not None and not renewing:
                    self._plane.close()
            if renewing:
                outcome = self._renew(outcome, name, port, mailbox)
        mailbox.close()
        return self._finish(outcome)

    def _may_renew(self) -> bool:
        """On Kubernetes the platform starts a clean container instead, except for the node that hosts the
        plane, which would end with the container.
        """
        return self._plane is not None or "KUBERNETES_SERVICE_HOST" not in self._environment

    def _renew(self, outcome: Outcome, name: worker_names.Name, port: int, mailbox: Mailbox) -> Outcome:
        """Execute ourselves again as a clean process. Returns the outcome only if that is impossible."""
        signals = [item.signum for item in mailbox.drain() if isinstance(item, SignalReceived)]
        options, why = self._options, "a signal came first"
        plane_fd = self._plane.hold if self._plane is not None else -1
        run_id = options.config.run_id
        if not signals:
            handover = reexec.Handover(name.text, name.lock, plane_fd, options.job_name, run_id, port)
            try:
                reexec.execute(handover, self._inherited_fds)
            except OSError as error:
                why = str(error)
        if self._plane is not None:
            self._plane.close()
        code = 128 + signals[0] if signals else outcome.code
        return Outcome(code, f"cannot start again in a clean process: {why}")

    def _quit_if_interrupted(self, outcome: Outcome) -> None:
        """Ctrl-C at a job of one node closes the job: nothing failed, and what is started next under its name
        is a new job. After SIGTERM, which schedulers send, the job stays open and can be continued.
        """
        single_node = self._options.config.max_nodes == 1
        if outcome.code != 128 + signal.SIGINT or not single_node or self._plane is None:
            return
        try:
            way = admin_client.load(self._plane.run_dir)
            if way is not None:
                admin_client.call(way, "quit", {"reason": "interrupted by SIGINT"}, timeout_s=QUIT_TIMEOUT_S)
        except LaunchError as error:
            logger.warning("the job's record stays open, and the next start continues it: %s", error)

    def _on_ended(self, phase: str) -> None:
        """Our plane says that the job has ended. The agent learns that by an order: nothing is done here."""

    # ------------------------------------------------------------ the start

    def _find_secret(self) -> bytes | None:
        aegis = self._options.aegis
        try:
            secret, source = find_secret(aegis.join_secret_file, self._environment, aegis.state_dir)
        except SecretError as error:
            raise UsageError(str(error)) from None
        if secret is None and aegis.require_secret:
            raise UsageError(
                "cannot start: --aegis-require-secret was given, but there is no join secret; name one with "
                "--aegis-join-secret-file or AEGIS_JOIN_SECRET"
            )
        several = self._options.config.max_nodes > 1
        if secret is None and several:
            announce(
                "NO JOIN SECRET: whoever reaches the endpoint first is trusted. Give every node the same "
                "AEGIS_JOIN_SECRET or --aegis-join-secret-file"
            )
        elif secret is not None:
            logger.info("join secret from %s", source)
        return secret

    def _open_plane(self) -> tuple[int, str]:
        """The port of the plane, and why ours can't be started ("" if it was, or isn't ours)."""
        if not self._serves_plane:
            return self._plane_address[1], ""
        restarts = self._options.aegis.plane_restarts
        self._plane = PlaneProcess(
            self._plane_config(), restarts, announce, self._starting_plane, self._on_ended
        )
        try:
            self._plane.open()
        except PortTaken:
            raise
        except PlaneFailed as error:
            logger.error("%s", error)
            self._plane = None
            return self._plane_address[1], str(error)
        options = self._options
        try:
            run_directories.register(
                options.namespace, options.job_name, self._plane.generation, self._plane.run_dir
            )
        except UsageError as error:
            logger.warning("aegisctl won't find this job by its name: %s", error)
        continued = ", continued" if self._plane.resumed else ""
        listens = addresses.resolve(self._plane_address[0])
        bound = "" if listens.startswith("127.") else f"; the control plane listens on {listens}"
        state_place = options.aegis.store or options.aegis.state_dir
        taints = f"taints are kept in {state_place}" if state_place else "taints end with the job"
        announce(
            f"job {options.job_name} (generation {self._plane.generation}{continued}): at most "
            f"{options.max_restarts} restarts; run directory {self._plane.run_dir}; {taints}{bound}"
        )
        return self._plane.port, ""

    def _plane_config(self) -> PlaneConfig:
        options, aegis = self._options, self._options.aegis
        job_dir = run_directories.job_dir(options.namespace, options.job_name)
        spec = JobSpec(
            job_name=options.job_name,
            namespace=options.namespace,
            worker_num=options.config.max_nodes,
            min_worker_num=options.config.min_nodes,
            max_retry=options.max_restarts,
            recovery_budget=aegis.recovery_budget,
            retry_decay=aegis.retry_decay,
            bootcheck=aegis.bootcheck,
            troubleshoot=aegis.troubleshoot,
            join_timeout_s=options.join_timeout_s,
            last_call_s=options.last_call_s,
            rejoin_timeout_s=aegis.rejoin_timeout_s,
            requeue=aegis.requeue == "on" or (aegis.requeue == "auto" and allocation.in_step()),
        )
        return PlaneConfig(
            directory=str(job_dir / "plane"),
            host=addresses.resolve(self._plane_address[0]),
            port=self._plane_address[1],
            spec=spec,
            job_dir=str(job_dir),
            run_dir=str(aegis.run_dir or self._default_run_dir() or ""),
            secret=(self._secret or b"").decode(),
            resume=not options.anonymous,
            linger_s=aegis.plane_linger_s,
            silent_s=aegis.lost_timeout_s,
            hosts=(addresses.resolve(self._plane_address[0]), socket.gethostname()),
            fail_fast=aegis.fail_fast,
            metrics_host=aegis.metrics_host,
            metrics_port=aegis.metrics_port,
            hang_after_s=aegis.hang_after_s,
            nodes=self._nodes_config(),
            bus=bus.read(aegis.bus, aegis.bus_keys, aegis.bus_ca),
            policy=aegis.policy,
            notify=aegis.notify,
            check_paths={kind: str(path) for kind, path in aegis.check_paths.items()},
        )

    def _nodes_config(self) -> NodesConfig:
        """What the plane is to do about nodes. UsageError if the driver or the record can't be used."""
        aegis = self._options.aegis
        try:
            drivers.make(aegis.isolation)
        except ValueError as error:
            raise UsageError(f"cannot use --aegis-isolation: {error}") from None
        if aegis.record:
            try:
                api_server.from_pod("keep the job's record")
            except ValueError as error:
                raise UsageError(f"cannot use --aegis-record: {error}") from None
        return NodesConfig(
            state_dir=str(aegis.state_dir or ""),
            store=aegis.store or "",
            taint_s=aegis.taint_s,
            isolation=aegis.isolation,
            isolation_max=aegis.isolation_max,
            isolation_dry_run=aegis.isolation_dry_run,
            record=aegis.record or "",
        )

    def _hold_name(self) -> AbstractContextManager[worker_names.Name]:
        options = self._options
        if self._handover is not None:
            return worker_names.held_on(self._handover.worker, self._handover.lock_fd)
        wanted = options.aegis.worker_name
        # The host name alone is no choice by the user. But a job without a name is known only by its port: if
        # it has one node, and that is already running here, this is another job on the same port.
        single_node = options.anonymous and options.config.max_nodes == 1
        chosen = wanted != socket.gethostname() or single_node
        return worker_names.held(
            run_directories.job_dir(options.namespace, options.job_name), wanted, chosen=chosen
        )

    def _default_run_dir(self) -> Path | None:
        """The default run directory: `aegis/` beside the ranks' logs if --log-dir was given; else None."""
        specs = self._options.config.logs_specs
        if not self._options.torch_args.log_dir or specs is None:
            return None
        logs = run_log_dir(specs, self._options.config.run_id)
        return logs.absolute() / "aegis" if logs is not None else None

    def _identity(self, worker: str) -> Identity:
        options = self._options
        return Identity(
            namespace=options.namespace,
            job=options.job_name,
            worker=worker,
            uid=uuid.uuid4().hex,
            node_name=addresses.node_name(),
            node_ip=self._node_ip,
            nproc=options.config.nproc_per_node,
            ordinal=-1 if options.node_rank is None else options.node_rank,
            attempt=allocation.restarts(),
        )

    def _agent(
        self, link: PlaneLink, mailbox: Mailbox, signals: frozenset[int], port: int
    ) -> AegisElasticAgent:
        options, config = self._options, self._options.config
        entrypoint, arguments = command_of(options.cmd, options.cmd_args)
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            entrypoint=entrypoint,
            args=arguments,
            rdzv_handler=JobIdentity(config.run_id),  # type: ignore[arg-type]  # torch_seam reads no more of it
            max_restarts=options.max_restarts,
            monitor_interval=config.monitor_interval,
            local_addr=config.local_addr,
            **_newer_torch_fields(config),
        )
        meeting = Meeting(
            host=self._address,
            port=options.aegis.fallback_port
            or (port if self._serves_plane else options.endpoint.port or port) + 1,
            hosting=self._endpoint_is_local,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            max_restarts=options.max_restarts,
            # The node that was first gives up joining first, and then waits for those that still try.
            wait_s=2 * options.join_timeout_s + CONTACT_TIMEOUT_S,
            last_call_s=options.last_call_s,
        )
        settings = Settings(
            meeting=meeting,
            fault_grace_s=options.aegis.fault_grace_s,
            grace_given=options.aegis.grace_given,
            shutdown_timeout_s=float(getattr(config, "shutdown_timeout", None) or 30),
            signals=signals,
            spare_checks=SPARE_CHECKS[options.aegis.bootcheck],
            first_checks=self._checks,
            checks=CheckSettings(
                {kind: str(path) for kind, path in options.aegis.check_paths.items()},
                options.aegis.check_budgets,
                options.aegis.gpus_per_node,
            ),
            isolate_exit_code=options.aegis.isolate_exit_code,
            watchers=watchers.makers(options, link),
        )
        assert config.logs_specs is not None
        ranks = GuardedRanks(
            spec,
            config.logs_specs,
            log_line_prefix_template=config.log_line_prefix_template,
            job=link.identity.job,
            warm_spares=options.aegis.warm_spares,
        )
        return self.agent_type(
            ranks,
            identity=link.identity,
            link=link,
            mailbox=mailbox,
            settings=settings,
            announce=announce,
        )

    # ------------------------------------------------------------ the end

    def _finish(self, outcome: Outcome) -> int:
        options = self._options
        if outcome.report is not None:
            if self._endpoint_is_local:
                final_report.show(outcome.report, options.job_name, file=sys.stderr)
            else:
                announce(f"{outcome.report.outcome}: {outcome.report.summary}")
                for doubt in outcome.report.doubts:
                    announce(f"DOUBTFUL SUCCESS: {doubt}")
        elif outcome.reason:
            announce(outcome.reason)
        if options.aegis.report is not None:
            self._write_report(options.aegis.report, outcome)
        if outcome.renew:
            return options.aegis.renew_exit_code
        has_doubts = outcome.report is not None and outcome.report.doubts
        if outcome.code == 0 and has_doubts and options.aegis.strict_success:
            announce("exit code 1: --aegis-strict-success asks for a success without doubts")
            return EXIT_JOB_FAILED
        if outcome.code == EXIT_JOB_FAILED and options.aegis.propagate_exit_code:
            return _root_cause_exit_code(outcome)
        return outcome.code

    def _write_report(self, path: Path, outcome: Outcome) -> None:
        if outcome.report is None:
            announce(f"no report in {path}: the control plane was not there at the end")
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(outcome.report), indent=2))
        temporary.replace(path)


def _newer_torch_fields(config: object) -> dict[str, Any]:
    """WorkerSpec fields that older versions of torch lack, where this one has them."""
    names = (
        "event_log_handler",
        "numa_options",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "virtual_local_rank",
    )
    fields = WorkerSpec.__dataclass_fields__
    return {name: getattr(config, name) for name in names if name in fields and hasattr(config, name)}


def _root_cause_exit_code(outcome: Outcome) -> int:
    """The exit code of the process that failed first; 128 + N for a signal."""
    if outcome.report is not None:
        roots = [
            entry for entry in outcome.report.failures if entry.role == "root" and entry.rank is not None
        ]
        if roots:
            return _shell_exit_code(roots[-1].exit_code, roots[-1].signal)
    if outcome.failures:
        return _shell_exit_code(outcome.failures[0].exit_code, outcome.failures[0].signal)
    return EXIT_JOB_FAILED


def _shell_exit_code(exit_code: int | None, name: str | None) -> int:
    if name is not None and name in signal.Signals.__members__:
        return 128 + int(signal.Signals[name])
    return exit_code or EXIT_JOB_FAILED
