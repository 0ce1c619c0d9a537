"""What config.json promises of a checkpoint in every format, and what vLLM would make of its flags."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slimqwen.checkpoint import CorruptCheckpointError, UnsupportedFormatError, read_config
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.promise import check_form, check_tensors
from slimqwen.models.calibrated_model import with_quantisation
from tests.checkpoints import TINY, edited_tensors, stage_output
from tests.zoo.published_forms import PUBLISHED_FORMS

UP = "model.layers.0.mlp.up_proj"
NORM = "model.norm.weight"
Tensors = dict[str, torch.Tensor]

PARTS = {
    "w4a16": ("weight_packed", "weight_scale", "weight_shape"),
    "w4a16-zero-points": ("weight_packed", "weight_scale", "weight_zero_point"),
    "w8a8": ("weight", "weight_scale"),
    "fp8-rows": ("weight", "weight_scale"),
    "fp8-blocks": ("weight", "weight_scale_inv"),
    "gptq": ("qweight", "qzeros", "scales"),
    "auto-round": ("qweight", "qzeros", "scales"),
    "awq": ("qweight", "qzeros", "scales"),
    "nvfp4": ("weight_scale", "weight_scale_2"),
}
"""Parts of a quantised linear, by published form."""


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in PARTS.items() for part in parts])
def test_a_part_of_a_quantised_weight_that_is_missing_is_noticed(
    tmp_path: Path, name: str, part: str
) -> None:
    folder = PUBLISHED_FORMS[name].build(tmp_path / name)
    check_tensors(folder)
    with edited_tensors(folder) as tensors:
        del tensors[f"{UP}.{part}"]
    with pytest.raises(CorruptCheckpointError, match=r"up_proj|in_proj"):
        check_tensors(folder)


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("w4a16", "weight_scale", r"weight_scale has shape \[512, 12\], config\.json says \[512, 6\]"),
        (
            "fp8-blocks",
            "weight_scale_inv",
            r"weight_scale_inv has shape \[4, 4\], config\.json says \[4, 2\]",
        ),
        ("gptq", "qweight", r"qweight has shape \[48, 512\], config\.json says \[24, 512\]"),
        ("awq", "scales", r"scales has shape \[6, 1024\], config\.json says \[6, 512\]"),
    ],
)
def test_a_part_of_another_shape_is_noticed(tmp_path: Path, name: str, part: str, message: str) -> None:
    folder = PUBLISHED_FORMS[name].build(tmp_path / name)
    with edited_tensors(folder) as tensors:
        dimension = 0 if part == "qweight" else 1
        tensors[f"{UP}.{part}"] = torch.cat([tensors[f"{UP}.{part}"]] * 2, dimension)
    with pytest.raises(CorruptCheckpointError, match=message):
        check_tensors(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.update({NORM: tensors[NORM].half()}), "norm.weight is F16, not BF16 or F32"),
        (
            lambda tensors: tensors.update({f"{UP}.lora_A.weight": tensors[NORM].clone()}),
            r"has the tensor .*lora_A\.weight, which its config\.json does not promise",
        ),
    ],
)
def test_a_tensor_of_another_dtype_or_beside_those_of_the_model_is_noticed(
    tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    folder = shutil.copytree(TINY, tmp_path / "copy")
    with edited_tensors(folder) as tensors:
        change(tensors)
    with pytest.raises(CorruptCheckpointError, match=message):
        check_tensors(folder)


def with_cache_scales(folder: Path, form: dict[str, Any] | None) -> Path:
    """A copy of the embedded model with scales of an 8-bit KV cache."""
    shutil.copytree(TINY, folder)
    with edited_tensors(folder) as tensors:
        for name in [name for name in tensors if name.endswith("self_attn.k_proj.weight")]:
            for scale in ("k_scale", "v_scale"):
                tensors[name.replace("k_proj.weight", scale)] = torch.tensor(0.5)
    write_config(folder, {**read_config(folder), **({"quantization_config": form} if form else {})})
    return folder


CACHE_ALONE = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}


@pytest.mark.parametrize("form", [None, CACHE_ALONE])
def test_scales_of_a_kv_cache_that_nothing_announces_are_refused(
    tmp_path: Path, form: dict[str, Any] | None
) -> None:
    with pytest.raises(
        UnsupportedFormatError, match=r"k_scale.*without kv_cache_scheme.*copy kv_cache_scheme"
    ):
        check_form(with_cache_scales(tmp_path / "copy", form))


def test_announced_scales_of_a_kv_cache_stay_so_through_a_stage(tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    folder = with_cache_scales(tmp_path / "copy", {**CACHE_ALONE, "kv_cache_scheme": scheme})
    check_form(folder)
    check_tensors(folder)
    out = stage_output("quantise_lm_head", folder, tmp_path / "out", group_size=32)
    check_form(out)
    check_tensors(out)
    assert read_config(out)["quantization_config"]["kv_cache_scheme"] == scheme
    calibrated = with_quantisation(read_config(folder), {**CACHE_ALONE, "kv_cache_scheme": None}, {})
    assert calibrated["quantization_config"]["kv_cache_scheme"] == scheme


def test_parts_of_an_unknown_format_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = PUBLISHED_FORMS["fp8-rows"].build(tmp_path / "unknown")
    write_config(folder, {**read_config(folder), "quantization_config": {"quant_method": "quark"}})
    check_form(folder)
    check_tensors(folder)


def test_a_config_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "copy")
    write_config(folder, {**read_config(folder), "model_type": "qwen9"})
    with pytest.raises(CorruptCheckpointError, match=r"transformers cannot use .*config\.json \(.*qwen9"):
        check_tensors(folder)


def with_tie(inner: Any, outer: Any, *, head: bool) -> Callable[[dict[str, Any], Tensors], dict[str, Any]]:
    """Edit a multimodal checkpoint: its flags (`...`: not there), and whether it has an output head of its own."""

    def edit(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
        for part, flag in ((config["text_config"], inner), (config, outer)):
            part["tie_word_embeddings"] = flag
            if flag is ...:
                del part["tie_word_embeddings"]
        if head:
            tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"] * 2
        return config

    return edit


@pytest.mark.parametrize("outer", [True, False, ...])
@pytest.mark.parametrize("inner", [True, False, ...])
@pytest.mark.parametrize("head", [True, False])
def test_flags_are_refused_by_which_vllm_would_take_another_head(
    tmp_path: Path, inner: Any, outer: Any, head: bool
) -> None:
    folder = PUBLISHED_FORMS["multimodal-bare"].build(tmp_path / "published")
    with edited_tensors(folder) as tensors:
        write_config(folder, with_tie(inner, outer, head=head)(read_config(folder), tensors))
    # vLLM 0.32 reads the inner flag; a stored head unties both where the outer one ties.
    vllm_has_a_head = inner is not True or (outer is True and head)
    if vllm_has_a_head == head:
        check_form(folder)
    else:
        with pytest.raises(
            UnsupportedFormatError, match=f"set tie_word_embeddings to {str(not head).lower()}, in"
        ):
            check_form(folder)


@pytest.mark.parametrize(
    ("ignore", "found"),
    [
        (["re:.*"], "stored quantised, but .* it is in 16 bits"),
        (["lm_head", "re:^mtp.*", "re:.*visual.*"], "stored in 16 bits, but .* it is quantised"),
    ],
)
def test_lists_that_contradict_the_stored_weights_are_refused(
    tmp_path: Path, ignore: list[str], found: str
) -> None:
    folder = PUBLISHED_FORMS["w4a16"].build(tmp_path / "published")
    check_form(folder)
    config = read_config(folder)
    config["quantization_config"]["ignore"] = ignore
    write_config(folder, config)
    with pytest.raises(UnsupportedFormatError, match=found):
        check_form(folder)


@pytest.mark.parametrize("order", ["group", "dynamic"])
def test_groups_in_the_order_of_activations_are_refused(tmp_path: Path, order: str) -> None:
    folder = PUBLISHED_FORMS["w4a16"].build(tmp_path / "published")
    config = read_config(folder)
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = order
    write_config(folder, config)
    with pytest.raises(UnsupportedFormatError, match="which vLLM no longer loads; use"):
        check_form(folder)


def test_a_tied_checkpoint_may_hold_its_head_too(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "copy")
    with edited_tensors(folder) as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    check_form(folder)
    check_tensors(folder)
