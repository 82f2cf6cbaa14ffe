"""The adapter against transformers' own encode and decode, for both kinds of vocabulary."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from paceline.engine import ChatMessage, TransformersTokenizer
from paceline.errors import FailedPrecondition, InvalidArgument, ModelLoadError

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "héllo wörld, 10 € for a 🚴\u200d♀️",
    "नमस्ते  tabs\tand  spaces ",
    "<call>",
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def wrap(backend: Tokenizer, **settings: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)  # type: ignore[no-untyped-call]


def finish(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<call>"), AddedToken("<a b>")])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    # As some published files have it.
    backend.enable_truncation(5)
    backend.enable_padding(length=100, pad_id=backend.token_to_id("</s>"), pad_token="</s>")
    return wrap(backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)


def byte_level() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS * 3, trainer)
    return finish(backend)


def sentence_piece() -> PreTrainedTokenizerFast:
    pieces = [*"abdefhlnortuw(),:+1089", "\u2581", "\u2581d", "re", "é"]
    vocabulary = {token: index for index, token in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *pieces])}
    backend = Tokenizer(models.BPE(vocabulary, [("\u2581", "d"), ("r", "e")], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return finish(backend)


@pytest.fixture(scope="module", params=[byte_level, sentence_piece])
def transformers_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    made: PreTrainedTokenizerFast = request.param()
    return made


def decode(tokenizer: TransformersTokenizer, token_ids: list[int], special_tokens: bool = False) -> str:
    """Token by token, behind a prompt that has text."""
    decoder = tokenizer.decoder(tokenizer.encode("hello"), special_tokens=special_tokens)
    return "".join(map(decoder.push, token_ids)) + decoder.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_is_transformers_own(transformers_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    token_ids = TransformersTokenizer(transformers_tokenizer).encode(text)
    assert token_ids == transformers_tokenizer.encode(text)
    assert token_ids[0] == transformers_tokenizer.bos_token_id


@pytest.mark.parametrize("text", TEXTS)
def test_token_by_token_equals_decoding_at_once(transformers_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokenizer = TransformersTokenizer(transformers_tokenizer)
    token_ids = transformers_tokenizer.encode(text + "</s>")
    whole = transformers_tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    shown = decode(tokenizer, token_ids)
    # SentencePiece puts a space before the text, which belongs to a completion behind a prompt.
    assert (shown, whole) in ((text, text), (f" {text}", text))


@pytest.mark.parametrize("special_tokens", [False, True])
def test_random_tokens_equal_decoding_at_once(
    transformers_tokenizer: PreTrainedTokenizerFast, special_tokens: bool
) -> None:
    tokenizer = TransformersTokenizer(transformers_tokenizer)
    byte_fallback = transformers_tokenizer.convert_ids_to_tokens(0) == "<0x00>"
    vocabulary = range(256 if byte_fallback else 0, tokenizer.vocab_size)
    rng = random.Random(0)
    for _ in range(300):
        token_ids = rng.choices(vocabulary, k=rng.randrange(1, 20))
        whole = transformers_tokenizer.decode(
            token_ids, skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False
        )
        shown = decode(tokenizer, token_ids, special_tokens)
        assert (shown.removeprefix(" ") if byte_fallback else shown) == whole


def test_special_tokens_are_shown_on_request(transformers_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = TransformersTokenizer(transformers_tokenizer)
    bos, eos = transformers_tokenizer.bos_token_id, transformers_tokenizer.eos_token_id
    call = transformers_tokenizer.convert_tokens_to_ids("<a b>")
    assert isinstance(call, int)
    token_ids = [bos, call, eos, tokenizer.vocab_size + 5]
    assert decode(tokenizer, token_ids).strip() == "<a b>"
    assert decode(tokenizer, token_ids, special_tokens=True).replace(" <", "<") == "<s><a b></s>"
    assert call < tokenizer.vocab_size == len(transformers_tokenizer)


@pytest.mark.parametrize("text", TEXTS)
def test_words_are_encoded_without_special_tokens(transformers_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokenizer = TransformersTokenizer(transformers_tokenizer)
    assert tokenizer.encode_words(text) == transformers_tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == [transformers_tokenizer.bos_token_id, *tokenizer.encode_words(text)]


def test_a_chat_template_writes_every_special_token_itself(transformers_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = TransformersTokenizer(transformers_tokenizer)
    token_ids = tokenizer.apply_chat_template([ChatMessage("user", "hello"), ChatMessage("assistant", "world")])
    text = "<s>user: hello\n<s>assistant: world\nassistant: "
    assert token_ids == transformers_tokenizer.encode(text, add_special_tokens=False)
    assert token_ids.count(tokenizer.encode("")[0]) == 2


def test_messages_that_the_template_refuses() -> None:
    with pytest.raises(InvalidArgument, match="no tools") as caught:
        TransformersTokenizer(byte_level()).apply_chat_template([ChatMessage("tool", "x")])
    assert caught.value.field == "chat.messages"


def test_a_template_that_fails() -> None:
    made = byte_level()
    made.chat_template = "{{ range(999999999) }}"
    with pytest.raises(FailedPrecondition, match="the model's chat template fails: Range too big"):
        TransformersTokenizer(made).apply_chat_template([ChatMessage("user", "x")])


def test_what_a_template_complains_about_is_cut() -> None:
    """It may hold all of a message, and a status has to fit a header."""
    made = byte_level()
    made.chat_template = "{{ raise_exception('no: ' + messages[0]['content']) }}"
    with pytest.raises(InvalidArgument, match="no: xxx") as caught:
        TransformersTokenizer(made).apply_chat_template([ChatMessage("user", "x" * 20_000)])
    assert len(str(caught.value)) < 400


def test_a_model_without_a_template() -> None:
    made = byte_level()
    made.chat_template = None
    with pytest.raises(FailedPrecondition, match="no chat template"):
        TransformersTokenizer(made).apply_chat_template([ChatMessage("user", "x")])


def test_a_slow_tokenizer_is_refused() -> None:
    slow = SimpleNamespace(is_fast=False, name_or_path="old/model")
    with pytest.raises(ModelLoadError, match=r"old/model.*tokenizer\.json"):
        TransformersTokenizer(slow)  # type: ignore[arg-type]
