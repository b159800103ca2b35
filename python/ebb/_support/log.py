"""ebb's logger, which ``TORCH_LOGS="ebb"`` and ``"+ebb"`` show."""

from __future__ import annotations

import logging

log = logging.getLogger("ebb")
