"""A pipeline as a Mermaid graph, for a README or a review."""

from __future__ import annotations

from omni_trio.pipeline import Pipeline, StageSpec

__all__ = ["mermaid_graph"]


def mermaid_graph(pipeline: Pipeline) -> str:
    """Return the text of a Mermaid flow chart.

    Stages are boxes. An arrow tells what feeds a stage, and how: with the bridge's name alone, once its source has
    ended; thick, in pieces; dotted, as soon as the source's KV cache is ready; "by connector", from engine to engine;
    "KV cache", from the prefill stage to its decode stage. Companions are a loop at the first stage.
    """
    lines = ["flowchart LR", "    prompt([prompt])"]
    lines += [f'    s{index}["{_label(stage)}"]' for index, stage in enumerate(pipeline.stages)]
    if pipeline.expander is not None:
        lines.append(f'    s0 -->|"{_quoted(f"companions, {pipeline.expander.name}")}"| s0')
    for index, source in enumerate(pipeline.sources):
        if source is None:
            lines.append(f"    prompt --> s{index}")
        else:
            arrow, words = _edge(pipeline, index)
            lines.append(f'    s{source} {arrow}|"{_quoted(words)}"| s{index}')
    for index, final in enumerate(pipeline.finals):
        if final:
            lines.append(f"    o{index}([{pipeline.modalities[index]}])")
            lines.append(f"    s{index} --> o{index}")
    return "\n".join(lines) + "\n"


def _edge(pipeline: Pipeline, stage_id: int) -> tuple[str, str]:
    """Return the arrow that leads to a stage, and what stands on it."""
    if pipeline.pair is not None and stage_id == pipeline.pair[1]:
        return "-->", "KV cache"
    bridge = pipeline.bridges[stage_id]
    assert bridge is not None  # only the first stage has none
    match pipeline.stages[stage_id].feed:
        case "connector":
            return "-->", "by connector"
        case "output":
            return "==>", f"{bridge.name}, streamed"
        case "kv":
            return "-.->", f"{bridge.name}, when the KV cache is ready"
        case "finish":
            return "-->", bridge.name


def _label(stage: StageSpec) -> str:
    replicas = f" &times; {stage.replicas}" if stage.replicas > 1 else ""
    role = f", {stage.role}" if stage.role else ""
    what = stage.model or stage.target
    rows = [f"<b>{stage.name}</b>", f"{stage.kind}{role}{replicas}", *([_quoted(what)] if what else [])]
    return "<br/>".join(rows)


def _quoted(text: str) -> str:
    """Escape for a label in quotes, with Mermaid's own entity codes."""
    codes = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "\n": " ", "\r": " "}
    return "".join(codes.get(character, character) for character in text)
