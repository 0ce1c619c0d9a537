"""What is done with published forms: the stages and the checks, as functions of a checkpoint and an empty folder."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slimqwen import checkpoint, progress
from slimqwen import variant as variants
from slimqwen.checkpoint import promise
from slimqwen.checkpoint.files import side_files
from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.errors import SlimqwenError
from slimqwen.evals.invocation import Invocation
from slimqwen.models.outline import Outline
from slimqwen.recipe import variant_recipe
from slimqwen.recipe.recipe_file import Step
from slimqwen.recipe.registry import STAGES
from slimqwen.recipe.sampled_outputs import OUTPUTS
from slimqwen.recipe.stage import require_fit
from slimqwen.serving import checks, in_process
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port
from tests.checkpoints import TINY, with_manifest

Verb = Callable[[Path, Path], None]
"""(checkpoint, an empty folder); raises a SlimqwenError where the verb refuses the checkpoint."""

WORKS = "works"
_EVAL = TINY.parents[1] / "eval"
_CONFIG = {
    "VLLM_SERVED_MODEL_NAME": "default",
    "VLLM_HOST": "127.0.0.1",
    "VLLM_MAX_MODEL_LEN": "512",
    "VLLM_MAX_NUM_SEQS": "4",
    "VLLM_ENABLE_PREFIX_CACHING": "0",
    "VLLM_ENFORCE_EAGER": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LANGUAGE_MODEL_ONLY": "1",
}
_DRAFTS = {"VLLM_SPECULATIVE_CONFIG": """'{"method": "mtp", "num_speculative_tokens": 2}'"""}
_PRUNE: Mapping[str, Any] = {"size": 4096, "corpus": {"path": "tinyworld", "documents": 20}}
_TRIM: Mapping[str, Any] = {"size": 256}
_MTP: Mapping[str, Any] = {"group_size": 32, "targets": {"mtp": "W8A16"}}
_SAMPLES = {
    "texts": 16,
    "held_out": 16,
    "tokens": 24,
    "prompts": {"path": "tinyworld_prompts", "longest": 16},
}
_TEXT = {"path": "tinyworld"}
_RECIPE: Mapping[str, Mapping[str, Any]] = {
    "calibrate": {"layer_error_ratio": 4, "corpus": {**_TEXT, "sequences": 8, "length": 64}},
    "prune_vocab": {"size": 4096, "corpus": {**_TEXT, "documents": 200}},
    "quantise_lm_head": {"rounding": "gptq", "corpus": {**_TEXT, "sequences": 64, "length": 128}},
    "quantise_embedding": {},
    "sample_outputs": {"texts": 48, "held_out": 16, "tokens": 32, "prompts": {"path": "tinyworld_prompts"}},
    "trim_draft_vocab": {"size": 1024},
    "redistill_mtp": {"depth": 2, "steps": 8, "validate_every": 4},
}
"""Every stage that changes tensors, as short as it can be."""


def repository(
    folder: Path, root: Path, *, drafts: bool, config: Mapping[str, str] = _CONFIG
) -> variants.Variant:
    """A repository whose variant `v` has this checkpoint; its baseline is `tiny`, if made from that, or itself."""
    [architecture] = checkpoint.read_config(folder)["architectures"]
    is_tiny = architecture in ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
    baselines = {"v": "tiny" if is_tiny else "itself", "itself": None, "tiny": None}
    for name, baseline in baselines.items():
        experiment = root / "experiments" / name
        experiment.mkdir(parents=True)
        lines = {**config, "VLLM_MODEL": f"weights/{name}", **(_DRAFTS if drafts else {})}
        (experiment / "config.env").write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        content = {"hypothesis": "it is served", "baseline": baseline}
        (experiment / "measurements.json").write_text(json.dumps(content))
    (root / "weights").mkdir()
    for name, weights in (("v", folder), ("itself", folder), ("tiny", TINY)):
        (root / "weights" / name).symlink_to(weights)
    (root / "eval").symlink_to(_EVAL)
    return variants.load("v", root)


def with_few_items(variant: variants.Variant) -> variants.Variant:
    """Leave a few items, prompts and lengths to its repository, for what is seen here is whether a verb works."""
    (evaluation := variant.root / "eval").unlink()
    shutil.copytree(_EVAL, evaluation)
    for items in (evaluation / "tasks" / "tinyworld").glob("*.jsonl"):
        items.write_text("".join(items.read_text().splitlines(keepends=True)[:4]))
    for file in evaluation.rglob("*.yaml"):
        file.write_text(
            re.sub(
                r"^(\s*(?:(?:proof_)?prompts|lengths)): \d+", r"\1: 6", file.read_text(), flags=re.MULTILINE
            )
        )
    return variant


def verify(folder: Path, empty: Path) -> None:
    """`recipe verify` but for the engine."""
    copy = shutil.copytree(folder, empty / "copy")
    checkpoint.verify(with_manifest(copy), "download it anew")


def serve(*, drafts: bool) -> Verb:
    """`serve --dry-run`."""

    def run(folder: Path, empty: Path) -> None:
        variant = repository(folder, empty / "root", drafts=drafts)
        command = ServerCommand.resolve(variant, platform="cpu")
        checks.check_weights(command)
        assert str(variant.weights) in command.as_shell()

    return run


def needs(stage: str, **parameters: Any) -> Verb:
    """What a recipe asks of a stage and its base before anything is computed."""

    def run(folder: Path, empty: Path) -> None:
        checkpoint.check_folder(folder, "download it anew")
        kind = STAGES[stage]
        require_fit(kind.inspect(Outline.read(folder), kind.parameters(**parameters)))

    return run


def stage(name: str, *, outputs: bool = False, **parameters: Any) -> Verb:
    """A stage from its needs to a result that is sound, explained by the stage, and has its base's other files.

    Args:
        outputs: whether the stage reads what the model has sampled.
    """

    def run(folder: Path, empty: Path) -> None:
        needs(name, **parameters)(folder, empty)
        base, out = shutil.copytree(folder, empty / "base"), empty / "out"
        if outputs:
            write_outputs(base)
        out.mkdir()
        kind = STAGES[name]
        given = kind.parameters(**parameters)
        unfinished = {"unfinished": empty} if kind.resumes else {}
        kind.run(base, out, given, progress.silent, **unfinished)
        checkpoint.check_folder(out, "make it anew")
        assert faults(out) == faults(folder)
        assert variant_recipe.unexplained_by([Step(kind, given)], folder, out) == []
        assert side_files(out).keys() >= side_files(folder).keys()

    return run


def faults(folder: Path) -> str:
    """What config.json promises and the tensors do not keep."""
    return outcome(lambda _, __: promise.check_tensors(folder), folder, folder)


def write_outputs(folder: Path) -> None:
    """Continuations as the stage sample_outputs leaves them."""
    rows = [
        {"prompt": [5] * 8, "continuation": list(range(first, first + 8)), "held_out": first < 100}
        for first in (50, 200, 300)
    ]
    (folder / OUTPUTS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def bake(verb: Callable[..., Verb], **parameters: Any) -> Verb:
    """`needs` or `stage` of bake_cache with the form's own config.env."""

    def run(folder: Path, empty: Path) -> None:
        config = {**_CONFIG, "VLLM_ENFORCE_EAGER": "0"}
        variant = repository(folder, empty / "root", drafts=False, config=config)
        verb("bake_cache", config=variant.folder / "config.env", **parameters)(folder, empty)

    return run


QUICK: Mapping[str, Verb] = {
    "verify": verify,
    "serve": serve(drafts=False),
    "serve with drafts": serve(drafts=True),
    "quantise_lm_head": stage("quantise_lm_head"),
    "quantise_embedding": stage("quantise_embedding"),
    "prune_vocab": stage("prune_vocab", **_PRUNE),
    "trim_draft_vocab": stage("trim_draft_vocab", outputs=True, **_TRIM),
    "calibrate": needs("calibrate", corpus={"path": "tinyworld"}),
    "calibrate mtp": stage("calibrate", **_MTP),
    "sample_outputs": needs("sample_outputs", **_SAMPLES),
    "redistill_mtp": needs("redistill_mtp"),
    "bake_cache": bake(needs),
}
"""Verbs of well under a second; of those that start an engine or train, what they ask beforehand."""

ASKED: Mapping[str, Verb] = {
    "quantise_lm_head": needs("quantise_lm_head"),
    "quantise_embedding": needs("quantise_embedding"),
    "prune_vocab": needs("prune_vocab", **_PRUNE),
    "trim_draft_vocab": needs("trim_draft_vocab", **_TRIM),
    "calibrate mtp": needs("calibrate", **_MTP),
}
"""Of the stages among them, what they ask beforehand."""


def verify_in_engine(folder: Path, empty: Path) -> None:
    """`recipe verify`."""
    verify(folder, empty)
    in_process.try_out(folder)


def redistill(folder: Path, empty: Path) -> None:
    """The stage redistill_mtp on what the checkpoint itself has sampled."""
    needs("redistill_mtp")(folder, empty)
    (samples := empty / "samples").mkdir()
    stage("sample_outputs", **_SAMPLES)(folder, samples)
    stage("redistill_mtp", depth=2, steps=2, validate_every=1)(samples / "out", empty)


def compare_distributions(folder: Path, empty: Path) -> None:
    """`eval fidelity`."""
    from slimqwen.evals import fidelity

    variant = with_few_items(repository(folder, empty / "root", drafts=False))
    settings = fidelity.FidelitySettings.load("tinyworld", variant.root)
    fidelity.measure_fidelity(variant, settings, Invocation("a test", port=free_port()))


def accept_drafts(folder: Path, empty: Path) -> None:
    """`eval acceptance`."""
    from slimqwen.evals import acceptance

    variant = with_few_items(repository(folder, empty / "root", drafts=False))
    settings = acceptance.AcceptanceSettings.load("tinyworld", variant.root)
    acceptance.measure_acceptance(variant, settings, [2], Invocation("a test"), greedy_only=True)


def gate_recipe(folder: Path, empty: Path) -> None:
    """`recipe run` with every stage that takes the checkpoint, one after the other, then `gate` of the result."""
    from slimqwen.evals import gate
    from slimqwen.evals.checks import GateSettings

    drafts = has_mtp_head(folder)
    variant = with_few_items(repository(folder, empty / "root", drafts=drafts))
    steps = [
        {name: parameters}
        for name, parameters in _RECIPE.items()
        if (drafts or name != "sample_outputs") and outcome(needs(name, **parameters), folder, empty) == WORKS
    ]
    recipe = {"description": "a test", "base": "itself", "stages": steps}
    (variant.folder / "recipe.yaml").write_text(json.dumps(recipe))
    variant_recipe.run_recipe(variant)
    assert variant_recipe.unexplained_changes(variant) == []
    assert variant_recipe.unexplained_settings(variant) == []
    gate.measure_gate(variant, GateSettings.load("tinyworld", variant.root), command="a test")


SLOW: Mapping[str, Verb] = {
    "verify": verify_in_engine,
    "calibrate": stage("calibrate", corpus={"sequences": 2, "length": 16}),
    "sample_outputs": stage("sample_outputs", **_SAMPLES),
    "redistill_mtp": redistill,
    "fidelity": compare_distributions,
    "acceptance": accept_drafts,
    "gate of a recipe": gate_recipe,
    "bake_cache": bake(stage, prompt_tokens=[1]),
}
"""Verbs that start an engine or train; the last two for a published form of each format alone."""


FORMATS = (
    *("text", "multimodal", "w4a16", "w4a16-zero-points", "w8a16", "w8a8", "fp8-rows", "mixed"),
    *("fp8-blocks", "gptq", "auto-round", "awq", "llama", "qwen2", "qwen3", "qwen3.5-moe"),
)
"""A published form of each format and class of model."""


def outcome(verb: Verb, folder: Path, empty: Path) -> str:
    """`WORKS`, or the message with which a verb refuses a checkpoint, without its path."""
    try:
        verb(folder, empty)
    except SlimqwenError as error:
        return re.sub(r"/\S*/(v|published|base|copy|out)\b", "CHECKPOINT", str(error))
    return WORKS
