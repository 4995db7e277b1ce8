"""The job report cut to fit into one message: a long job's has more bytes than the bus takes. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from aegis_elastic.core.accounts.report import FailureEntry, Report

KEPT = 100
TEXT_CHARS_MAX = 500

Cut = Callable[[Report], Report]


def fit_report(report: Report, bytes_max: int) -> Report:
    """The report in at most `bytes_max` bytes of JSON: as it is, or cut to its essential parts, which its
    summary then says.
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


def _without_peers_texts(report: Report) -> Report:
    shortened = [entry if entry.role == "root" else _without_texts(entry) for entry in report.failures]
    return msgspec.structs.replace(report, failures=tuple(shortened))


def _findings_only(report: Report) -> Report:
    return msgspec.structs.replace(report, checks=tuple(each for each in report.checks if not each.passed))


def _newest_roots(report: Report) -> Report:
    roots = [entry for entry in report.failures if entry.role == "root"]
    return msgspec.structs.replace(
        report,
        failures=tuple(map(_without_texts, roots[-KEPT:])),
        checks=report.checks[-KEPT:],
        incarnations=report.incarnations[-KEPT:],
        recoveries=report.recoveries[-KEPT:],
    )


def _minimal(report: Report) -> Report:
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


def _without_texts(entry: FailureEntry) -> FailureEntry:
    exception = entry.exception[:TEXT_CHARS_MAX] if entry.exception else None
    return msgspec.structs.replace(
        entry, exception=exception, last_lines=(), reason=entry.reason[:TEXT_CHARS_MAX]
    )


_CUTS: tuple[Cut, ...] = (_without_peers_texts, _findings_only, _newest_roots, _minimal)
