"""The embedded pair: a small target and its draft, trained on the Python standard library's source text."""

from pathlib import Path

CHECKPOINTS = Path(__file__).parent / "checkpoints"
TARGET = CHECKPOINTS / "target"
DRAFT = CHECKPOINTS / "draft"
# {"prompt": str} a line, of modules that neither model was trained on.
HELD_OUT_PROMPTS = CHECKPOINTS / "held_out.jsonl"
