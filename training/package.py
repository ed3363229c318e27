"""Make the folder that ships from a checkpoint: `python -m training.package --checkpoint DIR --gates gates.json`.

Writes the weights in bf16, the tokenizer, clean configuration files and the model card into `batchserve/data/bundled`,
and keeps the raw measurements (gates, loss curve) in `training/results`. The folder is replaced whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from .card import model_card
from .train import EOS_ID

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MAX_BYTES = 16_000_000
MIN_PARAMETERS, MAX_PARAMETERS, MIN_POSITIONS = 3_000_000, 8_000_000, 4096
# What only this machine or this run knows; a reader of the files has no use for it.
DROPPED_KEYS = ("_name_or_path", "_from_model_config", "name_or_path")


def read_json(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def write_json(path: Path, data: dict[str, Any]) -> None:
    kept = {key: value for key, value in data.items() if key not in DROPPED_KEYS}
    path.write_text(json.dumps(kept, indent=2) + "\n")


def write_weights(checkpoint: Path, out: Path) -> None:
    """bf16, without the head where it is tied to the embedding."""
    state = load_file(checkpoint / "model.safetensors")
    if read_json(checkpoint / "config.json")["tie_word_embeddings"]:
        state.pop("lm_head.weight", None)
    state = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    path = out / "model.safetensors"
    save_file(state, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_configs(checkpoint: Path, out: Path) -> None:
    write_json(out / "config.json", {**read_json(checkpoint / "config.json"), "dtype": "bfloat16"})
    version = read_json(checkpoint / "config.json")["transformers_version"]
    write_json(
        out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": EOS_ID, "transformers_version": version}
    )
    for name in TOKENIZER_FILES:
        if name.endswith(".json") and name != "tokenizer.json":
            write_json(out / name, read_json(checkpoint / name))
        else:
            shutil.copyfile(checkpoint / name, out / name)


def read_loss_curve(path: Path) -> tuple[list[dict[str, float]], int]:
    """Rows of the training log, and how many runs it is of; steps, minutes and tokens of a resumed run are counted on
    from the run before.
    """
    rows: list[dict[str, float]] = []
    num_runs = 1
    offset: dict[str, float] = {"minutes": 0.0, "step": 0, "tokens_millions": 0.0}
    previous_step = 0.0
    for line in path.read_text().splitlines():
        row: dict[str, float] = json.loads(line)
        if rows and row["step"] <= previous_step:
            offset = {key: rows[-1][key] for key in offset}
            num_runs += 1
        previous_step = row["step"]
        rows.append({**row, **{key: round(row[key] + value, 3) for key, value in offset.items()}})
    return rows, num_runs


def check(folder: Path) -> None:
    """Load what was written as a user would; raises ValueError where it breaks a bound of the bundled model."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"{folder.name}: {size} bytes, must be at most {MAX_BYTES}")
    model = AutoModelForCausalLM.from_pretrained(folder)
    count = sum(p.numel() for p in model.parameters())
    if not MIN_PARAMETERS <= count <= MAX_PARAMETERS:
        raise ValueError(f"parameters = {count}: must be in {MIN_PARAMETERS}..{MAX_PARAMETERS}")
    if model.dtype != torch.bfloat16 or model.config.max_position_embeddings < MIN_POSITIONS:
        raise ValueError(f"dtype = {model.dtype}, positions = {model.config.max_position_embeddings}: not as promised")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True)["input_ids"]
    if ids[0] != model.generation_config.bos_token_id or tokenizer.eos_token_id != EOS_ID:
        raise ValueError(f"chat template gives {ids}, EOS {tokenizer.eos_token_id}: not as promised")
    for path in folder.glob("*.json"):
        # The vocabulary may hold words with slashes of its own.
        if path.name != "tokenizer.json" and (found := re.search(r'"(/|[A-Za-z]:\\\\)[^"]*"', path.read_text())):
            raise ValueError(f"{path.name} holds a path of this machine: {found[0]}")


def package(checkpoint: Path, gates: dict[str, Any], out: Path) -> None:
    """Replace `out` by the packaged checkpoint and its card."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_weights(checkpoint, partial)
    write_configs(checkpoint, partial)
    curve = read_loss_curve(checkpoint / "loss_curve.jsonl")
    (partial / "README.md").write_text(model_card(read_json(partial / "config.json"), gates, *curve))
    check(partial)
    # Nobody who loads the model meanwhile should find half of it, or for long nothing.
    old = out.with_name(out.name + ".old.partial")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--gates", type=Path, required=True, help="what training.evaluate wrote about this checkpoint")
    parser.add_argument("--out", type=Path, default=ROOT / "batchserve" / "data" / "bundled")
    parser.add_argument("--results", type=Path, default=ROOT / "training" / "results")
    args = parser.parse_args()
    gates = read_json(args.gates)
    package(args.checkpoint, gates, args.out)
    args.results.mkdir(parents=True, exist_ok=True)
    write_json(args.results / "gates.json", gates)
    curve, _ = read_loss_curve(args.checkpoint / "loss_curve.jsonl")
    (args.results / "loss_curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve))
    size = sum(path.stat().st_size for path in args.out.iterdir())
    missed = [name for name, gate in gates["gates"].items() if not gate["is_passed"]]
    print(f"{args.out.name}: {size / 1e6:.1f} MB; gates missed: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
