"""The message bus: subjects, credentials, the embedded nats-server, and a connection that outlives it.

It owns sockets, asyncio tasks and the server's process, and knows nothing of jobs but their names; it imports
nats-py and, of ours, nothing but itself. Start with `connection.py` (what its users see) and `subjects.py`
(who may publish what).
"""
