"""The metrics: counted from decisions, the same after a change of masters, served by a few lines of HTTP."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aegis_elastic.control.controllers.contract import Applied, Controllers
from aegis_elastic.core.accounts import journal
from aegis_elastic.core.accounts.journal import Adopt, Line, adopted, line_of, walk
from aegis_elastic.core.detection.samples import RankUsage, Usage
from aegis_elastic.core.events import Noted, Saved
from aegis_elastic.observe.controller import MetricsController
from aegis_elastic.observe.endpoint import CLIENTS_MAX
from tests.core.accounts.test_report import Run, died

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
USAGE = Usage(1.0, 3.5, 10, 20, 1e6, 0.75, 0.001, 0, (RankUsage(0, 1.5, 100), RankUsage(1, 0.5, 200)))

Value = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def values(text: str) -> Value:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(controller: MetricsController) -> str:
    async def scenario() -> str:
        url = await controller.open("127.0.0.1", 0)
        status, text = await asyncio.to_thread(read, url)
        await controller.close()
        assert status == 200
        return text

    return asyncio.run(scenario())


def of(controller: MetricsController) -> Value:
    return values(scrape(controller))


def recovered() -> Run:
    """Two workers; a crash, its recovery, a checkpoint, a note, the end."""
    run = Run()
    run.started_all()
    run.now = 100.0
    run.tell(Saved(40, "/ckpt/40", "dcp", 100.0))  # type: ignore[arg-type]
    run.tell(Noted("w0", "node0", "memory.growth", "grows", 99.0))
    run.now = 150.0
    run.error("w1", died(2, 149.9, exit_code=1, exception="ValueError: no"))
    run.settle()
    run.now = 152.0
    run.finish_all()
    run.now = 153.0
    run.started_all()
    run.now = 203.0
    run.finish_all()
    return run


def controller(lines: list[Line], now: float) -> MetricsController:
    made = MetricsController(lambda: {"w0": USAGE}, lambda: lines, lambda: now)
    made.on_transitions(Run().status, ())
    return made


def test_a_job_s_life_in_numbers() -> None:
    found = of(controller(recovered().lines, 203.0))
    plain = {name: value for (name, labels), value in found.items() if not labels}
    assert plain["aegis_jobs_created_total"] == plain["aegis_jobs_succeeded_total"] == 1
    assert plain["aegis_jobs_failed_total"] == 0
    assert (plain["aegis_retries"], plain["aegis_retries_max"], plain["aegis_incarnation"]) == (1, 2, 2)
    assert plain["aegis_step_saved"] == 40
    assert found["aegis_phase", (("phase", "Succeed"),)] == 1
    assert found["aegis_phase", (("phase", "RunCommand"),)] == 0
    assert found["aegis_anomalies_total", (("code", "memory.growth"),)] == 1
    assert found["aegis_checkpoints_total", (("kind", "dcp"),)] == 1
    recoveries = {k: v for k, v in found.items() if k[0] == "aegis_recoveries_total"}
    assert list(recoveries.values()) == [1]


def test_checks_and_rounds_by_gpu_type_workers_and_round() -> None:
    found = of(controller(recovered().lines, 203.0))
    world = (("gpu_type", "none"), ("round", "1"), ("worker_num", "2"))
    assert found["aegis_bootcheck_seconds_count", world] == 1
    assert found["aegis_troubleshoot_seconds_count", world] == 1
    assert found["aegis_troubleshoot_seconds_sum", world] == pytest.approx(2.0)
    labels = (("check", "gpu"), *world[:1], ("phase", "troubleshoot"), ("result", "pass"), *world[1:])
    assert found["aegis_check_seconds_count", labels] == 2
    assert found["aegis_check_seconds_sum", labels] == pytest.approx(0.2)


def test_a_recovery_s_segments_are_those_of_the_report() -> None:
    run = recovered()
    found, (told,) = of(controller(run.lines, 203.0)), run.report().recoveries
    sums = {
        dict(labels)["segment"]: v
        for (name, labels), v in found.items()
        if name == "aegis_recovery_seconds_sum"
    }
    assert told.detect_s is not None and told.total_s is not None
    assert sums == pytest.approx(
        {
            "detect": told.detect_s, "stop": told.stop_s, "diagnose": told.diagnose_s,
            "decide": told.decide_s, "rendezvous": told.rendezvous_s,
            "start": told.start_s, "total": told.total_s,
        }
    )  # fmt: skip


def test_ettr_takes_off_recoveries_and_what_the_last_checkpoint_did_not_save() -> None:
    lines = recovered().lines
    found = of(controller(lines, 500.0))
    # trained 0 to 150, of which the last checkpoint at 100 saved two thirds, and 152 to 203
    assert found["aegis_training_seconds", ()] == pytest.approx(100 + 51)
    assert found["aegis_ettr", ()] == pytest.approx(151 / 203), "what comes after the end doesn't count"


def test_what_the_nodes_use_is_one_series_a_worker() -> None:
    found = of(controller(Run().lines, 10.0))
    worker = (("worker", "w0"),)
    assert found["aegis_node_cpu_cores", worker] == 3.5
    assert found["aegis_node_gpu_utilisation", worker] == 0.75
    assert found["aegis_ranks_cpu_cores", worker] == 2.0
    assert found["aegis_ranks_memory_bytes", worker] == 300
    assert found["aegis_monitor_sample_cpu_seconds", worker] == 0.001


def test_another_master_counts_on_where_the_journal_ends() -> None:
    lines = recovered().lines
    first = controller(lines, 203.0)
    half = len(lines) // 2
    second = controller(lines[:half], 203.0)
    clock = [0.0]
    second._now = lambda: clock[0]
    for walked in list(walk(lines))[half:]:
        clock[0] = walked.line.t
        second.on_transitions(walked.made.status, (Applied(walked.line.event, walked.made),))  # type: ignore[arg-type]
    assert of(second) == of(first)


def test_every_metric_is_explained_and_every_explained_one_is_there() -> None:
    text = scrape(controller(recovered().lines, 203.0))
    there = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    explained = set(re.findall(r"^\| `(aegis_\w+)`", DOCS.read_text(), re.MULTILINE))
    assert there == explained


# ------------------------------------------------------------ the endpoint


def test_it_answers_get_on_its_path_and_nothing_else() -> None:
    async def scenario() -> None:
        served = controller(Run().lines, 10.0)
        url = await served.open("127.0.0.1", 0)
        assert (await asyncio.to_thread(read, url.replace("/metrics", "/")))[0] == 404
        for request, answer in (
            (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405"),
            (b"GET /metrics?x=1 HTTP/1.0\r\nA: b\r\n\r\n", b"HTTP/1.1 200"),
            (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 200"),
            (b"\xff\x00\r\n\r\n", b"HTTP/1.1 405"),
            (b"GET /metrics", b""),
            (b"A" * 100_000, b""),
        ):
            port = int(url.split(":")[2].split("/")[0])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            if not answer:
                writer.write_eof()
            try:
                assert (await asyncio.wait_for(reader.read(), 10)).startswith(answer)
            except ConnectionResetError:
                assert not answer
            writer.close()
        await served.close()

    asyncio.run(scenario())


def test_idle_clients_neither_shut_others_out_for_ever_nor_outlive_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aegis_elastic.observe.endpoint.REQUEST_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        served = controller(Run().lines, 10.0)
        url = await served.open("127.0.0.1", 0)
        port = int(url.split(":")[2].split("/")[0])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CLIENTS_MAX + 3)]
        await asyncio.gather(*(asyncio.wait_for(reader.read(), 10) for reader, _ in idle))
        assert (await asyncio.to_thread(read, url))[0] == 200
        last, _ = await asyncio.open_connection("127.0.0.1", port)
        await served.close()
        assert await asyncio.wait_for(last.read(), 10) == b""
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)
        for _, writer in idle:
            writer.close()

    asyncio.run(scenario())


def test_a_port_that_is_taken_is_said_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        first, second = controller(Run().lines, 10.0), controller(Run().lines, 10.0)
        port = int((await first.open("127.0.0.1", 0)).split(":")[2].split("/")[0])
        assert await second.open("127.0.0.1", port) == ""
        controllers = Controllers()
        controllers.add(second)
        controllers.on_transitions(Run().status, ())
        assert controllers.broken == {}
        await controllers.close()
        await first.close()

    asyncio.run(scenario())
    assert "cannot serve metrics on 127.0.0.1 port" in caplog.text


def test_a_journal_that_makes_no_sense_costs_the_past_only(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    broken = controller([*run.lines, run.lines[0]], 10.0)
    assert "the metrics begin anew" in caplog.text
    assert of(broken)


def test_a_long_journal_costs_the_past_too_and_not_the_agents_patience(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    adopt = line_of(9.0, len(run.lines) + 1, Adopt(run.status), adopted(run.status))
    monkeypatch.setattr(journal, "WALK_MAX", 2 * len(run.lines))
    late = controller([*run.lines, adopt], 10.0)
    assert "the metrics begin anew after a journal of" in caplog.text
    assert of(late)["aegis_incarnation", ()] == 1


def test_a_worker_that_makes_up_names_makes_no_series_without_end() -> None:
    run = Run()
    for number in range(150):
        run.tell(Noted("w0", "node0", f"made.up.{number}", "so", 1.0))
    found = {
        dict(labels)["code"]: n
        for (name, labels), n in of(controller(run.lines, 9.0)).items()
        if "anomalies" in name
    }
    assert len(found) == 101
    assert found["other"] == 50


def test_a_desk_that_breaks_serves_no_old_numbers_and_costs_itself_only() -> None:
    async def scenario() -> None:
        served, controllers = controller(Run().lines, 10.0), Controllers()
        url = await served.open("127.0.0.1", 0)
        controllers.add(served)
        controllers.on_transitions(Run().status, (("no event", "no transition"),))  # type: ignore[arg-type]
        assert set(controllers.broken) == {"MetricsController"}
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
        await controllers.close()

    asyncio.run(scenario())
