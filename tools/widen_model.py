"""Models for benchmarks: a deeper copy with the same outputs, or random weights of a named shape.

`python -m tools.widen_model deepen --model DIR --out DIR --factor 4`
    Inserts decoder layers that cost their full time and add exactly zero to the residual stream: their weights are
    random, but the projections that end their two halves (o_proj and down_proj; c_proj in GPT-2) are zero. x + 0 is x
    in every floating-point format, so the logits stay bit-identical. Families: llama, qwen2, qwen3, gemma2, gpt2.

`python -m tools.widen_model random --shape 90m --out DIR`
    A random-weight Llama; for width, which cannot be added without changing the outputs.
"""

from __future__ import annotations

import argparse
import copy
import re
import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig
from transformers import PreTrainedModel as Model

# The projections whose output is added to the residual stream, by family. A norm may follow (gemma2): zero stays zero.
RESIDUAL_PROJECTIONS = {
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "qwen2": ("self_attn.o_proj", "mlp.down_proj"),
    "qwen3": ("self_attn.o_proj", "mlp.down_proj"),
    "gemma2": ("self_attn.o_proj", "mlp.down_proj"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
SHAPES = {
    "90m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
            "intermediate_size": 2048},
    "430m": {"hidden_size": 1280, "num_hidden_layers": 24, "num_attention_heads": 20, "num_key_value_heads": 5,
             "intermediate_size": 3456},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
           "intermediate_size": 5632},
}  # fmt: skip
DEFAULT_VOCAB_SIZE, MAX_POSITIONS = 8192, 4096
INIT_STD = 0.02
CHECKED_TOKENS = 32


def deepened_config(config: PretrainedConfig, factor: int) -> PretrainedConfig:
    """The same model with `factor` times the layers; an inserted layer has the type of the one that it follows."""
    if config.model_type not in RESIDUAL_PROJECTIONS:
        raise ValueError(f"model_type = {config.model_type!r}: must be one of {', '.join(RESIDUAL_PROJECTIONS)}")
    if factor < 1:
        raise ValueError(f"factor = {factor}: must be at least 1")
    deeper = copy.deepcopy(config)
    deeper.num_hidden_layers = config.num_hidden_layers * factor
    if getattr(config, "layer_types", None):
        deeper.layer_types = [kind for kind in config.layer_types for _ in range(factor)]
    if getattr(config, "max_window_layers", None) is not None:
        deeper.max_window_layers = config.max_window_layers * factor
    return deeper


def decoder_layers(model: Model) -> nn.ModuleList:
    layers: nn.ModuleList = model.transformer.h if model.config.model_type == "gpt2" else model.model.layers
    return layers


def deepen(model: Model, factor: int, seed: int = 0) -> Model:
    """A copy of `model` with `factor` times the layers and bit-identical logits; `model` is left as it is.

    Layer i becomes layer i * factor; the layers between are the inserted ones. Raises ValueError where the logits
    differ: in a model whose layers know their number, for example.
    """
    deeper: Model = AutoModelForCausalLM.from_config(deepened_config(model.config, factor), dtype=model.dtype)
    deeper.generation_config = copy.deepcopy(model.generation_config)
    state = {_moved(name, factor): tensor for name, tensor in model.state_dict().items()}
    missing, unexpected = deeper.load_state_dict(state, strict=False)
    inserted = {index for index in range(deeper.config.num_hidden_layers) if index % factor}
    strangers = [name for name in missing if (match := _LAYER.search(name)) is None or int(match[2]) not in inserted]
    if strangers or unexpected:
        raise ValueError(f"weights do not fit: missing {strangers}, unexpected {unexpected}")
    generator = torch.Generator().manual_seed(seed)
    suffixes = RESIDUAL_PROJECTIONS[model.config.model_type]
    for index in sorted(inserted):
        _fill_inserted(decoder_layers(deeper)[index], suffixes, generator)
    deeper.eval()
    _check_identical(model, deeper, generator)
    return deeper


@torch.inference_mode()
def _check_identical(model: Model, deeper: Model, generator: torch.Generator) -> None:
    ids = torch.randint(0, model.config.vocab_size, (1, CHECKED_TOKENS), generator=generator)
    was_training = model.training
    model.eval()
    if not torch.equal(model(ids).logits, deeper(ids).logits):
        raise ValueError(f"a deeper copy of this {model.config.model_type} has other logits: its layers are not alike")
    model.train(was_training)


_LAYER = re.compile(r"\.(layers|h)\.(\d+)\.")


def _moved(name: str, factor: int) -> str:
    return _LAYER.sub(lambda match: f".{match[1]}.{int(match[2]) * factor}.", name)


def _fill_inserted(layer: nn.Module, residual_projections: tuple[str, ...], generator: torch.Generator) -> None:
    """Random values everywhere (zeros could be cheaper), then zeros where the layer's two halves end."""
    zeroed = 0
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith(residual_projections):
                parameter.zero_()
                zeroed += name.endswith("weight")
            elif parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * INIT_STD)
    if zeroed != len(residual_projections):
        raise ValueError(f"{zeroed} of the {len(residual_projections)} residual projections were found")


def deepen_folder(source: Path, out: Path, factor: int, seed: int = 0) -> Model:
    """Write the deeper copy of the model in `source`, with its tokenizer and generation config, to `out`."""
    dtype = AutoConfig.from_pretrained(source).dtype or torch.float32
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    deeper = deepen(model, factor, seed)
    save(deeper, out)
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    return deeper


def random_model(shape: str, vocab_size: int = DEFAULT_VOCAB_SIZE, seed: int = 0) -> LlamaForCausalLM:
    """A bf16 Llama of the named shape. Its answers mean nothing; its steps cost what the shape costs."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **SHAPES[shape],
        vocab_size=vocab_size,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=INIT_STD,
        bos_token_id=0,
        eos_token_id=1,
        dtype=torch.bfloat16,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def save(model: Model, out: Path) -> None:
    model.config._name_or_path = ""
    model.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    deeper = commands.add_parser("deepen", help="a deeper copy with the same outputs")
    deeper.add_argument("--model", type=Path, required=True, help="folder of the model")
    deeper.add_argument("--factor", type=int, default=2, help="how many times as many layers")
    random = commands.add_parser("random", help="random weights of a named shape")
    random.add_argument("--shape", choices=tuple(SHAPES), required=True)
    random.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE)
    for command in (deeper, random):
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.command == "deepen":
        model: Model = deepen_folder(args.model, args.out, args.factor, args.seed)
    else:
        model = random_model(args.shape, args.vocab_size, args.seed)
        save(model, args.out)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.out}: {count / 1e6:.1f}M parameters, {model.config.num_hidden_layers} layers, {model.dtype}")


if __name__ == "__main__":
    main()
