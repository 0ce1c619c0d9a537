"""What calibration may change and what it may not, that it repeats to the byte, and how it refuses."""

import json
import math
import re
import shutil
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tinyworld.model import TinyShape, build, write_checkpoint
from tinyworld.tasks import left_out_texts
from tinyworld.tokenizer import END_OF_TEXT
from tinyworld.world import World

from slimqwen import checkpoint, progress
from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.rtn import round_to_nearest
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.checkpoint.weights import read_weights
from slimqwen.evals.model_card import tabulate_widths
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.models.language_model import load_language_model
from slimqwen.models.mtp_head import load_drafting_model
from slimqwen.models.outline import Outline
from slimqwen.models.sensitivity import measure_divergence
from slimqwen.recipe import recipe_file, runner, variant_recipe
from slimqwen.recipe.calibration_text import CalibrationText, calibration_documents, calibration_sequences
from slimqwen.recipe.recipe_file import Step
from slimqwen.recipe.registry import STAGES
from slimqwen.recipe.stage import StageError, require_fit
from slimqwen.recipe.stages import calibrate
from slimqwen.recipe.stages.calibrate import CalibrateParameters
from slimqwen.serving.in_process import engine, read_prompts
from slimqwen.text.files import CorpusError
from tests.byte_tokenizer import byte_tokenizer
from tests.checkpoints import (
    TINY,
    count_layers_in_memory,
    edited_tensors,
    stage_output,
    stored,
    with_manifest,
)
from tests.identity.coverage_by_keys import every_stage_covered
from tests.zoo.editable_checkpoint import multimodal, outer, read_editable
from tests.zoo.published_forms import PUBLISHED_FORMS
from tests.zoo.verbs import write_outputs

SHAPE = TinyShape(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    head_dim=32,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
FEW = CalibrationText(path="tinyworld", sequences=12, length=32)
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3.5 of the real form: Gated DeltaNet and attention, tied embeddings, MTP head, bf16."""
    folder = tmp_path_factory.mktemp("weights") / "source"
    write_checkpoint(build(SHAPE, seed=0), byte_tokenizer(), folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@dataclass(frozen=True)
class Calibrated:
    """A run of a real recipe."""

    folder: Path
    outcome: runner.Outcome
    messages: list[tuple[str, float, float]]


def run_recipe(source: Path, root: Path) -> Calibrated:
    file = root / "recipe.yaml"
    corpus = {"path": "tinyworld", "sequences": FEW.sequences, "length": FEW.length}
    content = {"description": "d", "base": "source", "stages": [{"calibrate": {"corpus": corpus}}]}
    file.write_text(json.dumps(content))
    messages: list[tuple[str, float, float]] = []
    [outcome] = runner.run_recipe(
        recipe_file.read_recipe(file),
        "v",
        root / "weights",
        lambda base: source,
        progress=lambda *message: messages.append(message),
    )
    return Calibrated(root / "weights" / "v", outcome, messages)


@pytest.fixture(scope="session")
def calibrated(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    with every_stage_covered(tmp_path_factory.mktemp("calls")):
        return run_recipe(source, tmp_path_factory.mktemp("first"))


def changed(before: Path, after: Path) -> set[str]:
    """Names of the tensors of the first checkpoint that the second does not hold byte for byte."""

    def content(folder: Path) -> dict[str, bytes]:
        return {name: b"".join(info.chunks()) for name, info in list_tensors(folder).items()}

    old, new = content(before), content(after)
    return {name for name in old if old[name] != new.get(name)}


def log_probabilities(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(tokens).logits.log_softmax(-1)


def dequantised(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """Eight 4-bit integers in a word, lowest bits first, stored plus 8, times their group's scale."""
    packed = tensors[f"{module}.weight_packed"]
    integers = torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)], dim=-1).flatten(1) - 8
    scale = tensors[f"{module}.weight_scale"].float()
    return integers * scale.repeat_interleave(integers.shape[1] // scale.shape[1], dim=1)


def test_only_the_mlp_weights_and_the_norms_before_them_change(source: Path, calibrated: Calibrated) -> None:
    names = changed(source, calibrated.folder)
    assert all(name.startswith("model.layers.") for name in names)
    parts = {name.split(".", 3)[3].removesuffix(".weight") for name in names}
    assert parts == {"post_attention_layernorm", *MLP}
    assert not any("lm_head" in name for name in list_tensors(calibrated.folder))
    steps = [Step(calibrate.STAGE, CalibrateParameters(corpus=FEW))]
    assert variant_recipe.unexplained_by(steps, source, calibrated.folder) == []


def test_each_target_is_packed_with_a_scale_in_bf16(calibrated: Calibrated) -> None:
    after = list_tensors(calibrated.folder)
    for layer in range(4):
        for module, (rows, columns) in zip(MLP, [(128, 64), (128, 64), (64, 128)], strict=True):
            prefix = f"model.layers.{layer}.{module}.weight"
            assert prefix not in after
            found = {part: after[f"{prefix}_{part}"] for part in ("packed", "scale", "shape")}
            assert {part: (info.dtype, info.shape) for part, info in found.items()} == {
                "packed": ("I32", (rows, columns // 8)),
                "scale": ("BF16", (rows, columns // 32)),
                "shape": ("I64", (2,)),
            }


def test_dequantised_weights_are_the_originals_to_half_a_step(source: Path, calibrated: Calibrated) -> None:
    before, after = stored(source), stored(calibrated.folder)
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        norm = f"{prefix}.post_attention_layernorm.weight"
        # AWQ divides the norm's factor 1 + w by what it multiplies the gate's inputs with.
        was = before[f"{prefix}.mlp.gate_proj.weight"].float() * (1 + before[norm].float())
        factor = 1 + after[norm].float()
        step = after[f"{prefix}.mlp.gate_proj.weight_scale"].float().repeat_interleave(32, dim=1) * factor
        error = (dequantised(after, f"{prefix}.mlp.gate_proj") * factor - was).abs()
        # The norm is rounded to bf16, 8 bits of w; the largest weight of a group may be cut by another 0.02 steps.
        assert (error <= 0.52 * step + was.abs() * 2**-7).all()


def test_the_calibrated_model_says_nearly_what_the_original_says(
    source: Path, calibrated: Calibrated
) -> None:
    tokens = torch.arange(5, 205).reshape(4, 50)
    exact, rounded = log_probabilities(source, tokens), log_probabilities(calibrated.folder, tokens)
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    assert 0 < divergence < 1e-3


def test_the_config_gains_the_quantisation_and_nothing_else(source: Path, calibrated: Calibrated) -> None:
    before, after = checkpoint.read_config(source), checkpoint.read_config(calibrated.folder)
    quantization = after.pop("quantization_config")
    assert after == before
    assert after["dtype"] == "bfloat16"
    assert not any("mrope" in key for key in after["rope_parameters"])
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "pack-quantized"
    [group] = quantization["config_groups"].values()
    assert (group["weights"]["group_size"], group["weights"]["symmetric"]) == (32, True)
    assert {"lm_head", "re:^mtp.*", "model.layers.3.self_attn.q_proj"} <= set(quantization["ignore"])
    assert not any("mlp" in name for name in quantization["ignore"])


def test_progress_counts_to_its_end_and_the_flood_goes_to_the_log(
    calibrated: Calibrated, capfd: pytest.CaptureFixture[str]
) -> None:
    counted = [message[1:] for message in calibrated.messages if message[0] == "calibrate (1 of 1): layers"]
    assert counted == [(layer, 4) for layer in range(5)]
    assert "Grid search" in calibrated.outcome.log.read_text(errors="replace")


def test_facts_and_memory_are_recorded_within_the_estimate(source: Path, calibrated: Calibrated) -> None:
    manifest = calibrated.outcome.manifest
    assert manifest.facts["calibration_tokens"] == FEW.sequences * FEW.length
    assert manifest.facts["quantised_linears"] == 12
    needs = calibrate.needs(Outline.read(source), CalibrateParameters(corpus=FEW))
    assert manifest.peak_memory_bytes < needs.memory_bytes
    assert calibrated.outcome.bytes_after < needs.disk_bytes


def test_the_error_of_each_layer_is_recorded_beside_that_of_rounding(calibrated: Calibrated) -> None:
    facts = checkpoint.Manifest.read(calibrated.folder).facts
    assert facts["layers"] == [0, 1, 2, 3]
    errors, rounded = facts["layer_errors"], facts["rounded_layer_errors"]
    assert all(0 < error < 1.5 * limit for error, limit in zip(errors, rounded, strict=True))


def test_a_layer_that_is_worse_than_the_parameter_allows_ends_the_stage(source: Path, tmp_path: Path) -> None:
    parameters = {"corpus": FEW, "layer_error_ratio": 0.5}
    with pytest.raises(StageError, match=r"calibrated layer \d has [01]\.\d\d times .*, 0\.5 is allowed"):
        stage_output("calibrate", source, tmp_path / "out", **parameters)


def test_the_same_input_and_parameters_give_the_same_bytes(
    source: Path, calibrated: Calibrated, tmp_path: Path
) -> None:
    again = run_recipe(source, tmp_path)
    assert again.outcome.manifest.key == calibrated.outcome.manifest.key
    assert again.outcome.manifest.files == calibrated.outcome.manifest.files


def test_one_layer_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, layers = tmp_path / "source", 8
    write_checkpoint(build(replace(SHAPE, num_hidden_layers=layers), seed=0), byte_tokenizer(), folder)
    counts = count_layers_in_memory(monkeypatch)
    calibrate_here(folder, tmp_path / "out")
    # To calibrate a layer, and to compare it with the one that it was made from.
    assert counts == [1] * 3 * layers


# --- verification of the result


# --- other schemes, targets and architectures


def calibrate_here(source: Path, folder: Path, **parameters: Any) -> Path:
    given = {"corpus": CalibrationText(path="tinyworld", sequences=2, length=16), **parameters}
    return with_manifest(stage_output("calibrate", source, folder, **given))


def test_a_list_of_targets_is_one_scheme_for_all_of_them() -> None:
    listed = CalibrateParameters(targets=["mlp", "mtp"], corpus=FEW)
    assert listed == CalibrateParameters(
        targets={"mlp": "W4A16", "attention": "none", "mtp": "W4A16"}, corpus=FEW
    )
    assert CalibrateParameters(corpus=FEW) == CalibrateParameters(targets=["mlp"], corpus=FEW)


SCHEMES = {"mlp": "W4A16", "attention": "W8A16", "linear_attention": "W4A16_ASYM", "mtp": "W4A16"}


@pytest.fixture(scope="session")
def mixed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrate_here(source, tmp_path_factory.mktemp("mixed") / "out", targets=SCHEMES)


def test_vllm_finds_the_scheme_of_each_fused_linear(mixed: Path) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM
    from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MTP

    quantisation = CompressedTensorsConfig.from_config(checkpoint.read_config(mixed)["quantization_config"])
    fused = {**Qwen3_5ForCausalLM.packed_modules_mapping, **Qwen3_5MTP.packed_modules_mapping}
    quantisation.packed_modules_mapping = fused

    def bits(name: str) -> int | None:
        scheme = quantisation.get_scheme_dict(torch.nn.Module(), name)
        return scheme and scheme["weights"].num_bits

    gdn, attention = "model.layers.0.linear_attn", "model.layers.3.self_attn"
    assert [bits(f"{gdn}.{name}") for name in ("in_proj_qkvz", "out_proj", "in_proj_ba")] == [4, 4, None]
    assert [bits(f"{attention}.{name}") for name in ("qkv_proj", "o_proj")] == [8, 8]
    assert [bits(f"model.layers.3.mlp.{name}") for name in ("gate_up_proj", "down_proj")] == [4, 4]
    head = ("fc", "layers.0.self_attn.qkv_proj", "layers.0.mlp.gate_up_proj", "layers.0.mlp.down_proj")
    assert [bits(f"mtp.{name}") for name in head] == [4] * 4
    assert bits("lm_head") is None


def test_every_kind_has_a_scheme_of_its_own(source: Path, mixed: Path) -> None:
    checkpoint.verify(mixed, "cure")
    steps = [Step(calibrate.STAGE, CalibrateParameters(targets=SCHEMES, corpus=FEW))]
    assert variant_recipe.unexplained_by(steps, source, mixed) == []
    after = list_tensors(mixed)
    layers = "model.layers"
    assert after[f"{layers}.0.mlp.up_proj.weight_packed"].shape == (128, 64 // 8)
    assert after[f"{layers}.3.self_attn.q_proj.weight_packed"].shape[1] == 64 // 4
    assert after[f"{layers}.3.self_attn.q_proj.weight_scale"].shape[1] == 1
    assert f"{layers}.0.linear_attn.in_proj_z.weight_zero_point" in after
    assert f"{layers}.0.linear_attn.in_proj_a.weight" in after
    head = {name for name in after if name.startswith("mtp.") and name.endswith(".weight_packed")}
    assert len(head) == 8
    weights = read_weights(mixed).values()
    assert {weight.name for weight in weights if weight.layout and weight.layout.bits == 8} == {
        f"{layers}.3.self_attn.{module}_proj.weight" for module in "qkvo"
    }


LAYERS = ("mlp", "attention", "linear_attention")


@pytest.fixture(scope="session")
def budgeted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = CalibrationText(path="tinyworld", sequences=16, length=64)
    folder = tmp_path_factory.mktemp("budgeted") / "out"
    with every_stage_covered(tmp_path_factory.mktemp("calls")):
        return stage_output("calibrate", TINY, folder, bits=3.3, scaling="none", corpus=corpus)


def test_a_budget_is_kept_to_the_stored_byte(budgeted: Path) -> None:
    packed = [weight for weight in read_weights(budgeted).values() if weight.layout]
    parts = ("weight_packed", "weight_scale", "weight_zero_point")
    stored_bits = 8 * sum(
        info.end - info.start for weight in packed for part, info in weight.parts.items() if part in parts
    )
    weights = sum(math.prod(weight.shape) for weight in packed)
    assert 3.2 < stored_bits / weights <= 3.3
    assert weights == sum(
        info.elements for kind in LAYERS for info in packing.linears(list_tensors(TINY), kind).values()
    )
    assert len({(weight.layout.bits, weight.layout.symmetric) for weight in packed}) > 2
    [table] = tabulate_widths(budgeted)
    assert len(table.rows) == 4
    assert "mlp.gate_proj" in table.columns


def test_a_budget_s_estimate_is_near_what_is_measured_and_better_than_one_width(
    budgeted: Path, tmp_path: Path
) -> None:
    corpus = CalibrationText(path="tinyworld", sequences=16, length=64)
    (tmp_path / "made").mkdir()
    facts = STAGES["calibrate"].run(
        TINY, tmp_path / "made", CalibrateParameters(bits=3.5, scaling="none", corpus=corpus), progress.silent
    )
    assert 0.5 < facts["measured_kl_nats"] / facts["predicted_kl_nats"] < 2
    uniform = stage_output(
        "calibrate",
        TINY,
        tmp_path / "uniform",
        targets=dict.fromkeys(LAYERS, "W3A16"),
        scaling="none",
        corpus=corpus,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    texts = calibration_sequences(corpus, TINY, tokenizer)
    assert facts["measured_kl_nats"] < 0.8 * measure_divergence(TINY, uniform, texts)
    assert "3.500 stored bits" in str(calibrate.summarise({**facts, "stored_bits": 3.5}))


def test_vllm_finds_one_width_for_each_fused_linear_of_a_budget(budgeted: Path) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

    config = CompressedTensorsConfig.from_config(checkpoint.read_config(budgeted)["quantization_config"])
    config.packed_modules_mapping = Qwen3_5ForCausalLM.packed_modules_mapping
    fused = {"mlp.gate_proj": "mlp.gate_up_proj", "mlp.up_proj": "mlp.gate_up_proj"}
    fused |= {f"self_attn.{name}_proj": "self_attn.qkv_proj" for name in "qkv"}
    fused |= {f"linear_attn.in_proj_{name}": "linear_attn.in_proj_qkvz" for name in ("qkv", "z")}
    for name, weight in read_weights(budgeted).items():
        if isinstance(weight.layout, PackedIntegers):
            layer, module = re.fullmatch(r"(model\.layers\.\d+)\.(.+)\.weight", name).groups()
            scheme = config.get_scheme_dict(torch.nn.Module(), f"{layer}.{fused.get(module, module)}")[
                "weights"
            ]
            assert (scheme.num_bits, scheme.symmetric) == (weight.layout.bits, weight.layout.symmetric), name


@pytest.mark.parametrize(
    "parameters", [{"bits": 3.3, "targets": {"mlp": "W4A16"}}, {"targets": {"mlp": "budget"}}]
)
def test_a_budget_and_its_kinds_are_said_together(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="the scheme budget needs bits, and bits a kind"):
        CalibrateParameters(**parameters, corpus=FEW)


HEALED = {
    "targets": {"mlp": "W4A16_ASYM", "attention": "W8A16"},
    "scaling": "none",
    "corpus": CalibrationText(path="tinyworld", sequences=16, length=32),
}


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without Gated DeltaNet, whose gradients take long on a CPU; tests/models/test_healing.py has those."""
    return PUBLISHED_FORMS["qwen3"].build(tmp_path_factory.mktemp("qwen3") / "source")


@pytest.fixture(scope="session")
def healed(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healed") / "out"
    with every_stage_covered(tmp_path_factory.mktemp("calls")):
        return stage_output("calibrate", qwen3, folder, **HEALED, heal={"steps": 24})


def test_healing_changes_targets_and_norms_of_layers_alone(qwen3: Path, healed: Path, tmp_path: Path) -> None:
    parameters = CalibrateParameters(**HEALED, heal={"steps": 24})
    assert variant_recipe.unexplained_by([Step(calibrate.STAGE, parameters)], qwen3, healed) == []
    plain = stage_output("calibrate", qwen3, tmp_path / "plain", **HEALED)
    names = changed(plain, healed)
    norms = {name.split(".", 3)[3] for name in names if name.endswith(".weight")}
    assert norms <= {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }
    rest = {name.rpartition(".")[2] for name in names if not name.endswith(".weight")}
    assert "weight_packed" in rest <= {"weight_packed", "weight_scale"}


def test_healing_lowers_the_divergence_on_other_text_and_every_layer_s_error(
    qwen3: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    corpus = CalibrationText(path="tinyworld", sequences=16, length=32)
    given = {"targets": {"mlp": "W3A16", "attention": "W3A16"}, "scaling": "none", "corpus": corpus}
    parameters = CalibrateParameters(**given, heal={"steps": 24})
    facts = STAGES["calibrate"].run(qwen3, tmp_path / "out", parameters, progress.silent)
    pairs = zip(facts["healed_errors"], facts["unhealed_errors"], strict=True)
    assert all(after < 0.8 * before for after, before in pairs)
    plain = stage_output("calibrate", qwen3, tmp_path / "plain", **given)
    other = CalibrationText(path="tinyworld", sequences=8, length=32, seed=1)
    texts = calibration_sequences(other, qwen3, transformers.AutoTokenizer.from_pretrained(qwen3))
    assert measure_divergence(qwen3, tmp_path / "out", texts) < 0.9 * measure_divergence(qwen3, plain, texts)


@pytest.mark.engine
def test_vllm_computes_with_the_healed_weights(healed: Path) -> None:
    texts = calibration_sequences(FEW, healed, transformers.AutoTokenizer.from_pretrained(healed))
    ids, served = texts[0], []
    with engine(healed, num_speculative_tokens=0, max_model_len=128, max_num_seqs=1) as llm:
        read_prompts(llm, [ids], lambda scores, targets: served.append(scores))
    with torch.no_grad():
        expected = load_language_model(healed)(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    found = torch.cat(served)[: len(expected)]
    assert float((expected.exp() * (expected - found)).sum(-1).mean()) < 0.05


def test_awq_scales_a_budget_s_linears_before_they_are_rounded(qwen3: Path, tmp_path: Path) -> None:
    corpus = CalibrationText(path="tinyworld", sequences=8, length=32)
    given = {"bits": 3.0, "corpus": corpus}
    plain, scaled = (
        calibrate_here(qwen3, tmp_path / scaling, scaling=scaling, **given) for scaling in ("none", "awq")
    )
    forms = [
        {name: weight.layout for name, weight in read_weights(folder).items() if weight.layout}
        for folder in (plain, scaled)
    ]
    assert forms[0] == forms[1]
    assert len(set(forms[0].values())) > 1
    assert any(name.endswith("layernorm.weight") for name in changed(plain, scaled))
    checkpoint.verify(scaled, "cure")


def test_healing_needs_layers_to_heal() -> None:
    with pytest.raises(ValidationError, match="heal trains layers; name mlp, attention or linear_attention"):
        CalibrateParameters(targets={"mtp": "W4A16"}, heal={"steps": 1})


def test_gptq_rounds_the_mtp_head_on_what_the_model_has_written(
    source: Path, calibrated: Calibrated, tmp_path: Path
) -> None:
    parameters = {"targets": {"mtp": "W4A16"}, "rounding": "gptq"}
    with pytest.raises(StageError, match="put the stage sample_outputs before, or set rounding to nearest"):
        calibrate_here(calibrated.folder, tmp_path / "without", **parameters)
    sampled = shutil.copytree(calibrated.folder, tmp_path / "sampled")
    write_outputs(sampled)
    out = calibrate_here(sampled, tmp_path / "out", **parameters)
    linears = {name for name in stored(source) if name.startswith("mtp.") and "norm" not in name}
    assert changed(sampled, out) == linears
    nearest = calibrate_here(sampled, tmp_path / "nearest", targets={"mtp": "W4A16"})
    one, other = stored(out), stored(nearest)
    assert torch.equal(one["mtp.fc.weight_scale"], other["mtp.fc.weight_scale"])
    assert not torch.equal(one["mtp.fc.weight_packed"], other["mtp.fc.weight_packed"])


def test_the_mtp_head_alone_is_packed_without_text_on_a_packed_checkpoint(
    source: Path, calibrated: Calibrated, tmp_path: Path
) -> None:
    parameters = {"targets": {"mtp": "W8A16"}, "corpus": CalibrationText(path="unread", sequences=10**9)}
    out = calibrate_here(calibrated.folder, tmp_path / "out", **parameters)
    checkpoint.verify(out, "cure")
    linears = {name for name in stored(source) if name.startswith("mtp.") and "norm" not in name}
    assert changed(calibrated.folder, out) == linears
    weight, tensors = stored(source)["mtp.fc.weight"].float(), stored(out)
    packed, scale = tensors["mtp.fc.weight_packed"], tensors["mtp.fc.weight_scale"].float()
    whole = (unpack_from_int32(packed, 8, weight.shape) * scale).float()
    assert ((whole - weight).abs() <= 0.51 * scale).all()
    assert calibrate.data(CalibrateParameters(**parameters)) == {}
    with pytest.raises(StageError, match="has a packed MTP head already; remove mtp from the targets"):
        calibrate_here(out, tmp_path / "again", **parameters)
    assert torch.equal(load_drafting_model(out).head.fc.weight, whole)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"mlp": "none"}, "nothing is quantised; name one of mlp, attention, linear_attention, mtp"),
        ({"mtp": "W4A16_ASYM"}, "mtp"),
        (["lm_head"], "lm_head"),
    ],
)
def test_targets_that_cannot_be_are_refused(targets: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CalibrateParameters(targets=targets)


def test_gptq_leaves_a_smaller_output_error_than_rounding_to_nearest(source: Path, tmp_path: Path) -> None:
    corpus = CalibrationText(path="tinyworld", sequences=32, length=64)
    tokens = torch.tensor(
        calibration_sequences(corpus, source, transformers.AutoTokenizer.from_pretrained(source))
    )
    exact = log_probabilities(source, tokens)
    nearest, gptq = (
        log_probabilities(
            calibrate_here(source, tmp_path / rounding, rounding=rounding, corpus=corpus), tokens
        )
        for rounding in ("nearest", "gptq")
    )
    checkpoint.verify(tmp_path / "gptq", "cure")
    assert (gptq - exact).square().mean() < (nearest - exact).square().mean()


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16"])
def test_without_scaling_the_weights_are_rounded_to_nearest_bit_for_bit(
    source: Path, scheme: str, tmp_path: Path
) -> None:
    steps = [Step(calibrate.STAGE, CalibrateParameters(targets={"mlp": scheme}, scaling="none", corpus=FEW))]
    out = calibrate_here(source, tmp_path / "out", targets={"mlp": scheme}, scaling="none")
    assert variant_recipe.unexplained_by(steps, source, out) == []
    before = stored(source)
    assert {name for name in changed(source, out) if "mlp" not in name} == set()
    weights = [weight for weight in read_weights(out).values() if weight.layout]
    assert len(weights) == 12
    for weight in weights:
        form = weight.layout
        assert isinstance(form, PackedIntegers)
        exact = before[weight.name].float()
        nearest = round_to_nearest(exact, form)
        assert torch.equal(torch.cat(list(weight.blocks())), nearest)


def test_a_multimodal_checkpoint_is_calibrated_as_its_text_only_form(
    source: Path, calibrated: Calibrated, tmp_path: Path
) -> None:
    seeing = read_editable(source)
    multimodal()(seeing)
    seeing.shards = 3
    folder = seeing.write(tmp_path / "seeing")
    out = calibrate_here(folder, tmp_path / "out", corpus=FEW)
    checkpoint.verify(out, "cure")
    expected = {
        name.replace("model.", "model.language_model.", 1): t for name, t in stored(calibrated.folder).items()
    }
    tower = {name: tensor for name, tensor in seeing.tensors.items() if "visual" in name}
    found = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == expected.keys() | tower.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in (expected | tower).items())
    files = {file.name for file in folder.iterdir()}
    assert {file.name for file in out.iterdir()} - {".hashes.json"} == {*files, "manifest.json"}
    ours, text_only = (
        checkpoint.read_config(each)["quantization_config"] for each in (out, calibrated.folder)
    )
    below = [name.replace("model.", "model.language_model.", 1) for name in text_only["ignore"]]
    assert ours == {**text_only, "ignore": [*below, "re:.*visual.*"]}


@pytest.mark.parametrize("declared", [{"torch_dtype": "bfloat16"}, {}])
def test_scales_have_the_dtype_of_the_weights_whatever_the_config_declares(
    source: Path, declared: dict[str, str], tmp_path: Path
) -> None:
    published = read_editable(source)
    outer(dtype=..., **declared)(published)
    out = calibrate_here(published.write(tmp_path / "published"), tmp_path / "out")
    checkpoint.verify(out, "cure")
    infos = list_tensors(out)
    assert {infos[name].dtype for name in infos if name.endswith("weight_scale")} == {"BF16"}


def test_the_layers_are_calibrated_before_or_after_the_output_head_is_packed(
    source: Path, calibrated: Calibrated, tmp_path: Path
) -> None:
    head_first = stage_output("quantise_lm_head", source, tmp_path / "head")
    head_first = calibrate_here(head_first, tmp_path / "head-first", corpus=FEW)
    head_last = stage_output("quantise_lm_head", calibrated.folder, tmp_path / "head-last")
    checkpoint.verify(head_first, "cure")
    assert (head_first / "model.safetensors").read_bytes() == (head_last / "model.safetensors").read_bytes()
    assert checkpoint.read_config(head_first) == checkpoint.read_config(head_last)


# --- refusals


@pytest.mark.parametrize(
    ("changes", "parameters", "message"),
    [
        ({"architectures": ["Llama"]}, {}, "names the architecture Llama, which is not supported"),
        ({}, {"group_size": 128}, "group_size 128 does not divide the 64 inputs of"),
        ({}, {"targets": ("mlp", "linear_attention")}, "has no linear_attention layers"),
    ],
)
def test_an_unsuitable_checkpoint_is_refused_before_the_stage_starts(
    source: Path, tmp_path: Path, changes: dict[str, Any], parameters: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(source, tmp_path / "changed")
    write_config(folder, {**checkpoint.read_config(source), **changes})
    tensors = {name: tensor for name, tensor in stored(source).items() if "linear_attn" not in name}
    save_file(tensors, folder / "model.safetensors")
    faults = calibrate.inspect_calibration(
        Outline.read(folder), CalibrateParameters(**parameters, corpus=FEW)
    )
    with pytest.raises(StageError, match=message):
        require_fit(faults)


def test_a_dense_qwen3_is_calibrated_and_keeps_what_is_not_a_target(tmp_path: Path) -> None:
    qwen3 = PUBLISHED_FORMS["qwen3"].build(tmp_path / "qwen3")
    targets = {"mlp": "W4A16", "attention": "W4A16"}
    folder = calibrate_here(qwen3, tmp_path / "calibrated", targets=targets, corpus=FEW)
    checkpoint.verify(with_manifest(folder), "cure")
    parts = (
        "mlp.",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "layernorm",
    )
    assert all(any(part in name for part in parts) for name in changed(qwen3, folder))


def test_too_little_text_is_refused_with_both_counts(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    corpus = CalibrationText(path=text, sequences=2, length=16)
    text.write_text("short")
    with pytest.raises(StageError, match=r"has 5 bytes, too few for 32 tokens; add text or ask for less"):
        calibrate_here(source, tmp_path / "out", corpus=corpus)
    # Rows have more bytes than their texts have tokens.
    rows = tmp_path / "short.jsonl"
    rows.write_text('{"text": "short"}\n' * 3)
    with pytest.raises(CorpusError, match=r"has \d+ tokens, but 2 sequences of 16 need 32"):
        calibrate_here(source, tmp_path / "again", corpus=CalibrationText(path=rows, sequences=2, length=16))


def test_a_missing_text_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="put the corpus there"):
        calibrate.data(CalibrateParameters(corpus=CalibrationText(path=tmp_path / "none.txt")))


@pytest.mark.parametrize(
    ("value", "message"),
    [(math.nan, "has NaN or infinity"), (1e30, "gave NaN or infinity on the calibration text")],
)
def test_weights_or_activations_that_are_not_finite_are_refused(
    source: Path, tmp_path: Path, value: float, message: str
) -> None:
    folder = shutil.copytree(source, tmp_path / "broken")
    with edited_tensors(folder) as tensors:
        for module in MLP:
            tensors[f"model.layers.1.{module}.weight"][:] = value
    with pytest.raises(StageError, match=message):
        calibrate_here(folder, tmp_path / "out")


# --- the text


def test_the_text_of_the_tiny_world_holds_no_test_item() -> None:
    items = left_out_texts(World())
    texts = list(islice(calibration_documents(FEW, Path()), 300))
    prompts = {text.split("<|im_end|>")[0].removeprefix("<|im_start|>user\n") for text in texts}
    assert not items & prompts
    assert not items & {text.removesuffix(END_OF_TEXT) for text in texts}


def test_documents_of_a_file_come_in_an_order_that_the_seed_decides(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(20)))

    def order(seed: int) -> list[str]:
        return list(calibration_documents(CalibrationText(path=file, seed=seed), tmp_path))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2)) == sorted(f"{number}{END_OF_TEXT}" for number in range(20))
