import pytest

from slimqwen import variant
from slimqwen.variant import ConfigError, UnknownVariantError


def test_a_variant_inherits_and_a_later_key_overrides(add_variant, tmp_path):
    add_variant("base", "VLLM_MODEL=weights/base\nVLLM_PORT=8080\nVLLM_MAX_NUM_SEQS=1\n")
    add_variant("child", "BASE=base\nVLLM_MAX_NUM_SEQS=8\n", baseline="base")
    add_variant("grandchild", "BASE=child\n")

    loaded = variant.load("grandchild", tmp_path)

    assert {key: setting.value for key, setting in loaded.settings.items()} == {
        "VLLM_MODEL": "weights/base",
        "VLLM_PORT": "8080",
        "VLLM_MAX_NUM_SEQS": "8",
    }
    assert loaded.settings["VLLM_MAX_NUM_SEQS"].place == "experiments/child/config.env:2"
    assert loaded.lineage == ("grandchild", "child", "base")
    assert loaded.weights == tmp_path / "weights/base"


def test_an_empty_value_unsets_what_was_inherited_and_is_still_remembered(add_variant, tmp_path):
    add_variant("base", "VLLM_MODEL=weights/base\nVLLM_BLOCK_SIZE=16\n")
    add_variant("child", "BASE=base\nVLLM_BLOCK_SIZE=\n")

    loaded = variant.load("child", tmp_path)

    assert "VLLM_BLOCK_SIZE" not in loaded.settings
    assert [setting.place for setting in loaded.unset] == ["experiments/child/config.env:2"]


def test_comments_blank_lines_and_quotes_keep_line_numbers_right(add_variant, tmp_path):
    add_variant(
        "v",
        "# first\n\nVLLM_MODEL=weights/v\n\n# why\n"
        'VLLM_SPECULATIVE_CONFIG=\'{"method": "mtp"}\'\nexport VLLM_PORT=1 # trailing\n',
    )

    settings = variant.load("v", tmp_path).settings

    assert {key: setting.line for key, setting in settings.items()} == {
        "VLLM_MODEL": 3,
        "VLLM_SPECULATIVE_CONFIG": 6,
        "VLLM_PORT": 7,
    }
    assert settings["VLLM_SPECULATIVE_CONFIG"].value == '{"method": "mtp"}'
    assert settings["VLLM_PORT"].value == "1"


def test_an_unknown_variant_names_the_nearest(add_variant, tmp_path):
    add_variant("tiny-awq", "VLLM_MODEL=weights/tiny-awq\n")

    with pytest.raises(UnknownVariantError, match=r"no variant 'tiny-akw'.*did you mean tiny-awq\?"):
        variant.load("tiny-akw", tmp_path)


def test_an_unknown_base_names_the_line_that_asks_for_it(add_variant, tmp_path):
    add_variant("v", "VLLM_MODEL=weights/v\nBASE=nope\n")

    with pytest.raises(
        UnknownVariantError, match=r"experiments/v/config.env:2: BASE=nope: there is no variant"
    ):
        variant.load("v", tmp_path)


def test_a_circle_of_bases_is_an_error_that_shows_the_circle(add_variant, tmp_path):
    add_variant("a", "BASE=b\nVLLM_MODEL=weights/a\n")
    add_variant("b", "BASE=a\n")

    with pytest.raises(ConfigError, match=r"experiments/b/config.env:1: BASE goes in a circle: a -> b -> a"):
        variant.load("a", tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("VLLM_MODEL=weights/v\nnonsense\n", r"config.env:2: not a KEY=value line: 'nonsense'"),
        (
            "VLLM_MODEL=weights/v\nVLLM_PORT=1\nVLLM_PORT=2\n",
            r"config.env:3: VLLM_PORT stands already on line 2",
        ),
        ("VLLM_PORT=1\n", r"no VLLM_MODEL; add VLLM_MODEL=weights/<folder>"),
        ("VLLM_MODEL=weights/v\nPLATFORM=tpu\n", r"config.env:2: PLATFORM=tpu: write PLATFORM=cuda"),
        (
            "VLLM_MODEL=weights/v\nSOURCE=owner/name\nREVISION=main\n",
            r"config.env:3: REVISION=main: no commit; write its 40 hexadecimal digits",
        ),
        (
            f"VLLM_MODEL=weights/v\nREVISION={'0' * 40}\n",
            r"config.env:2: REVISION is the commit of a SOURCE in the same file, and there is none",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_one_line_with_its_place(add_variant, tmp_path, config, message):
    add_variant("v", config)

    with pytest.raises(ConfigError, match=message) as caught:
        variant.load("v", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_revision_is_inherited_with_its_source_alone(add_variant, tmp_path):
    add_variant("base", f"VLLM_MODEL=weights/base\nSOURCE=owner/name\nREVISION={'0' * 40}\n")
    add_variant("same", "BASE=base\n")
    add_variant("other", "BASE=base\nSOURCE=owner/other\n")
    add_variant("unpinned", "BASE=base\nSOURCE=owner/other\nREVISION=\n")

    assert variant.load("same", tmp_path).settings["REVISION"].value == "0" * 40
    assert "REVISION" not in variant.load("unpinned", tmp_path).settings
    with pytest.raises(
        ConfigError, match=r"base/config.env:3: REVISION .* SOURCE comes from experiments/other/config.env:2"
    ):
        variant.load("other", tmp_path)


def test_what_a_variant_is_held_against_is_inherited_and_never_guessed(add_variant, tmp_path):
    add_variant("base", "VLLM_MODEL=weights/base\nEVALUATION=core\n")
    add_variant("child", "BASE=base\n")
    add_variant("alone", "VLLM_MODEL=weights/alone\n")

    assert variant.load("child", tmp_path).evaluation == "core"
    with pytest.raises(
        ConfigError, match=r"experiments/alone/config\.env: no EVALUATION; write EVALUATION=core"
    ):
        _ = variant.load("alone", tmp_path).evaluation


def test_a_config_that_is_not_text_is_refused(add_variant, tmp_path):
    add_variant("v", "").write_bytes(b"VLLM_MODEL=\xff\xfe\n")

    with pytest.raises(ConfigError, match="not UTF-8"):
        variant.load("v", tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"baseline": null}', "{"])
def test_unusable_measurements_are_named(add_variant, tmp_path, content):
    config = add_variant("v", "VLLM_MODEL=weights/v\n")
    (config.parent / "measurements.json").write_text(content)

    with pytest.raises(ConfigError, match=r"experiments/v/measurements.json: unusable"):
        variant.load("v", tmp_path)


def test_missing_measurements_are_named(add_variant, tmp_path):
    config = add_variant("v", "VLLM_MODEL=weights/v\n")
    (config.parent / "measurements.json").unlink()

    with pytest.raises(ConfigError, match=r"experiments/v/measurements.json is missing"):
        variant.load("v", tmp_path)


def test_the_command_that_makes_weights_follows_the_recipe(add_variant, tmp_path):
    config = add_variant("v", "VLLM_MODEL=weights/v\n")
    assert "put a checkpoint into weights/v" in variant.making_command(tmp_path / "weights/v", tmp_path)

    (config.parent / "recipe.yaml").write_text("description: …\n")
    assert "make recipe VARIANT=v" in variant.making_command(tmp_path / "weights/v", tmp_path)
    (config.parent / "config.env").write_text("SOURCE=owner/name\nVLLM_MODEL=weights/v\n")
    command = variant.making_command(tmp_path / "weights/v", tmp_path)
    assert command == "`make download VARIANT=v` gets it"
    assert "make tiny" in variant.making_command(tmp_path / "weights/tiny", tmp_path)


@pytest.mark.parametrize("name", variant.names())
def test_every_committed_variant_loads_and_its_baseline_exists(name):
    loaded = variant.load(name)

    assert loaded.hypothesis
    assert loaded.baseline is None or loaded.baseline in variant.names()
    assert loaded.baseline != name


@pytest.mark.parametrize("name", variant.names())
def test_every_committed_variant_is_held_against_a_suite_that_exists(name):
    loaded = variant.load(name)
    assert (loaded.root / "eval" / "suites" / f"{loaded.evaluation}.yaml").is_file()
    assert (loaded.evaluation == "tinyworld") == name.startswith("tiny")
