"""Variants: a name, its config.env with inheritance, its recipe, its weights and its baseline."""

from slimqwen.variant.config_env import OWN_KEYS as OWN_KEYS
from slimqwen.variant.config_env import ConfigError as ConfigError
from slimqwen.variant.config_env import Setting as Setting
from slimqwen.variant.config_env import local_names as local_names
from slimqwen.variant.config_env import names as names
from slimqwen.variant.config_env import read_token_count as read_token_count
from slimqwen.variant.variant import DRAFTS_NOTE as DRAFTS_NOTE
from slimqwen.variant.variant import DRAFTS_REFUSE as DRAFTS_REFUSE
from slimqwen.variant.variant import EMBEDDED as EMBEDDED
from slimqwen.variant.variant import SHAPE_PREFIX as SHAPE_PREFIX
from slimqwen.variant.variant import Variant as Variant
from slimqwen.variant.variant import load as load
from slimqwen.variant.variant import making_command as making_command
from slimqwen.workspace import repository_root as repository_root
