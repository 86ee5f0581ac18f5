"""Vision towers of wrappers: from pixels to the features that stand among a text model's tokens.

A model has its tower if it was loaded with `hf.load(path, vision=True)`. `arrange` makes the arrays of packed rows on
the host, `attach` those of a Batch; `models.score` and `models.forward` read them.
"""

from .media import Media
from .patches import PER_TOKEN, arrange, attach, given
from .placement import Seen, added, over_frozen, replaced, see
from .positions import positions, standing
from .table import TOWERS, available, table, with_vision, without_vision
from .tower import Tower, features

__all__ = [
    "PER_TOKEN", "TOWERS", "Media", "Seen", "Tower", "added", "arrange", "attach", "available", "features", "given",
    "over_frozen", "positions", "replaced", "see", "standing", "table", "with_vision", "without_vision",
]  # fmt: skip
