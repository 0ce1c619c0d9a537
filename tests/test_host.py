from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimqwen import host


def test_cores_that_this_process_may_not_use_are_not_counted(monkeypatch):
    monkeypatch.setattr(host.psutil, "cpu_count", lambda logical: 8)

    for allowed, counted in (({3}, 1), (set(range(16)), 8)):
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid, allowed=allowed: allowed)
        assert host.physical_cores() == counted


@pytest.fixture
def torch_package(tmp_path, monkeypatch):
    """A folder in which torch is, with its OpenMP library."""
    library = tmp_path / "torch/lib/libgomp.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", {"torch": spec}.get)
    return library


def test_torchs_openmp_library_is_preloaded_beside_what_the_shell_preloads(torch_package):
    assert host.preloaded_libraries({}) == {"LD_PRELOAD": str(torch_package)}
    both = host.preloaded_libraries({"LD_PRELOAD": "/lib/libtcmalloc.so"})
    assert both == {"LD_PRELOAD": f"/lib/libtcmalloc.so:{torch_package}"}


@pytest.mark.parametrize("library", ["libiomp5.so", "libgomp.so.1", "libomp.so"])
def test_another_openmp_library_stays_alone(torch_package, library):
    assert host.preloaded_libraries({"LD_PRELOAD": library}) == {}


def test_nothing_is_preloaded_where_the_loader_would_split_the_path(torch_package, monkeypatch, tmp_path):
    (tmp_path / "torch").rename(tmp_path / "my torch")
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "my torch/__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", {"torch": spec}.get)
    assert host.preloaded_libraries({}) == {}
    monkeypatch.setattr("importlib.util.find_spec", {}.get)
    assert host.preloaded_libraries({}) == {}


@pytest.fixture
def user(monkeypatch):
    """The user that this process seems to run under: a name and home, or none."""

    def make(home=None):
        def look_up(uid):
            if home is None:
                raise KeyError(uid)
            return SimpleNamespace(pw_dir=str(home))

        monkeypatch.setattr(host.pwd, "getpwuid", look_up)

    return make


def test_a_user_with_a_home_and_a_name_keeps_them(user, tmp_path):
    user(tmp_path)
    assert host.user_variables({}, Path("/checkout")) == {}
    user(None)
    assert host.user_variables({"HOME": str(tmp_path), "LOGNAME": "x"}, Path("/checkout")) == {}


@pytest.mark.parametrize("home", [{}, {"HOME": ""}, {"HOME": "/nowhere"}, {"HOME": "/proc"}])
def test_a_user_without_them_gets_both(user, home, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("os.getuid", lambda: 54321)
    user(None)
    assert host.user_variables(home, Path("/checkout")) == {
        "USER": "54321",
        "HOME": "/checkout/.cache/home",
    }
    user(Path("/root"))
    assert host.user_variables(home, Path("/checkout")) == {"HOME": "/checkout/.cache/home"}
