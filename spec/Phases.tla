------------------------------- MODULE Phases -------------------------------
(* The phase machine of a job, as its controller decides it: when it counts, when it waits, when it ends.   *)
(*                                                                                                          *)
(* One process stands for one rule of `aegis_elastic.core.machine.RULES` (in the same order: earlier rules  *)
(* win, so each rule's guard denies those before it), and one for each kind of event from outside. The      *)
(* variables are the fields of the production status on which these rules depend; `proof.worlds.shape` is   *)
(* the same list. `python -m proof` compares the two graphs, state by state and edge by edge.               *)
(*                                                                                                          *)
(* Environment events note facts on the worker they concern; only the controller changes the phase.         *)
(* Messages that aren't current change nothing, so they don't appear here: see Messages.tla.                *)
(*                                                                                                          *)
(* May says which of the rarer things can happen: "hold" (a dependency is down for everybody, and the charge *)
(* is given back), "renew" (level 2: a worker's agent executes itself again), "earn" (a checkpoint gives a   *)
(* retry back). Restarts of hung ranks are Errors here; evictions need nodes and spares: see Nodes.tla.      *)
(*                                                                                                          *)
(* Defects names known wrong readings that are switched on; {} is the specification. Every one of them has  *)
(* a config that must be violated, or the properties below would be worth little.                           *)
EXTENDS Naturals, Sequences, FiniteSets, TLC
CONSTANTS Workers, MaxRetry, Budget, May, Defects

Booting    == {"Pending", "BootChecking"}
Recovering == {"Restarting", "Troubleshooting"}
Terminal   == {"Succeed", "Failed"}
Phases     == Booting \cup {"RunCommand"} \cup Recovering \cup Terminal
Has(d)     == d \in Defects
Can(m)     == m \in May
Symmetric  == Permutations(Workers)
Min(a, b)  == IF a < b THEN a ELSE b
Largest(f) == CHOOSE n \in {f[w] : w \in Workers} : \A w \in Workers : f[w] <= n
All(x)     == [w \in Workers |-> x]
Onward(p)  == CASE p = "Pending" -> "BootChecking" [] p = "RunCommand" -> "Succeed" [] OTHER -> "RunCommand"

(* --algorithm Phases {
variables
  phase = "Pending"; quit = FALSE; recoverCount = 0; entries = 0;
  inner     = All("Pending");   \* where each worker stands
  finished  = All(FALSE);       \* it has done what the newest order asked
  retries   = All(0);           \* its account
  restarted = All(FALSE);       \* its agent was lost or replaced, and that has not been judged yet
  failed    = All(FALSE);       \* the first Error of this incarnation is its own
  renew     = All("no");        \* "wanted": its agent is to execute itself again; "away": it is doing so
  renewed   = FALSE;            \* that has been done in this recovery
  charged   = FALSE;            \* a failure of this incarnation stands in the accounts
  held      = "no";             \* "held": the recovery waits; "over": what it waited for is back, or was waited for too long
define {
  Alive    == phase \notin Terminal
  Lost     == {w \in Workers : restarted[w]}
  Finished == \A w \in Workers : finished[w]
  Exceeded == \E w \in Workers : retries[w] > MaxRetry
  Limit    == IF Has("capHides") THEN recoverCount > MaxRetry ELSE Exceeded
  Charge(n) == Min(n + 1, MaxRetry + 1)
  Count(f) == IF Has("noCountCap") THEN Largest(f) ELSE Min(Largest(f), MaxRetry)
  \* a worker whose ranks have finished is not missed
  Missed(w) == Has("doneIsMissed") \/ ~(phase = "RunCommand" /\ finished[w])
  EndCount == IF Exceeded /\ ~quit THEN MaxRetry + 1 ELSE recoverCount
  Tired    == entries >= Budget
  Owed     == held # "no" /\ charged
  Wanted   == {w \in Workers : renew[w] = "wanted"}
}
\* `phase` last: what is assigned before it may still be computed from the old one
macro Enter(p) {
  inner := All(p); finished := All(FALSE); restarted := All(FALSE); failed := All(FALSE); renew := All("no"); phase := p;
}
macro Close(p) {
  phase := p; inner := All(p); renew := All("no"); renewed := FALSE;
  charged := charged /\ Has("refundsTheDead"); held := IF Has("refundsTheDead") THEN held ELSE "no";
}
macro Forget() {
  finished  := [w \in Workers |-> finished[w] /\ w \notin Lost];
  failed    := All(FALSE);
  restarted := All(FALSE);
}
macro ToRestarting() {
  phase := "Restarting";
  inner := [w \in Workers |-> IF w \in Lost THEN "Restarting" ELSE inner[w]];
  renew := [w \in Workers |-> IF w \in Lost THEN "no" ELSE renew[w]];
}

\* ---- the controller ----
fair process (RuleQuit = "quit") {
Q: while (TRUE) {
    await Alive /\ quit /\ ~(Has("quitForgotten") /\ phase = "Troubleshooting");
    recoverCount := IF Has("quitIsExhaustion") THEN MaxRetry + 1 ELSE recoverCount;
    Close("Failed");
  }
}
fair process (RuleLostRunning = "lost while running") {
LR: while (TRUE) {
    await phase = "RunCommand" /\ Lost # {} /\ ~quit /\ ~(Has("lossOverlooked") /\ Finished);
    retries := [w \in Workers |-> IF w \in Lost THEN Charge(retries[w]) ELSE retries[w]];
    entries := entries + 1;
    if (Has("failAtOnce") /\ \E w \in Workers : retries[w] > MaxRetry) {
      recoverCount := MaxRetry + 1;
      Close("Failed");
    } else {
      charged := TRUE;
      recoverCount := IF Has("sumLosses") THEN Min(recoverCount + Cardinality(Lost), MaxRetry) ELSE Count(retries);
      ToRestarting();
    };
    Forget();
  }
}
fair process (RuleLostBooting = "lost while booting") {
LB: while (TRUE) {
    await phase \in Booting /\ Lost # {} /\ ~quit;
    if (Has("bootSkipped")) {
      ToRestarting();
      Forget();
    } else {
      \* whoever was already checking is ready; bootcheck begins again with all of them
      finished  := [w \in Workers |-> w \notin Lost /\ (phase = "BootChecking" \/ finished[w])];
      restarted := All(FALSE);
      failed    := All(FALSE);
      phase := "Pending";
      inner := All("Pending");
    }
  }
}
fair process (RuleLostRecovering = "lost while recovering") {
LC: while (TRUE) {
    await phase \in Recovering /\ Lost # {} /\ ~quit;
    if (Has("countInRecovery")) {
      retries := [w \in Workers |-> IF w \in Lost THEN Charge(retries[w]) ELSE retries[w]];
    };
    if (Tired /\ ~Has("noBudget")) {
      recoverCount := EndCount;
      Close("Failed");
    } else {
      entries := IF Has("noBudget") THEN entries ELSE entries + 1;
      ToRestarting();
    };
    Forget();
  }
}
fair process (RuleRefund = "refund") {
G: while (TRUE) {
    await (phase \in Recovering \/ (Has("refundsTheDead") /\ phase = "Failed")) /\ Owed /\ Lost = {} /\ ~quit;
    recoverCount := Largest(retries) - 1;
    retries := [w \in Workers |-> Min(retries[w], recoverCount)];
    charged := Has("refundsTwice") /\ recoverCount > 0;
  }
}
fair process (RuleRelease = "release") {
L: while (TRUE) {
    await phase \in Recovering /\ held = "over" /\ ~Owed /\ Lost = {} /\ ~quit;
    await phase = "Troubleshooting" => Finished;
    if (Tired /\ ~Has("holdsForEver")) {
      recoverCount := EndCount;
      Close("Failed");
    } else {
      entries := IF Has("holdsForEver") THEN entries ELSE entries + 1;
      held := "no";
      if (phase = "Troubleshooting") { Enter("Troubleshooting"); };
    }
  }
}
fair process (RuleExceeded = "exceeded") {
X: while (TRUE) {
    await phase = "Troubleshooting" /\ Finished /\ Limit /\ held = "no" /\ Lost = {} /\ ~quit /\ ~Has("noGuard");
    recoverCount := MaxRetry + 1;
    Close("Failed");
  }
}
fair process (RuleError = "error") {
E: while (TRUE) {
    await phase = "RunCommand" /\ (\E w \in Workers : failed[w]) /\ Lost = {} /\ ~quit;
    if (~Has("errorNotCounted")) {
      retries := [w \in Workers |-> IF failed[w] THEN Charge(retries[w]) ELSE retries[w]];
      recoverCount := Count(retries);
    };
    charged := TRUE;
    Enter("Troubleshooting");
  }
}
fair process (RuleRenew = "renew") {
N: while (TRUE) {
    await phase = "Troubleshooting" /\ Finished /\ Wanted # {} /\ ~Limit /\ held = "no" /\ Lost = {} /\ ~quit;
    if (renewed /\ ~Has("renewsTwice")) {
      renew := All("no");  \* a human is called, and training goes on with what there is
    } else if (Tired) {
      recoverCount := EndCount;
      Close("Failed");
    } else {
      entries  := entries + 1;
      renewed  := TRUE;
      inner    := [w \in Workers |-> IF w \in Wanted THEN "Restarting" ELSE inner[w]];
      finished := [w \in Workers |-> w \notin Wanted];
      renew    := [w \in Workers |-> IF w \in Wanted THEN "away" ELSE "no"];
      phase    := "Restarting";
    }
  }
}
fair process (RuleReady = "ready") {
R: while (TRUE) {
    await phase = "Restarting" /\ Lost = {} /\ ~quit /\ ~Owed /\ held # "over";
    await \A w \in Workers : (inner[w] = "Restarting" \/ Has("waitsForAll")) => finished[w];
    Enter("Troubleshooting");
  }
}
fair process (RuleAdvance = "advance") {
A: while (TRUE) {
    await phase \in Booting \cup {"RunCommand", "Troubleshooting"} /\ Finished /\ ~quit;
    await (Lost = {} \/ Has("lossOverlooked")) /\ \A w \in Workers : ~failed[w];
    await (phase = "Troubleshooting" /\ Limit) => Has("noGuard");
    await (held = "no" \/ Has("heldGoesOn")) /\ Wanted = {};
    if (phase = "RunCommand") {
      Close("Succeed");
    } else {
      if (Onward(phase) = "RunCommand") {
        entries := 0;
        renewed := FALSE;
        charged := FALSE;
        held    := "no";
        retries := IF Has("noAlign") THEN retries ELSE All(recoverCount);
      };
      Enter(Onward(phase));
    }
  }
}

\* ---- the environment ----
fair process (Finish \in Workers) {
F: while (TRUE) { await Alive /\ ~finished[self] /\ renew[self] # "away"; finished[self] := TRUE; }
}
process (FinishBroken \in Workers) {
B: while (TRUE) {
    await Can("renew") /\ phase = "Troubleshooting" /\ ~finished[self];
    finished[self] := TRUE;
    renew[self] := "wanted";
  }
}
process (Restart \in Workers) {
T: while (TRUE) {
    await (Alive \/ Has("resurrects")) /\ ((~restarted[self] /\ Missed(self)) \/ renew[self] # "no");
    if (renew[self] # "away") { restarted[self] := TRUE; };
    renew[self] := "no";  \* a clean process is there, whether it was wanted or not
    if (Has("resurrects") /\ ~Alive) { phase := "Restarting"; };
  }
}
process (Error \in Workers) {
O: while (TRUE) {
    await phase = "RunCommand" /\ ~finished[self] /\ ~restarted[self];
    await ~failed[self] /\ (Has("manyErrors") \/ \A w \in Workers : ~failed[w]);
    failed[self] := TRUE;
  }
}
process (Quit = "environment") {
U: while (TRUE) { await Alive /\ ~quit; quit := TRUE; }
}
process (Hold = "a dependency is down") {
H: while (TRUE) { await Can("hold") /\ phase \in Recovering /\ held = "no"; held := "held"; }
}
fair process (Release = "it is back, or it is too late") {
I: while (TRUE) { await Can("hold") /\ Alive /\ held = "held"; held := "over"; }
}
process (Saved = "a checkpoint") {
S: while (TRUE) {
    await Can("earn") /\ phase = "RunCommand" /\ recoverCount > 0;
    recoverCount := recoverCount - 1;
    retries := [w \in Workers |-> retries[w] - 1];
  }
}
} *)
\* BEGIN TRANSLATION - the hash of the PCal code: PCal-37bfbb48c5d7f067acba20abeaa24205
VARIABLES phase, quit, recoverCount, entries, inner, finished, retries, 
          restarted, failed, renew, renewed, charged, held

(* define statement *)
Alive    == phase \notin Terminal
Lost     == {w \in Workers : restarted[w]}
Finished == \A w \in Workers : finished[w]
Exceeded == \E w \in Workers : retries[w] > MaxRetry
Limit    == IF Has("capHides") THEN recoverCount > MaxRetry ELSE Exceeded
Charge(n) == Min(n + 1, MaxRetry + 1)
Count(f) == IF Has("noCountCap") THEN Largest(f) ELSE Min(Largest(f), MaxRetry)

Missed(w) == Has("doneIsMissed") \/ ~(phase = "RunCommand" /\ finished[w])
EndCount == IF Exceeded /\ ~quit THEN MaxRetry + 1 ELSE recoverCount
Tired    == entries >= Budget
Owed     == held # "no" /\ charged
Wanted   == {w \in Workers : renew[w] = "wanted"}


vars == << phase, quit, recoverCount, entries, inner, finished, retries, 
           restarted, failed, renew, renewed, charged, held >>

ProcSet == {"quit"} \cup {"lost while running"} \cup {"lost while booting"} \cup {"lost while recovering"} \cup {"refund"} \cup {"release"} \cup {"exceeded"} \cup {"error"} \cup {"renew"} \cup {"ready"} \cup {"advance"} \cup (Workers) \cup (Workers) \cup (Workers) \cup (Workers) \cup {"environment"} \cup {"a dependency is down"} \cup {"it is back, or it is too late"} \cup {"a checkpoint"}

Init == (* Global variables *)
        /\ phase = "Pending"
        /\ quit = FALSE
        /\ recoverCount = 0
        /\ entries = 0
        /\ inner = All("Pending")
        /\ finished = All(FALSE)
        /\ retries = All(0)
        /\ restarted = All(FALSE)
        /\ failed = All(FALSE)
        /\ renew = All("no")
        /\ renewed = FALSE
        /\ charged = FALSE
        /\ held = "no"

RuleQuit == /\ Alive /\ quit /\ ~(Has("quitForgotten") /\ phase = "Troubleshooting")
            /\ recoverCount' = IF Has("quitIsExhaustion") THEN MaxRetry + 1 ELSE recoverCount
            /\ phase' = "Failed"
            /\ inner' = All("Failed")
            /\ renew' = All("no")
            /\ renewed' = FALSE
            /\ charged' = (charged /\ Has("refundsTheDead"))
            /\ held' = IF Has("refundsTheDead") THEN held ELSE "no"
            /\ UNCHANGED << quit, entries, finished, retries, restarted, 
                            failed >>

RuleLostRunning == /\ phase = "RunCommand" /\ Lost # {} /\ ~quit /\ ~(Has("lossOverlooked") /\ Finished)
                   /\ retries' = [w \in Workers |-> IF w \in Lost THEN Charge(retries[w]) ELSE retries[w]]
                   /\ entries' = entries + 1
                   /\ IF Has("failAtOnce") /\ \E w \in Workers : retries'[w] > MaxRetry
                         THEN /\ recoverCount' = MaxRetry + 1
                              /\ phase' = "Failed"
                              /\ inner' = All("Failed")
                              /\ renew' = All("no")
                              /\ renewed' = FALSE
                              /\ charged' = (charged /\ Has("refundsTheDead"))
                              /\ held' = IF Has("refundsTheDead") THEN held ELSE "no"
                         ELSE /\ charged' = TRUE
                              /\ recoverCount' = IF Has("sumLosses") THEN Min(recoverCount + Cardinality(Lost), MaxRetry) ELSE Count(retries')
                              /\ phase' = "Restarting"
                              /\ inner' = [w \in Workers |-> IF w \in Lost THEN "Restarting" ELSE inner[w]]
                              /\ renew' = [w \in Workers |-> IF w \in Lost THEN "no" ELSE renew[w]]
                              /\ UNCHANGED << renewed, held >>
                   /\ finished' = [w \in Workers |-> finished[w] /\ w \notin Lost]
                   /\ failed' = All(FALSE)
                   /\ restarted' = All(FALSE)
                   /\ quit' = quit

RuleLostBooting == /\ phase \in Booting /\ Lost # {} /\ ~quit
                   /\ IF Has("bootSkipped")
                         THEN /\ phase' = "Restarting"
                              /\ inner' = [w \in Workers |-> IF w \in Lost THEN "Restarting" ELSE inner[w]]
                              /\ renew' = [w \in Workers |-> IF w \in Lost THEN "no" ELSE renew[w]]
                              /\ finished' = [w \in Workers |-> finished[w] /\ w \notin Lost]
                              /\ failed' = All(FALSE)
                              /\ restarted' = All(FALSE)
                         ELSE /\ finished' = [w \in Workers |-> w \notin Lost /\ (phase = "BootChecking" \/ finished[w])]
                              /\ restarted' = All(FALSE)
                              /\ failed' = All(FALSE)
                              /\ phase' = "Pending"
                              /\ inner' = All("Pending")
                              /\ renew' = renew
                   /\ UNCHANGED << quit, recoverCount, entries, retries, 
                                   renewed, charged, held >>

RuleLostRecovering == /\ phase \in Recovering /\ Lost # {} /\ ~quit
                      /\ IF Has("countInRecovery")
                            THEN /\ retries' = [w \in Workers |-> IF w \in Lost THEN Charge(retries[w]) ELSE retries[w]]
                            ELSE /\ TRUE
                                 /\ UNCHANGED retries
                      /\ IF Tired /\ ~Has("noBudget")
                            THEN /\ recoverCount' = EndCount
                                 /\ phase' = "Failed"
                                 /\ inner' = All("Failed")
                                 /\ renew' = All("no")
                                 /\ renewed' = FALSE
                                 /\ charged' = (charged /\ Has("refundsTheDead"))
                                 /\ held' = IF Has("refundsTheDead") THEN held ELSE "no"
                                 /\ UNCHANGED entries
                            ELSE /\ entries' = IF Has("noBudget") THEN entries ELSE entries + 1
                                 /\ phase' = "Restarting"
                                 /\ inner' = [w \in Workers |-> IF w \in Lost THEN "Restarting" ELSE inner[w]]
                                 /\ renew' = [w \in Workers |-> IF w \in Lost THEN "no" ELSE renew[w]]
                                 /\ UNCHANGED << recoverCount, renewed, 
                                                 charged, held >>
                      /\ finished' = [w \in Workers |-> finished[w] /\ w \notin Lost]
                      /\ failed' = All(FALSE)
                      /\ restarted' = All(FALSE)
                      /\ quit' = quit

RuleRefund == /\ (phase \in Recovering \/ (Has("refundsTheDead") /\ phase = "Failed")) /\ Owed /\ Lost = {} /\ ~quit
              /\ recoverCount' = Largest(retries) - 1
              /\ retries' = [w \in Workers |-> Min(retries[w], recoverCount')]
              /\ charged' = (Has("refundsTwice") /\ recoverCount' > 0)
              /\ UNCHANGED << phase, quit, entries, inner, finished, restarted, 
                              failed, renew, renewed, held >>

RuleRelease == /\ phase \in Recovering /\ held = "over" /\ ~Owed /\ Lost = {} /\ ~quit
               /\ phase = "Troubleshooting" => Finished
               /\ IF Tired /\ ~Has("holdsForEver")
                     THEN /\ recoverCount' = EndCount
                          /\ phase' = "Failed"
                          /\ inner' = All("Failed")
                          /\ renew' = All("no")
                          /\ renewed' = FALSE
                          /\ charged' = (charged /\ Has("refundsTheDead"))
                          /\ held' = IF Has("refundsTheDead") THEN held ELSE "no"
                          /\ UNCHANGED << entries, finished, restarted, failed >>
                     ELSE /\ entries' = IF Has("holdsForEver") THEN entries ELSE entries + 1
                          /\ held' = "no"
                          /\ IF phase = "Troubleshooting"
                                THEN /\ inner' = All("Troubleshooting")
                                     /\ finished' = All(FALSE)
                                     /\ restarted' = All(FALSE)
                                     /\ failed' = All(FALSE)
                                     /\ renew' = All("no")
                                     /\ phase' = "Troubleshooting"
                                ELSE /\ TRUE
                                     /\ UNCHANGED << phase, inner, finished, 
                                                     restarted, failed, renew >>
                          /\ UNCHANGED << recoverCount, renewed, charged >>
               /\ UNCHANGED << quit, retries >>

RuleExceeded == /\ phase = "Troubleshooting" /\ Finished /\ Limit /\ held = "no" /\ Lost = {} /\ ~quit /\ ~Has("noGuard")
                /\ recoverCount' = MaxRetry + 1
                /\ phase' = "Failed"
                /\ inner' = All("Failed")
                /\ renew' = All("no")
                /\ renewed' = FALSE
                /\ charged' = (charged /\ Has("refundsTheDead"))
                /\ held' = IF Has("refundsTheDead") THEN held ELSE "no"
                /\ UNCHANGED << quit, entries, finished, retries, restarted, 
                                failed >>

RuleError == /\ phase = "RunCommand" /\ (\E w \in Workers : failed[w]) /\ Lost = {} /\ ~quit
             /\ IF ~Has("errorNotCounted")
                   THEN /\ retries' = [w \in Workers |-> IF failed[w] THEN Charge(retries[w]) ELSE retries[w]]
                        /\ recoverCount' = Count(retries')
                   ELSE /\ TRUE
                        /\ UNCHANGED << recoverCount, retries >>
             /\ charged' = TRUE
             /\ inner' = All("Troubleshooting")
             /\ finished' = All(FALSE)
             /\ restarted' = All(FALSE)
             /\ failed' = All(FALSE)
             /\ renew' = All("no")
             /\ phase' = "Troubleshooting"
             /\ UNCHANGED << quit, entries, renewed, held >>

RuleRenew == /\ phase = "Troubleshooting" /\ Finished /\ Wanted # {} /\ ~Limit /\ held = "no" /\ Lost = {} /\ ~quit
             /\ IF renewed /\ ~Has("renewsTwice")
                   THEN /\ renew' = All("no")
                        /\ UNCHANGED << phase, recoverCount, entries, inner, 
                                        finished, renewed, charged, held >>
                   ELSE /\ IF Tired
                              THEN /\ recoverCount' = EndCount
                                   /\ phase' = "Failed"
                                   /\ inner' = All("Failed")
                                   /\ renew' = All("no")
                                   /\ renewed' = FALSE
                                   /\ charged' = (charged /\ Has("refundsTheDead"))
                                   /\ held' = IF Has("refundsTheDead") THEN held ELSE "no"
                                   /\ UNCHANGED << entries, finished >>
                              ELSE /\ entries' = entries + 1
                                   /\ renewed' = TRUE
                                   /\ inner' = [w \in Workers |-> IF w \in Wanted THEN "Restarting" ELSE inner[w]]
                                   /\ finished' = [w \in Workers |-> w \notin Wanted]
                                   /\ renew' = [w \in Workers |-> IF w \in Wanted THEN "away" ELSE "no"]
                                   /\ phase' = "Restarting"
                                   /\ UNCHANGED << recoverCount, charged, held >>
             /\ UNCHANGED << quit, retries, restarted, failed >>

RuleReady == /\ phase = "Restarting" /\ Lost = {} /\ ~quit /\ ~Owed /\ held # "over"
             /\ \A w \in Workers : (inner[w] = "Restarting" \/ Has("waitsForAll")) => finished[w]
             /\ inner' = All("Troubleshooting")
             /\ finished' = All(FALSE)
             /\ restarted' = All(FALSE)
             /\ failed' = All(FALSE)
             /\ renew' = All("no")
             /\ phase' = "Troubleshooting"
             /\ UNCHANGED << quit, recoverCount, entries, retries, renewed, 
                             charged, held >>

RuleAdvance == /\ phase \in Booting \cup {"RunCommand", "Troubleshooting"} /\ Finished /\ ~quit
               /\ (Lost = {} \/ Has("lossOverlooked")) /\ \A w \in Workers : ~failed[w]
               /\ (phase = "Troubleshooting" /\ Limit) => Has("noGuard")
               /\ (held = "no" \/ Has("heldGoesOn")) /\ Wanted = {}
               /\ IF phase = "RunCommand"
                     THEN /\ phase' = "Succeed"
                          /\ inner' = All("Succeed")
                          /\ renew' = All("no")
                          /\ renewed' = FALSE
                          /\ charged' = (charged /\ Has("refundsTheDead"))
                          /\ held' = IF Has("refundsTheDead") THEN held ELSE "no"
                          /\ UNCHANGED << entries, finished, retries, 
                                          restarted, failed >>
                     ELSE /\ IF Onward(phase) = "RunCommand"
                                THEN /\ entries' = 0
                                     /\ renewed' = FALSE
                                     /\ charged' = FALSE
                                     /\ held' = "no"
                                     /\ retries' = IF Has("noAlign") THEN retries ELSE All(recoverCount)
                                ELSE /\ TRUE
                                     /\ UNCHANGED << entries, retries, renewed, 
                                                     charged, held >>
                          /\ inner' = All((Onward(phase)))
                          /\ finished' = All(FALSE)
                          /\ restarted' = All(FALSE)
                          /\ failed' = All(FALSE)
                          /\ renew' = All("no")
                          /\ phase' = Onward(phase)
               /\ UNCHANGED << quit, recoverCount >>

Finish(self) == /\ Alive /\ ~finished[self] /\ renew[self] # "away"
                /\ finished' = [finished EXCEPT ![self] = TRUE]
                /\ UNCHANGED << phase, quit, recoverCount, entries, inner, 
                                retries, restarted, failed, renew, renewed, 
                                charged, held >>

FinishBroken(self) == /\ Can("renew") /\ phase = "Troubleshooting" /\ ~finished[self]
                      /\ finished' = [finished EXCEPT ![self] = TRUE]
                      /\ renew' = [renew EXCEPT ![self] = "wanted"]
                      /\ UNCHANGED << phase, quit, recoverCount, entries, 
                                      inner, retries, restarted, failed, 
                                      renewed, charged, held >>

Restart(self) == /\ (Alive \/ Has("resurrects")) /\ ((~restarted[self] /\ Missed(self)) \/ renew[self] # "no")
                 /\ IF renew[self] # "away"
                       THEN /\ restarted' = [restarted EXCEPT ![self] = TRUE]
                       ELSE /\ TRUE
                            /\ UNCHANGED restarted
                 /\ renew' = [renew EXCEPT ![self] = "no"]
                 /\ IF Has("resurrects") /\ ~Alive
                       THEN /\ phase' = "Restarting"
                       ELSE /\ TRUE
                            /\ phase' = phase
                 /\ UNCHANGED << quit, recoverCount, entries, inner, finished, 
                                 retries, failed, renewed, charged, held >>

Error(self) == /\ phase = "RunCommand" /\ ~finished[self] /\ ~restarted[self]
               /\ ~failed[self] /\ (Has("manyErrors") \/ \A w \in Workers : ~failed[w])
               /\ failed' = [failed EXCEPT ![self] = TRUE]
               /\ UNCHANGED << phase, quit, recoverCount, entries, inner, 
                               finished, retries, restarted, renew, renewed, 
                               charged, held >>

Quit == /\ Alive /\ ~quit
        /\ quit' = TRUE
        /\ UNCHANGED << phase, recoverCount, entries, inner, finished, retries, 
                        restarted, failed, renew, renewed, charged, held >>

Hold == /\ Can("hold") /\ phase \in Recovering /\ held = "no"
        /\ held' = "held"
        /\ UNCHANGED << phase, quit, recoverCount, entries, inner, finished, 
                        retries, restarted, failed, renew, renewed, charged >>

Release == /\ Can("hold") /\ Alive /\ held = "held"
           /\ held' = "over"
           /\ UNCHANGED << phase, quit, recoverCount, entries, inner, finished, 
                           retries, restarted, failed, renew, renewed, charged >>

Saved == /\ Can("earn") /\ phase = "RunCommand" /\ recoverCount > 0
         /\ recoverCount' = recoverCount - 1
         /\ retries' = [w \in Workers |-> retries[w] - 1]
         /\ UNCHANGED << phase, quit, entries, inner, finished, restarted, 
                         failed, renew, renewed, charged, held >>

Next == RuleQuit \/ RuleLostRunning \/ RuleLostBooting
           \/ RuleLostRecovering \/ RuleRefund \/ RuleRelease \/ RuleExceeded
           \/ RuleError \/ RuleRenew \/ RuleReady \/ RuleAdvance \/ Quit \/ Hold
           \/ Release \/ Saved
           \/ (\E self \in Workers: Finish(self))
           \/ (\E self \in Workers: FinishBroken(self))
           \/ (\E self \in Workers: Restart(self))
           \/ (\E self \in Workers: Error(self))

Spec == /\ Init /\ [][Next]_vars
        /\ WF_vars(RuleQuit)
        /\ WF_vars(RuleLostRunning)
        /\ WF_vars(RuleLostBooting)
        /\ WF_vars(RuleLostRecovering)
        /\ WF_vars(RuleRefund)
        /\ WF_vars(RuleRelease)
        /\ WF_vars(RuleExceeded)
        /\ WF_vars(RuleError)
        /\ WF_vars(RuleRenew)
        /\ WF_vars(RuleReady)
        /\ WF_vars(RuleAdvance)
        /\ \A self \in Workers : WF_vars(Finish(self))
        /\ WF_vars(Release)

\* END TRANSLATION - the hash of the generated TLA code (remove to silence divergence warnings): TLA-88e75d671054a52029b3fd22f213d8de

\* ---- the nine of the seed that concern phases (the message invariants are in Messages.tla) ----
ValidPhase        == phase \in Phases
ValidInnerPhase   == \A w \in Workers : inner[w] \in Phases
RecoverCountBound == recoverCount \in 0..(IF phase = "Failed" THEN MaxRetry + 1 ELSE MaxRetry)
RetriesBound      == \A w \in Workers : retries[w] \in 0..(MaxRetry + 1)
MayLag(p)         == IF p = "Restarting" THEN {"Restarting", "RunCommand", "Troubleshooting"} ELSE {p}
PhaseConsistency  == \A w \in Workers : ~finished[w] => inner[w] \in MayLag(phase)

\* ---- more that must hold in every state ----
MaxAgrees              == Alive => recoverCount = Min(Largest(retries), MaxRetry)
Aligned                == phase \in {"RunCommand", "Succeed"} => \A w \in Workers : retries[w] = recoverCount
NeverRunsExceeded      == phase = "RunCommand" => ~Exceeded
FailedHasReason        == phase = "Failed" => (quit \/ Exceeded \/ Tired)
QuitIsNotExhaustion    == phase = "Failed" => ((recoverCount = MaxRetry + 1) <=> (Exceeded /\ ~quit))
RecoveryBounded        == entries \in 0..Budget
OneErrorPerIncarnation == \A v, w \in Workers : failed[v] /\ failed[w] => v = w
NothingPendingWhileRunning == phase \notin Recovering => (~charged /\ ~renewed /\ held = "no" /\ renew = All("no"))
SuccessIsEarned        == phase = "Succeed" => Finished /\ Lost = {} /\ \A w \in Workers : ~failed[w]
\* Restarting waits for the missing workers, and for nobody else
ReadyWhenMissingAreBack == (phase = "Restarting" /\ ~quit /\ held = "no" /\ Lost = {} /\ \A w \in Workers : inner[w] = "Restarting" => finished[w])
                           => ENABLED RuleReady

\* ---- and over every step ----
TerminalAbsorbing == [][~Alive => UNCHANGED vars]_vars
GivesBack         == RuleRefund \/ Saved
CountOnlyInRun    == [][(retries' # retries) => (GivesBack \/ phase = "RunCommand" \/ (phase' = "RunCommand" /\ retries' = All(recoverCount)))]_vars
OneBump           == [][phase' # "Failed" => (GivesBack \/ recoverCount' \in {recoverCount, Min(recoverCount + 1, MaxRetry)})]_vars
FailureIsCounted  == [][(phase = "RunCommand" /\ phase' \in Recovering) =>
                         /\ recoverCount' = Min(recoverCount + 1, MaxRetry)
                         /\ \A w \in Workers : retries'[w] - retries[w] = IF restarted[w] \/ (Lost = {} /\ failed[w]) THEN 1 ELSE 0]_vars
ExceededIsFinal   == [][Exceeded => ((Exceeded' \/ RuleRefund) /\ phase' # "RunCommand")]_vars
RefundOnce        == [][(recoverCount' < recoverCount) =>
                         \/ RuleRefund /\ Alive /\ charged /\ ~charged' /\ held # "no" /\ recoverCount' = recoverCount - 1
                         \/ RuleRefund /\ Exceeded /\ ~Exceeded'
                         \/ Saved /\ phase = "RunCommand"]_vars
RefundEnds        == [][RuleRefund => (charged /\ ~charged')]_vars
HeldWaits         == [][(phase = "Troubleshooting" /\ held # "no" /\ phase' # phase) =>
                         (quit \/ Lost # {} \/ (held = "over" /\ Tired))]_vars
RenewOnce         == [][(RuleRenew /\ phase' = "Restarting") => (~renewed /\ retries' = retries)]_vars
FailedAfterDiagnosis == [][(phase' = "Failed" /\ Alive /\ ~quit /\ ~(Tired /\ (Lost # {} \/ held = "over"))) => (phase = "Troubleshooting" /\ Finished)]_vars
BootBeforeRun     == [][/\ (phase \in Booting => phase' \notin Recovering)
                        /\ (phase' = "RunCommand" /\ phase # "RunCommand" => phase \in {"BootChecking", "Troubleshooting"})]_vars
DoneIsNotMissed   == [][\A w \in Workers : (phase = "RunCommand" /\ finished[w] /\ ~restarted[w]) => ~restarted'[w]]_vars

\* ---- and in the end, if the controller and the workers that live go on ----
Settled       == phase = "RunCommand" \/ ~Alive
Calm          == <>[][~(\E w \in Workers : Restart(w) \/ Error(w)) /\ ~Quit /\ ~Hold]_vars
RecoveryEnds  == (phase \in Recovering) ~> Settled
JobEnds       == Calm => <>(~Alive)
NoLostFailure == \A w \in Workers : (phase = "RunCommand" /\ (restarted[w] \/ failed[w])) ~> (phase # "RunCommand")
QuitIsObeyed  == quit ~> ~Alive
\* or the charge is given back, since it was nobody's fault
ExceededEnds  == Exceeded ~> (phase = "Failed" \/ ~Exceeded)
BootEnds      == Calm => ((phase \in Booting) ~> Settled)

\* ---- witnesses: a config that never gets anywhere would satisfy all of the above ----
Witness == << <<"Pending", phase = "Pending">>, <<"BootChecking", phase = "BootChecking">>,
              <<"RunCommand", phase = "RunCommand">>, <<"Restarting", phase = "Restarting">>,
              <<"Troubleshooting", phase = "Troubleshooting">>, <<"Succeed", phase = "Succeed">>,
              <<"Failed by quit", phase = "Failed" /\ quit>>, <<"Failed by the limit", phase = "Failed" /\ Exceeded /\ ~quit>>,
              <<"Failed by the budget", phase = "Failed" /\ ~Exceeded /\ ~quit>>,
              <<"Succeed with every retry used", phase = "Succeed" /\ recoverCount = MaxRetry>>,
              <<"several lost at once", Cardinality(Lost) > 1>>, <<"lost while booting", phase \in Booting /\ Lost # {}>>,
              <<"lost while recovering", phase \in Recovering /\ Lost # {}>>, <<"an Error", \E w \in Workers : failed[w]>>,
              <<"a charge given back", phase \in Recovering /\ held # "no" /\ ~charged>>,
              <<"released, and checked again", phase = "Troubleshooting" /\ held = "no" /\ ~charged>>,
              <<"a clean process on its way", \E w \in Workers : renew[w] = "away">>,
              <<"level 2 did not help", phase = "Troubleshooting" /\ renewed /\ Wanted # {}>> >>
ASSUME \A i \in 1..40 : TLCSet(i, FALSE)
Reached == \A i \in 1..Len(Witness) : (Witness[i][2] /\ ~TLCGet(i)) => TLCSet(i, TRUE) /\ PrintT(<<"witness", Witness[i][1]>>)
\* violated as soon as everything has been reached, which ends the search
Unreached == \E i \in 1..Len(Witness) : ~TLCGet(i)
=============================================================================
