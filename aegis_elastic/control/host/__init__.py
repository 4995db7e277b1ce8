"""What a control plane needs of its host: the supervisor and its child processes, configuration, directories,
the gRPC server, the records that jobs share. It may start processes and threads, touch files and sockets, and
imports nothing else of `control`. Start with `supervisor` (the plane's side) and `plane_process` (the
launcher's side).
"""
