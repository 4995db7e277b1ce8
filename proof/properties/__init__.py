"""The properties: what must hold in every status and every step, and (`liveness`) what must happen in the
end.

Short predicates over statuses and edges that compute the expectation anew; they import the core's values but
not its decisions. Start with `invariants` (statuses) and `steps` (edges); `proof.check` evaluates all of
them.
"""
