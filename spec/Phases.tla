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
(* Defects names known wrong readings that are switched on; {} is the specification. Every one of them has  *)
(* a config that must be violated, or the properties below would be worth little.                           *)
EXTENDS Naturals, Sequences, FiniteSets, TLC
CONSTANTS Workers, MaxRetry, Budget, Defects

Booting    == {"Pending", "BootChecking"}
Recovering == {"Restarting", "Troubleshooting"}
Terminal   == {"Succeed", "Failed"}
Phases     == Booting \cup {"RunCommand"} \cup Recovering \cup Terminal
Has(d)     == d \in Defects
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
}
\* `phase` last: what is assigned before it may still be computed from the old one
macro Enter(p) { inner := All(p); finished := All(FALSE); restarted := All(FALSE); failed := All(FALSE); phase := p; }
macro Close(p) { phase := p; inner := All(p); }
macro Forget() {
  finished  := [w \in Workers |-> finished[w] /\ w \notin Lost];
  failed    := All(FALSE);
  restarted := All(FALSE);
}
macro ToRestarting() {
  phase := "Restarting";
  inner := [w \in Workers |-> IF w \in Lost THEN "Restarting" ELSE inner[w]];
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
      Close("Pending");
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
fair process (RuleExceeded = "exceeded") {
X: while (TRUE) {
    await phase = "Troubleshooting" /\ Finished /\ Limit /\ Lost = {} /\ ~quit /\ ~Has("noGuard");
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
    Enter("Troubleshooting");
  }
}
fair process (RuleReady = "ready") {
R: while (TRUE) {
    await phase = "Restarting" /\ Lost = {} /\ ~quit;
    await \A w \in Workers : (inner[w] = "Restarting" \/ Has("waitsForAll")) => finished[w];
    Enter("Troubleshooting");
  }
}
fair process (RuleAdvance = "advance") {
A: while (TRUE) {
    await phase \in Booting \cup {"RunCommand", "Troubleshooting"} /\ Finished /\ ~quit;
    await (Lost = {} \/ Has("lossOverlooked")) /\ \A w \in Workers : ~failed[w];
    await (phase = "Troubleshooting" /\ Limit) => Has("noGuard");
    if (phase = "RunCommand") {
      Close("Succeed");
    } else {
      if (Onward(phase) = "RunCommand") {
        entries := 0;
        retries := IF Has("noAlign") THEN retries ELSE All(recoverCount);
      };
      Enter(Onward(phase));
    }
  }
}

\* ---- the environment ----
fair process (Finish \in Workers) {
F: while (TRUE) { await Alive /\ ~finished[self]; finished[self] := TRUE; }
}
process (Restart \in Workers) {
T: while (TRUE) {
    await (Alive \/ Has("resurrects")) /\ ~restarted[self] /\ Missed(self);
    restarted[self] := TRUE;
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
} *)
\* BEGIN TRANSLATION - the hash of the PCal code: PCal-446932266a775ae69ef1897f9c786691
VARIABLES phase, quit, recoverCount, entries, inner, finished, retries, 
          restarted, failed

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


vars == << phase, quit, recoverCount, entries, inner, finished, retries, 
           restarted, failed >>

ProcSet == {"quit"} \cup {"lost while running"} \cup {"lost while booting"} \cup {"lost while recovering"} \cup {"exceeded"} \cup {"error"} \cup {"ready"} \cup {"advance"} \cup (Workers) \cup (Workers) \cup (Workers) \cup {"environment"}

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

RuleQuit == /\ Alive /\ quit /\ ~(Has("quitForgotten") /\ phase = "Troubleshooting")
            /\ recoverCount' = IF Has("quitIsExhaustion") THEN MaxRetry + 1 ELSE recoverCount
            /\ phase' = "Failed"
            /\ inner' = All("Failed")
            /\ UNCHANGED << quit, entries, finished, retries, restarted, 
                            failed >>

RuleLostRunning == /\ phase = "RunCommand" /\ Lost # {} /\ ~quit /\ ~(Has("lossOverlooked") /\ Finished)
                   /\ retries' = [w \in Workers |-> IF w \in Lost THEN Charge(retries[w]) ELSE retries[w]]
                   /\ entries' = entries + 1
                   /\ IF Has("failAtOnce") /\ \E w \in Workers : retries'[w] > MaxRetry
                         THEN /\ recoverCount' = MaxRetry + 1
                              /\ phase' = "Failed"
                              /\ inner' = All("Failed")
                         ELSE /\ recoverCount' = IF Has("sumLosses") THEN Min(recoverCount + Cardinality(Lost), MaxRetry) ELSE Count(retries')
                              /\ phase' = "Restarting"
                              /\ inner' = [w \in Workers |-> IF w \in Lost THEN "Restarting" ELSE inner[w]]
                   /\ finished' = [w \in Workers |-> finished[w] /\ w \notin Lost]
                   /\ failed' = All(FALSE)
                   /\ restarted' = All(FALSE)
                   /\ quit' = quit

RuleLostBooting == /\ phase \in Booting /\ Lost # {} /\ ~quit
                   /\ IF Has("bootSkipped")
                         THEN /\ phase' = "Restarting"
                              /\ inner' = [w \in Workers |-> IF w \in Lost THEN "Restarting" ELSE inner[w]]
                              /\ finished' = [w \in Workers |-> finished[w] /\ w \notin Lost]
                              /\ failed' = All(FALSE)
                              /\ restarted' = All(FALSE)
                         ELSE /\ finished' = [w \in Workers |-> w \notin Lost /\ (phase = "BootChecking" \/ finished[w])]
                              /\ restarted' = All(FALSE)
                              /\ failed' = All(FALSE)
                              /\ phase' = "Pending"
                              /\ inner' = All("Pending")
                   /\ UNCHANGED << quit, recoverCount, entries, retries >>

RuleLostRecovering == /\ phase \in Recovering /\ Lost # {} /\ ~quit
                      /\ IF Has("countInRecovery")
                            THEN /\ retries' = [w \in Workers |-> IF w \in Lost THEN Charge(retries[w]) ELSE retries[w]]
                            ELSE /\ TRUE
                                 /\ UNCHANGED retries
                      /\ IF Tired /\ ~Has("noBudget")
                            THEN /\ recoverCount' = EndCount
                                 /\ phase' = "Failed"
                                 /\ inner' = All("Failed")
                                 /\ UNCHANGED entries
                            ELSE /\ entries' = IF Has("noBudget") THEN entries ELSE entries + 1
                                 /\ phase' = "Restarting"
                                 /\ inner' = [w \in Workers |-> IF w \in Lost THEN "Restarting" ELSE inner[w]]
                                 /\ UNCHANGED recoverCount
                      /\ finished' = [w \in Workers |-> finished[w] /\ w \notin Lost]
                      /\ failed' = All(FALSE)
                      /\ restarted' = All(FALSE)
                      /\ quit' = quit

RuleExceeded == /\ phase = "Troubleshooting" /\ Finished /\ Limit /\ Lost = {} /\ ~quit /\ ~Has("noGuard")
                /\ recoverCount' = MaxRetry + 1
                /\ phase' = "Failed"
                /\ inner' = All("Failed")
                /\ UNCHANGED << quit, entries, finished, retries, restarted, 
                                failed >>

RuleError == /\ phase = "RunCommand" /\ (\E w \in Workers : failed[w]) /\ Lost = {} /\ ~quit
             /\ IF ~Has("errorNotCounted")
                   THEN /\ retries' = [w \in Workers |-> IF failed[w] THEN Charge(retries[w]) ELSE retries[w]]
                        /\ recoverCount' = Count(retries')
                   ELSE /\ TRUE
                        /\ UNCHANGED << recoverCount, retries >>
             /\ inner' = All("Troubleshooting")
             /\ finished' = All(FALSE)
             /\ restarted' = All(FALSE)
             /\ failed' = All(FALSE)
             /\ phase' = "Troubleshooting"
             /\ UNCHANGED << quit, entries >>

RuleReady == /\ phase = "Restarting" /\ Lost = {} /\ ~quit
             /\ \A w \in Workers : (inner[w] = "Restarting" \/ Has("waitsForAll")) => finished[w]
             /\ inner' = All("Troubleshooting")
             /\ finished' = All(FALSE)
             /\ restarted' = All(FALSE)
             /\ failed' = All(FALSE)
             /\ phase' = "Troubleshooting"
             /\ UNCHANGED << quit, recoverCount, entries, retries >>

RuleAdvance == /\ phase \in Booting \cup {"RunCommand", "Troubleshooting"} /\ Finished /\ ~quit
               /\ (Lost = {} \/ Has("lossOverlooked")) /\ \A w \in Workers : ~failed[w]
               /\ (phase = "Troubleshooting" /\ Limit) => Has("noGuard")
               /\ IF phase = "RunCommand"
                     THEN /\ phase' = "Succeed"
                          /\ inner' = All("Succeed")
                          /\ UNCHANGED << entries, finished, retries, 
                                          restarted, failed >>
                     ELSE /\ IF Onward(phase) = "RunCommand"
                                THEN /\ entries' = 0
                                     /\ retries' = IF Has("noAlign") THEN retries ELSE All(recoverCount)
                                ELSE /\ TRUE
                                     /\ UNCHANGED << entries, retries >>
                          /\ inner' = All((Onward(phase)))
                          /\ finished' = All(FALSE)
                          /\ restarted' = All(FALSE)
                          /\ failed' = All(FALSE)
                          /\ phase' = Onward(phase)
               /\ UNCHANGED << quit, recoverCount >>

Finish(self) == /\ Alive /\ ~finished[self]
                /\ finished' = [finished EXCEPT ![self] = TRUE]
                /\ UNCHANGED << phase, quit, recoverCount, entries, inner, 
                                retries, restarted, failed >>

Restart(self) == /\ (Alive \/ Has("resurrects")) /\ ~restarted[self] /\ Missed(self)
                 /\ restarted' = [restarted EXCEPT ![self] = TRUE]
                 /\ IF Has("resurrects") /\ ~Alive
                       THEN /\ phase' = "Restarting"
                       ELSE /\ TRUE
                            /\ phase' = phase
                 /\ UNCHANGED << quit, recoverCount, entries, inner, finished, 
                                 retries, failed >>

Error(self) == /\ phase = "RunCommand" /\ ~finished[self] /\ ~restarted[self]
               /\ ~failed[self] /\ (Has("manyErrors") \/ \A w \in Workers : ~failed[w])
               /\ failed' = [failed EXCEPT ![self] = TRUE]
               /\ UNCHANGED << phase, quit, recoverCount, entries, inner, 
                               finished, retries, restarted >>

Quit == /\ Alive /\ ~quit
        /\ quit' = TRUE
        /\ UNCHANGED << phase, recoverCount, entries, inner, finished, retries, 
                        restarted, failed >>

Next == RuleQuit \/ RuleLostRunning \/ RuleLostBooting
           \/ RuleLostRecovering \/ RuleExceeded \/ RuleError \/ RuleReady
           \/ RuleAdvance \/ Quit
           \/ (\E self \in Workers: Finish(self))
           \/ (\E self \in Workers: Restart(self))
           \/ (\E self \in Workers: Error(self))

Spec == /\ Init /\ [][Next]_vars
        /\ WF_vars(RuleQuit)
        /\ WF_vars(RuleLostRunning)
        /\ WF_vars(RuleLostBooting)
        /\ WF_vars(RuleLostRecovering)
        /\ WF_vars(RuleExceeded)
        /\ WF_vars(RuleError)
        /\ WF_vars(RuleReady)
        /\ WF_vars(RuleAdvance)
        /\ \A self \in Workers : WF_vars(Finish(self))

\* END TRANSLATION - the hash of the generated TLA code (remove to silence divergence warnings): TLA-2dac530ef3f2c36751ba3dc1161fe500

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
SuccessIsEarned        == phase = "Succeed" => Finished /\ Lost = {} /\ \A w \in Workers : ~failed[w]
\* Restarting waits for the missing workers, and for nobody else
ReadyWhenMissingAreBack == (phase = "Restarting" /\ ~quit /\ Lost = {} /\ \A w \in Workers : inner[w] = "Restarting" => finished[w])
                           => ENABLED RuleReady

\* ---- and over every step ----
TerminalAbsorbing == [][~Alive => UNCHANGED vars]_vars
CountOnlyInRun    == [][(retries' # retries) => (phase = "RunCommand" \/ (phase' = "RunCommand" /\ retries' = All(recoverCount)))]_vars
OneBump           == [][phase' # "Failed" => recoverCount' \in {recoverCount, Min(recoverCount + 1, MaxRetry)}]_vars
FailureIsCounted  == [][(phase = "RunCommand" /\ phase' \in Recovering) =>
                         /\ recoverCount' = Min(recoverCount + 1, MaxRetry)
                         /\ \A w \in Workers : retries'[w] - retries[w] = IF restarted[w] \/ (Lost = {} /\ failed[w]) THEN 1 ELSE 0]_vars
ExceededIsFinal   == [][Exceeded => (Exceeded' /\ phase' # "RunCommand")]_vars
FailedAfterDiagnosis == [][(phase' = "Failed" /\ Alive /\ ~quit /\ ~(Tired /\ Lost # {})) => (phase = "Troubleshooting" /\ Finished)]_vars
BootBeforeRun     == [][/\ (phase \in Booting => phase' \notin Recovering)
                        /\ (phase' = "RunCommand" /\ phase # "RunCommand" => phase \in {"BootChecking", "Troubleshooting"})]_vars
DoneIsNotMissed   == [][\A w \in Workers : (phase = "RunCommand" /\ finished[w] /\ ~restarted[w]) => ~restarted'[w]]_vars

\* ---- and in the end, if the controller and the workers that live go on ----
Settled       == phase = "RunCommand" \/ ~Alive
Calm          == <>[][~(\E w \in Workers : Restart(w) \/ Error(w)) /\ ~Quit]_vars
RecoveryEnds  == (phase \in Recovering) ~> Settled
JobEnds       == Calm => <>(~Alive)
NoLostFailure == \A w \in Workers : (phase = "RunCommand" /\ (restarted[w] \/ failed[w])) ~> (phase # "RunCommand")
QuitIsObeyed  == quit ~> ~Alive
ExceededEnds  == Exceeded ~> (phase = "Failed")
BootEnds      == Calm => ((phase \in Booting) ~> Settled)

\* ---- witnesses: a config that never gets anywhere would satisfy all of the above ----
Witness == << <<"Pending", phase = "Pending">>, <<"BootChecking", phase = "BootChecking">>,
              <<"RunCommand", phase = "RunCommand">>, <<"Restarting", phase = "Restarting">>,
              <<"Troubleshooting", phase = "Troubleshooting">>, <<"Succeed", phase = "Succeed">>,
              <<"Failed by quit", phase = "Failed" /\ quit>>, <<"Failed by the limit", phase = "Failed" /\ Exceeded /\ ~quit>>,
              <<"Failed by the budget", phase = "Failed" /\ ~Exceeded /\ ~quit>>,
              <<"Succeed with every retry used", phase = "Succeed" /\ recoverCount = MaxRetry>>,
              <<"several lost at once", Cardinality(Lost) > 1>>, <<"lost while booting", phase \in Booting /\ Lost # {}>>,
              <<"lost while recovering", phase \in Recovering /\ Lost # {}>>, <<"an Error", \E w \in Workers : failed[w]>> >>
ASSUME \A i \in 1..40 : TLCSet(i, FALSE)
Reached == \A i \in 1..Len(Witness) : (Witness[i][2] /\ ~TLCGet(i)) => TLCSet(i, TRUE) /\ PrintT(<<"witness", Witness[i][1]>>)
\* violated as soon as everything has been reached, which ends the search
Unreached == \E i \in 1..Len(Witness) : ~TLCGet(i)
=============================================================================
