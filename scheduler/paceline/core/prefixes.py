"""What of a request's tokens is computed already: by another completion of its prompt, or by whoever came before."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.kv_cache_manager import KVCacheManager
from paceline.core.prefix_cache import first_key, next_key
from paceline.core.request import Request


class Prefixes:
    """Finds full blocks and lets them be found. A request's newest token is always computed anew, for its logits."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.kv = kv
        self.scope = config.prefix_cache
        self.is_on = self.scope is not PrefixScope.OFF
        self.block_size = config.block_size

    def find(self, request: Request) -> tuple[Sequence[int], int]:
        """Full blocks that hold the first of its known tokens, and how many of them hold their draft KV too.

        Who asks for logprobs of the prompt needs the logits of all of it.
        """
        if request.params.logprobs.prompt is not None and not request.output_token_ids:
            return (), 0
        known: Sequence[int] = ()
        if self.is_on:
            known = self.kv.cache.find(self._keys(request, (request.num_tokens - 1) // self.block_size))
        if self._num_shareable(request) > len(known):
            for sibling in request.siblings.running.values():
                if self.has_prompt(sibling):
                    blocks = self.kv.table(sibling.request_id)[: self._num_shareable(request)]
                    return blocks, min(len(blocks), sibling.num_draft_computed // self.block_size)
        return known, self.kv.cache.num_drafted(known)

    def awaits_sibling(self, request: Request) -> bool:
        """Another completion computes the prompt right now, of which this one will share whole blocks."""
        computes = False
        for sibling in request.siblings.running.values():
            # One of a single token ends with the step that computes its prompt: nobody can share with it.
            if sibling.max_output_tokens > 1:
                if self.has_prompt(sibling):
                    return False
                computes = True
        return computes

    def share(self, request: Request, blocks: Sequence[int], num_drafted: int) -> None:
        """Begin the request's table with what was found for it."""
        self.kv.share(request.request_id, blocks)
        request.num_computed_tokens = len(blocks) * self.block_size
        request.num_draft_computed = num_drafted * self.block_size
        request.num_known_blocks, request.num_drafted_blocks = len(blocks), num_drafted

    def remember(self, request: Request) -> None:
        """Let others find the blocks that are full and computed."""
        if not self.is_on:
            return
        size = self.block_size
        full = request.num_computed_tokens // size
        drafted = min(full, request.num_draft_computed // size)
        if full == request.num_known_blocks and drafted == request.num_drafted_blocks:
            return
        cache, table_id = self.kv.cache, request.request_id
        if full > request.num_known_blocks:
            keys = self._keys(request, full)
            for index in range(request.num_known_blocks, full):
                cache.insert(keys[index], self.kv.block(table_id, index))
            request.num_known_blocks = full
        if drafted > request.num_drafted_blocks:
            keys = self._keys(request, drafted)
            for index in range(request.num_drafted_blocks, drafted):
                cache.mark_drafted(keys[index], self.kv.block(table_id, index))
            request.num_drafted_blocks = drafted

    def forget(self, request: Request) -> None:
        """Let nobody find the blocks of the request any more, those included that it has found: whoever put them there
        may have ended before anybody looked at what was computed.
        """
        for key in request.block_keys:  # one by one: what they begin with may have been forgotten with another
            for block in self.kv.cache.find([key]):
                self.kv.cache.forget(block)

    def _num_shareable(self, request: Request) -> int:
        """Blocks that the prompt fills, without its last token."""
        return (len(request.prompt_token_ids) - 1) // self.block_size

    def has_prompt(self, request: Request) -> bool:
        """It has computed all of the prompt that its siblings can share."""
        return request.num_computed_tokens >= self._num_shareable(request) * self.block_size

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """Of the request's first blocks, all of whose tokens are known."""
        keys, size = request.block_keys, self.block_size
        if not keys and count:
            salt = request.tenant if self.scope is PrefixScope.TENANT else ""
            keys.append(next_key(first_key(salt), request.tokens_between(0, size)))
        for index in range(len(keys), count):
            keys.append(next_key(keys[-1], request.tokens_between(index * size, (index + 1) * size)))
        return keys[:count]
