"""Which ids and rows a draft head gets, what stays as it was, on every form of output head, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import unpack_from_int32
from safetensors.torch import load_file

from slimqwen import checkpoint
from slimqwen.checkpoint import UnsupportedFormatError, draft_head
from slimqwen.checkpoint.config import read_json_object, write_config
from slimqwen.checkpoint.files import bytes_on_disk, carry_all, list_files
from slimqwen.checkpoint.tensors import INDEX, list_tensors
from slimqwen.errors import SlimqwenError
from slimqwen.models.outline import Outline
from slimqwen.recipe import recipe_file, runner, variant_recipe
from slimqwen.recipe.recipe_file import RecipeError, Step
from slimqwen.recipe.sampled_outputs import OUTPUTS
from slimqwen.recipe.stage import StageError
from slimqwen.recipe.stages import trim_draft_vocab
from slimqwen.recipe.stages.prune_vocab import VOCAB_MAP
from slimqwen.recipe.stages.trim_draft_vocab import REPORT, TrimDraftVocabParameters
from slimqwen.text.corpus import CorpusError
from tests.checkpoints import TINY, edited_tensors, in_old_layout, stage_output, stored, with_manifest
from tests.zoo.published_forms import PUBLISHED_FORMS

ROWS = 8192
ALWAYS_IN = {0, 1, 2, 3, 4}
"""Ids of tiny's added tokens, the two ends of a text among them."""

OFTEN = list(range(8000, 8100))
"""Ids that the continuations below hold twice; the ids 7000 to 7099 they hold once."""

RECIPE = "description: a test\nbase: tiny\nstages:\n  - trim_draft_vocab:\n      size: 128\n      bits: 4\n"

Tensors = dict[str, torch.Tensor]


def with_outputs(folder: Path, held_out: list[int], *counted: list[int]) -> Path:
    """The folder with continuations beside its checkpoint: the one held out, then those that are counted."""
    rows = [
        {"prompt": [5] * 40, "continuation": continuation, "held_out": number == 0}
        for number, continuation in enumerate((held_out, *counted))
    ]
    (folder / OUTPUTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Tiny, and continuations whose counts are known."""
    folder = shutil.copytree(TINY, tmp_path / "source")
    return with_outputs(folder, [8000, 8001, 7000, 6000], [*OFTEN, *range(7000, 7100)], OFTEN)


def trimmed(source: Path, size: int = 128, **packed: int) -> Path:
    folder = source.with_name(f"{source.name}-{size}{''.join(f'-{value}' for value in packed.values())}")
    return stage_output("trim_draft_vocab", source, folder, size=size, **packed)


def pruned(source: Path) -> Path:
    return stage_output(
        "prune_vocab",
        source,
        source.with_name("pruned"),
        size=4096,
        corpus={"path": "tinyworld", "documents": 300},
    )


def ids_of(folder: Path) -> list[int]:
    ids: list[int] = stored(folder)[draft_head.TOKEN_IDS].tolist()
    return ids


def test_the_ids_are_those_always_in_and_then_the_most_counted(source: Path) -> None:
    ids = ids_of(trimmed(source))
    assert ids == sorted(ids)
    assert ALWAYS_IN | set(OFTEN) <= set(ids)
    # 23 places are left: of the ids that occur once the smaller ones.
    assert set(ids) - ALWAYS_IN - set(OFTEN) == set(range(7000, 7023))


def test_ids_that_never_occur_fill_up_from_the_smallest(source: Path) -> None:
    ids = set(ids_of(trimmed(source, size=256)))
    seen = ALWAYS_IN | set(OFTEN) | set(range(7000, 7100))
    assert ids == seen | set(range(5, 5 + 256 - len(seen)))


def test_the_size_is_rounded_up_to_a_multiple_of_64(source: Path) -> None:
    assert len(ids_of(trimmed(source, size=65))) == 128


def test_rows_are_those_of_the_output_head_and_all_else_stays_to_the_byte(source: Path) -> None:
    folder = trimmed(source)
    before, after = stored(source), stored(folder)
    rows, ids = after.pop(draft_head.WEIGHT), after.pop(draft_head.TOKEN_IDS)
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, before["model.embed_tokens.weight"][ids])
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    config = checkpoint.read_config(folder)
    assert config.pop(draft_head.SIZE_KEY) == 128
    assert config == checkpoint.read_config(source)
    assert (folder / OUTPUTS).read_bytes() == (source / OUTPUTS).read_bytes()
    steps = [Step(trim_draft_vocab.STAGE, TrimDraftVocabParameters(size=128))]
    assert variant_recipe.unexplained_by(steps, source, folder) == []


DRAFT_HEAD = {draft_head.WEIGHT, draft_head.TOKEN_IDS}


def layout(folder: Path) -> tuple[set[str], set[str]]:
    """The tensors that the index lists, and those of the draft head's file; every tensor has one place."""
    listed = set(read_json_object(folder / INDEX)["weight_map"])
    apart = set(load_file(folder / draft_head.FILE))
    assert list_tensors(folder).keys() == listed | apart
    assert not listed & apart
    return listed, apart


def test_no_engine_that_reads_the_index_finds_the_draft_head(source: Path) -> None:
    folder = trimmed(source)
    assert layout(folder) == (list_tensors(source).keys(), DRAFT_HEAD)
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


LATER_STAGES = [
    ("sample_outputs", None),
    ("quantise_lm_head", {}),
    ("prune_vocab", {"size": 4096, "corpus": {"path": "tinyworld", "documents": 300}}),
    ("calibrate", {"targets": {"mtp": "W4A16"}}),
]


@pytest.mark.parametrize("old", [False, True], ids=["apart", "in a shard, as earlier versions wrote it"])
@pytest.mark.parametrize(("stage", "parameters"), LATER_STAGES)
def test_every_later_stage_carries_the_draft_head_and_leaves_it_out_of_the_index(
    source: Path, tmp_path: Path, stage: str, parameters: dict[str, object] | None, old: bool
) -> None:
    before = trimmed(source)
    content = stored(before)
    if old:
        in_old_layout(before)
    after = tmp_path / "after"
    if parameters is None:  # a stage that changes no tensor copies the files, in whichever layout they are
        after.mkdir()
        carry_all(before, after)
        assert list_files(after).keys() == list_files(before).keys()
    else:
        stage_output(stage, before, after, **parameters)
        assert layout(after)[1] == DRAFT_HEAD
    checkpoint.verify(with_manifest(after), "no cure")
    assert list_tensors(after)[draft_head.WEIGHT].dtype == "BF16"
    if stage != "prune_vocab":
        assert all(torch.equal(stored(after)[name], content[name]) for name in DRAFT_HEAD)


def test_the_file_of_the_draft_head_counts_in_digest_size_and_verification(source: Path) -> None:
    folder = with_manifest(trimmed(source))
    file, digest = folder / draft_head.FILE, checkpoint.digest(folder)
    outline = Outline.read(folder)
    assert outline.disk_bytes == bytes_on_disk(folder)
    assert outline.tensors.keys() >= DRAFT_HEAD
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert checkpoint.digest(folder) != digest
    with pytest.raises(
        checkpoint.CorruptCheckpointError, match=r"draft_head\.safetensors differs from manifest"
    ):
        checkpoint.verify(folder, "no cure")


def test_a_folder_that_was_copied_without_the_file_is_refused_and_drafts_without_the_key(
    source: Path,
) -> None:
    folder = trimmed(source)
    (folder / draft_head.FILE).unlink()
    with pytest.raises(
        checkpoint.CorruptCheckpointError, match=r"draft_head\.safetensors is missing.* remove that key"
    ):
        checkpoint.check_folder(folder, "no cure")
    config = checkpoint.read_config(folder)
    del config[draft_head.SIZE_KEY]
    write_config(folder, config)
    checkpoint.verify(with_manifest(folder), "no cure")


def test_a_head_in_16_bits_of_a_folder_without_weights_is_computed_from_config_and_index(
    source: Path,
) -> None:
    folder = trimmed(source)
    whole = Outline.read(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    predicted = Outline.read(folder)
    assert predicted.tensors.keys() == whole.tensors.keys()
    assert {name: info.shape for name, info in predicted.tensors.items()} == {
        name: info.shape for name, info in whole.tensors.items()
    }


def test_the_config_of_a_model_that_sees_images_announces_the_rows_in_its_language_part() -> None:
    announced = draft_head.announced({"a": 1, "text_config": {"vocab_size": 9}}, 4)
    assert announced == {"a": 1, "text_config": {"vocab_size": 9, draft_head.SIZE_KEY: 4}}


def test_the_report_says_how_much_of_the_held_out_continuations_is_covered(source: Path) -> None:
    report = json.loads((trimmed(source) / REPORT).read_text())
    assert report["counted_tokens"] == 300
    assert report["ids_counted"] == 200
    assert report["held_out_tokens"] == 4
    assert report["coverage"] == 0.75  # all but the id 6000
    by_rows = report["coverage_by_rows"]
    assert by_rows["128"] == 0.75
    assert by_rows["8192"] == 1
    assert list(map(int, by_rows)) == sorted(map(int, by_rows), reverse=True)


def test_rows_of_a_packed_head_are_its_integers_times_their_scales(tmp_path: Path) -> None:
    packed = stage_output("quantise_lm_head", TINY, tmp_path / "packed")
    tensors = stored(trimmed(with_outputs(packed, [8000], OFTEN)))
    shape = torch.Size(tensors["lm_head.weight_shape"].tolist())
    integers = unpack_from_int32(tensors["lm_head.weight_packed"], 4, shape).float()
    whole = integers * tensors["lm_head.weight_scale"].float().repeat_interleave(32, dim=1)
    ids = tensors[draft_head.TOKEN_IDS]
    assert torch.equal(tensors[draft_head.WEIGHT], whole[ids].bfloat16())
    # Not the 16-bit embedding, which the target does not score with.
    assert not torch.equal(tensors[draft_head.WEIGHT], tensors["model.embed_tokens.weight"][ids])


@pytest.mark.parametrize("group_size", [32, 64])
def test_rows_of_a_packed_head_are_copied_bit_for_bit_and_those_of_a_whole_one_rounded_to_the_same(
    source: Path, tmp_path: Path, group_size: int
) -> None:
    packed = stage_output("quantise_lm_head", source, tmp_path / "packed", group_size=group_size)
    shutil.copyfile(source / OUTPUTS, packed / OUTPUTS)
    head = stored(packed)
    for folder in (packed, source):
        tensors = stored(trimmed(folder, bits=4, group_size=group_size))
        ids = tensors[draft_head.TOKEN_IDS]
        for part in ("weight_packed", "weight_scale"):
            assert torch.equal(tensors[f"{draft_head.PREFIX}{part}"], head[f"lm_head.{part}"][ids])
        assert tensors[f"{draft_head.PREFIX}weight_shape"].tolist() == [128, 192]
        assert draft_head.WEIGHT not in tensors


def test_8_bits_have_a_scale_a_row(source: Path) -> None:
    tensors = stored(trimmed(source, bits=8))
    whole = tensors["model.embed_tokens.weight"][tensors[draft_head.TOKEN_IDS]].float()
    scale = tensors[f"{draft_head.PREFIX}weight_scale"].float()
    assert scale.shape == (128, 1)
    packed = tensors[f"{draft_head.PREFIX}weight_packed"]
    integers = unpack_from_int32(packed, 8, torch.Size([128, 192])).float()
    assert ((integers * scale - whole).abs() <= 0.51 * scale).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_only_the_draft_head_is_packed(source: Path, bits: int) -> None:
    folder = trimmed(source, bits=bits)
    form = checkpoint.quantisation(checkpoint.read_config(folder))
    assert form["config_groups"].keys() == {"draft_head"}
    checkpoint.check_folder(with_manifest(folder), "no cure")
    checkpoint.verify(folder, "no cure")
    steps = [Step(trim_draft_vocab.STAGE, TrimDraftVocabParameters(size=128, bits=bits))]
    assert variant_recipe.unexplained_by(steps, source, folder) == []
    assert layout(folder)[0] == list_tensors(source).keys()


@pytest.mark.parametrize(
    ("bits", "group_size", "message"),
    [
        (4, 64, "packed as the draft head is to be; set bits to 4 and group_size to 32, or bits to 16"),
        (8, 32, "packed as the draft head is to be; set bits to 4 and group_size to 32, or bits to 16"),
    ],
)
def test_a_packed_head_gives_rows_of_its_own_packing_alone(
    source: Path, tmp_path: Path, bits: int, group_size: int, message: str
) -> None:
    packed = stage_output("quantise_lm_head", source, tmp_path / "packed")
    shutil.copyfile(source / OUTPUTS, packed / OUTPUTS)
    with pytest.raises(StageError, match=message):
        trimmed(packed, bits=bits, group_size=group_size)


@pytest.mark.parametrize(
    ("published", "bits", "message"),
    [
        ("gptq", 4, "in the format gptq, to which no packed draft head can be added; set bits to 16"),
        ("text", 4, "group_size 128 does not divide the 192 columns of model.embed_tokens.weight"),
    ],
)
def test_what_cannot_be_packed_is_refused_before_the_run(
    tmp_path: Path, published: str, bits: int, message: str
) -> None:
    outline = Outline.read(PUBLISHED_FORMS[published].build(tmp_path / "published"))
    parameters = TrimDraftVocabParameters(size=128, bits=bits, group_size=128)
    [fault] = trim_draft_vocab.inspect_trimming(outline, parameters)
    assert message in fault.text


def test_an_untied_head_gives_the_rows_not_the_embedding(source: Path) -> None:
    with edited_tensors(source) as tensors:
        tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]
    after = stored(trimmed(source))
    assert torch.equal(after[draft_head.WEIGHT], tensors["lm_head.weight"][after[draft_head.TOKEN_IDS]])


def test_pruning_keeps_the_packed_rows_of_the_ids_that_stay(source: Path) -> None:
    before = trimmed(source, size=512, bits=4)
    after = pruned(before)
    new_to_old = torch.tensor(json.loads((after / VOCAB_MAP).read_text())["new_to_old"])
    old, new = stored(before), stored(after)
    staying = torch.isin(old[draft_head.TOKEN_IDS], new_to_old)
    for part in ("weight_packed", "weight_scale"):
        name = f"{draft_head.PREFIX}{part}"
        assert torch.equal(new[name], old[name][staying])
    assert new[f"{draft_head.PREFIX}weight_shape"].tolist() == [int(staying.sum()), 192]
    checkpoint.verify(with_manifest(after), "no cure")


def test_pruning_renumbers_the_draft_head_and_drops_what_it_prunes(source: Path) -> None:
    before = trimmed(source, size=512)
    after = pruned(before)
    new_to_old = np.array(json.loads((after / VOCAB_MAP).read_text())["new_to_old"])
    old, new = stored(before), stored(after)
    ids = new[draft_head.TOKEN_IDS]
    staying = [id_ for id_ in old[draft_head.TOKEN_IDS].tolist() if id_ in set(new_to_old.tolist())]
    assert new_to_old[ids.numpy()].tolist() == staying
    assert 0 < len(staying) < 512
    assert torch.equal(new[draft_head.WEIGHT], new["model.embed_tokens.weight"][ids])
    assert checkpoint.read_config(after)[draft_head.SIZE_KEY] == len(staying)


def test_a_pruned_checkpoint_can_be_trimmed(source: Path) -> None:
    continuation = [4000, 4001, 9]
    tensors = stored(trimmed(with_outputs(pruned(source), continuation, continuation)))
    ids = tensors[draft_head.TOKEN_IDS]
    assert {4000, 4001} <= set(ids.tolist())
    assert torch.equal(tensors[draft_head.WEIGHT], tensors["model.embed_tokens.weight"][ids])


@pytest.mark.usefixtures("keys_cover_what_stages_execute")
def test_the_runner_makes_it_verifies_it_and_repeats_it_to_the_byte(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    recipe = recipe_file.read_recipe(file)
    digests = set()
    for name in ("first", "second"):
        [outcome] = runner.run_recipe(recipe, "v", tmp_path / name, lambda base: source)
        manifest = checkpoint.verify(tmp_path / name / "v", "no cure")
        assert manifest.facts["rows"] == 128
        assert manifest.facts["coverage"] == 0.75
        estimate = trim_draft_vocab.needs(Outline.read(source), TrimDraftVocabParameters(size=128))
        assert outcome.manifest.peak_memory_bytes < estimate.memory_bytes
        assert outcome.bytes_after <= estimate.disk_bytes
        digests.add(checkpoint.digest(tmp_path / name / "v"))
    assert len(digests) == 1


def _without_outputs(folder: Path) -> None:
    (folder / OUTPUTS).unlink()


def _changed(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        with edited_tensors(folder) as tensors:
            change(tensors)

    return apply


def _four_bit_floats(tensors: Tensors) -> None:
    tensors["lm_head.weight_packed"] = torch.ones(ROWS, 96, dtype=torch.uint8)
    tensors["lm_head.weight_scale"] = torch.ones(ROWS, 12).to(torch.float8_e4m3fn)
    tensors["lm_head.weight_global_scale"] = torch.ones(1)


def _scale_alone(tensors: Tensors) -> None:
    tensors["lm_head.weight_scale"] = torch.ones(ROWS, 1).bfloat16()
    tensors["lm_head.weight_global_scale"] = torch.ones(1)


@pytest.mark.parametrize(
    ("damage", "size", "error", "message"),
    [
        (_without_outputs, 128, CorpusError, "put the stage sample_outputs before this one"),
        (_changed(_four_bit_floats), 128, UnsupportedFormatError, "lm_head.weight is stored as U8 .* cannot be read"),
        (_changed(_scale_alone), 128, StageError, "needs one output head, but stores lm_head.weight_"),
        (lambda folder: None, ROWS, StageError, "size 8192 has to be less than 8192"),
    ],
)  # fmt: skip
def test_what_cannot_be_trimmed_is_refused_in_one_line(
    source: Path, damage: Callable[[Path], None], size: int, error: type[SlimqwenError], message: str
) -> None:
    damage(source)
    with pytest.raises(error, match=message):
        trimmed(source, size)
    assert not list(source.with_name(f"source-{size}").iterdir())


def test_a_packed_mtp_head_is_trimmed_as_any(source: Path, tmp_path: Path) -> None:
    packed = stage_output("calibrate", source, tmp_path / "packed", targets={"mtp": "W4A16"})
    shutil.copyfile(source / OUTPUTS, packed / OUTPUTS)
    assert ids_of(trimmed(packed)) == ids_of(trimmed(source))


def test_a_second_draft_head_is_refused(source: Path) -> None:
    with pytest.raises(StageError, match="has a draft head already"):
        trimmed(trimmed(source))


def test_a_recipe_with_an_impossible_size_is_refused_at_its_line(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.replace("128", "32"))
    with pytest.raises(
        RecipeError,
        match=r"recipe\.yaml:5: size: .*64 or more, or a share such as 50%, here is 32",
    ):
        recipe_file.read_recipe(file)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.arange(127), "has 128 rows"),
        (torch.arange(128, dtype=torch.int32), "is I32"),
        (torch.arange(128) + ROWS - 127, "is not one ascending id per row, each below the vocabulary's 8192"),
        (torch.zeros(128, dtype=torch.int64), "is not one ascending id per row"),
    ],
)
def test_a_damaged_id_map_is_refused_by_what_reads_the_checkpoint(
    source: Path, ids: torch.Tensor, message: str
) -> None:
    folder = trimmed(source)
    with edited_tensors(folder) as tensors:
        tensors[draft_head.TOKEN_IDS] = ids
    with pytest.raises(checkpoint.CorruptCheckpointError, match=message):
        draft_head.read_token_ids(checkpoint.tensors.list_tensors(folder), ROWS)


def test_verification_misses_a_draft_head_that_the_config_announces(source: Path) -> None:
    folder = trimmed(source)
    write_config(folder, {**checkpoint.read_config(folder), draft_head.SIZE_KEY: 64})
    with_manifest(folder)
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"draft_head\.\w+ has shape \[128"):
        checkpoint.verify(folder, "no cure")
