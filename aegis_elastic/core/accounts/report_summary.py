"""A report that fits into one message: a long job's has more bytes than the bus takes. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from aegis_elastic.core.accounts.report import FailureEntry, Report

KEPT = 100
TEXT_CHARS_MAX = 500

Cut = Callable[[Report], Report]


def fit_report(report: Report, bytes_max: int) -> Report:
    """The report, or what people look for first in it, in so many bytes of JSON; its summary says if it is
    cut.
    """
    if len(msgspec.json.encode(report)) <= bytes_max:
        return report
    short = msgspec.structs.replace(
        report, summary=f"{report.summary} (shortened: all of it is in the run directory's report.json)"
    )
    for cut in _CUTS:
        short = cut(short)
        if len(msgspec.json.encode(short)) <= bytes_max:
            break
    return short


def _without_peers_words(report: Report) -> Report:
    bare = [entry if entry.role == "root" else _wordless(entry) for entry in report.failures]
    return msgspec.structs.replace(report, failures=tuple(bare))


def _findings_alone(report: Report) -> Report:
    return msgspec.structs.replace(report, checks=tuple(each for each in report.checks if not each.passed))


def _newest_roots(report: Report) -> Report:
    roots = [entry for entry in report.failures if entry.role == "root"]
    return msgspec.structs.replace(
        report,
        failures=tuple(map(_wordless, roots[-KEPT:])),
        checks=report.checks[-KEPT:],
        incarnations=report.incarnations[-KEPT:],
        recoveries=report.recoveries[-KEPT:],
    )


def _bare(report: Report) -> Report:
    return msgspec.structs.replace(
        report,
        fail_reason=report.fail_reason[:TEXT_CHARS_MAX],
        workers=(),
        incarnations=(),
        failures=report.failures[-1:],
        recoveries=(),
        checks=(),
        error_nodes=report.error_nodes[-KEPT:],
        doubts=tuple(doubt[:TEXT_CHARS_MAX] for doubt in report.doubts[:KEPT]),
    )


def _wordless(entry: FailureEntry) -> FailureEntry:
    said = entry.exception[:TEXT_CHARS_MAX] if entry.exception else None
    return msgspec.structs.replace(entry, exception=said, last_lines=(), reason=entry.reason[:TEXT_CHARS_MAX])


_CUTS: tuple[Cut, ...] = (_without_peers_words, _findings_alone, _newest_roots, _bare)
