"""What a client of the load reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engine import GenerationRequest
from paceline.engine.delta import Output


@dataclass(slots=True)
class Reader:
    """One completion as its client sees it."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    has_prompt_logprobs: bool = False

    def read(self, output: Output) -> None:
        """Deltas have to fit together."""
        wanted = self.request.logprobs
        assert output.token_offset == len(self.token_ids), (output.token_offset, len(self.token_ids))
        assert len(output.logprobs) == (0 if wanted.completion is None else len(output.token_ids)), output
        self.token_ids.extend(output.token_ids)
        most = self.request.stop.max_tokens
        assert most is None or len(self.token_ids) <= most, (len(self.token_ids), most)
        assert not (output.prompt_logprobs and self.has_prompt_logprobs), "logprobs of the prompt come once"
        self.has_prompt_logprobs |= bool(output.prompt_logprobs)
        if output.finish is not None:
            assert self.has_prompt_logprobs == (wanted.prompt is not None and output.choice == 0), output
