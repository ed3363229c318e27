"""Writes a GGUF file as a bf16 transformers folder: weights, config, tokenizer with chat template, generation config.

    python -m tools.gguf_folder FILE.gguf FOLDER [--bos 1 --eos 2 --pad 2]

Needs the packages gguf and accelerate beside transformers; tools.real_model brings them along. The weights are
de-quantised to float32 and then rounded to bf16.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import PreTrainedModel as Model


def load(file: Path) -> Model:
    """The file's model in bf16, without the mark of quantisation, with which save_pretrained refuses to save it."""
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    config._name_or_path = ""
    model: Model = type(read)(config)
    model.load_state_dict(read.state_dict())
    return model.to(torch.bfloat16).eval()


def convert(file: Path, folder: Path, bos: int, eos: int, pad: int) -> None:
    """Write the folder; the token ids go to the generation config and the model's config."""
    model = load(file)
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = bos, eos, pad
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    for name, value in (("bos", 1), ("eos", 2), ("pad", 2)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"id of this token (default: {value})")
    args = parser.parse_args()
    convert(args.file, args.folder, args.bos, args.eos, args.pad)


if __name__ == "__main__":
    main()
