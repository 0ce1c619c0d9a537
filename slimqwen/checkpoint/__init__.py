"""A checkpoint folder: its files, its tensors, its config, and how it is checked and published.

The names that most callers need are here; the rest is in `files`, `tensors`, `config` and `rtn`.
"""

from slimqwen.checkpoint.config import RANDOM_WEIGHTS as RANDOM_WEIGHTS
from slimqwen.checkpoint.config import has_random_weights as has_random_weights
from slimqwen.checkpoint.config import quantisation as quantisation
from slimqwen.checkpoint.config import read_config as read_config
from slimqwen.checkpoint.config import text_config as text_config
from slimqwen.checkpoint.errors import CorruptCheckpointError as CorruptCheckpointError
from slimqwen.checkpoint.errors import MissingCheckpointError as MissingCheckpointError
from slimqwen.checkpoint.files import Manifest as Manifest
from slimqwen.checkpoint.files import check_folder as check_folder
from slimqwen.checkpoint.files import digest as digest
from slimqwen.checkpoint.files import recipe_key as recipe_key
from slimqwen.checkpoint.files import verify as verify
from slimqwen.formats.format import UnsupportedFormatError as UnsupportedFormatError
