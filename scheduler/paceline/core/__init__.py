"""The pure core: no torch, asyncio, grpc, clock or global randomness. Time, seeds and ids are arguments."""
