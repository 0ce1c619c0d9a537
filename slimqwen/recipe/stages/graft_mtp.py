"""The stage `graft_mtp`: gives a model that lost its MTP head the head of the model that it was made from.

Common trainers save a fine-tune or a merge without `mtp.*`, so that it cannot draft. The head of the original still
reads states of the same dimensions, but they have moved, so it accepts less than it did. `sample_outputs` and
`redistill_mtp` after this stage teach it the new ones.

The tensors are copied byte for byte, unless the model is stored in another floating-point dtype. Draft rows of the
donor (`trim_draft_vocab`) are left behind: they are rows of its own output head.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from slimqwen import checkpoint
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.config import quantised, write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.packing import UNPACKED_MTP
from slimqwen.checkpoint.tensors import NewTensor, TensorInfo, from_torch, list_tensors, rewrite
from slimqwen.errors import SlimqwenError
from slimqwen.formats import find_format
from slimqwen.formats.compressed_tensors import METHOD
from slimqwen.models.outline import Outline
from slimqwen.models.vocabulary import read_tokenizer
from slimqwen.progress import Progress
from slimqwen.recipe.stage import D, Facts, Fault, Needs, Parameters, Stage, require_fit
from slimqwen.text.corpus import RecipePath

_PREFIX = "mtp."
_FLOATING = ("BF16", "F16", "F32")
_CARRIER = "layers.0.input_layernorm.weight"
"""End of the name of a tensor that every model has in the dtype in which it is stored, packed or not."""

_IMPORTS_BYTES = 900 * 2**20
"""Resident memory of torch, and of two tokenizers with 250,000 tokens, bytes."""


class GraftMtpParameters(Parameters):
    """Parameters of the stage.

    Attributes:
        donor: folder of the checkpoint that the model was made from, relative to the recipe; weights/NAME of a variant
            that is a copy of a hub repository.
    """

    donor: Annotated[RecipePath, Field(exclude=True, examples=["../../weights/qwen3.5-4b"])]


def graft_head(source: Path, destination: Path, parameters: GraftMtpParameters, progress: Progress) -> Facts:
    """Write source to destination with the donor's MTP head.

    Raises:
        StageError: source has an MTP head, or is quantised in another format than compressed-tensors; the donor is no
            checkpoint, or its head is missing, quantised or of other dimensions; or its tokenizer has other ids.
    """
    progress("comparing", 0, 0)
    outline = Outline.read(source)
    require_fit(inspect_graft(outline, parameters))
    [carrier] = [name for name in outline.tensors if name.endswith(_CARRIER)]
    dtype = outline.tensors[carrier].dtype
    head = {name: _stored_as(info, dtype) for name, info in _head_of(parameters.donor).items()}

    def change(name: str, info: TensorInfo) -> Mapping[str, NewTensor] | None:
        return {name: info.unchanged(), **head} if name == carrier else None

    rewrite(source, destination, change, progress)
    carry_side_files(source, destination)
    config = outline.with_mtp_head().config
    if form := checkpoint.quantisation(config):
        config = quantised(config, {**form, "ignore": [*form.get("ignore", []), UNPACKED_MTP]})
    write_config(destination, config)
    return {"tensors": len(head), "head_bytes": sum(tensor.bytes for tensor in head.values())}


def _head_of(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint's MTP head, without those of a draft head."""
    return {
        name: info
        for name, info in list_tensors(folder).items()
        if name.startswith(_PREFIX) and not name.startswith(draft_head.PREFIX)
    }


def _stored_as(info: TensorInfo, dtype: str) -> NewTensor:
    if info.dtype == dtype:
        return info.unchanged()
    return NewTensor(dtype, info.shape, lambda: from_torch(info.unchanged().read(), dtype).chunks())


def needs(outline: Outline, parameters: GraftMtpParameters) -> Needs:
    """Needs: disk for the input and the head; memory for the largest tensor of the head in two dtypes."""
    head = [info for name, info in outline.with_mtp_head().tensors.items() if name.startswith(_PREFIX)]
    sizes = [4 * info.elements for info in head]
    return Needs(outline.disk_bytes + sum(sizes), _IMPORTS_BYTES + 2 * max(sizes))


def inspect_graft(outline: Outline, parameters: GraftMtpParameters) -> Iterator[Fault]:
    """Find faults: an input that has an MTP head or another quantisation format, or a donor whose head does not fit."""
    if any(name.startswith(_PREFIX) for name in outline.tensors):
        yield Fault(f"{outline.name} has an MTP head; remove graft_mtp from the recipe")
        return
    if draft_head.SIZE_KEY in outline.text:
        yield Fault(
            f"{outline.name} announces a draft head that it lost too; remove {draft_head.SIZE_KEY} from config.json"
        )
        return
    form = find_format(checkpoint.quantisation(outline.config))
    if form.settings and form.method != METHOD:
        yield Fault(
            f"{outline.name} is quantised in the format {form.method}, in which vLLM takes the MTP head to be "
            "quantised too; graft the head into the 16-bit checkpoint"
        )
        return
    try:
        yield from _inspect_donor(outline, parameters.donor)
    except SlimqwenError as error:
        yield Fault(
            f"{error}; {parameters.donor} has to be the folder of the checkpoint that {outline.name} was made from: "
            "`slimqwen variant new --name NAME --checkpoint owner/name` fetches one into weights/NAME",
            "donor",
            is_fetched=not parameters.donor.exists(),
        )


def _inspect_donor(outline: Outline, donor: Path) -> Iterator[Fault]:
    """Find faults of the donor; errors of what cannot be read."""
    checkpoint.read_config(donor)
    given = _head_of(donor)
    made_from = f"name the checkpoint that {outline.name} was made from"
    if not given:
        yield Fault(f"{donor} has no MTP head; {made_from}", "donor")
        return
    wanted = outline.with_mtp_head().tensors
    wanted = {name: info for name, info in wanted.items() if name.startswith(_PREFIX)}
    for name in sorted(given.keys() | wanted.keys()):
        here, there = (tensors.get(name) for tensors in (wanted, given))
        if here and there and here.shape == there.shape and there.dtype in _FLOATING:
            continue
        has = f"{there.dtype} {list(there.shape)}" if there else "missing"
        needed = f"{list(here.shape)} in 16 bits" if here else "no such tensor"
        yield Fault(f"{donor}: {name} is {has}, and {outline.name} needs {needed}; {made_from}", "donor")
        return
    theirs, ours = (
        read_tokenizer(folder / "tokenizer.json").get_vocab() for folder in (donor, outline.folder)
    )
    if moved := [token for token, number in theirs.items() if ours.get(token) != number]:
        yield Fault(
            f"{len(moved)} tokens of {donor}, as {min(moved)!r}, have another id in {outline.name} or none; "
            f"{made_from}, and put graft_mtp before prune_vocab",
            "donor",
        )


def digest_head(parameters: GraftMtpParameters) -> dict[str, str]:
    """SHA-256 of the donor's head."""
    digest = hashlib.sha256()
    for name, info in sorted(_head_of(parameters.donor).items()):
        digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
        for chunk in info.chunks():
            digest.update(chunk)
    return {"donor": digest.hexdigest()}


def reshape(shape: D, parameters: GraftMtpParameters, /) -> D:
    """The dimensions with an MTP head in 16 bits."""
    return shape.with_mtp_head()


STAGE = Stage(
    name="graft_mtp",
    parameters=GraftMtpParameters,
    run=graft_head,
    needs=needs,
    inspect=inspect_graft,
    summarise=lambda facts: (
        f"an MTP head of {int(facts['head_bytes']) / 1e6:.1f} MB, which does not know this model yet: teach it with "  # type: ignore[arg-type]
        "sample_outputs and redistill_mtp"
    ),
    reshape=reshape,
    changes=lambda _: (r"^mtp\.(?!draft_head\.)",),
    data=digest_head,
)
