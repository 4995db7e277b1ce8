"""The proof: the machine that ships is the machine that was checked. `python -m proof`; not in the wheel.

`worlds` bound what can happen to a job, `explore` takes the production `step` through all of it, `properties`
say what must hold, `properties.liveness` what must happen in the end, `tla.conform` that TLC's graph of
`spec/Phases.tla` is the same graph, `mutation` that the properties detect a wrong `step`, `induction` that
the arithmetic holds for every limit. docs/proof.md says what is proved, and what isn't.
"""
