"""Companions of a request: those that came in messages, before those that the pipeline makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from omni_trio.bridges import Companion, Expand, ExpandContext, ExpandSpec
from omni_trio.errors import InvalidRequest
from omni_trio.pipeline import Pipeline

from ._commands import AddCompanionRequest
from ._prompts import as_stage_input

__all__ = ["companions_by_message", "make_companions", "with_companions_by_message"]


def companions_by_message(context: ExpandContext) -> Iterable[Companion]:
    """Make no companions: the `expand` of a pipeline whose companions all come in messages."""
    del context
    return ()


def make_companions(commands: Iterable[AddCompanionRequest]) -> tuple[Companion, ...]:
    """Make what the runtime wants of what came in messages.

    Raises:
        InvalidRequest: a companion can not be served.
    """
    made: list[Companion] = []
    roles: set[str] = set()
    for command in commands:
        if not command.role or command.role in roles:
            raise InvalidRequest(f"the role {command.role!r} of companion {command.companion_id!r} is empty or taken")
        roles.add(command.role)
        made.append(
            Companion(
                role=command.role,
                input=as_stage_input(command.prompt),
                sampling=_overrides(command, command.sampling_params_list),
            )
        )
    return tuple(made)


def _overrides(command: AddCompanionRequest, given: Sequence[object] | None) -> Mapping[str, object]:
    first = given[0] if given else None
    if first is None:
        return {}
    if not isinstance(first, Mapping):
        raise InvalidRequest(
            f"the parameters of companion {command.companion_id!r} must be a mapping of those that differ from its "
            f"parent's, not {type(first).__name__}"
        )
    return first


def with_companions_by_message(pipeline: Pipeline, find: Callable[[str], tuple[Companion, ...]]) -> Pipeline:
    """Return a pipeline whose requests get the companions that `find` knows for their ids.

    Where it knows none they get those that the pipeline makes itself. A pipeline without companions stays as it is.
    """
    declared = pipeline.expander
    if declared is None:
        return pipeline
    return attrs.evolve(pipeline, expand=_by_message(declared, find))


def _by_message(declared: ExpandSpec, find: Callable[[str], tuple[Companion, ...]]) -> Expand:
    def expand(context: ExpandContext) -> Iterable[Companion]:
        return find(context.request_id) or declared.function(context)

    expand.__qualname__ = declared.name  # what errors call it
    return expand
