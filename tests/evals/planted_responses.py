"""Planted responses of a served model, as a logits processor of vLLM, for one request at a time.

Beside a copy of this file lies responses.json, a response by question; where the prompt shows no tools, the response
is "I cannot." So template, parser and server are real, and the model is what the test says.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm.v1.sample.logits_processor import LogitsProcessor


class PlantedResponses(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(vllm_config.model_config.model)
        self._responses = json.loads(Path(__file__).with_name("responses.json").read_text(encoding="utf-8"))
        self._tokens: list[int] = []
        self._output: list[int] = []

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        for _, _, prompt, output in batch_update.added if batch_update else ():
            text = self._tokenizer.decode(prompt)
            response = next(
                (response for question, response in self._responses.items() if question in text), ""
            )
            response = response if "<tools>" in text else "I cannot."
            self._output = output
            self._tokens = [*self._tokenizer(response).input_ids, self._tokenizer.eos_token_id]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        token = self._tokens[min(len(self._output), len(self._tokens) - 1)]
        logits[:] = -torch.inf
        logits[:, token] = 0
        return logits
