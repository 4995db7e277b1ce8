"""The agent's link to the control plane: first contact, the bus, reports, notes.

It runs in one thread with an asyncio loop and hands what it hears to the agent as events of its mailbox; it
imports `bus`, `core` and the mailbox, and neither ranks nor torch. Start with `link.py`.
"""
