"""Baking on the embedded model: what is published hits in another place, and what cannot be used is said."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.checkpoint.files import MANIFEST, sha256
from slimqwen.errors import SlimqwenError
from slimqwen.recipe import recipe_file, runner
from slimqwen.recipe.recipe_file import Recipe, RecipeError
from slimqwen.recipe.stages import bake_cache
from slimqwen.recipe.stages.bake_cache import BakeCacheParameters
from slimqwen.serving import baked_cache
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.serving.server import free_port, run_server
from slimqwen.vllm_plugin.patches.serving import compile_watch
from tests.checkpoints import TINY, stage_output
from tests.identity.coverage_by_keys import every_stage_covered
from tests.recipe.repository_of_v import CONFIG, make_repository_of_v


def a_repository(root: Path, config: str = CONFIG) -> Path:
    return make_repository_of_v(root, "  - bake_cache:\n      prompt_tokens: [1, 300]\n", config)


def recipe_of(root: Path) -> Recipe:
    return recipe_file.read_recipe(root / "experiments" / "v" / "recipe.yaml")


def append(root: Path, lines: str) -> None:
    with (root / "experiments" / "v" / "recipe.yaml").open("a") as recipe:
        recipe.write(lines)


def parameters(root: Path) -> BakeCacheParameters:
    (step,) = recipe_of(root).steps
    assert isinstance(step.parameters, BakeCacheParameters)
    return step.parameters


def run(root: Path) -> runner.Outcome:
    (outcome,) = runner.run_recipe(
        recipe_of(root), "v", root / "weights", lambda base: root / "weights" / base
    )
    return outcome


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose only variant was baked by its recipe; its base has a packed embedding."""
    root = a_repository(tmp_path_factory.mktemp("repository"))
    base = root / "weights" / "tiny"
    base.unlink()
    stage_output("quantise_embedding", TINY, base)
    with every_stage_covered(tmp_path_factory.mktemp("calls")):
        run(root)
    return root


@pytest.mark.engine
def test_the_stage_publishes_the_checkpoint_with_a_cache_that_hit(repository: Path) -> None:
    folder = repository / "weights" / "v"
    facts = checkpoint.verify(folder, "").facts
    assert facts["graphs"] == 2
    assert 0 < float(facts["load_seconds"]) < float(facts["compile_seconds"])
    baked = baked_cache.read_manifest(folder)
    assert baked is not None
    assert set(baked.graphs) == {"backbone", "eagle_head"}
    # What a start would import vLLM for in a process of its own, once for each model.
    asked = {
        Path(name).stem.rpartition("-")[2] for name in baked.files if name.startswith("vllm/modelinfos/")
    }
    assert asked == {"Qwen3_5ForCausalLM", "DraftVocabularyMTP"}
    assert baked_cache.find_origin(repository, baked) == "baked here"
    base = repository / "weights" / "tiny"
    before, after = ({file.name for file in place.iterdir()} for place in (base, folder))
    assert after - before == {baked_cache.ARCHIVE, baked_cache.MANIFEST, MANIFEST}
    assert sha256(folder / "model.safetensors") == sha256(base / "model.safetensors")


@pytest.mark.engine
def test_a_second_run_reuses_it(repository: Path) -> None:
    assert run(repository).reused


@pytest.fixture
def moved(repository: Path, tmp_path: Path) -> Iterator[Path]:
    """The baked checkpoint in another repository, which imported its cache."""
    root = a_repository(tmp_path / "elsewhere")
    shutil.copytree(repository / "weights" / "v", root / "weights" / "v")
    archive = root / "weights" / "v" / baked_cache.ARCHIVE
    baked_cache.import_archive(root, archive, sha256(archive))
    return root


@pytest.mark.engine
def test_graphs_that_a_forked_server_baked_are_loaded_by_a_server_that_is_no_fork(
    moved: Path, tmp_path: Path
) -> None:
    required = variant.load("v", moved).with_lines({"REQUIRE_BAKED": "1"})
    log = tmp_path / "vllm.log"
    with run_server(ServerCommand.resolve(required, port=free_port()), log=log, timeout_s=300):
        graphs = baked_cache.read_graphs(log.read_text())
    assert {graph.name: graph.loaded for graph in graphs} == {"backbone": True, "eagle_head": True}


@pytest.mark.engine
def test_a_graph_that_is_not_in_the_cache_ends_a_start_that_requires_it(moved: Path, tmp_path: Path) -> None:
    folder = moved / "weights" / "v"
    command = ServerCommand.resolve(
        variant.load("v", moved).with_lines({"REQUIRE_BAKED": "1"}), port=free_port()
    )
    assert command.cache is not None
    assert command.cache.baked is not None
    place = tmp_path / "place"
    baked_cache.restore_cache(folder, command.cache.baked, place)
    for model in place.rglob("rank_0_0/model"):
        model.unlink()
        break
    else:
        pytest.fail("the cache holds no graph")
    # Not `prepare`d: as if the archive's own files were fewer than a start needs.
    broken = command.with_cache_root(place)
    wanted = {compile_watch.VARIABLE: command.environment[compile_watch.VARIABLE]}
    broken = dataclasses.replace(broken, environment={**broken.environment, **wanted})
    log = tmp_path / "vllm.log"
    with pytest.raises(ServingError), run_server(broken, log=log, timeout_s=300):
        pytest.fail("it served")
    assert "REQUIRE_BAKED=1, and the baked compile cache has no usable graph" in log.read_text()
    assert "(not in the cache)" in log.read_text()


def test_the_key_has_the_lines_that_decide_and_no_others(tmp_path: Path) -> None:
    root = a_repository(tmp_path)
    before = bake_cache.data(parameters(root))
    config = root / "experiments" / "v" / "config.env"
    config.write_text(CONFIG + "VLLM_PORT=9999\nREQUIRE_BAKED=1\nALLOW_UNSAFE=1\nVLLM_SHUTDOWN_TIMEOUT=7\n")
    assert bake_cache.data(parameters(root)) == before
    config.write_text(CONFIG + "VLLM_MAX_NUM_BATCHED_TOKENS=512\n")
    changed = bake_cache.data(parameters(root))
    assert changed.keys() - before.keys() == {"config.VLLM_MAX_NUM_BATCHED_TOKENS"}
    assert {name for name in before if name.startswith("machine.")} >= {"machine.torch", "machine.vllm"}


def test_a_variant_that_compiles_nothing_is_refused(tmp_path: Path) -> None:
    root = a_repository(tmp_path, CONFIG.replace("VLLM_ENFORCE_EAGER=0\n", ""))
    destination = tmp_path / "out"
    destination.mkdir()
    with pytest.raises(
        ServingError, match="v compiles nothing, so there is nothing to bake; set VLLM_ENFORCE"
    ):
        bake_cache.bake_compile_cache(
            root / "weights" / "tiny", destination, parameters(root), lambda *heard: None
        )


def test_a_config_of_another_name_is_refused(tmp_path: Path) -> None:
    root = a_repository(tmp_path)
    append(root, "      config: serve.env\n")
    with pytest.raises(
        RecipeError, match=r"recipe.yaml:6: config: config has to be the config\.env of a variant"
    ):
        recipe_of(root)


def test_a_missing_config_is_an_error_of_one_line(tmp_path: Path) -> None:
    root = a_repository(tmp_path)
    (root / "experiments" / "v" / "config.env").unlink()
    with pytest.raises(SlimqwenError, match="no variant 'v'"):
        bake_cache.data(parameters(root))


def test_nothing_may_follow_it_in_a_recipe(tmp_path: Path) -> None:
    root = a_repository(tmp_path)
    append(root, "  - prune_vocab:\n      size: 4096\n")
    with pytest.raises(
        RecipeError, match=r"recipe.yaml:6: no stage may follow bake_cache; put bake_cache last"
    ):
        recipe_of(root)
