"""What runs inside a rank: counting its steps, recording its exceptions, and holding warm spares at the gate.

Standard library only, and mostly old syntax without typing: `site/sitecustomize.py` loads these files by path
into whatever Python the user runs; the agent imports some for the layouts and names that both sides share.
Start with `environment.py` (how a rank comes to run `site/sitecustomize.py`), then `step_hooks.py` and
`slot.py`, or `gate.py`.
"""
