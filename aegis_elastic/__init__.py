"""aegis-elastic: fault tolerance for PyTorch trainings, as a drop-in for torchrun.

Training code needs no change. What it may call: `progress(step)` and `checkpoint_saved(step, path)`.
"""

from aegis_elastic.worker.progress import checkpoint_saved as checkpoint_saved
from aegis_elastic.worker.progress import progress as progress

__version__ = "0.1.0"
__all__ = ["checkpoint_saved", "progress"]
