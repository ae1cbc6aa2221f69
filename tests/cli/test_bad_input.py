"""Bad input: one sentence, exit code 2, nothing written."""
# ruff: noqa: E501, tables are read by their columns

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# The text replaced in the valid file, its replacement, and what the message must contain.
FILES = {
    "syntax": ("rounds = 2", "rounds = ", "experiment.toml:1:10: this is not TOML: invalid value"),
    "twice": ("seed = 0", "rounds = 3", "experiment.toml:2:11: this is not TOML: cannot overwrite a value"),
    "unclosed text": ('"fedavg"', '"fedavg', "experiment.toml:16:15: this is not TOML"),
    "unknown setting": ("rounds", "roudns", "experiment.toml:1: there is no setting or section called 'roudns': did you mean"),
    "unknown section": ("[model]", "[modle]", "experiment.toml:12: there is no setting or section called 'modle'"),
    "rounds none": ("rounds = 2", "rounds = 0", "experiment.toml:1: rounds must be at least 1, got 0"),
    "rounds text": ("rounds = 2", 'rounds = "2"', "experiment.toml:1: rounds must be a whole number, got '2'"),
    "rounds broken": ("rounds = 2", "rounds = 2.5", "experiment.toml:1: rounds must be a whole number, got 2.5"),
    "rounds true": ("rounds = 2", "rounds = true", "experiment.toml:1: rounds must be a whole number, got True"),
    "seed negative": ("seed = 0", "seed = -1", "experiment.toml:2: seed must be at least 0, got -1"),
    "seeds empty": ("seed = 0", "seeds = []", "experiment.toml:2: seeds needs at least one entry"),
    "seeds text": ("seed = 0", 'seeds = [1, "b"]', "experiment.toml:2: seeds[1] must be a whole number, got 'b'"),
    "seeds twice": ("seed = 0", "seeds = [0, 1, 0]", "experiment.toml:2: seeds must be a list of different seeds, at least one, got [0, 1, 0]"),
    "seeds negative": ("seed = 0", "seeds = [0, -1]", "experiment.toml:2: seeds[1] must be at least 0, got -1"),
    "tuned seeds twice": ("[recipe]", "[tune]\nseeds = [3, 3]\n[recipe]", "experiment.toml:16: tune.seeds must be a list of different seeds"),
    "cohort none": ("lr = 0.1", "cohort = 0", "experiment.toml:17: recipe.cohort must be a number of clients (1, 2, ...) or a share of them (0.1, or 1.0 for all), got 0"),
    "cohort broken": ("lr = 0.1", "cohort = 1.5", "experiment.toml:17: recipe.cohort must be a number of clients (1, 2, ...) or a share"),
    "label number": ("seed = 0", "label = 3", "experiment.toml:2: label must be text, got 3"),
    "date": ("seed = 0", "seed = 1979-05-27", "experiment.toml:2: seed must be a whole number"),
    "data unknown": ('"digits"', '"digit"', "experiment.toml:5: there is no data set 'digit': did you mean 'digits'?"),
    "data setting": ('"digits"', '"digits"\nsize = 3', "experiment.toml:6: there is no setting of [data] called 'size'"),
    "data no table": ('[data]\nname = "digits"', "data = 3", "experiment.toml:4: data must be a table, like [data], got 3"),
    "partition missing": ("[partition]", "[fleet]", "experiment.toml needs a section [partition] with a kind"),
    "partition unknown": ('"dirichlet"', '"dirichelt"', "experiment.toml:8: there is no partition 'dirichelt': did you mean 'dirichlet'?"),
    "partition kindless": ('kind = "dirichlet"', "", "experiment.toml:7: [partition] needs a kind"),
    "partition setting": ("alpha", "alhpa", "experiment.toml:10: there is no setting of partition 'dirichlet' called 'alhpa': did you mean 'alpha'?"),
    "partition value": ("alpha = 0.5", "alpha = 0", "experiment.toml:10: partition.alpha must be above 0, got 0"),
    "partition text": ("clients = 10", 'clients = "many"', "experiment.toml:9: partition.clients must be a whole number"),
    "partition lacks": ("clients = 10", "", "experiment.toml:8: partition 'dirichlet' needs a value for clients"),
    "partition too many": ("clients = 10", "clients = 9999", "experiment.toml:9: "),
    "model missing": ('[model]\nname = "mlp"', "", "experiment.toml needs a section [model] with a name"),
    "model unknown": ('"mlp"', '"mpl"', "experiment.toml:13: there is no model 'mpl': did you mean 'mlp'?"),
    "model setting": ('"mlp"', '"mlp"\nwidht = 3', "experiment.toml:14: there is no setting of model 'mlp' called 'widht'"),
    "recipe missing": ('[recipe]\nname = "fedavg"\nlr = 0.1', "", "experiment.toml needs a [recipe] with a name, or [[recipes]]"),
    "recipe nameless": ('name = "fedavg"', "", "experiment.toml:15: [recipe] needs a name"),
    "recipe unknown": ('"fedavg"', '"fedagv"', "experiment.toml:16: there is no recipe 'fedagv': did you mean 'fedavg'?"),
    "recipe setting": ("lr =", "rl =", "experiment.toml:17: there is no setting of recipe 'fedavg' called 'rl': did you mean 'lr'?"),
    "recipe value": ("lr = 0.1", "lr = -1", "experiment.toml:17: recipe.lr must be above 0, got -1"),
    "recipe text": ("lr = 0.1", 'lr = "fast"', "experiment.toml:17: recipe.lr must be a number"),
    "recipe list": ("[recipe]", "[[recipe]]", "experiment.toml:15: recipe must be a table, like [recipe]"),
    "recipes twice": ("[recipe]", '[[recipes]]\nname = "fedavg"\n[recipe]', "experiment.toml needs [recipe] or [[recipes]], not both"),
    "axis unknown": ("lr = 0.1", 'aggregation = { kind = "example_weigthed" }', "experiment.toml:17: there is no aggregation 'example_weigthed': did you mean 'example_weighted'?"),
    "axis kindless": ("lr = 0.1", "scheduling = 3", "experiment.toml:17: "),
    "axis setting": ("lr = 0.1", '[recipe.scheduling]\nkind = "synchronous"\nspeed = 3', "experiment.toml:19: there is no setting of scheduling 'synchronous' called 'speed'"),
    "runtime unknown": ("seed = 0", 'runtime.kind = "simulater"', "experiment.toml:2: there is no runtime 'simulater': did you mean 'simulator'?"),
    "runtime value": ("seed = 0", 'runtime = { kind = "simulator", workers = -1 }', "experiment.toml:2: runtime.workers must be at least 0, got -1"),
    "fleet unknown": ("seed = 0", 'fleet.kind = "fast"', "experiment.toml:2: there is no fleet 'fast'"),
    "evaluate setting": ("seed = 0", "evaluate.evry = 2", "experiment.toml:2: there is no setting of [evaluate] called 'evry': did you mean 'every'?"),
    "evaluate split": ("seed = 0", 'evaluate.split = "tset"', "experiment.toml:2: evaluate.split must be 'train', 'validation' or 'test', got 'tset'"),
    "cohort too large": ("lr = 0.1", "cohort = 11", "experiment.toml:17: recipe.cohort is 11 but there are 10 clients"),
    "evaluate value": ("seed = 0", "evaluate.every = -1", "experiment.toml:2: evaluate.every must be at least 0, got -1"),
    "longest step": ("seed = 0", "longest_step = 0", "experiment.toml:2: longest_step must be above 0, got 0"),
    "several runs": ("seed = 0", "seeds = [0, 1]", "experiment.toml describes several runs: use piebald compare"),
}  # fmt: skip

COMPARISONS = {
    "grid no list": ("seed = 0", 'grid."recipe.lr" = 3', "experiment.toml:2: grid needs a list of values for recipe.lr, got 3"),
    "grid empty": ("seed = 0", "grid.recipe.lr = []", "experiment.toml:2: grid needs a list of values for recipe.lr, got []"),
    "grid outside": ("seed = 0", "grid.rounds = [1]", "experiment.toml:2: grid can vary settings of the recipe, like 'recipe.lr', got 'rounds'"),
    "grid unknown": ("seed = 0", "grid.recipe.rl = [1]", "experiment.toml:2: there is no setting of recipe 'fedavg' called 'rl'"),
    "grid value": ("seed = 0", "grid.recipe.lr = [0.1, -2]", "experiment.toml:2: recipe.lr must be above 0, got -2"),
    "same label": ("[recipe]", '[[recipes]]\nname = "fedavg"\n[[recipes]]', "experiment.toml:17: there are two recipes called 'fedavg'"),
    "second recipe": ("[recipe]", '[[recipes]]\nname = "fedavg"\n[[recipes]]\nlabel = "b"\nmu = 1', "experiment.toml:19: there is no setting of recipe 'fedavg' called 'mu'"),
}  # fmt: skip

FEDERATIONS = {
    "unknown": ("hsot = 'a'", "federation.toml:2: there is no setting or section called 'hsot': did you mean 'host'?"),
    "port": ("port = 84770", "federation.toml:2: port must be at most 65535, got 84770"),
    "host": ("host = 'my host'", "federation.toml:2: host must be a name or an IP address, without http:// and port, got 'my host'"),
    "host with its port": ("host = 'hub.org:8400'", "federation.toml:2: host must be a name or an IP address"),
    "no sites": ("days = 1", "federation.toml needs a value for sites"),
    "empty": ("sites = []", "federation.toml:2: sites needs at least one entry"),
}  # fmt: skip

LINES = {
    "command": ("rnu", "No such command 'rnu'. Did you mean 'run'?"),
    "group": ("queue", "piebald queue needs a command: add, list, stop, resume"),
    "option": ("run --ot x", "No such option: --ot"),
    "option of the file": ("run --rounds 3", "there is no option --rounds: write --set rounds=VALUE"),
    "option of a section": ("run --evaluate-every 3", "there is no option --evaluate_every: write --set evaluate.every="),
    "option of the recipe": ("compare FILE --epochs 3", "there is no option --epochs: write --set recipe.epochs=VALUE"),
    "data name of others": ("data emnist", "there is no data set 'emnist': femnist has EMNIST's letters and digits"),
    "option value": ("run --out", "Option '--out' requires an argument"),
    "no file": ("compare", "Missing argument"),
    "too many": ("compare a.toml b.toml", "Got unexpected extra argument"),
    "several tables": ("look a.csv b.csv", "piebald look takes one FILE: of several tables a pattern in quotes, such as '*.csv' or '*/b.csv'"),
    "file missing": ("run nowhere.toml", "nowhere.toml cannot be read: no such file or directory"),
    "file is a folder": ("run .", ". cannot be read: it is a directory, and only files are read"),
    "set no value": ("run experiment.toml --set rounds", "--set needs key=value, like --set recipe.lr=0.1, got 'rounds'"),
    "set empty": ("run experiment.toml --set rounds=", "--set rounds needs a value after the = sign"),
    "set wrong": ("run experiment.toml --set recipe.lr=-1", "--set recipe.lr: recipe.lr must be above 0, got -1"),
    "set unknown": ("run experiment.toml --set recipe.rl=1", "--set recipe.rl: there is no setting of recipe 'fedavg' called 'rl'"),
    "set top": ("run experiment.toml --set round=1", "--set round: there is no setting or section called 'round': did you mean 'rounds'?"),
    "set inside": ("run experiment.toml --set rounds.x=1", "--set rounds.x: rounds is 2, which has no 'x' inside"),
    "set default": ("run --set recipe.name=fedagv", "--set recipe.name: there is no recipe 'fedagv': did you mean 'fedavg'?"),
    "set list": ("run experiment.toml --set recipe.lr=[1,", "--set recipe.lr: '[1,' is not a TOML value"),
    "runtime": ("run experiment.toml --runtime moon", "--runtime: there is no runtime 'moon'"),
    "resume nothing": ("resume nowhere", "there is no run folder 'nowhere': give the folder that piebald run wrote"),
    "resume no run": ("resume empty", "empty"),
    "resume comparison": ("resume compared", "compared holds a comparison: go on with piebald compare FILE --out compared"),
    "report nothing": ("report nowhere", "there is no run folder 'nowhere'"),
    "report no run": ("report empty", "empty"),
    "report none": ("report", "Missing argument"),
    "recipe name": ("recipes hdfal", "there is no recipe 'hdfal': did you mean 'hdafl'?"),
    "data name": ("data digit", "there is no data set 'digit': did you mean 'digits'?"),
    "rounds text": ("resume empty --rounds abc", "Invalid value for '--rounds': must be a whole number\n"),
    "lr text": ("adapt empty --data x.csv --lr fast", "Invalid value for '--lr': must be a number\n"),
    "family": ("glm x.csv --family binomal", "Invalid value for '--family': 'binomal' is not one of 'gaussian', 'binomial', "),
    "out taken": ("run experiment.toml --out full", "full"),
    "out is a file": ("run experiment.toml --out experiment.toml", "experiment.toml"),
    "out in a file": ("provision federation.toml --out experiment.toml/x", "cannot be written or read (not a directory): name another place, and run the command again"),
    "comparison over a run": ("compare experiment.toml --out compared/fedavg/seed-0", "compared/fedavg/seed-0 holds a run, and a comparison has a folder for each of its own: choose another folder"),
    "target names the client": ("advise rows.csv --client site --target site", "client and target must be different columns, got 'site' for both"),
    "loss": ("run experiment.toml --set loss=hubr", "there is no loss 'hubr': did you mean 'huber'?"),
    "stop setting": ("run experiment.toml --set stop.secnds=3", "there is no setting of stop called 'secnds': did you mean 'seconds'?"),
    "stop nothing": ("stop nowhere", "there is no folder 'nowhere': give a run folder, or a folder of credentials"),
}  # fmt: skip


def check(code: int, out: str, err: str, sentence: str) -> None:
    assert code == 2, (out, err)
    assert err.count("\n") == 1, err
    assert sentence in err
    assert "Traceback" not in err
    assert out == ""


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def edited(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(("old", "new", "sentence"), FILES.values(), ids=FILES)
def test_a_wrong_file(command, good: Path, old: str, new: str, sentence: str) -> None:
    edited(good, old, new)
    check(*command("run", good.name), sentence)
    assert written(good.parent) == {good.name}


@pytest.mark.parametrize(("old", "new", "sentence"), COMPARISONS.values(), ids=COMPARISONS)
def test_a_wrong_comparison(command, good: Path, old: str, new: str, sentence: str) -> None:
    edited(good, old, new)
    check(*command("compare", good.name), sentence)
    assert written(good.parent) == {good.name}


@pytest.mark.parametrize(("line", "sentence"), FEDERATIONS.values(), ids=FEDERATIONS)
def test_a_wrong_federation(command, good: Path, line: str, sentence: str) -> None:
    sites = "" if "sites" in sentence else "sites = ['north']\n"
    (good.parent / "federation.toml").write_text(f"# a federation\n{line}\n{sites}")
    check(*command("provision", "federation.toml"), sentence)
    assert written(good.parent) == {good.name, "federation.toml"}


@pytest.mark.parametrize(("line", "sentence"), LINES.values(), ids=LINES)
def test_a_wrong_line(command, good: Path, line: str, sentence: str) -> None:
    (good.parent / "empty").mkdir()
    (good.parent / "full").mkdir()
    (good.parent / "full" / "file").write_text("mine")
    (good.parent / "federation.toml").write_text("sites = ['north']\n")
    (good.parent / "rows.csv").write_text("site,age,ill\n" + "a,1,0\nb,2,1\n" * 4)
    (run := good.parent / "compared" / "fedavg" / "seed-0").mkdir(parents=True)
    (run / "run.db").touch()
    before = written(good.parent)
    check(*command(*line.split()), sentence)
    assert written(good.parent) == before


def test_a_file_that_is_not_text(command, good: Path) -> None:
    good.write_bytes(b"\xff\xfe\x00")
    check(*command("run", good.name), "experiment.toml is not a text file in UTF-8")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read(command, good: Path) -> None:
    good.chmod(0)
    check(*command("run", good.name), "experiment.toml cannot be read: permission denied")


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rnu"], "Did you mean 'run'?"),
        (["run", "experiment.toml", "--set", "recipe.lr=-1"], "recipe.lr must be above 0"),
        (["run", "experiment.toml", "--json", "--set", "rounds=0"], "rounds must be at least 1"),
    ],
)
def test_a_separate_process_prints_the_same(good: Path, words: list[str], sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "piebald.cli", *words],
        cwd=good.parent,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    check(done.returncode, done.stdout, done.stderr, sentence)


def test_a_second_interruption_leaves_no_traceback_of_the_exit() -> None:
    code = "import atexit, signal, sys; from piebald.cli import main; sys.argv = ['piebald', 'version']; "
    code += "atexit.register(signal.raise_signal, signal.SIGINT); sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
