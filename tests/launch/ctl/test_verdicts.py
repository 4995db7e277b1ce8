"""`aegisctl verdicts`, and `aegisctl replay RUN --policy FILE` over a journal made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aegis_elastic.core.accounts import journal
from aegis_elastic.core.accounts.journal import Create
from aegis_elastic.core.events import Act, Event, Finding, Finish, Hold, Join, Mark, Reconcile, Unmark
from aegis_elastic.core.machine import step
from aegis_elastic.core.model import JobSpec, Phase, Status, Verdict
from aegis_elastic.core.policy.verdicts import TABLE
from aegis_elastic.launch.ctl.main import main

BEGIN = 1_000_000.0


class Recorded:
    """A journal in the making."""

    def __init__(self, workers: int) -> None:
        self.spec = JobSpec("job", "default", workers, workers, 3, bootcheck="off")
        self.lines: list[journal.Line] = []
        self.status: Status = journal.begin(self.spec, BEGIN).status
        self.lines.append(journal.line_of(BEGIN, 1, Create(self.spec), journal.begin(self.spec, BEGIN)))
        for number in range(workers):
            self.at(0, Join(f"w{number}", f"u{number}", f"n{number}", "127.0.0.1", 1))
        self.at(0)
        while self.status.phase is not Phase.RUN_COMMAND:
            self.everybody_finishes(0)

    def at(self, seconds: float, *events: Event) -> None:
        """These events at that time, then the controller's turn."""
        t = BEGIN + seconds
        for event in events:
            self.add(t, event)
        while self.add(t, Reconcile()):
            pass

    def add(self, t: float, event: Event) -> bool:
        made = step(self.status, event, t)
        changed = made.status is not self.status
        if changed or not isinstance(event, Reconcile):
            self.lines.append(journal.line_of(t, len(self.lines) + 1, event, made))
        self.status = made.status
        return changed

    def everybody_finishes(self, seconds: float, *more: Event, findings: tuple[Finding, ...] = ()) -> None:
        s = self.status
        self.at(
            seconds,
            *(
                Finish(worker.name, worker.uid, s.incarnation, s.seq_num, findings, "127.0.0.1:1")
                for worker in s.workers
            ),
            *more,
        )

    def save(self, folder: Path) -> Path:
        (folder / "journal.jsonl").write_bytes(b"".join(map(journal.encode_line, self.lines)))
        return folder


def replayed(
    folder: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[dict[str, object]]]:
    (folder / "other.toml").write_text(policy)
    code = main(["replay", str(folder), "--policy", str(folder / "other.toml"), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_table_is_printed_with_all_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verdicts", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(TABLE)
    assert rows[0] == {
        "verdict": "frozen",
        "kind": "mark",
        "evidence": "a rank can't move: its process is stopped, dead inside, or held",
        "owner": "the guard",
        "action": "restart in place after the guard's rules; the same node again leaves, if it can be spared",
    }
    assert main(["verdicts"]) == 0
    assert "unreachable" in capsys.readouterr().out


def test_a_recorded_hang_under_other_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Recorded(2)
    recorded.at(100, Mark("n1", "w1", Verdict.FROZEN, "no heartbeat"))
    recorded.at(290, Act("w1", "frozen", "it has lasted"))
    recorded.at(291, Unmark("n1", Verdict.FROZEN, "its training was stopped"))
    folder = recorded.save(tmp_path)

    code, [action] = replayed(folder, "", capsys)
    assert (code, action["done_s"], action["would_s"], action["differs"]) == (0, 190, 185, False)
    code, [action] = replayed(folder, "[guard]\npersistence_s = 20", capsys)
    assert (code, action["would_s"]) == (1, 25)
    code, [action] = replayed(folder, "[guard]\npersistence_s = 600", capsys)
    assert (code, action["would_s"]) == (1, None)
    assert action["why"] == "it has held for 185 s, 600 s are wanted"
    code, [action] = replayed(folder, 'mode = "observe"', capsys)
    assert (code, action["would_s"]) == (1, None)
    assert str(action["why"]).startswith("only observed: frozen, for ")


def test_a_recorded_outage_under_other_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Recorded(4)
    recorded.at(100, Act("w0", "manual", "an operator"))
    broken = Finding("gpu", "gpu.missing", "hardware")
    s = recorded.status
    for worker in s.workers[:2]:
        recorded.add(BEGIN + 110, Finish(worker.name, worker.uid, s.incarnation, s.seq_num, (broken,), ""))
    for worker in s.workers[2:]:
        recorded.add(BEGIN + 111, Finish(worker.name, worker.uid, s.incarnation, s.seq_num, (), ""))
    recorded.at(111, Hold("2 of 4", BEGIN + 200))
    folder = recorded.save(tmp_path)

    code, [action] = replayed(folder, "", capsys)
    assert (code, action["differs"]) == (0, False)
    assert str(action["why"]).startswith("2 of 4 nodes are found broken together")
    code, [action] = replayed(folder, "[guard]\nbrake_share = 0.6", capsys)
    assert (code, action["would_s"]) == (1, None)
    assert action["why"] == "this policy calls it the nodes' own"


def test_a_run_without_incidents_and_a_policy_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Recorded(1).save(tmp_path)
    (folder / "other.toml").write_text("[guard")
    assert main(["replay", str(folder), "--policy", str(folder / "other.toml")]) == 2
    assert "cannot use the policy" in capsys.readouterr().err
    (folder / "other.toml").write_text("")
    assert main(["replay", str(folder), "--policy", str(folder / "other.toml")]) == 0
    assert "the policy makes no difference" in capsys.readouterr().out
