"""One request at one stage: who owns it, which replica works on it, what has come out so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from omni_trio.errors import EngineDied
from omni_trio.merging import merge_data
from omni_trio.messages import FinishReason, Modality, StageMetrics, StageOutput

from .metrics import LegMeter

if TYPE_CHECKING:
    from .pool import Replica

__all__ = ["Leg", "LegOwner", "Mark"]

Mark: TypeAlias = tuple[int, int, int]
"""How much of a leg's output there was at some moment: tokens, characters of text, and pieces of data."""

_NO_DATA: dict[str, Any] = {}
"""Stays empty."""


class LegOwner(Protocol):
    """The request that a leg belongs to. Called from a replica's reader: both must be quick and must not raise."""

    def leg_output(self, leg: Leg, output: StageOutput) -> None:
        """The stage gave an output that is not its last one."""
        ...

    def leg_ended(self, leg: Leg, output: StageOutput, now: float) -> None:
        """The stage gave its last output, or failed the request. The replica has let go of the leg already."""
        ...

    def leg_broken(self, leg: Leg, error: Exception) -> None:
        """An output of the stage could not be made sense of."""
        ...

    def leg_lost(self, leg: Leg, death: EngineDied) -> None:
        """The replica that worked on the leg is gone."""
        ...


class Leg:
    """Made when a request, or a companion of it, is bound to a replica of a stage; gone with the request."""

    __slots__ = (
        "_data",
        "_merged",
        "_text",
        "_text_size",
        "collects",
        "emits",
        "external_id",
        "finish_reason",
        "held",
        "meter",
        "metrics",
        "modality",
        "owner",
        "readers",
        "replica",
        "request_id",
        "role",
        "segments",
        "stage",
        "stage_id",
        "streams",
        "token_ids",
        "turn",
    )

    def __init__(
        self,
        owner: LegOwner,
        replica: Replica,
        *,
        request_id: str,
        external_id: str,
        stage: str,
        stage_id: int,
        modality: Modality,
        emits: bool,
        collects: bool,
        streams: bool,
        readers: int = 0,
        role: str | None = None,
        turn: int = 0,
    ) -> None:
        self.owner = owner
        self.replica = replica
        self.request_id = request_id
        self.external_id = external_id
        self.stage = stage
        self.stage_id = stage_id
        self.modality = modality
        self.emits = emits
        """Whether outputs go to the user."""
        self.collects = collects
        """Whether outputs are kept for a bridge."""
        self.readers = readers
        """Bridges that have not had all of them yet."""
        self.streams = streams
        """Whether a bridge wants to see each output as it comes."""
        self.role = role
        """What the companion is to the request; None: this is the request itself."""
        self.turn = turn
        """In a session: counts the caller's barge-ins."""
        self.segments: deque[int] | None = None
        """In a session: the numbers of the segments that the stage has been given and has not worked off."""
        self.held = False
        """Whether the leg counts as load of its replica."""
        self.meter = LegMeter()
        self.metrics: StageMetrics | None = None
        self.finish_reason: FinishReason | None = None
        self.token_ids: list[int] = []
        self._text: list[str] = []
        self._text_size = 0
        self._data: list[Mapping[str, Any]] = []
        self._merged: tuple[int, dict[str, Any]] = (0, _NO_DATA)

    def collect(self, output: StageOutput) -> None:
        """Keep an output for the bridges that this stage feeds."""
        self.token_ids.extend(output.token_ids)
        if output.text:
            self._text.append(output.text)
            self._text_size += len(output.text)
        if output.data:
            self._data.append(output.data)
        self.finish_reason = output.finish_reason

    def forget(self) -> None:
        """Let go of what was kept, which may be large: no bridge will look at it any more."""
        self.collects = False
        # New ones, since a bridge may have handed the old ones on as they are.
        self.token_ids, self._text, self._data = [], [], []
        self._text_size = 0
        self._merged = 0, _NO_DATA

    @property
    def segment(self) -> int:
        """In a session: the number of the segment that the stage is at."""
        return self.segments[0] if self.segments else 0

    def mark(self) -> Mark:
        """How much there is now."""
        return len(self.token_ids), self._text_size, len(self._data)

    def tokens_up_to(self, mark: Mark | None) -> Sequence[int]:
        """The tokens that there were at a mark, or all."""
        return self.token_ids if mark is None or mark[0] == len(self.token_ids) else self.token_ids[: mark[0]]

    def text_up_to(self, mark: Mark | None) -> str:
        """The text that there was at a mark, or all."""
        text = self.text()
        return text if mark is None else text[: mark[1]]

    def data_up_to(self, mark: Mark | None) -> dict[str, Any]:
        """The data that there was at a mark, or all, added up."""
        if self.segments is None:
            return self.data()
        # In a session the pieces are kept, since marks count them; what was added up before is not added up again.
        count = len(self._data) if mark is None else mark[2]
        done, merged = self._merged
        if count < done:
            return merge_data(self._data[:count])
        if count > done:
            merged = merge_data([merged, *self._data[done:count]])
            self._merged = count, merged
        return dict(merged)

    def text(self) -> str:
        """All text so far."""
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def data(self) -> dict[str, Any]:
        """All data so far, added up."""
        if len(self._data) > 1:
            self._data = [merge_data(self._data)]
        return dict(self._data[0]) if self._data else {}

    def finish(self, now: float) -> StageMetrics:
        """Close the meter."""
        metrics = self.metrics = self.meter.finish(
            now,
            self.replica.totals,
            request_id=self.external_id,
            stage=self.stage,
            stage_id=self.stage_id,
            replica_id=self.replica.replica_id,
            modality=self.modality,
        )
        return metrics
