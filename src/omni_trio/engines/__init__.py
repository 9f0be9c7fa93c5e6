"""What can be behind a `StageClient`, and which stage kind means which of them."""

from __future__ import annotations

from ._open import open_clients

__all__ = ["open_clients"]
