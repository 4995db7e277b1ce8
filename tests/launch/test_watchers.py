"""Which watchers a launch has: those that were not switched off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aegis_elastic.agents.mailbox.mailbox import Mailbox
from aegis_elastic.agents.plane.link import Identity, PlaneLink
from aegis_elastic.agents.watch.contract import LogListener
from aegis_elastic.launch.flags.options import parse
from aegis_elastic.launch.watchers import makers


@pytest.fixture
def link() -> Iterator[PlaneLink]:
    mailbox = Mailbox()
    identity = Identity("default", "job", "w0", "uid", "node", "127.0.0.1", 1)
    yield PlaneLink(identity, ("127.0.0.1", 1), None, mailbox)
    mailbox.close()


@pytest.mark.parametrize(("flags", "listens"), [((), True), (("--aegis-monitor", "off"), False)])
def test_monitoring_can_be_switched_off(
    flags: tuple[str, ...], listens: bool, tmp_path: Path, link: PlaneLink
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    made = [make(lambda: None) for make in makers(parse([*flags, str(script)]), link)]
    assert [each.name for each in made if isinstance(each, LogListener)] == (["monitor"] if listens else [])
    for each in made:
        each.close()
