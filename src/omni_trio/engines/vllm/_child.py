"""What runs in an engine's process: builds its config from plain data, then runs vLLM's engine core."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ._text import describe

__all__ = ["engine_main"]

_DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # "auto" would bind the worker of every engine of this machine to the same first core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def engine_main(
    *,
    engine_args: Mapping[str, Any],
    handshake_address: str,
    directory: str,
    log_stats: bool,
    devices: Sequence[str] = (),
) -> None:
    """Run one engine; the entry of its process. Returns, or exits, after SIGTERM.

    Args:
        engine_args: arguments of `vllm.EngineArgs`, as plain data.
        handshake_address: zmq address of the client, which is told of failures during start-up.
        directory: for sockets and temporary files of this engine alone; the client removes it.
        log_stats: whether outputs carry the scheduler's statistics.
        devices: ids of the accelerators that this engine may use; all, if empty.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    # vLLM leaves sockets and rendezvous files behind wherever these point.
    os.environ["VLLM_RPC_BASE_PATH"] = directory
    os.environ["TMPDIR"] = directory
    tempfile.tempdir = None
    phase = "config"
    try:
        from . import _compat  # noqa: PLC0415 - imports vLLM, whose failure is reported like any other

        # Forked from a process that imported vLLM earlier, this one has to be told again.
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
        os.environ.update(_compat.visible_devices(devices))
        _set_threads(on_cpu=_compat.on_cpu())
        config = _compat.engine_config(engine_args)
        phase = "load"
        _compat.run_engine_core(
            config,
            alone=engine_args.get("distributed_executor_backend") in (None, "uni"),
            handshake_address=handshake_address,
            log_stats=log_stats,
        )
    except Exception as error:
        _tell(handshake_address, phase, error)
        raise


def _set_threads(*, on_cpu: bool) -> None:
    if on_cpu:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if (count := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        import torch  # noqa: PLC0415 - only engine processes need it

        # The variable is read when torch is loaded, which may have been before the fork.
        torch.set_num_threads(max(1, int(count)))


def _tell(handshake_address: str, phase: str, error: Exception) -> None:
    """Tell the client why there will be no engine, if it is still waiting for one."""
    if not Path(handshake_address.removeprefix("ipc://")).exists():
        return
    message = {
        "status": "FAILED",
        "phase": phase,
        "type": type(error).__name__,
        "message": describe(error),
        "key": getattr(error, "key", None),
    }
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as socket:
            socket.linger = 1000
            socket.connect(handshake_address)
            # The log has the error too, so a message that does not get through is no loss.
            with contextlib.suppress(zmq.ZMQError):
                socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
    finally:
        context.term()
