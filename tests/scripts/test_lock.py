"""The locks, and `scripts/lock.py`, which writes their hashes."""

import re

import lock
import pytest

from slimqwen import variant

LOCKS = sorted(path.name for path in (variant.repository_root() / "requirements").glob("*.txt"))


@pytest.mark.parametrize("name", LOCKS)
def test_each_pin_but_torch_for_cpus_has_hashes(name):
    text = (variant.repository_root() / "requirements" / name).read_text()
    pins = [match[0] for match in re.finditer(r"^[^#\s](?:.*\\\n)*.*$", text, re.MULTILINE)]
    hashed = r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+(  # built from its source)?"
    unhashed = [pin for pin in pins if not re.fullmatch(hashed, pin)]
    assert pins
    assert unhashed == (["torch==2.13.0+cpu"] if name == "torch-cpu.txt" else [])


@pytest.mark.parametrize(
    ("wheel", "is_kept"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-py313-none-any.whl", True),
        ("a-1-py314-none-any.whl", False),
        ("a-1-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("a-1-cp312-cp312-manylinux_2_28_aarch64.whl", True),
        ("a-1-cp38-abi3-manylinux1_x86_64.whl", True),
        ("a-1-cp314-abi3-manylinux1_x86_64.whl", False),
        ("a-1-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp313-cp313t-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp312-cp312-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp312-cp312-win_amd64.whl", False),
        ("a-1-cp311-cp311-macosx_11_0_arm64.whl", False),
        ("a-1-cp311-cp311-manylinux_2_17_i686.whl", False),
        ("a-1-py2-none-any.whl", False),
    ],
)
def test_hashes_are_of_the_files_that_a_supported_host_may_install(wheel, is_kept):
    assert lock.fits(wheel) is is_kept


def test_a_package_without_wheels_has_the_hash_of_its_source():
    assert lock.files_of({"name": "a", "sdist": {"hashes": {"sha256": "1"}}}) == [{"hashes": {"sha256": "1"}}]
    of_another_system = {"url": "a-1-cp311-cp311-win_amd64.whl", "hashes": {"sha256": "2"}}
    with pytest.raises(SystemExit, match="no wheel of a fits"):
        lock.files_of({"name": "a", "wheels": [of_another_system], "sdist": {"hashes": {"sha256": "1"}}})
