"""The proof: the machine that ships is the machine that was checked. `python -m proof`; not in the wheel.

`worlds` bound what can happen to a job, `explore` takes the production `step` through everything that can,
`properties` say what must hold, `liveness` what must happen in the end, `conform` that TLC's graph of
`spec/Phases.tla` is the same graph, `mutants` that the properties notice when `step` is wrong, `induction`
that the arithmetic holds for every limit. What is proved, and what isn't, is told in docs/proof.md.
"""
