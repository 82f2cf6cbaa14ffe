"""Python's search for cyclic garbage, in a process that serves."""

from __future__ import annotations

import gc
from typing import Final

# Of objects that were made and not freed yet, before the youngest are searched; and of searches in a row, before older
# ones are. By default every step of a large batch sets off several, and a good part of them walks every live request.
THRESHOLDS: Final = (10_000, 20, 20)


def collect_rarely() -> None:
    """Leave what has been loaded so far out of every search: it is there to stay, and with a model's libraries it is
    hundreds of thousands of objects. Search the rest less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
