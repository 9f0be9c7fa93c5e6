"""What can be called in an engine, and how a call is put to it.

Two things answer calls. The engine core has methods of its own; those in the table below are called by their bare
names, with the arguments of the functions that stand for them here, by position or by name; any other one after
``engine.``, by position only. Every other name is a method of the engine's workers.

All in the table exist in vLLM from 0.20 on, but for ``set_weight_version`` and ``get_weight_version``, which came with
0.32. A method that the running version lacks makes the call fail, and nothing else.

====================== =============================================== =====================================
Method                 Arguments                                       Result
====================== =============================================== =====================================
add_lora               lora_name, lora_int_id, lora_path               whether it is loaded now
remove_lora, pin_lora  lora_int_id                                     whether it was loaded
list_loras                                                             the ids, sorted
profile                is_start = True, prefix = None                  None
sleep                  level = 1, mode = "abort"                       None, when asleep
wake_up                tags = None                                     from 0.32: whether all memory is back
is_sleeping                                                            bool
pause_scheduler        mode = "abort" ("wait", "keep"), clear_cache    None, when nothing runs any more
resume_scheduler                                                       None
is_scheduler_paused                                                    bool
reset_prefix_cache     reset_running_requests, reset_connector         whether it was reset
reset_mm_cache                                                         None
reset_encoder_cache                                                    None
set_weight_version     weight_version                                  None
get_weight_version                                                     str
====================== =============================================== =====================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from omni_trio.pipeline import nearest

from . import _compat

__all__ = ["METHODS", "clears_multimodal_cache", "nearest_method", "plan_call", "read_result"]

_Arguments: TypeAlias = tuple[Any, ...]

_MUTING: Final = frozenset(("get_model", "get_kv_cache_spec"))
"""Worker methods whose results vLLM's encoder can not encode: its output thread dies, and the engine is mute."""

_OWN_LOOP: Final = frozenset(
    (
        "abort_requests",
        "add_request",
        "post_step",
        "preprocess_add_request",
        "process_input_sockets",
        "process_output_sockets",
        "run_busy_loop",
        "run_engine_core",
        "shutdown",
        "startup_handshake",
        "step",
        "step_fn",
        "step_with_batch_queue",
    )
)
"""Methods of the engine core that are its own works: called from outside they break or block it."""

_PAUSE_MODES: Final = ("abort", "wait", "keep")


def plan_call(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, _Arguments]:
    """Return the engine core's method and its arguments for a call.

    Raises:
        ValueError: the call can not be made, or would be the engine's end.
    """
    name, own = method.removeprefix("engine."), method.startswith("engine.")
    if name.startswith("_"):
        raise ValueError("methods whose names begin with '_' are not to be called")
    if (shape := _ENGINE_METHODS.get(name)) is not None:
        try:
            return name, shape(*args, **kwargs)
        except TypeError as error:
            # It names the function that stands for the method, and its arguments.
            raise ValueError(str(error).replace(f"{shape.__name__}()", f"{name}()")) from error
    if own:
        if kwargs:
            raise ValueError("methods of the engine core take positional arguments only")
        if name in _OWN_LOOP:
            raise ValueError("the engine core calls this method itself; called from outside it would break the engine")
        worker_method = args[0] if name == "collective_rpc" and args else None
        call: tuple[str, _Arguments] = (name, tuple(args))
    else:
        worker_method = name
        call = ("collective_rpc", (name, None, tuple(args), dict(kwargs)))
    if worker_method in _MUTING:
        raise ValueError("its result can not be sent between processes, and an engine that tries never speaks again")
    return call


def clears_multimodal_cache(name: str, arguments: _Arguments) -> bool:
    """Whether the engine forgets the images, sounds and videos that it has been sent; both sides have to."""
    if name == "sleep":
        return int(arguments[0]) >= 1
    return name == "reset_mm_cache" or (name == "pause_scheduler" and bool(arguments[1]))


def read_result(method: str, result: Any) -> Any:
    """Return a result as the table says it is."""
    return sorted(result) if method.removeprefix("engine.") == "list_loras" else result


def nearest_method(method: str) -> str:
    """Return ``; did you mean 'x'?`` for a method that was not found, or nothing."""
    name = method.removeprefix("engine.")
    return "" if name in _ENGINE_METHODS else nearest(name, _ENGINE_METHODS)


def _checked_mode(mode: str) -> str:
    if mode not in _PAUSE_MODES:
        raise ValueError(f"no such mode {mode!r}{nearest(str(mode), _PAUSE_MODES)} ({', '.join(_PAUSE_MODES)})")
    return mode


def _add_lora(lora_name: str, lora_int_id: int, lora_path: str) -> _Arguments:
    return (_compat.lora_request(lora_name, lora_int_id, lora_path),)


def _one_lora(lora_int_id: int) -> _Arguments:
    return (lora_int_id,)


def _profile(is_start: bool = True, prefix: str | None = None) -> _Arguments:
    return (is_start, prefix)


def _sleep(level: int = 1, mode: str = "abort") -> _Arguments:
    return (level, _checked_mode(mode))


def _wake_up(tags: Sequence[str] | None = None) -> _Arguments:
    return (None if tags is None else list(tags),)


def _pause_scheduler(mode: str = "abort", clear_cache: bool = True) -> _Arguments:
    return (_checked_mode(mode), clear_cache)


def _reset_prefix_cache(
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> _Arguments:
    return (reset_running_requests, reset_connector)


def _set_weight_version(weight_version: str) -> _Arguments:
    return (str(weight_version),)


def _nothing() -> _Arguments:
    return ()


_ENGINE_METHODS: Final[Mapping[str, Callable[..., _Arguments]]] = {
    "add_lora": _add_lora,
    "remove_lora": _one_lora,
    "pin_lora": _one_lora,
    "list_loras": _nothing,
    "profile": _profile,
    "sleep": _sleep,
    "wake_up": _wake_up,
    "is_sleeping": _nothing,
    "pause_scheduler": _pause_scheduler,
    "resume_scheduler": _nothing,
    "is_scheduler_paused": _nothing,
    "reset_prefix_cache": _reset_prefix_cache,
    "reset_mm_cache": _nothing,
    "reset_encoder_cache": _nothing,
    "set_weight_version": _set_weight_version,
    "get_weight_version": _nothing,
}

METHODS: Final = frozenset(_ENGINE_METHODS)
"""The methods in the table."""
