"""Small models of many libraries, with the checkpointing that each library offers for them."""

from library_models import of_images, of_sequences  # noqa: F401
from library_models.case import CASES, MODULES, Case

__all__ = ["CASES", "MODULES", "Case"]
