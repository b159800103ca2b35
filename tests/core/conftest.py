"""In a build without plug-ins, a guard of the tests lets rules replay custom operators."""

from __future__ import annotations

import ebb

if "custom_operators" not in ebb._C.plugins:
    from ebb import _testing

    _testing.trust_custom_operators()
