"""A job's record on Kubernetes: a ConfigMap that whoever creates the job creates, and we only update.

Its creator writes `controlled` ("true": pods that go are made anew, "false": they aren't) and `selector`, the
labels of the job's pods. We write `status`, JSON for programs and people, and `rounds`, how often pods were
made anew because nobody came from them.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from aegis_elastic.control.isolation.api_server import Client, Object, describe_answer
from aegis_elastic.core.policy.missing_workers import Machine

KIND = "configmap"
PAGE = 100
_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
_NAMED = re.compile(rf"{KIND}:({_NAME})/({_NAME})")
_OK, _CREATED, _GONE = 200, 201, 404
_ENDED = ("Succeeded", "Failed")


class RecordUnread(Exception):
    """The record, or what it names, can't be read; the text says why."""


class Found(NamedTuple):
    """What stands in the record."""

    controlled: bool
    selector: str
    rounds: int


class JobRecord:
    """`configmap:NAMESPACE/NAME`."""

    def __init__(self, client: Client, named: str) -> None:
        """ValueError if that names no ConfigMap."""
        self._client = client
        self._namespace, self.name = parse(named)
        self._path = f"api/v1/namespaces/{self._namespace}/configmaps/{self.name}"

    async def read(self) -> Found:
        """What its creator wrote. RecordUnread, also for a `controlled` that is neither true nor false."""
        status, found = await self._client.call("GET", self._path)
        if status != _OK:
            raise RecordUnread(f"cannot read the record {self.name}: {describe_answer(status, found)}")
        data = found.get("data") or {}
        controlled, rounds = str(data.get("controlled", "")).strip().lower(), str(data.get("rounds", "0"))
        if controlled not in ("true", "false"):
            raise RecordUnread(
                f"cannot use the record {self.name}: controlled is {controlled!r}; want true or false"
            )
        return Found(
            controlled == "true", str(data.get("selector", "")), int(rounds) if rounds.isdigit() else 0
        )

    async def write(self, **fields: str) -> str:
        """Put these into the record; returns why that can't be done, or ""."""

        def edit(found: Object) -> Object | None:
            data = found.get("data") or {}
            changed = {key: value for key, value in fields.items() if data.get(key) != value}
            return {"data": changed} if changed else None

        return await self._client.edit(self._path, edit)

    async def machines(self, selector: str) -> tuple[Machine, ...]:
        """The job's pods that have not ended, and aren't on their way out. RecordUnread."""
        if not selector:
            raise RecordUnread(
                f"cannot use the record {self.name}: it has no selector; want the pods' labels"
            )
        pods, more = list[Machine](), ""
        while True:
            query = f"labelSelector={quote(selector, safe='')}&limit={PAGE}" + (
                f"&continue={quote(more, safe='')}" if more else ""
            )
            status, found = await self._client.call(
                "GET", f"api/v1/namespaces/{self._namespace}/pods?{query}"
            )
            if status != _OK:
                raise RecordUnread(f"cannot list the pods of {self.name}: {describe_answer(status, found)}")
            pods += [machine for pod in found.get("items") or () if (machine := _machine(pod)) is not None]
            more = str((found.get("metadata") or {}).get("continue") or "")
            if not more:
                return tuple(pods)

    async def remake(self, machine: str) -> str:
        """Evict a pod, so that its creator makes another: a disruption, not a failure of it. Returns why
        that can't be done, or ""; one that is gone already is fine.
        """
        name = quote(machine, safe="")
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": machine, "namespace": self._namespace},
        }
        where = f"api/v1/namespaces/{self._namespace}/pods/{name}/eviction"
        status, found = await self._client.call("POST", where, body)
        return "" if status in (_OK, _CREATED, _GONE) else describe_answer(status, found)


def parse(named: str) -> tuple[str, str]:
    """Namespace and name of a record. ValueError if that names none."""
    found = _NAMED.fullmatch(named)
    if found is None:
        raise ValueError(f"cannot use {named!r} as a job's record: want {KIND}:NAMESPACE/NAME")
    return found[1], found[2]


def encoded(view: Object) -> str:
    """What is written as `status`."""
    return msgspec.json.encode(view).decode()


def _machine(pod: Object) -> Machine | None:
    about, status = pod.get("metadata") or {}, pod.get("status") or {}
    if about.get("deletionTimestamp") or status.get("phase") in _ENDED or not about.get("name"):
        return None
    return Machine(str(about["name"]), str(status.get("podIP") or ""))
