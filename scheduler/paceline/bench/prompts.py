"""Prompts as an engine reads them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine import Engine, GenerationRequest


def encode(engine: Engine, prompts: Sequence[str | tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Token ids of each. Raises InvalidArgument for what the engine refuses."""
    return [engine.prepare(GenerationRequest(prompt)).prompt_token_ids for prompt in prompts]
