------------------------------- MODULE Nodes -------------------------------
(* Where workers run: nodes that are isolated for a failing check, nodes that are marked slow and leave at  *)
(* a checkpoint boundary, placements made from a stale list, a master that crashes or is overtaken by       *)
(* another between any two writes, a recovery that doesn't converge, and a charge that is given back.       *)
(*                                                                                                          *)
(* Slow marks, eviction, and refunds are specified but not yet events of `step`: here the model runs ahead  *)
(* of the machine. Isolation, the budget, admission and the single write are in the machine already.        *)
(*                                                                                                          *)
(* The status is one durable record, written by compare-and-swap; what a master only knows (the verdicts of *)
(* the current round) goes with it when it crashes.                                                         *)
(*                                                                                                          *)
(* Without switches parts of the environment off: liveness is asked of smaller worlds than safety.          *)
EXTENDS Naturals, Sequences, FiniteSets, TLC
CONSTANTS Workers, Nodes, None, MaxRetry, Budget, Defects, Without

Terminal   == {"Succeed", "Failed"}
Has(d)     == d \in Defects
May(f)     == f \notin Without
Symmetric  == Permutations(Workers) \cup Permutations(Nodes)
Min(a, b)  == IF a < b THEN a ELSE b
Largest(f) == CHOOSE n \in {f[w] : w \in Workers} : \A w \in Workers : f[w] <= n
All(x)     == [w \in Workers |-> x]
Seating    == CHOOSE f \in [Workers -> Nodes] : \A v, w \in Workers : v # w => f[v] # f[w]

(* --algorithm Nodes {
variables
  \* the durable record
  phase = "BootChecking"; count = 0; retries = All(0); entries = 0;
  charged = {};              \* who was charged in this incarnation, and hasn't been given it back
  black = {};                \* nodes that must not take part again
  \* the world
  node = Seating;            \* where each worker is, None while its seat is empty
  died = All(FALSE);         \* its agent is another one than the record knows
  marked = {};               \* nodes that were seen to be slow
  safe = {};                 \* marked nodes for which a checkpoint has completed since
  saving = FALSE;
  view = {};                 \* the scheduler's copy of the blacklist, which lags
  \* the master
  up = TRUE; verdict = All("none"); halfway = FALSE; overtaken = FALSE;
  \* ghosts
  hit = FALSE; overcounted = FALSE;
define {
  Alive    == phase \notin Terminal
  Leads    == Alive /\ up
  Lost     == {w \in Workers : died[w]}
  Exceeded == \E w \in Workers : retries[w] > MaxRetry
  Charge(n) == Min(n + 1, MaxRetry + 1)
  Taken    == {node[w] : w \in Workers}
  \* a node that could step in
  Spares   == Nodes \ (black \cup Taken)
  Fit(w)   == node[w] # None /\ verdict[w] = "ok" /\ ~died[w] /\ (node[w] \notin black \/ Has("noAdmission"))
}
macro Count(who) {
  retries := [w \in Workers |-> IF w \in who THEN Charge(retries[w]) ELSE retries[w]];
  count   := Min(Largest(retries), MaxRetry);
  charged := who;
  overcounted := overcounted \/ ~hit;
  hit := FALSE;
}
macro Recover() { phase := "Troubleshooting"; verdict := All("none"); saving := FALSE; died := All(FALSE); }
macro Empty(w) { node[w] := None; }

\* ---- the master ----
fair process (CountLoss = "loss while running") {
CL: while (TRUE) {
    await Leads /\ phase = "RunCommand" /\ Lost # {} /\ ~halfway;
    if (Has("twoWrites")) { Count(Lost); halfway := TRUE; }
    else { Count(Lost); entries := 1; Recover(); }
  }
}
fair process (SecondWrite = "second write") {
SW: while (TRUE) { await Leads /\ halfway; halfway := FALSE; entries := 1; Recover(); }
}
\* An earlier master had decided the same; its write comes late. Compare-and-swap refuses it.
process (LateWrite = "late write") {
LW: while (TRUE) {
    await Alive /\ overtaken;
    overtaken := FALSE;
    if (Has("noCas") /\ phase = "RunCommand") { Count(Workers); }
  }
}
fair process (LossAgain = "loss while recovering") {
LA: while (TRUE) {
    await Leads /\ phase = "Troubleshooting" /\ Lost # {};
    verdict := [w \in Workers |-> IF w \in Lost THEN "none" ELSE verdict[w]];
    died := All(FALSE);
    if (entries >= Budget /\ ~Has("noBudget")) { phase := "Failed"; }
    else { entries := IF Has("noBudget") THEN entries ELSE entries + 1; }
  }
}
fair process (BootChecked = "bootcheck passed") {
BC: while (TRUE) {
    await Leads /\ phase = "BootChecking";
    if (Lost # {}) { died := All(FALSE); } else { phase := "RunCommand"; hit := FALSE; }
  }
}
fair process (Isolate \in Workers) {
IS: while (TRUE) {
    await Leads /\ phase = "Troubleshooting" /\ node[self] # None;
    await verdict[self] = "hardware" \/ (node[self] \in black /\ ~Has("noAdmission"));
    black := black \cup {node[self]};
    verdict[self] := "none" || died[self] := FALSE;
    Empty(self);
  }
}
fair process (Resume = "recovery done") {
RS: while (TRUE) {
    await Leads /\ phase = "Troubleshooting" /\ \A w \in Workers : Fit(w);
    if (Exceeded) { phase := "Failed"; }
    else {
      retries := All(count); charged := {}; entries := 0; hit := FALSE; safe := {};
      verdict := All("none");
      phase := "RunCommand";
    }
  }
}
fair process (GiveUp = "no healthy node left") {
GU: while (TRUE) {
    await Leads /\ phase = "Troubleshooting" /\ (\E w \in Workers : node[w] = None) /\ Spares = {} /\ ~Has("noGiveUp");
    phase := "Failed";
  }
}
\* A planned departure: it costs no retry, it waits for the checkpoint, and it needs somebody to step in.
process (Evict \in Workers) {
EV: while (TRUE) {
    await Leads /\ phase = "RunCommand" /\ Lost = {} /\ ~halfway /\ node[self] \in marked;
    await node[self] \in safe \/ Has("evictsNow");
    await Spares # {} \/ Has("suicidal");
    black := black \cup {node[self]};
    marked := marked \ {node[self]};
    safe := safe \ {node[self]};
    if (Has("evictionCounts")) { Count({self}); };
    entries := 0;
    Recover();
    Empty(self);
  }
}
\* The diagnosis says that it was nobody's fault here (storage, network): the charge is given back.
process (Refund = "refund") {
RF: while (TRUE) {
    await May("refund") /\ (Leads \/ (Has("refundsTheDead") /\ up /\ phase = "Failed")) /\ phase # "RunCommand";
    await charged # {} \/ (Has("refundsTwice") /\ count > 0 /\ phase = "Troubleshooting");
    retries := [w \in Workers |-> IF (charged = {} \/ w \in charged) /\ retries[w] > 0 THEN retries[w] - 1 ELSE retries[w]];
    count := Min(Largest(retries), MaxRetry);
    charged := {};
  }
}
process (Crash = "crash") {
CR: while (TRUE) {
    await Leads;
    up := FALSE; verdict := All("none"); halfway := FALSE;
    overtaken := May("late") /\ phase = "RunCommand" /\ Lost # {};
    black := IF Has("forgetsBlack") THEN {} ELSE black;
  }
}
fair process (Takeover = "takeover") {
TO: while (TRUE) { await ~up; up := TRUE; }
}

\* ---- the scheduler ----
fair process (Sync = "sync") {
SY: while (TRUE) { await Alive /\ view # black; view := black; }
}
fair process (Place \in Workers) {
PL: while (TRUE) {
    await Alive /\ phase = "Troubleshooting" /\ node[self] = None;
    with (n \in Nodes \ (view \cup Taken)) {
      node[self] := n;
      if (Has("markOfWorker")) { marked := marked \cup {n}; };
    }
  }
}

\* ---- the workers, and what happens to them ----
fair process (Check \in Workers) {
CH: while (TRUE) {
    await Alive /\ phase = "Troubleshooting" /\ node[self] # None /\ ~died[self] /\ verdict[self] = "none";
    either { verdict[self] := "ok"; } or { verdict[self] := "hardware"; }
  }
}
process (Observe \in Workers) {
OB: while (TRUE) { await May("slow") /\ Alive /\ phase = "RunCommand" /\ node[self] \notin marked; marked := marked \cup {node[self]}; }
}
process (SaveBegins = "save begins") {
SB: while (TRUE) { await May("slow") /\ Alive /\ phase = "RunCommand" /\ Lost = {} /\ ~saving; saving := TRUE; }
}
process (SaveCompletes = "save completes") {
SC: while (TRUE) { await Alive /\ phase = "RunCommand" /\ saving /\ Lost = {}; saving := FALSE; safe := marked; }
}
process (Die \in Workers) {
DI: while (TRUE) {
    await Alive /\ node[self] # None /\ ~died[self];
    died[self] := TRUE;
    hit := hit \/ phase = "RunCommand";
  }
}
process (Done = "done") {
DN: while (TRUE) { await Leads /\ phase = "RunCommand" /\ Lost = {} /\ ~halfway; phase := "Succeed"; }
}
} *)
\* BEGIN TRANSLATION - the hash of the PCal code: PCal-888eb8cb8c18a12a01f49777f97c724e
VARIABLES phase, count, retries, entries, charged, black, node, died, marked, 
          safe, saving, view, up, verdict, halfway, overtaken, hit, 
          overcounted

(* define statement *)
Alive    == phase \notin Terminal
Leads    == Alive /\ up
Lost     == {w \in Workers : died[w]}
Exceeded == \E w \in Workers : retries[w] > MaxRetry
Charge(n) == Min(n + 1, MaxRetry + 1)
Taken    == {node[w] : w \in Workers}

Spares   == Nodes \ (black \cup Taken)
Fit(w)   == node[w] # None /\ verdict[w] = "ok" /\ ~died[w] /\ (node[w] \notin black \/ Has("noAdmission"))


vars == << phase, count, retries, entries, charged, black, node, died, marked, 
           safe, saving, view, up, verdict, halfway, overtaken, hit, 
           overcounted >>

ProcSet == {"loss while running"} \cup {"second write"} \cup {"late write"} \cup {"loss while recovering"} \cup {"bootcheck passed"} \cup (Workers) \cup {"recovery done"} \cup {"no healthy node left"} \cup (Workers) \cup {"refund"} \cup {"crash"} \cup {"takeover"} \cup {"sync"} \cup (Workers) \cup (Workers) \cup (Workers) \cup {"save begins"} \cup {"save completes"} \cup (Workers) \cup {"done"}

Init == (* Global variables *)
        /\ phase = "BootChecking"
        /\ count = 0
        /\ retries = All(0)
        /\ entries = 0
        /\ charged = {}
        /\ black = {}
        /\ node = Seating
        /\ died = All(FALSE)
        /\ marked = {}
        /\ safe = {}
        /\ saving = FALSE
        /\ view = {}
        /\ up = TRUE
        /\ verdict = All("none")
        /\ halfway = FALSE
        /\ overtaken = FALSE
        /\ hit = FALSE
        /\ overcounted = FALSE

CountLoss == /\ Leads /\ phase = "RunCommand" /\ Lost # {} /\ ~halfway
             /\ IF Has("twoWrites")
                   THEN /\ retries' = [w \in Workers |-> IF w \in Lost THEN Charge(retries[w]) ELSE retries[w]]
                        /\ count' = Min(Largest(retries'), MaxRetry)
                        /\ charged' = Lost
                        /\ overcounted' = (overcounted \/ ~hit)
                        /\ hit' = FALSE
                        /\ halfway' = TRUE
                        /\ UNCHANGED << phase, entries, died, saving, verdict >>
                   ELSE /\ retries' = [w \in Workers |-> IF w \in Lost THEN Charge(retries[w]) ELSE retries[w]]
                        /\ count' = Min(Largest(retries'), MaxRetry)
                        /\ charged' = Lost
                        /\ overcounted' = (overcounted \/ ~hit)
                        /\ hit' = FALSE
                        /\ entries' = 1
                        /\ phase' = "Troubleshooting"
                        /\ verdict' = All("none")
                        /\ saving' = FALSE
                        /\ died' = All(FALSE)
                        /\ UNCHANGED halfway
             /\ UNCHANGED << black, node, marked, safe, view, up, overtaken >>

SecondWrite == /\ Leads /\ halfway
               /\ halfway' = FALSE
               /\ entries' = 1
               /\ phase' = "Troubleshooting"
               /\ verdict' = All("none")
               /\ saving' = FALSE
               /\ died' = All(FALSE)
               /\ UNCHANGED << count, retries, charged, black, node, marked, 
                               safe, view, up, overtaken, hit, overcounted >>

LateWrite == /\ Alive /\ overtaken
             /\ overtaken' = FALSE
             /\ IF Has("noCas") /\ phase = "RunCommand"
                   THEN /\ retries' = [w \in Workers |-> IF w \in Workers THEN Charge(retries[w]) ELSE retries[w]]
                        /\ count' = Min(Largest(retries'), MaxRetry)
                        /\ charged' = Workers
                        /\ overcounted' = (overcounted \/ ~hit)
                        /\ hit' = FALSE
                   ELSE /\ TRUE
                        /\ UNCHANGED << count, retries, charged, hit, 
                                        overcounted >>
             /\ UNCHANGED << phase, entries, black, node, died, marked, safe, 
                             saving, view, up, verdict, halfway >>

LossAgain == /\ Leads /\ phase = "Troubleshooting" /\ Lost # {}
             /\ verdict' = [w \in Workers |-> IF w \in Lost THEN "none" ELSE verdict[w]]
             /\ died' = All(FALSE)
             /\ IF entries >= Budget /\ ~Has("noBudget")
                   THEN /\ phase' = "Failed"
                        /\ UNCHANGED entries
                   ELSE /\ entries' = IF Has("noBudget") THEN entries ELSE entries + 1
                        /\ phase' = phase
             /\ UNCHANGED << count, retries, charged, black, node, marked, 
                             safe, saving, view, up, halfway, overtaken, hit, 
                             overcounted >>

BootChecked == /\ Leads /\ phase = "BootChecking"
               /\ IF Lost # {}
                     THEN /\ died' = All(FALSE)
                          /\ UNCHANGED << phase, hit >>
                     ELSE /\ phase' = "RunCommand"
                          /\ hit' = FALSE
                          /\ died' = died
               /\ UNCHANGED << count, retries, entries, charged, black, node, 
                               marked, safe, saving, view, up, verdict, 
                               halfway, overtaken, overcounted >>

Isolate(self) == /\ Leads /\ phase = "Troubleshooting" /\ node[self] # None
                 /\ verdict[self] = "hardware" \/ (node[self] \in black /\ ~Has("noAdmission"))
                 /\ black' = (black \cup {node[self]})
                 /\ /\ died' = [died EXCEPT ![self] = FALSE]
                    /\ verdict' = [verdict EXCEPT ![self] = "none"]
                 /\ node' = [node EXCEPT ![self] = None]
                 /\ UNCHANGED << phase, count, retries, entries, charged, 
                                 marked, safe, saving, view, up, halfway, 
                                 overtaken, hit, overcounted >>

Resume == /\ Leads /\ phase = "Troubleshooting" /\ \A w \in Workers : Fit(w)
          /\ IF Exceeded
                THEN /\ phase' = "Failed"
                     /\ UNCHANGED << retries, entries, charged, safe, verdict, 
                                     hit >>
                ELSE /\ retries' = All(count)
                     /\ charged' = {}
                     /\ entries' = 0
                     /\ hit' = FALSE
                     /\ safe' = {}
                     /\ verdict' = All("none")
                     /\ phase' = "RunCommand"
          /\ UNCHANGED << count, black, node, died, marked, saving, view, up, 
                          halfway, overtaken, overcounted >>

GiveUp == /\ Leads /\ phase = "Troubleshooting" /\ (\E w \in Workers : node[w] = None) /\ Spares = {} /\ ~Has("noGiveUp")
          /\ phase' = "Failed"
          /\ UNCHANGED << count, retries, entries, charged, black, node, died, 
                          marked, safe, saving, view, up, verdict, halfway, 
                          overtaken, hit, overcounted >>

Evict(self) == /\ Leads /\ phase = "RunCommand" /\ Lost = {} /\ ~halfway /\ node[self] \in marked
               /\ node[self] \in safe \/ Has("evictsNow")
               /\ Spares # {} \/ Has("suicidal")
               /\ black' = (black \cup {node[self]})
               /\ marked' = marked \ {node[self]}
               /\ safe' = safe \ {node[self]}
               /\ IF Has("evictionCounts")
                     THEN /\ retries' = [w \in Workers |-> IF w \in ({self}) THEN Charge(retries[w]) ELSE retries[w]]
                          /\ count' = Min(Largest(retries'), MaxRetry)
                          /\ charged' = {self}
                          /\ overcounted' = (overcounted \/ ~hit)
                          /\ hit' = FALSE
                     ELSE /\ TRUE
                          /\ UNCHANGED << count, retries, charged, hit, 
                                          overcounted >>
               /\ entries' = 0
               /\ phase' = "Troubleshooting"
               /\ verdict' = All("none")
               /\ saving' = FALSE
               /\ died' = All(FALSE)
               /\ node' = [node EXCEPT ![self] = None]
               /\ UNCHANGED << view, up, halfway, overtaken >>

Refund == /\ May("refund") /\ (Leads \/ (Has("refundsTheDead") /\ up /\ phase = "Failed")) /\ phase # "RunCommand"
          /\ charged # {} \/ (Has("refundsTwice") /\ count > 0 /\ phase = "Troubleshooting")
          /\ retries' = [w \in Workers |-> IF (charged = {} \/ w \in charged) /\ retries[w] > 0 THEN retries[w] - 1 ELSE retries[w]]
          /\ count' = Min(Largest(retries'), MaxRetry)
          /\ charged' = {}
          /\ UNCHANGED << phase, entries, black, node, died, marked, safe, 
                          saving, view, up, verdict, halfway, overtaken, hit, 
                          overcounted >>

Crash == /\ Leads
         /\ up' = FALSE
         /\ verdict' = All("none")
         /\ halfway' = FALSE
         /\ overtaken' = (May("late") /\ phase = "RunCommand" /\ Lost # {})
         /\ black' = IF Has("forgetsBlack") THEN {} ELSE black
         /\ UNCHANGED << phase, count, retries, entries, charged, node, died, 
                         marked, safe, saving, view, hit, overcounted >>

Takeover == /\ ~up
            /\ up' = TRUE
            /\ UNCHANGED << phase, count, retries, entries, charged, black, 
                            node, died, marked, safe, saving, view, verdict, 
                            halfway, overtaken, hit, overcounted >>

Sync == /\ Alive /\ view # black
        /\ view' = black
        /\ UNCHANGED << phase, count, retries, entries, charged, black, node, 
                        died, marked, safe, saving, up, verdict, halfway, 
                        overtaken, hit, overcounted >>

Place(self) == /\ Alive /\ phase = "Troubleshooting" /\ node[self] = None
               /\ \E n \in Nodes \ (view \cup Taken):
                    /\ node' = [node EXCEPT ![self] = n]
                    /\ IF Has("markOfWorker")
                          THEN /\ marked' = (marked \cup {n})
                          ELSE /\ TRUE
                               /\ UNCHANGED marked
               /\ UNCHANGED << phase, count, retries, entries, charged, black, 
                               died, safe, saving, view, up, verdict, halfway, 
                               overtaken, hit, overcounted >>

Check(self) == /\ Alive /\ phase = "Troubleshooting" /\ node[self] # None /\ ~died[self] /\ verdict[self] = "none"
               /\ \/ /\ verdict' = [verdict EXCEPT ![self] = "ok"]
                  \/ /\ verdict' = [verdict EXCEPT ![self] = "hardware"]
               /\ UNCHANGED << phase, count, retries, entries, charged, black, 
                               node, died, marked, safe, saving, view, up, 
                               halfway, overtaken, hit, overcounted >>

Observe(self) == /\ May("slow") /\ Alive /\ phase = "RunCommand" /\ node[self] \notin marked
                 /\ marked' = (marked \cup {node[self]})
                 /\ UNCHANGED << phase, count, retries, entries, charged, 
                                 black, node, died, safe, saving, view, up, 
                                 verdict, halfway, overtaken, hit, overcounted >>

SaveBegins == /\ May("slow") /\ Alive /\ phase = "RunCommand" /\ Lost = {} /\ ~saving
              /\ saving' = TRUE
              /\ UNCHANGED << phase, count, retries, entries, charged, black, 
                              node, died, marked, safe, view, up, verdict, 
                              halfway, overtaken, hit, overcounted >>

SaveCompletes == /\ Alive /\ phase = "RunCommand" /\ saving /\ Lost = {}
                 /\ saving' = FALSE
                 /\ safe' = marked
                 /\ UNCHANGED << phase, count, retries, entries, charged, 
                                 black, node, died, marked, view, up, verdict, 
                                 halfway, overtaken, hit, overcounted >>

Die(self) == /\ Alive /\ node[self] # None /\ ~died[self]
             /\ died' = [died EXCEPT ![self] = TRUE]
             /\ hit' = (hit \/ phase = "RunCommand")
             /\ UNCHANGED << phase, count, retries, entries, charged, black, 
                             node, marked, safe, saving, view, up, verdict, 
                             halfway, overtaken, overcounted >>

Done == /\ Leads /\ phase = "RunCommand" /\ Lost = {} /\ ~halfway
        /\ phase' = "Succeed"
        /\ UNCHANGED << count, retries, entries, charged, black, node, died, 
                        marked, safe, saving, view, up, verdict, halfway, 
                        overtaken, hit, overcounted >>

Next == CountLoss \/ SecondWrite \/ LateWrite \/ LossAgain \/ BootChecked
           \/ Resume \/ GiveUp \/ Refund \/ Crash \/ Takeover \/ Sync
           \/ SaveBegins \/ SaveCompletes \/ Done
           \/ (\E self \in Workers: Isolate(self))
           \/ (\E self \in Workers: Evict(self))
           \/ (\E self \in Workers: Place(self))
           \/ (\E self \in Workers: Check(self))
           \/ (\E self \in Workers: Observe(self))
           \/ (\E self \in Workers: Die(self))

Spec == /\ Init /\ [][Next]_vars
        /\ WF_vars(CountLoss)
        /\ WF_vars(SecondWrite)
        /\ WF_vars(LossAgain)
        /\ WF_vars(BootChecked)
        /\ \A self \in Workers : WF_vars(Isolate(self))
        /\ WF_vars(Resume)
        /\ WF_vars(GiveUp)
        /\ WF_vars(Takeover)
        /\ WF_vars(Sync)
        /\ \A self \in Workers : WF_vars(Place(self))
        /\ \A self \in Workers : WF_vars(Check(self))

\* END TRANSLATION - the hash of the generated TLA code (remove to silence divergence warnings): TLA-4b7c88bfa770520130e591a4129ca0eb

ValidPhase        == phase \in {"BootChecking", "RunCommand", "Troubleshooting"} \cup Terminal
RecoverCountBound == count \in 0..MaxRetry
RetriesBound      == \A w \in Workers : retries[w] \in 0..(MaxRetry + 1)
RecoveryBounded   == entries \in 0..Budget
ExactlyOnce       == ~overcounted
NeverRunOnBlack   == phase = "RunCommand" => Taken \cap black = {}
NeverRunsShort    == phase = "RunCommand" => None \notin Taken
OneWorkerPerNode  == \A v, w \in Workers : (v # w /\ node[v] # None) => node[v] # node[w]
FailedHasReason   == phase = "Failed" => (Exceeded \/ entries = Budget \/ Spares = {})

CountsDurable     == [][(count' < count => Refund) /\ black \subseteq black']_vars
TerminalAbsorbing == [][~Alive => UNCHANGED <<phase, count, retries, black>>]_vars
NoEarlyEvict      == [][\A w \in Workers : Evict(w) => node[w] \in safe]_vars
NoSuicidalEvict   == [][\A w \in Workers : Evict(w) => Spares # {}]_vars
EvictionIsFree    == [][\A w \in Workers : Evict(w) => UNCHANGED <<count, retries>>]_vars
MarkIsOfNode      == [][\A n \in marked' \ marked : \E w \in Workers : Observe(w) /\ node[w] = n]_vars
RefundOnce        == [][Refund => (charged # {} /\ Alive)]_vars

Steady       == <>[][~Crash /\ ~Refund]_vars
RecoveryEnds == Steady => ((phase = "Troubleshooting") ~> (phase # "Troubleshooting"))
LossIsSeen   == Steady => ((phase = "RunCommand" /\ Lost # {}) ~> (phase # "RunCommand"))

Witness == << <<"RunCommand", phase = "RunCommand">>, <<"Troubleshooting", phase = "Troubleshooting">>,
              <<"Succeed", phase = "Succeed">>, <<"Failed by the limit", phase = "Failed" /\ Exceeded>>,
              <<"Failed by the budget", phase = "Failed" /\ ~Exceeded /\ Spares # {}>>,
              <<"Failed for want of a node", phase = "Failed" /\ Spares = {}>>,
              <<"ran on after an isolation", phase = "RunCommand" /\ black # {}>>,
              <<"a placement on a black node", phase = "Troubleshooting" /\ Taken \cap black # {}>>,
              <<"marked, and the checkpoint completed", phase = "RunCommand" /\ Taken \cap safe # {}>>,
              <<"marked nodes in two places", Cardinality(marked) > 1>>,
              <<"a master away while somebody is lost", ~up /\ phase = "RunCommand" /\ Lost # {}>>,
              <<"a late write", overtaken /\ phase = "Troubleshooting">>,
              <<"a charge given back", phase = "Troubleshooting" /\ entries = 1 /\ charged = {}>> >>
ASSUME \A i \in 1..40 : TLCSet(i, FALSE)
Reached == \A i \in 1..Len(Witness) : (Witness[i][2] /\ ~TLCGet(i)) => TLCSet(i, TRUE) /\ PrintT(<<"witness", Witness[i][1]>>)
\* violated as soon as everything has been reached, which ends the search
Unreached == \E i \in 1..Len(Witness) : ~TLCGet(i)
=============================================================================
