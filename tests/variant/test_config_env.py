import argparse
import random

import pytest

from slimqwen import variant
from slimqwen.errors import SlimqwenError
from slimqwen.variant import ConfigError
from slimqwen.variant.config_env import quoted

MUTATIONS = 4_000


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
    assert loaded.settings["VLLM_MAX_NUM_SEQS"].location == "experiments/child/config.env:2"
    assert loaded.lineage == ("grandchild", "child", "base")


COUNTS = (
    "1k",
    "1K",
    "1.5k",
    "1.5K",
    "2M",
    "3g",
    "1T",
    "auto",
    "AUTO",
    "-1",
    "0",
    " 4096 ",
    "k",
    "",
    "1kk",
    "0x10",
    "4 k",
)


@pytest.mark.parametrize("text", COUNTS)
def test_a_number_of_tokens_is_what_vllm_makes_of_it(text):
    from vllm.utils.argparse_utils import human_readable_int_or_auto

    def outcome(read):
        try:
            return read(text)
        except (ValueError, argparse.ArgumentTypeError):
            return "refused"

    assert outcome(variant.read_token_count) == outcome(human_readable_int_or_auto)


def test_an_empty_value_unsets_what_was_inherited_and_is_remembered(add_variant, tmp_path):
    add_variant("base", "VLLM_MODEL=weights/base\nVLLM_BLOCK_SIZE=16\n")
    add_variant("child", "BASE=base\nVLLM_BLOCK_SIZE=\n")

    loaded = variant.load("child", tmp_path)

    assert "VLLM_BLOCK_SIZE" not in loaded.settings
    assert [setting.location for setting in loaded.unset] == ["experiments/child/config.env:2"]


def test_comments_blank_lines_and_quotes_keep_line_numbers_right(add_variant, tmp_path):
    add_variant(
        "v",
        "# first\n\nVLLM_MODEL=weights/v\n\n# why\n"
        'VLLM_SPECULATIVE_CONFIG=\'{"method": "mtp"}\'\nexport VLLM_PORT=1 # trailing\n',
    )

    settings = variant.load("v", tmp_path).settings

    assert {key: (setting.line, setting.value) for key, setting in settings.items()} == {
        "VLLM_MODEL": (3, "weights/v"),
        "VLLM_SPECULATIVE_CONFIG": (6, '{"method": "mtp"}'),
        "VLLM_PORT": (7, "1"),
    }


@pytest.mark.parametrize(
    "folder",
    [
        "a#b",
        "a #b",
        " lead",
        "trail ",
        "it's",
        'say "x"',
        "back\\",
        "$HOME",
        "${X}",
        "a=b",
        "\\n",
        "中 文",
        "a'b\\'c",
    ],
)
def test_a_folder_of_any_name_is_the_one_that_was_written(add_variant, tmp_path, folder):
    add_variant("v", f"VLLM_MODEL={quoted(f'weights/{folder}')}\nVLLM_PORT=1\n")
    assert variant.load("v", tmp_path).weights == tmp_path / "weights" / folder


def test_an_unknown_variant_names_the_nearest(add_variant, tmp_path):
    add_variant("tiny-awq", "VLLM_MODEL=weights/tiny-awq\n")

    with pytest.raises(ConfigError, match=r"no variant 'tiny-akw'.*did you mean tiny-awq\?"):
        variant.load("tiny-akw", tmp_path)


@pytest.mark.parametrize("line", ["MAX_BODY_BYTES=1", "THINKING_TOKEN_BUDGET=0"])
def test_the_least_value_of_a_number_is_taken(add_variant, tmp_path, line):
    key, value = line.split("=")
    add_variant("a", f"VLLM_MODEL=weights/a\n{line}\n")

    assert variant.load("a", tmp_path).settings[key].value == value


def test_a_circle_of_bases_is_an_error_that_shows_the_circle(add_variant, tmp_path):
    add_variant("a", "BASE=b\nVLLM_MODEL=weights/a\n")
    add_variant("b", "BASE=a\n")

    with pytest.raises(ConfigError, match=r"experiments/b/config.env:1: BASE forms a cycle: a -> b -> a"):
        variant.load("a", tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"VLLM_MODEL=\xff\xfe\n", "config.env: not UTF-8"),
        (b"nonsense\n", r"config.env:2: not a KEY=value line: 'nonsense'"),
        (b"BASE=nope\n", r"config.env:2: BASE=nope: there is no variant 'nope'"),
        (b"VLLM_PORT=1\nVLLM_PORT=2\n", r"config.env:3: VLLM_PORT is already set on line 2"),
        (b"VLLM_MODEL=\n", r"config.env:2: VLLM_MODEL is already set on line 1"),
        (b"VLLM_DTYPE=a\0b\n", r"config.env:2: 'VLLM_DTYPE' has a line break or another control character"),
        (b"BASE='one\ntwo'\n", r"config.env:2: 'BASE' has a line break"),
        (b"PLATFORM=tpu\n", r"config.env:2: PLATFORM=tpu has no meaning; write PLATFORM=cuda"),
        (b"ALLOW_UNSAFE=yes\n", r"config.env:2: ALLOW_UNSAFE=yes has no meaning; write ALLOW_UNSAFE=1"),
        (b"REQUIRE_WARMUP=yes\n", r"config.env:2: REQUIRE_WARMUP=yes has no meaning; write REQUIRE_WARMUP=1"),
        (b"MAX_BODY_BYTES=0\n", r"config.env:2: MAX_BODY_BYTES=0 is no whole number of at least 1"),
        (b"MAX_BODY_BYTES=1MB\n", r"config.env:2: MAX_BODY_BYTES=1MB is no whole number"),
        (b"THINKING_TOKEN_BUDGET=-1\n", r"config.env:2: THINKING_TOKEN_BUDGET=-1 is no whole number"),
        (b"THINKING_TOKEN_BUDGET=2.5\n", r"config.env:2: THINKING_TOKEN_BUDGET=2.5 is no whole number"),
        (b"SOURCE=owner/name\nREVISION=main\n", r"config.env:3: REVISION=main: not a commit; write the 40"),
        (
            f"REVISION={'0' * 40}\n".encode(),
            r"config.env:2: REVISION has to be a commit of the SOURCE in the same file, and SOURCE is unset",
        ),
    ],
)
def test_an_unusable_config_is_an_error_of_one_line_with_its_location(add_variant, tmp_path, config, message):
    add_variant("v", "").write_bytes(b"VLLM_MODEL=weights/v\n" + config)

    with pytest.raises(ConfigError, match=message) as caught:
        variant.load("v", tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_config_without_a_model_is_refused(add_variant, tmp_path):
    add_variant("v", "VLLM_PORT=1\n")

    with pytest.raises(ConfigError, match="no VLLM_MODEL; add VLLM_MODEL=weights/<folder>"):
        variant.load("v", tmp_path)


def test_a_revision_is_inherited_only_with_its_source(add_variant, tmp_path):
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


def test_whatever_a_config_holds_it_loads_or_is_an_error_of_one_line(add_variant, tmp_path):
    committed = [(variant.load(name).folder / "config.env").read_bytes() for name in variant.names()]
    rng = random.Random(0)
    file = add_variant("v", "")
    messages: set[str] = set()
    for _ in range(MUTATIONS):
        file.write_bytes(_mutated(rng, committed))
        try:
            loaded = variant.load("v", tmp_path)
            assert not loaded.weights.is_file()  # no value breaks a path
        except SlimqwenError as error:
            messages.add(str(error))
    assert [message for message in messages if len(message.splitlines()) != 1] == []
    assert len(messages) > 100


def _mutated(rng: random.Random, texts: list[bytes]) -> bytes:
    """A config.env without BASE lines (no other variant is there) and with one to three random edits."""
    text = bytearray(rng.choice(texts).replace(b"BASE=", b"# "))
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text) + 1)
        match rng.randrange(4):
            case 0:
                text[start:start] = rng.choice(
                    (b"'", b'"', b"\n", b"\0", b"=", b"\xff", b"#", b"\\", b"{", b"\r")
                )
            case 1:
                del text[start : start + rng.randint(1, 12)]
            case 2:
                other = rng.choice(texts)
                text[start:start] = other[rng.randrange(len(other)) :][: rng.randint(1, 40)]
            case _:
                text[start : start + 1] = bytes([rng.randrange(256)])
    return bytes(text)
