"""What `torchrun.handlers` names: torch loads it in every launcher and in many ranks, and only warns if it
fails.

So it is tiny: everything else is imported when a job really asks for the backend `aegis`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The creator that torchelastic registers for `--rdzv-backend aegis`."""
    return _create


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    from aegis_elastic.rendezvous.handler import create

    return create(parameters)
