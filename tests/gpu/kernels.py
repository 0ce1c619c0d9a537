"""Step g: kernels of 2 to 6 bits, a packed embedding and a packed draft head, as soon as stages make such weights."""

from typing import get_args

from slimqwen.checkpoint import packing
from slimqwen.recipe.schemes import Scheme
from tests.gpu.steps import Here, LeftOutError

_WIDTHS = (2, 3, 5, 6)  # 4 and 8 are those of every variant, and of steps a to f


def run(here: Here) -> str:
    """Name what no stage makes yet.

    Raises:
        LeftOutError: always, for this step times nothing yet.
    """
    missing, built = [], []
    for width in _WIDTHS:
        name = f"W{width}A16"
        (built if name in get_args(Scheme) else missing).append(name)
    for kind in ("embed_tokens", "draft_head"):
        (built if kind in packing.LINEARS else missing).append(f"packed {kind}")
    said = f"not built: {', '.join(missing)}" if missing else ""
    timed = f"built, but not timed by this step: {', '.join(built)}" if built else ""
    raise LeftOutError("; ".join(filter(None, (said, timed))))
