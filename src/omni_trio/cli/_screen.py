"""What the user sees on stderr while a pipeline works."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from omni_trio.messages import TraceEvent
from omni_trio.pipeline import Pipeline

__all__ = ["Screen"]


class Screen:
    """Bars where stderr is a terminal, lines where it is not, and only errors where the user wants quiet.

    Bars are drawn when something happens, by the one who tells of it: no thread, no timer.
    """

    def __init__(self, pipeline: Pipeline, *, quiet: bool) -> None:
        self._pipeline = pipeline
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False)
        self._bars: Progress | None = None
        if self._console.is_terminal and not quiet:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[detail]}"),
                console=self._console,
                auto_refresh=False,
                transient=True,
                # Tokens go to stdout as they come; what is drawn here must not hold them back.
                redirect_stdout=False,
                redirect_stderr=False,
            )
        self._task: TaskID | None = None
        self._phases: dict[tuple[str, int], str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def error(self, text: str) -> None:
        """Say something that even a user who wants quiet has to know."""
        self._console.print(Text(text), soft_wrap=True)

    def note(self, text: str) -> None:
        """Say something."""
        if not self._quiet:
            self.error(text)

    def __call__(self, event: TraceEvent) -> None:
        """As an instrument: show how the replicas come up."""
        if event.name in ("replica.phase", "replica.ready"):
            place = (event.stage or "?", event.replica_id or 0)
            phase = "ready" if event.name == "replica.ready" else event.detail
            if self._phases.get(place) != phase:
                self._phases[place] = phase
                self._show_phase(place, phase)

    def _show_phase(self, place: tuple[str, int], phase: str) -> None:
        if self._bars is None:
            self.note(f"{place[0]} #{place[1]}: {phase}")
            return
        total = sum(stage.replicas for stage in self._pipeline.stages)
        waiting = [f"{name} #{replica}: {at}" for (name, replica), at in self._phases.items() if at != "ready"]
        self._show("starting", total, total - len(waiting) - (total - len(self._phases)), ", ".join(waiting[:3]))

    def requests(self, total: int, done: int, failed: int) -> None:
        """Show how far a batch is."""
        if self._bars is not None:
            self._show("requests", total, done, f"{failed} failed" if failed else "")

    def _show(self, what: str, total: int, done: int, detail: str) -> None:
        assert self._bars is not None  # the callers have asked
        if self._task is None:
            self._task = self._bars.add_task(what, total=total, detail=detail)
            self._bars.start()
        self._bars.update(self._task, description=what, total=total, completed=done, detail=detail, refresh=True)

    def end(self) -> None:
        """Take the bars away, so that what follows stands alone."""
        if self._bars is not None and self._task is not None:
            self._bars.stop()
            self._bars.remove_task(self._task)
            self._task = None
