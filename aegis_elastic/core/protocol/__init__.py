"""What travels between agents and the master: reports, orders, directives and operator checks, as values.

Pure encoding, decoding and checking of bounds, and `orders.derive_order`, by which the order follows from the
status; imports everything below it in `core`, and does no IO. Start with `messages`, the form of all that
goes over the bus, then `orders`.
"""
