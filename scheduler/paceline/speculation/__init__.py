"""Drafters, one file each, behind `paceline.runner.Drafter`."""

from paceline.compiled import path_of

__path__ = path_of("speculation", __path__)

from paceline.speculation.draft_model import DraftModel
from paceline.speculation.ngram import Ngram

__all__ = ["DraftModel", "Ngram"]
