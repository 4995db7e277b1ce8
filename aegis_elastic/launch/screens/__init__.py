"""What people see: the job's status, its journal, the final report and check results as text and tables.

It formats what it is given: no files, no calls, no other sub-room of `launch`; only the progress bars write,
to stderr. Start with `final_report.py`; `formatting.py` has the small pieces that all screens share.
"""
