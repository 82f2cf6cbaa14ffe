"""Benchmarks of the engine against itself: ratios from one run, on one machine."""

from paceline.bench.cli import app

__all__ = ["app"]
