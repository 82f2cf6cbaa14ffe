"""Drafters, one file each, behind `paceline.runner.Drafter`."""

from paceline.speculation.draft_model import DraftModel
from paceline.speculation.ngram import Ngram

__all__ = ["DraftModel", "Ngram"]
