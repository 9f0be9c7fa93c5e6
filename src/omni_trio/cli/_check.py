"""What ``omni-trio check`` does."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.telemetry.mermaid import mermaid_graph

from . import _status
from ._load import load
from ._streams import CanNotWriteError, writing

__all__ = ["check"]


def check(path: str, *, mermaid: bool) -> None:
    """Load the pipeline in `path` and print it as a table and as a Mermaid graph, or as the graph only."""
    pipeline = load(path)
    try:
        with writing():
            if not mermaid:
                _print_table(pipeline)
                sys.stdout.write("\n")
            sys.stdout.write(mermaid_graph(pipeline))
    except BrokenPipeError:
        sys.exit(_status.BROKEN_PIPE)
    except CanNotWriteError as error:
        _status.fail(str(error), _status.FAILED)


def _print_table(pipeline: Pipeline) -> None:
    limits = [", ".join(_limits(stage)) for stage in pipeline.stages]
    columns = {
        "stage": [stage.name for stage in pipeline.stages],
        "kind": [stage.kind + (f", {stage.role}" if stage.role else "") for stage in pipeline.stages],
        "model or target": [stage.model or stage.target or "" for stage in pipeline.stages],
        "fed by": [_fed_by(pipeline, index) for index in range(len(pipeline.stages))],
        "replicas": [_replicas(stage) for stage in pipeline.stages],
        "output": [
            modality if final else f"({modality})"
            for modality, final in zip(pipeline.modalities, pipeline.finals, strict=True)
        ],
        # Most pipelines leave all of them as they are.
        **({"limits": limits} if any(limits) else {}),
    }
    table = Table(title=Text(f"pipeline {pipeline.name}"), title_justify="left", caption_justify="left")
    for heading in columns:
        table.add_column(heading, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    if notes := list(_notes(pipeline)):
        table.caption = Text("\n".join(notes))
    # A pipe has no width; the words matter more than a width that nobody set.
    console = _Console() if sys.stdout.isatty() else _Console(width=200)
    console.print(table)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - rich calls it where it handles the error, and would end the program in its own way


def _fed_by(pipeline: Pipeline, stage_id: int) -> str:
    stage, source, bridge = pipeline.stages[stage_id], pipeline.sources[stage_id], pipeline.bridges[stage_id]
    if source is None or bridge is None:
        return "the prompt"
    name = pipeline.stages[source].name
    if stage.role == "decode":
        found = ", found by its content" if stage.handoff == "content" else ""
        return f"the prompt, and the KV cache of {name}{found}"
    match stage.feed:
        case "connector":
            length = "" if stage.placeholder is None else f", placeholder by {_function_name(stage.placeholder)}"
            return f"{name}, by connector{length}"
        case "output":
            return f"{name}, streamed through {bridge.name}"
        case "kv":
            return f"{name}, through {bridge.name}, when its KV cache is ready"
        case "finish":
            return f"{name}, through {bridge.name}"


def _function_name(function: object) -> str:
    return function if isinstance(function, str) else getattr(function, "__qualname__", repr(function))


def _replicas(stage: StageSpec) -> str:
    if not stage.devices:
        return str(stage.replicas)
    groups = "; ".join(",".join(stage.device_group(replica)) for replica in range(stage.replicas))
    return f"{stage.replicas} on {groups}"


_LIMITS = ("dispatch_timeout", "chunk_timeout", "start_timeout", "probe_interval", "probe_timeout")


def _limits(stage: StageSpec) -> Iterator[str]:
    """Yield the stage's waits that differ from the default, and what happens after them where that differs."""
    for key in _LIMITS:
        if (seconds := getattr(stage, key)) != getattr(attrs.fields(StageSpec), key).default:
            yield f"{key} {seconds:g} s"
    if stage.when_empty == "skip":
        yield "then skipped"


def _notes(pipeline: Pipeline) -> Iterator[str]:
    """Yield what the table's cells have no place for."""
    if pipeline.expander is not None:
        usual = pipeline.bundle_timeout == attrs.fields(Pipeline).bundle_timeout.default
        bound = "" if usual else f", {pipeline.bundle_timeout:g} s at most"
        yield (
            f"{pipeline.stages[0].name} also runs the companions that {pipeline.expander.name} makes; "
            f"what it feeds waits for them{bound}"
        )
    if not all(pipeline.finals):
        yield "outputs in brackets stay inside the pipeline"
