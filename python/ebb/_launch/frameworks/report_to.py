"""``TrainingArguments(report_to=["tensorboard", "ebb"])`` of transformers."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from ebb._launch.frameworks.after_import import AfterImport
from ebb._support.log import log


@functools.cache
def offer_ebb() -> None:
    """Add ``"ebb"`` to the names that transformers knows, now or once it is imported."""
    AfterImport({"transformers.integrations.integration_utils": _add}).install()


def _add(module: ModuleType) -> None:
    try:
        callback = importlib.import_module("ebb.integrations.transformers").EbbCallback
        module.INTEGRATION_TO_CALLBACK.setdefault("ebb", callback)
    except Exception:  # of another release of transformers: its import must not fail
        log.info('report_to="ebb" is not available', exc_info=True)
