"""Pipelines as files: what is read, which modules are found, and what is written."""

from __future__ import annotations

import sys

import attrs
import pytest

from config_files import (
    MODES,
    NEAR,
    PAIR,
    STORY,
    STORY_YAML,
    failure,
    own_modules,  # noqa: F401 - in use by all tests here
    write,
)
from omni_trio.bridges import BridgeContext, bridge
from omni_trio.config import dump_pipeline, load_pipeline
from omni_trio.config._values import PIPELINE_FIELDS, STAGE_FIELDS
from omni_trio.errors import ConfigError
from omni_trio.messages import StageInput
from omni_trio.pipeline import Pipeline, StageSpec

# What is read


@pytest.mark.parametrize(("text", "name"), [(STORY, "p.toml"), (STORY_YAML, "p.yaml"), (STORY_YAML, "p.YML")])
def test_both_formats_describe_the_same_pipeline(tmp_path, text, name):
    assert load_pipeline(write(tmp_path, text, name)) == Pipeline(
        name="story",
        stages=(
            StageSpec(
                name="thinker",
                kind="llm",
                model="hub/model",
                engine_args={"max_model_len": 1024},
                sampling={"temperature": 0.7, "max_tokens": 200},
            ),
            StageSpec(name="speaker", kind="simulated", bridge="text", feed="output", modality="audio"),
        ),
    )


def test_every_field_of_a_stage_can_be_read(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "voices.py").write_text("class Voice: pass")
    path = write(
        tmp_path,
        """
        [[stages]]
        name = "a"
        kind = "llm"
        model = "m"
        replicas = 2
        devices = [0, "gpu-7"]
        devices_per_replica = 1
        prompt_format = "chat"
        system = "Be brief."
        final_output = true
        requires_multimodal_data = true
        env = { OMP_NUM_THREADS = "1" }
        start_timeout = 10
        probe_interval = 0.5
        probe_timeout = 2.5
        [[stages]]
        name = "b"
        kind = "worker"
        target = "voices:Voice"
        source = "a"
        path = ["lib", "/opt/lib"]
        options.voice.speed = 2
        """,
    )
    first, second = load_pipeline(str(path)).stages
    assert first == StageSpec(
        name="a",
        model="m",
        replicas=2,
        devices=("0", "gpu-7"),
        prompt_format="chat",
        system="Be brief.",
        final_output=True,
        requires_multimodal_data=True,
        env={"OMP_NUM_THREADS": "1"},
        start_timeout=10.0,
        probe_interval=0.5,
        probe_timeout=2.5,
    )
    assert isinstance(first.start_timeout, float)
    assert second.path == (str(tmp_path / "lib"), "/opt/lib")
    assert second.options == {"voice": {"speed": 2}}


def test_every_field_has_a_reader():
    assert list(STAGE_FIELDS) == [field.name for field in attrs.fields(StageSpec)]
    fields = [field.name for field in attrs.fields(Pipeline) if field.init]
    assert ["stages", *PIPELINE_FIELDS] == fields


def test_modes_can_be_read(tmp_path):
    (tmp_path / "near.py").write_text(NEAR)
    pipeline = load_pipeline(write(tmp_path, MODES))
    near = sys.modules["near"]
    assert (pipeline.expand, pipeline.expander.function) == ("near:expand", near.expand)
    assert pipeline.bundle_timeout == 5.0
    assert isinstance(pipeline.bundle_timeout, float)
    thinker, painter, poet = pipeline.stages
    assert thinker == StageSpec(name="thinker", model="m", dispatch_timeout=2.0)
    target = {"target": "near:Painter", "path": (str(tmp_path),)}
    assert painter == StageSpec(name="painter", kind="diffusion", feed="kv", **target)
    assert (poet.feed, poet.placeholder, poet.chunk_timeout) == ("connector", "near:length", 0.5)
    assert pipeline.placeholders == (None, None, near.length)


def test_a_pair_can_be_read(tmp_path):
    pipeline = load_pipeline(write(tmp_path, PAIR, "p.yaml"))
    assert pipeline.pair == (0, 1)
    assert [(stage.role, stage.handoff, stage.when_empty) for stage in pipeline.stages] == [
        ("prefill", "params", "skip"),
        ("decode", "content", "fail"),
    ]


def test_null_in_yaml_stands_for_the_default_of_modes(tmp_path):
    keys = ("expand", "bridge", "placeholder", "role")
    text = "expand: ~\nstages: [{name: a, kind: simulated, " + ", ".join(f"{key}: ~" for key in keys[1:]) + "}]"
    pipeline = load_pipeline(write(tmp_path, text, "p.yaml"))
    assert pipeline == Pipeline((StageSpec(name="a", kind="simulated"),))


def test_sub_tables_belong_to_the_stage_above(tmp_path):
    path = write(
        tmp_path,
        """
        [[stages]]
        name = "a"
        model = "m"
        [stages.sampling]
        temperature = 0
        [stages.engine_args.compilation]
        level = 3
        """,
    )
    (stage,) = load_pipeline(path).stages
    assert stage.sampling == {"temperature": 0}
    assert stage.engine_args == {"compilation": {"level": 3}}


def test_null_in_yaml_stands_for_the_default(tmp_path):
    path = write(
        tmp_path,
        "stages: [{name: a, kind: simulated, source: null, bridge: , devices: ~, options: ~, modality: ~}]",
        "p.yaml",
    )
    assert load_pipeline(path).stages == (StageSpec(name="a", kind="simulated"),)


def test_yaml_merges_and_anchors(tmp_path):
    path = write(
        tmp_path,
        """
        stages:
          - &base
            name: a
            kind: simulated
            replicas: 2
          - <<: *base
            name: b
        """,
        "p.yaml",
    )
    assert [(stage.name, stage.replicas) for stage in load_pipeline(path).stages] == [("a", 2), ("b", 2)]


def test_yaml_merges_twice_and_lines_inside_of_what_was_overridden(tmp_path):
    text = """\
        stages:
          - &one {name: a, kind: simulated, options: {x: 1}}
          - {<<: *one, <<: {replicas: 3}, name: b, options: {x: 2020-01-01}}
        """
    assert failure(tmp_path, text, "p.yaml").line == 3
    pipeline = load_pipeline(write(tmp_path, text.replace("2020-01-01", "2"), "p.yaml"))
    assert pipeline.stages[1] == StageSpec(name="b", kind="simulated", replicas=3, options={"x": 2})


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "p.toml"
    path.write_bytes(b"\xef\xbb\xbf" + STORY.encode())
    assert load_pipeline(path).name == "story"


def test_a_model_next_to_the_file_becomes_absolute(tmp_path, monkeypatch):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    folder = tmp_path / "pipelines"
    folder.mkdir()
    write(folder, '[[stages]]\nname = "a"\nmodel = "../models/tiny"\n')
    monkeypatch.chdir(folder)
    assert load_pipeline("pipeline.toml").stages[0].model == str(tmp_path / "models" / "tiny")


# Environment variables


def test_variables_are_put_in(tmp_path, monkeypatch):
    monkeypatch.setenv("VOICE", "joe")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET", raising=False)
    path = write(
        tmp_path,
        """
        name = "${VOICE}"
        [[stages]]
        name = "a"
        kind = "simulated"
        [stages.options]
        plain = "no $VOICE, $$, }"
        inside = "<${VOICE}-${VOICE}>"
        default = "${UNSET:-a:-b}"
        empty = "${UNSET:-}"
        empty_set = "${EMPTY}"
        empty_default = "${EMPTY:-x}"
        escaped = "$${VOICE} $$${VOICE}"
        list = [["${VOICE}"], { k = "${VOICE}" }]
        """,
    )
    pipeline = load_pipeline(path)
    assert pipeline.name == "joe"
    assert pipeline.stages[0].options == {
        "plain": "no $VOICE, $$, }",
        "inside": "<joe-joe>",
        "default": "a:-b",
        "empty": "",
        "empty_set": "",
        "empty_default": "x",
        "escaped": "${VOICE} $${VOICE}",
        "list": [["joe"], {"k": "joe"}],
    }


def test_a_missing_variable_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("VOICE", raising=False)
    error = failure(tmp_path, '[[stages]]\nname = "a"\nkind = "simulated"\noptions = { x = [\n  1,\n  "${VOICE}"] }')
    assert (error.line, error.key) == (6, "stages.a.options.x.1")
    assert "environment variable VOICE is not set" in error.message
    assert "${VOICE:-...}" in error.message


@pytest.mark.parametrize("text", ["${", "${}", "${A", "${1A}", "${A B}", "${A:b}", "${A-b}"])
def test_a_broken_variable_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setenv("A", "x")
    error = failure(tmp_path, f'name = "{text}"\n[[stages]]\nname = "a"')
    assert (error.line, error.key) == (1, "name")
    assert "names no variable" in error.message


# Modules next to the file

BRIDGE = 'import omni_trio.messages as m\ndef own(context): return m.StageInput(text="x")\n'


def with_bridge(reference: str, target: str | None = None) -> str:
    last = f'kind = "worker"\ntarget = "{target}"' if target else 'kind = "simulated"'
    return f'[[stages]]\nname = "a"\nkind = "simulated"\n[[stages]]\nname = "b"\n{last}\nbridge = "{reference}"\n'


def test_bridges_and_targets_next_to_the_file(tmp_path, monkeypatch):
    (tmp_path / "near_bridge.py").write_text(BRIDGE)
    (tmp_path / "near_worker.py").write_text(
        "class Worker: pass\nraise RuntimeError('the loader must not import this')"
    )
    path = write(tmp_path, with_bridge("near_bridge:own", "near_worker:Worker"))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        pipeline = load_pipeline(path.name)
    assert pipeline.bridges[1].function is sys.modules["near_bridge"].own
    assert sys.path.count(str(tmp_path)) == 1
    assert sys.path[0] == str(tmp_path)
    assert pipeline.stages[1].path == (str(tmp_path),)
    assert "near_worker" not in sys.modules


def test_sys_path_stays_as_it_is_where_no_module_is_named(tmp_path):
    before = list(sys.path)
    load_pipeline(write(tmp_path, STORY))
    assert sys.path == before


@pytest.mark.parametrize(
    ("module", "reference", "words"),
    [
        (BRIDGE, "near_bridge:owm", "did you mean 'own'?"),
        (BRIDGE, "near_bridg:own", "can not be imported"),
        ("own = 3", "near_bridge:own", "expected a callable"),
        ("def own(:", "near_bridge:own", "importing 'near_bridge' raised SyntaxError"),
        ("import no_such_thing", "near_bridge:own", "No module named 'no_such_thing'"),
        ("1/0", "near_bridge:own", "raised ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "near_bridge:own", "importing 'near_bridge' called sys.exit()"),
        ("", "txt", "did you mean 'text'?"),
    ],
)
def test_a_bridge_that_can_not_be_had(tmp_path, module, reference, words):
    (tmp_path / "near_bridge.py").write_text(module)
    error = failure(tmp_path, with_bridge(reference))
    assert (error.line, error.key) == (7, "stages.b.bridge")
    assert words in error.message


def test_what_failed_to_import_is_the_cause(tmp_path):
    (tmp_path / "near_bridge.py").write_text("import no_such_thing")
    assert isinstance(failure(tmp_path, with_bridge("near_bridge:own")).__cause__, ModuleNotFoundError)
    (tmp_path / "near_bridge_too.py").write_text("1/0")
    assert isinstance(failure(tmp_path, with_bridge("near_bridge_too:own")).__cause__, ZeroDivisionError)


def test_a_worker_that_is_not_there(tmp_path):
    (tmp_path / "speaker.py").write_text("")
    error = failure(tmp_path, with_bridge("text", "speakr:Piper"))
    assert (error.line, error.key) == (7, "stages.b.target")
    assert "no module 'speakr'" in error.message
    assert "did you mean 'speaker'?" in error.message
    assert "is not of the form" in failure(tmp_path, with_bridge("text", "speaker")).message
    assert "no module 'x/y'" in failure(tmp_path, with_bridge("text", "x/y.z:w")).message
    assert "no module ''" in failure(tmp_path, with_bridge("text", ".x:y")).message


def test_an_installed_worker_and_a_package_are_found(tmp_path):
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "module.py").write_text("x = print")
    for target in (
        "json:dumps",
        "json.decoder:JSONDecoder.decode",
        "package.module:x",
        "package:inner",
        "os.path:join",
    ):
        load_pipeline(write(tmp_path, with_bridge("text", target)))
    for target in ("sys:exit", "__main__:Own"):  # without a source that could be looked into
        load_pipeline(write(tmp_path, with_bridge("text", target)))


@pytest.mark.parametrize(
    "source",
    [
        "class Voice: pass",
        "async def Voice(): pass",
        "if 1:\n  try:\n    import x as Voice\n  except ImportError:\n    Voice = None",
        "from x import Voice",
        "import Voice.x",
        "Other = [0, (Voice := 3)]",
        "for Voice in (): pass",
        "with open('x') as (a, Voice): pass",
        "match 3:\n  case [Voice, *_]: pass",
        "def make():\n  global Voice\n  Voice = 3",
        # What can not be known is taken to be there.
        "from x import *",
        "def __getattr__(name): return print",
        "globals().update(Voice=3)",
        "import sys\nsetattr(sys.modules[__name__], 'Voice', 3)",
    ],
)
def test_a_target_that_its_module_may_have(tmp_path, source):
    (tmp_path / "speaker.py").write_text(source)
    load_pipeline(write(tmp_path, with_bridge("text", "speaker:Voice")))


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("class Voice: pass", "speaker:Vioce", "module 'speaker' has no 'Vioce'; did you mean 'Voice'?"),
        ("class Other:\n  class Voice: pass", "speaker:Voice", "has no 'Voice'"),
        ("def other():\n  Voice = 3", "speaker:Voice", "has no 'Voice'"),
        ("", "json:nofn", "module 'json' has no 'nofn'"),
        ("class Voice", "speaker:Voice", "module 'speaker' is not valid Python"),
        ("\0", "speaker:Voice", "module 'speaker' is not valid Python"),
        ("class Voice: pass", "speaker.inner:Voice", "there is no module 'inner' in 'speaker'"),
        ("", "json.nomod:Voice", "there is no module 'nomod' in 'json'"),
    ],
)
def test_a_target_that_its_module_does_not_have(tmp_path, source, target, words):
    (tmp_path / "speaker.py").write_text(source)
    error = failure(tmp_path, with_bridge("text", target))
    assert (error.line, error.key) == (7, "stages.b.target")
    assert words in error.message


@pytest.mark.parametrize("model", ["/nope/model", "./model", "../nope", "~/nope/model", "~nobody-here/model"])
def test_a_path_to_a_model_that_is_not_there(tmp_path, model):
    error = failure(tmp_path, f'[[stages]]\nname = "a"\nmodel = "{model}"\n')
    assert (error.line, error.key) == (3, "stages.a.model")
    assert "there is no " in error.message
    assert "nope" in error.message or "model" in error.message


def test_a_model_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    pipeline = load_pipeline(write(tmp_path, '[[stages]]\nname = "a"\nmodel = "~/models/tiny"\n'))
    assert pipeline.stages[0].model == str(tmp_path / "models" / "tiny")


def test_a_check_of_ones_own_has_file_and_line(tmp_path):
    def refuse(pipeline):
        raise ConfigError("no voices here", key=f"stages.{pipeline.stages[1].name}.kind")

    path = write(tmp_path, with_bridge("text"))
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path, check=refuse)
    assert str(caught.value) == f"{path}:6: stages.b.kind: no voices here"


def test_another_module_of_the_same_name_is_not_taken_silently(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_bridge.py").write_text(BRIDGE)
    load_pipeline(write(tmp_path / "one", with_bridge("same_bridge:own")))
    error = failure(tmp_path / "two", with_bridge("same_bridge:own"))
    assert error.line == 7
    assert f"already imported from {tmp_path / 'one' / 'same_bridge.py'}" in error.message


def test_every_function_is_looked_for_beside_the_file(tmp_path):
    (tmp_path / "near.py").write_text(NEAR)
    before = list(sys.path)
    load_pipeline(write(tmp_path, MODES))
    assert sys.path == [str(tmp_path), *before]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "near.py").write_text(NEAR)
    error = failure(tmp_path / "other", MODES)
    assert (error.line, error.key) == (1, "expand")
    assert f"already imported from {tmp_path / 'near.py'}" in error.message


# Back to data


def module_bridge(context: BridgeContext) -> StageInput | None:
    return context.prompt


@bridge(reads=("text",))
def marked_bridge(context: BridgeContext) -> StageInput | None:
    return context.prompt


def test_dump_leaves_out_defaults():
    pipeline = Pipeline((StageSpec(name="a", kind="simulated"), StageSpec(name="b", kind="worker", target="x:y")))
    assert dump_pipeline(pipeline) == {
        "name": "pipeline",
        "stages": [
            {"name": "a", "kind": "simulated"},
            {"name": "b", "kind": "worker", "target": "x:y", "path": []},
        ],
    }


def no_companions(context):
    return ()


def seven(prompt):
    return 7


def test_dump_writes_the_modes():
    pipeline = Pipeline(
        (
            StageSpec(name="a", kind="simulated", dispatch_timeout=1.0),
            StageSpec(name="b", kind="diffusion", target="x:y", feed="kv"),
            StageSpec(name="c", kind="simulated", feed="connector", placeholder=seven, chunk_timeout=2.0),
            StageSpec(name="d", kind="simulated", feed="connector", placeholder="math:ceil"),
        ),
        expand=no_companions,
        bundle_timeout=5.0,
    )
    assert dump_pipeline(pipeline) == {
        "name": "pipeline",
        "expand": f"{__name__}:no_companions",
        "bundle_timeout": 5.0,
        "stages": [
            {"name": "a", "kind": "simulated", "dispatch_timeout": 1.0},
            {"name": "b", "kind": "diffusion", "target": "x:y", "feed": "kv", "path": []},
            {
                "name": "c",
                "kind": "simulated",
                "feed": "connector",
                "placeholder": f"{__name__}:seven",
                "chunk_timeout": 2.0,
            },
            {"name": "d", "kind": "simulated", "feed": "connector", "placeholder": "math:ceil"},
        ],
    }
    assert dump_pipeline(attrs.evolve(pipeline, expand="math:ceil"))["expand"] == "math:ceil"


def test_dump_writes_a_pair():
    stages = (
        StageSpec(name="p", kind="simulated", role="prefill", when_empty="skip"),
        StageSpec(name="d", kind="simulated", role="decode", handoff="content"),
    )
    assert dump_pipeline(Pipeline(stages))["stages"] == [
        {"name": "p", "kind": "simulated", "role": "prefill", "when_empty": "skip"},
        {"name": "d", "kind": "simulated", "role": "decode", "handoff": "content"},
    ]


def test_dump_escapes_and_copies():
    inner = [1, (2, "${X}")]
    stage = StageSpec(name="a", kind="simulated", options={"x": inner}, devices=("0",))
    dumped = dump_pipeline(Pipeline((stage,), name="${N}"))
    assert dumped["name"] == "$${N}"
    assert dumped["stages"][0]["options"] == {"x": [1, [2, "$${X}"]]}
    assert dumped["stages"][0]["devices"] == ["0"]
    assert dumped["stages"][0]["options"]["x"] is not inner


def two(bridge):
    return Pipeline((StageSpec(name="a", kind="simulated"), StageSpec(name="b", kind="simulated", bridge=bridge)))


@pytest.mark.parametrize("function", [module_bridge, marked_bridge])
def test_dump_names_a_bridge_that_a_module_has(function):
    assert dump_pipeline(two(function))["stages"][1]["bridge"] == f"{__name__}:{function.__name__}"


def test_dump_refuses_what_has_no_name_or_is_no_data():
    def local(context):
        return None

    class Callable:
        def __call__(self, context):
            return None

    def impostor(context):
        return None

    impostor.__qualname__ = "module_bridge"
    for function, words in [(local, "can not be imported"), (Callable(), "can not"), (impostor, "another object")]:
        with pytest.raises(ConfigError, match=words) as caught:
            dump_pipeline(two(function))
        assert caught.value.key == "stages.b.bridge"
    impostor.__qualname__ = "seven"
    for function, words in [(local, "can not be imported"), (Callable(), "can not"), (impostor, "another object")]:
        with pytest.raises(ConfigError, match=f"the expand.*{words}") as caught:
            dump_pipeline(attrs.evolve(two(None), expand=function))
        assert caught.value.key == "expand"
        connected = StageSpec(name="b", kind="simulated", feed="connector", placeholder=function)
        with pytest.raises(ConfigError, match=f"the placeholder.*{words}") as caught:
            dump_pipeline(Pipeline((StageSpec(name="a", kind="simulated"), connected)))
        assert caught.value.key == "stages.b.placeholder"
    with pytest.raises(ConfigError, match="type object") as caught:
        dump_pipeline(Pipeline((StageSpec(name="a", kind="simulated", options={"x": [object()]}),)))
    assert caught.value.key == "stages.a.options.x.0"
