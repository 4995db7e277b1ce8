"""A real Slurm cluster on one machine, for as long as a `with` block lasts.

    with Cluster(tmp_path, nodes=5) as slurm:
        job = slurm.submit(script)
        slurm.power_off("n2")
        ended = slurm.wait(job, timeout_s=60)

Every node is a host of `aegis_elastic.testing.netns`: its own network, hostname, /tmp and freezer. slurmctld
and munged live on a host of their own, `ctl`, where commands are given, too. All of them are in the
foreground and children of ours: nothing is a service of the machine, nothing is left.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType

from aegis_elastic.testing.netns import Host, Net

TOOLS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
CONTROLLER = "ctl"
START_TIMEOUT_S = 60.0
_FREEZER = Path("/sys/fs/cgroup/freezer")
_OVER = re.compile(r"job=(\d+) ")

_CONF = """\
ClusterName=aegis
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job starts again when its old credential has expired: two minutes by default.
AuthInfo=socket={root}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType={proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1,requeue_delay=0
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
EpilogSlurmctld={root}/ended.sh
RequeueExit=75
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
KillOnBadExit=0
MessageTimeout=10
SlurmdTimeout={slurmd_timeout_s}
InactiveLimit=0
WaitTime=0
MinJobAge=600
CompleteWait=0
UnkillableStepTimeout=20
{nodes}
PartitionName=batch Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""

_CGROUP = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainCores=no
ConstrainRAMSpace=no
ConstrainDevices=no
"""

# The end of a job is reported, not polled: one line into a pipe that the tests read.
_ENDED = """\
#!/bin/sh
echo "job=$SLURM_JOB_ID exit=$SLURM_JOB_EXIT_CODE2 restarts=${{SLURM_RESTART_COUNT:-0}}" > {pipe}
"""


def missing() -> str:
    """What this machine lacks for a cluster, as a sentence; "" if nothing."""
    for tool, package in TOOLS.items():
        if shutil.which(tool, path=_path()) is None:
            return f"no {tool} (apt-get install {package})"
    return "" if os.geteuid() == 0 else "a Slurm cluster needs root"


class Cluster:
    """Nodes n1, n2, ... and the host `ctl`. `root` is seen by all hosts and keeps configuration and logs."""

    def __init__(
        self, root: Path, *, nodes: int = 5, cpus: int = 8, slurmd_timeout_s: int = 15, grace_s: int = 0
    ) -> None:
        self.root = root
        self._names = [f"n{number}" for number in range(1, nodes + 1)]
        self._cpus = cpus
        self._settings = {"slurmd_timeout_s": slurmd_timeout_s, "grace_s": grace_s}
        self._net = Net([CONTROLLER, *self._names], share=[root])
        self._daemons: dict[str, subprocess.Popen[str]] = {}
        self._pipe = -1
        self._ended_lines = ""
        self.hosts: dict[str, Host] = {}
        self.env = {**os.environ, "SLURM_CONF": str(root / "slurm.conf"), "PATH": _path()}

    def __enter__(self) -> Cluster:
        self._configure()
        self._net.__enter__()
        try:
            self.hosts = {host.name: host for host in self._net.hosts}
            munged = ["munged", "--foreground", "--force", f"--key-file={self.root}/munge.key"]
            munged += [f"--{name}-file={self.root}/munged.{name}" for name in ("pid", "log", "seed")]
            self._start("munged", CONTROLLER, [*munged, f"--socket={self.root}/munge.socket"])
            self._start("slurmctld", CONTROLLER, ["slurmctld", "-D", "-c"])
            for name in self._names:
                self.power_on(name)
            # Granted as soon as all nodes have registered; srun waits for that by itself.
            ready = self.command(["srun", f"-N{len(self._names)}", "true"], timeout_s=START_TIMEOUT_S)
            if ready.returncode != 0:
                raise RuntimeError(f"cannot start a Slurm cluster: {ready.stderr}\n{self.log('slurmctld')}")
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for name in self._names:
                if name in self.hosts:
                    self.hosts[name].power_off()
            self._net.__exit__(kind, error, trace)
        finally:
            for daemon in self._daemons.values():
                daemon.wait(10)
            os.close(self._pipe)
            for name in self._names:
                _remove_cgroups(_FREEZER / self._cgroup(name))

    # ------------------------------------------------------------ nodes

    def power_on(self, name: str) -> None:
        """Start a node's slurmd, as its boot would."""
        bind = ""
        if _FREEZER.is_dir():
            # Each node has a freezer of its own: Slurm ends a step's processes by it.
            own = _FREEZER / self._cgroup(name)
            own.mkdir(exist_ok=True)
            bind = f"mountpoint -q {_FREEZER}/.aegis || mount --bind {own} {_FREEZER} && "
        self._start(
            f"slurmd-{name}", name, ["/bin/sh", "-c", f'{bind}exec slurmd -D -N {name}'],
        )  # fmt: skip

    def power_off(self, name: str) -> None:
        """Everything on that node is gone at once, without notice."""
        host = self.hosts[name]
        host.power_off()
        host.link_down()

    def cut(self, name: str) -> None:
        """Pull the node's cable."""
        self.hosts[name].link_down()

    def heal(self, name: str) -> None:
        """Plug it in again."""
        self.hosts[name].link_up()

    # ------------------------------------------------------------ jobs

    def command(
        self, argv: list[str], *, timeout_s: float = 30.0, on: str = CONTROLLER
    ) -> subprocess.CompletedProcess[str]:
        """A Slurm command, given on a host."""
        return self.hosts[on].run(argv, env=self.env, cwd=self.root, timeout_s=timeout_s)

    def submit(self, script: str, *options: str, env: dict[str, str] | None = None) -> int:
        """`sbatch` a script; returns the job's id."""
        path = self.root / f"job-{time.monotonic_ns()}.sh"
        path.write_text(script)
        given = {**self.env, **(env or {})}
        argv = ["sbatch", "--parsable", *options, str(path)]
        done = self.hosts[CONTROLLER].run(argv, env=given, cwd=self.root, timeout_s=30)
        if done.returncode != 0:
            raise RuntimeError(f"cannot submit: {done.stderr}")
        return int(done.stdout.split(";")[0])

    def show(self, job: int) -> dict[str, str]:
        """The fields of `scontrol show job`: JobState, ExitCode, Restarts, ..."""
        shown = self.command(["scontrol", "--oneliner", "show", "job", str(job)]).stdout
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def wait(self, job: int, timeout_s: float) -> dict[str, str]:
        """Wait until the job's present run is over; returns `show` then. TimeoutError."""
        until = time.monotonic() + timeout_s
        while not any(number == str(job) for number in _OVER.findall(self._ended_lines)):
            with selectors.DefaultSelector() as selector:
                selector.register(self._pipe, selectors.EVENT_READ)
                if not selector.select(max(until - time.monotonic(), 0)):
                    raise TimeoutError(f"job {job} goes on after {timeout_s:.0f} s: {self.show(job)}")
            self._ended_lines += os.read(self._pipe, 65536).decode()
        self._ended_lines = "".join(
            line for line in self._ended_lines.splitlines(True) if f"job={job} " not in line
        )
        # The nodes still clear up, and a dead one is waited for; Slurm doesn't report when that is over.
        pause = threading.Event()
        while (shown := self.show(job))["JobState"] == "COMPLETING" and time.monotonic() < until:
            pause.wait(0.1)
        return shown

    def log(self, name: str) -> str:
        """The end of a daemon's log."""
        path = self.root / f"{name}.log"
        return path.read_text()[-4000:] if path.exists() else ""

    # ------------------------------------------------------------ the start

    def _cgroup(self, name: str) -> str:
        return f"aegis-{os.getpid()}-{name}"

    def _start(self, key: str, host: str, argv: list[str]) -> None:
        with open(self.root / f"{key}.out", "a") as output:
            self._daemons[key] = self.hosts[host].popen(
                argv, env=self.env, cwd=self.root, stdout=output, stderr=output
            )

    def _configure(self) -> None:
        self.root.chmod(0o755)  # munged wants its directories to be nobody else's to write
        for folder in ("state", "spool"):
            (self.root / folder).mkdir()
        key = self.root / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        nodes = "\n".join(
            f"NodeName={name} CPUs={self._cpus} RealMemory=4000 State=UNKNOWN" for name in self._names
        )
        proctrack = "proctrack/cgroup" if _FREEZER.is_dir() else "proctrack/linuxproc"
        settings = {**self._settings, "nodes": nodes, "proctrack": proctrack, "controller": CONTROLLER}
        (self.root / "slurm.conf").write_text(_CONF.format(root=self.root, **settings))
        (self.root / "cgroup.conf").write_text(_CGROUP)
        pipe = self.root / "ended"
        os.mkfifo(pipe)
        # Opened for both, so that neither side ever waits for the other.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        ended = self.root / "ended.sh"
        ended.write_text(_ENDED.format(pipe=pipe))
        ended.chmod(0o755)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _remove_cgroups(top: Path) -> None:
    if not top.is_dir():
        return
    for folder, _, _ in os.walk(top, topdown=False):
        try:
            os.rmdir(folder)
        except OSError:  # a process in it is still being reaped; an empty group costs nothing
            return
