"""Where results go: a folder, or stdout. Called in threads, since disks and pipes can be slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import attrs

from omni_trio.runtime import StageResult

from ._save import json_line, rate_complaint, save, to_json
from ._streams import CanNotWriteError, say

__all__ = ["Kept", "Sink"]


@attrs.frozen
class Kept:
    """What has been kept of a request's results."""

    files: Sequence[Path] = ()
    problems: Sequence[str] = ()
    """What could not be, and why."""


@attrs.frozen
class Sink:
    """Keeps results as files and as lines of JSON."""

    folder: Path | None
    """For files; None: results are in their lines only."""
    _lines: TextIO | None
    """Takes the lines; None: stdout does, or nobody where `_wants_lines` is false."""
    _wants_lines: bool

    @classmethod
    def open(cls, folder: Path | None, *, wants_lines: bool) -> Sink:
        """Open a folder, or stdout; to be closed.

        Args:
            folder: made where it is not there yet; None: stdout takes the lines.
            wants_lines: whether stdout shall have lines of JSON; a folder has them anyway.

        Raises:
            OSError: the folder can not be made or written to.
        """
        if folder is None:
            return cls(None, None, wants_lines)
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, (folder / "results.jsonl").open("w", encoding="utf-8"), wants_lines=True)

    def close(self) -> None:
        """Close the folder's file of lines."""
        if self._lines is not None:
            # Each line was flushed; one that could not be has been told of.
            with suppress(OSError):
                self._lines.close()

    def write(self, record: dict[str, Any], results: Mapping[str, StageResult], prefix: str) -> Kept:
        """Write a request's files, which are named after `prefix`, and its line.

        A result that can not be written concerns its own request alone: its line says so.

        Raises:
            BrokenPipeError: whoever read stdout has left.
            CanNotWriteError: the folder or stdout can not be written to.
        """
        try:
            kept = self._save(record, results, prefix)
            if self._lines is not None:
                self._lines.write(json_line(record))
                self._lines.flush()
            elif self._wants_lines:
                say(json_line(record))
        except BrokenPipeError:
            raise
        except OSError as error:
            raise CanNotWriteError(f"can not write the results: {error}") from error
        return kept

    def _save(self, record: dict[str, Any], results: Mapping[str, StageResult], prefix: str) -> Kept:
        files: list[Path] = []
        problems: list[str] = []
        taken: set[str] = set()
        outputs: dict[str, Any] = {}
        for stage, result in results.items():
            try:
                made = [] if self.folder is None else save(result, self.folder, f"{prefix}{stage}", taken)
                outputs[stage] = to_json(result, made, self.folder)
                json_line(outputs[stage])
            except OSError:
                raise
            except Exception as error:  # a worker may reply with anything
                outputs.pop(stage, None)
                problems.append(f"stage {stage!r}: its output can not be kept: {type(error).__name__}: {error}")
            else:
                files += made
                if (complaint := rate_complaint(result)) is not None:
                    problems.append(f"stage {stage!r}: {complaint}")
        if results:
            record["outputs"] = outputs
        if problems:
            record["error"] = {"type": "BadOutput", "message": "; ".join(problems)}
        return Kept(files, problems)
