"""What runs inside a training process, and the environment that brings it there. Stdlib only."""
