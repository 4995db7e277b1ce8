"""aegis-elastic: fault tolerance for PyTorch trainings, as a drop-in for torchrun."""

__version__ = "0.1.0"
