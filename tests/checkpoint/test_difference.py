"""What a tensor of one checkpoint became in another, and by how much."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import pack_to_int32
from safetensors.torch import save_file

from slimqwen.checkpoint import CorruptCheckpointError, UnsupportedFormatError
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.difference import TensorChange, compare_checkpoints
from slimqwen.checkpoint.rtn import quantise, round_to_nearest
from tests.checkpoints import TINY
from tests.zoo.animals import ANIMALS

EMBEDDING, LINEAR, NORM = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
)


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    write_config(folder, {"architectures": ["Qwen3_5ForCausalLM"]})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {
        EMBEDDING: torch.randn(64, 32, generator=rng).bfloat16(),
        LINEAR: torch.randn(16, 32, generator=rng).bfloat16(),
        NORM: torch.ones(32, dtype=torch.bfloat16),
    }


@pytest.fixture
def source(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    return written(tmp_path / "source", tensors)


def packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    integers, scales = quantise(weight.float(), 16, 4)
    return {
        f"{LINEAR}_packed": pack_to_int32(integers, 4),
        f"{LINEAR}_scale": scales,
        f"{LINEAR}_shape": torch.tensor(weight.shape),
    }


def packed_with_zero_points(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Levels 0 to 15 stored minus 8, zero point 3 of every group, step 1/4."""
    levels = (weight.float() * 4 + 3).round().clamp(0, 15)
    groups = (len(weight), 2)
    return {
        f"{LINEAR}_packed": pack_to_int32((levels - 8).to(torch.int8), 4),
        f"{LINEAR}_scale": torch.full(groups, 0.25, dtype=torch.bfloat16),
        f"{LINEAR}_shape": torch.tensor(weight.shape),
        f"{LINEAR}_zero_point": pack_to_int32(torch.full(groups, 3 - 8, dtype=torch.int8), 4, packed_dim=0),
    }


def test_the_same_bytes_in_other_files_are_no_change(tmp_path, source, tensors):
    folder = written(
        tmp_path / "copy", {NORM: tensors[NORM], LINEAR: tensors[LINEAR], EMBEDDING: tensors[EMBEDDING]}
    )
    assert {each.change for each in compare_checkpoints(source, folder)} == {TensorChange.NONE}


def test_a_replaced_tensor_is_named_with_its_part_of_the_model_and_its_deviation(tmp_path, source, tensors):
    folder = written(tmp_path / "damaged", tensors | {NORM: tensors[NORM] * 1.125})
    (norm,) = (each for each in compare_checkpoints(source, folder) if each.change is not TensorChange.NONE)
    assert (norm.name, norm.kind, norm.change) == (NORM, "norm", TensorChange.REPLACED)
    assert norm.deviation == pytest.approx(0.125)


def test_a_packed_weight_is_compared_dequantised(tmp_path, source, tensors):
    weight = tensors.pop(LINEAR)
    folder = written(tmp_path / "packed", tensors | packed(weight))
    (linear,) = (each for each in compare_checkpoints(source, folder) if each.change is not TensorChange.NONE)
    assert (linear.name, linear.kind, linear.change) == (LINEAR, "MLP", TensorChange.ROUNDED)
    error = round_to_nearest(weight.float(), 16, 4) - weight.float()
    assert linear.deviation == pytest.approx(float(error.norm() / weight.float().norm()), rel=1e-5)


def test_zero_points_are_part_of_a_packed_weight(tmp_path, tensors):
    weight = (torch.arange(16 * 32).reshape(16, 32) % 16 - 3) / 4
    source = written(tmp_path / "source", {**tensors, LINEAR: weight.bfloat16()})
    tensors.pop(LINEAR)
    folder = written(tmp_path / "packed", tensors | packed_with_zero_points(weight))
    differences = {each.name: each for each in compare_checkpoints(source, folder)}
    assert differences[LINEAR].change is TensorChange.ROUNDED
    assert differences[LINEAR].deviation == 0


def test_one_other_scale_replaces_a_packed_weight(tmp_path, tensors):
    weight = tensors.pop(LINEAR)
    first = written(tmp_path / "first", tensors | packed(weight))
    other = packed(weight)
    other[f"{LINEAR}_scale"][3, 1] *= 2
    second = written(tmp_path / "second", tensors | other)
    (linear,) = (each for each in compare_checkpoints(first, second) if each.change is not TensorChange.NONE)
    assert (linear.name, linear.change) == (LINEAR, TensorChange.REPLACED)


@pytest.mark.parametrize(
    ("swapped", "change"), [(False, TensorChange.SELECTED), (True, TensorChange.REPLACED)]
)
def test_the_rows_that_pruning_kept_are_checked_byte_for_byte(tmp_path, source, tensors, swapped, change):
    token_ids = np.array([0, 3, 5, 63])
    rows = tensors[EMBEDDING][[0, 5, 3, 63] if swapped else token_ids]
    folder = written(tmp_path / "pruned", tensors | {EMBEDDING: rows})
    (folder / "vocab_map.json").write_text(json.dumps({"new_to_old": token_ids.tolist()}))
    differences = {each.name: each for each in compare_checkpoints(source, folder)}
    assert (differences[EMBEDDING].change, differences[EMBEDDING].deviation) == (change, None)


def test_tensors_of_one_side_alone_are_missing_or_added(tmp_path, source, tensors):
    rows = tensors.pop(EMBEDDING)
    folder = written(tmp_path / "other", tensors | {"lm_head.weight": rows})
    changes = {each.name: each.change for each in compare_checkpoints(source, folder)}
    assert (changes[EMBEDDING], changes["lm_head.weight"]) == (TensorChange.MISSING, TensorChange.ADDED)


def test_a_broken_vocabulary_map_is_one_line(tmp_path, source, tensors):
    folder = written(tmp_path / "broken", tensors)
    (folder / "vocab_map.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=r"new_to_old.*make the checkpoint anew"):
        compare_checkpoints(source, folder)


@pytest.mark.parametrize(
    ("name", "rounded"),
    [
        ("w4a16", 25), ("w4a16-zero-points", 25), ("w4a16-g128", 8), ("w8a16", 25), ("w8a8", 25), ("fp8-rows", 25),
        ("mixed", 16), ("fp8-blocks", 32), ("gptq", 12), ("gptq-act-order", 19), ("auto-round", 12), ("awq", 12),
    ],
)  # fmt: skip
def test_weights_of_every_format_are_compared_as_what_they_decode_to(tmp_path, name, rounded):
    differences = compare_checkpoints(TINY, ANIMALS[name].build(tmp_path / name))
    changed = [each for each in differences if each.change is not TensorChange.NONE]
    assert [each.change for each in changed] == [TensorChange.ROUNDED] * rounded
    # A number out of place would leave nothing of a weight; four bits leave a tenth of it as error.
    assert all(0 < each.deviation < 0.2 for each in changed)


def test_names_of_a_multimodal_checkpoint_are_those_of_its_language_model(tmp_path):
    differences = compare_checkpoints(TINY, ANIMALS["multimodal"].build(tmp_path / "multimodal"))
    assert {each.kind for each in differences if each.change is not TensorChange.NONE} == {"vision"}


def test_a_form_that_is_not_read_is_an_error_that_names_the_weight(tmp_path, source, tensors):
    bytes_alone = {name: tensor for name, tensor in tensors.items() if name != LINEAR}
    bytes_alone |= {LINEAR: torch.ones(16, 16, dtype=torch.uint8), f"{LINEAR}_scale": torch.ones(16, 2)}
    before = written(tmp_path / "bytes", bytes_alone)
    after = written(tmp_path / "other", bytes_alone | {LINEAR: torch.zeros(16, 16, dtype=torch.uint8)})
    with pytest.raises(UnsupportedFormatError, match=f"{LINEAR} is packed in bytes, .* take a checkpoint"):
        compare_checkpoints(before, after)
