------------------------------ MODULE Messages ------------------------------
(* What messages can do to the phase machine: they are lost, doubled, late, out of order, and some of them  *)
(* come from agents that are dead by now.                                                                   *)
(*                                                                                                          *)
(* Sequence numbers grow without bound, yet the model is finite: an order is kept only as "the current one" *)
(* or not, and so is a message. That forgets nothing, because numbers are never used twice: what is stale   *)
(* stays stale, and the machine answers it by changing nothing, so it may as well be dropped from the net.  *)
(* (`proof` checks that very fact of the production `step` in every state it visits.) Where a defect makes  *)
(* the master accept by something that comes back, such as a phase's label, messages are kept for good.     *)
(*                                                                                                          *)
(* A message is never consumed: delivering it again is a duplicate, never delivering it is a loss. Orders   *)
(* are repeated by the master and reports by the workers until acknowledged, so fairness is per worker.     *)
EXTENDS Naturals, Sequences, FiniteSets, TLC
CONSTANTS Workers, MaxRetry, Defects

Booting    == {"Pending", "BootChecking"}
Recovering == {"Restarting", "Troubleshooting"}
Terminal   == {"Succeed", "Failed"}
Phases     == Booting \cup {"RunCommand"} \cup Recovering \cup Terminal
\* the label that goes over the wire with every message
Label(p)   == CASE p \in Booting -> "bootcheck" [] p \in Recovering -> "troubleshoot" [] OTHER -> "command"
Onward(p)  == CASE p = "Pending" -> "BootChecking" [] p = "RunCommand" -> "Succeed" [] OTHER -> "RunCommand"
Has(d)     == d \in Defects
Symmetric  == Permutations(Workers)
Min(a, b)  == IF a < b THEN a ELSE b
Largest(f) == CHOOSE n \in {f[w] : w \in Workers} : \A w \in Workers : f[w] <= n
All(x)     == [w \in Workers |-> x]

(* --algorithm Messages {
variables
  \* the master's durable record
  phase = "Pending"; recoverCount = 0;
  inner = All("Pending"); finished = All(FALSE); retries = All(0); restarted = All(FALSE); failed = All(FALSE);
  \* the workers as they are
  order  = All("none");      \* "current" once it follows the newest order
  known  = All(TRUE);        \* the master knows this life of the agent
  did    = All(FALSE);       \* it really has done what the newest order asks
  broken = All(FALSE);       \* its ranks really have failed
  label  = All("none");      \* the label of the order that it follows
  \* the network
  net = {}; missed = {};
  \* ghosts: what has really happened, to compare the accounts with
  hit = FALSE;               \* something failed in this incarnation, and has not been counted
  overcounted = FALSE; accepted = All(FALSE); twice = FALSE;
define {
  Alive    == phase \notin Terminal
  Lost     == {w \in Workers : restarted[w]}
  Finished == \A w \in Workers : finished[w]
  Exceeded == \E w \in Workers : retries[w] > MaxRetry
  Charge(n) == Min(n + 1, MaxRetry + 1)
  ByLabel  == Has("byLabel")
  Message(t, w) == [type |-> t, worker |-> w, label |-> IF ByLabel THEN label[w] ELSE "-"]
  \* what the master takes for a message of the newest order
  Fresh(m) == IF ByLabel THEN m.label = Label(phase)
              ELSE m.label # "stale" /\ (m.label = "early" => phase = "Pending")
  \* a Finish without any order's number
  Early(w) == [type |-> "Finish", worker |-> w, label |-> "early"]
  Following(w) == order[w] = "current" /\ known[w]
}
\* A new order: nobody follows it yet, and whatever is under way is stale.
macro Bump() {
  order    := All("none");
  net      := CASE ByLabel -> net
                [] Has("anyPendingFinish") -> {m \in net : m.label = "early"}
                [] Has("staleCounts") -> {[m EXCEPT !.label = "stale"] : m \in net}
                [] OTHER -> {};
  accepted := All(FALSE);
  missed   := {};
}
\* "noBump": a reset does without a new order, so those who follow the old one go on
macro BumpAtReset() {
  if (~Has("noBump")) { Bump(); } else { accepted := accepted; };
}
macro Enter(p) {
  inner := All(p); finished := All(FALSE); restarted := All(FALSE); failed := All(FALSE); did := All(FALSE);
  Bump();
  phase := p;
}
macro Close(p) { inner := All(p); phase := p; order := All("none"); net := {}; missed := {}; }
macro Count() { overcounted := overcounted \/ ~hit; hit := FALSE; }
\* only the lost begin anew; for them, nothing that an earlier life did counts
macro ResetLost(p) {
  inner     := [w \in Workers |-> IF w \in Lost THEN p ELSE inner[w]];
  finished  := [w \in Workers |-> finished[w] /\ w \notin Lost];
  did       := [w \in Workers |-> did[w] /\ w \notin Lost];
  failed    := All(FALSE);
  restarted := All(FALSE);
  BumpAtReset();
}

\* ---- the master ----
fair process (LostRunning = "lost while running") {
LR: while (TRUE) {
    await phase = "RunCommand" /\ Lost # {};
    retries := [w \in Workers |-> IF w \in Lost THEN Charge(retries[w]) ELSE retries[w]];
    recoverCount := Min(Largest(retries), MaxRetry);
    Count();
    ResetLost("Restarting");
    phase := "Restarting";
  }
}
fair process (LostBooting = "lost while booting") {
LB: while (TRUE) {
    await phase \in Booting /\ Lost # {};
    inner     := All("Pending");
    finished  := [w \in Workers |-> w \notin Lost /\ (phase = "BootChecking" \/ finished[w])];
    did       := [w \in Workers |-> w \notin Lost /\ (phase = "BootChecking" \/ did[w])];
    restarted := All(FALSE);
    BumpAtReset();
    phase     := "Pending";
  }
}
fair process (LostRecovering = "lost while recovering") {
LC: while (TRUE) {
    await phase \in Recovering /\ Lost # {};
    ResetLost("Restarting");
    phase := "Restarting";
  }
}
fair process (OverLimit = "exceeded") {
X: while (TRUE) { await phase = "Troubleshooting" /\ Finished /\ Exceeded /\ Lost = {}; Close("Failed"); }
}
fair process (ErrorNoted = "error") {
E: while (TRUE) {
    await phase = "RunCommand" /\ Lost = {} /\ \E w \in Workers : failed[w];
    retries := [w \in Workers |-> IF failed[w] THEN Charge(retries[w]) ELSE retries[w]];
    recoverCount := Min(Largest(retries), MaxRetry);
    Count();
    Enter("Troubleshooting");
  }
}
fair process (Ready = "ready") {
R: while (TRUE) {
    await phase = "Restarting" /\ Lost = {} /\ \A w \in Workers : inner[w] = "Restarting" => finished[w];
    Enter("Troubleshooting");
  }
}
fair process (Advance = "advance") {
A: while (TRUE) {
    await phase \in Booting \cup {"RunCommand", "Troubleshooting"} /\ Finished /\ Lost = {};
    await (\A w \in Workers : ~failed[w]) /\ ~(phase = "Troubleshooting" /\ Exceeded);
    if (phase = "RunCommand") { Close("Succeed"); }
    else {
      if (Onward(phase) = "RunCommand") { retries := All(recoverCount); hit := \E w \in Workers : ~known[w]; };
      broken := All(FALSE);
      Enter(Onward(phase));
    }
  }
}
\* The master takes a message; which one and when, nobody knows.
fair process (Deliver \in Workers) {
D: while (TRUE) {
    await Alive;
    with (m \in {m \in net : m.worker = self}) {
      either {
        await m.type = "Finish" /\ Fresh(m) /\ ~finished[self];
        finished[self] := TRUE;
        twice := twice \/ accepted[self];
        accepted[self] := TRUE;
      } or {
        await m.type = "Error" /\ Fresh(m) /\ phase = "RunCommand" /\ ~finished[self] /\ ~restarted[self];
        await \A w \in Workers : ~failed[w];
        failed[self] := TRUE;
      } or {
        \* the literal text: what doesn't fit counts as done
        await Has("staleCounts") /\ ~Fresh(m) /\ ~finished[self];
        finished[self] := TRUE;
      }
    }
  }
}

\* ---- the workers ----
fair process (Follow \in Workers) {
O: while (TRUE) {
    await Alive /\ known[self] /\ order[self] # "current" /\ self \notin missed;
    order[self] := "current";
    label[self] := IF ByLabel THEN Label(phase) ELSE "none";
    did[self]   := finished[self];
    broken[self] := FALSE;
  }
}
fair process (SendFinish \in Workers) {
F: while (TRUE) {
    await Alive /\ ~broken[self];
    either {
      await Following(self) /\ (Has("noResend") => ~did[self]) /\ (did[self] => Message("Finish", self) \notin net);
      did[self] := TRUE;
      net := net \cup {Message("Finish", self)};
    } or {
      \* an agent that follows an old order can't know it: its message carries the old order's label
      await ByLabel /\ known[self] /\ order[self] # "current" /\ label[self] # "none";
      await Message("Finish", self) \notin net;
      net := net \cup {Message("Finish", self)};
    } or {
      \* the seed's exception: in Pending a Finish counts before any order was received
      await Has("anyPendingFinish") /\ ~known[self] /\ phase = "Pending" /\ Early(self) \notin net;
      net := net \cup {Early(self)};
    }
  }
}
process (Break \in Workers) {
B: while (TRUE) {
    await Following(self) /\ phase = "RunCommand" /\ ~did[self] /\ ~broken[self];
    broken[self] := TRUE;
    hit := TRUE;
    net := net \cup {Message("Error", self)};
  }
}
process (Die \in Workers) {
T: while (TRUE) {
    await Alive /\ known[self];
    known[self] := FALSE;
    hit := hit \/ phase = "RunCommand";
    order[self] := "none" || label[self] := "none" || broken[self] := FALSE;
    did[self] := did[self] /\ phase = "RunCommand";   \* what its ranks had finished stays finished
  }
}
\* First contact of the next life. From now on the uid of the life before is not current.
fair process (Join \in Workers) {
J: while (TRUE) {
    await Alive /\ ~known[self];
    known[self] := TRUE;
    restarted[self] := restarted[self] \/ ~(phase = "RunCommand" /\ finished[self]);
    net := IF Has("noUid") \/ ByLabel \/ Has("anyPendingFinish") THEN net ELSE {m \in net : m.worker # self};
  }
}
\* ---- what a bus without repetition would do ----
process (LoseOrder \in Workers) {
L: while (TRUE) { await Has("noRepeat") /\ Alive /\ order[self] = "none" /\ self \notin missed; missed := missed \cup {self}; }
}
process (LoseReport \in Workers) {
M: while (TRUE) {
    await Has("noResend") /\ Alive /\ \E m \in net : m.worker = self;
    net := {m \in net : m.worker # self};
  }
}
} *)
\* BEGIN TRANSLATION - the hash of the PCal code: PCal-de4b6250e235c20831589002673d1b88
VARIABLES phase, recoverCount, inner, finished, retries, restarted, failed, 
          order, known, did, broken, label, net, missed, hit, overcounted, 
          accepted, twice

(* define statement *)
Alive    == phase \notin Terminal
Lost     == {w \in Workers : restarted[w]}
Finished == \A w \in Workers : finished[w]
Exceeded == \E w \in Workers : retries[w] > MaxRetry
Charge(n) == Min(n + 1, MaxRetry + 1)
ByLabel  == Has("byLabel")
Message(t, w) == [type |-> t, worker |-> w, label |-> IF ByLabel THEN label[w] ELSE "-"]

Fresh(m) == IF ByLabel THEN m.label = Label(phase)
            ELSE m.label # "stale" /\ (m.label = "early" => phase = "Pending")

Early(w) == [type |-> "Finish", worker |-> w, label |-> "early"]
Following(w) == order[w] = "current" /\ known[w]


vars == << phase, recoverCount, inner, finished, retries, restarted, failed, 
           order, known, did, broken, label, net, missed, hit, overcounted, 
           accepted, twice >>

ProcSet == {"lost while running"} \cup {"lost while booting"} \cup {"lost while recovering"} \cup {"exceeded"} \cup {"error"} \cup {"ready"} \cup {"advance"} \cup (Workers) \cup (Workers) \cup (Workers) \cup (Workers) \cup (Workers) \cup (Workers) \cup (Workers) \cup (Workers)

Init == (* Global variables *)
        /\ phase = "Pending"
        /\ recoverCount = 0
        /\ inner = All("Pending")
        /\ finished = All(FALSE)
        /\ retries = All(0)
        /\ restarted = All(FALSE)
        /\ failed = All(FALSE)
        /\ order = All("none")
        /\ known = All(TRUE)
        /\ did = All(FALSE)
        /\ broken = All(FALSE)
        /\ label = All("none")
        /\ net = {}
        /\ missed = {}
        /\ hit = FALSE
        /\ overcounted = FALSE
        /\ accepted = All(FALSE)
        /\ twice = FALSE

LostRunning == /\ phase = "RunCommand" /\ Lost # {}
               /\ retries' = [w \in Workers |-> IF w \in Lost THEN Charge(retries[w]) ELSE retries[w]]
               /\ recoverCount' = Min(Largest(retries'), MaxRetry)
               /\ overcounted' = (overcounted \/ ~hit)
               /\ hit' = FALSE
               /\ inner' = [w \in Workers |-> IF w \in Lost THEN "Restarting" ELSE inner[w]]
               /\ finished' = [w \in Workers |-> finished[w] /\ w \notin Lost]
               /\ did' = [w \in Workers |-> did[w] /\ w \notin Lost]
               /\ failed' = All(FALSE)
               /\ restarted' = All(FALSE)
               /\ IF ~Has("noBump")
                     THEN /\ order' = All("none")
                          /\ net' = (CASE ByLabel -> net
                                       [] Has("anyPendingFinish") -> {m \in net : m.label = "early"}
                                       [] Has("staleCounts") -> {[m EXCEPT !.label = "stale"] : m \in net}
                                       [] OTHER -> {})
                          /\ accepted' = All(FALSE)
                          /\ missed' = {}
                     ELSE /\ accepted' = accepted
                          /\ UNCHANGED << order, net, missed >>
               /\ phase' = "Restarting"
               /\ UNCHANGED << known, broken, label, twice >>

LostBooting == /\ phase \in Booting /\ Lost # {}
               /\ inner' = All("Pending")
               /\ finished' = [w \in Workers |-> w \notin Lost /\ (phase = "BootChecking" \/ finished[w])]
               /\ did' = [w \in Workers |-> w \notin Lost /\ (phase = "BootChecking" \/ did[w])]
               /\ restarted' = All(FALSE)
               /\ IF ~Has("noBump")
                     THEN /\ order' = All("none")
                          /\ net' = (CASE ByLabel -> net
                                       [] Has("anyPendingFinish") -> {m \in net : m.label = "early"}
                                       [] Has("staleCounts") -> {[m EXCEPT !.label = "stale"] : m \in net}
                                       [] OTHER -> {})
                          /\ accepted' = All(FALSE)
                          /\ missed' = {}
                     ELSE /\ accepted' = accepted
                          /\ UNCHANGED << order, net, missed >>
               /\ phase' = "Pending"
               /\ UNCHANGED << recoverCount, retries, failed, known, broken, 
                               label, hit, overcounted, twice >>

LostRecovering == /\ phase \in Recovering /\ Lost # {}
                  /\ inner' = [w \in Workers |-> IF w \in Lost THEN "Restarting" ELSE inner[w]]
                  /\ finished' = [w \in Workers |-> finished[w] /\ w \notin Lost]
                  /\ did' = [w \in Workers |-> did[w] /\ w \notin Lost]
                  /\ failed' = All(FALSE)
                  /\ restarted' = All(FALSE)
                  /\ IF ~Has("noBump")
                        THEN /\ order' = All("none")
                             /\ net' = (CASE ByLabel -> net
                                          [] Has("anyPendingFinish") -> {m \in net : m.label = "early"}
                                          [] Has("staleCounts") -> {[m EXCEPT !.label = "stale"] : m \in net}
                                          [] OTHER -> {})
                             /\ accepted' = All(FALSE)
                             /\ missed' = {}
                        ELSE /\ accepted' = accepted
                             /\ UNCHANGED << order, net, missed >>
                  /\ phase' = "Restarting"
                  /\ UNCHANGED << recoverCount, retries, known, broken, label, 
                                  hit, overcounted, twice >>

OverLimit == /\ phase = "Troubleshooting" /\ Finished /\ Exceeded /\ Lost = {}
             /\ inner' = All("Failed")
             /\ phase' = "Failed"
             /\ order' = All("none")
             /\ net' = {}
             /\ missed' = {}
             /\ UNCHANGED << recoverCount, finished, retries, restarted, 
                             failed, known, did, broken, label, hit, 
                             overcounted, accepted, twice >>

ErrorNoted == /\ phase = "RunCommand" /\ Lost = {} /\ \E w \in Workers : failed[w]
              /\ retries' = [w \in Workers |-> IF failed[w] THEN Charge(retries[w]) ELSE retries[w]]
              /\ recoverCount' = Min(Largest(retries'), MaxRetry)
              /\ overcounted' = (overcounted \/ ~hit)
              /\ hit' = FALSE
              /\ inner' = All("Troubleshooting")
              /\ finished' = All(FALSE)
              /\ restarted' = All(FALSE)
              /\ failed' = All(FALSE)
              /\ did' = All(FALSE)
              /\ order' = All("none")
              /\ net' = (CASE ByLabel -> net
                           [] Has("anyPendingFinish") -> {m \in net : m.label = "early"}
                           [] Has("staleCounts") -> {[m EXCEPT !.label = "stale"] : m \in net}
                           [] OTHER -> {})
              /\ accepted' = All(FALSE)
              /\ missed' = {}
              /\ phase' = "Troubleshooting"
              /\ UNCHANGED << known, broken, label, twice >>

Ready == /\ phase = "Restarting" /\ Lost = {} /\ \A w \in Workers : inner[w] = "Restarting" => finished[w]
         /\ inner' = All("Troubleshooting")
         /\ finished' = All(FALSE)
         /\ restarted' = All(FALSE)
         /\ failed' = All(FALSE)
         /\ did' = All(FALSE)
         /\ order' = All("none")
         /\ net' = (CASE ByLabel -> net
                      [] Has("anyPendingFinish") -> {m \in net : m.label = "early"}
                      [] Has("staleCounts") -> {[m EXCEPT !.label = "stale"] : m \in net}
                      [] OTHER -> {})
         /\ accepted' = All(FALSE)
         /\ missed' = {}
         /\ phase' = "Troubleshooting"
         /\ UNCHANGED << recoverCount, retries, known, broken, label, hit, 
                         overcounted, twice >>

Advance == /\ phase \in Booting \cup {"RunCommand", "Troubleshooting"} /\ Finished /\ Lost = {}
           /\ (\A w \in Workers : ~failed[w]) /\ ~(phase = "Troubleshooting" /\ Exceeded)
           /\ IF phase = "RunCommand"
                 THEN /\ inner' = All("Succeed")
                      /\ phase' = "Succeed"
                      /\ order' = All("none")
                      /\ net' = {}
                      /\ missed' = {}
                      /\ UNCHANGED << finished, retries, restarted, failed, 
                                      did, broken, hit, accepted >>
                 ELSE /\ IF Onward(phase) = "RunCommand"
                            THEN /\ retries' = All(recoverCount)
                                 /\ hit' = (\E w \in Workers : ~known[w])
                            ELSE /\ TRUE
                                 /\ UNCHANGED << retries, hit >>
                      /\ broken' = All(FALSE)
                      /\ inner' = All((Onward(phase)))
                      /\ finished' = All(FALSE)
                      /\ restarted' = All(FALSE)
                      /\ failed' = All(FALSE)
                      /\ did' = All(FALSE)
                      /\ order' = All("none")
                      /\ net' = (CASE ByLabel -> net
                                   [] Has("anyPendingFinish") -> {m \in net : m.label = "early"}
                                   [] Has("staleCounts") -> {[m EXCEPT !.label = "stale"] : m \in net}
                                   [] OTHER -> {})
                      /\ accepted' = All(FALSE)
                      /\ missed' = {}
                      /\ phase' = Onward(phase)
           /\ UNCHANGED << recoverCount, known, label, overcounted, twice >>

Deliver(self) == /\ Alive
                 /\ \E m \in {m \in net : m.worker = self}:
                      \/ /\ m.type = "Finish" /\ Fresh(m) /\ ~finished[self]
                         /\ finished' = [finished EXCEPT ![self] = TRUE]
                         /\ twice' = (twice \/ accepted[self])
                         /\ accepted' = [accepted EXCEPT ![self] = TRUE]
                         /\ UNCHANGED failed
                      \/ /\ m.type = "Error" /\ Fresh(m) /\ phase = "RunCommand" /\ ~finished[self] /\ ~restarted[self]
                         /\ \A w \in Workers : ~failed[w]
                         /\ failed' = [failed EXCEPT ![self] = TRUE]
                         /\ UNCHANGED <<finished, accepted, twice>>
                      \/ /\ Has("staleCounts") /\ ~Fresh(m) /\ ~finished[self]
                         /\ finished' = [finished EXCEPT ![self] = TRUE]
                         /\ UNCHANGED <<failed, accepted, twice>>
                 /\ UNCHANGED << phase, recoverCount, inner, retries, 
                                 restarted, order, known, did, broken, label, 
                                 net, missed, hit, overcounted >>

Follow(self) == /\ Alive /\ known[self] /\ order[self] # "current" /\ self \notin missed
                /\ order' = [order EXCEPT ![self] = "current"]
                /\ label' = [label EXCEPT ![self] = IF ByLabel THEN Label(phase) ELSE "none"]
                /\ did' = [did EXCEPT ![self] = finished[self]]
                /\ broken' = [broken EXCEPT ![self] = FALSE]
                /\ UNCHANGED << phase, recoverCount, inner, finished, retries, 
                                restarted, failed, known, net, missed, hit, 
                                overcounted, accepted, twice >>

SendFinish(self) == /\ Alive /\ ~broken[self]
                    /\ \/ /\ Following(self) /\ (Has("noResend") => ~did[self]) /\ (did[self] => Message("Finish", self) \notin net)
                          /\ did' = [did EXCEPT ![self] = TRUE]
                          /\ net' = (net \cup {Message("Finish", self)})
                       \/ /\ ByLabel /\ known[self] /\ order[self] # "current" /\ label[self] # "none"
                          /\ Message("Finish", self) \notin net
                          /\ net' = (net \cup {Message("Finish", self)})
                          /\ did' = did
                       \/ /\ Has("anyPendingFinish") /\ ~known[self] /\ phase = "Pending" /\ Early(self) \notin net
                          /\ net' = (net \cup {Early(self)})
                          /\ did' = did
                    /\ UNCHANGED << phase, recoverCount, inner, finished, 
                                    retries, restarted, failed, order, known, 
                                    broken, label, missed, hit, overcounted, 
                                    accepted, twice >>

Break(self) == /\ Following(self) /\ phase = "RunCommand" /\ ~did[self] /\ ~broken[self]
               /\ broken' = [broken EXCEPT ![self] = TRUE]
               /\ hit' = TRUE
               /\ net' = (net \cup {Message("Error", self)})
               /\ UNCHANGED << phase, recoverCount, inner, finished, retries, 
                               restarted, failed, order, known, did, label, 
                               missed, overcounted, accepted, twice >>

Die(self) == /\ Alive /\ known[self]
             /\ known' = [known EXCEPT ![self] = FALSE]
             /\ hit' = (hit \/ phase = "RunCommand")
             /\ /\ broken' = [broken EXCEPT ![self] = FALSE]
                /\ label' = [label EXCEPT ![self] = "none"]
                /\ order' = [order EXCEPT ![self] = "none"]
             /\ did' = [did EXCEPT ![self] = did[self] /\ phase = "RunCommand"]
             /\ UNCHANGED << phase, recoverCount, inner, finished, retries, 
                             restarted, failed, net, missed, overcounted, 
                             accepted, twice >>

Join(self) == /\ Alive /\ ~known[self]
              /\ known' = [known EXCEPT ![self] = TRUE]
              /\ restarted' = [restarted EXCEPT ![self] = restarted[self] \/ ~(phase = "RunCommand" /\ finished[self])]
              /\ net' = (IF Has("noUid") \/ ByLabel \/ Has("anyPendingFinish") THEN net ELSE {m \in net : m.worker # self})
              /\ UNCHANGED << phase, recoverCount, inner, finished, retries, 
                              failed, order, did, broken, label, missed, hit, 
                              overcounted, accepted, twice >>

LoseOrder(self) == /\ Has("noRepeat") /\ Alive /\ order[self] = "none" /\ self \notin missed
                   /\ missed' = (missed \cup {self})
                   /\ UNCHANGED << phase, recoverCount, inner, finished, 
                                   retries, restarted, failed, order, known, 
                                   did, broken, label, net, hit, overcounted, 
                                   accepted, twice >>

LoseReport(self) == /\ Has("noResend") /\ Alive /\ \E m \in net : m.worker = self
                    /\ net' = {m \in net : m.worker # self}
                    /\ UNCHANGED << phase, recoverCount, inner, finished, 
                                    retries, restarted, failed, order, known, 
                                    did, broken, label, missed, hit, 
                                    overcounted, accepted, twice >>

Next == LostRunning \/ LostBooting \/ LostRecovering \/ OverLimit
           \/ ErrorNoted \/ Ready \/ Advance
           \/ (\E self \in Workers: Deliver(self))
           \/ (\E self \in Workers: Follow(self))
           \/ (\E self \in Workers: SendFinish(self))
           \/ (\E self \in Workers: Break(self))
           \/ (\E self \in Workers: Die(self))
           \/ (\E self \in Workers: Join(self))
           \/ (\E self \in Workers: LoseOrder(self))
           \/ (\E self \in Workers: LoseReport(self))

Spec == /\ Init /\ [][Next]_vars
        /\ WF_vars(LostRunning)
        /\ WF_vars(LostBooting)
        /\ WF_vars(LostRecovering)
        /\ WF_vars(OverLimit)
        /\ WF_vars(ErrorNoted)
        /\ WF_vars(Ready)
        /\ WF_vars(Advance)
        /\ \A self \in Workers : WF_vars(Deliver(self))
        /\ \A self \in Workers : WF_vars(Follow(self))
        /\ \A self \in Workers : WF_vars(SendFinish(self))
        /\ \A self \in Workers : WF_vars(Join(self))

\* END TRANSLATION - the hash of the generated TLA code (remove to silence divergence warnings): TLA-b0c398c9cfb621fba9d4098397e7f9b5

\* ---- the seed's invariants ----
ValidPhase        == phase \in Phases
ValidInnerPhase   == \A w \in Workers : inner[w] \in Phases
RecoverCountBound == recoverCount \in 0..MaxRetry
RetriesBound      == \A w \in Workers : retries[w] \in 0..(MaxRetry + 1)
MayLag(p)         == IF p = "Restarting" THEN {"Restarting", "RunCommand", "Troubleshooting"} ELSE {p}
PhaseConsistency  == \A w \in Workers : ~finished[w] => inner[w] \in MayLag(phase)
NoFinishDoubleProcessed == ~twice
\* a finished worker really has done what the newest order asked, in this life: nothing stale was taken for it
StaleFinishRejected == \A w \in Workers : (Alive /\ finished[w] /\ known[w] /\ ~restarted[w]) => did[w]
\* nobody is ahead of the master: what is current was sent by one who follows the newest order, or has died since
WorkerSeqNumBound == \A m \in net : (~ByLabel /\ m.label = "-") => (order[m.worker] = "current" \/ ~known[m.worker])
\* every phase and every reset takes a new order: nobody follows it yet
MasterSeqNumMonotonic == [][(phase' # phase \/ \E w \in Workers : finished[w] /\ ~finished'[w]) =>
                             \A w \in Workers : order'[w] = "none"]_vars

\* ---- and more ----
ExactlyOnce       == ~overcounted   \* every count stands for a failure that happened in its incarnation
NoFailureForgotten == phase = "Succeed" => \A w \in Workers : ~broken[w]
Aligned           == phase = "RunCommand" => \A w \in Workers : retries[w] = recoverCount
FailedHasReason   == phase = "Failed" => Exceeded
CountsDurable     == [][recoverCount' >= recoverCount]_vars

Calm          == <>[][~\E w \in Workers : Break(w) \/ Die(w)]_vars
JobEnds       == Calm => <>(~Alive)
RecoveryEnds  == Calm => ((phase \in Recovering) ~> (phase = "RunCommand" \/ ~Alive))
NoLostFailure == \A w \in Workers : (phase = "RunCommand" /\ broken[w]) ~> (phase # "RunCommand" \/ ~broken[w])

Witness == << <<"Pending", phase = "Pending">>, <<"BootChecking", phase = "BootChecking">>,
              <<"RunCommand", phase = "RunCommand">>, <<"Restarting", phase = "Restarting">>,
              <<"Troubleshooting", phase = "Troubleshooting">>, <<"Succeed", phase = "Succeed">>,
              <<"Failed", phase = "Failed">>, <<"Succeed with every retry used", phase = "Succeed" /\ recoverCount = MaxRetry>>,
              <<"a dead agent's message", \E m \in net : ~known[m.worker]>>,
              <<"a doubled Finish", \E m \in net : m.type = "Finish" /\ finished[m.worker]>>,
              <<"an Error that comes too late", \E m \in net : m.type = "Error" /\ restarted[m.worker] /\ known[m.worker]>>,
              <<"two crashed", Cardinality({w \in Workers : broken[w]}) > 1>>,
              <<"an old order is followed no more", \E w \in Workers : order[w] = "none" /\ phase = "RunCommand">> >>
ASSUME \A i \in 1..40 : TLCSet(i, FALSE)
Reached == \A i \in 1..Len(Witness) : (Witness[i][2] /\ ~TLCGet(i)) => TLCSet(i, TRUE) /\ PrintT(<<"witness", Witness[i][1]>>)
\* violated as soon as everything has been reached, which ends the search
Unreached == \E i \in 1..Len(Witness) : ~TLCGet(i)
=============================================================================
