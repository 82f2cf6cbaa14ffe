import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from paceline.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "max_running_requests", "max_waiting_requests", "kv_blocks", "free_kv_blocks", "tokens_per_second", "draining")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    max_running_requests: int
    max_waiting_requests: int
    kv_blocks: int
    free_kv_blocks: int
    tokens_per_second: float
    draining: bool
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., free_kv_blocks: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., draining: _Optional[bool] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "model", "prompt_tokens", "completion_tokens", "choices", "running_choices", "age", "depth", "acceptance")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_CHOICES_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    model: str
    prompt_tokens: int
    completion_tokens: int
    choices: int
    running_choices: int
    age: _duration_pb2.Duration
    depth: int
    acceptance: float
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., choices: _Optional[int] = ..., running_choices: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., depth: _Optional[int] = ..., acceptance: _Optional[float] = ...) -> None: ...

class CancelGenerationRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class CancelGenerationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("ended", "failed")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ended: int
    failed: int
    def __init__(self, ended: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("uptime", "tenants", "speculation")
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    uptime: _duration_pb2.Duration
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStats]
    speculation: SpeculationReport
    def __init__(self, uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantStats, _Mapping]]] = ..., speculation: _Optional[_Union[SpeculationReport, _Mapping]] = ...) -> None: ...

class TenantStats(_message.Message):
    __slots__ = ("tenant", "requests", "ended", "prompt_tokens", "cached_prompt_tokens", "completion_tokens", "drafted_tokens", "accepted_tokens", "engine_seconds", "rejected_seconds", "queue_seconds", "preemptions", "running_requests", "waiting_requests", "weight", "saved_seconds", "service_seconds")
    class EndedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SAVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    requests: int
    ended: _containers.ScalarMap[str, int]
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    engine_seconds: float
    rejected_seconds: float
    queue_seconds: float
    preemptions: int
    running_requests: int
    waiting_requests: int
    weight: float
    saved_seconds: float
    service_seconds: float
    def __init__(self, tenant: _Optional[str] = ..., requests: _Optional[int] = ..., ended: _Optional[_Mapping[str, int]] = ..., prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., engine_seconds: _Optional[float] = ..., rejected_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., preemptions: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., weight: _Optional[float] = ..., saved_seconds: _Optional[float] = ..., service_seconds: _Optional[float] = ...) -> None: ...

class SpeculationReport(_message.Message):
    __slots__ = ("depth", "tokens_per_second", "drafters", "saved_seconds", "rejected_seconds", "checked_saved_seconds")
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    SAVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_SAVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    depth: int
    tokens_per_second: float
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterStats]
    saved_seconds: float
    rejected_seconds: float
    checked_saved_seconds: float
    def __init__(self, depth: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., drafters: _Optional[_Iterable[_Union[DrafterStats, _Mapping]]] = ..., saved_seconds: _Optional[float] = ..., rejected_seconds: _Optional[float] = ..., checked_saved_seconds: _Optional[float] = ...) -> None: ...

class DrafterStats(_message.Message):
    __slots__ = ("mode", "rule", "acceptance", "drafted_tokens", "accepted_tokens")
    MODE_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    mode: _generation_pb2.SpeculationMode
    rule: str
    acceptance: _containers.RepeatedScalarFieldContainer[float]
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, mode: _Optional[_Union[_generation_pb2.SpeculationMode, str]] = ..., rule: _Optional[str] = ..., acceptance: _Optional[_Iterable[float]] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...
