"""Worker stages: a torch module or any callable in a process of its own, spoken to over ZeroMQ."""

from __future__ import annotations

from ._client import WorkerClient, worker_client_factory

__all__ = ["WorkerClient", "worker_client_factory"]
