"""The control plane: the master that decides by `core.machine.step`, and the processes around it. The modules
here are the way of a report, in order: `admission` (first contact), `membership` (who speaks),
`report_events`, `decisions`, `job_record`, `journal_file`, `effects`; they may use every sub-room, the bus,
stores, files and asyncio, but never torch. Start with `master`, the loop that calls them; `main` puts its
process together.
"""
