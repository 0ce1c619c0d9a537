"""A build context holds one variant, whole and without links; what could only fail in an image is refused."""

import json
import shutil
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.checkpoint.files import file_records, sha256
from slimqwen.identity.effects import decisive_flags
from slimqwen.image import ImageError, context
from slimqwen.plan.record import PlanRecord
from slimqwen.records import provenance
from slimqwen.serving import baked_cache
from slimqwen.serving.command import ServerCommand
from tests.plan import example


def laid_out(content, tmp_path):
    folder = tmp_path / "context"
    folder.mkdir()
    context.lay_out(content, folder)
    return folder


def test_a_context_holds_the_lineage_the_checkpoint_and_the_library_and_no_link(content, tmp_path):
    folder = laid_out(content, tmp_path)
    assert not [path for path in folder.rglob("*") if path.is_symlink()]
    served = folder / "variant"
    assert (served / "weights" / "child" / "model.safetensors").stat().st_size > 1e6
    assert {path.name for path in (served / "experiments").iterdir()} == {"small", "child"}
    for needed in ("slimqwen/serving/server.py", "slimqwen/records/schemas.json", "scripts/serve.py"):
        assert (served / needed).is_file()
    assert (folder / "install" / "requirements" / "cpu.txt").is_file()
    assert not (folder / "install" / "requirements" / "cuda.txt").exists()
    assert "FROM ${BASE_IMAGE}" in (folder / "Dockerfile").read_text()
    digests, found = content.digests(), set()
    for part in ("install", "variant"):
        for file in (folder / part).rglob("*"):
            if file.is_file():
                name = file.relative_to(folder / part).as_posix()
                found.add(name)
                assert sha256(file) == digests[name]
                assert file.stat().st_mode & 0o777 == 0o644
    assert found == digests.keys()


def test_the_variant_that_is_laid_out_has_the_command_of_make_serve_but_for_the_address(
    content, repository, tmp_path
):
    served = laid_out(content, tmp_path) / "variant"
    here, there = (
        ServerCommand.resolve(variant.load("child", root), platform="cpu")
        .as_shell()
        .replace(str(root), "ROOT")
        for root in (repository, served)
    )
    pairs = zip(here.splitlines(), there.splitlines(), strict=True)
    different = [pair for pair in pairs if pair[0] != pair[1]]
    assert different == [("    --host 127.0.0.1 \\", "    --host 0.0.0.0 \\")]


@pytest.mark.parametrize("line", ["VLLM_HOST=", ""])
def test_a_variant_without_an_address_listens_everywhere_in_its_image(repository, add_variant, line):
    add_variant("bare", f"VLLM_MODEL=weights/child\nVLLM_SERVED_MODEL_NAME=default\n{line}")
    content = context.gather(variant.load("bare", repository), "cpu")
    text = content.replaced["experiments/bare/config.env"]
    assert (content.command.host, text.splitlines()[-1]) == ("0.0.0.0", "VLLM_HOST=0.0.0.0")
    assert text.count("VLLM_HOST") == 1


def test_a_later_promotion_makes_no_other_image_of_it(repository, content):
    digests = content.digests()
    file = repository / "experiments" / "child" / "measurements.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"status": "promoted"}))
    again = context.gather(variant.load("child", repository), "cpu")
    assert again.digests() == digests


def test_what_no_image_can_be_made_of_is_refused_in_one_line(repository, add_variant, tmp_path):
    add_variant("away", f"BASE=small\nVLLM_MODEL={variant.load('tiny').weights}\n")
    add_variant("gpu", "BASE=child\nPLATFORM=cuda\n")
    add_variant("compiled", "BASE=child\nVLLM_ENFORCE_EAGER=0\n")
    for name, platform, message in (
        ("away", "cpu", "outside the repository; copy it into weights/"),
        ("gpu", "cpu", "is served on cuda only; leave out --platform cpu"),
        ("compiled", "cpu", "has no baked compile cache; end its recipe with the stage bake_cache"),
        ("small", "cpu", "no checkpoint in"),
    ):
        with pytest.raises(Exception, match=message):
            context.gather(variant.load(name, repository), platform)


@pytest.fixture
def imported(repository: Path, add_variant, tmp_path) -> Path:
    """A cache as bake_cache leaves it on another host, for the variant compiled."""
    add_variant("compiled", "BASE=child\nVLLM_ENFORCE_EAGER=0\n")
    command = ServerCommand.resolve(
        context.listening_everywhere(variant.load("compiled", repository)), platform="cpu"
    )
    other = tmp_path / "other-host"
    shutil.copytree(repository / "weights" / "store" / "abc", other)
    place = tmp_path / "cache"
    graph = place / "vllm" / "torch_compile_cache" / "x" / "model"
    graph.parent.mkdir(parents=True)
    graph.write_bytes(b"compiled")
    baked_cache.pack_cache(
        place,
        other,
        machine=baked_cache.describe_machine("cpu")
        | {"python": "3.12.1", "environment": "/home/one/.venv", "cores": "64"},
        flags=decisive_flags(command.flags),
        environment=dict(command.variables),
        graphs={"backbone": 1.0},
    )
    manifest = checkpoint.Manifest.read(other)
    manifest.model_copy(update={"files": file_records(other)}).write(other)
    return other / baked_cache.ARCHIVE


@pytest.fixture
def trusted(imported: Path, repository: Path) -> Path:
    """The cache, imported by its hash."""
    baked_cache.import_archive(repository, imported, sha256(imported))
    return imported


def test_a_cache_of_another_host_is_refused_until_it_is_imported_by_its_hash(imported, repository):
    one = variant.load("compiled", repository)
    with pytest.raises(ImageError, match=f"code of another host.*add --trust-cache {sha256(imported)}"):
        context.gather(one, "cpu", imported)
    assert not (repository / baked_cache.TRUSTED).exists()


def test_a_cache_of_another_host_goes_in_at_the_path_it_was_made_at(trusted, repository, tmp_path):
    content = context.gather(variant.load("compiled", repository), "cpu", trusted)
    assert (content.root, content.cache.machine["python"]) == ("/home/one", "3.12.1")
    assert content.cache.archive_sha256 == sha256(trusted)
    folder = laid_out(content, tmp_path)
    assert (folder / "variant" / "weights" / "child" / baked_cache.ARCHIVE).is_file()
    # The image's own server may load it.
    assert baked_cache.find_origin(folder / "variant", content.cache) == "imported by its hash"


def test_a_cache_of_another_checkpoint_flags_or_versions_is_refused_with_the_differences(trusted, repository):
    imported = trusted
    one = variant.load("compiled", repository)
    beside = imported.parent / baked_cache.MANIFEST
    made = json.loads(beside.read_text())

    def refused() -> str:
        with pytest.raises(ImageError) as raised:
            context.gather(one, "cpu", imported)
        return str(raised.value)

    beside.write_text(json.dumps(made | {"machine": made["machine"] | {"vllm": "0.31.0+cpu"}}))
    assert "vllm was 0.31.0+cpu and is 0.32.0" in refused()
    beside.write_text(json.dumps(made | {"flags": made["flags"] | {"max-num-seqs": "7"}}))
    assert "--max-num-seqs was 7 and is 2" in refused()
    beside.write_text(json.dumps(made | {"archive_sha256": "0" * 64}))
    assert "is not the archive that compile_cache.json describes" in refused()
    beside.write_text(json.dumps(made))
    generation = imported.parent / "generation_config.json"
    generation.write_text("{}")
    manifest = checkpoint.Manifest.read(imported.parent)
    manifest.model_copy(update={"files": file_records(imported.parent)}).write(imported.parent)
    assert "generation_config.json of the checkpoint differs" in refused()
    beside.unlink()
    assert "copy compile_cache.tar.gz, compile_cache.json and manifest.json there" in refused()


def test_an_image_holds_the_newest_record_of_its_plans_and_what_a_start_reads_with_it(repository):
    (repository / "eval").mkdir(exist_ok=True)
    (repository / "eval" / "known_trouble.yaml").write_text("[]")
    written = {}
    for day, name, gpu in (
        (20, "child", "l4"),
        (21, "child", "a10g"),
        (22, "child", "a10g"),
        (22, "small", "l4"),
    ):
        record = PlanRecord(
            variant=name,
            plans=(example.plan(gpu=gpu),),
            provenance=provenance.circumstances(
                variant.repository_root(), ["slimqwen"], "2026-11-22T20:00:00Z"
            ),
        )
        file = f"experiments/{name}/plan_2026-11-{day}T200000Z.json"
        (repository / file).write_text(record.model_dump_json(by_alias=True, exclude_unset=True))
        written[day, name] = file
    served = context.gather(variant.load("child", repository), "cpu").served
    plans = {name for name in served if "/plan_" in name}
    assert plans == {written[22, "child"]}
    assert "eval/known_trouble.yaml" in served
