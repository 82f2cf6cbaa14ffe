"""How drafts are made."""

from __future__ import annotations

import enum
from typing import Final


class Method(enum.StrEnum):
    """How drafts are made."""

    NONE = "none"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"


NO_DRAFTS: Final = frozenset({Method.NONE})


# Looking a member up in its class takes as long as a function call; these are for what is done for every request at
# every step.
NGRAM: Final = Method.NGRAM
DRAFT_MODEL: Final = Method.DRAFT_MODEL
NO_METHOD: Final = Method.NONE
