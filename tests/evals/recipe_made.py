"""A variant whose checkpoint a recipe made, its gate records and its model card."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from slimqwen import checkpoint, variant
from slimqwen.checkpoint.files import carry_all, file_records
from slimqwen.evals import promotion
from slimqwen.evals.checks import GateSettings
from slimqwen.evals.suites.suite import Suite
from slimqwen.records import provenance
from slimqwen.records.record import Finding
from slimqwen.serving.command import ServerCommand
from tests import record_files
from tests.evals.gate_checks import link_settings

ROOT = Path(__file__).parents[2]
CHECKS = ("fidelity", "acceptance", "quality", "engine")
RECIPE = (
    "description: Four bits for the MLPs.\nbase: tiny\nstages:\n  - calibrate: {corpus: {path: tinyworld}}\n"
)


@pytest.fixture
def made(tmp_path, add_variant):
    """A variant whose checkpoint lies in the store, as a recipe leaves it."""
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\n")
    config = add_variant("small", "BASE=tiny\nVLLM_MODEL=weights/small\n", baseline="tiny")
    (config.parent / "recipe.yaml").write_text(RECIPE)
    entry = tmp_path / "weights" / "store" / ("ab" * 32)
    entry.mkdir(parents=True)
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    carry_all(ROOT / "weights" / "tiny", entry)
    checkpoint.Manifest(
        stage="calibrate",
        key=entry.name,
        ingredients={"input": "cd" * 32},
        files=file_records(entry),
        wall_seconds=1,
        peak_memory_bytes=1,
        versions={},
    ).write(entry)
    (tmp_path / "weights" / "small").symlink_to(Path("store") / entry.name)
    link_settings(tmp_path)
    return variant.load("small", tmp_path)


def described(one, settings=None):
    settings = settings or GateSettings.load("tinyworld", one.root)
    server = ServerCommand.resolve(one)
    files = settings.inputs(one.root)
    return provenance.describe(server, ["x"], provenance.utc_now(), datasets=files).as_json()


def gated(one, verdict="pass", data=None, **changes):
    """A gate record of a variant as it is now, and the quality record that it rests on, made with this data."""
    suite = Suite.load("tinyworld", one.root)
    items = [
        {"task": task.name, "item": str(n), "value": 1.0, "weight": 1}
        for task in suite.tasks
        for n in range(4)
    ]
    block = described(one, suite) | ({} if data is None else {"datasets": data})
    quality = record_files.example("quality", variant=one.name, provenance=block, suite="tinyworld")
    score = quality["tasks"]["example_facts"]
    said = ("measure", "non_inferiority_margin")
    quality["tasks"] = {
        task.name: score
        | {"settings": suite.settings_of(task)}
        | {name: getattr(task, name) for name in said}
        for task in suite.tasks
    }
    evidence = record_files.write(one.folder, quality, items)
    record = {
        "schema": "gate/1",
        "variant": one.name,
        "baseline": one.baseline,
        "plan": "tinyworld",
        "verdict": verdict,
        "verdicts": dict.fromkeys(CHECKS, "pass") | {"quality": verdict},
        "records": [f"{one.name}/{evidence.name}"],
        "provenance": described(one) | changes,
    }
    findings = [
        Finding(gate=gate, figure=gate, value=value, low=value, high=1.0, limit=0.0, verdict=each).as_json()
        for gate, value, each in (("acceptance", 0.99, "pass"), ("quality", 0.0, verdict))
    ]
    return record_files.write(one.folder, record, findings)


def promoted_card(one):
    return ModelCard.load(promotion.promote_variant(one).card)
