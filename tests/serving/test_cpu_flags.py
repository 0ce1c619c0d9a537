import pytest

from slimqwen import host
from slimqwen.serving import cpu_flags, flags


def test_every_row_names_a_flag_that_vllm_has():
    names = {flag.flag for flag in cpu_flags.GPU_ONLY}

    known = {key.removeprefix("VLLM_").lower().replace("_", "-") for key in flags.options()}
    assert names <= known
    assert all(row.why for row in cpu_flags.GPU_ONLY)


@pytest.mark.parametrize(
    ("flag", "value", "applies"),
    [
        ("dtype", "float16", True),
        ("dtype", "bfloat16", False),
        ("dtype", "auto", False),
        ("kv-cache-dtype", "auto", False),
        ("cudagraph-capture-sizes", [1, 2], True),
    ],
)
def test_a_row_applies_only_to_what_a_cpu_lacks(flag, value, applies):
    row = next(row for row in cpu_flags.GPU_ONLY if row.flag == flag)

    assert row.applies(value) is applies


def test_an_fp8_kv_cache_is_left_out_only_without_avx512(monkeypatch):
    row = next(row for row in cpu_flags.GPU_ONLY if row.flag == "kv-cache-dtype")

    for available in (True, False):
        monkeypatch.setattr(host, "has_avx512", lambda available=available: available)
        assert row.applies("fp8") is not available
