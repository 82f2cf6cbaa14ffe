"""The pure core: no torch, asyncio, grpc, clock or global randomness. Time, seeds and ids are arguments."""

from paceline.compiled import path_of

__path__ = path_of("core", __path__)
