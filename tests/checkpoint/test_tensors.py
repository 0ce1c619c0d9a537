"""Tensors survive every way through: written, read, selected and rewritten."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from slimqwen import checkpoint
from slimqwen.checkpoint.tensors import (
    NewTensor,
    find_output_head,
    from_ids,
    from_torch,
    list_tensors,
    rewrite,
    selected_rows,
    write_tensors,
)
from tests.checkpoints import new_tensor

same_folder = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


SIZES = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}


contents = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(sorted(SIZES)), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
    max_size=6,
)


@same_folder
@given(wanted=contents, seed=st.randoms(use_true_random=False))
def test_written_tensors_read_back_here_and_by_the_format_s_own_reader(
    tmp_path: Path, wanted: dict[str, tuple[str, tuple[int, ...]]], seed: "st.random.Random"
) -> None:
    file = tmp_path / "model.safetensors"
    bytes_of = {}
    new = {}
    for name, (dtype, shape) in wanted.items():
        size = NewTensor(dtype, shape, list).bytes
        bytes_of[name] = seed.randbytes(size)
        new[name] = new_tensor(dtype, shape, bytes_of[name])
    write_tensors(file, new)
    found = list_tensors(tmp_path)
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == wanted
    assert {name: b"".join(info.chunks()) for name, info in found.items()} == bytes_of
    with safe_open(file, "pt") as reader:
        for name, (_, shape) in wanted.items():
            assert tuple(reader.get_tensor(name).shape) == shape


def test_rewriting_keeps_every_tensor_and_the_index_or_drops_and_replaces_some(
    folder: Path, tmp_path: Path
) -> None:
    copy, changed = tmp_path / "copy", tmp_path / "changed"
    for made in (copy, changed):
        made.mkdir()
    rewrite(folder, copy, lambda name, info: None)
    before, after = list_tensors(folder), list_tensors(copy)
    assert {name: b"".join(info.chunks()) for name, info in before.items()} == {
        name: b"".join(info.chunks()) for name, info in after.items()
    }
    assert json.loads((copy / "model.safetensors.index.json").read_text()) == json.loads(
        (folder / "model.safetensors.index.json").read_text()
    )
    changes = {
        "a": {},
        "b": {"b.packed": new_tensor("U8", (2,), b"xy"), "b.scale": new_tensor("BF16", (1,), b"zz")},
    }
    rewrite(folder, changed, lambda name, info: changes.get(name))
    assert sorted(list_tensors(changed)) == ["b.packed", "b.scale", "c"]


def test_rewriting_holds_no_more_than_a_few_chunks(tmp_path: Path) -> None:
    source, copy = tmp_path / "large", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    megabyte = bytes(2**20)
    write_tensors(
        source / "model.safetensors", {"a": NewTensor("U8", (160, 2**20), lambda: [megabyte] * 160)}
    )
    tracemalloc.start()
    rewrite(source, copy, lambda name, info: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * 2**20
    assert checkpoint.digest(source) == checkpoint.digest(copy)


def test_ids_and_torch_tensors_are_written_in_their_dtypes(tmp_path: Path) -> None:
    new = {
        "ids": from_ids(np.array([3, 2**40])),
        "floats": from_torch(torch.tensor([[1.5, 2.0]]), "BF16"),
        "counts": from_torch(torch.tensor([7], dtype=torch.int32), "BF16"),
    }
    write_tensors(tmp_path / "model.safetensors", new)
    read = {name: info.unchanged().read() for name, info in list_tensors(tmp_path).items()}
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in read.items()} == {
        "ids": (torch.int64, [3, 2**40]),
        "floats": (torch.bfloat16, [[1.5, 2.0]]),
        "counts": (torch.int32, [7]),
    }


def test_selected_rows_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.arange(24, dtype=torch.int32).reshape(8, 3)
    write_tensors(tmp_path / "model.safetensors", {"a": from_torch(table, "BF16")})
    (info,) = list_tensors(tmp_path).values()
    rows = np.array([0, 2, 3, 7])
    for block_bytes in (1, 24, 36, 2**20):
        monkeypatch.setattr("slimqwen.checkpoint.tensors._ROWS_BLOCK_BYTES", block_bytes)
        assert torch.equal(selected_rows(info, rows).read(), table[rows])
    assert torch.equal(info.rows(2, 5).read(), table[2:5])


def test_a_tensor_that_does_not_fill_its_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a gave 3 bytes, its shape needs 4"):
        write_tensors(tmp_path / "model.safetensors", {"a": new_tensor("U8", (4,), b"abc")})


def test_the_output_head_is_lm_head_or_the_embedding_of_the_language_model() -> None:
    tied = ["mtp.embed_tokens.weight", "model.embed_tokens.weight", "mtp.draft_head.weight"]
    packed = ["lm_head.weight_packed", "lm_head.weight_scale"]
    assert find_output_head(tied) == ["model.embed_tokens.weight"]
    assert find_output_head(iter([*tied, *packed])) == packed
    assert find_output_head(["model.visual.patch_embed.weight"]) == []
