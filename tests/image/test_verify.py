"""What an image says that it would run, held against `make serve`, and what its server's log says of its graphs."""

import dataclasses

import pytest

from slimqwen import variant
from slimqwen.image import verify
from slimqwen.plan import gpu_model
from slimqwen.plan.facts import TritonKernels
from slimqwen.serving import baked_cache
from tests.plan import example


def test_the_same_dry_run_at_another_path_has_no_difference(content):
    elsewhere = content.dry_run().replace(content.root, "/srv/x")
    assert verify.differences(elsewhere, "/srv/x", content) == []


def test_a_changed_flag_or_variable_is_told_on_both_sides(content):
    changed = (
        content.dry_run()
        .replace("--max-num-seqs 2", "--max-num-seqs 3")
        .replace("DO_NOT_TRACK=1", "DO_NOT_TRACK=0")
    )
    (lines,) = [verify.differences(changed, content.root, content)]
    assert lines == [
        "only the image has DO_NOT_TRACK=0 --max-num-seqs 3",
        "only here: DO_NOT_TRACK=1 --max-num-seqs 2",
    ]


def test_a_loopback_address_in_the_image_is_a_difference(content):
    deaf = content.dry_run().replace("--host 0.0.0.0", "--host 127.0.0.1")
    assert verify.differences(deaf, content.root, content) == [
        "only the image has --host 127.0.0.1",
        "only here: --host 0.0.0.0",
    ]


def test_an_image_with_a_compile_cache_has_every_graph_from_there(description):
    cached = description.model_copy(update={"cache": "0" * 64})
    loaded = "INFO [compile_watch.py:118] Graph backbone loaded from the compile cache in 0.41 s\n"
    compiled = "INFO [compile_watch.py:118] Graph eagle_head compiled in 12.50 s (no such key)\n"
    assert list(verify.compiled_anew(loaded, cached)) == []
    assert list(verify.compiled_anew(loaded + compiled, cached)) == [
        "eagle_head was compiled in 12.5 s: no such key"
    ]
    assert list(verify.compiled_anew("", cached)) == ["no graph was loaded"]
    assert list(verify.compiled_anew(compiled, description.model_copy(update={"cache": ""}))) == []


@pytest.mark.parametrize(
    ("capability", "libraries", "kernels", "faults"),
    [
        ("8.6", (), 2, 1),
        ("8.6", ("prefill",), 2, 0),
        ("8.6", ("prefill",), 1, 1),
        ("8.6", (), 0, 2),
        ("9.0", (), 0, 0),
    ],
)
def test_an_image_whose_cache_lacks_what_its_gpu_is_planned_to_compile_has_a_fault(
    content, monkeypatch, capability, libraries, kernels, faults
):
    plan = example.plan(backend="FLASHINFER", libraries=("prefill",))
    forms = TritonKernels(target="sm_86", kernels=[], left_out=[], forms=2, compiled_at_start=0)
    plan = plan.model_copy(update={"kernels": forms})
    monkeypatch.setattr(verify.start, "find_plans", lambda command, toolkit: {"a10g": plan})
    model = gpu_model.load_gpu_model(variant.repository_root(), "a10g")
    monkeypatch.setattr(verify.gpu_model, "read_gpu_models", lambda root: {"a10g": model})
    cache = baked_cache.BakedCache(
        machine={"compute capability": capability}, device="", flags={}, environment={}, graphs={},
        files={f"triton/{number}/k.cubin": "ab" for number in range(kernels)},
        libraries=dict.fromkeys(libraries, 1.0), archive_sha256="ab",
    )  # fmt: skip
    on_gpu = dataclasses.replace(content, command=dataclasses.replace(content.command, platform="cuda"))
    assert len(list(verify.compiled_late(cache, on_gpu))) == faults
    assert not list(verify.compiled_late(cache, content))
    assert not list(verify.compiled_late(None, on_gpu))
