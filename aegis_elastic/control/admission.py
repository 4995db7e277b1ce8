"""First contact: whether an agent takes part in the job, and the credentials that it gets for the bus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from aegis_elastic.bus import subjects
from aegis_elastic.bus.contact.first_contact import Hello, Welcome
from aegis_elastic.control.host.grpc_server import Refused
from aegis_elastic.control.membership import Membership
from aegis_elastic.core.events import Event, Join, Requeued
from aegis_elastic.core.model import TERMINAL, JobSpec, Status
from aegis_elastic.core.protocol.directives import JwtRenewal

# An agent that was heard within this time lives: three heartbeats.
RIVAL_S = 3.0

# Takes a worker's name and public key; returns its JWT and until when (wall seconds) that is good.
MakeJwt = Callable[[str, str], tuple[str, float]]


class Admission:
    """Admits agents to one job."""

    def __init__(
        self,
        membership: Membership,
        *,
        status: Callable[[], Status],
        feed: Callable[[Event], None],
        requeue: Callable[[Requeued], None],
        admit: Callable[[str], Awaitable[float]],
        make_jwt: MakeJwt,
        jwt_life_s: float,
        bus: Mapping[str, Any],
    ) -> None:
        """`admit` takes a node's name and returns how risky it is; `bus`: fields of every Welcome."""
        self._membership = membership
        self._status = status
        self._feed = feed
        self._requeue = requeue
        self._admit = admit
        self._make_jwt = make_jwt
        self._jwt_life_s = jwt_life_s
        self._bus = bus
        # uid -> why its Join is refused, "" if it isn't.
        self._answers: dict[str, asyncio.Future[str]] = {}

    async def greet(self, hello: Hello) -> Welcome:
        """Answer a worker's first contact. Refused if the job doesn't want it, ValueError for another job
        or no key.
        """
        _check_job(hello, self._status().spec)
        # A key that is none is found out before its bearer has ranks.
        subjects.inbox(hello.user_public_key)
        await self._check_no_rival(hello.worker, hello.uid)
        risk = await self._admit(hello.node_name)
        who = (hello.worker, hello.uid, hello.node_name, hello.node_ip, hello.nproc, hello.ordinal)
        join = Join(*who, risk)  # ValueError for values that can't be
        if hello.attempt > self._status().attempt and await self._all_have_left():
            self._requeue(Requeued(hello.attempt))
        # A worker that grew tired of waiting asks again: both calls get the one answer.
        answer = self._answers.setdefault(hello.uid, asyncio.get_running_loop().create_future())
        self._feed(join)
        refusal = await answer
        status = self._status()
        if refusal and (not hello.parks or status.phase in TERMINAL):
            raise Refused(refusal)
        jwt, until_s = self._make_jwt(hello.worker, hello.user_public_key)
        self._membership.set_jwt(hello.uid, hello.user_public_key, until_s)
        return Welcome(
            jwt=jwt,
            **self._bus,
            seq_num=status.seq_num,
            incarnation=status.incarnation,
            generation=status.spec.generation,
            max_retry=status.spec.max_retry,
            recover_count=status.recover_count,
            parked=refusal,
        )

    def answer(self, uid: str, refusal: str) -> None:
        """The Join of this agent's life has been decided on; "" if it is admitted."""
        answer = self._answers.pop(uid, None)
        if answer is not None and not answer.done():
            answer.set_result(refusal)

    def answer_joins(self, events: Iterable[Event]) -> None:
        """These events have been decided on: whoever was not refused by then is admitted."""
        for event in events:
            if isinstance(event, Join):
                self.answer(event.uid, "")

    def jwt_renewals(self) -> Iterator[tuple[str, JwtRenewal]]:
        """(worker, its new JWT) for each whose JWT is in the last third of its life."""
        soon = time.time() + self._jwt_life_s / 3
        for worker, uid, public_key in self._membership.due_for_renewal(soon):
            jwt, until_s = self._make_jwt(worker, public_key)
            self._membership.set_jwt(uid, public_key, until_s)
            yield worker, JwtRenewal(uid, jwt)

    async def _check_no_rival(self, worker: str, uid: str) -> None:
        """Refuse (ValueError) a newcomer under the name of an agent that lives: each would replace the other
        for ever.

        An agent that has just died without its connection being closed is given the time to be missed.
        """
        if self._membership.alive_since(worker, uid, time.monotonic() - RIVAL_S):
            since_s = time.monotonic()
            await asyncio.sleep(RIVAL_S)
            if self._membership.alive_since(worker, uid, since_s):
                raise ValueError(
                    f"a worker called {worker!r} is taking part already; give this one another "
                    "--aegis-worker-name"
                )

    async def _all_have_left(self) -> bool:
        """Whether all agents that are known have ended, as they have when a scheduler starts the job anew.

        One that lives shows that it hasn't: the newcomer may be of an allocation that counts for itself.

        Who has just died without its connection being closed is given the time to be missed.
        """
        since_s = time.monotonic()
        if self._membership.anybody_since(since_s - RIVAL_S):
            await asyncio.sleep(RIVAL_S)
            return not self._membership.anybody_since(since_s)
        return True


def _check_job(hello: Hello, spec: JobSpec) -> None:
    if (hello.namespace, hello.job) != (spec.namespace, spec.job_name):
        raise ValueError(f"this control plane serves job {spec.job_name!r} of namespace {spec.namespace!r}")
