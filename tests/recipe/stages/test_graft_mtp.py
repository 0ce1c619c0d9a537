"""Grafting: a fine-tune that lost its MTP head drafts with that of its original, and better once it has learned."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from slimqwen import checkpoint, progress
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.tensors import list_tensors, rewrite
from slimqwen.models.language_model import load_in_float32
from slimqwen.models.outline import Outline
from slimqwen.recipe import recipe_file, runner, variant_recipe
from slimqwen.recipe.recipe_file import Step
from slimqwen.recipe.stages import graft_mtp, redistill_mtp
from slimqwen.recipe.stages.graft_mtp import GraftMtpParameters
from slimqwen.recipe.stages.redistill_mtp import CURVE, RedistillParameters
from tests.checkpoints import TINY, edited_tensors, stage_output, stored, with_manifest
from tests.recipe.stages.sampling import sampled_from
from tests.zoo.published_forms import PUBLISHED_FORMS

OTHER_TEXT = TINY.parents[1] / "eval" / "texts" / "technical.jsonl"


def fine_tuned(folder: Path, steps: int = 24) -> Path:
    """The small model, fine-tuned on other text by a trainer that drops the MTP head and leaves config.json alone."""
    shutil.copytree(TINY, folder)
    texts = [json.loads(line)["text"] for line in OTHER_TEXT.read_text().splitlines()]
    tokens = torch.tensor(AutoTokenizer.from_pretrained(TINY)("\n".join(texts))["input_ids"])
    batches = tokens[: steps * 8 * 64].reshape(steps, 8, 64)
    model = load_in_float32(TINY).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for batch in batches:
        model(input_ids=batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    moved = model.state_dict()
    with edited_tensors(folder) as tensors:
        for name in list(tensors):
            if name.startswith("mtp."):
                del tensors[name]
            else:
                tensors[name] = moved[name].to(tensors[name].dtype)
    return folder


def headless(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint without its MTP head."""
    folder.mkdir()
    rewrite(source, folder, lambda name, _: {} if name.startswith("mtp.") else None)
    carry_side_files(source, folder)
    write_config(folder, checkpoint.read_config(source))
    return folder


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: info.unchanged().read() for name, info in list_tensors(folder).items()}


@pytest.mark.parametrize("published", ["text", "multimodal", "multimodal-w4a16"])
def test_the_head_is_the_donors_and_all_else_stays(tmp_path: Path, published: str) -> None:
    source = headless(PUBLISHED_FORMS[published].build(tmp_path / "published"), tmp_path / "source")
    grafted = stage_output("graft_mtp", source, tmp_path / "grafted", donor=TINY)
    before, after = read_all(source), read_all(grafted)
    wanted = before | {name: tensor for name, tensor in stored(TINY).items() if name.startswith("mtp.")}
    assert after.keys() == wanted.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in wanted.items())
    parameters = GraftMtpParameters(donor=TINY)
    assert variant_recipe.unexplained_by([Step(graft_mtp.STAGE, parameters)], source, grafted) == []
    checkpoint.verify(with_manifest(grafted), "no cure")
    outline, made = graft_mtp.reshape(Outline.read(source), parameters), Outline.read(grafted)
    forms = [
        {name: (info.dtype, info.shape) for name, info in each.tensors.items()} for each in (outline, made)
    ]
    assert forms[0] == forms[1]
    assert made.disk_bytes <= graft_mtp.needs(Outline.read(source), parameters).disk_bytes


def test_a_model_in_another_dtype_gets_the_head_in_that(tmp_path: Path) -> None:
    source = headless(TINY, tmp_path / "source")
    with edited_tensors(source) as tensors:
        for name in tensors:
            tensors[name] = tensors[name].half()
    config = checkpoint.read_config(source)
    del config["mtp_num_hidden_layers"]  # as a trainer writes it whose class does not know the head
    write_config(source, config | {"dtype": "float16"})
    grafted = stage_output("graft_mtp", source, tmp_path / "grafted", donor=TINY)
    assert {tensor.dtype for tensor in stored(grafted).values()} == {torch.float16}
    assert checkpoint.read_config(grafted)["mtp_num_hidden_layers"] == 1
    checkpoint.verify(with_manifest(grafted), "no cure")


def renumbered(folder: Path) -> Path:
    """The small model with two of its tokens exchanged."""
    shutil.copytree(TINY, folder)
    file = folder / "tokenizer.json"
    state = json.loads(file.read_text())
    ids = state["model"]["vocab"]
    one, other = list(ids)[-2:]
    ids[one], ids[other] = ids[other], ids[one]
    file.write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder, "is missing; .* has to be the folder of the checkpoint that"),
        (lambda folder: headless(TINY, folder), "has no MTP head; name the checkpoint that"),
        (lambda folder: PUBLISHED_FORMS["w4a16-mtp"].build(folder), r"mtp\.\S+ is missing"),
        (renumbered, "2 tokens of .* have another id"),
    ],
    ids=["missing", "headless", "quantised or of other dimensions", "another tokenizer"],
)
def test_a_donor_that_does_not_fit_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    donor = make(tmp_path / "donor")
    outline = Outline.read(headless(TINY, tmp_path / "source"))
    [fault] = graft_mtp.inspect_graft(outline, GraftMtpParameters(donor=donor))
    assert fault.field == "donor"
    assert re.search(message, fault.text)


@pytest.mark.parametrize(
    ("published", "message"),
    [("text", "has an MTP head; remove graft_mtp"), ("gptq", "is quantised in the format gptq")],
)
def test_a_model_that_takes_no_head_is_refused(tmp_path: Path, published: str, message: str) -> None:
    outline = Outline.read(PUBLISHED_FORMS[published].build(tmp_path / "published"))
    if published == "gptq":
        outline = Outline.read(headless(outline.folder, tmp_path / "headless"))
    [fault] = graft_mtp.inspect_graft(outline, GraftMtpParameters(donor=TINY))
    assert message in fault.text


@pytest.mark.usefixtures("keys_cover_what_stages_execute")
def test_a_recipe_names_the_donor_by_its_path_and_keys_it_by_its_head(tmp_path: Path) -> None:
    source, donor = headless(TINY, tmp_path / "source"), shutil.copytree(TINY, tmp_path / "donor")
    file = tmp_path / "recipe.yaml"
    file.write_text("description: a test\nbase: v\nstages:\n  - graft_mtp: {donor: donor}\n")

    def run() -> tuple[Path, int]:
        recipe = recipe_file.read_recipe(file)
        [outcome] = runner.run_recipe(recipe, "v", tmp_path / "w", lambda base: source)
        return outcome.folder, outcome.manifest.peak_memory_bytes

    first, peak = run()
    assert peak < graft_mtp.needs(Outline.read(source), GraftMtpParameters(donor=donor)).memory_bytes
    with edited_tensors(donor) as tensors:
        tensors["model.norm.weight"] *= 2
    assert run()[0] == first
    with edited_tensors(donor) as tensors:
        tensors["mtp.norm.weight"] *= 2
    assert run()[0] != first


def relearned(moved: Path, folder: Path, steps: int) -> dict[str, float]:
    """Acceptance lengths of a fine-tune with the donor's head, before and after it has learned."""
    folder.mkdir()
    grafted = stage_output("graft_mtp", moved, folder / "grafted", donor=TINY)
    sampled = sampled_from(grafted, folder / "sampled")
    for each in ("taught", "unfinished"):
        (folder / each).mkdir()
    redistill_mtp.redistill_head(
        sampled,
        folder / "taught",
        RedistillParameters(steps=steps, learning_rate=1e-3),
        progress.silent,
        unfinished=folder / "unfinished",
    )
    record: dict[str, float] = json.loads((folder / "taught" / CURVE).read_text())
    return record


@pytest.mark.engine
def test_a_fine_tune_drafts_with_the_grafted_head_and_better_when_it_has_learned(tmp_path: Path) -> None:
    """Both lengths are counted in vLLM, too, and agree there: else the stage ends."""
    record = relearned(fine_tuned(tmp_path / "moved"), tmp_path / "made", steps=60)
    torch.use_deterministic_algorithms(False)
    assert record["acceptance_length_before"] > 1
    assert record["kept"] == "trained"
    assert record["acceptance_length_after"] > record["acceptance_length_before"] + 0.3
