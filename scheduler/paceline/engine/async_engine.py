"""The engine on an event loop: the step loop, and one stream per request."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from paceline.core.plan import StepPlan, StepResult
from paceline.core.tenant_policy import TenantPolicy
from paceline.engine.engine import Engine, Prepared
from paceline.engine.fair_threads import FairThreads
from paceline.engine.interruption import Interrupt, interruptible
from paceline.engine.request import ChatMessage, GenerationRequest, Prompt
from paceline.engine.stream import Stream, publish
from paceline.engine.turns import Turns
from paceline.errors import Cancelled, EngineDead, PacelineError, Reason, Unavailable
from paceline.options import MAX_COMPLETIONS

logger = logging.getLogger(__name__)

# Text longer than this, in characters, is tokenised in another thread: about a millisecond's worth.
LONG_TEXT = 4096
LONG_IDS = 256  # as much, in tokens to be made text
LONG_PROMPT = 8192  # as much, in ids of a prompt to be looked at
LONG_STOPS = 512  # as much, in characters of stop strings
MESSAGE_CHARS = 64  # a message of a conversation takes as long as so many characters, besides those that it has
IDLE_SECONDS = 1.0  # without work, before the invariants are checked


def forward_worker() -> ThreadPoolExecutor:
    """The one thread that runs forwards.

    It should load the model and warm up too: every thread that computes gets an OpenMP pool of its own, and with more
    pool threads than cores their barriers sleep instead of spinning, which doubles the time of a small model's step.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-forward")


class AsyncEngine:
    """Runs an `Engine`'s steps while there is work, and sleeps on an event while there is none.

    The engine and its core are touched on the event loop's thread only; the forward runs in one worker thread. So a
    request may be added or aborted at any moment, during a forward too, and takes effect at once.

    Args:
        engine: owned by this object from now on.
        lag: plans made ahead of the result they follow, 0 or 1. With 1 the next step is planned while one runs, and
            launched, too, by a `PipelinedRunner`. None takes 1 for such a runner, else 0.
        worker: `forward_worker()`, if it has built the engine already; owned by this object from now on.

    Attributes:
        on_death: called, in order, with the error that ended the engine. Append to it.
    """

    def __init__(self, engine: Engine, *, lag: int | None = None, worker: ThreadPoolExecutor | None = None) -> None:
        assert lag in (None, 0, 1), lag
        self.engine = engine
        self._launch = engine.launch
        self.lag = int(self._launch is not None) if lag is None else lag
        self.on_death: list[Callable[[EngineDead], None]] = []
        self._streams: dict[int, Stream] = {}  # by the id of each live completion
        self._preparing: set[Interrupt] = set()  # what interrupts each request that is prepared in another thread
        self._turns = Turns()
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()  # no request is live
        self._empty.set()
        self._threads = FairThreads()
        self._worker = forward_worker() if worker is None else worker
        # Waits for steps that were launched, while the worker launches the next.
        self._collector = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-results")
        self._task: asyncio.Task[None] | None = None
        self._draining = False
        self._stopping = False
        self._failed: set[int] = set()  # requests that draining, stopping or death ended
        self._death: EngineDead | None = None

    @property
    def healthy(self) -> bool:
        """The step loop runs. Stays true while draining."""
        return self._task is not None and not self._stopping and self._death is None

    @property
    def draining(self) -> bool:
        """New requests are refused."""
        return self._draining or self._stopping

    @property
    def num_live(self) -> int:
        """Completions that have not ended."""
        return len(self._streams)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def submit(self, request: GenerationRequest) -> Stream:
        """Queue a request. Nothing is queued if this raises, or is cancelled.

        Raises:
            EngineDead: the engine has failed.
            Unavailable: it is not running, draining, or its queue is full.
            DeadlineExceeded: the time is over already, or would be before the completion is whole.
            PacelineError: whatever `Engine.places_kept`, `Engine.prepare` and `Engine.add` refuse.
        """
        self._check_open()
        arrival = self.engine.clock()
        if _takes_long(request):
            prepared = await self._prepare_elsewhere(request, arrival)
            self._check_open()
        else:
            prepared = self.engine.prepare(request)
        request_id = self.engine.add(request, prepared, arrival)
        stream = Stream(
            request_id,
            len(prepared.prompt_token_ids),
            self._abandon,
            request.n,
            self._turns,
            first_leads=request.logprobs.prompt is not None,
        )
        self._streams.update((request_id + choice, stream) for choice in range(request.n))
        self._empty.clear()
        self._wake.set()
        return stream

    async def _prepare_elsewhere(self, request: GenerationRequest, arrival: float) -> Prepared:
        """In another thread. Meanwhile it counts as waiting, and gives way to another tenant as those who wait do."""
        async with interruptible() as interrupt:
            with self.engine.places_kept(request, arrival, interrupt):
                self._wake.set()  # somebody may have given way to it
                self._preparing.add(interrupt)
                try:
                    return await self._threads.run(request.scheduling.tenant, self.engine.prepare, request)
                finally:
                    self._preparing.discard(interrupt)

    async def tokenize(self, prompt: Prompt, field: str = "prompt_text", *, tenant: str = "") -> tuple[int, ...]:
        """The ids of a prompt, as `submit` would read it. Arguments and errors are those of `Engine.tokenize`.

        Args:
            tenant: whose turn it takes, where it takes long.
        """
        if _text_length(prompt) > LONG_TEXT:
            return await self._threads.run(tenant, self.engine.tokenize, prompt, field)
        return self.engine.tokenize(prompt, field)

    async def detokenize(self, token_ids: Sequence[int], special_tokens: bool, *, tenant: str = "") -> str:
        """The text of tokens, as a stream would show it. Arguments and errors are those of `Engine.detokenize`.

        Args:
            tenant: as for `tokenize`.
        """
        if len(token_ids) > LONG_IDS:
            return await self._threads.run(tenant, self.engine.detokenize, token_ids, special_tokens)
        return self.engine.detokenize(token_ids, special_tokens)

    def set_policies(self, policies: Mapping[str, TenantPolicy], default: TenantPolicy | None) -> None:
        """Put other policies of tenants in place. Who waits, and need not any more, goes on at once.

        Args:
            policies, default: see `Tenants`.
        """
        self.engine.scheduler.tenants.set_policies(policies, default, self.engine.clock())
        self._wake.set()

    def abort(self, request_id: int) -> bool:
        """End a request now, all of its completions; its stream fails with Cancelled. False if none is live.

        Args:
            request_id: `Stream.request_id`.
        """
        return self._end(request_id, Cancelled("the request was aborted"))

    def _abandon(self, request_id: int) -> None:
        self._end(request_id, Cancelled("nobody reads the stream"))

    def _end(self, request_id: int, error: PacelineError) -> bool:
        """The way out of every request that does not finish: its blocks are free on return."""
        live = self._live_completions(request_id)
        if not live:
            return False
        for completion_id in live:
            stream = self._streams.pop(completion_id)
            self.engine.abort(completion_id)
            stream.fail(error)
        if not self._streams:
            self._empty.set()
        return True

    def _live_completions(self, request_id: int) -> list[int]:
        """The ids of a request's completions that have not ended."""
        ids = range(request_id, request_id + MAX_COMPLETIONS)
        return [i for i in ids if i in self._streams and self._streams[i].request_id == request_id]

    def _check_open(self) -> None:
        refusal = self._refusal()
        if refusal is not None:
            raise refusal

    def _refusal(self) -> PacelineError | None:
        """Why nothing new is taken; a new error for each, see `_dead`."""
        if self._death is not None:
            return EngineDead(str(self._death))
        if self._draining or self._stopping:
            return Unavailable("the server is shutting down", reason=Reason.DRAINING)
        if self._task is None:
            return Unavailable("the engine is not running yet", reason=Reason.MODEL_LOADING)
        return None

    def _refuse_preparing(self) -> None:
        """Those that are being prepared need not wait for it to hear what `_check_open` will say."""
        for interrupt in self._preparing:
            refusal = self._refusal()
            assert refusal is not None, "nothing is refused"
            interrupt(refusal)

    # -- life and death -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the step loop on the running event loop. Once only."""
        assert self._task is None, "started twice"
        self._task = asyncio.get_running_loop().create_task(self._run(), name="paceline-steps")

    async def drain(self, grace: float | None) -> tuple[int, int]:
        """Refuse new requests, and at once those that are being prepared; give the live ones `grace` seconds to end, or
        for ever. The others fail with Unavailable.

        Returns:
            How many requests ended by themselves, and how many failed.
        """
        self._draining = True
        self._refuse_preparing()
        live = self._live_requests()
        await self._close_engine()
        try:
            async with asyncio.timeout(grace):
                await self._empty.wait()
        except TimeoutError:
            self._end_all("the server is shutting down")
        failed = live & self._failed  # by whomever: another may have had less grace
        return len(live - failed), len(failed)

    async def stop(self) -> None:
        """End every request and the step loop; the forward that runs is waited for. More calls have no effect."""
        self._stopping = True
        self._refuse_preparing()
        self._end_all("the server is shutting down")
        self._wake.set()
        if self._task is not None:
            # Unlike awaiting the task, this does not cancel it when the caller is cancelled.
            await asyncio.wait([self._task])
        await self._close_engine()
        self._worker.shutdown(wait=False)
        self._collector.shutdown(wait=False)

    async def _close_engine(self) -> None:
        """No grammar is needed any more. Processes that end take the system a while."""
        await asyncio.to_thread(self.engine.close)

    def _end_all(self, reason: str) -> None:
        for request_id in self._live_requests():
            self._failed.add(request_id)
            self._end(request_id, Unavailable(reason, reason=Reason.DRAINING))

    def _live_requests(self) -> set[int]:
        return {stream.request_id for stream in self._streams.values()}

    def _die(self, cause: BaseException) -> None:
        """Every live stream ends with EngineDead, and nothing starts any more. The core may be in any state."""
        logger.critical("the engine failed", exc_info=cause)
        self._death = _dead(cause)
        self._refuse_preparing()
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._collector.shutdown(wait=False, cancel_futures=True)
        streams = {stream.request_id: stream for stream in self._streams.values()}
        self._failed.update(streams)
        self._streams.clear()
        self._empty.set()
        for stream in streams.values():
            stream.fail(_dead(cause))
        for callback in self.on_death:
            try:
                callback(self._death)
            except Exception:
                logger.exception("a callback for the engine's death failed")

    # -- steps --------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while not self._stopping:
                await self._work()
                await asyncio.sleep(0)
                await self._sleep()
        except Exception as error:
            self._die(error)
        except BaseException as error:
            self._die(error)
            raise

    async def _sleep(self) -> None:
        """Nothing could be planned: wait for the next request, or for what the live ones wait for.

        Without any for a while, check the books, which takes milliseconds for a large pool.
        """
        if self._stopping or self._wake.is_set():
            return
        if self.engine.has_work:
            await self._woken(self.engine.seconds_to_wait())
        elif not await self._woken(IDLE_SECONDS):
            self.engine.check_invariants()
            await self._wake.wait()

    async def _woken(self, seconds: float) -> bool:
        """Somebody called within so many seconds; it has been waited for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        return self._wake.is_set()

    async def _work(self) -> None:
        """Step until no plan can be made and no result is outstanding."""
        loop = asyncio.get_running_loop()
        outstanding: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
        try:
            while True:
                self._wake.clear()  # what came before is in this plan, as far as it can be
                plan = self.engine.plan()
                self._tell_refused()
                if plan is not None:
                    outstanding.append((plan, self._start(plan, loop)))
                    if len(outstanding) <= self.lag:
                        continue
                if not outstanding:
                    return
                plan, future = outstanding.popleft()
                await self._finish(plan, future)
        finally:
            # Left over only when the loop dies: nobody will ask for these results, nor for their errors.
            for _, future in outstanding:
                future.add_done_callback(lambda left: left.cancelled() or left.exception())

    def _start(self, plan: StepPlan, loop: asyncio.AbstractEventLoop) -> asyncio.Future[StepResult]:
        if self._launch is None:
            return loop.run_in_executor(self._worker, self.engine.runner.execute, plan)
        launched = self._worker.submit(self._launch, plan)
        return loop.run_in_executor(self._collector, lambda: launched.result().result())

    def _tell_refused(self) -> None:
        for request_id, error in self.engine.take_refused():
            if request_id in self._streams:  # else another completion has taken the whole request along
                self._end(self._streams[request_id].request_id, error)

    async def _finish(self, plan: StepPlan, future: asyncio.Future[StepResult]) -> None:
        if future.done():
            await asyncio.sleep(0)  # awaiting it would not let anybody else run
        result = await future
        publish(self.engine.finish(plan, result), self._streams)
        if not self._streams:
            self._empty.set()


def _takes_long(request: GenerationRequest) -> bool:
    """To prepare: the event loop cannot wait for it. Each bad word is encoded by itself, twice."""
    return (
        request.grammar is not None
        or bool(request.sampling.bad_words)
        or sum(map(len, request.stop.strings)) > LONG_STOPS
        or _text_length(request.prompt) > LONG_TEXT
        or len(request.prompt) > LONG_PROMPT
    )


def _text_length(prompt: Prompt) -> int:
    """Characters to tokenise, and what as many messages take to be rendered."""
    if isinstance(prompt, str):
        return len(prompt)
    if not prompt or not isinstance(prompt[0], ChatMessage):  # ids, which may be many
        return 0
    return sum(MESSAGE_CHARS + len(item.content) for item in prompt if isinstance(item, ChatMessage))


def _dead(cause: BaseException) -> EngineDead:
    """A new error for each stream, since one that several tasks raise collects all their tracebacks.

    Clients see its text, and not that of the cause, which may hold anything.
    """
    error = EngineDead("the engine failed and serves no more requests")
    error.__cause__ = cause
    return error
