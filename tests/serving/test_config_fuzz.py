"""Mutated config.env files: whatever is wrong with one is said in a SlimqwenError of one line."""

import random
import shutil
import string

import pytest

from slimqwen import variant
from slimqwen.errors import SlimqwenError
from slimqwen.serving.command import ServerCommand

VALUES = (
    *("", "0", "1", "-1", "2.5", "1e400", "NaN", "9" * 5000, "true", "null", "yes", "auto", "none", " "),
    *("[]", "{}", "[1]", '{"a": 1}', '{"method": "mtp"', "[" * 3000, '{"a":' * 3000, '""', "'", '"'),
    *("'[]'", "'{}'", '\'{"num_speculative_tokens": "x"}\'', "'{\"num_speculative_tokens\": -1}'", "a b"),
    *(
        "'{\"pass_config\": 5}'",
        "\0",
        "a\0b",
        "../..",
        "/",
        "~",
        "$HOME",
        "${X}",
        "#",
        "\\",
        "\ud7ff",
        "\u2028",
    ),
    *(
        "0.0.0.0",
        "::",
        "tiny",
        "no-such-variant",
        "a=b",
        "-",
        "--port",
        "4,x",
        ",",
        "1,2,3",
        "\x85",
        "é" * 300,
    ),
)
CHARACTERS = string.printable + "\0\x1b\x85\u2028é\U0001f600"


def _mutated(text: str, keys: list[str], rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 3)):
        lines = text.split("\n")
        number = rng.randrange(len(lines))
        key, equals, _ = lines[number].partition("=")
        position = rng.randrange(len(text) + 1)
        match rng.randrange(8):
            case 0 | 1 if equals:
                lines[number] = f"{key}={rng.choice(VALUES)}"
            case 2:
                lines.insert(number, f"{rng.choice(keys)}={rng.choice(VALUES)}")
            case 3:
                del lines[number]
            case 4:
                lines.insert(number, rng.choice(lines))
            case 5:
                lines = [text[:position] + rng.choice(CHARACTERS) + text[position:]]
            case 6:
                lines = [text[:position] + text[position + rng.randint(1, 9) :]]
            case _:
                lines = [text[:position]]
        text = "\n".join(lines)
    content = bytearray(text.encode())
    if content and rng.random() < 0.02:
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def _fuzz(count: int, root) -> tuple[int, dict[str, str]]:
    """Resolve mutated files: how many mutations were refused, and what was wrong with a refusal, by its kind."""
    names = variant.names()
    for name in names:
        (root / "experiments" / name).mkdir(parents=True)
        for file in ("config.env", "measurements.json"):
            shutil.copy(variant.load(name).folder / file, root / "experiments" / name / file)
    files = {name: root / "experiments" / name / "config.env" for name in names}
    texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    keys = sorted({line.partition("=")[0] for text in texts.values() for line in text.splitlines()})
    rng = random.Random(20)
    refused, faults = 0, {}
    for _ in range(count):
        name = rng.choice(names)
        content = _mutated(texts[name], keys, rng)
        files[name].write_bytes(content)
        try:
            ServerCommand.resolve(variant.load(name, root), platform=rng.choice(("cpu", "cuda"))).as_shell()
        except SlimqwenError as error:
            refused += 1
            if len(str(error).splitlines()) != 1:
                faults.setdefault(f"lines: {type(error).__name__} {str(error)[:60]!r}", repr(content))
        except Exception as error:
            faults.setdefault(f"{type(error).__name__}: {str(error)[:80]}", repr(content))
        files[name].write_text(texts[name], encoding="utf-8")
    return refused, faults


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.soak)])
def test_a_mutated_config_env_serves_or_is_refused_in_one_line(count, tmp_path):
    refused, faults = _fuzz(count, tmp_path)
    assert faults == {}
    assert count / 4 < refused < count
