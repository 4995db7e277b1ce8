"""The records of a run: the stored status, the journal and its replay, post-mortems and the job report.

Pure functions over statuses and journal lines; imports everything below (`machine` too), no threads, and no
IO but `journal.read`. Start with `journal`, from which all else follows; `record` is how a status is stored.
"""
