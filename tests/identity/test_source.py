"""What a function reaches is read from the source, and an edit changes a digest where it can change the result."""

import ast
import builtins
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.identity.source import ReachedSource, reach
from slimqwen.recipe.registry import STAGES
from slimqwen.vllm_plugin.patches.table import PATCHES

PACKAGE = variant.repository_root() / "slimqwen"
RUNS = {name: f"{stage.run.__module__}.{stage.run.__qualname__}" for name, stage in STAGES.items()}
PATCHES_MODULE = "slimqwen.vllm_plugin.patches"

ERRORS = set(
    re.findall(r"^class (\w+Error)\b", "".join(file.read_text() for file in PACKAGE.rglob("*.py")), re.M)
)

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes modules of a package by their names, `__` for a dot, and returns the package's folder."""

    def write_modules(**modules: str) -> Path:
        package = tmp_path / "slimqwen"
        for name, text in {"__init__": "", **modules}.items():
            file = package / f"{name.replace('__', '/') if name != '__init__' else name}.py"
            file.parent.mkdir(exist_ok=True, parents=True)
            file.write_text(text)
        return package

    return write_modules


def names(package: Path, start: str = "slimqwen.a.run") -> dict[str, set[str]]:
    """What is reached of each module."""
    return {module: set(found) for module, found in reach(start, package=package).names.items()}


def digest(package: Path) -> str:
    return reach("slimqwen.a.run", package=package).digest


def test_only_what_a_function_names_is_reached(write: Write) -> None:
    package = write(
        a="from slimqwen.b import two\nHERE = 1\ndef run():\n    return HERE + two()\ndef other(): ...\n",
        b="def two(): return _deep()\ndef _deep(): return 2\ndef three(): ...\n",
        c="def never(): ...\n",
    )
    assert names(package) == {"slimqwen.a": {"run", "HERE"}, "slimqwen.b": {"two", "_deep"}}


@pytest.mark.parametrize(
    "use",
    [
        "from slimqwen import b\ndef run(): b.two()",
        "from slimqwen import b as c\ndef run(): return c.two",
        "def run():\n    from slimqwen.b import two\n    two()",
        "from slimqwen.b import two as other\nLATER = {1: other}\ndef run(): LATER[1]()",
        "from slimqwen.b import two\nclass Base:\n    def do(self): two()\nclass C(Base): ...\ndef run(): C().do()",
        "from slimqwen.b import two\ndef run(given: list[two]) -> None: ...",
        "def run(): start('slimqwen.b:two')",
        "from slimqwen.b import two\nTABLE = {}\nTABLE[1] = two\ndef run(): TABLE",
        "from slimqwen.b import two\nTABLE = {}\nfor _ in (1, 2):\n    TABLE[1] = two\ndef run(): TABLE",
        "try:\n    from slimqwen.b import two\nexcept ImportError:\n    two = None\ndef run(): two()",
    ],
)
def test_a_name_is_followed_however_it_is_used(write: Write, use: str) -> None:
    found = names(write(a=use, b="def two(): ...\ndef three(): ...\n"))
    assert found["slimqwen.b"] == {"two"}


@pytest.mark.parametrize(
    "use",
    [
        "from slimqwen import b\ndef run(): list(vars(b))",
        "from slimqwen import b\ndef run(): b.two.attribute, b.no_such_name",
        "def run(): start('-m', 'slimqwen.b')",
    ],
)
def test_what_cannot_be_followed_counts_as_its_whole_module(write: Write, use: str) -> None:
    found = names(write(a=use, b="def two(): ...\ndef three(): ...\n"))
    assert found["slimqwen.b"] == {"two", "three"}


def test_a_module_that_starts_itself_counts_as_a_whole(write: Write) -> None:
    text = "def run(): start(__spec__.name)\ndef main(): ...\nif __name__ == '__main__':\n    main()\n"
    assert names(write(a=text)) == {"slimqwen.a": {"run", "main", "__main__"}}


def test_what_runs_at_the_import_of_a_module_or_its_package_counts(write: Write) -> None:
    package = write(a="from slimqwen.p.b import two\ndef run(): two()\n", p__b="def two(): ...\n")
    (package / "p" / "__init__.py").write_text("import os\nos.environ['X'] = '1'\n")
    before = digest(package)
    (package / "p" / "__init__.py").write_text("import os\nos.environ['X'] = '2'\n")
    assert digest(package) != before


def test_names_of_another_package_lead_nowhere(write: Write) -> None:
    package = write(
        p__a="from slimqwen.p.b import two\nfrom slimqwen.q.c import three\ndef run(): two(), three()\n",
        p__b="def two(): ...\n",
        q__c="def three(): ...\n",
    )
    found = reach("slimqwen.p.a.run", within="slimqwen.p", package=package)
    assert found.names == {"slimqwen.p.a": {"run"}, "slimqwen.p.b": {"two"}}


def test_other_packages_count_by_their_versions(write: Write) -> None:
    package = write(
        a="import json\nimport numpy as np\nfrom torch.nn import Linear\nimport pydantic\n"
        "def run():\n    from transformers import AutoModel\n    return np.ones(1), Linear\n",
    )
    found = reach("slimqwen.a.run", package=package)
    assert found.packages == {"numpy", "torch", "transformers"}
    assert found.versions().keys() == {"numpy", "torch", "transformers", "tokenizers", "safetensors"}


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("x = 1", "x = 2", False),
        ("x = 1", "x = 1  # one", True),
        ("x = 1", "'''What it does.'''\n    x = 1", True),
        ("raise Wrong('bad; mend it')", "raise Wrong(f'worse {1}; mend it')", True),
        ("raise Wrong('bad; mend it')", "raise Other('bad; mend it')", False),
        ("raise Wrong('bad') from None", "raise Wrong('worse') from None", True),
        ("raise ValueError('bad')", "raise ValueError('worse')", False),
        ("import numpy as n\n    n.ones(1)", "import torch as n\n    n.ones(1)", False),
    ],
)
def test_comments_docstrings_and_words_of_errors_do_not_count(
    write: Write, before: str, after: str, is_same: bool
) -> None:
    texts = [
        f"class Wrong(Exception): ...\nclass Other(Exception): ...\ndef run():\n    {body}\n"
        for body in (before, after)
    ]
    first, second = (digest(write(a=text)) for text in texts)
    assert (first == second) is is_same


FROZEN = """
import json as js
from dataclasses import dataclass, field
@dataclass(frozen=True)
class Kept(dict[str, int]):
    'What it keeps.'
    amount: int = field(default=1)
    async def wait(self, first, /, *rest: bytes, last=None, **more) -> None:
        async with first as it: await it
        return [x async for x in rest if not x or 1 < x <= 2.5e-8]
def run(value: 'Kept | None' = None, *, flag=True):
    text = f'{value!r:>{len(js.dumps(1))}} {value=} {1:.2f}' '\\u200b' "x"
    match value:
        case Kept(amount=1) | {'a': [_, *rest], **others} if (n := 2) > 1: print(*rest, **others)
        case None: raise KeyError(text) from None
    try: a[1:2, ..., ~n] = -1j, b'\\0', {**Kept(), 'b': lambda *_, k=1: not k}
    except* (OSError, ValueError) as error: del error
    else: yield from (i for i in {1, 2})
    global later
    later: int
"""
"""Every kind of statement and expression of Python 3.11."""


def test_a_digest_is_the_same_under_every_python(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "a2729e2c1d5d14de5fb1f4a66921af38cd5802d620c3d3c7852c8b977475b4ba"
    assert digest(write(a=FROZEN)) == expected
    # As of Python 3.12, where a function has `type_params` as well.
    monkeypatch.setattr(ast.FunctionDef, "_fields", (*ast.FunctionDef._fields, "new"))
    monkeypatch.setattr(ast.FunctionDef, "new", [], raising=False)
    assert digest(write(a=f"{FROZEN}# anew")) == expected


# --- the real package


@pytest.fixture(scope="module")
def stage_sources() -> Mapping[str, ReachedSource]:
    return {name: reach(run, device="cpu") for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package that tests may edit, and put back."""
    return shutil.copytree(PACKAGE, tmp_path_factory.mktemp("copy") / "slimqwen")


@pytest.fixture
def copy(copied: Path) -> Iterator[Path]:
    yield copied
    for file in PACKAGE.rglob("*.py"):
        (copied / file.relative_to(PACKAGE)).write_bytes(file.read_bytes())


def file_of(module: str, package: Path) -> Path:
    file = package.parent.joinpath(*module.split("."))
    return file / "__init__.py" if file.is_dir() else file.with_suffix(".py")


def with_a_line_more(text: str, reached: frozenset[str]) -> str:
    """A module's text with `pass` in a function or class that is reached, else with a constant bound once more."""
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in reached:
            last = node.body[-1]
            line = min([last.lineno, *(each.lineno for each in getattr(last, "decorator_list", ()))])
            if line > node.lineno and last is not node.body[0]:
                lines.insert(line - 1, " " * last.col_offset + "pass")
                return "\n".join(lines)
    name = next(iter(sorted(reached - {""})), None)
    return f"{text}\n{f'{name} = {name}' if name else 'print()'}\n"


def test_a_line_of_any_module_that_a_stage_reaches_changes_its_key_and_no_other(
    copy: Path, stage_sources: Mapping[str, ReachedSource]
) -> None:
    modules = sorted({module for source in stage_sources.values() for module in source.names})
    assert len(modules) > 80
    for module in modules:
        file = file_of(module, copy)
        text = file.read_text()
        for name, source in stage_sources.items():
            if module in source.names:
                file.write_text(with_a_line_more(text, source.names[module]))
                edited = reach(RUNS[name], device="cpu", package=copy)
                assert {each for each in source.digests if edited.digests[each] != source.digests[each]} == {
                    module
                }
        file.write_text(text)


def with_other_words(text: str) -> str:
    """A module's text with a comment, other docstrings, and other words in the errors that it raises."""
    nodes = [*ast.walk(ast.parse(text))]
    spans = [
        (node.exc.args[0], node.exc.args[-1])
        for node in nodes
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and node.exc.args
        and ast.unparse(node.exc.func).rpartition(".")[2] in ERRORS
    ]
    bodies = [node.body for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    spans += [
        (body[0].value, body[0].value)
        for body in bodies
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and len(body) > 1
    ]
    lines = text.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    content = text.encode()
    for first, last in sorted(spans, key=lambda span: span[0].lineno, reverse=True):
        begin = starts[first.lineno - 1] + first.col_offset
        end = starts[last.end_lineno - 1] + last.end_col_offset
        content = content[:begin] + b'"other words"' + content[end:]
    return content.decode() + "# a comment\n"


def test_a_comment_a_docstring_and_the_words_of_an_error_change_no_key(
    copy: Path, stage_sources: Mapping[str, ReachedSource]
) -> None:
    for file in copy.rglob("*.py"):
        file.write_text(with_other_words(file.read_text()))
    assert "other words" in (copy / "checkpoint" / "files.py").read_text()
    for name, source in stage_sources.items():
        assert reach(RUNS[name], device="cpu", package=copy).digests == source.digests


@pytest.mark.parametrize("name", [name for name, patch in PATCHES.items() if patch.devices == ("cpu",)])
def test_a_patch_of_the_cpu_changes_nothing_on_a_gpu(copy: Path, name: str) -> None:
    with file_of(f"slimqwen.vllm_plugin.{PATCHES[name].module}", copy).open("a") as stream:
        stream.write("NEW = 1\n")

    def differs(device: str, start: str) -> bool:
        return reach(start, device=device, package=copy).digest != reach(start, device=device).digest

    starts = [f"{PATCHES_MODULE}.register", RUNS["sample_outputs"]]
    assert [[differs(device, start) for start in starts] for device in ("cpu", "cuda")] == [
        [True] * 2,
        [False] * 2,
    ]


def test_a_stage_that_starts_no_engine_reaches_no_patch(
    stage_sources: Mapping[str, ReachedSource],
) -> None:
    with_patches = {
        name
        for name, source in stage_sources.items()
        if any(module.startswith(PATCHES_MODULE) for module in source.names)
    }
    assert with_patches == {"bake_cache", "quantise_lm_head", "redistill_mtp", "sample_outputs", "write_text"}


def test_every_exception_of_the_package_is_an_expected_error() -> None:
    """So the words of what it raises of its own decide nothing."""
    bases = {
        (node.name, ast.unparse(base))
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }
    builtin = {
        name
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    interrupt = ("ProcessEndsError", "KeyboardInterrupt")  # a signal's, raised without words
    assert {pair for pair in bases if pair[1] in builtin} == {("SlimqwenError", "Exception"), interrupt}
