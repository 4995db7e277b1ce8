"""The rendezvous handler `aegis`: our control plane, accounts and checks under the stock launcher.

    torchrun --rdzv-backend aegis --rdzv-endpoint HOST:PORT --rdzv-id JOB --nnodes 2 train.py

`next_rendezvous` makes first contact, takes part in the checks, and returns when the plane orders the start:
with ranks that stay the same over restarts, and with a fresh TCPStore each time. A failure on another node
shows as a node that waits, which makes torchelastic stop its ranks and come back. What torchelastic keeps to
itself stays as it is under the stock launcher: how ranks are started and stopped, its own count of restarts
of this node (TORCHELASTIC_RESTART_COUNT), its patience at the end.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.launcher.api import LaunchConfig

from aegis_elastic.agents.contract import Outcome, Settings
from aegis_elastic.agents.guard.client import Exited
from aegis_elastic.agents.mailbox.events import NotJoined, TorchrunEnded
from aegis_elastic.agents.mailbox.mailbox import Mailbox
from aegis_elastic.agents.peers.stores import StoreGone, connect, split
from aegis_elastic.agents.plane.link import PlaneLink
from aegis_elastic.control.host import run_directories
from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.control.host.plane_process import PlaneFailed, PlaneProcess, PortTaken
from aegis_elastic.rendezvous import caller_frames, settings, torchelastic_guard
from aegis_elastic.rendezvous.stock_agent import Placement, StockAgent
from aegis_elastic.rendezvous.torchelastic_guard import TorchelasticGuard

logger = logging.getLogger(__name__)

BACKEND = "aegis"
# torchelastic asks the store for other nodes' ranks: they come when their rendezvous returns, not all at
# once.
STORE_TIMEOUT_S = 300.0
# After torchelastic has ended: for the other nodes to finish too, and for the job to be closed.
CLOSE_TIMEOUT_S = 30.0
LEAVE_TIMEOUT_S = 5.0
PLANE_RESTARTS = 10


def create(parameters: RendezvousParameters) -> AegisRendezvousHandler:
    """A handler for this launch; nothing is started yet. UsageError for settings that can't be used."""
    launch = caller_frames.launch_config()
    if launch is None:
        raise UsageError("cannot use the rendezvous backend aegis here: it works under torchrun's launcher")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # asyncio warns of what every TLS connection does at its end.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    return AegisRendezvousHandler(parameters.run_id, settings.read(parameters, launch), launch)


class AegisRendezvousHandler(RendezvousHandler):
    """Between torchelastic's agent, which holds the ranks, and ours, which lives in a thread of its own."""

    def __init__(self, run_id: str, about: settings.Surroundings, launch: LaunchConfig) -> None:
        self._run_id = run_id
        self._about = about
        self._launch = launch
        self._mailbox = Mailbox()
        self._guard = TorchelasticGuard()
        self._placement: Placement | None = None
        self._outcome: Outcome | None = None
        self._closed = False
        self._host: PlaneProcess | None = None
        self._link: PlaneLink | None = None
        self._agent: StockAgent | None = None
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ torchelastic's questions

    def get_backend(self) -> str:
        """The name of the backend."""
        return BACKEND

    def get_run_id(self) -> str:
        """The run id, as torchrun was given it."""
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the incarnation's store, which an agent serves: nothing has to listen in rank 0."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the plane's order to start. RendezvousClosedError when the job has ended instead."""
        if self._closed:
            raise RendezvousClosedError("the rendezvous is closed")
        if self._agent is None:
            self._begin()
        else:
            self._come_back()
        assert self._agent is not None
        came = self._agent.handover.get()
        if isinstance(came, Outcome):
            self._outcome = came
            self._closed = True
            raise RendezvousClosedError(came.reason or "the job has ended")
        self._placement = came
        host, port = split(came.order.store)
        try:
            store = connect(came.order.store, STORE_TIMEOUT_S)
        except StoreGone as error:
            raise RendezvousConnectionError(str(error)) from None
        info = RendezvousStoreInfo(host, port)
        return RendezvousInfo(store, came.assignment.group_rank, len(came.order.assignments), info)

    def num_nodes_waiting(self) -> int:
        """1 when the plane wants this incarnation stopped: torchelastic then stops it and comes back."""
        return int(self._guard.stop_wanted)

    def is_closed(self) -> bool:
        """Whether there is no further rendezvous."""
        return self._closed

    def set_closed(self) -> None:
        """No further rendezvous of this node."""
        self._closed = True
        if self._agent is not None:
            self._agent.no_more_starts()

    def shutdown(self) -> bool:
        """Report how the ranks ended, wait for the job's end, leave. True if the job ended with us."""
        self.set_closed()
        agent, thread = self._agent, self._thread
        if agent is None or thread is None:
            return True
        ends = caller_frames.final_failures()
        if self._outcome is None:
            if ends is None:
                self._guard.release(torchelastic_guard.finished(self._launch.nproc_per_node))
            elif ends:
                self._guard.release(self._noted(ends))
            else:
                # An error of torchelastic's own: it can't say how the ranks are and starts none again.
                self._mailbox.put(TorchrunEnded(f"torchrun failed: {sys.exc_info()[1]}"))
            thread.join(CLOSE_TIMEOUT_S)
        ended = not thread.is_alive()
        if not ended:
            self._mailbox.put(TorchrunEnded("torchrun has ended"))
            thread.join(LEAVE_TIMEOUT_S)
        self._take_leave(agent)
        return ended

    # ------------------------------------------------------------ beginning, coming back, leaving

    def _begin(self) -> None:
        about = self._about
        if about.secret is None and about.meeting.max_nodes > 1:
            announce(
                "NO JOIN SECRET: whoever reaches the endpoint first is trusted. Give every node the same "
                "AEGIS_JOIN_SECRET, or aegis_join_secret_file in --rdzv-conf"
            )
        port, broken = self._open_plane()
        self._link = PlaneLink(about.identity, (about.address, port), about.secret, self._mailbox)
        self._agent = self._make_agent(self._link)
        self._thread = threading.Thread(target=self._agent.run, name="aegis-agent", daemon=True)
        self._thread.start()
        if broken:
            # Our own plane is broken and nobody else will serve one: don't make training wait for it.
            self._mailbox.put(NotJoined(broken))
        else:
            self._link.start(about.join_timeout_s)

    def _open_plane(self) -> tuple[int, str]:
        """The port of the plane, and why it isn't there if it should be ours and can't be started."""
        about = self._about
        if not about.ours:
            return about.port, ""
        host = PlaneProcess(about.plane, PLANE_RESTARTS, announce)
        try:
            host.open()
        except PortTaken as error:
            raise RendezvousConnectionError(str(error)) from None
        except PlaneFailed as error:
            logger.error("%s", error)
            return about.port, str(error)
        self._host = host
        me = about.identity
        try:
            run_directories.register(me.namespace, me.job, host.generation, host.run_dir)
        except UsageError as error:
            logger.warning("aegisctl won't find this job by its name: %s", error)
        announce(f"job {me.job} (generation {host.generation}): run directory {host.run_dir}")
        return host.port, ""

    def _make_agent(self, link: PlaneLink) -> StockAgent:
        return StockAgent(
            self._guard,
            identity=self._about.identity,
            link=link,
            mailbox=self._mailbox,
            settings=Settings(meeting=self._about.meeting),
            announce=announce,
        )

    def _come_back(self) -> None:
        """Torchelastic is here again; its ranks are gone, by themselves or because we asked for it."""
        self._guard.release(self._noted(caller_frames.failures()))

    def _noted(self, ends: tuple[ProcessFailure, ...]) -> list[Exited]:
        if self._placement is not None:
            self._placement.context.note(ends)
        return torchelastic_guard.failed(ends)

    def _take_leave(self, agent: StockAgent) -> None:
        if self._outcome is None and not agent.handover.empty():
            last = agent.handover.get()
            self._outcome = last if isinstance(last, Outcome) else None
        if self._link is not None:
            self._link.close()
        if self._host is not None:
            self._host.close()
            self._host = None
        outcome = self._outcome
        if outcome is not None and outcome.report is not None:
            announce(f"{outcome.report.outcome}: {outcome.report.summary}")
        elif outcome is not None and outcome.reason:
            announce(outcome.reason)


def announce(text: str) -> None:
    """Say one line about our own work on standard error."""
    sys.stderr.write(f"[aegis] {text}\n")
    sys.stderr.flush()
