"""A folder that is no whole checkpoint: what is there and what was expected, on one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchserve.config import EngineConfig
from batchserve.errors import BatchserveError, ConfigError
from batchserve.runner.loader import load_model
from batchserve.runner.model_folder import resolve_model
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.faults
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 16\n"


@pytest.fixture
def folder(tiny_model: dict[str, Path], tmp_path: Path) -> Path:
    """A whole checkpoint, to be spoiled."""
    copied = tmp_path / "model"
    shutil.copytree(tiny_model["llama"], copied)
    return copied


def refusal_of(path: Path | str) -> str:
    with pytest.raises(BatchserveError) as refusal:
        load_model(EngineConfig(str(path), dtype="float32"))
    said = str(refusal.value)
    assert "\n" not in said
    assert said.startswith("model = ")
    return said


def shard(folder: Path) -> Path:
    """The same weights in two files and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{place % 2 + 1:05}-of-00002.safetensors" for place, name in enumerate(weights)}
    for file in set(weight_map.values()):
        save_file({name: weights[name] for name in weights if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that are served, as the model's own modules have them."""
    config = EngineConfig(str(folder), dtype="float32", attention_backend="torch")
    return dict(load_model(config).model.state_dict())


def test_a_sharded_checkpoint_is_served(folder: Path) -> None:
    whole = weights_of(folder)
    sharded = weights_of(shard(folder))
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(weight, sharded[name]) for name, weight in whole.items())


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    assert f"{name} is a Git LFS pointer, not the file itself: run 'git lfs pull'" in refusal_of(folder)


def test_a_shard_that_is_a_pointer_is_named(folder: Path) -> None:
    (shard(folder) / "model-00002-of-00002.safetensors").write_text(POINTER)
    assert "model-00002-of-00002.safetensors is a Git LFS pointer" in refusal_of(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_whose_file_was_never_downloaded_is_named(folder: Path, name: str) -> None:
    """As in the hub's cache, where a snapshot is made of links."""
    (folder / name).unlink()
    (folder / name).symlink_to("../blobs/4d7a2146")
    assert f"{name} is a link to a file that is absent: finish the download" in refusal_of(folder)


def test_half_a_download_names_what_is_absent(folder: Path) -> None:
    (shard(folder) / "model-00002-of-00002.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors.incomplete").touch()
    said = refusal_of(folder)
    assert "model.safetensors.index.json names 2 files, of which 1 are absent: model-00002-of-00002.safetensors" in said
    assert "incomplete is there" in said


def test_shards_without_their_index_are_not_a_model(folder: Path) -> None:
    (shard(folder) / "model.safetensors.index.json").unlink()
    said = refusal_of(folder)
    assert "has no model.safetensors and no model.safetensors.index.json; there are model-00001-of-00002" in said


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 1}', '{"metadata": {}}'])
def test_an_index_that_is_damaged_is_named(folder: Path, content: str) -> None:
    (shard(folder) / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal_of(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1], "bytes, and by its header must have"),
        (lambda content: content + b"x", "bytes, and by its header must have"),
        (lambda content: content[:100], "its header is cut short"),
        (lambda content: b"", r"(0 bytes) is not a whole safetensors file"),
        (lambda content: b"\x08" + bytes(7) + b"notjson!", "is not a whole safetensors file"),
        (lambda content: b"\x02" + bytes(7) + b"[]", "is not a whole safetensors file"),
        (lambda content: b"<!DOCTYPE html><html><body>Not found</body></html>", "its header is cut short"),
    ],
)
def test_weights_that_are_cut_short_or_something_else_are_named(
    folder: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    said = refusal_of(folder)
    assert "model.safetensors" in said
    assert message in said


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "has no config.json; the folder is empty; expected config.json, model.safetensors"),
        (["README.md"], "there is README.md; expected"),
        (["a.Q4_K_M.gguf", "b.gguf"], "GGUF is not supported, use the checkpoint that it was made from"),
        (["consolidated.00.pth", "params.json", "tokenizer.model"], "use the checkpoint in Hugging Face's format"),
        (["model_index.json"], "a diffusion pipeline"),
        (["snapshots/abc/config.json"], "snapshots/abc is meant"),
        (["adapter_config.json", "adapter_model.safetensors"], "has an adapter"),
    ],
)
def test_a_folder_without_a_configuration_says_what_is_there(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert message in refusal_of(tmp_path)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.gguf", "consolidated.safetensors", "model.onnx", "tf_model.h5"]
)
def test_weights_of_another_kind_are_named(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    assert f"there is {name}" in refusal_of(folder)


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors and no model.safetensors.index.json; no weights are there" in refusal_of(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', "\xff", "<html>"])
def test_a_configuration_that_cannot_be_read_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content, encoding="latin-1")
    assert "config.json" in refusal_of(folder)


@pytest.mark.parametrize(
    ("name", "kind"), [("model.gguf", "a GGUF file"), ("model.safetensors", "a file of weights"), ("other", "a file")]
)
def test_a_path_to_a_file_says_what_it_is(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).touch()
    assert f"must be a folder that exists, a hub id or 'bundled', and is {kind}; expected" in refusal_of(
        tmp_path / name
    )


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_tiny_model("llama", tmp_path / "model")
    assert resolve_model("~/model") == str(tmp_path / "model")
    load_model(EngineConfig("~/model", dtype="float32"))
    with pytest.raises(ConfigError, match="must be a folder that exists"):
        load_model(EngineConfig("~/none"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_weights_of_few_bits_are_refused_though_no_configuration_says_so(folder: Path, dtype: torch.dtype) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(dtype)
    save_file(weights, folder / "model.safetensors")
    said = refusal_of(folder)
    assert "quantised" in said
    assert "up_proj" in said


def test_what_a_model_is_not_loaded_from_may_be_anything(folder: Path) -> None:
    before = weights_of(folder)
    (folder / "consolidated.safetensors").write_text(POINTER)
    (folder / "README.md").symlink_to(folder / "none")
    after = weights_of(folder)
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


@pytest.mark.parametrize("name", ["qwen.tiktoken", "tokenizer.model.v3"])
def test_a_pointer_in_place_of_a_vocabulary_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    assert f"{name} is a Git LFS pointer" in refusal_of(folder)
