"""Isolation in Slurm: the node is drained with a reason. Its running steps go on; nothing new starts there.

`scontrol update NodeName` is for operators. Where the job's user is none, the way to keep a requeued job from
a node is its own list of excluded nodes: `exclude` sets it for a job that waits, and `aegisctl nodes
--exclude` prints it for `sbatch --exclude`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aegis_elastic.control.isolation.command import SECRETS, Ran, run
from aegis_elastic.control.isolation.contract import MARK, Outcome, unfit

SCONTROL = "scontrol"
_STATE = re.compile(r"\bState=(\S+)")
_REASON = re.compile(r"\bReason=(.*?)(?: \[|$)", re.MULTILINE)


class Slurm:
    """`slurm`: `scontrol` on the master's host."""

    name = "slurm"

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def isolate(self, node: str, reason: str) -> Outcome:
        """Drain the node. One that is drained already keeps the reason of whoever did it."""
        node, state, why, failed = await self._show_node(node)
        if failed:
            return Outcome(False, failed)
        if "DRAIN" in state:
            return Outcome(True, f"{node} is drained already: {why}")
        ran = await self._scontrol("update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")
        if ran.why:
            return Outcome(False, f"cannot drain {node}: {ran.why}")
        return Outcome(True, f"{node} is drained in Slurm ({reason})")

    async def release(self, node: str) -> Outcome:
        """Resume the node if the drain is ours."""
        node, state, why, failed = await self._show_node(node)
        if failed:
            return Outcome(False, failed)
        if "DRAIN" not in state:
            return Outcome(True, f"{node} is not drained")
        if not why.startswith(MARK):
            return Outcome(False, f"{node} stays drained: it was not our doing ({why or 'no reason given'})")
        ran = await self._scontrol("update", f"NodeName={node}", "State=RESUME")
        if ran.why:
            return Outcome(False, f"cannot resume {node}: {ran.why}")
        return Outcome(True, f"{node} is resumed in Slurm")

    async def exclude(self, job_id: str, nodes: Sequence[str]) -> Outcome:
        """Keep a job that waits to be started (again) from these nodes."""
        bad = [why for why in map(unfit, nodes) if why]
        if bad or not job_id.isdigit():
            return Outcome(
                False, bad[0] if bad else f"cannot exclude nodes from job {job_id!r}: want a number"
            )
        ran = await self._scontrol("update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}")
        if ran.why:
            return Outcome(False, f"cannot exclude {', '.join(nodes)} from job {job_id}: {ran.why}")
        return Outcome(True, f"job {job_id} starts without {', '.join(nodes) or 'no node'}")

    async def _show_node(self, node: str) -> tuple[str, str, str, str]:
        """The node's name in Slurm, its state, its reason, and why none of that is known."""
        ran = Ran(None, "")
        # Hosts may call themselves by their full name where Slurm has the short one.
        for name in dict.fromkeys((node, node.partition(".")[0])):
            ran = await self._scontrol("show", "node", "--oneliner", name)
            state = _STATE.search(ran.output)
            if not ran.why and state:
                reason = _REASON.search(ran.output)
                return name, state[1].upper(), reason[1].strip() if reason else "", ""
        return node, "", "", f"cannot see node {node} in Slurm: {ran.why or 'it does not know it'}"

    async def _scontrol(self, *args: str) -> Ran:
        try:
            return await run((SCONTROL, *args), self._timeout_s, also=SECRETS)
        except OSError as error:
            return Ran(127, f"cannot start {SCONTROL}: {error.strerror}")
