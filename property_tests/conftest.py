"""How long property tests look: as long as anybody waits for them, or, ``--hypothesis-profile=nightly``, longer."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("nightly", max_examples=2000, deadline=None)
