"""Train the embedded pair on the Python standard library's source text.

    python -m paceline.demo.train --out scheduler/paceline/demo/checkpoints

The text comes from the interpreter that runs the script (PSF licence), so nothing is downloaded. One byte-level BPE
tokenizer serves both models. The target is trained on next tokens; the draft is distilled from it (a mix of next-token
loss and the KL divergence to the target), because what a draft is for is agreeing with its target.

About 40 modules are held out of the text: their loss and the greedy agreement between the two models at position 1 are
written to `training.json`, beside the interpreter and the settings that produced them. `held_out.jsonl` keeps 64
prompts cut from the same modules, for benchmarks.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Model: TypeAlias = Any  # a LlamaForCausalLM; the annotations of transformers do not hold under strict checks

END_OF_TEXT = "<|endoftext|>"
# Messages become the comments and code that the models were trained on: special role tokens would be untrained noise.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}\n"
    "{% else %}# {{ message['content'] | replace('\n', '\n# ') }}\n{% endif %}"
    "{% endfor %}"
)
HELD_OUT = frozenset(
    (
        "argparse",
        "bisect",
        "calendar",
        "cgi",
        "chunk",
        "code",
        "codeop",
        "colorsys",
        "configparser",
        "contextlib",
        "copy",
        "csv",
        "dataclasses",
        "datetime",
        "difflib",
        "dis",
        "fileinput",
        "fnmatch",
        "fractions",
        "ftplib",
        "getopt",
        "glob",
        "graphlib",
        "gzip",
        "heapq",
        "hmac",
        "imaplib",
        "inspect",
        "ipaddress",
        "mailbox",
        "nntplib",
        "pdb",
        "plistlib",
        "poplib",
        "queue",
        "sched",
        "shelve",
        "shlex",
        "smtplib",
        "statistics",
        "string",
        "tabnanny",
        "telnetlib",
        "textwrap",
    )
)


@dataclass(frozen=True)
class Recipe:
    """One model's shape and its training length."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    steps: int
    head_dim: int = 64
    batch_tokens: int = 8192
    context: int = 512
    long_context: int = 2048  # the last steps see longer windows, so that positions past `context` are trained too
    long_fraction: float = 0.12
    muon_lr: float = 0.02
    adam_lr: float = 4e-3


TARGET = Recipe(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    steps=3000,
)
DRAFT = Recipe(
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    steps=2000,
)
VOCAB_SIZE = 4096
MAX_POSITIONS = 4096


def read_sources() -> tuple[list[str], dict[str, str]]:
    """Return (training texts, {held-out module: text}) of the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    training: list[str] = []
    held_out: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        # Character tables and deliberately broken files are no text to learn from.
        if relative.parts[0] in {"site-packages", "encodings"} or "bad" in path.stem:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) < 200:
            continue
        if len(relative.parts) == 1 and path.stem in HELD_OUT:
            held_out[path.stem] = text
        elif path.stem.removeprefix("test_") not in HELD_OUT:
            training.append(text)
    return training, held_out


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Every text followed by the end-of-text token, as one stream.  # [num_tokens] int64"""
    end = cast(int, tokenizer.eos_token_id)
    ids: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts):
        ids.extend(encoding.ids)
        ids.append(end)
    return torch.tensor(ids, dtype=torch.int64)


def build(recipe: Recipe, end_id: int) -> Model:
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=VOCAB_SIZE,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=None,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


class ChunkedLoss(torch.autograd.Function):
    """Next-token loss of a tied head, with gradients, a few rows at a time.

    The whole logits matrix would be 134 MB of fresh pages a step, which costs more than the model. With a teacher the
    wanted distribution is 0.2 one-hot + 0.8 teacher: its cross entropy has the gradient of 0.2 loss + 0.8 KL.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        teacher_hidden: torch.Tensor | None,
        teacher_head: torch.Tensor | None,
    ) -> torch.Tensor:
        rows = hidden.shape[0]
        hidden, head16 = hidden.to(torch.bfloat16), head.to(torch.bfloat16)
        total = torch.zeros(())
        hidden_grad, head_grad = torch.empty_like(hidden), torch.zeros(head.shape)
        for begin in range(0, rows, 1024):
            piece = slice(begin, begin + 1024)
            logits = (hidden[piece] @ head16.T).float()  # [chunk, vocab]
            wanted_ids = targets[piece, None]
            log_z = logits.logsumexp(-1, keepdim=True)
            total += (log_z - logits.gather(-1, wanted_ids)).sum()
            grad = logits.sub_(log_z).exp_()
            weight = 1.0
            if teacher_hidden is not None and teacher_head is not None:
                weight = 0.2
                grad.sub_((teacher_hidden[piece] @ teacher_head.T).float().softmax(-1), alpha=0.8)
            grad.scatter_add_(-1, wanted_ids, torch.full(wanted_ids.shape, -weight))
            grad16 = grad.mul_(1.0 / rows).to(torch.bfloat16)
            hidden_grad[piece] = grad16 @ head16
            head_grad += (grad16.T @ hidden[piece]).float()
        ctx.save_for_backward(hidden_grad, head_grad)
        return total / rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_grad, head_grad = ctx.saved_tensors
        return hidden_grad * grads[0], head_grad * grads[0], None, None, None


def logits_of(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """[batch, context] -> [batch * context, vocab] in the autocast dtype."""
    hidden = model.model(ids).last_hidden_state
    return F.linear(hidden.reshape(-1, hidden.shape[-1]), model.lm_head.weight)


def windows(stream: torch.Tensor, recipe: Recipe, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random windows of the stream: (inputs, next tokens), both [batch, context]."""
    rng = torch.Generator().manual_seed(seed)
    for step in range(recipe.steps):
        context = recipe.long_context if step >= recipe.steps * (1 - recipe.long_fraction) else recipe.context
        starts = torch.randint(len(stream) - context - 1, (recipe.batch_tokens // context,), generator=rng)
        rows = torch.stack([stream[s : s + context + 1] for s in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def learning_rate(step: int, steps: int) -> float:
    """Warm up over 2 %, hold, then decay linearly to zero over the last half."""
    return min(1.0, (step + 1) / (0.02 * steps), (steps - step) / (0.5 * steps))


def train(recipe: Recipe, stream: torch.Tensor, end_id: int, name: str, teacher: Model | None = None) -> Model:
    """Train one model; with a teacher, on 0.2 next-token loss + 0.8 KL(teacher || model)."""
    torch.manual_seed(20)
    model = build(recipe, end_id)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    base = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    began, smoothed = time.perf_counter(), math.nan
    for step, (inputs, targets) in enumerate(windows(stream, recipe, seed=7)):
        for optimizer, rates in zip(optimizers, base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * learning_rate(step, recipe.steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(inputs).last_hidden_state.flatten(0, 1)
            teacher_hidden = teacher_head = None
            if teacher is not None:
                with torch.no_grad():
                    teacher_hidden = teacher.model(inputs).last_hidden_state.flatten(0, 1)
                teacher_head = teacher.lm_head.weight
        head = model.lm_head.weight
        loss: torch.Tensor = ChunkedLoss.apply(hidden, head, targets.flatten(), teacher_hidden, teacher_head)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        smoothed = loss.item() if math.isnan(smoothed) else 0.98 * smoothed + 0.02 * loss.item()
        if step % 50 == 0 or step == recipe.steps - 1:
            print(
                f"{name} step {step}/{recipe.steps} loss {smoothed:.3f} {time.perf_counter() - began:.0f}s", flush=True
            )
    return model.to(torch.bfloat16)


@torch.no_grad()
def held_out_loss(model: Model, stream: torch.Tensor, context: int = 512) -> float:
    """Mean next-token loss (nats) over consecutive windows of the held-out stream, bf16 weights, fp32 logits."""
    rows = stream[: (len(stream) - 1) // context * context + 1]
    inputs, targets = rows[:-1].view(-1, context), rows[1:].view(-1, context)
    losses = [
        F.cross_entropy(logits_of(model, i).float(), t.reshape(-1), reduction="sum").item()
        for i, t in zip(torch.split(inputs, 16), torch.split(targets, 16), strict=True)
    ]
    return sum(losses) / targets.numel()


@torch.no_grad()
def greedy_agreement(target: Model, draft: Model, prompts: list[list[int]], new_tokens: int = 96) -> float:
    """Share of the target's own greedy tokens that the draft's argmax predicts: acceptance at position 1."""
    agreed = total = 0
    for prompt in prompts:
        text = cast(
            torch.Tensor,
            target.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, use_cache=True),
        )
        guesses = logits_of(draft, text[:, :-1]).argmax(-1)[len(prompt) - 1 :]
        agreed += int((guesses == text[0, len(prompt) :]).sum())
        total += len(guesses)
    return agreed / total


def cut_prompts(tokenizer: PreTrainedTokenizerFast, held_out: dict[str, str], count: int = 64) -> list[list[int]]:
    """Prompts of 64 to 384 tokens, starting at a line, spread over the held-out modules."""
    rng = random.Random(11)
    prompts: list[list[int]] = []
    names = sorted(held_out)
    while len(prompts) < count:
        lines = held_out[names[len(prompts) % len(names)]].splitlines(keepends=True)
        start = rng.randrange(max(1, len(lines) - 80))
        ids = tokenizer.encode("".join(lines[start:]))[: rng.randint(64, 384)]
        if len(ids) >= 64:
            prompts.append(ids)
    return prompts


def save(model: Model, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    model.config.use_cache = model.generation_config.use_cache = True
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoints")
    parser.add_argument("--steps", type=int, help="train both models for this many steps instead (to try the script)")
    parser.add_argument("--reuse-target", action="store_true", help="keep the target in --out and train only the draft")
    args = parser.parse_args()
    target_recipe, draft_recipe = TARGET, DRAFT
    if args.steps:
        target_recipe = Recipe(**{**asdict(TARGET), "steps": args.steps})
        draft_recipe = Recipe(**{**asdict(DRAFT), "steps": args.steps})

    training, held_out = read_sources()
    reuse = args.out / "target" if args.reuse_target else None
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reuse) if reuse else train_tokenizer(training)
    end_id = cast(int, tokenizer.eos_token_id)
    stream, held_out_stream = encode(tokenizer, training), encode(tokenizer, list(held_out.values()))
    prompts = cut_prompts(tokenizer, held_out)
    print(f"{len(stream):,} training tokens, {len(held_out_stream):,} held out in {len(held_out)} modules", flush=True)

    if reuse:
        target = LlamaForCausalLM.from_pretrained(reuse, dtype=torch.bfloat16)
    else:
        target = train(target_recipe, stream, end_id, "target")
        save(target, tokenizer, args.out / "target")
    print(f"target held-out loss {held_out_loss(target, held_out_stream):.3f}", flush=True)
    draft = train(draft_recipe, stream, end_id, "draft", teacher=target)
    save(draft, tokenizer, args.out / "draft")

    record = {
        "python": platform.python_version(),
        "training_tokens": len(stream),
        "held_out_modules": sorted(held_out),
        "held_out_tokens": len(held_out_stream),
        "target": {
            **asdict(target_recipe),
            "parameters": target.num_parameters(),
            "held_out_loss": held_out_loss(target, held_out_stream),
        },
        "draft": {
            **asdict(draft_recipe),
            "parameters": draft.num_parameters(),
            "held_out_loss": held_out_loss(draft, held_out_stream),
        },
        "greedy_acceptance_position_1": greedy_agreement(target, draft, prompts),
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    with (args.out / "held_out.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": tokenizer.decode(ids)}) + "\n" for ids in prompts)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
