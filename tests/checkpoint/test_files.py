"""A damaged checkpoint is an error of one line, and nothing half-made is visible."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimqwen import checkpoint
from slimqwen.checkpoint import CorruptCheckpointError, Manifest, MissingCheckpointError
from slimqwen.checkpoint.files import (
    COMPILE_CACHE,
    MANIFEST,
    bytes_on_disk,
    carry_all,
    carry_side_files,
    kept_token_ids,
    publish,
    side_files,
    tree_records,
    withdraw,
)
from slimqwen.checkpoint.tensors import (
    list_tensors,
    rewrite,
    write_tensors,
)
from slimqwen.errors import SlimqwenError
from tests.checkpoints import new_tensor, with_manifest

CURE = "`make it` makes it"
WEIGHTS = ("model-00001.safetensors", "model-00002.safetensors", "model.safetensors.index.json")
same_folder = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_a_sound_checkpoint_passes(folder: Path) -> None:
    checkpoint.check_folder(folder, CURE)
    assert {name: info.shape for name, info in list_tensors(folder).items()} == {
        "a": (2, 3),
        "b": (1,),
        "c": (5,),
    }


@pytest.mark.parametrize("exists", [True, False])
def test_a_missing_or_empty_folder_names_the_command_that_fills_it(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "none"
    if exists:
        folder.mkdir()
    with pytest.raises(MissingCheckpointError, match=f"{folder}; {CURE}"):
        checkpoint.check_folder(folder, CURE)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.json", ""),
        ("tokenizer.json", ""),
        ("tokenizer_config.json", ""),
        ("model-00002.safetensors", "index.json lists "),
    ],
)
def test_a_missing_file_is_named_with_the_cure(folder: Path, name: str, said: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{said}{name}.*missing.*{CURE}"):
        checkpoint.check_folder(folder, CURE)


@same_folder
@given(data=st.data())
def test_a_shard_cut_anywhere_is_noticed(folder: Path, data: st.DataObject) -> None:
    shard = folder / "model-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    try:
        with pytest.raises(CorruptCheckpointError, match=shard.name):
            checkpoint.check_folder(folder, CURE)
    finally:
        shard.write_bytes(whole)


@same_folder
@given(data=st.data())
def test_no_damage_to_a_header_ends_in_a_traceback(folder: Path, data: st.DataObject) -> None:
    shard = folder / "model-00002.safetensors"
    whole = shard.read_bytes()
    header = len(whole) - 18
    position, byte = data.draw(st.integers(0, header - 1)), data.draw(st.integers(0, 255))
    shard.write_bytes(whole[:position] + bytes([byte]) + whole[position + 1 :])
    try:
        checkpoint.check_folder(folder, CURE)
    except CorruptCheckpointError as error:
        message = str(error)
    else:
        message = CURE
    finally:
        shard.write_bytes(whole)
    assert message.endswith(CURE)


def test_bytes_after_the_last_tensor_are_noticed(folder: Path) -> None:
    with (folder / "model-00001.safetensors").open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(CorruptCheckpointError, match="is too long"):
        checkpoint.check_folder(folder, CURE)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"architectures": []}'])
def test_a_config_that_names_no_architecture_is_corrupt(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(CorruptCheckpointError, match=r"config\.json"):
        checkpoint.check_folder(folder, CURE)


def test_an_index_that_leaves_out_a_tensor_is_noticed(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["c"]
    index.write_text(json.dumps(content))
    with pytest.raises(CorruptCheckpointError, match=r"c is in no file, but model-00002\.safetensors"):
        checkpoint.check_folder(folder, CURE)


@pytest.mark.parametrize(
    "content",
    [{"base_model.lora_A.weight": ("BF16", (1, 1), b"xx")}, {"a": ("BF16", (2, 3), b"a" * 12)}],
    ids=["an adapter", "a copy"],
)
def test_a_file_that_the_index_does_not_name_is_not_read_and_not_passed_on(
    folder: Path, tmp_path: Path, content: dict[str, tuple[str, tuple[int, ...], bytes]]
) -> None:
    before = list_tensors(folder)
    write_tensors(folder / "other.safetensors", {name: new_tensor(*form) for name, form in content.items()})
    checkpoint.check_folder(folder, CURE)
    assert list_tensors(folder) == before
    (copy := tmp_path / "copy").mkdir()
    rewrite(folder, copy, lambda name, info: None)
    carry_side_files(folder, copy)
    assert not (copy / "other.safetensors").exists()


def test_without_an_index_the_files_are_named_and_what_to_do_with_the_others(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(
        CorruptCheckpointError,
        match=r"2 files of weights \(model-00001\.safetensors, .*move the files away that do not belong",
    ):
        checkpoint.check_folder(folder, CURE)


def test_what_decides_prompts_and_the_licence_go_along_and_results_of_a_stage_do_not(
    folder: Path, tmp_path: Path
) -> None:
    passed = {
        *(
            "LICENSE",
            "NOTICE.md",
            "chat_template.json",
            "additional_chat_templates/tool_use.jinja",
            "merges.txt",
        ),
        *("special_tokens_map.json", "added_tokens.json", "preprocessor_config.json", "modeling_custom.py"),
    }
    left = {
        *("README.md", "manifest.json", ".gitattributes", ".cache/x", "model.gguf", "pytorch_model.bin"),
        *(
            "sampled_outputs.jsonl",
            "redistill_mtp.json",
            "compile_cache.json",
            "pytorch_model.bin.index.json",
        ),
    }
    for name in passed | left:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    (copy := tmp_path / "copy").mkdir()
    carry_side_files(folder, copy)
    found = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert found == passed | {"tokenizer.json", "tokenizer_config.json"}


TRAINER = (
    *("checkpoint-40/model.safetensors", "checkpoint-40/config.json", "checkpoint-40/optimizer.pt"),
    *(
        "global_step200/mp_rank_00_model_states.pt",
        "runs/Nov01/events.out.tfevents.1.host.1.0",
        "wandb/run.json",
    ),
    *(
        "optimizer.pt",
        "scheduler.pt",
        "rng_state_0.pth",
        "optimizer.bin",
        "random_states_0.pkl",
        "training_args.bin",
    ),
    *(
        "trainer_state.json",
        "all_results.json",
        "trainer_log.jsonl",
        "training_loss.png",
        "latest",
        "train.log",
    ),
    *(
        "zero_to_fp32.py",
        "model.safetensors.index.json.bak",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
    ),
    *(
        "pytorch_model.bin",
        "consolidated.safetensors",
        ".git/config",
        ".cache/huggingface/x",
        "1_Pooling/config.json",
    ),
)


def test_what_a_trainer_or_a_hub_leaves_beside_a_checkpoint_is_neither_counted_nor_hashed_nor_carried(
    folder: Path, tmp_path: Path
) -> None:
    before = checkpoint.digest(folder), bytes_on_disk(folder), side_files(folder).keys()
    for name in TRAINER:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    assert (checkpoint.digest(folder), bytes_on_disk(folder), side_files(folder).keys()) == before
    checkpoint.check_folder(folder, CURE)
    (copy := tmp_path / "copy").mkdir()
    carry_all(folder, copy)
    assert {path.name for path in copy.iterdir()} == {*before[2], "config.json", *WEIGHTS}


def test_a_manifest_that_lists_what_is_no_longer_counted_still_verifies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slimqwen.checkpoint.files.check_tensors", lambda folder: None)
    (folder / "runs").mkdir()
    (folder / "runs" / "events").write_text("carried by a stage of before")
    manifest = Manifest.read(with_manifest(folder))
    listed = {**manifest.files, "runs/events": tree_records(folder)["runs/events"]}
    manifest.model_copy(update={"files": listed}).write(folder)
    checkpoint.verify(folder, CURE)


def test_the_digest_is_the_same_with_and_without_a_manifest(folder: Path) -> None:
    plain = checkpoint.digest(folder)
    with_manifest(folder)
    assert checkpoint.digest(folder) == plain


@pytest.mark.parametrize("name", ["config.json", "model-00001.safetensors", "tokenizer.json"])
def test_a_byte_changed_after_the_manifest_changes_the_digest(folder: Path, name: str) -> None:
    before = checkpoint.digest(with_manifest(folder))
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    assert checkpoint.digest(folder) != before


def test_files_of_tools_and_a_compile_cache_do_not_enter_the_digest(folder: Path) -> None:
    before = checkpoint.digest(folder)
    (folder / ".cache").mkdir()
    for name in (".cache/download.json", *COMPILE_CACHE):
        (folder / name).write_text("of this baking")
    assert checkpoint.digest(folder) == before
    with_manifest(folder)
    assert checkpoint.digest(folder) == before
    (folder / COMPILE_CACHE[0]).write_text("of other baking")
    with pytest.raises(CorruptCheckpointError, match="differs from manifest"):
        checkpoint.verify(folder, "make it anew")


@same_folder
@given(data=st.data())
def test_verification_catches_a_flipped_bit_in_any_file(folder: Path, data: st.DataObject) -> None:
    with_manifest(folder)
    names = sorted(file.name for file in folder.iterdir() if file.name != MANIFEST)
    file = folder / data.draw(st.sampled_from(names))
    whole = file.read_bytes()
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    file.write_bytes(damaged)
    try:
        with pytest.raises(CorruptCheckpointError, match=CURE):
            checkpoint.verify(folder, CURE)
    finally:
        file.write_bytes(whole)


def test_verification_names_files_that_the_manifest_does_not_list_or_that_are_gone(folder: Path) -> None:
    with_manifest(folder)
    (folder / "merges.txt").write_text("x")
    with pytest.raises(CorruptCheckpointError, match=r"merges\.txt is not listed"):
        checkpoint.verify(folder, CURE)
    with_manifest(folder)
    (folder / "merges.txt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"merges\.txt is missing"):
        checkpoint.verify(folder, CURE)


@pytest.mark.parametrize("content", [None, "", "{}", '{"schema_version": 2}'])
def test_verification_needs_a_readable_manifest(folder: Path, content: str | None) -> None:
    if content is not None:
        (folder / MANIFEST).write_text(content)
    with pytest.raises(CorruptCheckpointError, match=rf"manifest\.json.*{CURE}"):
        checkpoint.verify(folder, CURE)


def test_a_vocabulary_map_without_its_list_is_one_line(folder: Path) -> None:
    assert kept_token_ids(folder) is None
    (folder / "vocab_map.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=r"new_to_old.*make the checkpoint anew"):
        kept_token_ids(folder)


def test_a_published_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "store" / "name"
    with publish(target) as staging:
        (staging / "file").write_text("content")
        assert not target.exists()
    assert (target / "file").read_text() == "content"
    assert list((tmp_path / "store" / ".staging").iterdir()) == []


def test_a_failure_while_building_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "name"

    def build_and_fail() -> None:
        with publish(target) as staging:
            (staging / "half").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_and_fail()
    assert [path.name for path in tmp_path.rglob("*")] == [".staging"]


def test_publishing_does_not_overwrite(tmp_path: Path) -> None:
    target = tmp_path / "name"
    with publish(target) as staging:
        (staging / "file").write_text("first")
    with pytest.raises(SlimqwenError, match="name exists already"), publish(target) as staging:
        (staging / "file").write_text("second")
    assert (target / "file").read_text() == "first"


def test_what_a_killed_process_left_is_cleaned_and_what_a_living_one_builds_is_not(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, slimqwen.checkpoint.files as c\n"
        "with c.publish(pathlib.Path(sys.argv[1])) as staging:\n"
        "    (staging / 'half').write_text('half'); print('ready', flush=True); sys.stdin.read()\n"
    )

    def start(name: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-c", program, tmp_path / name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    killed, living = start("killed"), start("living")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    with publish(tmp_path / "next") as staging:
        left = {path.name.split(".")[0] for path in staging.parent.iterdir()}
    assert left == {"living", "next"}
    living.communicate()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".staging", "living", "next"]


def test_withdrawing_hides_before_it_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "name"
    with publish(target) as staging:
        (staging / "file").write_text("content")
    seen: list[bool] = []
    remove: Callable[..., None] = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path: (seen.append(target.exists()), remove(path)))
    withdraw(target)
    assert seen == [False]
    assert not target.exists()
