"""Serving policy: what a config.env decides that is no flag of vLLM, handed to vLLM's processes in one variable."""

import os

from pydantic import BaseModel, ConfigDict

from slimqwen.variant import Variant

VARIABLE = "SLIMQWEN_POLICY"


class Policy(BaseModel):
    """Settings of the variant for the plugins inside vLLM's process.

    Attributes:
        require_warmup: whether the server ends if its warm-up fails, instead of serving cold.
        max_body_bytes: limit of a request body, bytes.
        thinking_token_budget: thinking tokens of a request that sets no budget; None for no limit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    require_warmup: bool = False
    max_body_bytes: int = 16 << 20
    thinking_token_budget: int | None = None


def of(variant: Variant) -> Policy:
    """The policy that a variant's config.env sets."""
    given = {key: setting.value for key, setting in variant.settings.items()}
    fields = {name: given[name.upper()] for name in Policy.model_fields if name.upper() in given}
    return Policy.model_validate(fields)


def read() -> Policy:
    """The policy of the server in this process."""
    return Policy.model_validate_json(os.environ.get(VARIABLE, "{}"))
