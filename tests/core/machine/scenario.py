"""Runs a text scenario of the machine: blocks of commands, each followed by `----` and what came of them.

    error w1 exit code 1
    reconcile
    ----
    w1 failed: exit code 1
    error: w1 failed: counted; nothing points at communication  [publish 5]
    = Troubleshooting incarnation 1 seq 5 count 1 | w0 0, w1 1, w2 0

A line of output is what one `step` gave as its reason, with the rule's name before it if the controller
decided, and its effects. The last line of a block is the status: phase, the counts, each worker's retries and
what is noted about it. `AEGIS_REWRITE=1` writes what came out into the file; the diff is then read, not the
test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aegis_elastic.core.events import (
    Act,
    Close,
    Dismiss,
    Effect,
    Error,
    Event,
    Evict,
    Finding,
    Finish,
    Fit,
    Hold,
    Independent,
    Join,
    Lost,
    Mark,
    Noted,
    Offer,
    Page,
    Progress,
    Publish,
    Quit,
    Reconcile,
    Release,
    Relieve,
    Remake,
    Renew,
    Requeued,
    Saved,
    Taint,
    Unmark,
    Untaint,
)
from aegis_elastic.core.machine import create, step
from aegis_elastic.core.model import JobSpec, NodeMark, Phase, Verdict, Worker
from aegis_elastic.core.protocol.orders import derive_order
from aegis_elastic.core.rank_assignment import RankAssignment

TURNS_MAX = 20


def rewrite(text: str) -> str:
    """The scenario with the outputs that its commands have now."""
    player = Player()
    blocks = []
    for block in text.strip("\n").split("\n\n"):
        commands = block.split("\n----")[0].rstrip("\n")
        if all(line.startswith("#") for line in commands.splitlines()):
            blocks.append(commands)
            continue
        output = [
            out for line in commands.splitlines() if line.strip("# \n") and line[0] != "#"
            for out in player.play(line)
        ]  # fmt: skip
        blocks.append("\n".join([commands, "----", *output, player.summary()]))
    return "\n\n".join(blocks) + "\n"


def scenarios() -> list[Path]:
    return sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


class Player:
    """A job that commands are played to. Its clock moves only when told (`at +5`)."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lives: dict[str, int] = {}
        self.status = create(JobSpec("job", "default", 1, 1, 0), self.now)

    def play(self, line: str) -> list[str]:
        """The output of one command line."""
        command, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        words = [word for word in words if "=" not in word]
        handler: Callable[[list[str], dict[str, str]], Iterator[str]] = getattr(self, f"do_{command}")
        return list(handler(words, options))

    def tell(self, event: Event) -> str:
        made = step(self.status, event, self.now)
        self.status = made.status
        said = f"{made.name}: {made.reason}" if isinstance(event, Reconcile) else made.reason
        effects = ", ".join(_effect(effect) for effect in made.effects)
        return f"{said}  [{effects}]" if effects else said

    def summary(self) -> str:
        s = self.status
        workers = ", ".join(_worker(worker, s.phase) for worker in s.workers)
        spares = ", ".join(f"{worker.name} (fit)" if worker.fit else worker.name for worker in s.spares)
        spares = f" + {spares}" if spares else ""
        counts = f"incarnation {s.incarnation} seq {s.seq_num} count {s.recover_count}"
        marks = "".join(f" ! {_mark(mark)}" for mark in s.marks)
        held = f" held until {s.held_until:g}" if s.held else ""
        return f"= {s.phase.value} {counts}{held} | {workers}{spares}{marks}".rstrip()

    def workers(self, words: list[str]) -> list[Worker]:
        if words == ["all"]:
            return list(self.status.workers)
        known = {worker.name: worker for worker in (*self.status.workers, *self.status.spares)}
        return [known[name] for name in words]

    def ids(self, worker: Worker, options: dict[str, str]) -> dict[str, Any]:
        """The identity of a message: current, unless the scenario says otherwise."""
        return {
            "worker": worker.name,
            "uid": options.get("uid", worker.uid),
            "incarnation": int(options.get("incarnation", self.status.incarnation)),
            "seq_num": int(options.get("seq", self.status.seq_num)),
        }

    def do_job(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        workers = int(options.pop("workers"))
        fields: dict[str, Any] = {
            key: value if key in ("bootcheck", "troubleshoot") else float(value) if key.endswith("_s")
            else value == "yes" if key == "requeue" else int(value)
            for key, value in options.items()
        }  # fmt: skip
        fields = {"min_worker_num": workers, "max_retry": 3, **fields}
        self.lives.clear()
        self.status = create(JobSpec("job", "default", workers, **fields), self.now)
        yield from ()

    def do_at(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        self.now += float(words[0].removeprefix("+"))
        yield f"it is {self.now:g}"

    def do_join(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        """Each worker's next life; `node=` another node than its own, `uid=` a life that is known."""
        for name in words:
            self.lives[name] = self.lives.get(name, 0) + 1
            uid = options.get("uid", f"{name}/{self.lives[name]}")
            node = options.get("node", f"node-{name}")
            nproc, ordinal = int(options.get("nproc", 1)), int(options.get("ordinal", -1))
            yield self.tell(Join(name, uid, node, "10.0.0.1", nproc, ordinal))

    def do_lost(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        agents = tuple((worker.name, options.get("uid", worker.uid)) for worker in self.workers(words))
        yield self.tell(Lost(agents, "connection closed"))

    def do_offer(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        (worker,) = self.workers(words[:1])
        yield self.tell(Offer(worker.name, options.get("uid", worker.uid), words[1]))

    def do_finish(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        """`finding=check:code:scope` is a check that did not pass; `store=` what it holds ready."""
        found = options.get("finding")
        findings = (Finding(*found.split(":")),) if found else ()
        for worker in self.workers(words):
            store = options.get("store", "")
            yield self.tell(Finish(**self.ids(worker, options), findings=findings, store=store))

    def do_error(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        (worker,) = self.workers(words[:1])
        clues = (options["clue"],) if "clue" in options else ()
        yield self.tell(Error(**self.ids(worker, options), reason=" ".join(words[1:]), clues=clues))

    def do_independent(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        incarnation = int(options.get("incarnation", self.status.incarnation))
        ended = options.get("ended") == "yes"
        yield self.tell(Independent(words[0], incarnation, " ".join(words[1:]), ended=ended))

    def do_requeued(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield self.tell(Requeued(int(words[0])))

    def do_noted(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield self.tell(Noted(words[0], f"node-{words[0]}", words[1], " ".join(words[2:]), self.now))

    def do_progress(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield self.tell(Progress(int(words[0])))

    def do_saved(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield self.tell(Saved(int(words[0]), f"ckpt/{words[0]}", "dcp", self.now))

    def do_mark(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield self.tell(Mark(f"node-{words[0]}", words[0], Verdict(words[1]), " ".join(words[2:])))

    def do_unmark(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield self.tell(Unmark(f"node-{words[0]}", Verdict(words[1]), " ".join(words[2:])))

    def do_act(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield self.tell(Act(words[0], words[1], " ".join(words[2:])))

    def do_evict(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield self.tell(Evict(f"node-{words[0]}", " ".join(words[1:])))

    def do_relieve(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield self.tell(Relieve(f"node-{words[0]}", " ".join(words[1:])))

    def do_fit(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        (spare,) = self.workers(words[:1])
        reason = " ".join(words[1:])
        yield self.tell(Fit(spare.name, options.get("uid", spare.uid), not reason, reason))

    def do_taint(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        until = float(options.get("until", 0.0))
        yield self.tell(Taint(f"node-{words[0]}", " ".join(words[1:]), "manual", until))

    def do_untaint(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield self.tell(Untaint(f"node-{words[0]}", " ".join(words[1:])))

    def do_hold(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield self.tell(Hold(" ".join(words), float(options["until"])))

    def do_release(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield self.tell(Release(" ".join(words)))

    def do_quit(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield self.tell(Quit(" ".join(words)))

    def do_reconcile(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        """The controller's turns, until it has nothing more to decide."""
        for _ in range(TURNS_MAX):
            before = self.status
            said = self.tell(Reconcile())
            if self.status is before:
                return
            yield said
        raise AssertionError(f"the controller has not come to rest after {TURNS_MAX} turns")

    def do_run(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        """Everybody does what is ordered, in silence, until training runs: `run w0 w1` joins them first."""
        yield from ()
        list(self.do_join(words, {}))
        for _ in range(TURNS_MAX):
            list(self.do_reconcile([], {}))
            if self.status.phase is Phase.RUN_COMMAND:
                return
            list(self.do_finish(["all"], {}))
        raise AssertionError(f"training does not run after {TURNS_MAX} rounds: {self.summary()}")

    def do_order(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        """The order that stands now."""
        order = derive_order(self.status)
        assignments = ", ".join(_seat(assignment) for assignment in order.assignments)
        yield f"order {order.action.value} | {assignments}"
        yield f"store {order.store or 'none'}, checks {' '.join(order.checks) or 'none'}"
        yield f"restart count {order.restart_count}"

    def do_nodes(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield ", ".join(f"{n.node_name}: {n.reason} ({n.kind})" for n in self.status.error_nodes) or "none"
        yield f"reschedules {self.status.reschedules}"

    def do_why(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        """Why the job failed."""
        yield self.status.fail_reason or "it has not failed"


def _worker(worker: Worker, phase: Phase) -> str:
    notes = [note for note in ("finished", "gone", "restarted", "failed") if getattr(worker, note)]
    notes += [f"faulty {worker.faulty}"] if worker.faulty else []
    notes += ["to renew"] if worker.renew else []
    notes += ["to relieve"] if worker.relieve else []
    notes += [f"still {worker.inner_phase.value}"] if worker.inner_phase is not phase else []
    return f"{worker.name} {worker.retries}" + (f" ({', '.join(notes)})" if notes else "")


def _mark(mark: NodeMark) -> str:
    notes = [note for note, on in (("may leave", mark.evict), ("safe", mark.safe)) if on]
    return f"{mark.node_name} {mark.verdict.value}" + (f" ({', '.join(notes)})" if notes else "")


def _seat(assignment: RankAssignment) -> str:
    last = assignment.rank_offset + assignment.nproc - 1
    return f"{assignment.worker}: group {assignment.group_rank} ranks {assignment.rank_offset}-{last}"


def _effect(effect: Effect) -> str:
    if isinstance(effect, Publish):
        return f"publish {effect.seq_num}"
    if isinstance(effect, Dismiss):
        return f"dismiss {effect.worker} {effect.uid}"
    if isinstance(effect, Close):
        return f"close {effect.outcome}"
    if isinstance(effect, Renew):
        return f"renew {effect.worker} {effect.uid}"
    if isinstance(effect, Page):
        return f"page {effect.key}"
    if isinstance(effect, Remake):
        return f"remake {' '.join(effect.machines)}"
    return f"record {effect.node_name} {effect.reason} {effect.kind}"
