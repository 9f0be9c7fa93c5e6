"""What is asked of a request at the door, before any stage has seen it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import trio

from omni_trio.bridges import Companion, ExpandContext, ExpandSpec
from omni_trio.errors import BridgeFailed, InvalidRequest
from omni_trio.messages import StageInput
from omni_trio.pipeline import Pipeline, nearest
from omni_trio.routing import RoutePlan

__all__ = [
    "RequestOptions",
    "check_completions",
    "checked_id",
    "checked_prompt",
    "checked_segment",
    "make_companions",
    "split_params",
]

_PRIORITIES = range(-(2**31), 2**31)
"""What an engine can be told."""

_SLIP = 0.85
"""How like a stage's name a word has to be to pass for a misspelt one (1: equal)."""


@attrs.frozen(kw_only=True)
class RequestOptions:
    """What a caller may say about a request beside its prompt, as it was given."""

    sampling_params: Any
    request_id: Any
    final_stage: Any
    deadline: Any
    priority: Any

    def absolute_deadline(self) -> float:
        """The time on trio's clock at which the request has to be over.

        Raises:
            InvalidRequest: it is no number of seconds above 0.
        """
        seconds = self.deadline
        if seconds is None:
            return math.inf
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise InvalidRequest(f"a deadline is a number of seconds above 0, or None, not {seconds!r}")
        return trio.current_time() + seconds

    def checked_priority(self) -> int:
        """The priority, as engines take it.

        Raises:
            InvalidRequest: it is no whole number of 32 bits.
        """
        priority = self.priority
        if isinstance(priority, bool) or not isinstance(priority, int) or priority not in _PRIORITIES:
            raise InvalidRequest(f"priority must be a whole number of 32 bits, not {priority!r}")
        return priority

    def final_stage_id(self, pipeline: Pipeline) -> int | None:
        """The id of the stage at which the request ends; None: at the end of the pipeline.

        Raises:
            InvalidRequest: there is no such stage, or a request can not end there.
        """
        given = self.final_stage
        if given is None:
            return None
        if isinstance(given, str):
            try:
                stage_id = pipeline.stage_id(given)
            except KeyError as error:
                raise InvalidRequest(f"final_stage: {error.args[0]}") from None
        elif isinstance(given, bool) or not isinstance(given, int):
            raise InvalidRequest(f"final_stage: expected a stage's name or index, not {given!r}")
        else:
            stage_id = given
            if not 0 <= stage_id < len(pipeline.stages):
                raise InvalidRequest(f"final_stage: there is no stage {stage_id}; there are {len(pipeline.stages)}")
        if pipeline.pair is not None and stage_id == pipeline.pair[0]:
            name = pipeline.stages[stage_id].name
            raise InvalidRequest(
                f"final_stage: a request can not end at the prefill stage {name!r}; its decode stage can"
            )
        return stage_id


def checked_id(request_id: Any) -> str:
    """Return a caller's request id, if it can be one."""
    if not isinstance(request_id, str):
        raise InvalidRequest(f"a request id must be a string, not {type(request_id).__name__}")
    if not request_id:
        raise InvalidRequest("a request id must not be empty; leave it out to get one made")
    return request_id


def checked_prompt(prompt: Any, pipeline: Pipeline) -> StageInput:
    """Return a caller's prompt as a `StageInput`, if the first stage of the pipeline can be given it."""
    made = _prompt(prompt)
    first = pipeline.stages[0]
    if made.batch is not None and first.kind not in ("diffusion", "simulated"):
        raise InvalidRequest(
            f"a batch of prompts is for a diffusion stage; the first stage is of kind {first.kind!r}: "
            "make one request for each",
            stage=first.name,
            stage_id=0,
        )
    return made


def checked_segment(segment: Any, pipeline: Pipeline) -> StageInput:
    """Return a segment of a session as a `StageInput`; batches are none."""
    made = checked_prompt(segment, pipeline)
    if made.batch is not None:
        raise InvalidRequest("a segment of a session is one input, not a batch")
    return made


def _prompt(prompt: Any) -> StageInput:
    if isinstance(prompt, StageInput):
        if _is_empty(prompt):
            raise InvalidRequest("the prompt is empty: give it text, token_ids, messages, embeds or data")
        _check_types(prompt)
        for part in prompt.batch or ():
            if _is_empty(part) or part.batch is not None:
                raise InvalidRequest("each prompt of a batch needs text, token_ids, messages, embeds or data")
        return prompt
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("the prompt is empty")
        return StageInput(text=prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        if not prompt:
            raise InvalidRequest("the prompt is empty")
        if isinstance(prompt[0], str | StageInput):
            return _prompt(StageInput(batch=tuple(_prompt(part) for part in prompt)))
        _check_tokens(prompt)
        return StageInput(token_ids=tuple(prompt))
    raise InvalidRequest(f"a prompt is a string, a sequence of token ids or a StageInput, not {type(prompt).__name__}")


def _check_types(prompt: StageInput) -> None:
    if not isinstance(prompt.text, str | None):
        raise InvalidRequest(f"a prompt's text is a string, not {type(prompt.text).__name__}")
    if prompt.token_ids is not None:
        _check_tokens(prompt.token_ids)
    messages: Sequence[object] = prompt.messages or ()
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"a message is a mapping with 'role' and 'content', not {message!r:.80}")


def _check_tokens(token_ids: Sequence[Any]) -> None:
    # Looked at in C: a prompt may have a hundred thousand tokens, and this runs on the trio thread.
    if token_ids and (set(map(type, token_ids)) != {int} or min(token_ids) < 0):
        wrong = next(token for token in token_ids if type(token) is not int or token < 0)
        raise InvalidRequest(f"a prompt of token ids holds whole numbers from 0 up, not {wrong!r}")


def _is_empty(prompt: StageInput) -> bool:
    given = (prompt.text, prompt.token_ids, prompt.messages, prompt.embeds, prompt.batch)
    return all(part is None or (isinstance(part, str | tuple) and not part) for part in given) and not prompt.data


def split_params(given: Any, pipeline: Pipeline) -> dict[int, Any]:
    """Deal out what a caller gave as sampling params to the stages.

    A list has an entry per stage; a mapping in which any key is a stage's name has only such keys; anything else is
    for the first stage.

    What is given for the first stage alone is also for the second where they are a prefill/decode pair: to the caller
    the two are one.
    """
    names = [spec.name for spec in pipeline.stages]
    if given is None:
        return {}
    if isinstance(given, list | tuple):
        entries = list(given)
        if pipeline.pair is not None and len(entries) == len(names) - 1:
            entries.insert(1, entries[0])
        if len(entries) != len(names):
            raise InvalidRequest(
                f"sampling_params as a list needs one entry per stage ({len(names)}: {', '.join(names)}), "
                f"not {len(given)}"
            )
        return dict(enumerate(entries))
    bare = {0: given} if pipeline.pair is None else dict.fromkeys(pipeline.pair, given)
    if not isinstance(given, Mapping):
        return bare
    if not any(key in names for key in given):
        for key, value in given.items():
            # A mapping under a name that is nearly a stage's is a stage's with a slip of the pen.
            if isinstance(value, Mapping) and difflib.get_close_matches(str(key), names, cutoff=_SLIP):
                raise InvalidRequest(
                    f"sampling_params: no stage is called {key!r}{nearest(str(key), names)} "
                    f"(stages: {', '.join(names)})"
                )
        return bare
    for key in given:
        if key not in names:
            raise InvalidRequest(
                f"sampling_params: no stage is called {key!r}{nearest(str(key), names)} (stages: {', '.join(names)})"
            )
    return {names.index(key): value for key, value in given.items()}


def check_completions(params: Sequence[Any], plan: RoutePlan, *, session: bool) -> None:
    """Refuse several completions per request where only one can go on."""
    for stage_id in plan.stages:
        wanted = params[stage_id]
        n = wanted.get("n", 1) if isinstance(wanted, Mapping) else getattr(wanted, "n", 1)
        if n == 1 or n is None:
            continue
        stage = plan.pipeline.stages[stage_id].name
        if session:
            raise InvalidRequest(f"n must be 1 in a session, not {n!r}", stage=stage, stage_id=stage_id)
        if plan.feeds[stage_id] or plan.connects[stage_id] or plan.handoff is not None:
            raise InvalidRequest(
                f"n must be 1 at a stage that feeds another, not {n!r}: make {n!r} requests, or end this one here with "
                f"final_stage = {stage!r}",
                stage=stage,
                stage_id=stage_id,
            )


def make_companions(spec: ExpandSpec, context: ExpandContext, *, stage: str) -> tuple[Companion, ...]:
    """Run a pipeline's expand function and check what it gives.

    Raises:
        BridgeFailed: it raised, or gave something else than companions with roles of their own.
    """
    place: dict[str, Any] = {"request_id": context.request_id, "stage": stage, "stage_id": 0}
    seen: set[str] = set()
    made: list[Companion] = []
    try:
        given = list(spec.function(context))
    except Exception as error:
        raise BridgeFailed(
            f"the expand function {spec.name!r} raised {type(error).__name__}: {error}; no stage has seen the request",
            **place,
        ) from error
    for companion in given:
        if not isinstance(companion, Companion):
            raise BridgeFailed(
                f"the expand function {spec.name!r} gave {type(companion).__name__}; it gives Companions", **place
            )
        if not companion.role or companion.role in seen:
            raise BridgeFailed(
                f"the expand function {spec.name!r} gave the role {companion.role!r} twice or left it empty", **place
            )
        if _is_empty(companion.input):
            raise BridgeFailed(
                f"the expand function {spec.name!r} gave the companion {companion.role!r} no input", **place
            )
        seen.add(companion.role)
        made.append(companion)
    return tuple(made)
