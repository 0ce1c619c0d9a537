"""Serving policy: the settings of config.env that are no flags of vLLM, passed to its processes in one variable."""

import os

from pydantic import BaseModel, ConfigDict

from slimqwen.variant import Variant

VARIABLE = "SLIMQWEN_POLICY"


class Policy(BaseModel):
    """Settings of a variant for the plugins inside vLLM's processes.

    Attributes:
        require_warmup: whether a failed warm-up ends the server; otherwise the server becomes ready without warm-up.
        max_body_bytes: largest request body, bytes.
        thinking_token_budget: thinking tokens of a request that sets no budget; None for no limit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    require_warmup: bool = False
    max_body_bytes: int = 16 << 20
    thinking_token_budget: int | None = None


def variant_policy(variant: Variant) -> Policy:
    """The policy that a variant's config.env sets."""
    values = {key: setting.value for key, setting in variant.settings.items()}
    fields = {name: values[name.upper()] for name in Policy.model_fields if name.upper() in values}
    return Policy.model_validate(fields)


def read_policy() -> Policy:
    """The policy of the server that runs in this process, from its environment; the defaults if there is none."""
    return Policy.model_validate_json(os.environ.get(VARIABLE, "{}"))
