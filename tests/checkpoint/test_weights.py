"""Weights in every published form: which of two checkpoints differ, and what a packed one decodes to."""

import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import pack_to_int32
from safetensors.torch import save_file

from slimqwen.checkpoint import CorruptCheckpointError, UnsupportedFormatError, check_folder, read_config
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.rtn import quantise, round_to_nearest
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.checkpoint.weights import Weight, changed_weights, has_mtp_head, holds_mtp_head, read_weights
from slimqwen.formats.compressed_tensors import PackedIntegers, config_group, settings_of
from tests.checkpoints import TINY, edited_tensors
from tests.zoo.published_forms import PUBLISHED_FORMS

EMBEDDING, LINEAR, NORM = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
)


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    form = settings_of({"group": config_group("Linear", 4, 16)}, ())
    write_config(folder, {"architectures": ["Qwen3_5ForCausalLM"], "quantization_config": form})
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


def packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    integers, scales = quantise(weight.float(), 16, 4)
    return {
        f"{LINEAR}_packed": pack_to_int32(integers, 4),
        f"{LINEAR}_scale": scales,
        f"{LINEAR}_shape": torch.tensor(weight.shape),
    }


def changed(first: Path, second: Path) -> list[str]:
    return changed_weights(first, second, lambda name: False)


def test_the_same_bytes_in_another_order_are_no_change(tmp_path, tensors):
    first = written(tmp_path / "first", tensors)
    assert changed(first, written(tmp_path / "second", dict(reversed(tensors.items())))) == []


def test_what_differs_is_named_unless_it_is_left_out(tmp_path, tensors):
    first = written(tmp_path / "first", tensors)
    other = {**tensors, NORM: tensors[NORM] * 1.125, "lm_head.weight": tensors.pop(EMBEDDING)}
    other.pop(EMBEDDING)
    second = written(tmp_path / "second", other)
    assert changed(first, second) == [EMBEDDING, NORM, "lm_head.weight"]
    assert changed_weights(first, second, lambda name: "norm" in name) == [EMBEDDING, "lm_head.weight"]


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts[f"{LINEAR}_scale"][3].mul_(2),
        lambda parts: parts.update({f"{LINEAR}_scale": parts[f"{LINEAR}_scale"].float()}),
        lambda parts: parts.pop(f"{LINEAR}_shape"),
    ],
)
def test_a_packed_weight_differs_where_one_of_its_parts_does(tmp_path, tensors, change):
    weight = tensors.pop(LINEAR)
    first, other = written(tmp_path / "first", tensors | packed(weight)), packed(weight)
    change(other)
    assert changed(first, written(tmp_path / "second", tensors | other)) == [LINEAR]


def test_names_of_a_multimodal_checkpoint_are_those_of_its_language_model(tmp_path):
    names = changed(TINY, PUBLISHED_FORMS["multimodal"].build(tmp_path / "multimodal"))
    assert names
    assert all(name.startswith("model.visual.") for name in names)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("w4a16-zero-points", 25), ("w8a16", 25), ("w8a8", 25), ("fp8-rows", 25), ("mixed", 16), ("fp8-blocks", 32),
        ("gptq", 12), ("gptq-act-order", 19), ("auto-round", 12), ("awq", 12), ("nvfp4", 25), ("w4a16-embedding", 27),
    ],
)  # fmt: skip
def test_weights_of_every_format_decode_to_about_what_they_were(tmp_path, name, count):
    original, read = read_weights(TINY), read_weights(PUBLISHED_FORMS[name].build(tmp_path / name))
    assert read.keys() - {"lm_head.weight"} == original.keys()
    quantised = [weight for weight in read.values() if weight.is_quantised]
    assert len(quantised) == count
    for weight in quantised:
        # An untied head begins as the embedding.
        numbers = original.get(weight.name, original[EMBEDDING]).carrier.unchanged().read().float()
        assert weight.shape == numbers.shape
        # Four bits leave a tenth of a weight as error; a number out of place leaves nothing of it.
        assert (torch.cat(list(weight.blocks())) - numbers).norm() < 0.2 * numbers.norm()


@pytest.mark.parametrize(("name", "can_draft"), [("text", True), ("no-mtp", False), ("mtp-lost", False)])
def test_a_checkpoint_drafts_with_a_head_that_is_announced_and_there(tmp_path, name, can_draft):
    assert has_mtp_head(PUBLISHED_FORMS[name].build(tmp_path / name)) is can_draft


MTP_PARTS = (
    "mtp.fc.",
    "mtp.norm.",
    "mtp.layers.0.",
    "mtp.layers.0.self_attn.q_norm.",
    "mtp.layers.0.mlp.up_proj.",
)


@pytest.mark.parametrize("published", ["text", "w4a16-mtp", "qwen3.5-moe", "fp8-blocks-mtp16"])
def test_a_part_of_a_head_is_an_error_of_every_verb(tmp_path, published):
    folder = PUBLISHED_FORMS[published].build(tmp_path / "whole")
    config, names = read_config(folder), list(list_tensors(folder))
    assert holds_mtp_head(config, names) is any(name.startswith("mtp.") for name in names)
    for part in MTP_PARTS:
        left = [name for name in names if not name.startswith(part)]
        if len(left) < len(names):
            with pytest.raises(CorruptCheckpointError, match=rf"lacks {part}.* every mtp\.\* tensor"):
                holds_mtp_head(config, left)


def test_a_draft_head_without_the_head_is_a_part_of_one():
    config = {"mtp_num_hidden_layers": 1}
    with pytest.raises(CorruptCheckpointError, match=r"lacks mtp\.fc and 3 others"):
        holds_mtp_head(config, ["mtp.draft_head.weight", "mtp.draft_head.token_ids"])


def test_a_folder_with_a_part_of_a_head_is_refused(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "copy")
    with edited_tensors(folder) as tensors:
        del tensors["mtp.fc.weight"]
    with pytest.raises(
        CorruptCheckpointError, match=r"lacks mtp\.fc of the MTP head .*; copy every.*; make it"
    ):
        check_folder(folder, "make it")


def only_weight(folder: Path, parts: dict[str, torch.Tensor]) -> Weight:
    return read_weights(written(folder, parts))[LINEAR]


@pytest.mark.parametrize("block_rows", [8, 4096])
def test_a_packed_weight_is_read_as_what_it_was_rounded_to(tmp_path, tensors, monkeypatch, block_rows):
    monkeypatch.setattr("slimqwen.checkpoint.weights.BLOCK_ROWS", block_rows)
    weight = only_weight(tmp_path / "packed", packed(tensors[LINEAR]))
    assert weight.is_quantised
    assert weight.shape == (16, 32)
    assert [len(block) for block in weight.blocks()] == [min(block_rows, 16)] * (16 // min(block_rows, 16))
    torch.testing.assert_close(
        torch.cat(list(weight.blocks())), round_to_nearest(tensors[LINEAR].float(), PackedIntegers(4, 16))
    )


@pytest.mark.parametrize("block_rows", [8, 4096])
def test_a_weight_in_16_bits_is_read_as_it_is(tmp_path, tensors, monkeypatch, block_rows):
    monkeypatch.setattr("slimqwen.checkpoint.weights.BLOCK_ROWS", block_rows)
    read = read_weights(written(tmp_path / "plain", tensors))
    assert not read[LINEAR].is_quantised
    for name in (LINEAR, NORM):
        assert torch.equal(torch.cat(list(read[name].blocks())), tensors[name].float())


def test_zero_points_are_part_of_a_packed_weight(tmp_path):
    """Levels 0 to 15 are stored minus 8; the zero point of each group is 3, the step 1/4."""
    weight = (torch.arange(16 * 32).reshape(16, 32) % 16 - 3) / 4
    parts = {
        f"{LINEAR}_packed": pack_to_int32((weight * 4 + 3 - 8).to(torch.int8), 4),
        f"{LINEAR}_scale": torch.full((16, 2), 0.25, dtype=torch.bfloat16),
        f"{LINEAR}_shape": torch.tensor(weight.shape),
        f"{LINEAR}_zero_point": pack_to_int32(torch.full((16, 2), 3 - 8, dtype=torch.int8), 4, packed_dim=0),
    }
    (read,) = only_weight(tmp_path / "packed", parts).blocks()
    assert torch.equal(read, weight)


def test_a_form_that_is_not_read_is_an_error_that_names_the_weight(tmp_path):
    parts = {LINEAR: torch.ones(16, 16, dtype=torch.uint8), f"{LINEAR}_scale": torch.ones(16, 2)}
    with pytest.raises(
        UnsupportedFormatError, match=f"{LINEAR} is stored as U8 in a way .* use a checkpoint"
    ):
        next(only_weight(tmp_path / "bytes", parts).blocks())


@pytest.mark.parametrize("part", ["scale", "shape"])
def test_a_packed_weight_without_one_of_its_parts_is_named(tmp_path, tensors, part):
    parts = packed(tensors[LINEAR])
    del parts[f"{LINEAR}_{part}"]
    with pytest.raises(
        CorruptCheckpointError,
        match=f"{LINEAR} is stored without weight_{part}; make or download the checkpoint anew",
    ):
        next(only_weight(tmp_path / part, parts).blocks())
