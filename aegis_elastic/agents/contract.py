"""What whoever runs an agent gives it (`Settings`) and gets from it (`Outcome`)."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from aegis_elastic.agents.checks.forked_process import ChecksProcess
from aegis_elastic.agents.checks.requests import CheckSettings
from aegis_elastic.agents.standalone.fallback import Meeting
from aegis_elastic.agents.watch.contract import WatcherFactory
from aegis_elastic.core.accounts.report import Report
from aegis_elastic.core.model import Failure


@dataclass(frozen=True)
class Settings:
    """What the user may set of the agent. Times in seconds; `signals` end the launcher, others are passed
    on. `grace_given`: somebody asked for `fault_grace_s`.
    """

    meeting: Meeting
    fault_grace_s: float = 1.0
    grace_given: bool = False
    shutdown_timeout_s: float = 30.0
    signals: frozenset[int] = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
    checks: CheckSettings = field(default_factory=CheckSettings)
    isolate_exit_code: int = 1
    spare_checks: tuple[str, ...] = ()
    first_checks: ChecksProcess | None = None
    watchers: tuple[WatcherFactory, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How it ended for this launcher. `report` is the job's, if the master sent one; `renew`: the job goes
    on, and wants a clean process in our place.
    """

    code: int
    reason: str = ""
    report: Report | None = None
    failures: tuple[Failure, ...] = ()
    renew: bool = False
