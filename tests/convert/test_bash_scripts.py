"""Shell scripts are read as a shell would read them, and nothing in them is run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.convert.reading.bash_scripts import read_shell
from arborl.convert.reading.source_files import collect
from arborl.convert.reading.training_scripts import plain, read_script
from arborl.errors import ConfigError


def settings(text: str) -> dict:
    return read_script(text, "run.sh").settings


def words(text: str) -> list[tuple[str, ...]]:
    return [command.words for command in read_shell(text, "run.sh").commands]


@pytest.mark.parametrize(
    ("script", "value"),
    [
        ("x=1e-6\nA a.b=$x", 1e-6),
        ("export x='a b'\nA a.b=\"$x/c\"", "a b/c"),
        ("A a.b=${x:-7}", 7),
        ("x=\nA a.b=${x:-7}", 7),
        ("x=3\nA a.b=${x:+set}", "set"),
        ("x=2 y=3\nA a.b=$((x * (y + 1)))", 8),
        ("x=run_v2.sh\nA a.b=${x%.sh} c.d=${x##*_}", "run_v2"),
        ("x='p.q=1 p.r=2'\nA a.b=${x//p/s}", "s.q=1"),
        ("x=(a 'b c' # not this one\n  d)\nA \"a.b=${x[1]}\"", "b c"),
        ("x=(a b)\nx+=(c)\nA a.b=${x[2]}", "c"),
        ("x=a\nx+=b\nA a.b=$x", "ab"),
        ("A a.b='[\"console\", \"wandb\"]'", ["console", "wandb"]),
        ("A a.b=['console','wandb']", ["console", "wandb"]),
        ("A a.b={x:1,y:[2,3]}", None),
        ("A a.b=$(date +%s)", "$(date +%s)"),
        ("x=$(date +%s)\nA a.b=/runs/$x", "/runs/$(date +%s)"),
        ("A a.b=$UNSET", "$UNSET"),
        ("A a.b=$HOME/x", "~/x"),
        ("A \\\n  # a.b=1 \\\n  a.b=2   # so", 2),
        ("A a.b=1 2>&1 | tee log", 1),
        ("A 'a.b=c d' > out.txt", "c d"),
        ("if [ -z \"$x\" ]; then x=1; else x=2; fi\nA a.b=$x", 1),
        ("n=4\nif [ $n -eq 8 ]; then x=1; elif [[ $n == 4 && -n $n ]]; then x=2; fi\nA a.b=$x", 2),
        ("b=fsdp\ncase $b in mega*) x=1;; fsdp|ddp) x=2;; esac\nA a.b=$x", 2),
        ("now() { date; }\nfunction go() { A a.b=$1 \"${@:2}\"; }\ngo 5", 5),
        ("for s in 3; do A a.b=$s; done", 3),
        ("[ -n \"$x\" ] || x=4\nA a.b=$x", 4),
        ("cat > f.py <<'EOF'\npython a.b=0 \"\nEOF\nA a.b=1", 1),
        ("bash -c 'A a.b=6'", 6),
    ],
)  # fmt: skip
def test_values_match_what_a_shell_would_pass(script, value):
    found = settings(script.replace("A ", "python3 -m train "))
    assert found.get("a.b") == value or (value is None and found == {"--module": "train", "a.b.x": 1, "a.b.y": [2, 3]})


def test_a_ray_job_with_multi_line_json_is_one_command():
    script = """
ray job submit --address="http://127.0.0.1:8265" \\
  --runtime-env-json='{
  "env_vars": {
      "TOKEN": "$TOKEN"
  },
  "pip": ["a"]
  }' -- UNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
        --config-path="$PWD/conf" --config-name big \\
        +a.b=1 ++a.c=null ~a.d \\
    2>&1 | tee -a "$LOG"
"""
    found = read_script(script, "run.sh")
    assert found.settings == {
        "--module": "verl.trainer.main_ppo", "--config-path": "./conf", "--config-name": "big", "a.b": 1, "a.c": None,
    }  # fmt: skip
    assert found.removed == ["a.d"]


def test_overrides_kept_in_a_variable_or_in_arrays_are_words_of_their_own():
    script = """
ACTOR="
    a.b=1 \\
    a.c=2
    a.d=3"
MORE=(a.e=4 "a.f=x y")
python3 -m train $ACTOR "${MORE[@]}" "$@"
"""
    assert settings(script) == {"--module": "train", "a.b": 1, "a.c": 2, "a.d": 3, "a.e": 4, "a.f": "x y"}


def test_other_commands_are_no_settings_and_two_trainings_are_refused():
    assert settings("pip install x.y==1\nsed -i s/a.b=1/a.b=2/ f\npython prepare.py\nray start --head") == {}
    same = "python t.py a.b=1\n"
    assert settings(same * 2) == {"a.b": 1}
    with pytest.raises(ConfigError, match=r"run\.sh: starts several trainings \(lines 1, 2\)"):
        settings("python t.py a.b=1\npython t.py a.b=2")
    with pytest.raises(ConfigError, match="several trainings"):
        settings("for x in 1 2; do python t.py a.b=$x; done")


def test_scripts_are_read_and_never_run(tmp_path):
    found = read_script(f"x=$(touch {tmp_path / 'gone'})\n`touch {tmp_path / 'gone'}`\na.b=$x", "s")
    assert not (tmp_path / "gone").exists()
    assert found.settings == {"a.b": f"$(touch {tmp_path / 'gone'})"}
    assert "x" in found.variables


def test_an_unclosed_quote_is_reported_with_its_line():
    with pytest.raises(ConfigError, match=r"run\.sh: line 2: cannot read '\"', which is never closed"):
        settings('a=1\npython x "a.b=c')


def test_a_script_cannot_grow_without_bound():
    doubled = "a=xxxxxxxxxx\n" + "a=$a$a\n" * 40
    with pytest.raises(ConfigError, match="longer than"):
        settings(doubled)
    with pytest.raises(ConfigError, match=r"cannot read so many|cannot read more than"):
        settings("{ " * 60)
    for script, why in (("f() { f; f; }\nf", "so"), ("x=" + "${a:-" * 3000 + "}" * 3000, "so deep"),
                        ("for x in 1 2 3 4 5 6 7 8; do " * 8 + "y=1;" + "done;" * 8, "for so long")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"run.sh: .*cannot read .*{why}"):
            settings(script)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-7", 5e-7), ("1", 1), ("-0.5", -0.5), ("1.", 1.0), ("True", True), ("null", None), ("", None),
        ("a/b", "a/b"),
        ("[a,b]", ["a", "b"]), ("[]", []), ("['a b', 1, [x]]", ["a b", 1, ["x"]]),
        ("{a:1,b:{c: d}}", {"a": 1, "b": {"c": "d"}}),
        ("'1'", "1"), ("[a", "[a"), ("a: b", "a: b"), ("1_000", 1000), ("http://x:1", "http://x:1"), ("e5", "e5"),
        ("${a.b}", "${a.b}"), ("[${a}, 1]", ["${a}", 1]),
    ],
)  # fmt: skip
def test_values_are_read_as_hydra_reads_them(text, value):
    assert plain(text) == value


def test_a_configuration_that_a_script_names_is_found_and_comes_first(tmp_path):
    (tmp_path / "repo" / "conf").mkdir(parents=True)
    (tmp_path / "repo" / "scripts").mkdir()
    (tmp_path / "repo" / "conf" / "big.yaml").write_text("a: {b: 1, c: 2, d: 3}\n")
    (tmp_path / "repo" / "conf" / "tools.yaml").write_text("tools: []\n")
    script = tmp_path / "repo" / "scripts" / "run.sh"
    script.write_text(
        "ROOT=$(git rev-parse --show-toplevel)\npython t.py --config-path=$ROOT/conf --config-name='big' a.b=9 ~a.d "
        "x.tool_config_path=$ROOT/conf/tools.yaml"
    )
    assert collect([script]).keys == {
        "a.b": 9, "a.c": 2, "x.tool_config_path": str(tmp_path / "repo" / "conf" / "tools.yaml")
    }  # fmt: skip
    script.write_text("python t.py --config-name=small a.b=9")
    assert collect([script]).keys == {"--config-name": "small", "a.b": 9}


@given(st.text(alphabet=st.sampled_from("ab=.$(){}[]'\"\\`#;&|<> \n\t!ifthenelsdocas*%/:-+@0"), max_size=120))
def test_any_text_is_read_or_refused_with_one_line(text):
    try:
        found = read_script(text, "script").settings
    except ConfigError as error:
        assert str(error).startswith("script: ")  # noqa: PT017
    else:
        assert all(isinstance(key, str) for key in found)
