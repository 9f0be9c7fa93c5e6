"""What instruments make of a run."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections import defaultdict
from itertools import pairwise

import pytest
import trio
import trio.testing

from omni_trio.errors import DeadlineExceeded
from omni_trio.messages import TraceEvent
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.runtime import open_runtime
from omni_trio.telemetry import Recorder, mermaid_graph, timeline_svg, write_chrome_trace
from omni_trio.telemetry._story import stack_rows, tell
from omni_trio.telemetry.chrome_trace import chrome_trace
from omni_trio.telemetry.timeline import _duration, _fit, _ticks
from omni_trio.testing.simulated import SimStage

STORY = Pipeline(
    (
        StageSpec(name="thinker", kind="simulated", replicas=2),
        StageSpec(name="talker", kind="simulated", feed="output"),
        StageSpec(name="captions", kind="simulated", source="thinker"),
    ),
    name="story <aloud> & more",
)


@pytest.fixture(scope="module")
def recorder():
    """A run on the mock clock: start-up, requests that overlap and stream, and one that expires."""
    recorder = Recorder()
    clients = {
        "thinker": SimStage(tokens=10, token_time=0.02, prefill_time=0.1, start_time=9.0),
        "talker": SimStage(tokens=1, token_time=0.03, start_time=3.0),
        "captions": SimStage(tokens=2, token_time=0.01),
    }

    async def one(runtime, number):
        deadline = 0.25 if number == 2 else 100.0
        try:
            await runtime.generate("hello", request_id=f'r{number} <"&>', deadline=deadline)
        except DeadlineExceeded:
            assert number == 2

    async def main():
        async with (
            open_runtime(STORY, clients=clients, instruments=[recorder]) as runtime,
            trio.open_nursery() as nursery,
        ):
            for number in range(5):
                nursery.start_soon(one, runtime, number)
                await trio.sleep(0.05)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return recorder


def event(time, name, **fields):
    return TraceEvent(time=time, name=name, **fields)


THINKER = {"stage": "thinker", "stage_id": 0, "replica_id": 0}
TALKER = {"stage": "talker", "stage_id": 1, "replica_id": 0}


def start_up():
    return [
        event(10.0, "runtime.opening"),
        event(10.0, "replica.phase", detail="spawn", **THINKER),
        event(11.0, "replica.phase", detail="load", **THINKER),
        event(13.0, "replica.phase", detail="ready", **THINKER),
        event(13.0, "replica.ready", **THINKER),
        event(13.0, "runtime.open"),
    ]


def death():
    return [
        *start_up(),
        event(14.0, "request.submitted", request_id="a"),
        event(14.0, "leg.submitted", request_id="a", **THINKER),
        event(15.0, "leg.output", request_id="a", value=3.0, **THINKER),
        event(16.0, "replica.died", detail="killed \x00 <by> \ud800 SIGKILL", **THINKER),
        event(16.0, "request.failed", request_id="a", detail="gone"),
        event(16.5, "leg.released", request_id="a", **THINKER),
        event(16.5, "runtime.closing"),
        event(17.0, "replica.closed", **THINKER),
        event(17.0, "runtime.closed"),
    ]


# The recorder


def test_the_recorder_keeps_the_newest():
    recorder = Recorder(max_events=3)
    events = [event(float(number), "leg.output") for number in range(5)]
    for one in events:
        recorder(one)
    assert list(recorder) == list(recorder.events) == events[2:]
    assert (len(recorder), recorder.dropped) == (3, 2)
    recorder.clear()
    assert (recorder.events, recorder.dropped) == ((), 0)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Recorder(max_events=0)


# The model behind trace and picture


def test_a_story_has_beginnings_and_ends():
    story = tell(death())
    assert (story.start, story.opened, story.closing, story.end) == (10.0, 13.0, 16.5, 17.0)
    (replica,) = story.replicas.values()
    assert [(phase.name, phase.start, phase.end) for phase in replica.phases] == [
        ("spawn", 10.0, 11.0),
        ("load", 11.0, 13.0),
    ]
    assert [time for time, _ in replica.deaths] == [16.0]
    (request,) = story.requests
    assert (request.start, request.end, request.verdict, request.detail) == (14.0, 16.0, "failed", "gone")
    (leg,) = request.legs
    assert (leg.start, leg.end, leg.reason, leg.verdict, leg.size) == (14.0, 16.5, "released", "failed", 3.0)


def test_closing_is_a_phase():
    story = tell([event(1.0, "replica.closing", **THINKER), event(3.0, "replica.closed", **THINKER)])
    (replica,) = story.replicas.values()
    assert [(phase.name, phase.start, phase.end) for phase in replica.phases] == [("closing", 1.0, 3.0)]


def test_a_run_is_told_completely(recorder):
    story = tell(recorder, STORY)
    assert len(story.requests) == 5
    assert [request.verdict for request in story.requests].count("expired") == 1
    for request in story.requests:
        if request.verdict == "finished":
            assert [leg.stage for leg in sorted(request.legs, key=lambda leg: leg.stage_id)] == [
                "thinker",
                "talker",
                "captions",
            ]
        for leg in request.legs:
            assert leg.start <= leg.end
            assert all(leg.start <= time <= leg.end for time, _ in leg.outputs)
            assert leg.reason
            if leg.stage_id:
                assert leg.source is not None
                assert leg.source.stage == "thinker"
                assert leg.source.start <= leg.start
            else:
                assert leg.source is None


def test_without_the_pipeline_the_stage_before_is_the_source(recorder):
    sources = {leg.stage: leg.source.stage for leg in tell(recorder).legs if leg.source}
    assert sources["talker"] == "thinker"


def test_an_id_may_be_used_again():
    events = [
        event(1.0, "request.submitted", request_id="a"),
        event(1.0, "leg.submitted", request_id="a", **THINKER),
        event(2.0, "leg.finished", request_id="a", detail="stop", **THINKER),
        event(2.0, "request.finished", request_id="a"),
        event(3.0, "request.submitted", request_id="a"),
        event(3.0, "leg.submitted", request_id="a", **THINKER),
        event(5.0, "leg.finished", request_id="a", detail="length", **THINKER),
        event(5.0, "request.finished", request_id="a"),
    ]
    first, second = tell(events).requests
    assert (first.start, first.end, first.legs[0].reason) == (1.0, 2.0, "stop")
    assert (second.start, second.end, second.legs[0].reason) == (3.0, 5.0, "length")


@pytest.mark.parametrize("start", range(0, 16, 3))
def test_a_story_without_its_beginning_or_end(start):
    events = death()
    for part in (events[start:], events[: start + 1]):
        timeline_svg(part)
        chrome_trace(part)
        for leg in tell(part).legs:
            assert leg.end <= part[-1].time


def test_what_overlaps_is_stacked():
    assert stack_rows([]) == []
    assert stack_rows([(0, 2), (1, 3), (2, 4), (2, 5), (4, 5)]) == [0, 1, 0, 2, 0]
    assert stack_rows([(0, 2), (2, 4)], gap=1.0) == [0, 1]


# The trace file


def test_the_trace_file_is_json(recorder, tmp_path):
    path = tmp_path / "trace.json"
    write_chrome_trace(recorder, path, pipeline=STORY)
    assert json.loads(path.read_text()) == json.loads(json.dumps(chrome_trace(recorder, pipeline=STORY)))
    write_chrome_trace([], path)
    assert [e["ph"] for e in json.loads(path.read_text())["traceEvents"]] == ["M", "M"]


def test_the_trace_keeps_the_rules_of_the_format(recorder):
    trace = chrome_trace(recorder, pipeline=STORY)["traceEvents"]
    timed = [e for e in trace if e["ph"] != "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    named = {(e["pid"], e["tid"]) for e in trace if e["name"] == "thread_name"}
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert names == {1: "pipeline", 2: "stage thinker", 3: "stage talker", 4: "stage captions"}
    slices = defaultdict(list)
    for e in timed:
        assert e["ts"] >= 0
        assert e["pid"] in names
        if e["ph"] == "X":
            assert e["dur"] >= 0
            assert (e["pid"], e["tid"]) in named
            slices[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for spans in slices.values():  # on one thread slices follow each other
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start + 1e-3
    assert {e["name"] for e in timed if e["ph"] == "X" and e["cat"] == "replica"} >= {"spawn"}


def test_asynchronous_slices_nest(recorder):
    open_ = defaultdict(list)
    for e in chrome_trace(recorder, pipeline=STORY)["traceEvents"]:
        if e["ph"] == "b":
            open_[e["id"]].append(e["name"])
        elif e["ph"] == "e":
            assert open_[e["id"]].pop() == e["name"]
    assert len(open_) == 5 + len(tell(recorder).legs)
    assert not any(open_.values())


def test_arrows_begin_and_end_inside_of_slices(recorder):
    trace = chrome_trace(recorder, pipeline=STORY)["traceEvents"]
    slices = [e for e in trace if e["ph"] == "X" and e["cat"] == "leg"]
    arrows = defaultdict(dict)
    for e in trace:
        if e["ph"] in ("s", "f"):
            arrows[e["id"]][e["ph"]] = e
            around = [
                s
                for s in slices
                if (s["pid"], s["tid"]) == (e["pid"], e["tid"]) and s["ts"] <= e["ts"] < s["ts"] + s["dur"]
            ]
            assert len(around) == 1
    assert len(arrows) == sum(leg.source is not None for leg in tell(recorder, STORY).legs)
    for arrow in arrows.values():
        assert arrow["s"]["pid"] == 2
        assert arrow["f"]["bp"] == "e"
        assert arrow["s"]["ts"] <= arrow["f"]["ts"]


def test_the_counter_ends_at_zero(recorder):
    counts = [e["args"]["requests"] for e in chrome_trace(recorder)["traceEvents"] if e["ph"] == "C"]
    assert max(counts) > 1
    assert counts[-1] == 0
    assert min(counts) == 0


def test_a_death_is_an_instant():
    (died,) = [e for e in chrome_trace(death())["traceEvents"] if e["name"] == "died"]
    assert (died["ph"], died["s"], died["ts"]) == ("i", "p", 6e6)


# The picture

SVG = "{http://www.w3.org/2000/svg}"


def bars(svg):
    root = ET.fromstring(svg)
    return [
        g
        for g in root.iter(f"{SVG}g")
        if g.find(f"{SVG}rect[@class='pale']") is not None and g.find(f"{SVG}title") is not None
    ]


def test_the_picture_has_one_bar_per_request_and_stage(recorder):
    svg = timeline_svg(recorder, pipeline=STORY)
    assert len(bars(svg)) == len(tell(recorder).legs)
    assert "story &lt;aloud&gt; &amp; more" in svg
    assert 'r0 &lt;"' not in svg
    for words in ("start-up phases", "streamed input", "bridge", "aborted or expired", "5 requests, 1 expired"):
        assert words in svg
    for words in ("replica died", ">failed<"):
        assert words not in svg


def test_the_picture_stands_for_itself(recorder):
    svg = timeline_svg(recorder, pipeline=STORY)
    assert "prefers-color-scheme: dark" in svg
    for outside in ("href", "url(", "@import", "<script"):
        assert outside not in svg


def test_nothing_leaves_the_picture(recorder):
    for svg in (timeline_svg(recorder, pipeline=STORY), timeline_svg(death())):
        root = ET.fromstring(svg)
        _, _, width, height = (float(part) for part in root.get("viewBox").split())
        for rect in root.iter(f"{SVG}rect"):
            if rect.get("width") == "100%":
                continue
            x, y = (float(rect.get(side, "0")) for side in ("x", "y"))
            assert x >= 0
            assert x + float(rect.get("width")) <= width
            assert 0 <= y
            assert y + float(rect.get("height")) <= height


def test_labels_fit_into_their_bars(recorder):
    for group in bars(timeline_svg(recorder, pipeline=STORY)):
        text = group.find(f"{SVG}text")
        if text is not None:
            assert len(text.text) * 6.4 <= float(group.find(f"{SVG}rect").get("width")) - 4


def test_bars_of_one_lane_do_not_overlap(recorder):
    boxes = []
    for group in bars(timeline_svg(recorder, pipeline=STORY)):
        rect = group.find(f"{SVG}rect")
        x, y, w, h = (float(rect.get(side)) for side in ("x", "y", "width", "height"))
        boxes.append((x, y, x + w, y + h))
    for index, (x0, y0, x1, y1) in enumerate(boxes):
        for u0, v0, u1, v1 in boxes[:index]:
            assert x1 <= u0 or u1 <= x0 or y1 <= v0 or v1 <= y0


def test_the_picture_shows_a_death_and_cleans_what_xml_can_not_hold():
    svg = timeline_svg(death(), title="t")
    ET.fromstring(svg)
    svg.encode()
    assert "killed \ufffd &lt;by&gt; \ufffd SIGKILL" in svg
    for words in ("replica died", ">failed<", "1 request, 1 failed"):
        assert words in svg


@pytest.mark.parametrize(
    "events",
    [
        [],
        [event(1.0, "runtime.opening")],
        start_up(),
        start_up()[:4],
        [event(1.0, "unknown.event"), event(2.0, "unknown")],
        [event(5.0, "request.submitted", request_id="a"), event(5.0, "request.finished", request_id="a")],
        [
            event(5.0, "request.submitted", request_id="a"),
            event(5.0, "leg.submitted", request_id="a", **THINKER),
            event(5.0, "leg.output", request_id="a", **TALKER),
        ],
    ],
)
def test_runs_in_which_little_happens(events):
    ET.fromstring(timeline_svg(events))
    json.dumps(chrome_trace(events), allow_nan=False)


def test_start_up_does_not_crowd_out_the_rest():
    events = [*start_up(), event(13.001, "request.submitted", request_id="a")]
    events += [event(13.001, "leg.submitted", request_id="a", **THINKER)]
    events += [event(13.01, "leg.finished", request_id="a", detail="stop", **THINKER)]
    events += [event(13.01, "request.finished", request_id="a"), event(13.01, "runtime.closing")]
    (bar,) = bars(timeline_svg(events))
    assert float(bar.find(f"{SVG}rect").get("width")) > 500


@pytest.mark.parametrize("rows", [5, 20, 60, 200])
def test_many_requests_still_fit(rows):
    events = start_up()
    for number in range(rows):
        events.append(event(14.0, "request.submitted", request_id=str(number)))
        events.append(event(14.0, "leg.submitted", request_id=str(number), **THINKER))
    root = ET.fromstring(timeline_svg(events))
    assert len(bars(ET.tostring(root))) == rows
    assert float(root.get("height")) < 1000


@pytest.mark.parametrize("span", [1e-6, 3e-5, 0.0042, 0.9, 1.0, 2.0, 59.0, 119.0, 120.0, 7200.0, 1e6])
def test_ticks_are_few_round_and_inside(span):
    ticks = _ticks(span, 8)
    times = [time for time, _ in ticks]
    assert 2 <= len(ticks) <= 9
    assert times[0] == 0
    assert times[-1] <= span * (1 + 1e-9)
    steps = {round((b - a) / (times[1] or 1), 6) for a, b in pairwise(times)}
    assert steps == {1.0}
    assert len({label for _, label in ticks}) == len(ticks)
    assert len({label.split()[1] for _, label in ticks}) == 1


def test_units():
    assert [_duration(s) for s in (0, 1.5e-5, 0.0125, 1.0, 90.0, 600.0)] == [
        "0 s",
        "15 µs",
        "12.5 ms",
        "1 s",
        "90 s",
        "10 min",
    ]
    assert _fit("abcdef", 100.0) == "abcdef"
    assert _fit("abcdefghij", 40.0) == "abcde…"
    assert _fit("abcdefghij", 15.0) == ""
    assert math.isfinite(_ticks(1e-9, 2)[-1][0])


# The graph of a pipeline


def test_the_graph():
    pipeline = Pipeline(
        (
            StageSpec(name="thinker", model='m"<1>&#', replicas=2),
            StageSpec(name="talker", kind="simulated", feed="output", bridge="text"),
            StageSpec(name="voice", kind="worker", target="a.b:C", modality="audio", source="thinker"),
        )
    )
    assert mermaid_graph(pipeline).splitlines() == [
        "flowchart LR",
        "    prompt([prompt])",
        '    s0["<b>thinker</b><br/>llm &times; 2<br/>m#quot;#lt;1#gt;#amp;#35;"]',
        '    s1["<b>talker</b><br/>simulated"]',
        '    s2["<b>voice</b><br/>worker<br/>a.b:C"]',
        "    prompt --> s0",
        '    s0 ==>|"text, streamed"| s1',
        '    s0 -->|"output"| s2',
        "    o1([text])",
        "    s1 --> o1",
        "    o2([audio])",
        "    s2 --> o2",
    ]


def no_companions(context):
    return ()


def test_the_graph_shows_how_stages_are_fed():
    pipeline = Pipeline(
        (
            StageSpec(name="thinker", kind="simulated"),
            StageSpec(name="painter", kind="diffusion", target="a.b:C", feed="kv"),
            StageSpec(name="poet", kind="simulated", feed="connector"),
        ),
        expand=no_companions,
    )
    assert mermaid_graph(pipeline).splitlines()[5:-2] == [
        '    s0 -->|"companions, no_companions"| s0',
        "    prompt --> s0",
        '    s0 -.->|"original_prompt, when the KV cache is ready"| s1',
        '    s1 -->|"by connector"| s2',
    ]


def test_the_graph_shows_a_pair():
    pipeline = Pipeline(
        (
            StageSpec(name="first", kind="simulated", role="prefill", replicas=2),
            StageSpec(name="second", kind="simulated", role="decode"),
        )
    )
    assert mermaid_graph(pipeline).splitlines()[2:-2] == [
        '    s0["<b>first</b><br/>simulated, prefill &times; 2"]',
        '    s1["<b>second</b><br/>simulated, decode"]',
        "    prompt --> s0",
        '    s0 -->|"KV cache"| s1',
    ]
