"""First contact and notes: what workers say to the plane by gRPC, beside the bus.

These are blocking calls for a thread of their own, the proofs over the plane's certificate, and the sources
of the join secret (files, environment, munge); they may import the rest of `bus` and values of `core`. Start
with `first_contact.py`.
"""
