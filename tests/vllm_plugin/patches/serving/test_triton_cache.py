"""Triton's cache after a move, by Triton's own cache manager; no kernel is compiled."""

import logging
import shutil
from types import SimpleNamespace

import pytest
from triton import knobs
from triton.runtime.cache import FileCacheManager

from slimqwen.vllm_plugin.patches.serving import triton_cache


@pytest.fixture
def manager(monkeypatch, tmp_path):
    """Make a cache manager below a folder; Triton's own `get_group` is put back afterwards."""
    monkeypatch.setattr(FileCacheManager, "get_group", FileCacheManager.get_group)
    monkeypatch.setattr(knobs.compilation, "listener", None)

    def make(folder):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        return FileCacheManager("KEY")

    return make


@pytest.fixture
def moved(manager, tmp_path):
    """A manager of a cache that was written elsewhere."""
    written = manager("written")
    written.put_group("k.json", {name: written.put(b"{}", name) for name in ("k.json", "k.cubin", "k.ttir")})
    shutil.move(tmp_path / "written", tmp_path / "moved")
    return manager("moved")


def test_a_kernel_is_found_where_its_cache_was_moved_to(moved, tmp_path):
    assert not moved.get_group("k.json")  # why it is changed: Triton would compile anew
    triton_cache.find_beside_group_file()
    triton_cache.find_beside_group_file()
    folder = tmp_path / "moved" / "KEY"
    assert moved.get_group("k.json") == {
        "k.json": str(folder / "k.json"),
        "k.cubin": str(folder / "k.cubin"),
        "k.ttir": str(folder / "k.ttir"),
    }
    (folder / "k.ttir").unlink()
    assert moved.get_group("k.json") is None


@pytest.mark.parametrize("content", ["", "{", "{}"])
def test_a_damaged_or_missing_group_file_is_no_kernel(moved, tmp_path, content):
    triton_cache.find_beside_group_file()
    assert moved.get_group("other.json") is None
    (tmp_path / "moved" / "KEY" / "__grp__k.json").write_text(content)
    assert moved.get_group("k.json") is None


def test_a_compilation_is_logged_and_a_hit_is_not(moved, tmp_path, caplog):
    caplog.set_level(logging.INFO, "slimqwen")
    triton_cache.log_compilations(tmp_path / "moved")
    said = {"src": SimpleNamespace(name="conv1d"), "metadata": {}, "metadata_group": {}}
    times = SimpleNamespace(total=1_250_000)
    knobs.compilation.listener(**said, times=times, cache_hit=True)
    assert "conv1d" not in caplog.text
    knobs.compilation.listener(**said, times=times, cache_hit=False)
    assert "Triton kernels from the compile cache: 1" in caplog.text
    assert "Triton kernel conv1d compiled in 1.25 s" in caplog.text
