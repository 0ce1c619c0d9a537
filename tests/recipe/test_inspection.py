"""A recipe is inspected whole: every fault at its line before anything runs, and the cost of stages by arithmetic."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.checkpoint import Manifest, draft_head
from slimqwen.checkpoint.tensors import INDEX
from slimqwen.models.outline import Outline
from slimqwen.plan import shapes
from slimqwen.recipe import inspection, recipe_file, variant_recipe
from slimqwen.recipe.inspection import StageCost, inspect_steps, lacking_space
from slimqwen.recipe.recipe_file import RecipeError, Step
from slimqwen.recipe.registry import STAGES
from slimqwen.recipe.stage import Needs
from tests.checkpoints import stage_output
from tests.recipe.inspected import CHAT, faults_of, outline_of_tiny, write_lines
from tests.recipe.repository_of_v import make_repository_of_v
from tests.zoo.published_forms import PUBLISHED_FORMS
from tests.zoo.verbs import write_outputs

MISTAKES = """\
  - calibrate:
      targets: {mlp: W4A17}
      group_sise: 32
      corpus:
        path: nowhere.jsonl
  - prune_vocab:
      size: 9000
      corpus:
        path: broken.jsonl
      output: counts.json
  - quantise_lm_head:
      group_size: 128
  - sample_outputs:
      prompts:
        path: chats.jsonl
      tokens: 8
      temperature: hot
  - redistill_mtp:
      depth: 12
      rows: drafted
"""


def test_twelve_mistakes_in_five_stages_are_named_at_once_each_at_its_line(tmp_path: Path) -> None:
    root = make_repository_of_v(tmp_path, MISTAKES)
    (root / "experiments" / "tiny").mkdir()
    (root / "experiments" / "tiny" / "config.env").write_text("VLLM_MODEL=weights/tiny\n")
    (root / "experiments" / "tiny" / "measurements.json").write_text('{"hypothesis": "h", "baseline": null}')
    folder = root / "experiments" / "v"
    write_lines(folder / "broken.jsonl", {"text": "a"}, "{")
    write_lines(folder / "chats.jsonl", CHAT, {"messages": [{"content": "a"}]})
    started = time.process_time()
    with pytest.raises(RecipeError) as caught:
        variant_recipe.run_recipe(variant.load("v", root))
    assert time.process_time() - started < 3
    first, *lines = str(caught.value).splitlines()
    assert first == "12 faults, nothing has run:"
    named = {int(line.partition("recipe.yaml:")[2].partition(":")[0]): line for line in lines}
    expected = {
        5: "targets.mlp: Input should be",
        6: "unknown key 'group_sise'; did you mean group_size?",
        8: "nowhere.jsonl: cannot be read",
        10: "has only 8192 tokens, but size is 9024; choose a smaller size",
        12: "broken.jsonl, line 2: not JSON",
        13: "unknown key 'output'; known are corpus, size",
        15: "group_size 128 does not divide the 192 columns",
        18: "chats.jsonl, line 2: neither a text nor a chat; give",
        19: "tokens: Input should be greater than or equal to 16",
        20: "temperature: Input should be a valid number",
        22: "depth: Input should be less than or equal to 8",
        23: "there is no draft head; put",
    }
    assert named.keys() == expected.keys()
    assert all(text in named[line] for line, text in expected.items())
    assert not (root / "weights" / "store").exists()


@pytest.mark.parametrize("published", ["text", "multimodal", "untied"])
@pytest.mark.parametrize(
    ("stage", "parameters"),
    [
        ("quantise_lm_head", {}),
        ("calibrate", {"targets": {"mtp": "W4A16"}}),
        ("calibrate", {"targets": {"mtp": "W8A16"}}),
        ("prune_vocab", {"size": "50%", "corpus": {"path": "tinyworld", "documents": 20}}),
        ("trim_draft_vocab", {"size": 256}),
        ("trim_draft_vocab", {"size": 256, "bits": 8}),
        ("trim_draft_vocab", {"size": 256, "bits": 4, "group_size": 64}),
        ("quantise_embedding", {}),
    ],
)
def test_the_outline_of_an_output_is_what_the_stage_makes(
    tmp_path: Path, published: str, stage: str, parameters: dict[str, Any]
) -> None:
    source = PUBLISHED_FORMS[published].build(tmp_path / "source")
    write_outputs(source)
    kind = STAGES[stage]
    outline = kind.reshape(Outline.read(source), kind.parameters(**parameters))
    made = Outline.read(stage_output(stage, source, tmp_path / "made", **parameters))
    form = {name: (info.dtype, info.shape) for name, info in made.tensors.items()}
    assert {name: (info.dtype, info.shape) for name, info in outline.tensors.items()} == form
    assert outline.text["vocab_size"] == made.text["vocab_size"]
    assert outline.text.get(draft_head.SIZE_KEY) == made.text.get(draft_head.SIZE_KEY)
    assert outline.num_tokens == made.num_tokens
    assert abs(outline.disk_bytes - made.disk_bytes) < 2e6  # tokenizer.json and side files


def test_a_later_stage_is_inspected_on_what_the_earlier_ones_will_make(tmp_path: Path) -> None:
    texts = write_lines(tmp_path / "texts.jsonl", *[{"text": f"text {n}"} for n in range(2000)])
    stages = f"""\
  - calibrate: {{targets: {{mlp: W4A16, mtp: W4A16}}, corpus: {{path: {texts.name}, sequences: 2, length: 16}}}}
  - prune_vocab: {{size: 25%, corpus: {{path: {texts.name}}}}}
  - sample_outputs: {{prompts: {{path: {texts.name}}}}}
  - trim_draft_vocab: {{size: 2048}}
  - redistill_mtp
  - calibrate: {{targets: [mlp], corpus: {{path: {texts.name}, sequences: 2, length: 16}}}}
"""
    trim, redistill, calibrate = faults_of(tmp_path, stages)
    assert trim.startswith("7: trim_draft_vocab: size 2048 has to be less than 2048, the whole vocabulary of")
    assert redistill.startswith(
        "8: redistill_mtp: the output of trim_draft_vocab: its MTP head is quantised (mtp.fc"
    )
    assert calibrate.startswith(
        "9: calibrate: the output of trim_draft_vocab is quantised already; calibrate needs"
    )


def test_every_fault_of_a_quantised_base_without_a_head_is_found(tmp_path: Path) -> None:
    outline = Outline.read(PUBLISHED_FORMS["gptq"].build(tmp_path / "gptq"))
    headless = {name: info for name, info in outline.tensors.items() if not name.startswith("mtp.")}
    found = faults_of(
        tmp_path,
        "  - quantise_lm_head\n  - trim_draft_vocab: {size: 64}\n  - redistill_mtp\n",
        replace(outline, tensors=headless),
    )
    assert [fault.partition(": ")[0] for fault in found] == ["5", "4", "5", "6"]
    assert ["format gptq" in found[1], "nothing drafts" in found[2], "has no MTP head" in found[3]] == [
        True
    ] * 3


@pytest.mark.parametrize(
    ("entry", "size"),
    [
        ("quantise_lm_head", None),
        ("quantise_lm_head: {}", None),
        ("prune_vocab: {size: 50%, corpus: {path: tinyworld}}", 4096),
    ],
)
def test_shorthands_are_taken(tmp_path: Path, entry: str, size: int | None) -> None:
    assert faults_of(tmp_path, f"  - {entry}\n") == []
    [step] = recipe_file.read_recipe(tmp_path / "recipe.yaml").steps
    reshaped = step.stage.reshape(outline_of_tiny(), step.parameters)
    assert reshaped.text["vocab_size"] == (size or 8192)


# --- cost


@pytest.fixture
def four_billion(tmp_path: Path) -> Path:
    """config.json and the index of Qwen3.5-4B, and nothing else."""
    shape = shapes.published_shape(variant.repository_root(), "qwen3.5-4b")
    assert shape is not None
    folder = tmp_path / "4b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.config_json))
    names = dict.fromkeys(shape.tensors, "model-00001.safetensors")
    index = {"metadata": {"total_size": 9_320_000_000}, "weight_map": names}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("published", ["multimodal-w4a16", "multimodal-fp8", "multimodal-gptq"])
def test_the_outline_of_an_index_is_that_of_the_files_of_a_quantised_checkpoint(
    published: str, tmp_path: Path
) -> None:
    folder = PUBLISHED_FORMS[published].build(tmp_path / "base")
    whole = Outline.read(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    described = Outline.read(folder)
    assert described.num_weights == pytest.approx(
        sum(
            info.elements * (8 if info.dtype == "I32" else 1)
            for name, info in whole.tensors.items()
            if "visual" not in name
        ),
        rel=1e-3,
    )
    # Of the files, the tokenizer and their headers are missing.
    assert described.disk_bytes == pytest.approx(
        sum(info.end - info.start for info in whole.tensors.values()), rel=1e-3
    )


def test_what_a_4b_model_takes_is_computed_from_its_config_and_index(
    four_billion: Path, tmp_path: Path
) -> None:
    base = Outline.read(four_billion)
    assert base.disk_bytes == 9_320_000_000  # with the vision tower, of which config.json gives no tensors
    assert 4.0e9 < base.num_weights < 4.4e9
    write_lines(tmp_path / "t.jsonl", *[{"text": "word " * 100}] * 2000)
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "description: d\nbase: b\nstages:\n"
        "  - calibrate: {targets: [mlp], corpus: {path: t.jsonl}}\n"
        "  - prune_vocab: {size: 25%, corpus: {path: t.jsonl}}\n"
        "  - sample_outputs: {prompts: {path: t.jsonl}}\n"
        "  - trim_draft_vocab: {size: 50%}\n"
        "  - redistill_mtp: {rows: drafted}\n"
    )
    faults, costs = inspect_steps(recipe_file.read_recipe(file).steps, base, tmp_path / "store")
    assert faults == ()
    calibrate, prune, sample, trim, redistill = (cost.needs for cost in costs)
    assert 3e9 < calibrate.memory_bytes < 8e9  # a layer in float32, not the model
    assert base.disk_bytes < calibrate.disk_bytes < 1.5 * base.disk_bytes
    # Three quarters of the MLPs' bytes are gone, then of the rows of embedding and head.
    assert 4.5e9 < prune.disk_bytes < 6.5e9
    assert sample.disk_bytes < prune.disk_bytes - 0.9e9
    assert redistill.disk_bytes > sample.disk_bytes
    assert prune.memory_bytes < 1e9 < sample.memory_bytes
    assert trim.memory_bytes < redistill.memory_bytes
    assert all(cost.seconds > 0 for cost in costs)


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_a_27b_model_is_calibrated_on_a_gpu_of_24_gb(rounding: str) -> None:
    root, stage = variant.repository_root(), STAGES["calibrate"]
    shape = shapes.published_shape(root, "qwen3.5-27b")
    assert shape is not None
    outline = Outline.of_shape(shape, root)
    kinds = dict.fromkeys(("mlp", "attention", "linear_attention"), "W4A16")
    needs = stage.needs(
        outline, stage.parameters(targets=kinds, rounding=rounding, corpus={"path": "tinyworld"})
    )
    assert needs.memory_bytes < 22e9 < 4 * outline.num_weights


def kept_run(folder: Path, stage: str, operations: float, seconds: float) -> None:
    folder.mkdir(parents=True)
    facts = {inspection.OPERATIONS: operations}
    Manifest(
        stage=stage, files={}, wall_seconds=seconds, peak_memory_bytes=0, versions={}, facts=facts
    ).write(folder)


def cost_of(stage: str, store: Path, base: Outline | None = None) -> StageCost:
    kind = STAGES[stage]
    step = Step(kind, kind.parameters(), {"": "recipe.yaml:4"})
    return inspect_steps([step], base or outline_of_tiny(), store)[1][0]


def test_the_time_is_that_of_a_comparable_kept_run_scaled_by_the_operations(tmp_path: Path) -> None:
    nominal = cost_of("quantise_lm_head", tmp_path)
    operations = nominal.needs.operations
    assert not nominal.was_measured
    kept_run(tmp_path / "a", "quantise_lm_head", operations / 1000, 1)
    kept_run(tmp_path / "b", "calibrate", operations, 1)
    assert cost_of("quantise_lm_head", tmp_path) == nominal
    kept_run(tmp_path / "c", "quantise_lm_head", operations / 2, 7)
    measured = cost_of("quantise_lm_head", tmp_path)
    assert (measured.seconds, measured.was_measured) == (14, True)
    kept_run(tmp_path / "d", "quantise_lm_head", operations, 5)
    assert cost_of("quantise_lm_head", tmp_path).seconds == 5, "the newest run counts"


def test_times_are_those_of_the_processor_that_is_here_which_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection.host, "physical_cores", lambda: 2)
    seconds = []
    for has_driver in (False, True):
        monkeypatch.setattr(inspection.host, "has_nvidia_driver", lambda answer=has_driver: answer)
        seconds.append(cost_of("quantise_lm_head", tmp_path).seconds)
        assert ("GPU" if has_driver else "2 cores") in inspection.describe_processor()
    assert seconds[0] > seconds[1]


def test_space_is_counted_over_all_stages_and_memory_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = cost_of("quantise_lm_head", tmp_path)
    free = 10 * 2**30
    monkeypatch.setattr(inspection.host, "available_memory", lambda: free)
    monkeypatch.setattr(inspection.shutil, "disk_usage", lambda folder: type("", (), {"free": free}))
    fits = replace(cost, needs=Needs(free // 2, free))
    assert lacking_space([fits, fits], tmp_path / "store") == []
    big = replace(cost, needs=Needs(free // 2 + 2**30, free + 2**30))
    memory, *rest, disk = lacking_space([big, big, big], tmp_path / "store")
    assert memory.startswith(
        "recipe.yaml:4: quantise_lm_head needs about 11.0 GiB of memory, but 10.0 GiB are free; end other programs"
    )
    assert "needs about 2.0 GiB of disk more than are free" in rest[1]
    assert disk == memory


def test_the_time_of_training_follows_the_outputs_that_the_recipe_samples(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n')
    seconds = []
    for sampled in ("texts: 1024", "texts: 64, held_out: 8, tokens: 16"):
        file = tmp_path / "recipe.yaml"
        file.write_text(
            "description: d\nbase: b\nstages:\n"
            f"  - sample_outputs: {{prompts: {{path: t.jsonl}}, {sampled}}}\n"
            "  - trim_draft_vocab: {size: 25%}\n  - redistill_mtp: {steps: 100}\n"
        )
        steps = recipe_file.read_recipe(file).steps
        seconds.append(inspect_steps(steps, outline_of_tiny(), tmp_path / "store")[1][-1].seconds)
    assert seconds[1] < seconds[0] / 2
