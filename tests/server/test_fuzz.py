"""Requests that nobody would send: every field at the ends of its range, and bytes cut, flipped and nested.

Whatever comes, a call ends with a status that says what is wrong with the request. UNKNOWN and INTERNAL would say that
something is wrong with the server. A failure is shrunk to the few changes that make it.

    FUZZ=100000 pytest tests/server/test_fuzz.py    # this many requests instead of the usual few thousand
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.v1 import admin_pb2, model_pb2
from paceline.v1 import generation_pb2 as pb
from support.serving import MODEL, Serving, details_of, request

NUM_REQUESTS = int(os.environ.get("FUZZ", "5000"))
PATIENCE = 30.0  # seconds for a call, and for a thousand of them; nothing is asserted about time
MOST_READ = 20  # messages, before a call is cancelled
OURS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}

GENERATE = pb.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name["Generate"]
GENERATE_MANY = pb.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name["GenerateMany"]
OTHERS = [
    method
    for file in (model_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "Drain"  # which would end the test
]

# -- what to change ---------------------------------------------------------------------------------------------------

TEXTS = ["", "\0", " ", "a", "é", "😀" * 100, "x" * 300, "x" * 5000, "\u202e{{7*7}}%s%n", MODEL, '{"type": "object"}']
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: [0, 1, -1, 1000, 1001, 2**31 - 1, -(2**31)],
    FieldDescriptor.CPPTYPE_INT64: [0, 1, -1, 2**31, 315_576_000_000, 2**63 - 1, -(2**63)],
    FieldDescriptor.CPPTYPE_UINT32: [0, 1, 2, 64, 65, 990, 997, 2047, 2048, 2**31, 2**32 - 1],
    FieldDescriptor.CPPTYPE_UINT64: [0, 1, 2**63, 2**64 - 1],
    FieldDescriptor.CPPTYPE_ENUM: [0, 1, 2, 3, 4, 5, 77, -1, 2**31 - 1, -(2**31)],
}
FLOATS = [0.0, -0.0, 1e-45, 1e-7, 0.5, 1.0, 1.0000001, 2.0, 100.0, -2.0, -1e30, 3.4e38, math.inf, -math.inf, math.nan]
LENGTHS = (1, 2, 17, 257, 1025)


@dataclass(frozen=True)
class Change:
    """Give the field at the end of `path` a value; a list, to a repeated field; None: empty, but present."""

    path: tuple[str, ...]
    value: Any

    def apply(self, message: Message) -> None:
        *parents, name = self.path
        for parent in parents:
            message = getattr(message, parent)
        field = message.DESCRIPTOR.fields_by_name[name]
        if field.is_repeated and field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, name).update(self.value)
        elif field.is_repeated:
            del getattr(message, name)[:]
            getattr(message, name).extend(self.value)
        elif field.message_type is not None:
            getattr(message, name).SetInParent()
        else:
            setattr(message, name, self.value)


def changes(kind: Descriptor, path: tuple[str, ...] = ()) -> Iterator[Change]:
    """Every field of a message, and of those in it, at the ends of what its type can hold."""
    for field in kind.fields:
        where = (*path, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key in scalars(field.message_type.fields_by_name["key"]):
                for value in scalars(field.message_type.fields_by_name["value"]):
                    yield Change(where, {key: value})
            yield Change(where, dict.fromkeys(range(1025), 1.0))
        elif field.is_repeated and field.message_type is not None:
            yield Change(where, [])
            items = [GetMessageClass(field.message_type)()]
            for change in changes(field.message_type):
                item = GetMessageClass(field.message_type)()
                change.apply(item)
                items.append(item)
            yield from (Change(where, [item]) for item in items)
            yield Change(where, items)
        elif field.is_repeated:
            values = scalars(field)
            yield Change(where, [])
            yield Change(where, values)
            yield from (Change(where, values[:1] * length) for length in LENGTHS)
            yield from (Change(where, [value]) for value in values)
        elif field.message_type is not None:
            yield Change(where, None)
            yield from changes(field.message_type, where)
        else:
            yield from (Change(where, value) for value in scalars(field))


def scalars(field: FieldDescriptor) -> list[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return TEXTS
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return FLOATS
        case FieldDescriptor.CPPTYPE_BOOL:
            return [False, True]
        case cpp_type:
            return INTEGERS[cpp_type]


@dataclass(frozen=True)
class Damage:
    """What happens to the bytes at a place, which counts in 1/65536 of their length."""

    kind: str
    place: int
    value: int

    def apply(self, data: bytes) -> bytes:
        at = len(data) * self.place >> 16
        match self.kind:
            case "flip":
                return data if not data else data[:at] + bytes([data[at] ^ 1 << self.value % 8]) + data[at + 1 :]
            case "cut":
                return data[:at]
            case "insert":
                return data[:at] + bytes([self.value]) * 3 + data[at:]
            case "repeat":
                return data + data[at:]
            case "not UTF-8":
                return data.replace(b"hello", b"h\xff\xfe\xc0o")
            case "unknown field":
                return data + varint(99_999 << 3 | 2) + varint(self.value) + bytes(self.value)
            case "unknown wire type":
                return data + varint(15 << 3 | 6 + self.value % 2)
            case "groups":
                return data + varint(99 << 3 | 3) * (100 * self.value)
            case _:
                assert self.kind == "nested", self.kind
                inner = b""
                for _ in range(100):
                    inner = varint(2 << 3 | 2) + varint(len(inner)) + inner  # in a field that is a message, often
                return data + inner


def varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


DAMAGES = st.builds(
    Damage,
    st.sampled_from(
        ["flip", "cut", "insert", "repeat", "not UTF-8", "unknown field", "unknown wire type", "groups", "nested"]
    ),
    st.integers(0, 65535),
    st.integers(0, 255),
)


def requests(method: MethodDescriptor) -> st.SearchStrategy[bytes]:
    """Bytes of a request: a good one, a few changes, and sometimes damage."""
    # The field first, since some have many more values than others.
    by_field: dict[tuple[str, ...], list[Change]] = {}
    for change in changes(method.input_type):
        by_field.setdefault(change.path, []).append(change)
    few = st.lists(st.sampled_from(list(by_field.values())).flatmap(st.sampled_from), max_size=5 if by_field else 0)
    damages = st.one_of(st.just([]), st.lists(DAMAGES, max_size=3))
    return st.builds(build, st.just(GetMessageClass(method.input_type)), few, damages)


def build(kind: type[Message], few: list[Change], damages: list[Damage]) -> bytes:
    message = kind()
    if isinstance(message, pb.GenerateRequest):
        message.CopyFrom(request())
    elif isinstance(message, pb.GenerateManyRequest):
        message.start.CopyFrom(request())
    for change in few:
        change.apply(message)
    data = message.SerializeToString()
    for damage in damages:
        data = damage.apply(data)
    return tamed(kind, data)


def tamed(kind: type[Message], data: bytes) -> bytes:
    """The same, but of what would be served not so much that it takes long."""
    try:
        message = kind.FromString(data)
    except DecodeError:
        return data
    generate = message.start if isinstance(message, pb.GenerateManyRequest) else message
    if not isinstance(generate, pb.GenerateRequest):
        return data
    stop = generate.stop
    if stop.max_tokens > 64 or not stop.HasField("max_tokens"):
        stop.max_tokens = 8
    return message.SerializeToString()


# -- what must come of it ---------------------------------------------------------------------------------------------


@pytest.fixture
async def busy(free: Serving) -> Serving:
    """With a tenant whose requests may have to wait, and one that has little.

    Not in asyncio's debug mode, which walks the stack whenever a future is made: after some thousand requests one such
    walk did not end and took all of the memory (CPython 3.11.7: the frame was, by its `f_back`, above itself).
    """
    asyncio.get_running_loop().set_debug(False)
    policies = {"a": TenantPolicy(max_running=1, max_queued=4), "x" * 100: TenantPolicy(tokens_per_second=100.0)}
    free.scheduler.tenants.set_policies(policies, ONE_SHARE, 0.0)
    return free


def fuzz(share: float) -> Any:
    """Of all the requests this share, without a limit on the time for each."""
    return settings(
        max_examples=max(10, round(NUM_REQUESTS * share)),
        deadline=None,
        database=None,
        derandomize="FUZZ" not in os.environ,  # in CI always the same
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def check(error: grpc.aio.AioRpcError) -> None:
    event(error.code().name)  # for --hypothesis-show-statistics
    assert error.code() not in OURS, error
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        assert {"ErrorInfo", "BadRequest"} <= details_of(error).keys()


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.timeout(60 + NUM_REQUESTS / 1000 * PATIENCE)
class TestFuzz:
    @fuzz(0.7)
    @given(data=requests(GENERATE))
    async def test_generate(self, busy: Serving, data: bytes) -> None:
        call = busy.channel.unary_stream(path_of(GENERATE))(data, timeout=PATIENCE)
        try:
            for _ in range(MOST_READ):
                if await call.read() is grpc.aio.EOF:
                    break
        except grpc.aio.AioRpcError as error:
            check(error)
        finally:
            call.cancel()
        self.check_engine(busy)

    @fuzz(0.15)
    @given(data=st.sampled_from(OTHERS).flatmap(lambda method: st.tuples(st.just(method), requests(method))))
    async def test_the_other_methods(self, busy: Serving, data: tuple[MethodDescriptor, bytes]) -> None:
        method, message = data
        try:
            await busy.channel.unary_unary(path_of(method))(message, timeout=PATIENCE)
        except grpc.aio.AioRpcError as error:
            check(error)

    @fuzz(0.15)
    @given(several=st.lists(requests(GENERATE_MANY), max_size=4))
    async def test_generate_many(self, busy: Serving, several: list[bytes]) -> None:
        parse = pb.GenerateManyResponse.FromString
        call = busy.channel.stream_stream(path_of(GENERATE_MANY), response_deserializer=parse)(timeout=PATIENCE)
        try:
            for message in several:
                await call.write(message)
            await call.done_writing()
            for _ in range(MOST_READ):
                responses = await call.read()
                if responses is grpc.aio.EOF:
                    break
                for keyed in responses.responses:
                    assert keyed.error.code not in {code.value[0] for code in OURS}, keyed
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            error = await status_of(call)
            # What the client's library makes up when the RPC ends while it writes.
            if error.details() != "Internal error from Core":
                check(error)
            else:
                # It holds the call for ended (grpcio 1.85), and so cancel() does nothing; but the call goes on waiting
                # for its status, which comes behind messages that nobody can read any more.
                call._cython_call.cancel("ended while it was written to")
        finally:
            call.cancel()
        self.check_engine(busy)

    def check_engine(self, served: Serving) -> None:
        assert served.engine.healthy


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    """Of a call that has ended, also where that was noticed when something was to be written."""
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )
