"""Writes a transformers folder as a bf16 GGUF, with llama.cpp's own converter.

    python -m benchmarks.peers.gguf_export LLAMA_CPP_SOURCE FOLDER FILE.gguf

The converter refuses tokenizers whose way of splitting text it does not know. Here prompts are token ids and nothing is
split, so every tokenizer is said to split as by default.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path


def export(source: Path, folder: Path, file: Path) -> None:
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    base = importlib.import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda model, tokenizer: "default"
    converter = source / "convert_hf_to_gguf.py"
    sys.argv = [str(converter), str(folder), "--outfile", str(file), "--outtype", "bf16"]
    runpy.run_path(str(converter), run_name="__main__")


if __name__ == "__main__":
    export(*map(Path, sys.argv[1:4]))
