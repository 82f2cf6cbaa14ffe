"""Grammars that completions follow, by llguidance."""

from paceline.structured.compiler import LLGuidanceCompiler

__all__ = ["LLGuidanceCompiler"]
