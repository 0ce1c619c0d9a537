"""The packed head holds what compressed-tensors itself would store, and the rest stays.

That vLLM serves it and drafts with it is seen in test_rungs.py and test_draft_vocabulary.py.
"""

import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from slimqwen import checkpoint
from slimqwen.checkpoint.config import write_config
from slimqwen.models.outline import Outline
from slimqwen.recipe import variant_recipe
from slimqwen.recipe.recipe_file import Step
from slimqwen.recipe.stage import StageError
from slimqwen.recipe.stages import quantise_lm_head
from slimqwen.recipe.stages.quantise_lm_head import QuantiseLmHeadParameters
from tests.checkpoints import TINY, stage_output, stored
from tests.identity.coverage_by_keys import covered
from tests.zoo.published_forms import PUBLISHED_FORMS


def quantised(source: Path, destination: Path, group_size: int = 32) -> Path:
    return stage_output("quantise_lm_head", source, destination, group_size=group_size)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with covered(quantise_lm_head.STAGE.run, tmp_path_factory.mktemp("calls")):
        return quantised(TINY, tmp_path_factory.mktemp("lm_head") / "packed")


@pytest.mark.parametrize("group_size", [32, 64])
def test_the_stored_head_is_the_embedding_to_within_half_a_step(tmp_path: Path, group_size: int) -> None:
    tensors = stored(quantised(TINY, tmp_path / "packed", group_size))
    embedding = tensors["model.embed_tokens.weight"].float()
    shape = torch.Size(tensors["lm_head.weight_shape"].tolist())
    assert shape == embedding.shape
    whole = unpack_from_int32(tensors["lm_head.weight_packed"], 4, shape).float()
    scale = tensors["lm_head.weight_scale"].float().repeat_interleave(group_size, dim=1)
    # The largest weight may lie half a step beyond the last level, and the scale was rounded to bfloat16.
    assert ((whole * scale - embedding).abs() <= 0.51 * scale + 0.04 * scale).all()


def test_everything_but_the_head_is_byte_for_byte_what_it_was(packed: Path) -> None:
    before, after = stored(TINY), stored(packed)
    assert after.keys() - before.keys() == {f"lm_head.weight_{part}" for part in ("packed", "scale", "shape")}
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    steps = [Step(quantise_lm_head.STAGE, QuantiseLmHeadParameters())]
    assert variant_recipe.unexplained_by(steps, TINY, packed) == []


def test_the_config_unties_the_embedding_and_names_only_the_head(packed: Path) -> None:
    config = checkpoint.read_config(packed)
    assert config["tie_word_embeddings"] is False
    groups = config["quantization_config"]["config_groups"]
    assert groups.keys() == {"lm_head"}
    assert groups["lm_head"]["weights"]["group_size"] == 32


def test_groups_of_linears_that_are_quantised_already_stay(tmp_path: Path) -> None:
    source = shutil.copytree(TINY, tmp_path / "source")
    before = {"config_groups": {"group_0": {"targets": ["Linear"]}}, "ignore": ["lm_head", "re:^mtp.*"]}
    write_config(source, {**checkpoint.read_config(TINY), "quantization_config": before})
    after = checkpoint.read_config(quantised(source, tmp_path / "packed"))["quantization_config"]
    assert after["config_groups"]["group_0"] == {"targets": ["Linear"]}
    assert after["ignore"] == ["re:^mtp.*"]


def test_a_group_that_does_not_divide_the_inputs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="group_size 128 does not divide the 192 columns"):
        quantised(TINY, tmp_path / "packed", group_size=128)


def test_gptq_reads_text_and_needs_the_memory_of_an_engine(tmp_path: Path) -> None:
    outline = Outline.read(PUBLISHED_FORMS["multimodal-w4a16"].build(tmp_path / "published"))
    plain = QuantiseLmHeadParameters()
    searched = QuantiseLmHeadParameters(rounding="gptq", corpus={"path": "tinyworld"})
    assert list(quantise_lm_head.inspect_output_head(outline, plain)) == []
    assert list(quantise_lm_head.inspect_output_head(outline, searched)) == []
    assert QuantiseLmHeadParameters(rounding="gptq").corpus.is_own
    few = QuantiseLmHeadParameters(rounding="gptq", corpus={"path": "tinyworld", "sequences": 10**6})
    [fault] = quantise_lm_head.inspect_output_head(outline, few)
    assert "1000000 are needed" in fault.text
    assert quantise_lm_head.data(plain) == {}
    assert quantise_lm_head.data(searched).keys() == {"corpus"}
    before, after = (quantise_lm_head.needs(outline, each) for each in (plain, searched))
    assert before.disk_bytes == after.disk_bytes
    assert after.memory_bytes > before.memory_bytes + 2**31
    assert after.operations > before.operations
