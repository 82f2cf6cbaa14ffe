"""Grammars that completions follow, by llguidance."""

from paceline.structured.compiler import LLGuidanceCompiler
from paceline.structured.masks import MaskWorker

__all__ = ["LLGuidanceCompiler", "MaskWorker"]
