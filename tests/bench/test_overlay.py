import pytest

from slimqwen.bench import BenchError, overlay
from slimqwen.plan import start
from slimqwen.serving import checks
from slimqwen.serving import platform as machine
from slimqwen.variant import load

CONFIG = {"VLLM_ENABLE_PREFIX_CACHING": "1"}


@pytest.mark.parametrize("name", ["tiny", "tiny-mtp4"])
def test_a_workload_that_needs_prefix_caching_is_served_with_the_variants_own_drafts(name):
    variant = load(name)
    changed, lines = overlay.servable(variant, CONFIG, "prefix_cache")
    assert changed.settings["VLLM_ENABLE_PREFIX_CACHING"].value == "1"
    assert changed.settings.get("VLLM_SPECULATIVE_CONFIG") == variant.settings.get("VLLM_SPECULATIVE_CONFIG")
    assert lines == CONFIG


def test_known_trouble_is_a_reason_to_serve_without_mtp(monkeypatch):
    trouble = checks.Trouble("would give other tokens on cpu", "no drafts", "a record")

    def match(command):
        return start.StartTrouble((trouble,) if "speculative-config" in command.flags else (), ())

    # A platform that takes both, as a GPU does.
    monkeypatch.setattr(machine, "GPU_ONLY", ())
    monkeypatch.setattr(overlay.start, "match_flag_trouble", match)
    changed, lines = overlay.servable(load("tiny-mtp4"), CONFIG, "prefix_cache")
    assert lines["VLLM_SPECULATIVE_CONFIG"] == ""
    assert "VLLM_SPECULATIVE_CONFIG" not in changed.settings
    monkeypatch.setattr(overlay.start, "match_flag_trouble", lambda *_: start.StartTrouble((trouble,), ()))
    with pytest.raises(BenchError, match=r"it would give other tokens on cpu \(a record\)"):
        overlay.servable(load("tiny-mtp4"), CONFIG, "prefix_cache")


def test_a_line_that_the_platform_cannot_serve_is_one_error_with_the_reason():
    config = {"VLLM_CUDAGRAPH_CAPTURE_SIZES": "1,2"}
    with pytest.raises(BenchError, match="a CPU has no CUDA graphs"):
        overlay.servable(load("tiny-mtp4"), config, "prefix_cache")
