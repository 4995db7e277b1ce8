"""What a command line may ask for, and what the product can then hold to."""

from __future__ import annotations

import uuid

import msgspec

from aegis_elastic.control.effects import ENVELOPE_BYTES_MAX
from aegis_elastic.core.machine import create
from aegis_elastic.core.model import JobSpec, Phase, Worker
from aegis_elastic.core.protocol.messages import MESSAGE_BYTES_MAX
from aegis_elastic.core.protocol.orders import derive_order
from aegis_elastic.launch.flags.validation import NODES_MAX, node_range


def test_an_order_to_as_many_nodes_as_are_allowed_fits_into_a_message() -> None:
    """With names as long as a host's can be."""
    names = [f"{number:064}" for number in range(NODES_MAX)]
    workers = tuple(Worker(name, uuid.uuid4().hex, name, "10.0.0.1", 8, Phase.RUN_COMMAND) for name in names)
    begun = create(JobSpec("job", "default", NODES_MAX, 1, 3), 1.0)
    order = derive_order(msgspec.structs.replace(begun, workers=workers, phase=Phase.RUN_COMMAND))
    assert len(order.assignments) == NODES_MAX
    assert len(msgspec.json.encode(order)) < MESSAGE_BYTES_MAX - ENVELOPE_BYTES_MAX


def test_who_comes_beyond_what_an_order_can_hold_waits_as_a_spare() -> None:
    assert node_range("2:99999") == (2, NODES_MAX)
