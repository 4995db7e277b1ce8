"""The measured training with what many trainings import: pandas, scikit-learn, transformers."""

import pandas  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
import sklearn.ensemble  # noqa: F401
from measured import main  # type: ignore[import-not-found,unused-ignore]

# transformers loads its parts lazily
from transformers import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    AutoModel,  # noqa: F401
    Trainer,  # noqa: F401
)

if __name__ == "__main__":
    main()
