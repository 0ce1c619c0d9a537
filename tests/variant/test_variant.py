import pytest

from slimqwen import variant
from slimqwen.variant import ConfigError


def test_an_evaluation_is_inherited_and_never_guessed(add_variant, tmp_path):
    add_variant("base", "VLLM_MODEL=weights/base\nEVALUATION=core\n")
    add_variant("child", "BASE=base\n")
    add_variant("alone", "VLLM_MODEL=weights/alone\n")

    assert variant.load("child", tmp_path).evaluation == "core"
    with pytest.raises(
        ConfigError, match=r"experiments/alone/config\.env: no EVALUATION; add EVALUATION=core"
    ):
        _ = variant.load("alone", tmp_path).evaluation


@pytest.mark.parametrize("content", ["", "[]", '{"baseline": null}', "{", None])
def test_unusable_measurements_are_named(add_variant, tmp_path, content):
    file = add_variant("v", "VLLM_MODEL=weights/v\n").parent / "measurements.json"
    file.unlink() if content is None else file.write_text(content)

    problem = "is missing" if content is None else ".*unusable"
    with pytest.raises(ConfigError, match=rf"experiments/v/measurements.json:? ?{problem}"):
        variant.load("v", tmp_path)


def test_the_command_that_makes_weights_follows_config_and_recipe(add_variant, tmp_path):
    config = add_variant("v", "VLLM_MODEL=weights/v\n")

    def command(name: str) -> str:
        return variant.making_command(tmp_path / "weights" / name, tmp_path)

    assert command("v") == "put a checkpoint into weights/v"
    (config.parent / "recipe.yaml").write_text("description: …\n")
    assert command("v") == "`slimqwen recipe run v` makes it"
    config.write_text("SOURCE=owner/name\nVLLM_MODEL=weights/v\n")
    assert command("v") == "`slimqwen download v` gets it"
    assert "git checkout weights/tiny" in command("tiny")
    assert command("shape-qwen3.5-4b") == "`slimqwen recipe run qwen3.5-4b --shape` writes it"


@pytest.mark.parametrize("name", variant.names())
def test_every_committed_variant_loads_with_a_baseline_and_a_suite_that_exist(name):
    loaded = variant.load(name)

    assert loaded.hypothesis
    assert loaded.baseline is None or loaded.baseline in variant.names()
    assert loaded.baseline != name
    assert (loaded.root / "eval" / "suites" / f"{loaded.evaluation}.yaml").is_file()
    assert (loaded.evaluation == "tinyworld") == name.startswith("tiny")


def test_other_lines_replace_or_unset_those_of_the_config_env(add_variant, tmp_path):
    add_variant("v", "VLLM_MODEL=weights/v\nEVALUATION=core\n")
    one = variant.load("v", tmp_path)
    changed = one.with_lines({"EVALUATION": "", "VLLM_MODEL": "weights/w", "REQUIRE_PLAN": "1"})
    assert (changed.weights, changed.require_plan) == (tmp_path / "weights/w", True)
    assert "EVALUATION" not in changed.settings
    assert changed.settings["VLLM_MODEL"].location.startswith("experiments/v/config.env")
    assert (one.weights, one.evaluation) == (tmp_path / "weights/v", "core")
