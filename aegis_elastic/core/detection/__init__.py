"""While training runs: which agents are lost, which ranks hang or are slow, which use resources oddly.

Pure: samples and reports in, judgements with reasons out; imports only the models; no threads, IO or clock.
Start with `liveness.judge` for agents, `hang.judge` and `straggler` for ranks, `anomalies` for resources.
"""
