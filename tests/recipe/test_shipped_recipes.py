"""Every recipe of experiments/ runs as it is shipped: no text is missing that a command does not fetch."""

import pytest

from slimqwen import variant
from slimqwen.cli.console import duration
from slimqwen.models.outline import Outline
from slimqwen.plan import devices, shapes
from slimqwen.recipe import inspection, variant_recipe

RECIPES = [name for name in variant.names() if variant.load(name).recipe]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_no_fault_and_says_its_hours_on_a_gpu(name: str) -> None:
    subject = variant.load(name)
    base = variant_recipe.find_base(subject)
    outline = Outline.of_shape(shapes.variant_shape(base), base.weights)
    to_fetch: list[str] = []
    faults, costs = variant_recipe.inspect_recipe(subject, outline, to_fetch)
    assert faults == ()
    assert all("`slimqwen download --corpus general --variant " in line for line in to_fetch)
    assert bool(to_fetch) == (variant_recipe.list_corpora(subject) == ["general"])
    sheet = devices.read_gpu("a10g", subject.root)
    processor = inspection.Processor(sheet.peak("bf16"), sheet.bandwidth)
    seconds = sum(processor.seconds(each.needs) for each in costs)
    page = " ".join((subject.folder / "README.md").read_text(encoding="utf-8").split())
    is_public = base.name.startswith(("cyankiwi", "qwen")) and not subject.name.endswith(("w4lm", "baked"))
    assert not is_public or f"It takes about {duration(seconds)} on an A10G, by its data sheet." in page
