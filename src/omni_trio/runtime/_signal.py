"""A wake-up for one waiting task, which resets itself."""

from __future__ import annotations

import trio

__all__ = ["Signal"]


class Signal:
    """One task waits, anybody sets. A `set` before the `wait` is remembered; several count as one.

    trio's `Event` can not be reset, so a task that waits again and again would make a new one each time; this
    costs about a third of that, on a path that is taken once per event of each request.
    """

    __slots__ = ("_set", "_task")

    def __init__(self) -> None:
        self._set = False
        self._task: trio.lowlevel.Task | None = None

    def set(self) -> None:
        """Wake the task that waits, or else the next one that will."""
        task = self._task
        if task is None:
            self._set = True
        else:
            self._task = None
            trio.lowlevel.reschedule(task)

    async def wait(self) -> None:
        """Wait until set. Being cancelled leaves a `set` that came meanwhile in place.

        Raises:
            trio.BusyResourceError: another task already waits.
        """
        if self._set:
            await trio.lowlevel.checkpoint()
            self._set = False
            return
        if self._task is not None:
            await trio.lowlevel.checkpoint()
            raise trio.BusyResourceError("another task already waits for this")
        self._task = trio.lowlevel.current_task()

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
