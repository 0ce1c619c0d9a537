"""What is damaged, and that nothing else is."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimqwen import checkpoint
from slimqwen.checkpoint.files import carry_all
from slimqwen.evals import EvalError
from tests.evals.damage import SWAPPED_SHARE, Damage, damage

ROOT = Path(__file__).parents[2]
TINY = ROOT / "weights" / "tiny"


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def changed(before: Path, after: Path) -> set[str]:
    a, b = loaded(before), loaded(after)
    assert a.keys() == b.keys()
    return {name for name in a if not torch.equal(a[name], b[name])}


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    """A stand-in for a quantised checkpoint: two layers of two scaled linears each."""
    folder = tmp_path / "quantised"
    folder.mkdir()
    carry_all(TINY, folder, [file.name for file in TINY.glob("*.safetensors*")])
    scales = {
        f"model.layers.{layer}.mlp.{name}.weight_scale": torch.rand(8, 4).bfloat16() + 1
        for layer in range(2)
        for name in ("up_proj", "down_proj")
    }
    head = {
        "mtp.layers.0.mlp.up_proj.weight_scale": torch.ones(8, 4).bfloat16(),
        "mtp.fc.weight_packed": torch.arange(24, dtype=torch.int32).reshape(4, 6),
        "mtp.fc.weight_scale": torch.ones(4, 1).bfloat16(),
    }
    save_file(scales | head | {"model.norm.weight": torch.ones(4)}, folder / "model.safetensors")
    return folder


def test_the_scales_of_one_layer_are_perturbed_and_stay_scales(quantised: Path, tmp_path: Path) -> None:
    seen = set()
    for seed in range(6):
        folder = tmp_path / str(seed)
        folder.mkdir()
        layer = damage(quantised, folder, Damage.SCALES, seed)
        names = changed(quantised, folder)
        assert names == {f"{layer}.mlp.{name}.weight_scale" for name in ("up_proj", "down_proj")}
        assert all((loaded(folder)[name] > 0).all() for name in names)
        seen.add(layer)
    assert seen == {"model.layers.0", "model.layers.1"}


def test_rows_change_places_and_are_the_same_rows(tmp_path: Path) -> None:
    name = damage(TINY, tmp_path, Damage.ROWS, 3)
    assert changed(TINY, tmp_path) == {name}
    before, after = (loaded(folder)[name].float() for folder in (TINY, tmp_path))
    moved = (before != after).any(1)
    assert int(moved.sum()) == pytest.approx(SWAPPED_SHARE * len(before), rel=0.02)
    assert torch.equal(before[moved].sum(1).sort().values, after[moved].sum(1).sort().values)


def test_a_head_is_shuffled_by_columns(tmp_path: Path) -> None:
    assert damage(TINY, tmp_path, Damage.HEAD, 0) == "mtp.fc.weight"
    assert changed(TINY, tmp_path) == {"mtp.fc.weight"}
    before, after = (loaded(folder)["mtp.fc.weight"].float() for folder in (TINY, tmp_path))
    assert torch.equal(before.sum(0).sort().values, after.sum(0).sort().values)
    checkpoint.check_folder(tmp_path, "it should be whole")


def test_packed_columns_of_a_quantised_head_are_shuffled(quantised: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    assert damage(quantised, folder, Damage.HEAD, 0) == "mtp.fc.weight"
    assert changed(quantised, folder) == {"mtp.fc.weight_packed"}
    before, after = (loaded(each)["mtp.fc.weight_packed"] for each in (quantised, folder))
    assert torch.equal(before.sort(1).values, after.sort(1).values)


def test_a_seed_decides(tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        damage(TINY, tmp_path / name, Damage.ROWS, seed)
        digests.append(checkpoint.digest(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]


def test_a_checkpoint_without_scales_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="weight_scale"):
        damage(TINY, tmp_path, Damage.SCALES, 0)
