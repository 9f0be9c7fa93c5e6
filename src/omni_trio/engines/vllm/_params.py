"""Parameters of llm and pooling stages: checked, merged with the stage's defaults, made once and shared."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from omni_trio.errors import InvalidRequest
from omni_trio.pipeline import nearest

from . import _compat
from ._kv import unpaired
from ._text import describe

__all__ = ["ParameterResolver", "needs_detokenizer"]

_KINDS = {"llm": "sampling", "pooling": "pooling"}
_PREFERRED_TASKS = ("embed", "classify", "token_embed", "token_classify")


class ParameterResolver:
    """Implements `StageClient.resolve_params` for one replica.

    Args:
        kind: the stage's kind.
        defaults: the stage's own parameters, under those of each request.
        tasks: what the engine says it can do, such as ``("generate",)`` or ``("embed", "token_embed")``.
        validate: checks a made object against the model; raises what vLLM raises.
        paired: whether the stage is one half of a prefill/decode pair.
    """

    def __init__(
        self,
        kind: Literal["llm", "pooling"],
        *,
        stage: str,
        stage_id: int,
        defaults: Mapping[str, Any],
        tasks: Sequence[str],
        validate: Callable[[Any], None],
        paired: bool = False,
    ) -> None:
        self._kind = kind
        self._stage = stage
        self._stage_id = stage_id
        self._tasks = tuple(tasks)
        self._validate = validate
        self._paired = paired
        self._wanted = _compat.SamplingParams if kind == "llm" else _compat.PoolingParams
        self._other = _compat.PoolingParams if kind == "llm" else _compat.SamplingParams
        self._fields = _compat.public_fields(self._wanted)
        self._other_fields = _compat.public_fields(self._other)
        self._defaults = dict(defaults)
        self._default = self._from_mapping(self._defaults)

    def resolve(self, params: Any) -> Any:
        """Return SamplingParams or PoolingParams that requests may share.

        Raises:
            InvalidRequest: they can not be used; says which one, and what the stage takes.
        """
        if params is None:
            return self._default
        if isinstance(params, Mapping):
            return self._from_mapping({**self._defaults, **params}) if params else self._default
        if isinstance(params, self._wanted):
            return self._finish(params)
        if isinstance(params, self._other):
            raise self._invalid(
                f"{type(params).__name__} were given; this is {self._article} stage, which takes "
                f"{self._wanted.__name__} or a mapping of them"
            )
        raise self._invalid(
            f"parameters must be a mapping or {self._wanted.__name__}, not {type(params).__name__} ({params!r:.80})"
        )

    @property
    def _article(self) -> str:
        return "an llm" if self._kind == "llm" else "a pooling"

    def _invalid(self, message: str) -> InvalidRequest:
        return InvalidRequest(message, stage=self._stage, stage_id=self._stage_id)

    def _from_mapping(self, values: Mapping[str, Any]) -> Any:
        for name in values:
            if name not in self._fields:
                raise self._invalid(self._unknown(str(name)))
        task = values.get("task")
        if self._kind == "pooling" and task is not None and task not in self._tasks:
            raise self._invalid(f"the engine has no task {task!r}; it has: {', '.join(self._tasks)}")
        try:
            params = _compat.make_sampling_params(values) if self._kind == "llm" else self._wanted(**values)
        except Exception as error:
            raise self._wrapped(error) from error
        return self._finish(params)

    def _finish(self, params: Any) -> Any:
        try:
            params = _compat.normalised(params)
            if self._kind == "pooling" and params.task is None:
                params.task = next((task for task in _PREFERRED_TASKS if task in self._tasks), None)
            self._validate(params)
        except Exception as error:
            raise self._wrapped(error) from error
        if self._paired and (complaint := unpaired(params)) is not None:
            raise self._invalid(f"bad {_KINDS[self._kind]} parameters: {complaint}")
        return params

    def _wrapped(self, error: Exception) -> InvalidRequest:
        # PoolingParams travel as an array, so its decoder counts fields instead of naming them.
        text = re.sub(
            r"\$\[(\d+)\]", lambda match: f"$.{self._wanted.__struct_fields__[int(match[1])]}", describe(error)
        )
        return self._invalid(f"bad {_KINDS[self._kind]} parameters: {text}")

    def _unknown(self, name: str) -> str:
        what = _KINDS[self._kind]
        if name in self._other_fields:
            other = "pooling" if self._kind == "llm" else "sampling"
            return (
                f"{name!r} is a {other} parameter; this is {self._article} stage, which takes {what} parameters: "
                f"{', '.join(self._fields)}"
            )
        if name == "output_kind":
            return "'output_kind' can not be set: outputs are always deltas"
        return f"no {what} parameter is called {name!r}{nearest(name, self._fields)}"


def needs_detokenizer(params: Any) -> bool:
    """Whether outputs need vLLM's output processor even where nobody reads the text."""
    return bool(
        params.stop
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or getattr(params, "logprob_token_ids", None)
    )
