"""The commands: their effects, their output and their files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import piebald
from piebald.core.progress import Bar
from tests import processes

ROOT = Path(__file__).parents[2]


def process(*words, cwd, **more):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | more
    return processes.run(
        processes.command(*words), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def only_object(said):
    assert said.code == 0, said
    assert said.err == ""
    assert said.out.count("\n") == 1
    return json.loads(said.out)


def test_a_run_as_json(command, good):
    facts = only_object(command("run", good, "--json"))
    assert {"recipe", "rounds", "seed", "accuracy", "bytes_up", "bytes_down", "seconds", "run"} <= facts.keys()
    assert (facts["recipe"], facts["rounds"], facts["seed"], facts["status"]) == ("fedavg", 2, 0, "finished")
    assert 0 <= facts["accuracy"] <= 1
    # 64 -> 128 -> 10 with biases, 4 bytes each, 10 clients, 2 rounds.
    assert facts["bytes_up"] == (64 * 128 + 128 + 128 * 10 + 10) * 4 * 10 * 2
    assert Path(facts["run"]) == Path("runs/fedavg")


def test_the_same_seed_gives_the_same_numbers(command, good):
    first, second = (only_object(command("run", good, "--json")) for _ in range(2))
    assert (first["accuracy"], first["run"]) == (second["accuracy"], str(Path(second["run"]).with_name("fedavg")))
    assert second["run"] != first["run"]


def test_a_run_is_shown_without_colours_and_bars_off_a_terminal(command, good):
    said = command("run", good, "--out", "here")
    assert said.err == ""
    assert "\x1b" not in said.out
    assert "accuracy" in said.out
    assert Path("here/run.db").is_file()


def test_quiet_prints_nothing(command, good):
    assert command("run", good, "--quiet") == (0, "", "")


@pytest.mark.full
def test_a_finished_run_is_not_run_again(command, good):
    ran = json.loads(process("run", good.name, "--json", "--out", "here", cwd=good.parent).stdout)
    assert only_object(command("resume", "here", "--json")) == ran


def test_an_interrupted_run_continues_from_its_folder_alone(command, good, monkeypatch):
    whole = only_object(command("run", good, "--json", "--out", "whole", "--set", "rounds=4"))
    carry_on = Bar.show

    def stop_at_two(bar, done, note):
        carry_on(bar, done, note)
        if done == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Bar, "show", stop_at_two)
    said = command("run", good, "--json", "--out", "cut", "--set", "rounds=4")
    assert said == (130, "", "interrupted; completed server steps are saved, continue with: piebald resume cut\n")
    monkeypatch.undo()
    os.chdir(good.parent)
    good.unlink()
    resumed = only_object(command("resume", "cut", "--json"))
    for number in ("accuracy", "rounds", "bytes_up", "bytes_down"):
        assert resumed[number] == whole[number]


def test_ctrl_c_before_anything_was_written(command, good, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("piebald.runs.run.run", interrupted)
    assert command("run", good) == (130, "", "interrupted before anything was written\n")
    monkeypatch.setattr("piebald.experiments.file.ExperimentSettings.load", interrupted)
    assert command("run", good) == (130, "", "interrupted\n")


@pytest.mark.full
def test_a_comparison_pairs_recipes_and_seeds(command, good):
    text = (
        good.read_text()
        .replace("[recipe]", '[[recipes]]\nname = "hdafl"\n\n[[recipes]]')
        .replace("seed = 0", "seeds = [0, 1]")
    )
    good.write_text(text)
    facts = json.loads(process("compare", good.name, "--json", "--out", "both", cwd=good.parent).stdout)
    assert [(run["recipe"], run["seed"]) for run in facts["runs"]] == [
        (r, s) for r in ("fedavg", "hdafl") for s in (0, 1)
    ]
    means = [row["mean"] for row in facts["summary"]]
    assert means == sorted(means, reverse=True)  # the best first
    (pair,) = facts["paired"]
    gains = [facts["runs"][2 + seed]["accuracy"] - facts["runs"][seed]["accuracy"] for seed in (0, 1)]
    assert (pair["label"], pair["base"], pair["seeds"]) == ("hdafl", "fedavg", 2)
    assert pair["difference"] == pytest.approx(sum(gains) / 2)
    said = command("compare", good, "--out", "both")
    assert said.code == 0
    assert "hdafl" in said.out
    assert "against fedavg" in said.out
    assert "piebald report both" in said.out


@pytest.mark.full
def test_a_report_about_a_run(command, good):
    command("run", good, "--quiet", "--out", "here")
    facts = only_object(command("report", "here", "--json", "--out", "page"))
    assert all(Path(file).is_file() for file in facts["files"])
    assert facts["page"] in facts["files"]


def test_all_recipes_with_papers_and_settings(command):
    listing = only_object(command("recipes", "--json"))
    assert [entry["name"] for entry in listing] == piebald.recipes.names()
    assert all(entry["paper"] and entry["summary"] and "cohort" in entry["fields"] for entry in listing)
    said = command("recipes")
    assert all(entry["name"] in said.out for entry in listing)


@pytest.mark.parametrize("name", piebald.recipes.names())
def test_the_printed_settings_of_a_recipe_are_valid_in_a_file(command, good, name):
    printed = command("recipes", name).out
    good.write_text(good.read_text().partition("[recipe]")[0] + printed)
    from piebald.experiments.file import ExperimentSettings

    recipe = next(iter(ExperimentSettings.load(good).built_recipes().values()))
    assert recipe.model_dump(exclude={"fields"}) == piebald.recipes.make(name).model_dump(exclude={"fields"})


def test_data_sets_have_sources(command, monkeypatch):
    monkeypatch.delenv("PIEBALD_DATA", raising=False)
    listing = {about["name"]: about for about in only_object(command("data", "--json"))}
    assert listing.keys() == set(piebald.data.names())
    assert listing["digits"]["rows"] == 1797
    assert "PIEBALD_DATA" in listing["traffic"]["missing"]
    assert "loading it downloads it from https://archive.ics.uci.edu" in listing["har"]["missing"]
    assert "not here" in command("data").out
    assert "CC BY 4.0" in command("data", "digits").out


def test_version(command):
    assert command("version") == (0, f"{piebald.__version__}\n", "")
    assert only_object(command("version", "--json")) == {"version": piebald.__version__}


def test_without_a_command_there_is_help(command):
    said = command()
    assert said == command("--help")
    assert said.code == 0
    assert all(
        f"\n  {name} " in said.out for name in ("run", "compare", "resume", "report", "recipes", "data", "version")
    )


def test_an_unexpected_error_is_one_line(command, good, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("piebald.runs.run.run", broken)
    said = command("run", good)
    assert said == (
        1,
        "",
        "unexpected error: ZeroDivisionError: division by zero (set PIEBALD_DEBUG=1 for a traceback)\n",
    )
    monkeypatch.setenv("PIEBALD_DEBUG", "1")
    assert "Traceback" in command("run", good).err


def test_help_does_not_load_what_is_slow(tmp_path):
    code = "import sys; from piebald.cli import main; main(['--help']); print({'torch', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


def test_a_shell_can_complete_commands(tmp_path):
    done = process(
        cwd=tmp_path, _PIEBALD_COMPLETE="complete_bash", COMP_WORDS="piebald re", COMP_CWORD="1"
    )  # fmt: skip
    assert done.stdout.split() == ["resume", "report", "recipes", "restore"]


@pytest.mark.full
def test_a_closed_pipe_is_no_error(tmp_path):
    code = "import sys; from piebald.cli import main; sys.exit(main(['recipes', '--json']))"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    errors = child.stderr.read()
    child.stderr.close()
    assert (child.wait(), errors) == (1, b"")


@pytest.mark.full
def test_a_partition_is_shown_with_devices_and_weights(command, tmp_path):
    words = ("data", "show", "digits", "--partition", "dirichlet", "--set", "clients=4", "--set", "alpha=0.5")
    fleet = ("--fleet", "fast_slow", "--set", "fleet.slow_factor=3", "--set", "fleet.first=fast", "--set", "limit=400")
    model = ("--model", "logistic", "--set", "model.lr=0.1")
    shown = only_object(command(*words, *fleet, *model, "--json", "--out", "pictures"))
    assert shown["federation"]["speed_ratio"] == 3
    assert [row["seconds"] for row in shown["clients"]] == [1, 3, 1, 3]
    assert [row["up"] for row in shown["clients"]] == [None] * 4
    assert shown["federation"].keys() <= shown["units"].keys()
    assert {"frechet", "total_variation", "divergence"} <= shown["clients"][0].keys()
    assert shown["federation"]["pooled_divergence"] > 0
    assert (shown["fleet"]["kind"], shown["partition"]["alpha"]) == ("fast_slow", 0.5)
    assert [Path(file).name for file in shown["files"]] == ["classes.png", "sizes.png", "embedding.png", "devices.png"]
    assert all(Path(file).read_bytes().startswith(b"\x89PNG") for file in shown["files"])
    said = command(*words, *fleet)
    assert "seconds" in said.out
    assert "divergence" not in said.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--fleet", "fast_slow"), "--set, --fleet, --model and --out need a partition: add --partition KIND"),
        (
            ("--partition", "iid", "--set", "clients=2", "--set", "fleet.fast=2"),
            "fleet.fast needs a fleet: add --fleet",
        ),
        (("--partition", "iid", "--set", "clients=2", "--fleet", "fastslow"), "did you mean 'fast_slow'"),
        (("--partition", "iid", "--set", "clients=2", "--model", "logistics"), "did you mean 'logistic'"),
        (
            ("--partition", "iid", "--set", "clients=2", "--model", "logistic", "--set", "model.l=1"),
            "no setting of the model's training called 'l'",
        ),
    ],
)
def test_bad_options_of_data_show_are_refused_in_one_sentence(command, words, message):
    said = command("data", "show", "digits", *words)
    assert said.code == 2
    assert message in said.err
    assert said.err.count("\n") == 1


@pytest.mark.full
def test_verbose_prints_the_engine(tmp_path, good):
    words = ("run", good, "--set", "runtime.kind=simulator", "--set", "runtime.engine=sequential")
    assert '"engine": "sequential"' in process(*words, "--verbose", cwd=tmp_path).stderr
    assert '"engine"' not in process(*words, cwd=tmp_path).stderr


def test_export_writes_the_model_of_a_client_by_name(command, good):
    only_object(command("run", good, "--out", "here", "--json"))
    made = only_object(command("export", "here", "--client", "3", "--out", "three.safetensors", "--json"))
    assert Path(made["file"]).is_file()
    assert command("export", "here", "--client", "george", "--out", "x.pt").code == 2
    assert command("export", "here", "--out", "x.bin").err.count("\n") == 1
