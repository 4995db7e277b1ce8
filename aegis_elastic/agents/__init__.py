"""The elastic agent of a node and what runs beside it: the guard over the ranks, the reporter, the seam to
torch."""
