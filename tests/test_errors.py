import ast
from pathlib import Path

import pytest

from slimqwen import errors
from slimqwen.errors import suggest_name

PACKAGE = Path(errors.__file__).parent
ERRORS = {
    node.name
    for file in PACKAGE.rglob("*.py")
    for node in ast.walk(ast.parse(file.read_bytes()))
    if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
}
CURED_ELSEWHERE = {
    "CorruptCheckpointError": "its class says to make or download the checkpoint anew",
    "TokenizerError": "`GgufFile.refused` names the checkpoint to take instead",
    "WrongResponsesError": "the way to draft is left out, and nobody has to do anything",
}


def test_every_expected_error_says_what_to_do() -> None:
    """A message that ends with a value may have the cure in it, as where another error is quoted."""
    lacking = [
        f"{file.relative_to(PACKAGE)}:{call.lineno}"
        for file in PACKAGE.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).rpartition(".")[2] in ERRORS - CURED_ELSEWHERE.keys()
        and len(call.args) == 1
        and _lacks_cure(call.args[0])
    ]
    assert not lacking


def _lacks_cure(message: ast.expr) -> bool:
    if not isinstance(message, ast.JoinedStr):
        return isinstance(message, ast.Constant) and ";" not in str(message.value)
    ends_with_value = isinstance(message.values[-1], ast.FormattedValue)
    return not ends_with_value and ";" not in ast.unparse(message)


@pytest.mark.parametrize(
    ("unknown", "otherwise", "end"),
    [
        ("calibrat", None, "did you mean calibrate?"),
        ("calibrat", "look there", "did you mean calibrate?"),
        ("prune_3", None, "did you mean prune_2 or prune_1?"),
        ("xyz", None, "known are calibrate, prune_1, prune_2"),
        ("xyz", "look there", "look there"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one_two_as_near_or_all(
    unknown: str, otherwise: str | None, end: str
) -> None:
    assert suggest_name(unknown, ["prune_1", "prune_2", "calibrate"], otherwise) == end
