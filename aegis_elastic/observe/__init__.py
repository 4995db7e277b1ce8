"""What people and monitoring systems get of a running job: Prometheus metrics and pages. It may serve and
post HTTP, and imports only `core`. Start with `metrics` (how they follow a job's events), `controller` (how
the master feeds them) and `paging`.
"""
