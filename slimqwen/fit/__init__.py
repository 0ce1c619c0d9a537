"""Whether a model fits on a GPU and how fast it could be there, by arithmetic alone: no weights, CUDA or vLLM.

    subject.py    what MODEL names: a variant, a folder, a config.json, a committed shape, a repository of the hub
    optimised.py  the same checkpoint after each optimisation that the project offers, as tensors without content
    memory.py     weights, cache and activations of a server on one GPU, and its roofline
    verdict.py    whether it fits, and which recipe, load or number of GPUs would make it fit
    tables.py     the steps on one GPU, the notes, the tables over GPUs

`slimqwen plan` refines the result with vLLM's own code where the CUDA environment is installed; bytes and blocks agree.
"""
