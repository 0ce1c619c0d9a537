"""The hidden states of texts, layer by layer: those of the whole model, kept over a full disk and a kill."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from tinyworld.model import TinyShape, build, save_drafting_model

from slimqwen.models import hidden_states
from slimqwen.models.hidden_states import store_hidden_states
from slimqwen.models.language_model import load_language_model, load_layer
from slimqwen.models.mtp_head import load_drafting_model
from slimqwen.progress import silent
from tests.checkpoints import TINY, count_layers_in_memory
from tests.zoo.published_forms import PUBLISHED_FORMS

TEXTS = [[5, 600, 7000, 42], [8191, 0, 3, 3, 77, 1000, 4096]]


def whole_states(folder: Path, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        states: torch.Tensor = load_language_model(folder).model(torch.tensor([ids])).last_hidden_state
    return states


@pytest.mark.parametrize("name", ["text", "multimodal-w4a16", "qwen3"])
def test_layers_one_by_one_give_the_states_of_the_whole_model(name: str, tmp_path: Path) -> None:
    folder = PUBLISHED_FORMS[name].build(tmp_path / name)
    texts = TEXTS if name != "qwen3" else [[5, 60, 7], [8, 0, 3, 3]]
    stored = store_hidden_states(folder, texts, tmp_path / "states", torch.float32, silent)
    assert all(
        torch.equal(states, whole_states(folder, ids)) for ids, states in zip(texts, stored, strict=True)
    )
    assert len(list((tmp_path / "states").iterdir())) == 1, "the states between layers are deleted"


@pytest.mark.parametrize("layers", [2, 8])
def test_one_layer_at_a_time_is_in_memory(
    layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_drafting_model(build(TinyShape(num_hidden_layers=layers), seed=0), tmp_path)
    counts = count_layers_in_memory(monkeypatch)
    store_hidden_states(tmp_path, TEXTS, tmp_path / "states", torch.float32, silent)
    assert counts == [1] * layers
    load_drafting_model(tmp_path, with_layers=False)
    assert counts[-1] == 0


def test_a_full_disk_is_an_error_before_states_are_mapped_and_a_later_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping of a file without blocks would end the process by a SIGBUS."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(hidden_states.os, "posix_fallocate", refuse)
        with pytest.raises(OSError, match="No space left"):
            store_hidden_states(TINY, TEXTS, tmp_path, torch.float32, silent)
    states = store_hidden_states(TINY, TEXTS, tmp_path, torch.float32, silent)
    assert torch.equal(states[1], whole_states(TINY, TEXTS[1]))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_blocks * 512 >= file.stat().st_size


def test_states_go_on_with_the_layer_at_which_a_run_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def load_until_killed(folder: Path, number: int, *arguments: Any, **options: Any) -> Any:
        loaded.append(number)
        if loaded == [0, 1, 2]:
            raise KeyboardInterrupt
        return load_layer(folder, number, *arguments, **options)

    monkeypatch.setattr(hidden_states, "load_layer", load_until_killed)
    with pytest.raises(KeyboardInterrupt):
        store_hidden_states(TINY, TEXTS, tmp_path, torch.float32, silent)
    resumed = store_hidden_states(TINY, TEXTS, tmp_path, torch.float32, silent)
    assert loaded == [0, 1, 2, 2, 3]
    assert torch.equal(resumed[1], whole_states(TINY, TEXTS[1]))
    store_hidden_states(TINY, TEXTS, tmp_path, torch.float32, silent)
    assert loaded == [0, 1, 2, 2, 3]
