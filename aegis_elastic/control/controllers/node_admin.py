"""Admin handlers for nodes, by which `aegisctl` reaches a job's master: taint, untaint, list."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from aegis_elastic.control.controllers.contract import AdminHandler
from aegis_elastic.control.host.cluster import ClusterScope, Edit, VersionedRecord
from aegis_elastic.control.isolation.isolations import Isolations
from aegis_elastic.core.policy import node_records
from aegis_elastic.core.policy.node_records import MANUAL, NodeTaint
from aegis_elastic.store.contract import StoreError


class TaintCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `aegisctl taint`. `until` in wall seconds, 0 for no end."""

    nodes: tuple[str, ...]
    reason: str
    by: str
    until: float = 0.0
    isolate: bool = False


class UntaintCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `aegisctl untaint`."""

    nodes: tuple[str, ...]


class OnChange(Protocol):
    """Called with a record that was changed by hand, and whether its taints were lifted."""

    def __call__(self, node: str, versioned: VersionedRecord, *, lifted: bool = False) -> None: ...


class NodeAdmin:
    """Answers for one job. Every answer is ValueError where the records can't be had."""

    def __init__(
        self,
        scope: ClusterScope,
        on_change: OnChange,
        isolations: Isolations | None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`changed` is called at once, before any watch of the store could."""
        self._scope = scope
        self._on_change = on_change
        self._isolations = isolations
        self._now = now

    @property
    def admin_handlers(self) -> dict[str, AdminHandler]:
        """Operation to who answers it."""
        return {"taint": self._taint, "untaint": self._untaint, "nodes": self._nodes}

    async def _taint(self, args: dict[str, Any]) -> Any:
        call = _convert(args, TaintCall)
        taint = NodeTaint(
            node_records.clip(call.reason), MANUAL, self._now(), node_records.clip(call.by), call.until
        )
        if call.isolate and self._isolations is None:
            raise ValueError("this job has no isolation driver (--aegis-isolation)")
        rows = []
        for node in call.nodes:
            versioned = await self._edit(node, lambda found: node_records.with_taint(found, taint))
            self._on_change(node, versioned)
            rows.append(node_records.as_row(versioned.record, self._now()))
            if call.isolate and self._isolations is not None:
                self._isolations.isolate(node, taint.reason)
        return rows

    async def _untaint(self, args: dict[str, Any]) -> Any:
        call = _convert(args, UntaintCall)
        rows = []
        for node in call.nodes:
            versioned = await self._edit(node, node_records.without_taints)
            self._on_change(node, versioned, lifted=True)
            rows.append(node_records.as_row(versioned.record, self._now()))
        return rows

    async def _nodes(self, args: dict[str, Any]) -> Any:
        try:
            records = await self._scope.records()
        except StoreError as error:
            raise ValueError(f"cannot read the records of nodes: {error}") from error
        now = self._now()
        return {
            "where": self._scope.where,
            "nodes": [node_records.as_row(each, now) for each in records.values()],
        }

    async def _edit(self, node: str, edit: Edit) -> VersionedRecord:
        try:
            return await self._scope.changed(node, edit)
        except StoreError as error:
            raise ValueError(f"cannot change the record of node {node}: {error}") from error


def _convert(args: dict[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(args, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"cannot understand the call: {error}") from error
