"""ebb's logger; ``TORCH_LOGS="ebb"`` or ``"+ebb"`` enables its output."""

from __future__ import annotations

import logging

log = logging.getLogger("ebb")
