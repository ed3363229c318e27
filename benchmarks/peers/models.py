"""The models that are measured, their exports for the peers, and their prompts.

The bundled model, SmolLM2-135M-Instruct (tools.real_model) and random weights of tools.widen_model's shapes. An export
is made once, in the cache folder, under a name with a digest of the weights.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from itertools import islice, product
from pathlib import Path

from batchserve.config import EngineConfig
from batchserve.files import bundled_sets
from batchserve.runner.chat import chat_token_ids
from batchserve.runner.model_folder import resolve_model
from batchserve.runner.tokenizer import load_tokenizer
from benchmarks.common import ROOT, chat_prompts
from benchmarks.peers import environments
from benchmarks.peers.environments import PeerError
from benchmarks.peers.protocol import Prompts
from tools.real_model import cache_folder, default_folder, fetch
from tools.widen_model import DEFAULT_VOCAB_SIZE, SHAPES, random_model, save

BUNDLED, REAL = "bundled", "smollm2"
MODELS = (BUNDLED, REAL, *SHAPES)
PROMPT_TOKENS = 128  # of a random-weight model
NUM_SPECIAL = 2
# Asked about a bundled set's questions: enough different chat prompts for every round.
ASKED = (
    "{}",
    "Rewrite this in one sentence: {}",
    "Write a short story about this: {}",
    "List the names and the numbers of this text as JSON: {}",
    "Write a Python program that solves this: {}",
    "Explain to a child how this can be solved: {}",
    "Ask three other questions like this one: {}",
    "Translate this to French, and say what was hard: {}",
    "Write a poem about this: {}",
    "Say what one has to know to answer this: {}",
    "Write this as a list of facts: {}",
    "Write a letter to a friend in which you ask for help with this: {}",
)


def model_folder(name: str) -> Path:
    """A transformers folder, made or fetched where need be. Raises BatchserveError."""
    if name == BUNDLED:
        return Path(resolve_model(BUNDLED))
    if name == REAL:
        fetch(default_folder())
        return default_folder()
    return once(cache_folder() / "peers" / "models" / name, lambda out: _save_random(name, out))


def _save_random(shape: str, out: Path) -> None:
    """With a tokenizer, since not every engine starts without one; nothing is asked as text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save(random_model(shape), out)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(islice(product(letters, letters), DEFAULT_VOCAB_SIZE - len(letters) - NUM_SPECIAL))
    words = ["<s>", "</s>", *letters, *(a + b for a, b in merges)]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(out)


def once(path: Path, make: Callable[[Path], None]) -> Path:
    """The file or folder, made beside its place and then renamed, so that it is whole if it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
            made = Path(temporary) / path.name
            make(made)
            shutil.move(made, path)
    return path


def openvino_export(name: str, folder: Path) -> Path:
    """In fp16; OpenVINO computes in what is fastest on the processor."""
    command = (str(environments.python_of("openvino").parent / "optimum-cli"), "export", "openvino")
    task = ("--task", "text-generation-with-past", "--weight-format", "fp16")
    return once(
        _exports(name, folder, "openvino"),
        lambda out: environments.run("openvino", *command, "--model", str(folder), *task, str(out)),
    )


def gguf_export(name: str, folder: Path) -> Path:
    """In bf16."""
    source, path = environments.llamacpp_source(), _exports(name, folder, "bf16.gguf")
    command = (sys.executable, "-m", "benchmarks.peers.gguf_export", str(source), str(folder))
    environment = {"PYTHONPATH": str(ROOT)}
    return once(path, lambda out: environments.run("llamacpp", *command, str(out), environment=environment))


def _exports(name: str, folder: Path, kind: str) -> Path:
    with (folder / "model.safetensors").open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()[:12]
    return cache_folder() / "peers" / "exports" / f"{name}-{digest}.{kind}"


def prompts(name: str, folder: Path, count: int, seed: int) -> Prompts:
    """Different prompts of a model's kind: its own tasks, chat questions, or random tokens. Raises PeerError."""
    rng = random.Random(seed)
    if name in SHAPES:
        return [[rng.randrange(3, DEFAULT_VOCAB_SIZE) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    tokenizer = load_tokenizer(str(folder), EngineConfig(model=str(folder)))
    assert tokenizer is not None
    if name == BUNDLED:
        return [list(tokenizer(text)["input_ids"]) for text in chat_prompts(count, seed)]
    lines = bundled_sets()["gsm8k_gpt3_175b"].read_text().splitlines()
    asked = [form.format(json.loads(line)["prompt"]) for form in ASKED for line in lines]
    if count > len(asked):
        raise PeerError(f"{name}: {count} different prompts are needed, and there are {len(asked)}: take fewer rounds")
    return [chat_token_ids(text, tokenizer, str(folder)) for text in rng.sample(asked, count)]
