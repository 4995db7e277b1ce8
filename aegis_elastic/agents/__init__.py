"""The elastic agent of a node, and everything that runs beside it on that node.

The modules here are the agent itself: `node` (what it has and can do), `state` (what it is in), `pending`
(what waits), `agent` (its reactions), `without_plane` (its reactions while no master can be reached),
`reporter` (its newest report); they may use every sub-room, processes, sockets and torch by
`ranks.torch_seam` alone. Start with `state`, whose table says what each event means, then `agent`.
"""
