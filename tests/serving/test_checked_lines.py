"""Lines that vLLM has accepted once are not checked by it again; whatever the check depends on makes it run again."""

import json

import pytest

from slimqwen import host, variant
from slimqwen.identity.source import reach
from slimqwen.serving import checked_lines, flags
from slimqwen.variant import ConfigError

_LINES = (
    "VLLM_MODEL=weights/v\nVLLM_MAX_NUM_SEQS=8\nVLLM_ENFORCE_EAGER=0\nOMP_NUM_THREADS=2\n"
    'VLLM_CUDAGRAPH_CAPTURE_SIZES=5,10\nVLLM_SPECULATIVE_CONFIG=\'{"method": "mtp", "num_speculative_tokens": 4}\'\n'
)


@pytest.fixture
def checks(monkeypatch):
    """The variants that vLLM has checked."""
    variants = []
    check = flags.resolve
    monkeypatch.setattr(flags, "resolve", lambda subject: variants.append(subject.name) or check(subject))
    return variants


@pytest.fixture
def resolve(add_variant, tmp_path):
    def resolved(lines=_LINES, name="v"):
        file = tmp_path / "experiments" / name / "config.env"
        if file.exists():
            file.write_text(lines, encoding="utf-8")
        else:
            add_variant(name, lines)
        return checked_lines.resolve(variant.load(name, tmp_path))

    return resolved


def files(root):
    return list((root / ".cache" / "flags").iterdir())


def test_the_same_lines_are_checked_once_and_say_the_same(resolve, checks, tmp_path):
    first, second = resolve(), resolve()

    assert checks == ["v"]
    assert second == first == flags.resolve(variant.load("v", tmp_path))
    assert second.flags["max-num-seqs"].setting.location == "experiments/v/config.env:2"
    assert [file.suffix for file in files(tmp_path)] == [".json"]


def test_the_same_lines_of_another_variant_name_its_own_file(resolve, checks):
    resolve()
    other = resolve(name="w")

    assert checks == ["v"]
    assert other.flags["max-num-seqs"].setting.location == "experiments/w/config.env:2"


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(host, "detect", lambda: "cuda"),
        lambda patch: patch.setattr(checked_lines, "_check", lambda: ["another vLLM"]),
    ],
)
def test_another_machine_or_another_vllm_checks_again(resolve, checks, monkeypatch, change):
    resolve()
    change(monkeypatch)
    resolve()

    assert checks == ["v", "v"]


def test_the_check_is_of_its_code_with_own_keys_and_of_installed_versions():
    checked = reach("slimqwen.serving.flags.resolve")
    assert checked_lines._check() == [checked.digest, checked.versions()]
    assert {"vllm", "torch"} <= checked.versions().keys()
    assert "OWN_KEYS" in checked.names["slimqwen.variant.config_env"]


def test_a_changed_or_unset_line_is_checked_again(resolve, checks):
    resolve()
    resolve(_LINES.replace("SEQS=8", "SEQS=9"))
    resolve(_LINES + "VLLM_PORT=\n")

    assert len(checks) == 3


def test_a_refusal_is_not_kept(resolve, checks, tmp_path):
    for _ in range(2):
        with pytest.raises(ConfigError, match="VLLM_MAX_NUM_SEQ is neither"):
            resolve(_LINES + "VLLM_MAX_NUM_SEQ=8\n")

    assert len(checks) == 2
    assert not (tmp_path / ".cache").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"flags": {"port": 1}, "environment": {}})])
def test_a_damaged_file_is_replaced(resolve, checks, tmp_path, content):
    first = resolve()
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_text(content)

    assert resolve() == first
    assert file.read_bytes() == whole
    assert len(checks) == 2


def test_a_folder_that_may_not_be_written_is_no_error(resolve, checks, tmp_path):
    (tmp_path / ".cache").write_text("not a folder")

    assert resolve() == resolve()
    assert len(checks) == 2


def test_a_folder_in_the_place_of_a_file_is_no_error_and_nothing_is_left(resolve, checks, tmp_path):
    first = resolve()
    (file,) = files(tmp_path)
    file.unlink()
    file.mkdir()

    assert resolve() == first
    assert files(tmp_path) == [file]
    assert len(checks) == 2
