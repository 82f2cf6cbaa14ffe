"""How a server is asked: one small protocol, one class per kind of server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final, Protocol, Unpack
from urllib.parse import urlsplit

from paceline.client import AsyncClient, ClientOptions, Finished, RpcError
from paceline.errors import InvalidArgument, PacelineError
from paceline_loadtest.workload import PlannedRequest


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """What speculation did for one request, in counts: `drafts` are the steps that verified a draft."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the server says at the end of a request; `speculation` is None where it says nothing of it."""

    input_tokens: int
    output_tokens: int
    finish_reason: str
    speculation: SpeculationCounts | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message of a stream: tokens that are new, and with the last one the outcome."""

    num_tokens: int
    outcome: Outcome | None = None


class RequestFailed(Exception):
    """A request that ended with an error, which the report counts by its `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Client(Protocol):
    """A connection to a server of any kind."""

    def stream(self, request: PlannedRequest) -> AsyncGenerator[Chunk, None]:
        """Send `request` when first asked for a chunk; closing the generator early cancels it.

        Raises:
            RequestFailed: the server, or the way to it, failed. Anything else that is raised ends the whole run.
        """
        ...

    async def aclose(self) -> None:
        """Close the connection."""
        ...


class GrpcClient:
    """Paceline's own protocol. Closes `client` when closed."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def stream(self, request: PlannedRequest) -> AsyncGenerator[Chunk, None]:
        """See `Client`."""
        options = request.options
        try:
            generation = self._client.generate(
                request.prompt,
                timeout=options.timeout,
                max_tokens=request.max_tokens,
                temperature=options.temperature,
                ignore_eos=options.ignore_eos,
                speculation=options.speculation,
            )
            async with generation:
                async for delta in generation:
                    yield Chunk(len(delta.token_ids))
        except RpcError as error:
            raise RequestFailed(error.code.name, error.message) from error
        except PacelineError as error:  # refused before it was sent
            raise RequestFailed("INVALID_ARGUMENT", str(error)) from error
        if generation.finished is not None:
            yield Chunk(0, _outcome(generation.finished))

    async def aclose(self) -> None:
        """See `Client`."""
        await self._client.aclose()


def _outcome(finished: Finished) -> Outcome:
    stats = finished.speculation
    return Outcome(
        input_tokens=finished.usage.prompt_tokens,
        output_tokens=finished.usage.completion_tokens,
        finish_reason=finished.reason.value,
        speculation=SpeculationCounts(
            drafts=stats.draft_steps,
            draft_tokens=stats.drafted_tokens,
            accepted_tokens=stats.accepted_tokens,
            accepted_by_position=stats.accepted_by_position,
        ),
    )


def _open_grpc(address: str, options: ClientOptions) -> GrpcClient:
    """Without retries: what a server refuses is counted as refused."""
    once: ClientOptions = {**options, "max_retries": 0}
    return GrpcClient(AsyncClient(address, **once))


_SCHEMES: Final[dict[str, Callable[[str, ClientOptions], Client]]] = {"grpc": _open_grpc}


def open_client(target: str, **options: Unpack[ClientOptions]) -> Client:
    """The client for a target such as `grpc://HOST:PORT`, or `HOST:PORT` for short; it connects with its first request.

    Args:
        options: keys, TLS and the like, as `paceline.client` takes them; nothing is ever tried again.

    Raises:
        InvalidArgument: not a target, a scheme that nothing here speaks, or an option that is not allowed.
    """
    supported = "HOST:PORT or one of " + ", ".join(f"{scheme}://HOST:PORT" for scheme in _SCHEMES)
    try:
        parts = urlsplit(target if "://" in target else f"grpc://{target}")
        complete = bool(parts.hostname and parts.port) and not (parts.path.strip("/") or parts.query or parts.fragment)
    except ValueError as error:  # a port that is no number, a bracket without its pair
        raise InvalidArgument("target", target, supported) from error
    if parts.scheme not in _SCHEMES or not complete:
        raise InvalidArgument("target", target, supported)
    return _SCHEMES[parts.scheme](parts.netloc, options)
