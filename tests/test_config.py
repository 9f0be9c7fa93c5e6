"""Pipelines as files: what is read, and on which line an error is found."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import attrs
import pytest

from omni_trio.bridges import BridgeContext, bridge
from omni_trio.config import _FIELDS, _TomlLines, dump_pipeline, load_pipeline
from omni_trio.errors import ConfigError
from omni_trio.messages import StageInput
from omni_trio.pipeline import Pipeline, StageSpec

STORY = """\
# A story, told aloud.
name = "story"

[[stages]]
name = "thinker"
kind = "llm"
model = "hub/model"
engine_args = { max_model_len = 1024 }
sampling = { temperature = 0.7, max_tokens = 200 }

[[stages]]
name = "speaker"
kind = "simulated"
bridge = "text"
stream = true
modality = "audio"
"""

STORY_YAML = """\
# A story, told aloud.
name: story
stages:
  - name: thinker
    kind: llm
    model: hub/model
    engine_args: {max_model_len: 1024}
    sampling:
      temperature: 0.7
      max_tokens: 200
  - name: speaker
    kind: simulated
    bridge: text
    stream: true
    modality: audio
"""


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch):
    """Each test gets its own sys.path and imports afresh what its files define."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, text: str, name: str = "pipeline.toml") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def failure(folder: Path, text: str, name: str = "pipeline.toml") -> ConfigError:
    path = write(folder, text, name)
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path)
    assert caught.value.file == str(path)
    return caught.value


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
            StageSpec(name="speaker", kind="simulated", bridge="text", stream=True, modality="audio"),
        ),
    )


def test_every_field_of_a_stage_can_be_read(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "voices.py").write_text("")
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


def test_every_field_of_a_stage_has_a_reader():
    assert list(_FIELDS) == [field.name for field in attrs.fields(StageSpec)]


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


# Files that can not be read


def test_files_that_are_none(tmp_path):
    for name, words in [("none.toml", "no such file"), ("p.json", "'.json'"), ("p", "''"), ("", "folder")]:
        with pytest.raises(ConfigError, match=words) as caught:
            load_pipeline(tmp_path / name)
        assert caught.value.file == str(tmp_path / name)
        assert caught.value.line is None
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(ConfigError, match="this is a folder"):
        load_pipeline(folder)


def test_a_loop_of_links_can_not_be_read(tmp_path):
    path = tmp_path / "p.toml"
    path.symlink_to(path)
    with pytest.raises(ConfigError, match="can not be read"):
        load_pipeline(path)


@pytest.mark.parametrize("name", ["p.toml", "p.yaml"])
@pytest.mark.parametrize("text", ["", " \n\n"])
def test_an_empty_file(tmp_path, name, text):
    error = failure(tmp_path, text, name)
    assert "the file is empty" in error.message
    assert error.line == 1


def test_a_yaml_file_of_comments_is_empty(tmp_path):
    assert "the file is empty" in failure(tmp_path, "# nothing\n", "p.yaml").message


@pytest.mark.parametrize("name", ["p.toml", "p.yaml"])
def test_bytes_that_are_no_text(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"# one\n# two\nname = '\xff'\n")
    with pytest.raises(ConfigError, match="not text in UTF-8") as caught:
        load_pipeline(path)
    assert caught.value.line == 3


# Syntax


def test_toml_syntax_errors_have_a_line(tmp_path):
    error = failure(tmp_path, 'name = "x"\n\nkind = = 3\n')
    assert error.line == 3
    assert error.message == "this is not valid TOML: Invalid value"
    assert "at line" not in str(error)


def test_toml_that_ends_too_early(tmp_path):
    error = failure(tmp_path, 'name = "x"\nstages = [\n\n')
    assert error.line == 2


def test_toml_keys_given_twice(tmp_path):
    assert failure(tmp_path, 'name = "x"\n\nname = "y"\n').line == 3


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("name: a\nstages: [1, 2\n", 3, "expected"),
        ("name: a\n\tb: c\n", 2, "tab|cannot start"),
        ("name: a\n---\nname: b\n", 2, "single document"),
        ("name: a\nstages: *nowhere\n", 2, "undefined alias"),
        ("name: a\nstages: !!python/name:os.system x\n", 2, "python/name"),
        ("name: a\n\nname: b\n", 3, "'name' is given twice, first on line 1"),
        ("name: a\nstages:\n- name: b\n  options: {x: 1, x: 2}\n", 4, "given twice"),
        ("name: a\nstages: &s [*s]\n", 2, "contains itself"),
        ("name: a\nstages: &s\n- name: b\n  options: *s\n", 2, "contains itself"),
        ("name: a\nstages: !!int ''\n", 2, "'' is no valid int"),
        ("name: a\nstages: !!bool maybe\n", 2, "'maybe' is no valid bool"),
        ("name: a\nstages: 2001-99-99\n", 2, "no valid timestamp"),
        ("name: a\nstages: {[1]: 2}\n", 2, "unhashable"),
        ("name: a\nstages: \x01\n", 2, "special characters"),
    ],
)
def test_yaml_syntax_errors_have_a_line(tmp_path, text, line, words):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_pipeline(path)
    assert caught.value.line == line


@pytest.mark.parametrize(("name", "text"), [("p.toml", "x = "), ("p.yaml", "x: ")])
def test_a_value_nested_without_end(tmp_path, name, text):
    assert "too deep" in failure(tmp_path, text + "[" * 20_000 + "]" * 20_000, name).message


# Wrong content: file, line, key, expectation, gift


def test_an_error_reads_well(tmp_path):
    error = failure(tmp_path, STORY.replace('kind = "llm"', 'kind = "llm"\nreplicas = "two"'))
    assert (
        str(error)
        == f"{tmp_path}/pipeline.toml:7: stages.thinker.replicas: expected a whole number, got the text 'two'"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("name = 3", "expected a text, got the whole number 3; put it in quotes"),
        ("name = true", "expected a text, got the boolean true; put it in quotes"),
        ("name = ''", "'' is not a name"),
        ("name = 'a b'", "'a b' is not a name"),
        ("name = '--'", "'--' is not a name"),
        ("kind = []", "expected a text, got an empty list"),
        ("kind = 'lmm'", "did you mean 'llm'?"),
        ("model = { a = 1 }", "expected a text, got a table"),
        ("model = ''", "needs a model"),
        ("model = 1979-05-27", "got the date or time 1979-05-27; put it in quotes"),
        ("replicas = true", "expected a whole number, got the boolean true"),
        ("replicas = 1.0", "expected a whole number, got the number 1.0"),
        ("replicas = 0", "expected at least 1, not 0"),
        ("stream = 1", "expected true or false, got the whole number 1"),
        ("stream = 'yes'", "expected true or false, got the text 'yes'"),
        ("final_output = 'no'", "expected true or false"),
        ("final_output = false", "its output goes to nobody"),
        ("start_timeout = 'soon'", "expected a number, got the text 'soon'"),
        ("start_timeout = true", "expected a number, got the boolean true"),
        ("start_timeout = nan", "above 0, not nan"),
        ("start_timeout = -1", "above 0, not -1"),
        (f"start_timeout = 1{'0' * 400}", "a very large whole number"),
        ("sampling = 3", "expected a table, got the whole number 3"),
        ("sampling = []", "expected a table, got an empty list"),
        ("env = { A = 1 }", "expected a text, got the whole number 1; put it in quotes"),
        ("devices = '0,1'", "expected a list of device ids, got the text '0,1'"),
        ("devices = [true]", "expected a text, got the boolean true"),
        ("devices = ['0', '1', '2']", "3 are given"),
        ("path = 'lib'", "expected a list of texts, got the text 'lib'"),
        ("path = ['lib']", "only worker stages"),
        ("modality = 'audo'", "did you mean 'audio'?"),
        ("prompt_format = 'chatty'", "expected 'raw' or 'chat'"),
        ("target = 'a:b'", "only worker stages"),
        ("source = 'b'", "can have no source"),
        ("bridge = 'text'", "can have no bridge"),
        ("engine_arg = 1", "did you mean 'engine_args'?"),
        ("zzz = 1", "there is no such key; known are name, kind"),
        (f"system = '{'x' * 100}'", "needs prompt_format"),
        (f"replicas = '{'x' * 100}'", "got a text of 100 characters"),
    ],
)
def test_a_wrong_value_is_found_on_its_line(tmp_path, line, words):
    key = line.partition(" ")[0]
    rest = {"name": "name = 'a'", "model": "model = 'm'"}
    rest.pop(key, None)
    text = "[[stages]]\n" + "\n".join(rest.values()) + f"\n\n  # here\n  {line}\nprobe_interval = 5\n"
    error = failure(tmp_path, text)
    label = {"name = ''": "0", "name = 'a b'": "a b", "name = '--'": "--"}.get(line, "0" if key == "name" else "a")
    assert words in error.message
    assert error.key is not None
    assert error.key.removesuffix(".A").removesuffix(".0") == f"stages.{label}.{key}"
    assert error.line == text.split("\n").index(f"  {line}") + 1


@pytest.mark.parametrize(
    ("name", "text", "line", "key", "words"),
    [
        ("p.toml", "nam = 'x'\n", 1, "nam", "did you mean 'name'?"),
        ("p.toml", "\nname = 'x'\n", None, None, "there are no stages"),
        ("p.toml", "\nname = 3\nstages = []", 3, "stages", "at least one stage"),
        ("p.toml", "\nstages = 3", 2, "stages", "expected a list of tables, one per stage, got the whole number 3"),
        ("p.toml", "\n[stages.thinker]\nkind = 'llm'", 2, "stages", "write [[stages]] once per stage"),
        ("p.toml", "stages = [\n  3]", 2, "stages.0", "expected a table, got the whole number 3"),
        ("p.toml", "\n[[stages]]\nkind = 'llm'", 2, "stages.0", "needs a name"),
        ("p.toml", "\n[[stages]]\nname = 'a'", 2, "stages.a.model", "needs a model"),
        ("p.yaml", "[1, 2]", None, None, "expected a table with 'name' and 'stages', got a list"),
        ("p.yaml", "just words", None, None, "got the text 'just words'"),
        ("p.yaml", "1: 2", None, None, "expected texts as keys, got the whole number 1"),
        ("p.yaml", "name: no\nstages: [{name: a}]", 1, "name", "got the boolean false; put it in quotes"),
        ("p.yaml", "name:\nstages: [{name: a}]", 1, "name", "got nothing (null)"),
        ("p.yaml", "stages:\n\n-\n", 3, "stages.0", "expected a table, got nothing (null)"),
        ("p.yaml", "stages:\n- name: a\n  replicas: ~", 3, "stages.a.replicas", "got nothing (null)"),
        ("p.yaml", "stages:\n- name: a\n  env:\n    on: 'x'", 3, "stages.a.env", "as keys, got the boolean true"),
        (
            "p.yaml",
            "stages:\n- name: a\n  sampling:\n    x:\n    - 1\n    - 2020-01-01",
            6,
            "stages.a.sampling.x.1",
            "the date or time",
        ),
        ("p.yaml", "stages:\n- name: a\n  sampling: {x: !!set {a, b}}", 3, "stages.a.sampling.x", "type set"),
        ("p.yaml", "stages:\n- name: a\n  kind: simulated\n- kind: simulated", 4, "stages.1", "needs a name"),
    ],
)
def test_wrong_structure(tmp_path, name, text, line, key, words):
    error = failure(tmp_path, text, name)
    assert (error.line, error.key) == (line, key)
    assert words in error.message


def test_two_stages_of_one_name(tmp_path):
    error = failure(tmp_path, STORY.replace('"speaker"', '"thinker"'))
    assert (error.line, error.key) == (12, "stages.thinker.name")
    assert "the other is on line 4" in error.message


def test_the_right_one_of_two_stages_is_named(tmp_path):
    error = failure(tmp_path, STORY + 'source = "thinkr"\n')
    assert (error.line, error.key) == (17, "stages.speaker.source")
    assert "did you mean 'thinker'?" in error.message


def test_a_yaml_merge_is_blamed_where_the_value_stands(tmp_path):
    text = "stages:\n- &a\n  name: a\n  kind: simulated\n  replicas: 0.5\n- <<: *a\n  name: b\n"
    assert failure(tmp_path, text, "p.yaml").line == 5
    text = text.replace("0.5", "1") + "  replicas: 0.5\n"
    assert failure(tmp_path, text, "p.yaml").line == 8


# The finder of lines in TOML

TRICKY = '''\
title = "a # no comment [[stages]]" # a comment
text = """
[[stages]]
name = 'no'
quote: \\""" and two more:"""""
literal = \'\'\'
x = 1\'\'\'\'
"quoted.key" = { "a b" = 1, c.d = [1, { e = 2 }, "]" ] }
'single' = []
spaced . dotted . "key" = 1979-05-27 07:32:00
array = [
  1, # one ]
  [ 2,
    3 ],
  { x = "}" },
]

[table.sub]
x = 1
[[list]]
a = 1
  [list.inner]
  b = 2
  [[list.more]]
  c = 3
  [[list.more]]
  c = 4
[[list]]
a = 5
  [[list.more]]
  c = 6
[ "table" ]
"\\u0041" = ""
'''


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("title",), 1),
        (("text",), 2),
        (("name",), None),
        (("literal",), 6),
        (("x",), None),
        (("quoted.key",), 8),
        (("quoted.key", "a b"), 8),
        (("quoted.key", "c"), 8),
        (("quoted.key", "c", "d", 1, "e"), 8),
        (("quoted.key", "c", "d", 2), 8),
        (("single",), 9),
        (("spaced",), 10),
        (("spaced", "dotted", "key"), 10),
        (("array",), 11),
        (("array", 0), 12),
        (("array", 1), 13),
        (("array", 1, 0), 13),
        (("array", 1, 1), 14),
        (("array", 2, "x"), 15),
        (("array", 3), None),
        (("table",), 31),
        (("table", "sub"), 18),
        (("table", "sub", "x"), 19),
        (("list",), 20),
        (("list", 0), 20),
        (("list", 0, "a"), 21),
        (("list", 0, "inner"), 22),
        (("list", 0, "inner", "b"), 23),
        (("list", 0, "more"), 24),
        (("list", 0, "more", 0, "c"), 25),
        (("list", 0, "more", 1), 26),
        (("list", 0, "more", 1, "c"), 27),
        (("list", 1), 28),
        (("list", 1, "a"), 29),
        (("list", 1, "more", 0, "c"), 31),
        (("list", 2), None),
        (("table", "A"), 33),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_of_toml_keys(key, line, newline):
    expected = {("table",): 32}.get(key, line)
    assert _TomlLines(TRICKY.replace("\n", newline)).line(key) == expected


# Modules next to the file

BRIDGE = 'import omni_trio.messages as m\ndef own(context): return m.StageInput(text="x")\n'


def with_bridge(reference: str, target: str | None = None) -> str:
    last = f'kind = "worker"\ntarget = "{target}"' if target else 'kind = "simulated"'
    return f'[[stages]]\nname = "a"\nkind = "simulated"\n[[stages]]\nname = "b"\n{last}\nbridge = "{reference}"\n'


def test_bridges_and_targets_next_to_the_file(tmp_path, monkeypatch):
    (tmp_path / "near_bridge.py").write_text(BRIDGE)
    (tmp_path / "near_worker.py").write_text("raise RuntimeError('the loader must not import this')")
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
    (tmp_path / "package").mkdir()
    for target in ("json:dumps", "package.module:x", "sys:exit", "__main__:Own"):
        load_pipeline(write(tmp_path, with_bridge("text", target)))


def test_another_module_of_the_same_name_is_not_taken_silently(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_bridge.py").write_text(BRIDGE)
    load_pipeline(write(tmp_path / "one", with_bridge("same_bridge:own")))
    error = failure(tmp_path / "two", with_bridge("same_bridge:own"))
    assert error.line == 7
    assert f"already imported from {tmp_path / 'one' / 'same_bridge.py'}" in error.message


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
    with pytest.raises(ConfigError, match="type object") as caught:
        dump_pipeline(Pipeline((StageSpec(name="a", kind="simulated", options={"x": [object()]}),)))
    assert caught.value.key == "stages.a.options.x.0"
