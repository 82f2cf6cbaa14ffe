"""How near the native backend comes to what the machine can do: each figure against a ceiling of the same rounds."""

from paceline.bench.limits.measuring import measure
from paceline.bench.limits.results import render, to_json

__all__ = ["measure", "render", "to_json"]
