"""One instance of the guard as a process of its own: `python -m tests.control.controllers.racer`, with its
settings as a line of JSON.

It examines some nodes, all of them bad, as fast as it can, and writes each action as a line to a shared file.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.bus.credentials import Credentials, NKey, PlaneKeys, master_jwt
from aegis_elastic.control.controllers.guarded_actions import GuardedActions
from aegis_elastic.core.model import Verdict
from aegis_elastic.core.policy.settings import Guard, Policy
from aegis_elastic.core.policy.storm_guard import Action, Condition, GuardedAction, Outcome
from aegis_elastic.store.contract import Store
from aegis_elastic.store.etcd import EtcdStore
from aegis_elastic.store.files import FileStore
from aegis_elastic.store.jetstream import JetStreamStore

POLICY = Policy(guard=Guard(persistence_s=0.3, look_s=0.05, cooldown_s=600, lock_s=5))


async def open_store(settings: dict[str, Any]) -> Store:
    """The store that both share."""
    if settings["kind"] == "files":
        return await FileStore.open(Path(settings["at"]))
    if settings["kind"] == "etcd":
        return await EtcdStore.open([settings["at"]], "race")
    keys, key = PlaneKeys.load(Path(settings["keys"])), NKey.generate()
    credentials = Credentials(key, master_jwt(keys, key.public, expires_s=600))
    return await JetStreamStore.open(
        await BusConnection.connect([settings["at"]], credentials, name="racer"), "race"
    )


class RacingJob:
    """Every node is bad, and an action takes a moment."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.name = settings["name"]
        self.dies = settings["dies"]
        self.file = os.open(settings["acts"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def now(self) -> float:
        return time.time()

    async def observe(self, condition: Condition) -> tuple[bool, bool]:
        return True, True

    async def collect(self, condition: Condition) -> str:
        await asyncio.sleep(0.05)
        return ""

    async def act(self, condition: Condition, taken: GuardedAction) -> tuple[Outcome, str]:
        os.write(self.file, f"{condition.node_name} {self.name} {taken.token}\n".encode())
        if self.dies:
            os._exit(9)  # as by SIGKILL, in the middle of it
        await asyncio.sleep(0.2)
        return Outcome.DONE, "done"

    async def page(self, key: str, text: str, *, urgent: bool) -> None:
        return

    def note(self, condition: Condition, code: str, detail: str) -> None:
        return


async def main() -> None:
    settings = json.loads(sys.stdin.readline())
    store = await open_store(settings)
    guarded_actions = GuardedActions(store, "job", settings["name"], POLICY, RacingJob(settings))
    print("ready", flush=True)
    sys.stdin.readline()
    conditions = [
        Condition(f"node-{n}", f"w{n}", Verdict.FROZEN, Action.RESTART_HUNG, "a race")
        for n in range(settings["nodes"])
    ]

    async def race(condition: Condition) -> None:
        until = time.time() + settings["for_s"]
        while time.time() < until:
            await guarded_actions.examine(condition)
            await asyncio.sleep(0.02)

    await asyncio.gather(*map(race, conditions))
    await store.close()


if __name__ == "__main__":
    asyncio.run(main())
