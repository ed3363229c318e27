"""Writes a transformers folder as a bf16 GGUF, with llama.cpp's own converter.

    python -m benchmarks.peers.gguf_export LLAMA_CPP_SOURCE FOLDER FILE.gguf

The converter refuses tokenizers whose way of splitting text it does not know. Here prompts are token ids, so that this
does not matter: such a one is said to split as by default.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any


def export(source: Path, folder: Path, file: Path) -> None:
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    base = importlib.import_module("conversion.base")
    known = base.TextModel.get_vocab_base_pre

    def known_or_default(self: Any, tokenizer: Any) -> str:
        try:
            found: str = known(self, tokenizer)
        except NotImplementedError:
            return "default"
        return found

    base.TextModel.get_vocab_base_pre = known_or_default
    converter = source / "convert_hf_to_gguf.py"
    sys.argv = [str(converter), str(folder), "--outfile", str(file), "--outtype", "bf16"]
    runpy.run_path(str(converter), run_name="__main__")


if __name__ == "__main__":
    export(*map(Path, sys.argv[1:4]))
