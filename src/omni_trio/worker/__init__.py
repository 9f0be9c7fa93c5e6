"""What worker and diffusion stages run in their own process: classes to subclass, and a ready one for torch modules.

A stage of kind ``worker`` or ``diffusion`` names its target as ``package.module:name``. That is either a subclass of
`Worker` (for denoising: of `DiffusionWorker`), or any other callable, which is then called once per request with
everything that came in for it (in a session: once per segment)::

    def shout(item: WorkItem, *, mark: str) -> str:
        return item.input.text.upper() + mark

This package is imported inside worker processes.
"""

from __future__ import annotations

from ._base import Reply, Worker, WorkItem
from ._diffusion import DiffusionWorker, Sample
from ._torch import TorchModuleWorker

__all__ = ["DiffusionWorker", "Reply", "Sample", "TorchModuleWorker", "WorkItem", "Worker"]
