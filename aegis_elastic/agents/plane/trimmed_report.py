"""A report without what ranks and checks have printed: what must get through whatever that is."""

from __future__ import annotations

import msgspec

from aegis_elastic.core.model import Failure
from aegis_elastic.core.protocol.messages import ReportData


def without_texts(data: ReportData) -> ReportData:
    """The same report, small and printable: no output, no tracebacks, no check results."""

    def bare(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        return tuple(
            msgspec.structs.replace(each, exception=None, last_lines=(), frame="") for each in failures
        )

    ends = tuple(
        msgspec.structs.replace(end, reason="", failures=bare(end.failures)) for end in data.independent
    )
    reason = data.reason[:500].encode(errors="replace").decode()
    return msgspec.structs.replace(
        data, failures=bare(data.failures), independent=ends, reason=reason, checks=(), watched={}
    )
