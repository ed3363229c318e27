"""A packaged checkpoint loads as bf16 with its tokenizer, holds nothing of this machine, and carries its card."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.training.test_evaluate import make_answer
from training import package as packaging
from training.average import average
from training.evaluate import Gate, gates_of, kinds_of, report_of, samples_of
from training.package import package, read_loss_curve
from training.tokenizer import train_tokenizer
from training.train import model_config, save

CURVE = [
    {"minutes": 1.0, "step": 50, "tokens_millions": 0.2, "train_answer_loss": 5.0, "held_out_answer_loss": 4.0},
    {"minutes": 2.0, "step": 100, "tokens_millions": 0.4, "train_answer_loss": 3.0, "held_out_answer_loss": 2.0},
]


@pytest.fixture
def answers():
    return [make_answer([4, 5, 6], [4, 5, 6]), make_answer([7] * 9, has_eos=False)]


@pytest.fixture
def checkpoint(tmp_path):
    """What training.train leaves behind: fp32 in its configuration, a log, the folder's path in the tokenizer's."""
    config = model_config()
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    folder = tmp_path / "checkpoint"
    save(LlamaForCausalLM(config), train_tokenizer(["def f(x):\n    return x\n"], 4096), folder)
    (folder / "loss_curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CURVE))
    settings = json.loads((folder / "config.json").read_text())
    settings.update(dtype="float32", _name_or_path=str(tmp_path))
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def gates(answers, checkpoint):
    return json.loads(json.dumps(report_of(AutoModelForCausalLM.from_pretrained(checkpoint), answers, seed=1)))


def test_package_replaces_the_folder_by_a_loadable_one(tmp_path, checkpoint, gates, monkeypatch):
    monkeypatch.setattr(packaging, "MIN_PARAMETERS", 1)
    out = tmp_path / "bundled"
    out.mkdir()
    (out / "stale").write_text("")
    package(checkpoint, gates, out)
    assert {path.name for path in out.iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert [path.name for path in tmp_path.glob("bundled*")] == ["bundled"]
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, AutoModelForCausalLM.from_pretrained(checkpoint).lm_head.weight.bfloat16())
    assert AutoTokenizer.from_pretrained(out).eos_token_id == model.generation_config.eos_token_id == 1
    assert not any(str(tmp_path) in path.read_text() for path in out.glob("*.json"))
    card = (out / "README.md").read_text()
    assert "end with EOS before 256 tokens | 0.500 | 0.95 to 1 | **no**" in card
    assert "PSF licence" in card
    assert "| 2 | 100 | 0.4 | 3.000 | 2.000 |" in card


def test_a_model_out_of_bounds_is_refused_and_the_old_one_stays(tmp_path, checkpoint, gates):
    out = tmp_path / "bundled"
    out.mkdir()
    with pytest.raises(ValueError, match=r"parameters = \d+: must be in 3000000..8000000"):
        package(checkpoint, gates, out)
    assert list(out.iterdir()) == []


def test_a_resumed_loss_curve_goes_on(tmp_path):
    path = tmp_path / "loss_curve.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*CURVE, *CURVE]))
    rows, num_runs = read_loss_curve(path)
    assert num_runs == 2
    assert [row["step"] for row in rows] == [50, 100, 150, 200]
    assert [row["minutes"] for row in rows] == [1.0, 2.0, 3.0, 4.0]
    assert rows[-1]["held_out_answer_loss"] == 2.0


def test_gates_of_known_answers(answers):
    gates = gates_of(answers, eos=1)
    assert gates["ends_with_eos"] == Gate(0.5, 0.95, 1.0, gates["ends_with_eos"].meaning)
    assert gates["loops"].value == 0.5
    assert not gates["json_exact"].is_passed  # none were asked for: not a pass
    assert kinds_of(answers)["complete"]["loops"] == 0.5
    assert [sample["kind"] for sample in samples_of(answers)] == ["complete"]


def test_fewer_than_one_percent_of_500_is_at_most_four(answers):
    many = [*answers[:1] * 495, *answers[1:] * 5]
    assert not gates_of(many, eos=1)["loops"].is_passed
    assert gates_of([answers[0], *many[:-1]], eos=1)["loops"].is_passed


def test_the_bundled_model_is_within_its_bounds_and_has_its_card():
    folder = packaging.ROOT / "batchserve" / "data" / "bundled"
    packaging.check(folder)
    card = (folder / "README.md").read_text()
    assert all(f"## {title}" in card for title in ("Data", "Recipe", "Gates", "Samples", "Licence"))


def test_the_average_of_two_checkpoints_lies_between_them(checkpoint, tmp_path):
    other, out = tmp_path / "other", tmp_path / "mean"
    shutil.copytree(checkpoint, other)
    weights = load_file(checkpoint / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    average(checkpoint, other, 0.25, out)
    mean = load_file(out / "model.safetensors")
    for name, tensor in weights.items():
        torch.testing.assert_close(mean[name].float(), tensor.float() + 0.25, atol=0.01, rtol=0.01)
    save_file({"other": torch.zeros(1)}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="not of one model"):
        average(checkpoint, other, 0.5, tmp_path / "none")
