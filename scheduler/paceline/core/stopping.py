"""Where a run of tokens ends a completion: stop ids and lengths. Stop strings need text and live in the engine."""

from __future__ import annotations

from paceline.core.plan import Finish, FinishReason
from paceline.core.request import Request


def cut_run(
    request: Request, token_ids: tuple[int, ...], eos_token_ids: tuple[int, ...]
) -> tuple[tuple[int, ...], Finish | None]:
    """Cut the tokens of a step behind the first that ends the completion.

    A stop id wins over a length reached by the same token. The request's own stop ids win over the model's EOS. None of
    a completion's first `min_tokens` tokens is a stop: the earliest is the one behind them.
    """
    stop_ids, eos_ids = request.stop_token_ids, () if request.ignore_eos else eos_token_ids
    room = request.max_total_tokens - request.num_tokens
    first_stop = max(0, request.min_tokens - len(request.output_token_ids)) if request.min_tokens else 0
    for index in range(first_stop, min(len(token_ids), room)):
        token = token_ids[index]
        if token in stop_ids:
            return token_ids[: index + 1], Finish(FinishReason.STOP_TOKEN, stop_token_id=token)
        if token in eos_ids:
            return token_ids[: index + 1], Finish(FinishReason.EOS, stop_token_id=token)
    if len(token_ids) < room:
        return token_ids, None
    stop = request.stop
    own_limit = stop.max_tokens is not None and stop.max_tokens <= request.max_output_tokens
    return token_ids[:room], Finish(FinishReason.MAX_TOKENS if own_limit else FinishReason.CONTEXT_LENGTH)
