"""The checkpoint that the MODEL of `slimqwen fit` names: config.json and tensors, without the tensors' content."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.checkpoint.config import quantisation, quantised, read_json_object
from slimqwen.checkpoint.tensors import INDEX, list_tensors, tensor_bytes
from slimqwen.checkpoint.weights import holds_mtp_head
from slimqwen.errors import SlimqwenError, suggest_name
from slimqwen.formats import PART, find_format, modelopt
from slimqwen.hub import HubError, Repository, UnavailableError, download_files
from slimqwen.models.families import Family, find_family
from slimqwen.models.published import published_tensors
from slimqwen.models.shape import Shape, Tensors, with_first_experts
from slimqwen.plan import shapes
from slimqwen.progress import silent
from slimqwen.variant import Variant
from slimqwen.workspace import list_files, locate

_LAYERS_ALONE = (
    "bake_cache, prune_vocab, and trim_draft_vocab and redistill_mtp where the MTP head is in 16 bits"
)


_EXPERT = re.compile(r"\.experts\.\d+\.")
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_OTHER_FORMATS = {
    ".gguf": "GGUF",
    ".bin": "PyTorch's own format",
    ".pth": "PyTorch's own format",
    ".pt": "PyTorch's own format",
    ".onnx": "ONNX",
    ".npz": "MLX",
}
"""Endings of weight files that are not safetensors."""


class SubjectError(SlimqwenError):
    """The argument MODEL of `slimqwen fit` names no checkpoint that can be read."""


@dataclass(frozen=True)
class Subject:
    """A checkpoint that need not be on this machine.

    Attributes:
        name: name in messages.
        source: where the dimensions come from.
        config: content of config.json.
        tensors: tensors of the language model and its MTP head, as stored; the first expert of a layer stands for all.
        other_names: names of all other tensors, such as a vision tower's or renamed ones; None where only config.json
            was at hand.
        other_bytes: bytes of the other tensors.
        settings: lines of a variant's config.env by key; empty without a variant.
        variant: the variant, if MODEL names one.
        namesakes: if MODEL names several things, a note on which was taken and how to name the others; else empty.
    """

    name: str
    source: str
    config: Mapping[str, Any]
    tensors: Tensors
    other_names: frozenset[str] | None = None
    other_bytes: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    variant: Variant | None = None
    namesakes: str = ""

    @property
    def family(self) -> Family:
        """The model family of the checkpoint."""
        return find_family(self.config)

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of config.json."""
        return checkpoint.text_config(self.config)

    @property
    def has_mtp(self) -> bool:
        """Whether the checkpoint can draft with an MTP head of its own."""
        return holds_mtp_head(self.config, self.tensors)

    @property
    def narrowest_bits(self) -> int | None:
        """Bits of the narrowest quantised weights; None where none are quantised."""
        # A module of no group has the layouts of all groups.
        layouts = find_format(quantisation(self.config)).layouts_of("")
        return min((layout.bits for layout in layouts), default=None)

    def describe_mtp(self) -> str:
        """The state of the MTP head in a few words: present, none, renamed, or lost by a fine-tune."""
        promised = self.text.get("mtp_num_hidden_layers")
        renamed = sorted(name for name in self.other_names or () if "mtp" in name.split("."))
        if self.has_mtp:
            parts = (PART.fullmatch(name) for name in self.tensors if name.startswith("mtp."))
            form = "quantised" if any(part and part["part"] != "weight" for part in parts) else "16 bits"
            return f"present, {form}" + ("" if self.other_names is not None else ", by config.json alone")
        if renamed:
            return f"renamed ({renamed[0]}), so vLLM does not find it"
        return "lost: config.json promises an MTP head, the checkpoint has none" if promised else "none"

    def describe_format(self) -> tuple[str, str]:
        """The format of the weights, and which stages of a recipe can work with it, each in a few words."""
        form = find_format(quantisation(self.config))
        if not form.settings:
            stages = "all" if self.family.is_calibrated else "all but calibrate"
            return str(self.text.get("dtype", "16 bits")), stages
        stages = "all (but calibrate only on what is not packed)" if form.takes_more else _LAYERS_ALONE
        return form.describe(), stages


def find_subject(model: str, root: Path) -> Subject:
    """The checkpoint that MODEL names: a variant, else a folder or config.json, a shape of eval/shapes, a repository.

    Args:
        model: MODEL of the command line.
        root: folder of the workspace or checkout.

    Raises:
        SubjectError: `model` names no checkpoint, or weights that are no safetensors. Qwen/Qwen3.5-4B beside a folder
            Qwen that lacks it is a checkpoint if the hub has it.
        HubError: the hub cannot be reached, hides the repository, or the repository has no safetensors checkpoint.
        FamilyError, UnsupportedFormatError, CorruptCheckpointError, ShapeError, ConfigError: variant, folder or shape
            cannot be read.
    """
    path, shape_file = Path(model), locate(shapes.FOLDER / f"{model}.json", root)
    readings: dict[str, Callable[[], Subject]] = {}
    if model in variants.names(root):
        readings["the variant of that name"] = lambda: variant_subject(variants.load(model, root))
    if path.is_dir():
        readings[f"the folder ./{path}"] = lambda: _of_folder(path, model)
    if path.is_file():
        readings[f"the file ./{path}"] = lambda: _of_file(path, model, root)
    if shape_file.is_file():
        readings[f"the shape {shapes.FOLDER / shape_file.name}"] = lambda: _read_shape(root, model, model)
    if readings:
        (taken, read), *others = readings.items()
        paths = " or ".join(f"`slimqwen fit {name.rpartition(' ')[2]}`" for name, _ in others)
        return replace(read(), namesakes=f"{taken}; {paths} takes the other" if others else "")
    if "/" in model and path.parent.is_dir():
        hint = suggest_name(model, list(map(str, path.parent.iterdir())), "name one that is there")
        missing = f"there is no {path.name} in the folder {path.parent}; {hint}"
        if not _REPOSITORY.fullmatch(model):
            raise SubjectError(missing)
        try:
            return _of_hub(model)
        except UnavailableError as error:
            raise SubjectError(f"{missing}; on the hub: {error}") from None
    if model.count("/") == 1:
        return _of_hub(model)
    known = ", ".join(sorted(file.stem for file in list_files(f"{shapes.FOLDER}/*.json", root)))
    raise SubjectError(
        f"{model} is not a variant, folder, config.json, owner/name on the hub, or shape; the shapes are {known}"
    )


def variant_subject(variant: Variant) -> Subject:
    """A variant's checkpoint on this machine, else the one that its recipe would make.

    Raises:
        SubjectError: the checkpoint's weights are no safetensors.
        FamilyError, CorruptCheckpointError: the checkpoint here is of no supported family, or damaged.
        ShapeError: no checkpoint is here, and its dimensions are not known.
    """
    if (variant.weights / "config.json").is_file():
        return _with_settings(_of_folder(variant.weights, variant.name), variant)
    return promised_subject(variant)


def promised_subject(variant: Variant) -> Subject:
    """A variant's checkpoint as published dimensions and its recipe say, even if the checkpoint itself is here.

    Raises:
        ShapeError: the dimensions are not known.
    """
    return _with_settings(_of_shape(shapes.variant_shape(variant), variant.name), variant)


def _with_settings(subject: Subject, variant: Variant) -> Subject:
    settings = {key: setting.value for key, setting in variant.settings.items()}
    return replace(subject, name=variant.name, settings=settings, variant=variant)


def _of_file(file: Path, name: str, root: Path) -> Subject:
    """The checkpoint that a config.json promises, or a file of eval/shapes; raises SubjectError for other files."""
    if file.resolve() == locate(shapes.FOLDER / file.name, root).resolve():
        return _read_shape(root, file.stem, name)
    if file.suffix == ".safetensors":
        raise SubjectError(f"{name} is one file of a checkpoint; name its folder, {file.parent}")
    _refuse_format(file.suffix, name)
    return _of_config(file, name)


def _of_config(file: Path, name: str) -> Subject:
    config = _with_modelopt(read_json_object(file), file.parent)
    _refuse_mlx(config, name)
    return Subject(name, "config.json alone", config, with_first_experts(published_tensors(config)))


def _read_shape(root: Path, stem: str, name: str) -> Subject:
    shape = shapes.published_shape(root, stem)
    assert shape is not None
    return _of_shape(shape, name)


def _of_shape(shape: Shape, name: str) -> Subject:
    return Subject(name, shape.source, shape.config_json, with_first_experts(shape.tensors), frozenset())


def _of_folder(folder: Path, name: str) -> Subject:
    if not any(folder.glob("*.safetensors")):
        for suffix in sorted({file.suffix for file in folder.glob("*.*")}):
            _refuse_format(suffix, name)
        if (folder / "config.json").is_file():
            return _of_config(folder / "config.json", name)
    config = _with_modelopt(checkpoint.read_config(folder), folder)
    find_family(config)
    _refuse_mlx(config, name)
    stored = list_tensors(folder)
    others = frozenset(filter(_is_other, stored))
    # As in `published_tensors`, the first expert of a layer stands for all.
    counts = Counter(_EXPERT.sub(".experts.0.", tensor) for tensor in stored if tensor not in others)
    served: Tensors = {
        tensor: (info.dtype, (counts[tensor], *info.shape) if _EXPERT.search(tensor) else info.shape)
        for tensor, info in stored.items()
        if tensor in counts
    }
    size = sum(stored[tensor].end - stored[tensor].start for tensor in others)
    return Subject(name, f"the tensors of {folder}", config, with_first_experts(served), others, size)


def _with_modelopt(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config with the quantisation that an older ModelOpt wrote into a file beside it."""
    file = folder / modelopt.FILE
    if quantisation(config) or not file.is_file():
        return config
    return quantised(config, modelopt.read_settings(read_json_object(file)))


def _refuse_mlx(config: Mapping[str, Any], name: str) -> None:
    """Raise SubjectError for a checkpoint of MLX, whose config.json has the key `quantization`."""
    form = config.get("quantization")
    if isinstance(form, dict) and not quantisation(config).get("quant_method"):
        bits = f" of {form['bits']} bits" if "bits" in form else ""
        raise SubjectError(_say_original(f"{name} is a checkpoint{bits} in MLX's format"))


def _refuse_format(suffix: str, name: str) -> None:
    """Raise SubjectError for a file ending of weights that are no safetensors."""
    if suffix in _OTHER_FORMATS:
        made = "; or make one of it: `slimqwen variant new --name NAME --checkpoint FILE.gguf`"
        fault = _say_original(f"{name} has weights in {_OTHER_FORMATS[suffix]} ({suffix})")
        raise SubjectError(fault + (made if suffix == ".gguf" else ""))


def _say_original(fault: str) -> str:
    return (
        f"{fault}, but recipes and servers here take safetensors; name the checkpoint that it was made from"
    )


def _is_other(tensor: str) -> bool:
    """Whether a tensor is none that a text server loads: of a vision tower, or of an MTP head that vLLM cannot find."""
    parts = tensor.split(".")
    return "visual" in parts or ("mtp" in parts and parts[0] != "mtp")


def _of_hub(name: str) -> Subject:
    """The checkpoint of a hub repository; only config.json and the safetensors index are fetched."""
    config, index = _fetch_descriptions(name)
    names = frozenset(index["weight_map"]) if index else None
    tensors = published_tensors(config, names)
    others = None if names is None else names - tensors.keys()
    listed = tensors.keys() if names is None else tensors.keys() & names
    size = sum(tensor_bytes(*tensors[tensor]) for tensor in listed)
    total = int((index or {}).get("metadata", {}).get("total_size", size))
    source = "config.json and safetensors index" if index else "config.json, as it has no safetensors index"
    first = with_first_experts(tensors)
    return Subject(name, f"{source} of {name}", config, first, others, max(0, total - size))


def _fetch_descriptions(name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json and the safetensors index of a repository; None for the index if all weights are in one file."""
    repository = Repository(name, "model", None, f"`slimqwen fit {name}`", "the name")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "checkpoint"
        with download_files(repository, target, partial(_select_descriptions, name), silent):
            pass
        config = _with_modelopt(checkpoint.read_config(target), target)
        _refuse_mlx(config, name)
        return config, read_json_object(target / INDEX) if (target / INDEX).is_file() else None


def _select_descriptions(name: str, files: Sequence[str]) -> list[str]:
    if not any(file.endswith(".safetensors") for file in files):
        cure = "name the repository of its safetensors checkpoint"
        if gguf := next((file for file in files if file.endswith(".gguf")), None):
            made = f"or make one: `slimqwen variant new --name NAME --checkpoint {name}/{gguf}`"
            raise HubError(f"{name} has GGUF files; {cure}, {made}")
        raise HubError(f"{name} has no safetensors; {cure}")
    if "config.json" not in files:
        raise HubError(f"{name} has no config.json; name the repository of the whole model")
    return [file for file in ("config.json", modelopt.FILE, INDEX) if file in files]
