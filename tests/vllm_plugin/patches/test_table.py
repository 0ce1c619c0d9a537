"""Each change of vLLM has a row, and each row has its code and vLLM's."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from slimqwen import variant, vllm_plugin
from slimqwen.identity import source
from slimqwen.vllm_plugin.patches import upstream
from slimqwen.vllm_plugin.patches.table import KNOWN_VERSIONS, PATCHES

PLUGIN = Path(vllm_plugin.__file__).parent
OWN = {"patches.upstream": "what replaces", "vllm_log": "a logger of this package"}
"""Modules that assign to attributes of what is no part of vLLM."""

CHANGE_ANYTHING = {
    "setattr",
    "__setattr__",
    "delattr",
    "register_model",
    "add_exception_handler",
}
CHANGE_THEIR_OWNER = {"replace", "append", "insert", "extend", "update", "pop", "remove", "clear"}


HERE = [
    name
    for name, patch in PATCHES.items()
    if source.platform() in patch.devices and Version(version("vllm")) < Version(patch.fixed_in or "999")
]


@pytest.mark.parametrize("name", HERE)
def test_the_installed_vllm_is_the_one_that_a_patch_was_written_for(name):
    assert upstream.list_changes(PATCHES[name]) == []


@pytest.mark.parametrize("platform", KNOWN_VERSIONS)
def test_the_lock_of_a_platform_has_the_last_known_version(platform):
    lock = (variant.repository_root() / "requirements" / f"{platform}.txt").read_text()
    (locked,) = re.findall(r"^vllm(?:-cpu)?==(\S+)", lock, re.MULTILINE)
    assert locked == KNOWN_VERSIONS[platform][-1]


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_a_row_names_code_and_gives_its_reason(patch):
    assert (variant.repository_root() / patch.file).is_file()
    function = getattr(importlib.import_module(f"slimqwen.vllm_plugin.{patch.module}"), patch.function)
    assert inspect.getdoc(function)
    assert patch.why
    assert re.fullmatch(r"none found, 2026-\d\d-\d\d|[\w-]+#\d+(, [\w-]+#\d+)*", patch.upstream)


def changes_in(tree: ast.Module) -> Iterator[str]:
    """What a module changes outside itself: attributes and items of what it imports or is given, and calls that change.

    A variable that a module binds to something of what it imports is followed.
    """
    outside = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and root_of(node.value) in outside:
            outside |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        targets = (
            node.targets
            if isinstance(node, ast.Assign | ast.Delete)
            else [node.target]
            if isinstance(node, ast.AugAssign)
            else []
        )
        for target in targets:
            is_attribute = isinstance(target, ast.Attribute) and root_of(target) != "self"
            if is_attribute or (isinstance(target, ast.Subscript) and root_of(target) in outside):
                yield ast.unparse(target)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            of_outside = isinstance(node.func, ast.Name) or root_of(node.func) in outside
            if called in CHANGE_ANYTHING or (called in CHANGE_THEIR_OWNER and of_outside):
                yield ast.unparse(node)


def root_of(node: ast.expr) -> str:
    """The name that an expression begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("file", sorted(PLUGIN.rglob("*.py")), ids=lambda file: str(file.relative_to(PLUGIN)))
def test_a_module_that_changes_vllm_has_a_row(file):
    module = ".".join(file.relative_to(PLUGIN).with_suffix("").parts)
    if module not in {patch.module for patch in PATCHES.values()} | OWN.keys():
        assert list(changes_in(ast.parse(file.read_bytes()))) == []


@pytest.mark.parametrize(
    "text",
    [
        "from vllm.entrypoints import x\ndef f():\n    x.LIMIT = 3",
        "def f(engine):\n    engine.shutdown = None",
        "import vllm\nsetattr(vllm, 'x', 1)",
        "import os\nos.environ['VLLM_X'] = '1'",
        "from vllm import x\nkernels = x.KERNELS.get(1)\nkernels.append(2)",
        "def f(app):\n    app.add_exception_handler(1, 2)",
        "from slimqwen.vllm_plugin.patches.upstream import replace\nreplace('x', y, 'z', f)",
    ],
)
def test_every_way_to_change_vllm_is_found(text):
    assert list(changes_in(ast.parse(text)))
