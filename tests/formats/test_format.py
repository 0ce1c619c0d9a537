"""What holds for every format: its name, its row of the table, what cannot be added."""

import pytest

from slimqwen.formats import FORMATS, PART, find_format
from slimqwen.formats.format import Format


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.__name__)
def test_a_format_is_found_by_each_of_its_methods_and_its_parts_by_their_names(kind: type[Format]) -> None:
    for method in kind.methods:
        assert type(find_format({"quant_method": method})) is kind
    for layout in kind.layouts:
        for part in (layout.carrier, *layout.required, *layout.optional, *layout.further):
            match = PART.fullmatch(f"mtp.fc.{part}")
            assert match
            assert match["part"] == part


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "auto-round", "modelopt", "quark"])
def test_packed_linears_are_not_added_to_another_format(method: str) -> None:
    fault = find_format({"quant_method": method}).refused_addition()
    assert fault
    assert f"in the format {method}, to which" in fault
    assert find_format({}).refused_addition() is None


@pytest.mark.parametrize(
    ("settings", "left", "packed"),
    [
        (
            {"quant_method": "awq", "modules_to_not_convert": ["self_attn"]},
            "a.self_attn.q_proj",
            "a.mlp.up_proj",
        ),
        (
            {"quant_method": "gptq", "dynamic": {"-:.*attn.*": {}, "+:.*up.*": {"bits": 8}}},
            "a.attn.q",
            "a.mlp.up",
        ),
        (
            {"quant_method": "auto-round", "extra_config": {"a.q": {"bits": 16}, "a.up": {"bits": 8}}},
            "a.q",
            "a.up",
        ),
        ({"quant_method": "modelopt", "ignore": ["mtp*", "*.attn.*"]}, "mtp.fc", "a.mlp.up"),
    ],
)
def test_a_config_lists_what_stays_and_what_has_other_bits(settings: dict, left: str, packed: str) -> None:
    form = find_format({**settings, "bits": 4, "group_size": 32})
    assert (form.packs(left), form.packs(packed), form.packs("model.embed_tokens")) == (False, True, False)
    override = "dynamic" in settings or "extra_config" in settings
    assert form.layouts_of(packed)[0].bits == (8 if override else 4)
