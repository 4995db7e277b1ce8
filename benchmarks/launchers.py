"""The launchers that are measured: how each is started on a node, and which faults it can't recover from.

All nodes are on this host and use the loopback. Node 0 has the endpoint; nodes beyond the shape's are
spares, or the replacement of one that was lost.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks import peers

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    # By default torchrun never recovers with gloo: its ranks meet the last life's keys in the store.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # no warnings of the Trainer about hubs
    "HF_HUB_OFFLINE": "1",
}
TERM_TIMEOUT_S = 8.0
LIBRARIES = frozenset({"heavy", "trainer"})


class Shape(NamedTuple):
    """Nodes (launchers, here all on this host) and ranks on each."""

    nodes: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks}"

    @property
    def world(self) -> int:
        """How many ranks train."""
        return self.nodes * self.ranks


class Launcher(NamedTuple):
    """`arguments`: its module and its own flags. `peer`: whose Python. `ours`: its journal is checked."""

    arguments: tuple[str, ...]
    peer: str = ""
    ours: bool = False


OURS = ("-m", "aegis_elastic.launch.run")
LAUNCHERS = {
    "torchrun": Launcher(("-m", "torch.distributed.run")),
    "ft_launcher": Launcher(
        ("-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--ft-ignore-missing-cfg"), "nvrx"
    ),
    "dlrover": Launcher(("-m", "dlrover.trainer.torch.elastic_run"), "dlrover"),
    "aegis-run": Launcher(OURS, ours=True),
    "aegis-cold": Launcher((*OURS, "--aegis-warm-spares", "off"), ours=True),
}
# Faults that a launcher can't recover from, known from its source and from runs (docs/performance.md).
NEVER = {
    ("torchrun", "freeze"): "never: it looks at exits only, and gloo waits for 30 minutes",
    ("ft_launcher", "freeze"): "never: its hang detection needs calls in the training code",
    ("dlrover", "freeze"): "never: it looks at exits only, and gloo waits for 30 minutes",
    ("ft_launcher", "replaced"): "never: survivors that hang keep it from leaving the old round",
    ("dlrover", "lost"): "not to be had: its nodes are replaced by Kubernetes, none waits as a spare",
    ("dlrover", "replaced"): "not to be had: nodes are replaced by Kubernetes, and there is none here",
}


class Job:
    """One training under one launcher. A context manager: nothing of it is left afterwards."""

    def __init__(
        self, name: str, shape: Shape, folder: Path, script: tuple[str, ...], libraries: bool
    ) -> None:
        """`script`: the ranks' command line behind Python. PeerMissing."""
        self.launcher = LAUNCHERS[name]
        self._name = name
        self._shape = shape
        self._folder = folder
        self._script = script
        peer = self.launcher.peer or ("libraries" if libraries else "")
        self._python = peers.python_of(peer) if peer else sys.executable
        self._extra = self._libraries() if libraries and self.launcher.peer else {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = int(free.getsockname()[1])
        self._began_with = {process.pid for process in psutil.Process().children(recursive=True)}
        self._master: subprocess.Popen[bytes] | None = None
        self.nodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:
        if self._name == "dlrover":
            argv = ["--port", str(self._port), "--node_num", str(self._shape.nodes), "--job_name", "bench"]
            self._master = self._start(
                "master", ["-m", "dlrover.python.master.main", *argv, "--platform", "local"], {}
            )
            _wait(lambda: _listens(self._port), "DLRover's master", 30.0)
        return self

    def __exit__(self, *_: object) -> None:
        # SIGTERM first: killed by SIGKILL, torchrun leaves its ranks behind.
        alive = [process for process in (*self.nodes, self._master) if process and process.poll() is None]
        for process in alive:
            process.terminate()
        until = time.monotonic() + TERM_TIMEOUT_S
        for process in alive:
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
        # We are the sub-reaper, so what it has left is among our descendants.
        left = [p for p in psutil.Process().children(recursive=True) if p.pid not in self._began_with]
        for process_left in left:
            process_left.kill()
        psutil.wait_procs(left, timeout=TERM_TIMEOUT_S)

    def add_node(self, *flags: str) -> subprocess.Popen[bytes]:
        """Starts the launcher of one more node."""
        number = len(self.nodes)
        own = {"dlrover": self._of_dlrover, "ft_launcher": self._of_nvrx}.get(self._name, self._of_torchrun)
        argv, environment = own(number)
        argv = [*self.launcher.arguments, *argv, *flags, *self._script]
        self.nodes.append(self._start(f"launch{number}", argv, environment))
        return self.nodes[-1]

    def lose(self, number: int) -> float:
        """Ends a node and everything on it at once; returns the moment. The launcher goes first."""
        if self.launcher.ours and number == 0:
            raise ValueError("cannot lose node 0: it is everybody's endpoint")
        node = psutil.Process(self.nodes[number].pid)
        victims = [node, *node.children(recursive=True)]
        # On one host whoever comes first starts the plane, which belongs to node 0 all the same.
        planes = [
            process for process in victims[1:] if "aegis_elastic.control.host.supervisor" in process.cmdline()
        ]
        spared = {process.pid for plane in planes for process in (plane, *plane.children(recursive=True))}
        victims = [process for process in victims if process.pid not in spared]
        moment = time.monotonic()
        for process in victims:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue  # it has ended with its parent
        self.nodes[number].wait()
        return moment

    def logs(self) -> str:
        """The logs of all nodes."""
        files = sorted(self._folder.glob("*.log"))
        return "\n".join(file.read_text(errors="replace") for file in files)

    def _start(self, name: str, argv: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        own = {"XDG_STATE_HOME": str(self._folder / "state"), "TMPDIR": str(self._folder)} | self._extra
        with open(self._folder / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                [self._python, *argv],
                env=os.environ | ENVIRONMENT | own | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _of_torchrun(self, number: int) -> tuple[list[str], dict[str, str]]:
        flags = ["--nproc-per-node", str(self._shape.ranks), "--max-restarts", "3"]
        if self._shape.nodes == 1:
            flags.append("--standalone")
        else:
            flags += ["--nnodes", str(self._shape.nodes), "--rdzv-id", "bench", "--rdzv-backend", "c10d"]
            flags += ["--rdzv-endpoint", f"127.0.0.1:{self._port}"]
            if not self.launcher.ours:
                # All are on this host: else the first node would host the store, which could be lost with it.
                flags += ["--rdzv-conf", f"is_host={int(number == 0)}"]
        if self.launcher.ours:
            flags += ["--aegis-worker-name", f"node{number}"]
        return flags, {}

    def _of_nvrx(self, number: int) -> tuple[list[str], dict[str, str]]:
        flags = ["--nproc-per-node", str(self._shape.ranks), "--max-restarts", "3", "--rdzv-backend", "c10d"]
        flags += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "bench"]
        flags += ["--nnodes", str(self._shape.nodes)]
        if self._shape.nodes > 1:  # several on one host are distinguished by an address
            flags += ["--local-addr", f"127.0.0.{number + 1}", "--rdzv-conf", f"is_host={int(number == 0)}"]
        return flags, {}

    def _of_dlrover(self, number: int) -> tuple[list[str], dict[str, str]]:
        flags = ["--nnodes", str(self._shape.nodes), "--nproc_per_node", str(self._shape.ranks)]
        environment = {"DLROVER_MASTER_ADDR": f"127.0.0.1:{self._port}", "NODE_NUM": str(self._shape.nodes)}
        environment |= {"NODE_RANK": str(number), "NODE_ID": str(number)}
        return [*flags, "--max_restarts", "3"], environment

    def _libraries(self) -> dict[str, str]:
        """A peer's own Python, with the libraries behind its packages."""
        python = Path(peers.python_of("libraries"))
        (site,) = python.parent.parent.glob("lib/python*/site-packages")
        return {"PYTHONPATH": str(site)}


def adopt_orphans() -> None:
    """Become the sub-reaper: what a launcher leaves behind becomes our child, and is killed."""
    import ctypes

    set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot become the sub-reaper of orphans")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(holds: Callable[[], bool], what: str, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until:
            raise ValueError(f"no {what} within {timeout_s:g} s")
        time.sleep(0.1)


wait = _wait
