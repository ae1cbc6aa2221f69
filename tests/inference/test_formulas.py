"""Formulas are statsmodels' on the pooled rows; what is written in them is data, and never run."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import formulaic.utils.stateful_transforms as evaluation
import numpy as np
import pandas
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as formulas
from formulaic.materializers import base
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.duration.hazard_regression import PHReg

import piebald
from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.inference.linear_models import GlmOptions, fit_glm
from piebald.inference.models.clients import ModelClients, ModelColumns
from piebald.inference.models.formula import Formula, Spline, with_formula
from piebald.inference.survival import CoxOptions, fit_cox

from .test_models_at_sites import PLANS, pooled, sites
from .test_values_at_sites import agreed, here, runtime  # noqa: F401


def patients(rows: int = 500) -> pandas.DataFrame:
    rng = np.random.default_rng(8)
    table = pandas.DataFrame({
        "site": rng.choice(list("abc"), rows), "sex": rng.choice(["female", "male"], rows),
        "ward": rng.choice(["x", "y", "z"], rows), "age": rng.normal(60, 12, rows), "dose": rng.gamma(2, 2, rows) + 0.5,
        "grade": rng.integers(1, 4, rows), "blood.pressure": rng.normal(130, 15, rows),
    })  # fmt: skip
    table["grade no"] = table.grade
    eta = 0.03 * (table.age - 60) - 0.5 * (table.sex == "male") + np.sin(table.dose)
    table["died"] = (rng.logistic(size=rows) < eta).astype(int)
    table["falls"] = rng.poisson(np.exp(eta / 3))
    table["cost"] = eta + rng.normal(size=rows)
    table["months"] = np.ceil(rng.exponential(20 * np.exp(-eta / 3)))
    return table


FORMULAS = [
    "C(site) + sex * bs(age, df=4)", "age * sex * ward + np.log(dose)", "sex:ward",
    "C(grade):age + bs(dose, df=5, degree=2)", "center(age) * standardize(dose) + I(age ** 2 / 100)",
    "(age + dose + sex) ** 2 - age:dose", "C(ward, Treatment('y')) + np.log1p(dose) + np.sqrt(dose)",
    "C(grade, Treatment(reference=3)) + np.log10(dose) + np.log2(dose + 1)", "1", "sex / age",
    "Q('grade no') + Q('blood.pressure')",
    "bs(age, knots=(50, 60, 70), lower_bound=0, upper_bound=120)", "np.exp(-dose) + np.abs(age - 60) + I(-dose / age)",
    "site * age - site",
]  # fmt: skip


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize(("target", "family"), [
    ("died", sm.families.Binomial()), ("falls", sm.families.Poisson()), ("cost", sm.families.Gaussian()),
])  # fmt: skip
def test_formulas_are_those_of_statsmodels(formula: str, target: str, family: Any) -> None:
    table = patients()
    found = piebald.glm(table, client="site", formula=f"{target} ~ {formula}", family=type(family).__name__.lower())
    referee = formulas.glm(f"{target} ~ {formula}", table, family=family).fit(tol=1e-14, use_t=False)
    # names differ, and so may their order
    np.testing.assert_allclose(np.sort(found.coefficients), np.sort(referee.params), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(np.sort(found.errors), np.sort(referee.bse), rtol=1e-6, atol=1e-7)
    assert found.deviance == pytest.approx(referee.deviance, rel=1e-9)


def test_names_are_those_of_columns() -> None:
    table = patients()
    found = piebald.glm(table, client="site", formula="cost ~ sex * age + blood.pressure + `grade no` + bs(dose, df=4)")
    splines = tuple(f"bs(dose, df=4)[{k}]" for k in range(1, 5))
    assert found.names == ("(intercept)", "sex=male", "age", "blood.pressure", "grade no", *splines, "sex=male:age")
    without = piebald.glm(table, client="site", target="cost", formula="sex + age")
    assert (without.target, without.names) == ("cost", ("(intercept)", "sex=male", "age"))


def test_hazards_have_formulas() -> None:
    table = patients()
    found = piebald.cox(
        table, client="site", time="months", event="died", formula="sex * center(age) + np.log(dose)", stratified=False
    )
    male, age = (table.sex == "male") * 1.0, table.age - table.age.mean()
    design = np.column_stack([male, age, np.log(table.dose), male * age])
    referee = PHReg(table.months, design, table.died, ties="efron").fit()
    assert found.names == ("sex=male", "center(age)", "np.log(dose)", "sex=male:center(age)")
    np.testing.assert_allclose(found.coefficients, referee.params, rtol=1e-6)
    np.testing.assert_allclose(found.errors, referee.bse, rtol=1e-6)
    with pytest.raises(SettingError, match="leave out the left side"):
        piebald.cox(table, client="site", time="months", event="died", formula="months ~ age")


def test_what_functions_take_from_rows_is_of_all_clients() -> None:
    table = patients()
    # no client alone has these: the sites are of different ages
    table = table.sort_values("age").assign(site=lambda rows: np.repeat(["a", "b", "c"], [100, 150, len(rows) - 250]))
    found = piebald.glm(table, client="site", formula="cost ~ bs(age, df=6) + center(dose)")
    referee = formulas.ols("cost ~ bs(age, df=6) + center(dose)", table).fit()
    np.testing.assert_allclose(np.sort(found.coefficients), np.sort(referee.params), rtol=1e-6, atol=1e-8)
    # a column's own gaps count in nothing, as in the mean of a data frame
    gaps = table.assign(dose=table.dose.where(table.index % 5 > 0))
    found = piebald.glm(gaps, client="site", formula="cost ~ center(dose)")
    referee = formulas.ols("cost ~ I(dose - mean)", gaps.assign(mean=gaps.dose.mean())).fit()
    np.testing.assert_allclose(found.coefficients, referee.params, rtol=1e-6, atol=1e-8)


SITES = "falls ~ C(arm) * x + bs(time, knots=(10, 20), lower_bound=0, upper_bound=60) + np.log1p(time)"


@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.full)])
def test_sites_get_a_plan_of_numbers_and_no_formula(secure: bool, tmp_path: Path) -> None:
    formula, columns, target = with_formula(SITES, None)
    options = GlmOptions(str(target), columns, "poisson", formula=formula)
    clients = sites(secure, tmp_path)
    found = fit_glm(clients, options)
    referee = formulas.glm(SITES, pooled(PLANS[secure]), family=sm.families.Poisson()).fit(tol=1e-14)
    np.testing.assert_allclose(np.sort(found.coefficients), np.sort(referee.params), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.sort(found.errors), np.sort(referee.bse), rtol=1e-6, atol=1e-6)
    stated = json.dumps([query.stated() for query in options.questions(clients.columns)])
    assert not any(word in stated for word in ("C(", "bs(", "np.", "~"))
    for text, reason in {"falls ~ bs(time, df=4)": "no quantiles of 'time'", "falls ~ center(x)": "no mean",
                         "falls ~ C(died)": "sites do not list values"}.items():  # fmt: skip
        formula, columns, target = with_formula(text, None)
        with pytest.raises(SettingError, match=reason):
            fit_glm(clients, GlmOptions(str(target), columns, "poisson", formula=formula))
    formula, columns, target = with_formula("falls ~ x * site", None)
    by_site = GlmOptions(str(target), columns, "poisson", formula=formula)
    if secure:
        with pytest.raises(SettingError, match="masks are to hide"):
            fit_glm(clients, by_site)
    else:
        here = formulas.glm("falls ~ x * site", pooled(PLANS[secure]), family=sm.families.Poisson()).fit(tol=1e-14)
        np.testing.assert_allclose(np.sort(fit_glm(clients, by_site).coefficients), np.sort(here.params), rtol=1e-6)


@pytest.mark.full
def test_sites_that_prepare_take_the_mean_that_they_agreed_on(agreed: Any) -> None:  # noqa: F811
    asked, ready = runtime(agreed, "model_sums")
    columns = ModelColumns(ready.clients, None, "ill", "train", {}, False)
    formula, names, target = with_formula("ill ~ center(pay) * ward", None)
    options = GlmOptions(str(target), names, "binomial", formula=formula)
    told = fit_glm(ModelClients(columns, asked, ready.work, ready.clients), options)  # type: ignore[arg-type]
    expected = piebald.glm(here(agreed[0]), formula="ill ~ center(pay) * ward", family="binomial")
    assert told.names == expected.names
    np.testing.assert_allclose(told.coefficients, expected.coefficients, rtol=1e-6)


def test_hazards_of_sites_have_formulas() -> None:
    formula, columns, _ = with_formula("C(arm) * x", None)
    found = fit_cox(sites(False, None), CoxOptions("time", "died", columns, formula=formula))
    here = piebald.cox(pooled(PLANS[False]), client="site", time="time", event="died", formula="C(arm) * x")
    np.testing.assert_allclose(found.coefficients, here.coefficients, atol=1e-10)


def test_noise_knows_the_bounds_of_splines_and_categories() -> None:
    table = patients(3000)
    options: dict[str, Any] = {"client": "site", "epsilon": 50.0, "delta": 1e-6, "bounds": {"cost": (-4, 4)}}
    formula = "cost ~ sex * bs(age, knots=(60,), lower_bound=20, upper_bound=100, degree=1)"
    found, exact = piebald.glm(table, formula=formula, **options), piebald.glm(table, client="site", formula=formula)
    assert found.names == exact.names
    assert np.abs((found.coefficients - exact.coefficients) / found.errors).max() < 5
    with pytest.raises(SettingError, match="epsilon needs bounds of column 'age:sex=female'"):
        piebald.glm(table, formula="cost ~ age:sex", **options)


FLAG = "piebald-was-here"
ATTACKS = [
    "__import__('os').system('touch {flag}')", "np.load('{flag}', allow_pickle=True)", "x.__class__.__mro__",
    "lambda: 0", "(lambda: open('{flag}', 'w'))()", "f'{{open(\"{flag}\", \"w\")}}'", "I(f\"{{__import__('os')}}\")",
    "exec('1')", "[open('{flag}', 'w') for _ in (1,)]", "{{open('{flag}', 'w')}}", "`open('{flag}', 'w')`",
    "I((y := open('{flag}', 'w')))", "np.log(open('{flag}', 'w'))", "np.log.__call__(x)", "np.linalg.inv(x)",
    "Q(open('{flag}', 'w'))", "C(open('{flag}', 'w'))", "C(x, open('{flag}', 'w'))",
    "C(x, Treatment(open('{flag}', 'w')))", "C(x, Treatment.__init__)", "bs(x, df=open('{flag}'))",
    "bs(x, knots=[open('{flag}', 'w')])", "bs(*[x], **{{}})", "bs(x, df=4, extrapolation='raise')",
    "bs(open('{flag}', 'w'), df=4)", "center(x)(x)", "center(open('{flag}', 'w'))", "I(9**9**9**9)", "I(x ** 1e9)",
    "I(x ** x)", "I(x if x else x)", "I(x < 3)", "I(x and x)", "I(x[0])", "I(not x)", "I(~x)", "I(x @ x)",
    "I(x // 2)", "I(x % 2)", "I('a')", "I(None)", "I(True)", "I(...)", "I(1j * x)", "I(b'a')", "I(await x)",
    "I((yield))", "I(*x)", "I(print)", "print(x)", "getattr(x, 'y')", "globals()", "eval('x')",
    "np.vectorize(eval)(x)", "pd.read_pickle('{flag}')", "I(x.values.tofile('{flag}'))", "os.system('{flag}')",
    "df.eval('x')", "(x + y) ** 400", "(x + y + z) ** 3 * (x + y) ** 3", "x" + " * x" * 20,
     "I(" + "-" * 900 + "x)", "+".join("abcdefgh" * 12), "x" * 2000,
    "np.log(" * 90 + "x" + ")" * 90, "1e400 + I(x * 1e400)", "bs(x, df=999)", "bs(x, df=2)", "bs(x, degree=9)",
    "bs(x, knots=(3, 2, 1), lower_bound=0, upper_bound=4)", "poly(x, 2)", "0 + x", "x - 1", "2 * x", "x | y",
    "[x ~ y]", ".", "~ ~", "x ~ y ~ x", "x +", "x y", "\x00", "x;y", "# x", "offset(x)", "C(x, Sum)",
    "C(x + y)", "scale(x)", "x %in% y ** z", "cc(x, df=4)", "te(x, y)", "I(x", "hashed(x, levels=5)",
]  # fmt: skip


@pytest.fixture
def nothing_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluated(*given: Any, **named: Any) -> Any:
        raise AssertionError(f"evaluated: {given}")

    def guarded(run: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            assert not sys._getframe(1).f_globals["__name__"].startswith(("formulaic", "piebald.inference"))
            return run(*given, **named)

        return call

    monkeypatch.setattr(builtins, "eval", guarded(eval))
    monkeypatch.setattr(builtins, "exec", guarded(exec))
    monkeypatch.setattr(evaluation, "stateful_eval", evaluated)
    monkeypatch.setattr(base, "stateful_eval", evaluated)


TABLE = pandas.DataFrame({"site": list("abcd") * 5, "x": np.arange(20.0), "y": np.arange(20) % 3, "z": 1.5})


@pytest.mark.usefixtures("nothing_is_evaluated")
@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_is_written_is_run(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = attack.format(flag=FLAG) if FLAG.split("-")[0] in attack or "{flag}" in attack or "{{" in attack else attack
    for formula in (f"y ~ {text}", text):
        with pytest.raises(SettingError):
            piebald.glm(TABLE, client="site", target="y", formula=formula, family="gaussian")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("nothing_is_evaluated")
@settings(max_examples=150, deadline=None)
@given(st.text("xyzCQIbsnp.log_()[]{}'\"`~+-*/:^|%,=0123 \n\\", max_size=40))
def test_any_text_is_a_formula_or_one_sentence(text: str) -> None:
    with suppress(SettingError):
        assert all(isinstance(name, str) for name in Formula.of(text).names)


@pytest.mark.full
def test_a_site_that_answers_reads_no_formulas() -> None:
    code = "import sys; import piebald.inference.queries.columns; assert 'formulaic' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_spline_of_rows_beyond_its_bounds_counts_them_as_there() -> None:
    spline = Spline(degree=1, knots=(0.0, 0.0, 10.0, 10.0), index=1)
    assert spline(np.array([-5.0, 0.0, 5.0, 10.0, 99.0, np.nan])).tolist()[:5] == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_the_command_takes_a_formula(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "rows.csv")
    patients().to_csv(file, index=False)
    command = [
        "glm",
        file,
        "--client",
        "site",
        "--formula",
        "died ~ sex * age + bs(dose, df=4)",
        "--family",
        "binomial",
    ]
    assert main(command) == 0
    assert "bs(dose, df=4)[4]" in capsys.readouterr().out
    assert main([*command, "--column", "age"]) == 2
    assert main([*command, "--target", "falls"]) == 2
    assert "the formula's target is 'died'" in capsys.readouterr().err
    assert main(["cox", file, "--client", "site", "--time", "months", "--event", "died", "--formula", "sex * age"]) == 0
