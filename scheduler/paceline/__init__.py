"""Paceline: serving many requests at once with speculative decoding that always pays."""

__version__ = "0.1.0"
