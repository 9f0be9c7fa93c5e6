"""A pipeline as a Mermaid graph, for a README or a review."""

from __future__ import annotations

from omni_trio.pipeline import Pipeline, StageSpec

__all__ = ["mermaid_graph"]


def mermaid_graph(pipeline: Pipeline) -> str:
    """Return the text of a Mermaid flow chart: stages as boxes, bridges on the arrows, thick where they stream."""
    lines = ["flowchart LR", "    prompt([prompt])"]
    lines += [f'    s{index}["{_label(stage)}"]' for index, stage in enumerate(pipeline.stages)]
    for index, source in enumerate(pipeline.sources):
        bridge = pipeline.bridges[index]
        if source is None or bridge is None:
            lines.append(f"    prompt --> s{index}")
        else:
            arrow, words = (
                ("==>", f"{bridge.name}, streamed") if pipeline.stages[index].stream else ("-->", bridge.name)
            )
            lines.append(f'    s{source} {arrow}|"{_quoted(words)}"| s{index}')
    for index, final in enumerate(pipeline.finals):
        if final:
            lines.append(f"    o{index}([{pipeline.modalities[index]}])")
            lines.append(f"    s{index} --> o{index}")
    return "\n".join(lines) + "\n"


def _label(stage: StageSpec) -> str:
    replicas = f" &times; {stage.replicas}" if stage.replicas > 1 else ""
    what = stage.model or stage.target
    rows = [f"<b>{stage.name}</b>", f"{stage.kind}{replicas}", *([_quoted(what)] if what else [])]
    return "<br/>".join(rows)


def _quoted(text: str) -> str:
    """Escape for a label in quotes, with Mermaid's own entity codes."""
    codes = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "\n": " ", "\r": " "}
    return "".join(codes.get(character, character) for character in text)
