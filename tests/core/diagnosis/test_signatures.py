"""Lines of logs and what they tell, judged by the visible real lines and by lines of the same kinds.

`signature_lines.jsonl` holds further lines of each kind, as its sources write them, and healthy lines that
must tell nothing. The real lines lie in `shared/data`; without them their tests are skipped.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.core.diagnosis import signatures
from aegis_elastic.core.diagnosis.signatures import BadSignatures, Signature, load, parse
from benchmarks.signatures import real_rows, right_with_other_numbers, right_without_their_source

REAL = Path(__file__).resolve().parents[4] / "shared" / "data" / "log_lines.jsonl"
KINDS = Path(__file__).with_name("signature_lines.jsonl")
RIGHT_SHARE_MIN = 0.95
needs_real_lines = pytest.mark.skipif(not REAL.is_file(), reason="shared/data is not beside this checkout")


class Real(NamedTuple):
    """A line of the data file with what it should be."""

    line: str
    signature: Signature
    source: str


def real_lines() -> list[Real]:
    rows = [json.loads(row) for row in REAL.read_text(encoding="utf-8").splitlines()]
    return [
        Real(
            row["line"],
            Signature(row["fault_class"], row["component"], row["role"], row["suggested_action"]),
            "/".join(row["source_url"].split("/")[2:5]),
        )
        for row in rows
    ]


def kinds() -> list[tuple[str, str | None, str]]:
    rows = [json.loads(row) for row in KINDS.read_text(encoding="utf-8").splitlines()]
    return [(row["line"], row["fault_class"], row["action"]) for row in rows]


def twin(line: str) -> Signature | None:
    """What `classify` does, the slow way: every expression in order, no index of words."""
    line = " ".join(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).split())
    table = load()
    return next(
        (rule.signature for number, rule in enumerate(table.rules) if table.compiled(number).search(line)),
        None,
    )


def action_of(line: str) -> str:
    signature = load().classify(line)
    return signature.action if signature else signatures.UNKNOWN


# --- the real lines -------------------------------------------------------------------------------------


@needs_real_lines
def test_of_the_real_lines_nearly_every_action_is_right() -> None:
    lines = real_lines()
    wrong = [item for item in lines if action_of(item.line) != item.signature.action]
    found = [load().classify(item.line) for item in lines]
    for field in ("action", "fault_class", "component", "role"):
        right = sum(
            getattr(a, field, None) == getattr(b.signature, field) for a, b in zip(found, lines, strict=True)
        )
        print(f"{field}: {right} of {len(lines)}")
    assert len(wrong) <= len(lines) * (1 - RIGHT_SHARE_MIN), wrong


@needs_real_lines
def test_with_all_its_numbers_changed_a_line_tells_the_same() -> None:
    rows = real_rows(REAL)
    for seed in range(3):
        right = right_with_other_numbers(load(), rows, seed)
        print(f"numbers changed: {right} of {len(rows)}")
        assert right >= len(rows) * RIGHT_SHARE_MIN


@needs_real_lines
def test_no_line_rests_on_a_rule_that_only_its_own_source_needs() -> None:
    rows = real_rows(REAL)
    right = right_without_their_source(load(), rows)
    print(f"each source left out: {right} of {len(rows)}")
    assert right >= len(rows) * RIGHT_SHARE_MIN


# --- the kinds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "fault_class", "action"), kinds())
def test_kinds(line: str, fault_class: str | None, action: str) -> None:
    found = load().classify(line)
    if fault_class is None:
        assert found is None, "a healthy line tells nothing"
    else:
        assert found is not None and (found.fault_class, found.action) == (fault_class, action)


def test_a_prefix_a_colour_or_a_long_line_change_nothing() -> None:
    for line, _, action in kinds():
        if action == signatures.UNKNOWN or line.startswith(("Killed", "Aborted")):
            continue
        assert action_of(f"  {line}\r\n") == action
        assert action_of(f"\x1b[31m{line}\x1b[0m") == action
    progress = "\r".join(f" {n}%|##  | {n}/100 [00:{n % 60:02d}<01:00]" for n in range(100)) * 5
    assert len(progress) > signatures.LINE_CHARS_MAX
    assert (
        action_of(progress + "slurmstepd: error: *** JOB 1 ON n CANCELLED AT x DUE TO TIME LIMIT ***")
        == "fail_fast"
    )
    assert action_of("ValueError: " + "x" * 1_000_000) == "fail_fast"


def test_the_index_of_words_overlooks_nothing() -> None:
    lines = [line for line, _, _ in kinds()] + (
        [item.line for item in real_lines()] if REAL.is_file() else []
    )
    for line in lines:
        assert load().classify(line) == twin(line), line


@given(st.text(max_size=300))
def test_any_text_has_an_answer(line: str) -> None:
    load().classify(line)


# --- the table itself -----------------------------------------------------------------------------------


def test_nothing_but_a_root_or_what_may_be_one_isolates_a_node() -> None:
    """A consequence says nothing about the node that it is seen on; what is to be ignored, or is the user's,
    is never under a class of which a line isolates for the same component.
    """
    harmless: set[tuple[str, str, str]] = set()
    for rule in load().rules:
        signature = rule.signature
        if signature.action == "isolate_node":
            assert signature.role in ("root", "either"), signature
        if signature.role == "context":
            assert signature.action == "ignore", signature
        if signature.action in ("ignore", "fail_fast"):
            assert signature.action != "fail_fast" or signature.role == "root", signature
            harmless.add((signature.fault_class, signature.component, signature.role))
    isolating = {
        (s.fault_class, s.component, s.role)
        for s in (r.signature for r in load().rules)
        if s.action == "isolate_node"
    }
    assert not harmless & isolating


@needs_real_lines
def test_no_harmless_real_line_isolates() -> None:
    for item in real_lines():
        if item.signature.action in ("ignore", "fail_fast") or item.signature.role == "cascade":
            assert action_of(item.line) != "isolate_node", item.line


def test_every_expression_compiles_and_every_word_is_an_index_entry() -> None:
    table = load()
    for number in range(len(table.rules)):
        table.compiled(number)
    patterns = Counter((rule.pattern, rule.words) for rule in table.rules)
    assert max(patterns.values()) == 1, "a rule that stands twice can never be the second one"


@pytest.mark.parametrize("code", ["46", "48", "62", "64", "74", "79", "95", "109", "110", "119", "120", "136",
                                  "140", "143", "154", "155", "156", "158"])  # fmt: skip
def test_xids_for_which_the_vendor_wants_the_gpu_reset(code: str) -> None:
    assert action_of(f"NVRM: Xid (PCI:0000:04:00): {code}, pid=1, name=python") == "isolate_node"


@pytest.mark.parametrize("code", ["13", "31", "94", "43"])
def test_xids_for_which_the_application_restarts(code: str) -> None:
    assert action_of(f"NVRM: Xid (PCI:0000:04:00): {code}, pid=1, name=python") == "restart_in_place"


@pytest.mark.parametrize("code", ["144", "145", "146", "147", "148", "149", "150"])
@pytest.mark.parametrize(("word", "action"), [("Fatal", "isolate_node"), ("Nonfatal", "diagnose")])
def test_nvlink_xids_are_read_for_how_bad_it_is(code: str, word: str, action: str) -> None:
    assert action_of(f"NVRM: Xid (PCI:0008:01:00): {code}, NETIR_LINK {word} XC0 i0 Link 08 (0x1)") == action


def a_table(action: str, rule: str) -> bytes:
    about = f'"fault_class": "x", "component": "y", "role": "root", "action": "{action}"'
    return f'{{"forms": {{}}, "signatures": [{{{about}, "rules": [{rule}]}}]}}'.encode()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"{", "cannot read the signatures"),
        (a_table("reboot", ""), "reboot"),
        (a_table("wait", '{"words": ["Big"], "pattern": "Big"}'), "small letters"),
        (a_table("wait", '{"words": [], "pattern": "Big"}'), "one or more"),
        (a_table("wait", '{"form": "xid", "codes": ["1"]}'), "want a form"),
    ],
)
def test_a_bad_table_says_what_is_wrong(data: bytes, why: str) -> None:
    with pytest.raises(BadSignatures, match=why):
        parse(data)
