"""Average two checkpoints of one run after another: `python -m training.average FIRST SECOND --share 0.6 --out DIR`.

The mean of where two schedules have ended is often better than either (Wortsman et al., "Model soups", 2022).
Tokenizer, configuration and loss curve are SECOND's.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def average(first: Path, second: Path, share: float, out: Path) -> None:
    """Write (1 - share) * first + share * second in bf16. Raises ValueError for checkpoints of other shapes."""
    a, b = load_file(first / WEIGHTS), load_file(second / WEIGHTS)
    if {name: tensor.shape for name, tensor in a.items()} != {name: tensor.shape for name, tensor in b.items()}:
        raise ValueError(f"{first.name} and {second.name} are not of one model")
    mean = {name: (1.0 - share) * a[name].float() + share * tensor.float() for name, tensor in b.items()}
    shutil.copytree(second, out)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in mean.items()}, out / WEIGHTS, {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--share", type=float, default=0.5, help="of the second")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    args = parser.parse_args()
    average(args.first, args.second, args.share, args.out)


if __name__ == "__main__":
    main()
