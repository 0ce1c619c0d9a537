import pytest
import torch

from slimqwen.vllm_plugin.patches.cpu import aot_load


@pytest.fixture(scope="module")
def saved_graph(tmp_path_factory):
    """A graph that inductor compiled, saved as vLLM saves those of a model."""

    def double(x):
        return x * 2 + 1

    file = tmp_path_factory.mktemp("graph") / "model"
    compiled = torch.compile(double, fullgraph=True).aot_compile(((torch.arange(4.0),), {}))
    compiled.save_compiled_function(str(file))
    return file, double


def load(saved_graph):
    file, function = saved_graph
    with file.open("rb") as stream:
        return torch.compiler.load_compiled_function(stream, f_globals=function.__globals__)


@pytest.mark.usefixtures("stock_vllm")
def test_a_loaded_graph_computes_and_has_the_method_that_vllm_calls(saved_graph):
    assert aot_load.install()
    loaded = load(saved_graph)
    loaded._artifacts.compiled_fn.finalize_loading(None)
    assert loaded(torch.tensor([0.0, 1.0, 2.0, 3.0])).tolist() == [1.0, 3.0, 5.0, 7.0]


@pytest.mark.usefixtures("stock_vllm")
def test_the_fix_is_still_needed(saved_graph):
    """Fails when torch gives back an object with the method: the fix can go then."""
    assert not hasattr(load(saved_graph)._artifacts.compiled_fn, "finalize_loading")
