"""The bytes depend on the seed alone, the mark is there, and nothing half-made is left."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from slimqwen import checkpoint, progress
from slimqwen.checkpoint.shape import Shape, ShapeError
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.plan import random_weights, shapes

ROOT = Path(__file__).parents[2]
TINY = ROOT / "weights" / "tiny"
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 8192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def narrow() -> Shape:
    published = shapes.published_shape(ROOT, "qwen3.5-0.8b")
    assert published is not None
    return Shape({**published.config, "text_config": {**published.text, **NARROW}}, {}, "narrow")


def written(shape: Shape, folder: Path, seed: int = 0) -> Path:
    random_weights.write(shape, folder, TINY, seed=seed)
    return folder


@pytest.fixture(scope="module")
def made(narrow: Shape, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(narrow, tmp_path_factory.mktemp("weights") / "narrow")


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(
    narrow: Shape, made: Path, tmp_path: Path
) -> None:
    assert checkpoint.digest(written(narrow, tmp_path / "again")) == checkpoint.digest(made)
    assert checkpoint.digest(written(narrow, tmp_path / "other", seed=1)) != checkpoint.digest(made)


def test_every_tensor_that_the_config_promises_is_there(made: Path) -> None:
    manifest = checkpoint.verify(made, "no cure")
    assert manifest.facts["random_weights"] is True
    assert "mtp.layers.0.self_attn.q_proj.weight" in list_tensors(made)


def test_the_config_says_that_the_weights_are_random(made: Path) -> None:
    assert checkpoint.has_random_weights(made)
    assert not checkpoint.has_random_weights(TINY)


def test_matrices_are_normal_and_norms_the_identity(made: Path) -> None:
    stored = list_tensors(made)

    def numbers(name: str) -> torch.Tensor:
        content = bytearray().join(stored[name].chunks())
        return torch.frombuffer(content, dtype=torch.bfloat16).float()

    embedding = numbers("model.embed_tokens.weight")
    assert float(embedding.std()) == pytest.approx(0.02, rel=0.01)
    assert not numbers("model.layers.0.input_layernorm.weight").any()


def test_a_full_disk_is_refused_before_anything_is_written(
    narrow: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ShapeError, match="GiB of disk"):
        written(narrow, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_an_interrupted_run_leaves_nothing_and_the_next_one_succeeds(narrow: Shape, tmp_path: Path) -> None:
    def interrupt(activity: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        random_weights.write(narrow, tmp_path / "narrow", TINY, seed=0, progress=interrupt)
    assert not (tmp_path / "narrow").exists()
    assert not list((tmp_path / ".staging").iterdir())
    written(narrow, tmp_path / "narrow")


def test_a_second_run_keeps_what_is_there(
    narrow: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "published_shape", lambda root, name: narrow)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(TINY)
    folder = random_weights.make("0.8b", tmp_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert random_weights.make("0.8b", tmp_path, progress=progress.silent) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_damaged_folder_is_not_taken_for_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "weights" / "shape-0.8b"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3_5ForCausalLM"]}))
    shutil.copytree(ROOT / "eval" / "shapes", tmp_path / "eval" / "shapes")
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"delete weights/shape-0\.8b"):
        random_weights.make("0.8b", tmp_path)
