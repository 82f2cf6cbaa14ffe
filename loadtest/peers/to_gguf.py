"""python to_gguf.py LLAMA_CPP SRC DST: convert with llama.cpp's own converter, whatever the tokenizer.

The converter knows pre-tokenizers by a hash and refuses a vocabulary it has not seen. The demo's tokenizer splits text
as GPT-2's does; and every prompt is sent as token ids anyway.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

source_tree, source, destination = sys.argv[1:]
sys.path.insert(0, source_tree)

from conversion.base import TextModel  # noqa: E402

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
script = str(Path(source_tree) / "convert_hf_to_gguf.py")
sys.argv = [script, source, "--outtype", "bf16", "--outfile", destination]
runpy.run_path(script, run_name="__main__")
