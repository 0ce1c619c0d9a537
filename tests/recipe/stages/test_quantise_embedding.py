"""The packed embedding is the stored one to within half a step, all else stays, and vLLM reads it to the bit."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import unpack_from_int32

from slimqwen import checkpoint
from slimqwen.checkpoint.config import untied, write_config
from slimqwen.checkpoint.weights import read_weights
from slimqwen.evals.engine_process import Request, generate_responses
from slimqwen.models.outline import Outline
from slimqwen.recipe import recipe_file, runner, variant_recipe
from slimqwen.recipe.recipe_file import Step
from slimqwen.recipe.stages import quantise_embedding
from slimqwen.recipe.stages.quantise_embedding import QuantiseEmbeddingParameters
from slimqwen.serving.in_process import engine
from tests.checkpoints import TINY, edited_tensors, stage_output, stored, with_manifest
from tests.zoo.published_forms import PUBLISHED_FORMS

NAME = "model.embed_tokens.weight"
PARTS = {f"{NAME}_{part}" for part in ("packed", "scale", "shape")}


def packed(source: Path, destination: Path, bits: int = 8, group_size: int = 32) -> Path:
    return stage_output("quantise_embedding", source, destination, bits=bits, group_size=group_size)


def unpacked(tensors: dict[str, torch.Tensor], bits: int, group_size: int = 32) -> torch.Tensor:
    """The embedding that packed tensors stand for, float32."""
    shape = torch.Size(tensors[f"{NAME}_shape"].tolist())
    integers = unpack_from_int32(tensors[f"{NAME}_packed"], bits, shape).float()
    return integers * tensors[f"{NAME}_scale"].float().repeat_interleave(group_size, dim=1)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 32), (8, 64), (4, 32)])
def test_the_stored_embedding_is_that_of_before_to_within_half_a_step(
    tmp_path: Path, bits: int, group_size: int
) -> None:
    tensors = stored(packed(TINY, tmp_path / "packed", bits, group_size))
    scale = tensors[f"{NAME}_scale"].float().repeat_interleave(group_size, dim=1)
    error = (unpacked(tensors, bits, group_size) - stored(TINY)[NAME].float()).abs()
    # The largest weight may lie half a step beyond the last level, and the scale was rounded to bfloat16.
    assert (error <= (0.51 + 2 ** (bits - 9)) * scale).all()


def test_a_tied_head_keeps_its_16_bits_and_becomes_a_tensor_of_its_own(tmp_path: Path) -> None:
    before, folder = stored(TINY), packed(TINY, tmp_path / "packed")
    after = stored(folder)
    assert after.keys() - before.keys() == {*PARTS, "lm_head.weight"}
    assert torch.equal(after["lm_head.weight"], before.pop(NAME))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    config = checkpoint.read_config(folder)
    assert config["tie_word_embeddings"] is False
    assert config["quantization_config"]["config_groups"].keys() == {"embed_tokens"}
    steps = [Step(quantise_embedding.STAGE, QuantiseEmbeddingParameters())]
    assert variant_recipe.unexplained_by(steps, TINY, folder) == []
    checkpoint.verify(with_manifest(folder), "no cure")


@pytest.mark.parametrize("first", ["quantise_lm_head", "quantise_embedding"])
def test_head_and_embedding_are_packed_in_either_order(tmp_path: Path, first: str) -> None:
    [second] = {"quantise_lm_head", "quantise_embedding"} - {first}
    folder = stage_output(second, stage_output(first, TINY, tmp_path / "one"), tmp_path / "both")
    assert Outline.read(folder).disk_bytes < Outline.read(TINY).disk_bytes
    groups = checkpoint.read_config(folder)["quantization_config"]["config_groups"]
    assert groups.keys() == {"lm_head", "embed_tokens"}
    checkpoint.verify(with_manifest(folder), "no cure")


def test_a_line_says_that_a_tied_model_grows(tmp_path: Path) -> None:
    (tmp_path / "tied").mkdir()
    run, parameters = quantise_embedding.STAGE.run, QuantiseEmbeddingParameters()
    facts = run(TINY, tmp_path / "tied", parameters, lambda *_: None)
    assert quantise_embedding.STAGE.summarise(facts) == (
        "the embedding takes 1.7 instead of 3.1 MB, and the output head, which was tied to it, 3.1 MB of its own: 1.7 "
        "MB more until quantise_lm_head packs it"
    )
    untied_source = PUBLISHED_FORMS["untied"].build(tmp_path / "source")
    (tmp_path / "untied").mkdir()
    facts = run(untied_source, tmp_path / "untied", parameters, lambda *_: None)
    assert quantise_embedding.STAGE.summarise(facts) == "the embedding takes 1.7 instead of 3.1 MB"


@pytest.mark.parametrize(
    ("published", "group_size", "message"),
    [
        ("text", 128, "group_size 128 does not divide the 192 columns of model.embed_tokens.weight"),
        ("w4a16-embedding", 32, "has 0 embeddings in 16 bits instead of one; remove quantise_embedding"),
        ("fp8-blocks", 32, "in the format fp8, to which no packed linears can be added"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    tmp_path: Path, published: str, group_size: int, message: str
) -> None:
    outline = Outline.read(PUBLISHED_FORMS[published].build(tmp_path / "published"))
    parameters = QuantiseEmbeddingParameters(group_size=group_size)
    [fault] = quantise_embedding.inspect_embedding(outline, parameters)
    assert message in fault.text


@pytest.mark.usefixtures("keys_cover_what_stages_execute")
def test_the_runner_makes_it_within_its_needs(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("description: a test\nbase: tiny\nstages:\n  - quantise_embedding\n")
    [outcome] = runner.run_recipe(recipe_file.read_recipe(file), "v", tmp_path / "w", lambda base: TINY)
    estimate = quantise_embedding.needs(Outline.read(TINY), QuantiseEmbeddingParameters())
    assert outcome.manifest.peak_memory_bytes < estimate.memory_bytes
    assert outcome.bytes_after <= estimate.disk_bytes


def multimodal(folder: Path) -> Path:
    return PUBLISHED_FORMS["tie-inner"].build(folder)


def llama(folder: Path) -> Path:
    return PUBLISHED_FORMS["llama"].build(folder)


def tiny(folder: Path) -> Path:
    return shutil.copytree(TINY, folder)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("make", "bits", "drafts"), [(tiny, 8, 4), (tiny, 4, 0), (multimodal, 8, 2), (llama, 8, 0)]
)
def test_an_engine_answers_as_with_the_same_numbers_in_16_bits(
    tmp_path: Path, make: Callable[[Path], Path], bits: int, drafts: int
) -> None:
    source = make(tmp_path / "source")
    folder = packed(source, tmp_path / "packed", bits)
    whole = shutil.copytree(source, tmp_path / "whole")
    write_config(whole, untied(checkpoint.read_config(whole)))
    embedding = next(
        name for name in Outline.read(source).tensors if name.endswith(NAME.removeprefix("model."))
    )
    with edited_tensors(whole) as tensors:
        tensors.setdefault("lm_head.weight", tensors[embedding].clone())
        tensors[embedding] = torch.cat(list(read_weights(folder)[embedding].blocks())).bfloat16()
    requests = [Request((5, 6, 7 * number), 16) for number in range(1, 9)]
    answers = []
    for each in (folder, whole):
        with engine(each, num_speculative_tokens=drafts) as llm:
            answers.append(generate_responses(llm, requests, log_probabilities=not drafts))
    assert answers[0] == answers[1]
