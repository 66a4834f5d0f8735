"""The contract that every family keeps. A family's tests are a subclass with a few attributes: see test_lara_mini.py."""

from families.blocks import Blocks
from families.editing import Editing
from families.loading import Loading
from families.reading import Reading
from families.running import Running


class Suite(Loading, Reading, Running, Editing, Blocks):
    """Subclass it as `TestX` with `model_type`, and what differs from `Base`'s attributes."""
