"""The forms of a prompt that callers of vLLM-Omni use, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from omni_trio.errors import InvalidRequest
from omni_trio.messages import Prompt, StageInput

__all__ = ["as_prompt", "as_stage_input", "says_resumable"]

_FORMS: Final = {"prompt_embeds": "embeds", "prompt_token_ids": "token_ids", "prompt": "text", "messages": "messages"}
"""Keys that say what to work on. The first one that is there counts, as in vLLM: embeddings go before the placeholders
for them, token ids before the words that they were made of."""
_NO_DATA: Final = frozenset((*_FORMS, "resumable"))


def as_prompt(given: Any, original: Any = None) -> Prompt:
    """Return a prompt as a runtime takes it.

    Args:
        given: what `AddRequest.prompt` may be.
        original: what `AddRequest.original_prompt` may be.

    Raises:
        InvalidRequest: it can be no prompt.
    """
    if given is None:
        given, original = original, None
    if given is None:
        raise InvalidRequest("there is no prompt: neither 'prompt' nor 'original_prompt' is given")
    if _is_batch(given):
        return tuple(as_stage_input(part) for part in given)
    if original is None and not _is_structured(given):
        wanted: Prompt = given  # the runtime checks it, and says what is wrong
        return wanted
    made = as_stage_input(given)
    if original is None or _is_batch(original) or not _is_structured(original):
        return made
    lent = {key: value for key, value in as_stage_input(original).data.items() if key not in made.data}
    return msgspec.structs.replace(made, data={**made.data, **lent}) if lent else made


def as_stage_input(given: Any) -> StageInput:
    """Return one prompt, in whatever form, as a `StageInput`.

    Raises:
        InvalidRequest: it can be no prompt.
    """
    if isinstance(given, StageInput):
        return given
    if isinstance(given, str):
        return StageInput(text=given)
    if isinstance(given, Mapping):
        return _from_mapping(given)
    if isinstance(given, Sequence) and not isinstance(given, bytes | bytearray):
        return StageInput(token_ids=_ids(given))
    if hasattr(given, "prompt_token_ids"):
        return _from_engine_request(given)
    raise InvalidRequest(f"a prompt is words, token ids, a mapping or a StageInput, not {type(given).__name__}")


def says_resumable(given: Any) -> bool | None:
    """Return what a prompt says of itself about input that will follow; None: nothing."""
    said = given.get("resumable") if isinstance(given, Mapping) else getattr(given, "resumable", None)
    return None if said is None else bool(said)


def _is_structured(given: Any) -> bool:
    return isinstance(given, Mapping | StageInput) or hasattr(given, "prompt_token_ids")


def _is_batch(given: Any) -> bool:
    return (
        isinstance(given, Sequence)
        and not isinstance(given, str | bytes | bytearray)
        and len(given) > 0
        and (isinstance(given[0], str) or _is_structured(given[0]))
    )


def _from_mapping(given: Mapping[str, Any]) -> StageInput:
    form = next((key for key in _FORMS if given.get(key) is not None), None)
    values: dict[str, Any] = {} if form is None else {_FORMS[form]: given[form]}
    if form in ("prompt_token_ids", "messages"):
        values[_FORMS[form]] = _ids(given[form]) if form == "prompt_token_ids" else tuple(given[form])
    elif form == "prompt" and not isinstance(given[form], str):
        raise InvalidRequest(f"'prompt' in a mapping is words, not {type(given[form]).__name__}")
    data = {str(key): value for key, value in given.items() if key not in _NO_DATA and value is not None}
    return StageInput(**values, data=data)


def _from_engine_request(given: Any) -> StageInput:
    if getattr(given, "mm_features", None):
        raise InvalidRequest(
            "the prompt has been preprocessed with multimodal features, which the first stage makes itself: hand over "
            "the raw prompt, with its multi_modal_data"
        )
    names = ("prompt_embeds", "prompt_token_ids", "additional_information")
    return _from_mapping({name: getattr(given, name, None) for name in names})


def _ids(given: Any) -> tuple[int, ...]:
    try:
        ids = tuple(given)
    except TypeError:
        raise InvalidRequest(f"token ids are a sequence of whole numbers, not {type(given).__name__}") from None
    if not ids or set(map(type, ids)) != {int} or min(ids) < 0:
        raise InvalidRequest("a prompt of token ids holds whole numbers from 0 up, at least one")
    return ids
