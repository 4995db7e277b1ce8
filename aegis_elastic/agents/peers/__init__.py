"""Peers: the TCPStores that ranks meet in, and what the agents of one incarnation say to each other there.

Imports torch and nothing else of `agents`; calls to a store that may have fallen silent run in threads of
their own. Start with `peers.py` for what agents agree on, and with `stores.py` for how a store is made.
"""
