"""What a server serves, and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.client.question import Question
from paceline.client.request import Prompt, build_detokenize, build_named, build_tokenize
from paceline.client.results import read_fields
from paceline.v1 import model_pb2 as pb


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a server serves.

    Attributes:
        max_model_len: tokens of prompt and completion together, at most.
        speculation_modes: how drafts can be made, the server's default first; "off" among them.
        default_sampling: what a request samples with where it says nothing, by the names of the options.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    speculation_modes: tuple[str, ...]
    max_draft_tokens: int
    default_sampling: Mapping[str, float]
    has_chat_template: bool
    has_structured_output: bool
    max_logprobs: int


def ask_model(name: str) -> Question[Model]:
    request = build_named(pb.GetModelRequest(), model=name)
    return Question("/paceline.v1.ModelService/GetModel", request, pb.GetModelResponse, lambda a: _read_model(a.model))


def ask_models() -> Question[tuple[Model, ...]]:
    return Question(
        "/paceline.v1.ModelService/ListModels",
        pb.ListModelsRequest(),
        pb.ListModelsResponse,
        lambda answer: tuple(map(_read_model, answer.models)),
    )


def ask_tokens(prompt: Prompt, model: str) -> Question[tuple[int, ...]]:
    return Question(
        "/paceline.v1.ModelService/Tokenize",
        build_tokenize(prompt, model),
        pb.TokenizeResponse,
        lambda answer: tuple(answer.token_ids),
    )


def ask_text(token_ids: Sequence[int], include_special_tokens: bool, model: str) -> Question[str]:
    return Question(
        "/paceline.v1.ModelService/Detokenize",
        build_detokenize(token_ids, include_special_tokens, model),
        pb.DetokenizeResponse,
        lambda answer: str(answer.text),
    )


def _read_model(message: pb.Model) -> Model:
    sampling = message.default_sampling
    scalars = {field.name: value for field, value in sampling.ListFields() if not field.is_repeated}
    return read_fields(Model, message, default_sampling=scalars)
