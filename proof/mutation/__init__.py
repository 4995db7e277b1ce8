"""Mutation: whether the properties detect a `step` with one thing wrong.

Builds wrong versions of core/machine from its sources, in memory, and explores small worlds with them. Start
with `mutants` (the operators); `hunt` looks for a killing property, `survivors` lists the accepted survivors.
"""
