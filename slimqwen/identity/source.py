"""The code on which a result depends, found in the source without executing it and without a list kept by hand.

Starting from given functions or modules, every name is followed through this package's own modules: functions,
constants, whole classes, imports inside functions, and texts that name a module, such as the main module of a child
process. Annotations count, because they say whose methods are called. What cannot be followed counts as its whole
module. Comments, docstrings and the words of an expected error do not count.

`tests/identity/coverage_by_keys.py` compares the result with what a stage really executes.
"""

import ast
import functools
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from slimqwen.identity import digest_of
from slimqwen.vllm_plugin.patches.table import PATCHES

_PACKAGE = Path(__file__).parents[1]

_PLUGIN = "slimqwen.vllm_plugin"
_IN_EVERY_ENGINE = (f"{_PLUGIN}.patches.register", f"{_PLUGIN}.patches.serving.compile_watch.register")
_LOADED_BY_VLLM: Mapping[str, tuple[str, ...]] = {
    "vllm.LLM": _IN_EVERY_ENGINE,
    "vllm.entrypoints.launchers.api_server.entry": (
        *_IN_EVERY_ENGINE,
        f"{_PLUGIN}.endpoints.Endpoints",
    ),
}
"""What starts an engine -> this package's entry points that vLLM loads for it (pyproject.toml); no name leads there."""

_BROUGHT: Mapping[str, tuple[str, ...]] = {
    "transformers": ("tokenizers", "safetensors"),
    "vllm": ("torch", "transformers", "tokenizers", "compressed_tensors"),
}
"""Package -> those that compute for it without being imported here."""

_BODY = ""
"""Stands for the statements of a module that bind no name: they run with its import."""

_MODULE_NAME = re.compile(r"slimqwen(\.\w+)+(:\w+)?")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_INNER_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class ReachedSource:
    """The code that given functions or modules depend on.

    Attributes:
        names: top-level names that they use, directly or through others, by module.
        digests: SHA-256 of the source of these names, by module.
        packages: imported packages, without this one and Python's standard library.
    """

    names: Mapping[str, frozenset[str]]
    digests: Mapping[str, str]
    packages: frozenset[str]

    @property
    def digest(self) -> str:
        """One SHA-256 over the digests of all modules."""
        return digest_of(self.digests)

    def versions(self) -> dict[str, str]:
        """Installed versions of `packages`, and of those that compute for them, such as torch for vllm."""
        names = self.packages.union(*(_BROUGHT.get(name, ()) for name in self.packages))
        versions = {name.replace("_", "-"): _version(name) for name in sorted(names)}
        return {name: version for name, version in versions.items() if version is not None}


@dataclass(frozen=True)
class _Part:
    """What a module binds to one name: SHA-256 of its text, and the full names that it uses."""

    digest: str
    uses: frozenset[str]


def platform() -> str:
    """Platform that the installed vLLM is built for: cpu or cuda. vLLM is not imported, which would take seconds."""
    return "cpu" if "cpu" in (_version("vllm") or "cpu") else "cuda"


def reach(
    *starts: str, within: str = "slimqwen", device: str | None = None, package: Path = _PACKAGE
) -> ReachedSource:
    """Find the code that functions or modules depend on.

    Args:
        starts: full names of functions or modules, in this package or outside it.
        within: full name of the package whose modules are followed; names of others are not.
        device: platform, cpu or cuda, whose patches of vLLM are included; by default that of the installed vLLM.
        package: folder of the package slimqwen to read.
    """
    modules = {**_foreign_modules(starts), **_own_modules(package)}
    reached: dict[str, dict[str, _Part]] = {}
    packages: set[str] = set()
    pending = [*starts]
    while pending:
        full_name = pending.pop()
        module, name = _split(full_name, modules)
        if module is None:
            pending += _LOADED_BY_VLLM.get(full_name, ())
            packages.add(full_name.partition(".")[0])
            continue
        if _is_own(module) and not f"{module}.".startswith(f"{within}."):
            continue
        parts = _parts_of(module, modules[module].read_bytes())
        if module not in reached:
            reached[module] = {}
            # To import a module runs the bodies of its packages, too.
            pending += [f"{module[: point.start()]}.{_BODY}" for point in re.finditer(r"\.", module)]
        wanted: Collection[str] = parts.keys() if name not in {*parts, _BODY} else {name}
        for each in ({*wanted, _BODY} & parts.keys()) - reached[module].keys():
            is_table = f"{module}.{each}" == f"{_PLUGIN}.patches.table.PATCHES"
            reached[module][each] = part = _patches_on(device or platform()) if is_table else parts[each]
            pending += part.uses
    reached = {module: parts for module, parts in sorted(reached.items()) if parts}
    return ReachedSource(
        names={module: frozenset(parts) for module, parts in reached.items()},
        digests={
            module: digest_of({name: part.digest for name, part in parts.items()})
            for module, parts in reached.items()
        },
        packages=frozenset(packages - sys.stdlib_module_names),
    )


def _patches_on(device: str) -> _Part:
    """The rows of the table of patches that `register` makes on one platform: others change nothing here.

    A name leads to the modules of all other rows.
    """
    rows = [row for row in PATCHES.values() if row.function == "install" and device in row.devices]
    modules = frozenset(f"{_PLUGIN}.{row.module}" for row in rows)
    return _Part(digest_of([[row.module, row.fixed_in] for row in rows]), modules)


def _own_modules(package: Path) -> dict[str, Path]:
    """File of every module of the package."""
    modules = {}
    for file in package.rglob("*.py"):
        names = (package.name, *file.relative_to(package).with_suffix("").parts)
        modules[".".join(names[:-1] if names[-1] == "__init__" else names)] = file
    return modules


def _foreign_modules(starts: Iterable[str]) -> dict[str, Path]:
    """Files of the starts' modules that are not the package's, such as a stage that is being tried out."""
    modules = {}
    for start in starts:
        module = start.rpartition(".")[0]
        if not _is_own(start) and (spec := find_spec(module)) is not None and spec.origin is not None:
            modules[module] = Path(spec.origin)
    return modules


def _split(full_name: str, modules: Collection[str]) -> tuple[str | None, str | None]:
    """The module of a full name, None outside the package, and the name in it, None for the module itself."""
    names = full_name.split(".")
    for end in range(len(names), 0, -1):
        if (module := ".".join(names[:end])) in modules:
            return module, names[end] if end < len(names) else None
    return None, None


@functools.cache  # stages share most modules
def _parts_of(module: str, source: bytes) -> Mapping[str, _Part]:
    """The parts of a module by the name that they bind."""
    imports: dict[str, str] = {}
    statements: dict[str, list[ast.stmt]] = {}
    for statement in ast.parse(source).body:
        imports |= _imports_in(statement, inside_functions=False)
        for name in _bound_by(statement) or {_BODY}:
            statements.setdefault(name, []).append(statement)
    reader = _Reader(module, imports, statements.keys())
    parts = {name: reader.read(each) for name, each in statements.items()}
    return {name: part for name, part in parts.items() if part is not None}


def _imports_in(statement: ast.stmt, *, inside_functions: bool) -> dict[str, str]:
    """Names that a statement imports, with the full names for which they stand."""
    found: dict[str, str] = {}
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {
                each.asname or _first(each.name): each.name if each.asname else _first(each.name)
                for each in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        if inside_functions or not isinstance(node, _DEFINITIONS):
            pending += ast.iter_child_nodes(node)
    return found


def _first(name: str) -> str:
    return name.partition(".")[0]


def _bound_by(statement: ast.stmt) -> set[str]:
    """Names that a top-level statement binds."""
    if isinstance(statement, ast.If) and "__main__" in ast.dump(statement.test):
        return {"__main__"}  # runs only where the module is started as a process, which takes all of it
    # A loop may do more than bind its variables.
    found = {_BODY} if isinstance(statement, ast.For | ast.While | ast.With) else set()
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        if isinstance(node, _DEFINITIONS):
            found.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or _first(node.name))
        if not isinstance(node, _INNER_SCOPES):
            pending += ast.iter_child_nodes(node)
    return found


class _Reader(ast.NodeTransformer):
    """Reads statements of one module: drops what does not count, and collects the full names that the rest uses."""

    def __init__(self, module: str, imports: Mapping[str, str], own: Collection[str]) -> None:
        self._module, self._imports, self._own = module, imports, own
        self._inner_imports: Mapping[str, str] = {}
        self._uses: set[str] = set()

    def read(self, statements: list[ast.stmt]) -> _Part | None:
        """The statements as one part; None if nothing of them counts."""
        self._uses = set()
        texts: list[object] = []
        for statement in statements:
            self._inner_imports = _imports_in(statement, inside_functions=True)
            if (kept := self.visit(statement)) is not None:
                texts.append(None if isinstance(kept, ast.Import | ast.ImportFrom) else _plain(kept))
        return _Part(digest_of([texts, sorted(self._uses)]), frozenset(self._uses)) if texts else None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """A string that stands as a statement is a docstring: a better one must not make hours of calibration anew."""
        is_string = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_string else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Errors that this package defines are expected ones; their words decide nothing."""
        if isinstance(node.exc, ast.Call) and any(_is_own(name) for name in self._targets(node.exc.func)):
            node.exc = node.exc.func
        return self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> ast.AST:
        """Another package counts by its import alone; a module of this one by the names that are used of it."""
        self._uses |= {each.name for each in node.names if not _is_own(each.name)}
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        """What is imported counts."""
        self._uses |= {f"{node.module}.{each.name}" for each in node.names}
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A name of the module or of its imports."""
        self._uses |= self._targets(node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """A name in an imported module, as a whole; attributes of anything else by what they are attributes of."""
        if targets := self._targets(node):
            self._uses |= targets
            return node
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """A text that is the name of a module of this package, or of something in it."""
        if isinstance(node.value, str) and _MODULE_NAME.fullmatch(node.value):
            self._uses.add(node.value.replace(":", "."))
        return node

    def _targets(self, node: ast.expr) -> set[str]:
        """Full names for which a name or a chain of attributes may stand; empty for anything else."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return set()
        imported = {table[node.id] for table in (self._inner_imports, self._imports) if node.id in table}
        found = {".".join([name, *attributes]) for name in imported}
        if node.id in self._own and not imported:
            found.add(f"{self._module}.{node.id}")
        if node.id == "__spec__":  # a module that starts itself as a process
            found.add(self._module)
        return found


def _plain(node: object) -> object:
    """A tree as JSON, the same under every Python: later ones have more fields (`type_params`), unset in this code."""
    if isinstance(node, ast.Constant):
        return ascii(node.value)
    if isinstance(node, ast.AST):
        fields = {name: _plain(value) for name, value in ast.iter_fields(node) if value not in (None, [])}
        return [type(node).__name__, fields]
    return [_plain(each) for each in node] if isinstance(node, list) else node


def _is_own(full_name: str) -> bool:
    return full_name.partition(".")[0] == "slimqwen"


@functools.cache
def _version(package: str) -> str | None:
    """Version of the distribution that an imported package belongs to; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # Slow, because it reads every distribution's list of files: only for names like yaml and PyYAML.
        distributions = metadata.packages_distributions().get(package)
        return metadata.version(distributions[0]) if distributions else None
