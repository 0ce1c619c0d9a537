"""`scripts/package_client.py`: uv and pip take packages from the same places, and put them nowhere else."""

import hashlib
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import package_client
import pytest

UV = Path(sys.prefix, "uv", "bin", "uv")


def write_wheel(folder, name, version):
    """A wheel with one module; returns its line of a lock."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD")))
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An empty environment with pip."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=True)
    return folder


@pytest.fixture
def offline(monkeypatch):
    """No settings of this machine's pip but those of a test."""
    for name in [*os.environ]:
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture(params=["uv", "pip"])
def client(request, environment, offline, tmp_path, monkeypatch):
    """A client by each program, of wheels in tmp_path / "wheels"."""
    if request.param == "uv" and not UV.exists():
        pytest.skip("this environment was made by pip, without uv")
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    client = package_client.PackageClient(environment / "bin" / "python", tmp_path / "log")
    client.uv = UV if request.param == "uv" else None
    return client


def site_packages(environment):
    return next(environment.glob("lib/python3.*/site-packages"))


def test_settings_are_pips_by_pips_precedence_and_those_of_places_alone(
    environment, offline, tmp_path, monkeypatch
):
    (tmp_path / "there").mkdir()
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://a/simple\ntimeout = 9\nuser = true\nquiet = 1\nconstraint = c.txt\n"
        "extra-index-url =\n    https://b/simple\n    https://c/simple\n"
        "[install]\nindex-url = https://d/simple\nproxy = p:1\n[wheel]\nindex-url = https://e/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path}/gone {tmp_path}/there https://f/")
    monkeypatch.setenv("PIP_PROXY", "q:2")
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_CERT", "/cert.pem")
    for name in ("PIP_TARGET", "PIP_USER", "PIP_QUIET"):
        monkeypatch.setenv(name, "1")
    settings = package_client.read_settings(environment / "bin" / "python")
    assert settings == {
        "index-url": "https://d/simple",
        "timeout": "9",
        "extra-index-url": "\nhttps://b/simple\nhttps://c/simple",
        "proxy": "q:2",
        "find-links": f"{tmp_path}/there https://f/",
        "cert": "/cert.pem",
    }
    assert "--extra-index-url https://c/simple" in " ".join(package_client.pip_options(settings))
    words = " ".join(package_client.uv_options(settings))
    assert "--default-index https://d/simple --index https://b/simple --index https://c/simple" in words
    assert f"--find-links {tmp_path}/there --find-links https://f/ --cert /cert.pem" in words
    assert package_client.uv_environment(settings)["HTTPS_PROXY"] == "q:2"


def test_settings_that_pip_cannot_read_are_refused_in_one_line(environment, tmp_path, monkeypatch):
    (tmp_path / "pip.conf").write_text("no section\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    with pytest.raises(
        package_client.InstallError, match=r"pip cannot read its settings: .*pip\.conf"
    ) as refused:
        package_client.read_settings(environment / "bin" / "python")
    assert "\n" not in str(refused.value)


def test_no_setting_sends_packages_elsewhere(client, environment, tmp_path, monkeypatch):
    (tmp_path / "pip.conf").write_text("[install]\nuser = true\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    for name in ("PIP_TARGET", "PIP_PREFIX", "UV_TARGET", "UV_PREFIX"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    name = f"placed_{client.uv is not None}".lower()
    client.install("one", write_wheel(tmp_path / "wheels", name, "1"))
    assert (site_packages(environment) / f"{name}.py").exists()
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_the_lock_does_not_know_is_refused_in_one_line(client, environment, tmp_path):
    line = write_wheel(tmp_path / "wheels", "changed", "1")
    wrong = line.partition("sha256:")[0] + "sha256:" + "0" * 64
    with pytest.raises(
        package_client.InstallError, match=r"Hash mismatch for .?changed.*another file than"
    ) as refused:
        client.install("packages", wrong, "--require-hashes")
    assert "\n" not in str(refused.value)
    assert not (site_packages(environment) / "changed.py").exists()
    client.install("packages", line, "--require-hashes")
    assert (site_packages(environment) / "changed.py").exists()
    (site_packages(environment) / "changed.py").unlink()
    subprocess.run([client.python, "-m", "pip", "uninstall", "-qy", "changed"], check=True)


def test_a_pin_without_a_hash_in_a_lock_is_refused(client, tmp_path):
    write_wheel(tmp_path / "wheels", "bare", "1")
    with pytest.raises(package_client.InstallError, match=r"bare==1|require-hashes"):
        client.install("packages", "bare==1\n", "--require-hashes")


def test_a_package_that_no_index_has_is_told_from_other_failures(client):
    with pytest.raises(package_client.NotInIndexError):
        client.install("packages", "nowhere==1\n")


def test_the_build_of_the_second_index_is_found(client, environment, tmp_path):
    client.settings = {}
    for place, version in (("first", "1"), ("second", "1+cpu")):
        folder = tmp_path / place / "build"
        write_wheel(folder, "build", version)
        (file,) = folder.glob("*.whl")
        (folder / "index.html").write_text(f'<a href="{file.as_uri()}">{file.name}</a>')
    client.settings["index-url"] = (tmp_path / "first").as_uri()
    client.settings["extra-index-url"] = (tmp_path / "second").as_uri()
    client.install("torch", "build==1+cpu\n")
    assert "1+cpu" in (site_packages(environment) / "build.py").read_text()


def test_pip_goes_on_where_uv_reaches_no_index(client, environment, tmp_path, capsys):
    if client.uv is None:
        pytest.skip("about uv")
    client.uv = tmp_path / "uv"
    client.uv.write_text(
        "#!/bin/sh\necho 'error: Failed to fetch: x'; echo '  cause: UnknownIssuer'; exit 2\n"
    )
    client.uv.chmod(0o755)
    client.install("packages", write_wheel(tmp_path / "wheels", "later", "1"))
    assert (
        "uv does not reach the package index (Failed to fetch: x: UnknownIssuer); pip tries"
        in capsys.readouterr().out
    )
    assert (site_packages(environment) / "later.py").exists()
    assert client.uv is None


def test_without_uv_in_the_index_pip_installs_and_says_so(client, tmp_path, capsys):
    client.uv = None
    (tmp_path / "uv.txt").write_text("uv==0.0.1\n")
    client.fetch_uv(tmp_path / "uv.txt", tmp_path / "own")
    assert client.uv is None
    assert "uv cannot be had, so pip installs" in capsys.readouterr().out


def test_a_long_step_into_a_file_says_now_and_then_that_it_is_at_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(package_client, "LINE_S", 0.5)
    command = [sys.executable, "-u", "-c", "import time; print('Downloading torch'); time.sleep(2)"]
    assert package_client.run_logged("packages", command, tmp_path / "log") == (0, ["Downloading torch"])
    assert "s, Downloading torch" in capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "log").read_text() == "Downloading torch\n"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["error: Failed to download `a==1`", "  cause: Hash mismatch for `a==1`"],
            "Failed to download `a==1`: Hash mismatch for `a==1`",
        ),
        (
            ["ERROR: first", "ERROR: No matching distribution found for a"],
            "No matching distribution found for a",
        ),
        (["error: a", "  cause: b", "  cause: c", "  cause: d"], "a: b: d"),
        (["said otherwise", ""], "said otherwise"),
        ([], "no message"),
    ],
)
def test_a_failure_is_one_line(lines, said):
    assert package_client.summarise(lines) == said


@pytest.mark.parametrize("program", ["uv", "pip"])
def test_a_full_disk_is_named_with_its_cure(program, tmp_path):
    client = package_client.PackageClient.__new__(package_client.PackageClient)
    client.log = tmp_path / "log"
    lines = {
        "uv": ["error: Failed to install: a.whl", "  cause: No space left on device (os error 28)"],
        "pip": ["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"],
    }[program]
    with pytest.raises(package_client.InstallError, match=r"No space left.*free some disk"):
        client._finish("packages", 2, lines, 0.0)
