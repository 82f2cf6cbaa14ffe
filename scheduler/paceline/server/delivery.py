"""A generation on its way to its client."""

from __future__ import annotations

from typing import Final

from paceline.engine import Delta, Stream
from paceline.server.convert import WITH_TEXT, WITH_TOKEN_IDS, write_finished, write_logprobs
from paceline.v1 import generation_pb2 as pb

# Logprobs of more tokens than this are for another thread to write: about a millisecond's worth.
MANY_TOKENS: Final = 256


class Delivery:
    """The engine's deltas, as the messages that the client asked for.

    Args:
        started: what the first message will tell, as far as it is known.

    Attributes:
        request_id: what the client knows the generation by.
        stream: where the deltas come from.
    """

    __slots__ = ("_has_text", "_has_token_ids", "_started", "request_id", "stream")

    def __init__(self, stream: Stream, started: pb.Started, content: pb.OutputContent) -> None:
        self.request_id = started.request_id
        self.stream = stream
        self._started: pb.Started | None = started  # None once it has been told
        self._has_text = content in WITH_TEXT
        self._has_token_ids = content in WITH_TOKEN_IDS

    def concerns(self, delta: Delta) -> bool:
        """The message about it would carry something; all others are left out."""
        return bool(
            (delta.text and self._has_text)
            or (delta.token_ids and self._has_token_ids)
            or delta.finish is not None
            or delta.logprobs
        )

    def takes_long(self, delta: Delta) -> bool:
        """To write: the event loop cannot wait for it."""
        if self._started is not None and len(self.stream.prompt_logprobs) > MANY_TOKENS:
            return True
        return len(delta.logprobs) > MANY_TOKENS

    def write(self, delta: Delta, response: pb.GenerateResponse) -> None:
        """Put a delta that is of concern into an empty message, with the parts of it that the client asked for.

        Most messages hold a token and little else, so only what is there is set: that is four times as fast as giving
        everything to the constructor.
        """
        if delta.choice:
            response.choice = delta.choice
        if delta.token_offset:
            response.token_offset = delta.token_offset
        if self._has_text:
            response.text = delta.text
        if self._has_token_ids:
            response.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            response.logprobs.extend(write_logprobs(delta.logprobs))
        if delta.finish is not None:
            response.finished.CopyFrom(write_finished(delta.finish, delta.stats))
        if self._started is not None:
            started, self._started = self._started, None
            started.cached_prompt_tokens = self.stream.cached_prompt_tokens
            started.prompt_logprobs.extend(write_logprobs(self.stream.prompt_logprobs))
            response.started.CopyFrom(started)
